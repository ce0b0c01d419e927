"""The end of a program on many ranks: one explanation on stderr, and no rank left behind."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import CommunicationError, errors_line
from ..mpi import MPI
from . import diagnosis, failures, leftovers
from .status import SHRINK_HERE, Status

if TYPE_CHECKING:
    from .world import World

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

# How long the first rank to fail waits for what the others have to say.
GATHER = 0.3  # seconds
# How long MPI gets to end after errors.
FINALIZE_DEADLINE = 20  # seconds
# How long a failed rank waits for the others to end by themselves.
GRACE = 3.0  # seconds


def watch_over(current: Callable[[], World | None]) -> None:
    """From now on tell the other ranks when this rank's program fails or ends.

    Args:
        current: the world then, which may be a smaller one.
    """
    shown, process = sys.excepthook, os.getpid()

    def explain(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # A child that the program has forked is no rank.
        if os.getpid() == process and (world := current()) is not None:
            _explain(world, shown, kind, error, trace)
        else:
            shown(kind, error, trace)

    def ended() -> None:
        if os.getpid() == process and (world := current()) is not None:
            _ended(world)

    sys.excepthook = explain
    atexit.register(ended)


def _explain(
    world: World,
    shown: _Hook,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print what a person needs, once for all ranks, and end the job."""
    if world.size == 1 or MPI.Is_finalized():
        shown(kind, error, trace)
        return
    # PyTorch's own hook calls this one with a buffer, which would be lost with the process.
    real = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    with contextlib.redirect_stderr(real):
        _explain_on_stderr(world, shown, kind, error, trace)


def _explain_on_stderr(
    world: World,
    shown: _Hook,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    world.raised(error, errors_line(error))
    followed = isinstance(error, CommunicationError)
    if not followed:
        shown(kind, error, trace)
    statuses = _gathered(world)
    failed = [s["rank"] for s in statuses if s.get("kind") and s["state"] != "dead"]
    teller = _teller(world, statuses, failed)
    if teller == world.rank:
        _tell(statuses, trace if followed else None)
    world.ended()
    if _end_with_all(world):
        return
    if failures.are_survived():
        _die()
    # The rank that failed first may have caught its error, and be waiting for the others.
    if teller != world.rank and teller not in _gone(world) and world.rank == min(failed):
        _tell(statuses, trace)
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)


def _teller(world: World, statuses: list[Status], failed: list[int]) -> int:
    """Which rank tells for all: the one that failed first; where that is dead, one that lives."""
    cause = diagnosis.first_cause(statuses)
    if cause is None:
        return world.rank
    return min(failed) if cause["state"] == "dead" and failed else cause["rank"]


def _tell(statuses: list[Status], trace: TracebackType | None) -> None:
    if trace is not None:
        sys.stderr.write("".join(traceback.format_tb(trace, limit=3)))
    print(f"\n{diagnosis.diagnose(statuses)}\n", file=sys.stderr, flush=True)


def _gathered(world: World) -> list[Status]:
    """What the others say, who stop meanwhile; messages move only while somebody asks."""
    deadline = time.monotonic() + GATHER
    while time.monotonic() < deadline:
        world.statuses()
        time.sleep(5e-3)
    return world.statuses()


def _gone(world: World) -> set[int]:
    return {s["rank"] for s in world.statuses() if s["state"] in diagnosis.GONE}


def _end_with_all(world: World) -> bool:
    """Wait for the other ranks to end, but not for ever: a failed job must not go on."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if len(_gone(world)) == world.size:
            return True
        if _is_left_behind(world):
            return False
        time.sleep(0.01)
    return False


def _is_left_behind(world: World) -> bool:
    """Whether others go on with fewer ranks, and wait for this one's end."""
    return any(world.board.of_all(SHRINK_HERE))


def _die() -> None:
    """End this rank only. Open MPI takes no notice of one that ends by itself with a status."""
    sys.stderr.flush()
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _ended(world: World) -> None:
    if MPI.Is_finalized():
        return
    with contextlib.suppress(ValueError):  # the board is closed
        if world.section or world.stopped or failures.are_survived():
            world.ended()
        else:
            leftovers.tell(world)
    if world.epoch or world.stopped or failures.are_survived():
        # What was given up may keep MPI_Finalize from ending.
        faulthandler.dump_traceback_later(
            FINALIZE_DEADLINE, exit=True, file=sys.__stderr__ or sys.stderr
        )
