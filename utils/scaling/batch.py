"""The training script on a cluster: one Slurm job that runs it on 1, 2, 4, … ranks.

    Path("series.sh").write_text(series(4, 2, 24, "--strong", 1024))

It lies beside train.py and images.pt, and `sbatch series.sh` hands it in. Each rank count leaves a
file of JSON, which :func:`utils.scaling.runs.series` reads.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

#: The environment that jobs get: the one that this process runs in.
PREFIX = sys.prefix

_SERIES = """\
#!/bin/bash -l
#SBATCH --job-name=scaling
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={domains}
#SBATCH --cpus-per-task={cores}
#SBATCH --time={time}
#SBATCH --output=scaling-%j.out
{options}
# The environment of the course, also if the shell that handed this in had another one.
{setup}
prefix="${{DDL_LABS_PREFIX:-{prefix}}}"
export PATH="$prefix/bin:$PATH"
python -c "import torch_mpi, utils.models" || {{
    echo "The course is not installed in $prefix: DDL_LABS_PREFIX=… sbatch series.sh" >&2
    exit 2
}}
# With these set, mpiexec would start the ranks on other nodes without PATH.
unset SLURM_EXPORT_ENV SLURM_GET_USER_ENV

export OMP_NUM_THREADS={cores}
results="results/${{SLURM_JOB_ID:-here}}"
for ranks in {counts}; do
    mpiexec -n $ranks --map-by ppr:1:numa:PE={cores} --bind-to core --report-bindings \\
        python train.py {arguments} \\
        --out "$results/$ranks.json" >/dev/null || exit
done
"""


def series(nodes: int, domains: int, cores: int, *arguments: object, time: str = "00:20:00") -> str:
    """The text of a batch script: train.py on 1, 2, 4, … ranks, up to one for each domain.

    Args:
        nodes, domains, cores: nodes, NUMA domains of a node, cores of a domain. Ranks fill a node
            before the next one begins, each with all cores of a domain.
        arguments: of train.py.
        time: limit of the job.

    The environment is that of this process; `etc/ddl-labs/site.toml` in it, if there is one, says
    what the site wants in addition.
    """
    site = _site()
    options = [f"#SBATCH --{name}={site[name]}" for name in ("partition", "account") if site[name]]
    most = nodes * domains
    return _SERIES.format(
        nodes=nodes,
        domains=domains,
        cores=cores,
        time=time,
        options="\n".join([*options, ""]),
        setup="\n".join(site["setup"]) or "# Here would be: module load …",
        prefix=PREFIX,
        counts=" ".join(str(2**k) for k in range(most.bit_length())),
        arguments=shlex.join(map(str, arguments)),
    )


def submit(script: Path) -> str:
    """Hand a batch script in, in its own folder; what `sbatch` says."""
    command = ["sbatch", script.name]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def _site() -> dict:
    """The site's `partition`, `account` and `setup`; see hpc/site.toml."""
    file = Path(PREFIX, "etc/ddl-labs/site.toml")
    found = tomllib.loads(file.read_text())["slurm"] if file.is_file() else {}
    return {"partition": "", "account": "", "setup": []} | found
