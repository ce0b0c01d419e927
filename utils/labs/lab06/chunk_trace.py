"""Notes on the ranks what a student's all-reduce sends, and which ranks are in each sum.

On the ranks, :func:`watch` calls the function on a tensor whose numbers show where they come from,
and notes each message that the function sends and receives. In the kernel, :mod:`.chunk_steps` puts
the notes of all ranks in order, and :mod:`.chunk_pictures` draws them::

    %%px
    from utils.labs.lab06.chunk_trace import watch
    story = watch(ring_all_reduce, length=14)

    chunks.still(ranks.view["story"])

Element i of rank r begins as ``base**r + (i + 1)**2 * base**p``. In a sum of these numbers, each of
the p lowest digits (in this base) counts how often a rank's number is in the sum. The higher digits
show which element it was, even in a message or in a buffer that we don't know. They hold squares,
because otherwise elements i − 1, i and i + 1 of three ranks would look like three times i.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from utils.checks.probe import values_of

if TYPE_CHECKING:
    import torch

# float32 holds whole numbers up to 2**24 exactly. Half of it is left for numbers summed twice.
_EXACT = 2**24 // 2
_LARGEST_BASE = 16
_POINT_TO_POINT = ("send", "recv")


def watch(function: Callable, length: int = 12, group: Any = None) -> dict:
    """Call ``function(x, group=group)`` on a tensor of ``length`` numbers; return what it did.

    All ranks of the group must call this. The story is plain data. It has the messages that go
    through ``isend``, ``irecv``, ``send``, ``recv`` and ``batch_isend_irecv``.

    Raises:
        ValueError: there are too many ranks or elements to distinguish them.
        Exception: what the function raises.
    """
    import torch
    import torch.distributed as dist

    from torch_mpi.errors import count_as_library
    from torch_mpi.record import recorder as log

    count_as_library(__file__)  # so that reports name the student's line, not ours
    place = dist.get_rank(group)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    base = base_for(len(members), length)
    begin = [first(base, len(members), place, i) for i in range(length)]
    x = torch.tensor([float(number) for number in begin])
    watcher = _Watcher(x)
    mark = log.mark()
    with watcher.noting():
        returned = function(x, group=group)
    ops = [call.op for call in log.since(mark)]
    others = [op for op in ops if op not in _POINT_TO_POINT]
    other_tensor = isinstance(returned, torch.Tensor) and returned.data_ptr() != x.data_ptr()
    return {
        "rank": place,
        "members": members,
        "length": length,
        "base": base,
        "messages": [request.plain(members) for request in watcher.requests],
        "ends": watcher.ends,
        "begin": begin,
        "end": watcher.now(),
        "returned": values_of(returned) if other_tensor else None,
        "others": sorted(set(others)),
        "unseen": max(0, len(ops) - len(others) - len(watcher.requests)),
    }


def first(base: int, size: int, rank: int, i: int) -> int:
    """Return the first value of element i of a rank."""
    return base**rank + (i + 1) ** 2 * base**size


def base_for(size: int, length: int) -> int:
    """Return the largest base in which float32 holds all sums exactly.

    Raises:
        ValueError: no base is large enough.
    """
    if length >= 1:
        for base in range(_LARGEST_BASE, 2, -1):
            if (length**2 + 1) * size * base**size < _EXACT:
                return base
    raise ValueError(
        f"watch can't distinguish {length} elements on {size} ranks: use 1 to 16 elements and up "
        "to 6 ranks"
    )


class _Watcher:
    """Notes the messages of one rank, and its tensor each time a message has ended.

    Attributes:
        requests: all messages, in the order in which they started.
        ends: [number of the message, messages started so far, x before] for each message that
            has ended, in the order in which this rank noticed it.
    """

    def __init__(self, x: torch.Tensor):
        self.x = x
        self.requests: list[_Request] = []
        self.ends: list[list] = []

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Make ``isend`` and ``irecv`` note what they do, for a block."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        with contextlib.ExitStack() as stack:
            for name in ("isend", "irecv"):
                noting = self._that_notes(name, getattr(distributed_c10d, name))
                for module in (dist, distributed_c10d):
                    stack.enter_context(mock.patch.object(module, name, noting))
            yield

    def _that_notes(self, name: str, original: Callable) -> Callable:
        """Return an ``isend`` or ``irecv`` that notes what it does."""
        import torch_mpi.record as record

        def begin(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            log = record.recorder
            mark = log.mark()
            places = self._places(tensor)
            values = values_of(tensor) if name == "isend" else None
            old = None if places is None else self.x[places].clone()
            work = original(tensor, *args, **kwargs)
            if work is None:
                return None
            call = next((c for c in log.since(mark) if c.op in _POINT_TO_POINT), None)
            number = len(self.requests)
            request = _Request(self, number, name == "isend", work, tensor, call, places, old)
            request.values = values
            self.requests.append(request)
            return request

        begin.__name__ = name
        return begin

    def _places(self, tensor: torch.Tensor) -> list[int] | None:
        """Return the elements of x that a tensor views, or ``None`` for a different buffer."""
        import torch

        if tensor.untyped_storage().data_ptr() != self.x.untyped_storage().data_ptr():
            return None
        numbers = torch.arange(len(self.x))
        view = torch.as_strided(numbers, tensor.shape, tensor.stride(), tensor.storage_offset())
        return view.flatten().tolist()

    def now(self) -> list[float]:
        """Return x without values that may have arrived, but that the rank hasn't waited for."""
        x = self.x.detach().clone()
        for request in self.requests:
            if request.values is None and request.places is not None:
                x[request.places] = request.old
        return x.tolist()


@dataclass(eq=False)
class _Request:
    """The work of an ``isend`` or ``irecv``, with notes."""

    watcher: _Watcher
    number: int
    sends: bool
    work: Any
    tensor: torch.Tensor
    call: Any
    places: list[int] | None
    old: torch.Tensor | None
    values: list[float] | None = None
    over: bool = False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        before = self.watcher.now()
        result = self.work.wait(*args, **kwargs)
        self._end(before)
        return result

    def is_completed(self) -> bool:
        before = self.watcher.now()
        completed = self.work.is_completed()
        if completed:
            self._end(before)
        return completed

    def _end(self, before: list[float]) -> None:
        """Note that the message has ended, and that its rank knows this."""
        if not self.over:
            self.over = True
            self.watcher.ends.append([self.number, len(self.watcher.requests), before])
            if self.values is None:
                self.values = values_of(self.tensor)

    def __getattr__(self, name: str):
        return getattr(self.work, name)

    def plain(self, members: list[int]) -> dict:
        """Return the notes on the message as plain data."""
        partner = getattr(self.call, "partner", None)
        message = getattr(self.call, "message", None)
        return {
            "op": "send" if self.sends else "recv",
            "peer": members.index(partner) if partner in members else None,
            "id": None if message is None else list(message),
            "values": self.values,
            "places": self.places,
            "over": self.over,
        }
