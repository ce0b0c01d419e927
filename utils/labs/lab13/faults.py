"""Jobs whose ranks may die, and what failures cost, for lab 13.

    ended = faults.mpiexec(4, "train.py", "--die", "2:7")
    ended.status, ended.err

All times are in seconds.
"""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cluster.left_out import need_processes
from utils.jobs import POSIX, NeedsProcesses, mpi_job, thread_plan
from utils.jobs.start_plan import Plan, refuse_on_a_rank
from utils.labs.shared import slurm_script

from .recorded_jobs import WHEN_RANK_2_DIES

if TYPE_CHECKING:
    from utils.cluster import Ranks

# Seconds after which a job is ended.
DEADLINE = 120.0
# Seconds that a rank waits for the others. It notices a death immediately.
PATIENCE = 20.0


def mpiexec(
    n: int,
    script: str | Path,
    *arguments: object,
    survive: bool = False,
) -> mpi_job.Ended:
    """Run a script on n new ranks, some of which may die, and return how the job ended.

    Args:
        survive: whether the other ranks survive a death (`mpiexec --with-ft ulfm`).

    Returns:
        Exit status, output, errors, seconds. A status other than 0 raises no error. If this
        machine can't start ranks that are processes, you get the log of another machine.

    Raises:
        FileNotFoundError: the script doesn't exist.
        NeedsProcesses: there is no such log, because rank 2 doesn't die in step 7.
        ValueError, RanksError: this machine can't start such ranks.
    """
    _require(script)
    if reason := thread_plan.missing():
        if arguments[-2:] != ("--die", "2:7"):
            need_processes("mpiexec starts ranks that are processes. Read the two logs above.")
        print(f"Here {reason}, so this is the log of a job on another machine.\n")
        return WHEN_RANK_2_DIES[survive]
    plan = Plan(n, timeout=PATIENCE, launcher="mpiexec", fault_tolerant=survive)
    return mpi_job.run_on(plan, [str(script), *map(str, arguments)], DEADLINE)


def torchrun(n: int, script: str | Path, *arguments: object, restarts: int) -> mpi_job.Ended:
    """Run a script on n processes of torchrun, which restarts all of them if one dies.

    Raises:
        NeedsProcesses: this system has no signals that kill a process.
    """
    _require(script)
    if not POSIX:
        need_processes("torchrun watches processes. Read the text below, which says what it does.")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={n}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return mpi_job.run([*command, str(script), *map(str, arguments)], environment, DEADLINE)


def survivors(ranks: Ranks) -> list[int]:
    """Return the ranks that are alive.

    Raises:
        NeedsProcesses: the ranks have no MPI, which could end all of them.
    """
    if not ranks.have_mpi:
        raise NeedsProcesses(
            "MPI did not end the other ranks, because these ranks work without MPI. The text below "
            "says what happens to ranks of MPI."
        )
    up = ranks.running()
    return [] if up.over() else up.living()


def _require(script: str | Path) -> None:
    """Raise an error if the script doesn't exist, or if this process is a rank."""
    refuse_on_a_rank()
    if not Path(script).is_file():
        raise FileNotFoundError(f"There is no {script}. Run the cell that writes it")


# -- what failures cost ---------------------------------------------------------------------------


def failure_times(mtbf: float, until: float, seed: int) -> list[float]:
    """Return times of independent failures, which come every `mtbf` seconds on average."""
    draw = random.Random(seed)
    now = 0.0
    times = []
    while now < until:
        now += draw.expovariate(1 / mtbf)
        times.append(now)
    return times


def overhead(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Return the expected seconds for each second of work, minus 1, with independent failures.

    Equation 13 of J. T. Daly (2006) has e^(R/M) M (e^((τ+δ)/M) − 1) seconds for each τ of work.
    """
    return math.exp(restart / mtbf) * mtbf * math.expm1((interval + save) / mtbf) / interval - 1


def daly(save: float, mtbf: float) -> float:
    """Return Daly's interval, which has two more terms than Young's; mtbf if saving takes too long.

    See equation 37 of J. T. Daly, *A higher order estimate of the optimum checkpoint interval*
    (2006).
    """
    if save >= 2 * mtbf:
        return mtbf
    share = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - save


# -- a batch job that comes back ------------------------------------------------------------------

_REQUEUED = """\
#!/bin/bash -l
#SBATCH --job-name=resumable
#SBATCH --ntasks={ranks}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
#SBATCH --output=resumable-%j.out
{options}
# Use the environment of the course, even if the submitting shell had another one.
{setup}
prefix="${{DDL_LABS_PREFIX:-{prefix}}}"
export PATH="$prefix/bin:$PATH"
unset SLURM_EXPORT_ENV SLURM_GET_USER_ENV

# Slurm sends USR1 to this script 60 s before the time limit. mpiexec passes it to the
# ranks, which save and end. Then the job goes back into the queue, and continues later.
again() {{
    kill -USR1 "$job"
    wait "$job"
    scontrol requeue "$SLURM_JOB_ID"
}}
trap again USR1

mpiexec -n {ranks} python {command} &
job=$!
wait "$job"
"""


def requeued(ranks: int, command: str, time: str = "01:00:00") -> str:
    """Return a batch script whose job saves shortly before its time limit, and is requeued.

    Args:
        ranks: how many ranks the job has.
        command: the training script with its arguments; it saves and ends on SIGUSR1.
        time: the time limit from one start to the next.
    """
    return _REQUEUED.format(ranks=ranks, command=command, time=time, **slurm_script.of_the_site())
