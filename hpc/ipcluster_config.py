"""Site-wide settings of the ranks; ipyparallel reads this file from PREFIX/etc/ipython.

The values are in PREFIX/etc/ddl-labs/site.toml, section [engines]: change them there.
`cluster.start` takes them from `c.DDLLabs`; its own arguments go first.
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path

c = get_config()  # noqa: F821 - ipyparallel defines it

prefix = Path(sys.prefix)
ranks = tomllib.loads((prefix / "etc/ddl-labs/site.toml").read_text())["engines"]
for name, value in ranks.items():
    setattr(c.DDLLabs, name, value)

# The same for `ipp.Cluster()` and the panel "IPython Parallel", which know nothing of the course.
in_a_job = int(os.environ.get("SLURM_NTASKS", "1")) > 1
submit = shutil.which("sbatch") is not None and not in_a_job
c.Cluster.engine_launcher_class = (
    "slurm" if ranks["launcher"] == "slurm" or (ranks["launcher"] == "auto" and submit) else "mpi"
)
# Engines are on other hosts than the controller, and what passes between them is encrypted.
c.Cluster.controller_ip = "*"
c.IPController.enable_curve = True
options = [*ranks["options"]]
options += [f"--{name}={ranks[name]}" for name in ("partition", "account") if ranks[name]]
c.SlurmEngineSetLauncher.batch_template_file = str(prefix / "share/ddl-labs/engines.sbatch")
c.SlurmEngineSetLauncher.namespace = {
    "ranks_per_node": ranks["ranks_per_node"],
    "time": ranks["time"],
    "srun_mpi": ranks["srun_mpi"],
    "options": "\n".join(f"#SBATCH {option}" for option in options),
    "setup": "\n".join(ranks["setup"]),
}
