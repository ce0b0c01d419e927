"""Settings of kernels in the course's environment; pyproject.toml installs it to etc/ipython."""

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - IPython defines it

c.InteractiveShellApp.extensions = ["utils.cluster.no_ranks"]
