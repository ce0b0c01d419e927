"""hpc/jupyterhub_config.py as it is, with a password, and a token for the tests."""

import os
from pathlib import Path

HPC = Path(__file__).resolve().parents[2] / "hpc"

c = get_config()  # noqa: F821 - JupyterHub defines it
load_subconfig(str(HPC / "jupyterhub_config.py"))  # noqa: F821 - traitlets defines it
import partitions  # noqa: E402 - that file puts hpc/ on the path
from job_queue import COMMAND  # noqa: E402
from spawner import kernel_culling  # noqa: E402

c.SharedPasswordAuthenticator.user_password = os.environ["HUB_TEST_PASSWORD"]
c.JupyterHub.services.append({"name": "tests", "api_token": os.environ["HUB_TEST_TOKEN"]})
scopes = ["admin:users", "admin:servers", "access:servers", "tokens", "list:users"]
c.JupyterHub.load_roles.append({"name": "tests", "services": ["tests"], "scopes": scopes})
c.JupyterHub.pid_file = os.environ["HUB_TEST_PID_FILE"]
c.Spawner.poll_interval = 2


def patience(spawner):
    """How long a start may take, in seconds, where a test says so; Slurm answers slowly then.

    The end of patience comes while the hub waits for such an answer, and before the next one.
    """
    told = Path(os.environ["HUB_TEST_PATIENCE"])
    queue = type(spawner).queue
    if told.exists():
        spawner.start_timeout = int(told.read_text(encoding="utf-8"))
        queue = type(queue)(command=("sh", "-c", 'sleep 3; exec "$@"', "sh", *COMMAND))
    culled = Path(os.environ["HUB_TEST_CULLED"])
    if culled.exists():
        spawner.args = kernel_culling(int(culled.read_text(encoding="utf-8")), look=2)
    if Path(os.environ["HUB_TEST_SLOW"]).exists():
        # Longer than the second that JupyterHub gives to a start which is stopped.
        spawner.batch_submit_cmd += "; sleep 3"
    if spawner.user.name.startswith("crowd"):
        stand_in = Path(__file__).with_name("stand_in_server.py")
        spawner.batchspawner_singleuser_cmd = f"/usr/bin/python3 -I {stand_in}"
    spawner.queue, spawner.startup_poll_interval = queue, 0.1


# Where a test says so, nobody knows what the partitions give: Slurm takes its time.
SINFO = ("sh", "-c", '[ ! -e "$0" ] || exec sleep 30; exec "$@"', os.environ["HUB_TEST_BLIND"])
c.JupyterHub.spawner_class.partitions = partitions.poll((*SINFO, *partitions.COMMAND), period=0.1)
c.Spawner.pre_spawn_hook = patience
