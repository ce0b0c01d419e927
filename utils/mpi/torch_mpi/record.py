"""Record what a rank communicates: one record per operation, in a bounded ring buffer.

A record counts bytes by the definition of the operation, whatever algorithm moves the data. The
table is for p ranks and b bytes of this rank's tensor, or of one part if the tensor has p parts:

====================================  ============================  ============================
operation                             ``sent``                      ``received``
====================================  ============================  ============================
send                                  b                             0
recv                                  0                             b
broadcast                             b on the root, else 0         0 on the root, else b
reduce                                b                             b on the root, else 0
all_reduce                            b                             b
gather                                b                             p × b on the root, else 0
scatter                               p × b on the root, else 0     b
all_gather, …_into_tensor             b                             p × b
reduce_scatter, …_tensor              p × b                         b
all_to_all, …_single                  p × b                         p × b
barrier                               0                             0
====================================  ============================  ============================

So a record has the size of the operation's input and of its output on this rank, and the rank's own
part counts like any other part. If parts differ in size, p × b means their sum. Operations on
several tensors (coalesced ones) count all of them.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .errors import place_text

if TYPE_CHECKING:
    from .protocol.status import Side

CAPACITY = 65_536


@dataclass(slots=True)
class Call:
    """One communication of this rank. Times are seconds of this rank's ``time.perf_counter``.

    Attributes:
        op: the operation's name as in :mod:`torch.distributed`, such as ``send`` or ``all_reduce``.
        group: ranks of the process group (global ranks, in group order).
        nbytes: bytes of the tensors that this rank passed to the operation.
        shape, dtype: shape and dtype of the first of these tensors.
        peer: the other rank of a send or recv, or the root (in the group); otherwise ``None``.
        tag: the tag of a send or recv; otherwise ``None``.
        reduce_op: ``SUM``, … of a reduction; otherwise empty.
        blocking: whether it was ``send``, ``recv`` or a collective with ``async_op=False``.
        waited: whether the program called ``wait()``, asked for the future, or learned from
            ``is_completed()`` that the communication was over.
        start: when the program called it.
        matched: when the partner, or every rank of the group, had called it too; 0 before.
        end: when it was complete; 0 while it runs.
        waits: intervals in which a caller was blocked on it; the end is 0 while it is blocked.
        place: file, line and function of the user's call.
        message: for a send or recv, the sender's global rank and its count of messages, which are
            equal on both sides.
        sequence: number of the collective in its group.
        any_source: whether a recv accepts any sender; :attr:`peer` is then the rank that sent.
        sent, received: bytes that this rank contributes and gets, see :mod:`torch_mpi.record`.
        moved_out, moved_in: bytes that really left and reached this rank within a collective;
            ``None`` if MPI moves them, because MPI doesn't say.
        thread: name of the calling thread, if it isn't the main thread.
        parts: elements of each rank's part, for a collective that moves parts.
        group_name: PyTorch's name of the process group, which is equal on all its ranks.
        number: number of this call on its rank, if another process carries the rank's messages.
    """

    op: str
    group: tuple[int, ...]
    nbytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    peer: int | None = None
    tag: int | None = None
    reduce_op: str = ""
    blocking: bool = True
    waited: bool = False
    start: float = field(default_factory=time.perf_counter)
    matched: float = 0.0
    end: float = 0.0
    waits: list[list[float]] = field(default_factory=list)
    place: tuple[str, int, str] | None = None
    message: tuple[int, int] | None = None
    sequence: int | None = None
    any_source: bool = False
    sent: int = 0
    received: int = 0
    moved_out: int | None = None
    moved_in: int | None = None
    thread: str = ""
    parts: tuple[int, ...] = ()
    group_name: str = ""
    number: int | None = None

    @property
    def partner(self) -> int | None:
        """Return the global rank of :attr:`peer`; ``None`` without a peer, or for any sender."""
        return None if self.peer is None or self.peer < 0 else self.group[self.peer]

    @property
    def where(self) -> str:
        """Return the user's line, such as ``cell line 3 in ring()``; empty if it is unknown."""
        return place_text(*self.place) if self.place else ""

    def name(self) -> str:
        """Return ``recv(src=1, tag=0)``, with global ranks, or ``all_reduce(SUM)``."""
        arguments = [self.reduce_op] if self.reduce_op else []
        if self.peer is not None:
            role = {"send": "dst", "recv": "src"}.get(self.op, "root")
            arguments.append(f"{role}={'any' if self.peer < 0 else self.partner}")
        if self.tag is not None:
            arguments.append(f"tag={self.tag}")
        return f"{self.op}({', '.join(arguments)})"

    def side(self) -> Side:
        """Return a description for another rank, whose call doesn't match this one."""
        parts = ""
        if len(set(self.parts)) > 1:  # otherwise the first part's size says it all
            parts = f" in parts of {', '.join(map(str, self.parts))} elements"
        return {"what": self.describe() + parts, "where": self.where, "thread": self.thread}

    def describe(self) -> str:
        """Return a text such as ``recv(src=1, tag=0) of float32[3, 4] (48 bytes)``."""
        if not self.dtype:
            return self.name()
        return f"{self.name()} of {self.dtype}{list(self.shape)} ({self.nbytes} bytes)"


