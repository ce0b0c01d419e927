"""``ddl-labs bench``: its options, and the start of its ranks.

From a plain shell the command starts its ranks. Under mpiexec the ranks are already running.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from pathlib import Path

from utils.jobs import python_words
from utils.mpi.benchmark import KI, MI, OPERATIONS

# Every rank has one of these, set by Open MPI, by MPICH and Intel MPI, or by srun with PMIx.
RANK_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
# The ranks watch the deadline themselves and report where they are, so mpiexec gets more time.
GRACE = 15.0


def main(options: argparse.Namespace) -> int:
    """Measure on the ranks of this job, or start ranks to measure on; return the exit status."""
    if not any(name in os.environ for name in RANK_VARIABLES):
        return _start_ranks(options)
    from torch_mpi.library import name_library

    name_library()  # before mpi4py is imported
    from utils.mpi.benchmark.measurement import main as on_this_rank

    return on_this_rank(options)


def _start_ranks(options: argparse.Namespace) -> int:
    from utils.jobs import RanksError, mpi_job
    from utils.jobs.start_plan import Plan

    n = options.n or 2
    if n < 2:
        print("bench: one rank has no partner to talk to. Use -n 2 or more.", file=sys.stderr)
        return 2
    try:
        plan = Plan(n, timeout=60.0, launcher="mpiexec")
    except (RanksError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code = "from utils.__main__ import main; sys.exit(main())"
    words = python_words(code, *shlex.split(options.line)[1:])
    seconds = options.deadline + GRACE
    try:
        ended = mpi_job.run_on(plan, words, seconds, capture=False)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if ended.status == mpi_job.LATE:
        print(f"bench: the ranks were stopped after {seconds:g} s.", file=sys.stderr)
    return ended.status


# --- options -----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    parser.add_argument("-n", type=_positive, metavar="N", help="number of ranks to start: 2")
    parser.add_argument(
        "--sizes", type=_sizes, metavar="SIZES", help="such as 4,1K,1M: 4 B to 64 MiB, × 4 each"
    )
    parser.add_argument("--rounds", type=_positive, metavar="R", help="take medians of R rounds: 5")
    names = ",".join(OPERATIONS)
    parser.add_argument("--only", type=_operations, metavar="PARTS", help=f"some of {names}")
    parser.add_argument("--quick", action="store_true", help="measure few sizes in 2 rounds")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write every number to FILE")
    parser.add_argument(
        "--deadline", type=_positive, default=600, metavar="S", help="end the ranks after: 600 s"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _sizes(text: str) -> list[int]:
    return sorted({_size(word.strip()) for word in text.split(",")})


def _size(word: str) -> int:
    match = re.fullmatch(r"(\d+) ?([KMG]?)(?:iB|B)?", word, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{word!r} is not a size such as 4, 16K or 64MiB")
    nbytes = int(match[1]) * {"": 1, "K": KI, "M": MI, "G": KI * MI}[match[2].upper()]
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{word!r} is not a multiple of 4 bytes (float32)")
    return nbytes


def _operations(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in OPERATIONS:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(OPERATIONS)}")
    return [name for name in OPERATIONS if name in words]


def _file(text: str) -> Path:
    path = Path(text).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that you can write")
    return path
