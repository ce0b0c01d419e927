"""JupyterHub on Slurm. What a site changes is in site.toml, not here.

    jupyterhub -f hpc/jupyterhub_config.py

DDL_LABS_SITE names another site.toml. CONFIGPROXY_AUTH_TOKEN is the secret that the hub and its
proxy share: the proxy is a service of its own, and notebooks stay connected when the hub restarts.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

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

# --- servers ----------------------------------------------------------------------------------
c.JupyterHub.spawner_class = spawner.LabSpawner.for_site(site)
c.Spawner.cmd = [f"{site.prefix}/bin/jupyterhub-singleuser"]
c.Spawner.default_url = "/lab"
c.Spawner.start_timeout = hub.start_timeout
c.Spawner.http_timeout = 120
# The page that tells where the job is comes at once.
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}
# Seconds until a job that ended is noticed, which costs one `squeue` per student each time.
c.Spawner.poll_interval = 30
c.LabSpawner.batchspawner_singleuser_cmd = f"{site.prefix}/bin/batchspawner-singleuser"
c.LabSpawner.exec_prefix = hub.as_user
c.LabSpawner.batch_script = (HERE / "slurm" / "server.sbatch").read_text()
c.LabSpawner.req_prologue = "\n".join([*site.slurm.setup, f'export PATH="{site.prefix}/bin:$PATH"'])

# A hub that restarts finds its students' jobs again.
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = False