def as_dict(call: Call) -> dict[str, Any]:
    """Return what a check needs of a call as JSON, with global ranks."""
    peer = call.peer
    return {
        "op": call.op,
        "group": list(call.group),
        "nbytes": call.nbytes,
        "peer": call.group[peer] if peer is not None and peer >= 0 else peer,
        "tag": call.tag,
        "blocking": call.blocking,
        "waited": call.waited,
        "any_source": call.any_source,
        "message": None if call.message is None else list(call.message),
        "sequence": call.sequence,
        "sent": call.sent,
        "received": call.received,
        "start": call.start,
        "matched": call.matched,
        "end": call.end,
        "dtype": call.dtype,
        "number": call.number,
    }


class Log:
    """A log that keeps the last :data:`CAPACITY` calls of this process."""

    def __init__(self):
        # Calls, or tuples (pattern, start, matched, end, sequence, place), which cost less to make.
        self._calls: deque = deque(maxlen=CAPACITY)
        self._seen = 0

    def add(self, call: Call) -> None:
        """Append a call; a full buffer drops its oldest one."""
        self._calls.append(call)
        self._seen += 1

    def add_like(
        self,
        pattern: Call,
        start: float,
        matched: float,
        end: float,
        sequence: int,
        place: tuple[str, int, str] | None = None,
    ) -> None:
        """Append a completed blocking collective like ``pattern``, at another time and place."""
        self._calls.append((pattern, start, matched, end, sequence, place))
        self._seen += 1

    def mark(self) -> int:
        """Return the current position, which :meth:`since` accepts."""
        return self._seen

    def since(self, mark: int) -> list[Call]:
        """Return the calls after ``mark``, oldest first."""
        fresh = max(0, min(self._seen - mark, len(self._calls)))
        # Begin at the end, because copying a long deque for a few calls would be slow.
        entries = list(itertools.islice(reversed(self._calls), fresh))[::-1]
        return [entry if isinstance(entry, Call) else _filled(*entry) for entry in entries]


def _filled(
    pattern: Call,
    start: float,
    matched: float,
    end: float,
    sequence: int,
    place: tuple[str, int, str] | None,
) -> Call:
    return replace(
        pattern,
        blocking=True,
        waited=True,
        start=start,
        matched=matched,
        end=end,
        waits=[[start, end]],
        place=place,
        sequence=sequence,
        moved_out=None,
        moved_in=None,
        thread="",
    )


class LogView:
    """A view of what this process has communicated; the backend writes to :data:`recorder`."""

    __slots__ = ()

    def mark(self) -> int:
        """Return the current position, which :meth:`since` accepts."""
        return recorder.mark()

    def since(self, mark: int) -> list[Call]:
        """Return copies of the calls after ``mark``, oldest first, as they are now."""
        return [replace(call, waits=list(map(list, call.waits))) for call in recorder.since(mark)]


recorder = Log()
log = LogView()
