"""The site's settings of ranks, in a file that IPython finds in PREFIX/etc/ipython.

Change the values in PREFIX/etc/ddl-labs/site.toml, sections [slurm] and [engines], and not here.
`cluster.start` reads them from `c.DDLLabs`, but prefers its own arguments.
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path

c = get_config()  # noqa: F821 - IPython defines it

prefix = Path(sys.prefix)
site = tomllib.loads((prefix / "etc/ddl-labs/site.toml").read_text())
slurm, ranks = site["slurm"], site["engines"]
for name, value in ranks.items():
    setattr(c.DDLLabs, name, value)
for name in ("partition", "account"):
    setattr(c.DDLLabs, name, slurm[name])
c.DDLLabs.options = [*slurm["options"], *ranks["options"]]

# `ipp.Cluster()` and the panel "IPython Parallel" don't read `c.DDLLabs`, so they need these.
has_room = int(os.environ.get("SLURM_NTASKS", "1")) > 1
own_job = ranks["launcher"] == "slurm" or (ranks["launcher"] == "auto" and not has_room)
c.Cluster.engine_launcher_class = "slurm" if own_job and shutil.which("sbatch") else "mpi"
# Engines may be on other hosts than the controller, so their messages are encrypted.
c.Cluster.controller_ip = "*"
c.IPController.enable_curve = True
options = [f"--{name}={slurm[name]}" for name in ("partition", "account") if slurm[name]]
if ranks["ranks_per_node"]:
    options.append(f"--ntasks-per-node={ranks['ranks_per_node']}")
c.SlurmEngineSetLauncher.batch_template_file = str(prefix / "share/ddl-labs/engines.sbatch")
c.SlurmEngineSetLauncher.namespace = {
    "time": ranks["time"],
    "srun_mpi": ranks["srun_mpi"] or "pmix",
    "options": "\n".join(f"#SBATCH {option}" for option in [*options, *c.DDLLabs.options]),
    "job_sh": str(prefix / "etc/ddl-labs/job.sh"),
}
