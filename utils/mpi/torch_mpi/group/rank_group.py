"""What PyTorch asks of a process group, whatever carries its messages: names, and collectives."""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from .. import record
from ..errors import CommunicationError, users_place
from ..record import Call
from . import arguments, collectives, reductions, tensors
from .arguments import Tensors
from .operation import Operation

#: Returns the operation for the arguments of PyTorch's call.
Declaration = Callable[..., Operation]


def _collective(declare: Declaration, fast: str = "") -> Callable[..., Work]:
    """Return a method that calls a collective, whose arguments ``declare`` checks.

    ``fast`` is the operation's name in the record, if it has a fast path.
    """

    @functools.wraps(declare)
    def method(self: RankGroup, *given: Any, **options: Any) -> Work:
        return self.call(declare, fast, given, options)

    return method


def _coalesced(single: Callable[..., Work]) -> Callable[..., Work]:
    """Return a method that calls a collective for several pairs of tensors, as one work."""

    def method(self: RankGroup, outputs: Tensors, inputs: Tensors, opts: object = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self.join([single(self, *pair, opts) for pair in pairs], list(outputs))

    method.__doc__ = f"Call :meth:`{single.__name__}` for several tensors."
    return method


class RankGroup(ProcessGroup):
    """A process group of the backend "mpi".

    :mod:`torch.distributed` and PyTorch's C++ call these methods, by these names. If ``opts`` is an
    options object of PyTorch's, its ``asyncOp`` says whether the caller waits for the work. A
    subclass carries the messages: it has :meth:`call`, and ``send``, ``recv`` and
    ``recv_anysource``.

    Args:
        rank: this rank's global number.
        members: global ranks, in the order of the group.

    Attributes:
        lost: why the group can't be used any more, such as "it was destroyed"; "" if it can.
        late_works: the class of works whose futures complete later than they are made; ``None`` if
            a future is complete at once.
    """

    late_works: type[Work] | None = None

    # PyTorch asks a group for the backend of a device, and this group is its own backend.
    supports_splitting = True
    supports_coalescing = False

    def __init__(self, rank: int, members: tuple[int, ...]):
        self.members = members
        self._rank = members.index(rank)
        super().__init__(self._rank, len(members))
        self._name = ""
        self._description = ""
        self.lost = ""

    # -- what PyTorch asks about the group ------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: D102  (PyTorch's name)
        return "mpi"

    def getRank(self) -> int:  # noqa: D102
        return self._rank

    def getSize(self) -> int:  # noqa: D102
        return len(self.members)

    def getGroupName(self) -> str:  # noqa: D102
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: D102
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: D102
        self._description = description

    name = getBackendName
    rank = getRank
    size = getSize
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> RankGroup:
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing; PyTorch calls this for backends that split, but the ranks are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing on a rank outside a new group, because only the members make the group."""

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> RankGroup | None:
        """Make the process group of some ranks of this group; ``None`` on the others.

        ``opts`` and ``device_types`` are PyTorch's, and have no effect on the CPU.
        """
        members = tuple(self.members[rank] for rank in ranks)
        if self.members[self._rank] not in members:
            return None
        child = self.child(members, timeout)
        child.setGroupName(group_name or f"{self._name}:split:{','.join(map(str, ranks))}")
        child.setGroupDesc(group_desc or f"{self._description}:split")
        return child

    splitGroup = split_group

    @abstractmethod
    def child(self, members: tuple[int, ...], timeout: timedelta | None) -> RankGroup:
        """Return a new group of some ranks of this group, to which this rank belongs."""

    # -- collectives --------------------------------------------------------------------------

    allreduce = _collective(reductions.all_reduce, "all_reduce")
    allreduce_coalesced = _collective(reductions.all_reduce_coalesced)
    reduce = _collective(reductions.reduce, "reduce")
    reduce_scatter = _collective(reductions.reduce_scatter)
    reduce_scatter_single = _collective(reductions.reduce_scatter_single, "reduce_scatter_tensor")
    reduce_scatter_single_coalesced = _coalesced(reduce_scatter_single)
    broadcast = _collective(collectives.broadcast, "broadcast")
    gather = _collective(collectives.gather)
    scatter = _collective(collectives.scatter)
    allgather = _collective(collectives.all_gather, "all_gather")
    allgather_coalesced = _collective(collectives.all_gather_coalesced)
    all_gather_single = _collective(collectives.all_gather_single, "all_gather_into_tensor")
    all_gather_single_coalesced = _coalesced(all_gather_single)
    alltoall = _collective(collectives.all_to_all)
    all_to_all_single = _collective(collectives.all_to_all_single)
    barrier = _collective(collectives.barrier, "barrier")

    # PyTorch used these names before, and its C++ still asks for them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @abstractmethod
    def call(
        self, declare: Declaration, fast: str, given: Sequence[Any], options: dict[str, Any]
    ) -> Work:
        """Declare a collective with these arguments, and call it.

        It begins when all ranks of the group have called it.
        """

    @abstractmethod
    def join(self, works: Sequence[Work], result: list[torch.Tensor]) -> Work:
        """Return a work that is over when all of these are."""

    # -- calls on record ------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time on this rank's clock, in seconds."""
        return time.perf_counter()

    def place(self) -> tuple[str, int, str] | None:
        """Return file, line and function of the user's call."""
        return users_place()

    def log(self) -> record.Log:
        """Return where this rank's calls are recorded."""
        return record.recorder

    def thread_name(self) -> str:
        """Return the name of the calling thread; "" for the one that runs the rank's program."""
        return ""

    def check_usable(self, op: str) -> None:
        """Raise CommunicationError if the group can't be used any more."""
        if self.lost:
            raise CommunicationError(
                f"You called {op} on a process group that cannot be used any more: {self.lost}. "
                "Make a new group."
            )

    def record(
        self,
        op: str,
        inputs: Tensors,
        opts: object = None,
        *,
        peer: int | None = None,
        tag: int | None = None,
        blocking: bool | None = None,
        reduce_op: str = "",
        sent: int | None = None,
    ) -> Call:
        """Check that the group is usable, and record a call.

        Args:
            opts: PyTorch's options, which say whether the call blocks if ``blocking`` is not given.
            sent: bytes that this rank contributes; by default, the size of all tensors.

        Raises:
            CommunicationError: the group can no longer be used, or there is an incident.
        """
        self.check_usable(op)
        if blocking is None:
            # A caller without options, such as PyTorch's C++, waits for the work.
            blocking = not getattr(opts, "asyncOp", True)
        nbytes = tensors.nbytes(*inputs)
        call = Call(
            op,
            self.members,
            nbytes,
            tuple(inputs[0].shape) if inputs else (),
            arguments.dtype_name(inputs[0].dtype) if inputs else "",
            peer,
            tag,
            reduce_op,
            blocking,
            start=self.now(),
            place=self.place(),
            sent=nbytes if sent is None else sent,
            thread=self.thread_name(),
            group_name=self._name,
        )
        self.log().add(call)
        return call
