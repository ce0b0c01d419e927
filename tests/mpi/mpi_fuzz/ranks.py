"""Many programs in one job: each rank runs them all, and rank 0 prints what came of each.

Every program has a default group of its own. After one that went wrong, the next has to work.
"""

from __future__ import annotations

import faulthandler
import json
import time
import traceback
from pathlib import Path

#: Seconds for a program; after that the rank says where it is, and ends the job.
DEADLINE = 100.0
#: Seconds that a rank which was stopped leaves to the one that was the cause.
GRACE = 2.0


def main(file: str, tests: str) -> None:
    """Run the programs of a file, a line of JSON for each."""
    from mpi4py import MPI

    from .text import python

    world = MPI.COMM_WORLD.Dup()
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        program = json.loads(line)
        if world.rank == 0:
            print(f"BEGIN {program['seed']}", flush=True)
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        outcome = run(python(program, tests), "fault" in program)
        if outcome["error"] and "fault" not in program:
            _end(world, program, outcome)
        outcomes = world.gather(outcome, root=0)
        faulthandler.cancel_dump_traceback_later()
        if world.rank == 0:
            _say(program, outcomes)


def _say(program: dict, outcomes: list[dict]) -> None:
    print("END " + json.dumps({"seed": program["seed"], "ranks": outcomes}), flush=True)


def _end(world, program: dict, outcome: dict) -> None:
    """A right program went wrong on this rank: the job is of no use any more."""
    if outcome["error"] == "CommunicationStopped":
        time.sleep(GRACE)  # the rank that it follows has more to say
    _say(program, [outcome | {"rank": world.rank}])
    world.Abort(3)


def run(text: str, faulty: bool) -> dict:
    """Run a program on this rank.

    Returns:
        ``error``, the class of its error, or nothing; ``text``; ``where``, the line that errors of
        the backend have as an attribute; ``seconds``.
    """
    import torch.distributed as dist

    from .text import NAME

    start = time.perf_counter()
    told = {"error": "", "text": ""}
    try:
        exec(compile(text, NAME, "exec"), {"__name__": "program"})
    except Exception as error:
        said = str(error) if faulty else traceback.format_exc(limit=-8)
        told = {"error": type(error).__name__, "text": said, "where": getattr(error, "where", "")}
    told["seconds"] = round(time.perf_counter() - start, 3)
    if dist.is_initialized():
        dist.destroy_process_group()
    return told
