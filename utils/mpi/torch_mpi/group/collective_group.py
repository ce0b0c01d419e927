"""A process group as PyTorch sees it: its names, its collectives, and calls on record."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..errors import CommunicationError, CommunicationMismatch, users_line, users_place
from ..mpi import MPI, is_death
from ..protocol.interfaces import Waitable
from ..record import Call, recorder
from . import collectives, reductions, tensors
from .collective_work import CollectiveWork, JoinedWork
from .collectives import Operation
from .dtypes import dtype_name
from .tensors import Tensors

_MAIN_THREAD = threading.main_thread().ident


def _collective(prepare: Callable[..., Operation]) -> Callable[..., CollectiveWork]:
    """Return the method that calls a collective: ``prepare`` checks the tensors."""

    @functools.wraps(prepare)
    def method(self: CollectiveGroup, *arguments: Any, **options: Any) -> CollectiveWork:
        return self.run(prepare(self, *arguments, **options))

    return method


def _coalesced(single: Callable[..., CollectiveWork]) -> Callable[..., JoinedWork]:
    """Return the method that calls a collective for several pairs of tensors, as one work."""

    def method(
        self: CollectiveGroup, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> JoinedWork:
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([single(self, *pair, opts) for pair in pairs], list(outputs))

    method.__doc__ = f"Do :meth:`{single.__name__}` of several tensors."
    return method


class CollectiveGroup(ProcessGroup):
    """A process group with all collectives; a subclass says how an operation is carried out.

    :mod:`torch.distributed` and PyTorch's C++ call these methods, by these names. Where ``opts`` is
    one of PyTorch's objects of options, its ``asyncOp`` says whether the caller waits for the work.

    Args:
        members: global ranks, in the order of the group.
        rank: this rank in the group.
    """

    # PyTorch asks a group for the backend of a device; this group is its own.
    supports_splitting = True
    supports_coalescing = False

    def __init__(self, members: tuple[int, ...], rank: int):
        super().__init__(rank, len(members))
        self.members = members
        self._rank = rank
        self._name = ""
        self._description = ""

    # -- what PyTorch asks it about itself ------------------------------------------------------

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

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: PyTorch asks it of backends that split, and the ranks are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing on a rank outside of a new group: only its members make it."""

    def _get_backend(self, device: torch.device) -> CollectiveGroup:
        return self

    # -- collectives --------------------------------------------------------------------------

    allreduce = _collective(reductions.all_reduce)
    allreduce_coalesced = _collective(reductions.all_reduce_coalesced)
    reduce = _collective(reductions.reduce)
    reduce_scatter = _collective(reductions.reduce_scatter)
    reduce_scatter_single = _collective(reductions.reduce_scatter_single)
    reduce_scatter_single_coalesced = _coalesced(reduce_scatter_single)
    broadcast = _collective(collectives.broadcast)
    gather = _collective(collectives.gather)
    scatter = _collective(collectives.scatter)
    allgather = _collective(collectives.all_gather)
    allgather_coalesced = _collective(collectives.all_gather_coalesced)
    all_gather_single = _collective(collectives.all_gather_single)
    all_gather_single_coalesced = _coalesced(all_gather_single)
    alltoall = _collective(collectives.all_to_all)
    all_to_all_single = _collective(collectives.all_to_all_single)
    barrier = _collective(collectives.barrier)

    # The names that PyTorch used before, and that its C++ still asks for.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def run(self, operation: Operation) -> CollectiveWork:
        """Call a collective; it begins when all ranks have announced it."""
        raise NotImplementedError

    # -- calls on record ------------------------------------------------------------------------

    def check_alive(self, op: str) -> None:
        """Raise CommunicationError where the ranks, or this group, cannot communicate."""
        raise NotImplementedError

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
        """Check the group, and put a call on record.

        Args:
            inputs: tensors that were checked before, see :func:`torch_mpi.group.tensors.check`.
            opts: PyTorch's; whether the call blocks, where ``blocking`` does not say so.
            sent: bytes; all of the tensors, if not given.

        Raises:
            CommunicationError: the group is of no use any more, or an incident is on.
        """
        self.check_alive(op)
        if blocking is None:
            # A caller without options, as PyTorch's C++ is, waits for the work.
            blocking = not getattr(opts, "asyncOp", True)
        call = Call(
            op,
            self.members,
            tensors.nbytes(*inputs),
            tuple(inputs[0].shape) if inputs else (),
            dtype_name(inputs[0].dtype) if inputs else "",
            peer,
            tag,
            reduce_op,
            blocking,
            place=users_place(),
        )
        if threading.get_ident() != _MAIN_THREAD:
            call.thread = threading.current_thread().name
        call.sent = call.nbytes if sent is None else sent
        recorder.add(call)
        return call

    def error_in_words(
        self, error: MPI.Exception, call: Call, waitable: Waitable | None = None
    ) -> CommunicationError:
        """Return what a user is told of an error of MPI; a death makes the group useless."""
        if is_death(error):
            self.revoke()
            waited = time.perf_counter() - call.start
            return self.world.stopped_by_another(call, waitable, waited)
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return CommunicationMismatch(
                f"{call.describe()} at {users_line()}: the message that arrived is larger than the "
                f"tensor to receive it. Sender and receiver must agree on shape and dtype.",
                call,
            )
        return CommunicationError(f"{call.describe()} at {users_line()} failed: {error}", call)
