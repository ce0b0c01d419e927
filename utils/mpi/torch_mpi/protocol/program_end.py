"""End a program on many ranks: explain an error once, and report what the ranks left behind.

After an error, the rank that failed first explains it on stderr for all, and no rank goes on alone.

Messages that no rank received, and calls that no rank waited for, are errors that go unnoticed by
luck (MPI 4.1, sections 3.7.3 and 11.2.2). The lowest rank that has seen one reports for all ranks
on stderr, and the exit status doesn't change. A rank with nothing to report waits for no other.
"""

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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from .. import mpi
from ..errors import CommunicationError, errors_line, is_packaged
from ..mpi import MPI
from ..record import Call, recorder
from . import diagnosis
from .status import SHRINK_HERE, Leftovers, Status
from .wait_monitor import is_true_within

if TYPE_CHECKING:
    from .world import World

# The first rank to fail waits this long for the statuses of the others.
GATHER = 0.3  # seconds
# MPI gets this long to end after errors.
FINALIZE_DEADLINE = 20  # seconds
# A failed rank, or a rank that reports leftovers, waits this long for the others to end, because
# they may be late without a failure.
GRACE = 3.0  # seconds
# A report has at most so many lines, and a rank lists at most so many messages.
_MOST_LINES = 6
_MOST_MESSAGES = 300

_Error = tuple[type[BaseException], BaseException, TracebackType | None]


def watch_over(current: Callable[[], World | None]) -> None:
    """Have the others learn when this rank's program fails or ends; ``current`` gives the world."""
    show = sys.excepthook
    process = os.getpid()

    def world() -> World | None:
        # A child that the program has forked doesn't count as a rank.
        return current() if os.getpid() == process else None

    def explain(*error: object) -> None:
        here = world()
        if here is None or here.size == 1 or MPI.Is_finalized():
            show(*error)  # type: ignore[arg-type]
            return
        # PyTorch's hook calls this function with a buffer, which would be lost with the process.
        real = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        with contextlib.redirect_stderr(real):
            _explain(here, show, error)  # type: ignore[arg-type]

    def ended() -> None:
        here = world()
        if here is not None and not MPI.Is_finalized():
            _ended(here)

    sys.excepthook = explain
    atexit.register(ended)


# -- after an error -----------------------------------------------------------------------------


def _explain(world: World, show: Callable[..., object], error: _Error) -> None:
    """Print one explanation for all ranks, and end the job."""
    _, value, trace = error
    world.raised(value, errors_line(value))
    followed = isinstance(value, CommunicationError)
    if not followed:
        show(*error)
    statuses = _gathered(world)
    failed = [s["rank"] for s in statuses if s.get("kind") and s["state"] != "dead"]
    teller = _teller(world, statuses, failed)
    if teller == world.rank:
        _tell(statuses, trace if followed else None)
    world.ended()
    if _end_with_all(world):
        return
    sys.stderr.flush()
    if mpi.deaths_are_survived():
        # Open MPI doesn't notice a rank that ends itself with a status, but it notices a signal.
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    # The rank that failed first may have caught its error, and be waiting for the others.
    if teller != world.rank and teller not in _gone(world) and world.rank == min(failed):
        _tell(statuses, trace)
    MPI.COMM_WORLD.Abort(1)


def _teller(world: World, statuses: list[Status], failed: list[int]) -> int:
    """Return the rank that reports for all: the first to fail, or a survivor if that one died."""
    cause = diagnosis.first_cause(statuses)
    if cause is None:
        return world.rank
    return min(failed) if cause["state"] == "dead" and failed else cause["rank"]


def _tell(statuses: list[Status], trace: TracebackType | None) -> None:
    if trace is not None:
        sys.stderr.write("".join(traceback.format_tb(trace, limit=3)))
    print(f"\n{diagnosis.diagnose(statuses)}\n", file=sys.stderr, flush=True)


def _gathered(world: World) -> list[Status]:
    """Return all statuses after a moment, in which the others stop.

    The loop asks again and again, because messages of the board move only while a rank asks.
    """
    deadline = time.monotonic() + GATHER
    while time.monotonic() < deadline:
        world.statuses()
        time.sleep(5e-3)
    return world.statuses()


def _gone(world: World) -> set[int]:
    return {s["rank"] for s in world.statuses() if s["state"] in diagnosis.GONE}


def _end_with_all(world: World) -> bool:
    """Wait for the other ranks to end, but not forever: a failed job must not go on."""

    def all_are_gone() -> bool:
        return len(_gone(world)) == world.size

    # Other ranks may want to shrink, and they wait for this rank's end.
    is_true_within(GRACE, lambda: all_are_gone() or any(world.board.of_all(SHRINK_HERE)), 0.01)
    return all_are_gone()


