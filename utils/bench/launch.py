"""From a plain shell: the ranks are started here. Under mpiexec they are there already."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys

from utils import itself
from utils.bench.options import OPERATIONS, Settings, as_arguments

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
    from torch_mpi.launcher import name_library

    name_library()  # before mpi4py is imported
    from utils.bench.on_ranks import main as on_this_rank

    return on_this_rank(Settings.of(options), options.n)


def _start_ranks(options: argparse.Namespace) -> int:
    from utils.jobs.plan import Plan, RanksError, Request

    n = options.n or 2
    if n < 2:
        print("bench: -n must be at least 2, one rank has nobody to talk to", file=sys.stderr)
        return 2
    try:
        plan = Plan.checked(Request(n, timeout=60.0, launcher="mpiexec"))
    except (RanksError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    command = [plan.launcher.path, "-n", str(n), *plan.mpi_args]
    code = "from utils.__main__ import main; sys.exit(main())"
    command += itself.command(code, "bench", *as_arguments(options))
    return _run(command, os.environ | plan.environment, options.deadline + GRACE)


def _run(command: list[str], environment: dict[str, str], seconds: float) -> int:
    """Run `command` in a process group of its own; none of it is left, however this ends."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"bench: the ranks were not done after {seconds:g} s: ended", file=sys.stderr)
        return 124
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """Kill mpiexec and the ranks, which Open MPI puts in process groups of their own."""
    import psutil

    members = []
    with contextlib.suppress(psutil.NoSuchProcess):
        members = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(5)
