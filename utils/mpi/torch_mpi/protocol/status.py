"""Each rank's status on the board, from which other ranks learn what it does and if it lives."""

from __future__ import annotations

import json
import os
import socket
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from ..record import Call
from .interfaces import Waitable

if TYPE_CHECKING:
    from .board import Board

# Each rank has these words on the world's board.
WORDS = range(7)
INCIDENT, PROCESS, BEAT, HERE, ACKNOWLEDGED, SHRINK_HERE, SHRINK_ACKNOWLEDGED = WORDS


class Side(TypedDict):
    """The description of a call that didn't match, for the ranks that made another call."""

    what: str
    where: str
    thread: str  #: its name; empty for the main thread


# `for` is a keyword of Python, so it can't be a name in the class below.
_Waits = TypedDict("_Waits", {"for": list[int]}, total=False)


class Status(_Waits, total=False):
    """A rank's description of itself.

    Every status has ``rank``, ``state``, ``section`` (the part of the program that the rank runs)
    and ``epoch`` (how many incidents are over). A wait has ``call`` to ``patience``, even if it was
    stopped. A stopped rank has ``kind`` to ``incident``, and the fields of its communication.
    """

    rank: int
    #: ``running``; ``waiting``: blocked in a communication for longer than a moment; ``left``: its
    #: section is over; ``ended``: its program is over; ``stopped`` by an error; ``dead``.
    state: str
    section: str
    epoch: int

    call: str  #: ``recv(src=1, tag=0)``
    what: str  #: the same with shape and bytes
    where: str  #: the user's line of code
    op: str
    group: list[int]
    partner: int | None
    tag: int | None
    dtype: str
    shape: list[int]
    nbytes: int
    wait: int  #: number of the wait
    any: bool  #: whether one of the ranks in ``for``, for which it waits, is enough
    moving: bool  #: whether data are on their way
    alone: bool  #: whether no other thread of the rank communicates
    patience: float  #: seconds after which the wait may count as stuck

    #: ``raised``, ``died``, ``mismatch``, ``deadlock``, ``timeout``, ``interrupted``; or
    #: ``followed`` if another rank's error stopped this rank.
    kind: str
    error: str
    because: str  #: of a rank that ``followed``: what failed first, in words
    at: float  #: when the error occurred, in seconds
    incident: int  #: the incident's number
    waited: float
    called: dict[str, Side]  #: collectives that have not begun, by name
    times: int  #: how often the rank has made this call in its section
    #: messages of the section: (rank, tag, number), unless there are too many
    sent: list[tuple[int, int | None, int]]
    received: list[tuple[int, int]]  #: (rank, number)
    leaves: Leftovers  #: of a program that has ended


class Leftovers(TypedDict, total=False):
    """The communications that a rank's program left unfinished, see :mod:`~.program_end`."""

    unwaited: list[tuple[str, int]]  #: calls that nobody waited for, and how often
    many: bool  #: whether there are too many messages to list
    sent: list[tuple[str, int, int, int, str, str]]  #: group, sender, number, to, what, where
    received: list[tuple[str, int, int]]  #: group, sender, number
    teller: bool  #: whether the rank has seen something that it has to report
    balance: int  #: how many more messages it has sent than received


class Statuses:
    """The statuses of all ranks, on the world's board.

    Attributes:
        own: this rank's latest status.
        section, epoch: this rank's section and incident epoch, which all its statuses have.
    """

    def __init__(self, board: Board):
        self.board = board
        self.rank, self.size = board.rank, board.size
        self.board.set(PROCESS, _host_id() << 32 | os.getpid())
        self.section = ""
        self.epoch = 0
        self.own: Status = {}
        # The main thread, the progress thread and the user's threads write statuses.
        self.lock = threading.RLock()
        self._beats = 0

    def write(self, **status: object) -> Status:
        """Replace this rank's status; return it."""
        with self.lock:
            always = {"rank": self.rank, "section": self.section, "epoch": self.epoch}
            self.own = cast(Status, always | status)
            self.board.write(json.dumps(self.own))
            return self.own

    def statuses(self) -> list[Status]:
        """Return each rank's latest status; leave out errors of incidents that are over."""
        self.board.refresh()
        return [self._of(rank) for rank in range(self.size)]

    def _of(self, rank: int) -> Status:
        try:
            status: Status = json.loads(self.board.read(rank))
        except ValueError:  # the rank is writing it now, or it was too long
            status = {"rank": rank, "state": "running"}
        if status.get("kind") and status.get("incident") != self.epoch + 1:
            status = {"rank": rank, "state": "running"}  # its incident is over
        if not self.is_alive(rank) and status["state"] != "ended":
            error = f"its process {self.board.of(PROCESS, rank) & 0xFFFFFFFF} is gone"
            status = {"rank": rank, "state": "dead", "kind": "died", "error": error, "at": 0.0}
        return status

    def beat(self) -> None:
        """Show that this rank still tests its wait, which isn't over yet."""
        self._beats += 1
        self.board.set(BEAT, self._beats)

    def beats(self, rank: int) -> int:
        """Return how many beats a rank has shown."""
        return self.board.of(BEAT, rank)

    def is_alive(self, rank: int) -> bool:
        """Return whether a rank's process exists, as far as this machine can tell."""
        word = self.board.of(PROCESS, rank)
        return word >> 32 != _host_id() or _exists(word & 0xFFFFFFFF)

    def dead(self) -> list[int]:
        """Return the ranks whose process is gone."""
        return [rank for rank in range(self.size) if not self.is_alive(rank)]


def _host_id() -> int:
    return zlib.crc32(socket.gethostname().encode()) & 0x7FFFFFFF


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or no /proc: it exists
        return True


# -- what a status says about a communication ---------------------------------------------------

# A rank that is stopped lists at most this many messages of its section.
_MESSAGES = 300


def of_wait(waitable: Waitable, where: str, alone: bool) -> Status:
    """Describe a wait of this rank; ``alone`` says that none of its other threads communicates."""
    missing, any_of_them, moving = waitable.missing()
    call = waitable.call
    return {
        "call": call.name(),
        "what": call.describe(),
        "op": call.op,
        "group": list(call.group),
        "partner": call.partner,
        "tag": call.tag,
        "dtype": call.dtype,
        "shape": list(call.shape)[:16],
        "nbytes": call.nbytes,
        "where": where,
        "for": missing,
        "any": any_of_them,
        "moving": moving,
        "alone": alone,
        "patience": 1 + (call.nbytes / 1e7 if call.op == "send" else 0),
    }


def of_history(call: Call, calls: Sequence[Call]) -> Status:
    """Return what the rank has communicated in its section, which may explain its wait."""
    kind = call.op, call.group, call.dtype, call.shape, call.reduce_op
    alike = [c for c in calls if (c.op, c.group, c.dtype, c.shape, c.reduce_op) == kind]
    return {"times": len(alike)} | of_messages(calls)


def of_messages(calls: Sequence[Call]) -> Status:
    """Return the messages among the calls; empty if there are too many to list."""
    messages = [(call, call.message) for call in calls if call.message is not None]
    if len(messages) > _MESSAGES:
        return {}
    sent = [
        (call.partner, call.tag, number)
        for call, (_, number) in messages
        if call.op == "send" and call.partner is not None
    ]
    return {"sent": sent, "received": [message for c, message in messages if c.op == "recv"]}
