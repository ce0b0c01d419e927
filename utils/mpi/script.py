"""The end of a program on many ranks: one explanation on stderr, and no rank left behind."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import traceback
from types import TracebackType

from mpi4py import MPI

from . import diagnosis
from .errors import CommunicationError, errors_line

# How long the first rank to fail waits for what the others have to say.
GATHER = 0.3  # seconds
# How long a failed rank waits for the others to end by themselves.
GRACE = 3.0  # seconds


def watch_over(world) -> None:
    """From now on tell the other ranks when this rank's program fails or ends."""
    shown = sys.excepthook

    def explain(kind: type, error: BaseException, trace: TracebackType | None) -> None:
        _explain(world, shown, kind, error, trace)

    sys.excepthook = explain
    atexit.register(_ended, world)


def _explain(world, shown, kind, error, trace) -> None:
    """Print what a person needs, once for all ranks, and end the job."""
    if world.size == 1 or MPI.Is_finalized():
        shown(kind, error, trace)
        return
    world.raised(error, errors_line(error))
    followed = isinstance(error, CommunicationError)
    if not followed:
        shown(kind, error, trace)
    time.sleep(GATHER)  # for the others to stop and say where they were
    statuses = world.statuses()
    cause = diagnosis.first_cause(statuses)
    if cause is None or cause["rank"] == world.rank:
        if followed:
            sys.stderr.write("".join(traceback.format_tb(trace, limit=3)))
        print(f"\n{diagnosis.diagnose(statuses)}\n", file=sys.stderr, flush=True)
    world.ended()
    _end_job(world)


def _end_job(world) -> None:
    """Wait for the other ranks to end, but not for ever: a failed job must not go on."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if all(status["state"] in diagnosis.GONE for status in world.statuses()):
            return
        time.sleep(0.01)
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)


def _ended(world) -> None:
    if not MPI.Is_finalized():
        with contextlib.suppress(ValueError):  # the board is closed
            world.ended()
