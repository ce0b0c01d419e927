"""What a rank communicated: one record per operation, in a bounded ring buffer."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

CAPACITY = 65_536


@dataclass(slots=True)
class Call:
    """One communication of this rank.

    Attributes:
        op: ``send``, ``all_reduce``, … as in :mod:`torch.distributed`.
        group: ranks of the process group (global ranks, in group order).
        nbytes: bytes of this rank's tensors that the operation is about.
        shape, dtype: of the first of them.
        peer: the other rank of a send or recv, or the root (in the group), else ``None``.
        tag: of a send or recv, else ``None``.
        blocking: called as ``send``, ``recv`` or a collective with ``async_op=False``.
        waited: somebody called ``wait()``, or asked for the future.
        start, end: seconds on this rank's ``time.perf_counter``; ``end`` is 0 while it runs.
    """

    op: str
    group: tuple[int, ...]
    nbytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    peer: int | None = None
    tag: int | None = None
    blocking: bool = True
    waited: bool = False
    start: float = field(default_factory=time.perf_counter)
    end: float = 0.0

    def describe(self) -> str:
        """``recv(src=1, tag=0) of float32[3, 4] (48 bytes)``."""
        arguments = []
        if self.peer is not None:
            role = {"send": "dst", "recv": "src"}.get(self.op, "root")
            arguments.append(f"{role}={'any' if self.peer < 0 else self.peer}")
        if self.tag is not None:
            arguments.append(f"tag={self.tag}")
        text = f"{self.op}({', '.join(arguments)})"
        if self.dtype:
            text += f" of {self.dtype}{list(self.shape)} ({self.nbytes} bytes)"
        return text


class Log:
    """The last :data:`CAPACITY` calls of this process."""

    def __init__(self, capacity: int = CAPACITY):
        self._calls: deque[Call] = deque(maxlen=capacity)
        self._seen = 0

    def add(self, call: Call) -> None:
        """Append a call; the oldest goes when the buffer is full."""
        self._calls.append(call)
        self._seen += 1

    def mark(self) -> int:
        """A position to give to :meth:`since`."""
        return self._seen

    def since(self, mark: int) -> list[Call]:
        """The calls after ``mark``, oldest first."""
        fresh = min(self._seen - mark, len(self._calls))
        return list(self._calls)[len(self._calls) - fresh :]


log = Log()
