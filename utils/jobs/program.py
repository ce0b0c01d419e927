"""A program on ranks of its own, from a notebook as from a terminal."""

from __future__ import annotations

from pathlib import Path

from utils.jobs import RanksError, mpi_job
from utils.jobs.start_plan import Plan, refuse_on_a_rank, usable_cores

DEADLINE = 60.0
# Seconds that a rank waits for the others before it says who is missing; less than the deadline.
PATIENCE = 20.0


def mpiexec(n: int, script: str | Path, *arguments: object, deadline: float = DEADLINE) -> None:
    """Run a Python script on n MPI ranks; print the command, and what the ranks print.

    The command is the one to type in a terminal. The ranks get what `cluster.start` gives to a
    notebook's: its mpiexec, permission to run as root, and to be more than there are cores.

    Args:
        n: number of ranks.
        script: path of the program.
        arguments: of the program.
        deadline: seconds, after which the job is ended.

    Raises:
        FileNotFoundError: there is no script.
        TypeError, ValueError: this machine can't start so many ranks.
        RanksError: there is no usable mpiexec, this process is a rank, or the job fails or is late;
            the message has the job's last words.
    """
    refuse_on_a_rank()
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no {script}: run the cell that writes it")
    plan = Plan(n, timeout=min(PATIENCE, deadline / 2), launcher="mpiexec")
    words = [str(script), *map(str, arguments)]
    more = ["--oversubscribe"] if plan.launcher.is_open_mpi and n > usable_cores() else []
    print("$", *["mpiexec", "-n", str(n), *more, "python", *words], flush=True)
    ended = mpi_job.run_on(plan, words, deadline)
    print(ended.out, end="", flush=True)
    if ended.status:
        late = ended.status == mpi_job.LATE
        how = f"was ended after {deadline:g} s" if late else f"ended with status {ended.status}"
        raise RanksError(f"the program {how}.\n{ended.err.rstrip()}")
