"""A Slurm job that runs a training script on 1, 2, 4, … ranks, and a look into batch scripts.

    Path("series.sh").write_text(series(4, 2, 24, "--strong", 1024))

The script must be next to train.py and images.pt, and `sbatch series.sh` submits it. Each number of
ranks leaves a JSON file, which :func:`utils.labs.lab05.runs.series` reads.

You can look into any batch script without a cluster: :func:`request` returns what it asks for, and
:func:`.script_runs.launches` returns what it would start.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from utils.jobs import slurm

#: Jobs get the environment in which this process runs.
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
# Use the environment of the course, even if the submitting shell had another one.
{setup}
prefix="${{DDL_LABS_PREFIX:-{prefix}}}"
export PATH="$prefix/bin:$PATH"
python -c "import torch_mpi, utils.models" || {{
    echo "The course is not installed in $prefix: DDL_LABS_PREFIX=… sbatch series.sh" >&2
    exit 2
}}
# With these variables, mpiexec would start the ranks on other nodes without PATH.
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
    """Return a batch script that runs train.py on 1, 2, 4, … ranks, up to one for each domain.

    Args:
        nodes, domains, cores: nodes, NUMA domains of a node, cores of a domain. Ranks fill one node
            before the next, and each rank gets all cores of a domain.
        arguments: the arguments of train.py.
        time: the job's time limit.

    The job gets the environment of this process. If it contains `etc/ddl-labs/site.toml`, this file
    says what the site needs in addition.
    """
    most = nodes * domains
    return _SERIES.format(
        nodes=nodes,
        domains=domains,
        cores=cores,
        time=time,
        **of_the_site(),
        counts=" ".join(str(2**k) for k in range(most.bit_length())),
        arguments=shlex.join(map(str, arguments)),
    )


# With these variables, sbatch ignores the script's line; the hub sets the first one.
_INSTEAD = {"SBATCH_PARTITION": "--partition", "SBATCH_TIMELIMIT": "--time"}


def submit(script: Path) -> str:
    """Submit a batch script in its folder, and return what `sbatch` says.

    A script that asks for more than its partition has isn't submitted, and the text says what is
    lacking. A job that can never start stays in the queue, and the text says so.
    """
    instead = {name: os.environ[name] for name in _INSTEAD if os.environ.get(name)}
    asked = request(script.read_text(encoding="utf-8").splitlines())
    asked |= {_INSTEAD[name]: value for name, value in instead.items()}
    lack = slurm.shortfall(asked)
    if lack:
        counts = (f" {name}={value} overrides the script." for name, value in instead.items())
        return (
            f"Not submitted, because it could never start: {lack}. Ask for less.{''.join(counts)}"
        )
    command = ["sbatch", script.name]
    done = subprocess.run(
        command, cwd=script.parent, capture_output=True, timeout=60, encoding="utf-8"
    )
    reply = done.stdout + done.stderr
    job = re.search(r"Submitted batch job (\d+)", reply)
    never = slurm.why_never(job[1]) if job else ""
    if never:
        reply += f"The job can never start: {never}. Cancel it: scancel {job[1]}\n"
    return reply


def of_the_site() -> dict[str, str]:
    """Return what the site adds to each batch script: ``options``, ``setup``, ``prefix``.

    hpc/site.toml describes the site's `partition`, `account`, `options` and `setup`.
    """
    file = Path(PREFIX, "etc/ddl-labs/site.toml")
    site = tomllib.loads(file.read_text(encoding="utf-8"))["slurm"] if file.is_file() else {}
    options = [f"--{name}={site[name]}" for name in ("partition", "account") if site.get(name)]
    options += site.get("options", [])
    return {
        "options": "".join(f"#SBATCH {option}\n" for option in options),
        "setup": "\n".join(site.get("setup", []))
        or "# On a cluster, this line loads modules: module load …",
        "prefix": PREFIX,
    }


# --- what a script does ------------------------------------------------------------------------


_LONG = {"-N": "--nodes", "-n": "--ntasks", "-np": "--ntasks", "--np": "--ntasks"}
_LONG |= {"-c": "--cpus-per-task", "-t": "--time", "-p": "--partition"}
_LONG |= {"--cpus-per-rank": "--cpus-per-proc"}


def request(lines: Iterable[str]) -> dict[str, str]:
    """Return what the `#SBATCH` lines ask for, by the long names of the options."""
    asked = {}
    for line in lines:
        if line.startswith("#SBATCH"):
            words = shlex.shlex(line.removeprefix("#SBATCH"), posix=True, punctuation_chars=False)
            words.whitespace_split = True
            words.commenters = "#"
            words.quotes = ""
            asked |= options(list(words))
    return asked


def options(words: list[str]) -> dict[str, str]:
    """Return {"--nodes": "4"} of "-N 4", "-N4", or "--nodes=4"; the first one counts."""
    values: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        attached = re.fullmatch(r"(-[Nnct](?=\d)|-p)(\S+)", word)
        if attached:
            name, value = attached.groups()
        elif not equals and not following.startswith("-"):
            value = following
        if name.startswith("-"):
            values.setdefault(_LONG.get(name, name), value)
    return values


def minutes(limit: str) -> float | None:
    """Return the minutes of a time limit as Slurm reads it; None if Slurm can't read it."""
    form = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not form:
        return None
    days, first, second, third = (int(part or 0) for part in form.groups())
    if form[1] is None and form[4] is None:  # minutes, or minutes:seconds
        return first + second / 60
    return 1440 * days + 60 * first + second + third / 60
