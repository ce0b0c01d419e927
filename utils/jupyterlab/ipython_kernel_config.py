"""Settings of kernels in the course's environment; `make env` links it into .venv/etc/ipython."""

c = get_config()  # noqa: F821 - IPython defines it

c.InteractiveShellApp.extensions = ["utils.no_ranks"]
