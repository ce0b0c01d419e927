"""What each rank says of itself on the board, and whether its process lives."""

from __future__ import annotations

import json
import os
import socket
import threading
import zlib
from collections.abc import Sequence
from typing import TypedDict, cast

from ..record import Call
from .board import Board
from .interfaces import Waitable

# The words of each rank on the world's board.
WORDS = range(7)
INCIDENT, PROCESS, BEAT, HERE, ACKNOWLEDGED, SHRINK_HERE, SHRINK_ACKNOWLEDGED = WORDS


class Side(TypedDict):
    """A call that did not fit, as another rank is told of it."""

    what: str
    where: str
    thread: str  #: its name; empty for the main thread


# Names that are keywords of Python.
_Waits = TypedDict("_Waits", {"for": list[int]}, total=False)


class Status(_Waits, total=False):
    """What a rank says of itself.

    Always there: ``rank``, ``state``, ``section`` (the part of the program that it runs), ``epoch``
    (how many incidents are over). Of a wait, and of one that was stopped: ``call`` to ``patience``.
    Of ``stopped``: ``kind`` to ``incident``, and what the communication was.
    """

    rank: int
    #: ``running``; ``waiting``: blocked in a communication for longer than a moment; ``left``: its
    #: section is over; ``ended``: its program is; ``stopped`` by an error; ``dead``.
    state: str
    section: str
    epoch: int

    call: str  #: ``recv(src=1, tag=0)``
    what: str  #: the same with shape and bytes
    where: str  #: the user's line
    op: str
    group: list[int]
    partner: int | None
    tag: int | None
    dtype: str
    shape: list[int]
    nbytes: int
    wait: int  #: number of the wait
    any: bool  #: whether one of the ranks that it waits for is enough; those are under ``for``
    moving: bool  #: whether data are on their way
    alone: bool  #: whether no other thread of the rank communicates
    patience: float  #: seconds after which the wait may count as stuck

    #: ``raised``, ``died``, ``mismatch``, ``deadlock``, ``timeout``, ``interrupted``; or
    #: ``followed``: another rank's error.
    kind: str
    error: str
    at: float  #: when, in seconds
    incident: int  #: its number
    waited: float
    called: dict[str, Side]  #: collectives that have not begun, by name
    times: int  #: how often the rank has made this call in its section
    #: messages of the section: (rank, tag, number), where they are not too many
    sent: list[tuple[int, int | None, int]]
    received: list[tuple[int, int]]  #: (rank, number)
    leaves: Leftovers  #: of a program that has ended


class Leftovers(TypedDict, total=False):
    """What a rank's program leaves behind, see :mod:`torch_mpi.protocol.program_end`."""

    unwaited: list[tuple[str, int]]  #: what nobody waited for, and how often
    many: bool  #: too many messages to be told
    sent: list[tuple[str, int, int, int, str, str]]  #: group, sender, number, to, what, where
    received: list[tuple[str, int, int]]  #: group, sender, number
    teller: bool  #: whether the rank has seen something that has to be told
    balance: int  #: how many more messages it has sent than received


class Statuses:
    """The statuses of all ranks, on the world's board.

    Attributes:
        own: what this rank last wrote.
        section, epoch: of this rank; part of everything that it writes.
    """

    def __init__(self, board: Board):
        self.board = board
        self.rank, self.size = board.rank, board.size
        self.board.set(PROCESS, _host_id() << 32 | os.getpid())
        self.section = ""
        self.epoch = 0
        self.own: Status = {}
        # The main thread, the progress thread and the user's write.
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
        """Return what each rank last wrote of itself; of this incident, while there is one."""
        self.board.refresh()
        return [self._of(rank) for rank in range(self.size)]

    def _of(self, rank: int) -> Status:
        try:
            status: Status = json.loads(self.board.read(rank))
        except ValueError:  # just being written, or cut
            status = {"rank": rank, "state": "running"}
        if status.get("kind") and status.get("incident") != self.epoch + 1:
            status = {"rank": rank, "state": "running"}  # of an incident that is over
        if not self.is_alive(rank) and status["state"] != "ended":
            error = f"its process {self.board.of(PROCESS, rank) & 0xFFFFFFFF} is gone"
            status = {"rank": rank, "state": "dead", "kind": "died", "error": error, "at": 0.0}
        return status

    def beat(self) -> None:
        """Show that this rank still tests what it waits for, and has not found it."""
        self._beats += 1
        self.board.set(BEAT, self._beats)

    def beats(self, rank: int) -> int:
        """Return how often a rank has done that."""
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
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or no /proc: it exists
        return True


# -- what a status says of a communication -----------------------------------------------------

# Of how many messages of the section a rank tells when it is stopped.
_MESSAGES = 300


def of_wait(waitable: Waitable, where: str, alone: bool) -> Status:
    """Describe a wait of this rank; ``alone``: no other thread of it communicates."""
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
    """Return what the rank has communicated in its section: it may explain a wait for ``call``."""
    kind = call.op, call.group, call.dtype, call.shape, call.reduce_op
    alike = [c for c in calls if (c.op, c.group, c.dtype, c.shape, c.reduce_op) == kind]
    return {"times": len(alike)} | of_messages(calls)


def of_messages(calls: Sequence[Call]) -> Status:
    """Return the messages among the calls; nothing where they are too many to be told."""
    messages = [(call, call.message) for call in calls if call.message is not None]
    if len(messages) > _MESSAGES:
        return {}
    sent = [
        (call.partner, call.tag, number)
        for call, (_, number) in messages
        if call.op == "send" and call.partner is not None
    ]
    return {"sent": sent, "received": [message for c, message in messages if c.op == "recv"]}