# -- at the end ---------------------------------------------------------------------------------


def _ended(world: World) -> None:
    after_error = world.stopped or mpi.deaths_are_survived()
    with contextlib.suppress(ValueError):  # the board is closed
        if world.section or after_error:
            world.ended()
        else:
            _tell_leftovers(world)
    if world.epoch or world.stopped or mpi.deaths_are_survived():
        # A communication that was given up may keep MPI_Finalize from ending.
        faulthandler.dump_traceback_later(
            FINALIZE_DEADLINE, exit=True, file=sys.__stderr__ or sys.stderr
        )


def _tell_leftovers(world: World) -> None:
    """Write down what this rank leaves behind; the lowest rank with leftovers reports for all."""
    mine = leftovers(recorder.since(0), world.balance() + world.groups.balance_of_closed)
    world.ended(leaves=mine)
    if not mine["teller"]:
        return
    deadline = time.monotonic() + GRACE
    statuses = world.statuses()
    while any(status["state"] != "ended" for status in statuses):
        if time.monotonic() > deadline or world.incident():
            return  # the program doesn't end well, and another report explains why
        time.sleep(2e-3)
        statuses = world.statuses()
    by_rank = {status["rank"]: status.get("leaves", {}) for status in statuses}
    if world.rank == min(rank for rank, left in by_rank.items() if left.get("teller")):
        for line in leftovers_in_words(by_rank):
            print(f"Left behind: {line}", file=sys.stderr, flush=True)


def leftovers(calls: Sequence[Call], balance: int) -> Leftovers:
    """Return what this rank has to report; ``balance`` is messages sent minus received."""
    unwaited = Counter(_never_waited(call) for call in calls if _is_never_waited(call))
    # Only the balances of all ranks together say whether a message is left.
    left: Leftovers = {"teller": bool(unwaited) or balance > 0, "balance": balance}
    if unwaited:
        left["unwaited"] = unwaited.most_common(_MOST_LINES)
    return left | _messages(calls)


def _messages(calls: Sequence[Call]) -> Leftovers:
    messages = [(call, call.message) for call in calls if call.message is not None]
    if len(messages) > _MOST_MESSAGES:
        return {"many": True}
    sent = [
        (*_key(call, message), call.partner, call.describe(), call.where)
        for call, message in messages
        if call.op == "send" and call.partner is not None
    ]
    received = [_key(call, message) for call, message in messages if call.op == "recv"]
    return {"sent": sent, "received": received}


def _key(call: Call, message: tuple[int, int]) -> tuple[str, int, int]:
    sender, number = message
    return ".".join(map(str, call.group)), sender, number


def _is_never_waited(call: Call) -> bool:
    mine = call.place is not None and not is_packaged(call.place[0])
    return mine and not call.blocking and not call.waited


def _never_waited(call: Call) -> str:
    verb = {"send": "isend", "recv": "irecv"}.get(call.op)
    name = call.name().replace(call.op, verb, 1) if verb else call.name()
    return f"{name} at {call.where}"


def leftovers_in_words(by_rank: Mapping[int, Leftovers]) -> list[str]:
    """Return a line for each kind of leftover, from :func:`leftovers` of each rank."""
    unwaited: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, left in by_rank.items():
        for text, times in left.get("unwaited", ()):
            unwaited[text, times].append(rank)
    lines = []
    for (text, times), ranks in unwaited.items():
        often = f", {times} times" if times > 1 else ""
        lines.append(
            f"{diagnosis.names(ranks)} never waited for {text}{often}. Keep the work that the call "
            "returns, and call its wait() before you use the tensor again."
        )
    balance = sum(left.get("balance", 0) for left in by_rank.values())
    if balance > 0 and any(left.get("many") for left in by_rank.values()):
        lines.append(
            f"no rank received {balance} of the messages, and there were too many to list them. "
            "Count the sends and the receives of each rank."
        )
    elif balance > 0:
        lines += _unreceived(by_rank)
    return lines[:_MOST_LINES]


def _unreceived(by_rank: Mapping[int, Leftovers]) -> list[str]:
    received = Counter(tuple(key) for left in by_rank.values() for key in left.get("received", ()))
    unreceived: Counter[tuple[int, int, str, str]] = Counter()
    for rank, left in by_rank.items():
        for *key, to, message, where in left.get("sent", ()):
            if received[tuple(key)]:
                received[tuple(key)] -= 1
            else:
                unreceived[rank, to, message, where] += 1
    return [
        f"rank {to} never received rank {rank}'s {message} at {where}"
        f"{f', {n} times' if n > 1 else ''}. Add a matching receive, or remove the send."
        for (rank, to, message, where), n in unreceived.items()
    ]
