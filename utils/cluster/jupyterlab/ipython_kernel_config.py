"""Settings of kernels in the course's environment; pyproject.toml installs it to etc/ipython."""

c = get_config()  # noqa: F821 - IPython defines it

c.InteractiveShellApp.extensions = ["utils.cluster.no_ranks"]
