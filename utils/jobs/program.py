"""Runs a program on new ranks from a notebook, in the same way as from a terminal."""

from __future__ import annotations

from pathlib import Path

from utils.jobs import RanksError, mpi_job, program_here, thread_plan
from utils.jobs.start_plan import Plan, usable_cores

DEADLINE = 60.0
# Seconds that a rank waits before it says which ranks are missing; less than the deadline.
PATIENCE = 20.0


def mpiexec(n: int, script: str | Path, *arguments: object, deadline: float = DEADLINE) -> None:
    """Run a Python script on n MPI ranks; print the command and the output of the ranks.

    You could type the same command in a terminal. The ranks get the same settings as the ranks of
    `cluster.start`: its mpiexec, permission to run as root, and to outnumber the cores. If
    `cluster.start` starts threads, the ranks are threads of one new process.

    Args:
        n: number of ranks.
        script: path of the program.
        arguments: arguments of the program.
        deadline: seconds, after which the job is stopped.

    Raises:
        FileNotFoundError: the script does not exist.
        TypeError, ValueError: this machine can't start so many ranks.
        RanksError: there is no usable mpiexec, this process is a rank, or the job fails or is late;
            the message has the job's last words.
    """
    thread_plan.refuse_on_any_rank()
    if not Path(script).is_file():
        raise FileNotFoundError(f"There is no {script} yet. Run the cell that writes the file.")
    words = [str(script), *map(str, arguments)]
    if thread_plan.is_chosen(None):
        print(
            f"As {n} threads of one process, instead of: mpiexec -n {n} python", *words, flush=True
        )
        ended = program_here.run(n, words, deadline)
    else:
        plan = Plan(n, timeout=min(PATIENCE, deadline / 2), launcher="mpiexec")
        more = ["--oversubscribe"] if plan.launcher.is_open_mpi and n > usable_cores() else []
        print("$", *["mpiexec", "-n", str(n), *more, "python", *words], flush=True)
        ended = mpi_job.run_on(plan, words, deadline)
    print(ended.out, end="", flush=True)
    if ended.status:
        late = ended.status == mpi_job.LATE
        how = f"was stopped after {deadline:g} s" if late else f"ended with status {ended.status}"
        raise RanksError(f"The program {how}.\n{ended.err.rstrip()}")
