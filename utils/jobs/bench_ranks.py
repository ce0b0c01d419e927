"""``ddl-labs bench``: from a plain shell it starts ranks; under mpiexec they are there already."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys

from utils.jobs import python_words
from utils.mpi.benchmark.options import OPERATIONS, Settings, as_arguments

# One of these is set on every rank: by Open MPI, by MPICH and Intel MPI, by srun with PMIx.
RANK_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
# The ranks watch the deadline themselves and say where they are; mpiexec gets this much longer.
GRACE = 15.0


def main(options: argparse.Namespace) -> int:
    """Measure, on the ranks of this job or on ranks of its own; the exit status."""
    if options.plot and options.only and not set(options.only) & set(OPERATIONS):
        print(f"bench: --plot draws {', '.join(OPERATIONS)}: add one to --only", file=sys.stderr)
        return 2
    if not any(name in os.environ for name in RANK_VARIABLES):
        return _start_ranks(options)
    from torch_mpi.library import name_library

    name_library()  # before mpi4py is imported
    from utils.mpi.benchmark.on_ranks import main as on_this_rank

    return on_this_rank(Settings.of(options), options.n)


def _start_ranks(options: argparse.Namespace) -> int:
    from utils.jobs import RanksError, mpi_job
    from utils.jobs.start_plan import Plan

    n = options.n or 2
    if n < 2:
        print("bench: -n must be at least 2, one rank has nobody to talk to", file=sys.stderr)
        return 2
    try:
        plan = Plan(n, timeout=60.0, launcher="mpiexec")
    except (RanksError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with contextlib.closing(mpi_job.Python(plan)) as python:
        code = "from utils.__main__ import main; sys.exit(main())"
        command = python.job(*python_words(code, "bench", *as_arguments(options)))
        seconds = options.deadline + GRACE
        try:
            ended = mpi_job.run(command, os.environ | plan.environment, seconds, capture=False)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    if ended.status == mpi_job.LATE:
        print(f"bench: the ranks were not done after {seconds:g} s: ended", file=sys.stderr)
    return ended.status
