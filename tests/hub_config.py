"""hpc/jupyterhub_config.py as it is, with a password, and a token for the tests."""

import os
from pathlib import Path

HPC = Path(__file__).resolve().parents[1] / "hpc"

c = get_config()  # noqa: F821 - JupyterHub defines it
load_subconfig(str(HPC / "jupyterhub_config.py"))  # noqa: F821 - traitlets defines it

c.SharedPasswordAuthenticator.user_password = os.environ["HUB_TEST_PASSWORD"]
c.JupyterHub.services = [{"name": "tests", "api_token": os.environ["HUB_TEST_TOKEN"]}]
scopes = ["admin:users", "admin:servers", "access:servers", "tokens", "list:users"]
c.JupyterHub.load_roles = [{"name": "tests", "services": ["tests"], "scopes": scopes}]
c.JupyterHub.pid_file = os.environ["HUB_TEST_PID_FILE"]
c.Spawner.poll_interval = 2


def patience(spawner):
    """How long a start may take, in seconds, where a test says so; Slurm answers slowly then.

    The end of patience comes while the hub waits for such an answer, and before the next one.
    """
    told = Path(os.environ["HUB_TEST_PATIENCE"])
    query = type(spawner).batch_query_cmd.default_value
    if told.exists():
        spawner.start_timeout = int(told.read_text())
        query = f"sleep 3; {query}"
    spawner.batch_query_cmd, spawner.startup_poll_interval = query, 0.1


c.Spawner.pre_spawn_hook = patience
