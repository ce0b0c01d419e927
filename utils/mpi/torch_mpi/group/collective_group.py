"""A process group as PyTorch sees it: its names, its collectives, and calls on record."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from .. import settings
from ..errors import CommunicationError, CommunicationMismatch, users_line, users_place
from ..mpi import MPI, is_death
from ..protocol import board, rendezvous, world
from ..protocol.handshake import WORDS, Handshake
from ..protocol.interfaces import Waitable
from ..protocol.progress import progress
from ..protocol.status import Side
from ..record import Call, recorder
from . import collectives, tensors
from .collective_work import CollectiveWork, FastPath, JoinedWork, enqueue
from .collectives import Operation
from .messages import Channels
from .tensors import Tensors
from .work import DONE, DoneWork

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
    """A process group with all collectives; a subclass makes, ends and renews it.

    :mod:`torch.distributed` and PyTorch's C++ call these methods, by these names. Where ``opts`` is
    one of PyTorch's objects of options, its ``asyncOp`` says whether the caller waits for the work.

    Args:
        members: global ranks, in the order of the group.
        timeout: seconds that a wait lasts at most.
    """

    # PyTorch asks a group for the backend of a device; this group is its own.
    supports_splitting = True
    supports_coalescing = False

    def __init__(self, members: tuple[int, ...], timeout: float):
        here = world.current()
        assert here is not None, "create() has entered the world"
        self.world: world.World = here
        self.members = members
        self.key = members, here.groups.made.get(members, 0) + 1
        self._rank = members.index(here.rank)
        super().__init__(self._rank, len(members))
        self._name = ""
        self._description = ""
        self._timeout = timeout
        self._lost = ""
        self._has_channels = False

    @property
    def balance(self) -> int:
        """Return how many more messages this rank has sent in this group than received."""
        return self.channels.balance

    def _open(self) -> None:
        """Make the communicators and the board. All members are here."""
        # A collective's own messages never meet the user's.
        envelopes, data = rendezvous.two_communicators(self.world, self.members)
        self.channels = Channels(envelopes, data, self.members, self._rank)
        self._has_channels = True
        another = functools.partial(rendezvous.one_communicator, self.world, self.members)
        notes = board.make(data, another, self.world.one_machine, WORDS)
        self.handshake = Handshake(notes)
        self._fast_path = FastPath(self.handshake, data)

    @property
    def timeout(self) -> float:
        """Return the seconds that a wait lasts at most; a tool may have set another limit."""
        return self._timeout if settings.time_limit is None else settings.time_limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a wait lasts at most, from now on."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.handshake.announcements.number

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

    _all_reduce = _collective(collectives.all_reduce)
    allreduce_coalesced = _collective(collectives.all_reduce_coalesced)
    reduce = _collective(collectives.reduce)
    reduce_scatter = _collective(collectives.reduce_scatter)
    reduce_scatter_single = _collective(collectives.reduce_scatter_single)
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

    def allreduce(
        self, tensors: list[torch.Tensor] | torch.Tensor, opts: object = None
    ) -> CollectiveWork | DoneWork:
        """Reduce the tensors of all ranks; on the fast path where possible."""
        known = self._fast_path.find(tensors)
        # Another thread must not call a collective before this one is in the queue.
        if known is None or not self.handshake.lock.acquire(blocking=False):
            return self._all_reduce(tensors, opts)
        try:
            if self._fast_path.all_reduce(tensors[0], opts, known):
                return DONE
            return self._all_reduce(tensors, opts)
        except MPI.Exception as error:
            raise self.error_in_words(error, known.call) from None
        finally:
            try:
                self.handshake.end_fast_path()
            finally:  # also after a Ctrl-C in there
                self.handshake.lock.release()

    # The names that PyTorch used before, and that its C++ still asks for.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def run(self, operation: Operation) -> CollectiveWork:
        """Call a collective; it begins when all ranks have announced it."""
        work = enqueue(self, operation)
        if work.call.blocking and work.may_block:
            self._fast_path.remember(operation, work.entry.code)
        return work

    # -- calls on record ------------------------------------------------------------------------

    def _check_alive(self, op: str) -> None:
        if threading.current_thread() is not progress.thread:
            self.world.threads.communicates()
        self.world.recover_or_raise(op)
        if self._lost:
            raise CommunicationError(
                f"{op} on a process group that cannot be used any more: {self._lost}"
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
        """Check the group, and put a call on record.

        Args:
            inputs: tensors that were checked before, see :func:`torch_mpi.group.tensors.check`.
            opts: PyTorch's; whether the call blocks, where ``blocking`` does not say so.
            sent: bytes; all of the tensors, if not given.

        Raises:
            CommunicationError: the group is of no use any more, or an incident is on.
        """
        self._check_alive(op)
        if blocking is None:
            # A caller without options, as PyTorch's C++ is, waits for the work.
            blocking = not getattr(opts, "asyncOp", True)
        call = Call(
            op,
            self.members,
            tensors.nbytes(*inputs),
            tuple(inputs[0].shape) if inputs else (),
            tensors.dtype_name(inputs[0].dtype) if inputs else "",
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

    def called(self) -> dict[str, Side]:
        """Return what this rank has called that has not begun, by the name of the collective."""
        return {self.name_of(call): call.side() for call in self.handshake.called().values()}

    def name_of(self, call: Call) -> str:
        """Return the name of a collective, the same on all ranks."""
        return f"{self.key} {call.sequence}"

    def forget_fast_path(self) -> None:
        """Have the next call look whether all is well."""
        self._fast_path.known.clear()

    def revoke(self) -> None:
        """Have no other rank wait inside of a call of MPI for one that has died."""
        self.world.base.Revoke()
        if self._has_channels:
            self.channels.envelopes.Revoke()
            self.channels.data.Revoke()

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
