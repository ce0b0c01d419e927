"""What a rank communicated: one record per operation, in a bounded ring buffer.

A record says what an operation is about by its definition, whatever algorithm moves the data. With
p ranks and b bytes of this rank's tensor (one part of it, where there are p of them):

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

That is the size of what goes in on this rank, and of what comes out there: a rank's own part counts
like that of the others. Where parts differ in size, p × b is their sum. Operations of several
tensors (coalesced ones) count all of them.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .errors import place_text

if TYPE_CHECKING:
    from .protocol.status import Side

CAPACITY = 65_536


@dataclass(slots=True)
class Call:
    """One communication of this rank. Times are seconds of this rank's ``time.perf_counter``.

    Attributes:
        op: ``send``, ``all_reduce``, … as in :mod:`torch.distributed`.
        group: ranks of the process group (global ranks, in group order).
        nbytes: bytes of this rank's tensors that the operation is about.
        shape, dtype: of the first of them.
        peer: the other rank of a send or recv, or the root (in the group), else ``None``.
        tag: of a send or recv, else ``None``.
        reduce_op: ``SUM``, … of a reduction, else empty.
        blocking: called as ``send``, ``recv`` or a collective with ``async_op=False``.
        waited: somebody called ``wait()``, asked for the future, or has found by
            ``is_completed()`` that it was over.
        start: when it was called.
        matched: when the partner, or every rank of the group, was there too; 0 before.
        end: when it was complete; 0 while it runs.
        waits: intervals in which a caller was blocked on it; the end is 0 while it is.
        place: file, line and function of the user's call.
        message: of a send or recv: the sender's global rank and its count of messages; equal
            on both sides.
        sequence: number of the collective in its group.
        any_source: a recv that takes what comes first; :attr:`peer` is then the rank that sent.
        sent, received: bytes that this rank contributes and gets, see :mod:`torch_mpi.record`.
        moved_out, moved_in: bytes that really left this rank and came to it inside of a
            collective; ``None`` where MPI moves them, so that nobody knows.
        thread: name of the thread that has called, if it is not the main one.
        parts: elements of each rank's part, of a collective that moves parts.
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

    @property
    def partner(self) -> int | None:
        """Return the global rank of :attr:`peer`; ``None`` without one, or for any rank."""
        return None if self.peer is None or self.peer < 0 else self.group[self.peer]

    @property
    def where(self) -> str:
        """Return the user's line, ``cell line 3 in ring()``; empty where it is not known."""
        return place_text(*self.place) if self.place else ""

    def name(self) -> str:
        """Return ``recv(src=1, tag=0)``, with global ranks; ``all_reduce(SUM)``."""
        arguments = [self.reduce_op] if self.reduce_op else []
        if self.peer is not None:
            role = {"send": "dst", "recv": "src"}.get(self.op, "root")
            arguments.append(f"{role}={'any' if self.peer < 0 else self.partner}")
        if self.tag is not None:
            arguments.append(f"tag={self.tag}")
        return f"{self.op}({', '.join(arguments)})"

    def side(self) -> Side:
        """Return what another rank is told of a call that does not fit its own."""
        parts = ""
        if len(set(self.parts)) > 1:  # else the first one says all
            parts = f" in parts of {', '.join(map(str, self.parts))} elements"
        return {"what": self.describe() + parts, "where": self.where, "thread": self.thread}

    def describe(self) -> str:
        """Return ``recv(src=1, tag=0) of float32[3, 4] (48 bytes)``."""
        if not self.dtype:
            return self.name()
        return f"{self.name()} of {self.dtype}{list(self.shape)} ({self.nbytes} bytes)"


class Log:
    """The last :data:`CAPACITY` calls of this process."""

    def __init__(self):
        # A Call; or (its pattern, start, matched, end, sequence), which costs less to make.
        self._calls: deque = deque(maxlen=CAPACITY)
        self._seen = 0

    def add(self, call: Call) -> None:
        """Append a call; the oldest goes when the buffer is full."""
        self._calls.append(call)
        self._seen += 1

    def add_like(
        self, pattern: Call, start: float, matched: float, end: float, sequence: int
    ) -> None:
        """Append a completed blocking collective that is like ``pattern``, but for its times."""
        self._calls.append((pattern, start, matched, end, sequence))
        self._seen += 1

    def mark(self) -> int:
        """Return a position to give to :meth:`since`."""
        return self._seen

    def since(self, mark: int) -> list[Call]:
        """Return the calls after ``mark``, oldest first."""
        fresh = max(0, min(self._seen - mark, len(self._calls)))
        # From the end: a deque of many calls is not copied for a few.
        entries = list(itertools.islice(reversed(self._calls), fresh))[::-1]
        return [entry if isinstance(entry, Call) else _filled(*entry) for entry in entries]


def _filled(pattern: Call, start: float, matched: float, end: float, sequence: int) -> Call:
    return replace(
        pattern,
        blocking=True,
        waited=True,
        start=start,
        matched=matched,
        end=end,
        waits=[[start, end]],
        place=None,
        sequence=sequence,
        moved_out=None,
        moved_in=None,
        thread="",
    )


class LogView:
    """Read what this process has communicated; the backend writes to :data:`recorder`."""

    __slots__ = ()

    def mark(self) -> int:
        """Return a position to give to :meth:`since`."""
        return recorder.mark()

    def since(self, mark: int) -> list[Call]:
        """Return copies of the calls after ``mark``, oldest first, as they are at this moment."""
        return [replace(call, waits=list(map(list, call.waits))) for call in recorder.since(mark)]


recorder = Log()
log = LogView()
