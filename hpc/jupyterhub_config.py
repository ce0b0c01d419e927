"""The configuration of JupyterHub on Slurm. Change site.toml, and not this file.

    jupyterhub -f hpc/jupyterhub_config.py

You can name another site.toml by DDL_LABS_SITE. CONFIGPROXY_AUTH_TOKEN is the secret that the hub
and its proxy share. The proxy is a separate service, so that notebooks stay connected while the hub
restarts.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Prefer this clone's `utils`, because the environment may have an older one during an upgrade.
sys.path[:0] = [str(HERE), str(HERE.parent)]

import accounts  # noqa: E402
import job_pages  # noqa: E402
import settings  # noqa: E402
import spawner  # noqa: E402

site = settings.read(Path(os.environ.get("DDL_LABS_SITE", HERE / "site.toml")))
hub = site.hub
runtime = Path(hub.runtime_dir)
runtime.mkdir(mode=0o700, parents=True, exist_ok=True)

c = get_config()  # noqa: F821 - JupyterHub defines it

# --- addresses --------------------------------------------------------------------------------
c.JupyterHub.bind_url = hub.bind_url
c.JupyterHub.hub_ip = hub.hub_ip
if hub.connect_ip:
    c.JupyterHub.hub_connect_ip = hub.connect_ip
c.ConfigurableHTTPProxy.api_url = hub.proxy_api
c.ConfigurableHTTPProxy.should_start = False
if not os.environ.get("CONFIGPROXY_AUTH_TOKEN"):
    raise SystemExit(
        "CONFIGPROXY_AUTH_TOKEN is not set. Make a secret with `openssl rand -hex 32` and give it "
        "to configurable-http-proxy and to JupyterHub, see hpc/README.md."
    )
c.JupyterHub.db_url = f"sqlite:///{runtime}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = str(runtime / "cookie_secret")

# --- users ------------------------------------------------------------------------------------
c.JupyterHub.authenticator_class = hub.authenticator
c.Authenticator.allow_all = hub.allow_all
c.Authenticator.allowed_users = set(hub.allowed)
c.Authenticator.admin_users = set(hub.admins)
c.Authenticator.post_auth_hook = accounts.hook(hub.minimum_uid)

# --- servers ----------------------------------------------------------------------------------
c.JupyterHub.spawner_class = spawner.LabSpawner.for_site(site)
c.Spawner.cmd = [f"{site.environment}/bin/jupyterhub-singleuser"]
c.Spawner.default_url = "/lab"
c.JupyterHub.template_paths = [str(HERE / "templates")]
job_pages.register()
c.Spawner.start_timeout = hub.start_timeout
c.Spawner.http_timeout = 120
# Show the page with the job's progress without a delay.
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}
# Seconds until the hub notices that a job has ended. All students share one `squeue`: job_queue.py.
c.Spawner.poll_interval = 10
c.JupyterHub.concurrent_spawn_limit = hub.starts_at_once
c.JupyterHub.active_server_limit = hub.servers_at_most
c.LabSpawner.batchspawner_singleuser_cmd = f"{site.environment}/bin/batchspawner-singleuser"
c.LabSpawner.exec_prefix = hub.as_user
c.LabSpawner.batch_script = (HERE / "slurm" / "server.sbatch").read_text()
# A job resolves the link once, at its start, so an update changes only later jobs.
c.LabSpawner.req_prologue = "\n".join([
    f'environment="$(readlink -f {site.environment})"',
    '. "$environment/etc/ddl-labs/job.sh"',
    'export PATH="$environment/bin:$PATH"',
])

# --- idle servers and kernels ------------------------------------------------------------------
if hub.idle_kernel:
    c.Spawner.args = spawner.kernel_culling(60 * hub.idle_kernel)
c.JupyterHub.services, c.JupyterHub.load_roles = [], []
if hub.idle_server:
    command = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={60 * hub.idle_server}"]
    c.JupyterHub.services.append({"name": "idle-culler", "command": command})
    scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
    c.JupyterHub.load_roles.append({
        "name": "idle-culler",
        "scopes": scopes,
        "services": ["idle-culler"],
    })

# Keep the students' jobs while the hub restarts.
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = False

# --- the site's own configuration --------------------------------------------------------------
if hub.local_config:
    if not Path(hub.local_config).is_file():
        raise SystemExit(f"site.toml: local_config = {hub.local_config!r}: there is no such file.")
    load_subconfig(hub.local_config)  # noqa: F821 - traitlets defines it
