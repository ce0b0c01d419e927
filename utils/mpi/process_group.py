"""``ProcessGroupMPI``: PyTorch's process group on the communicators of mpi4py.

The methods are those that :mod:`torch.distributed` and PyTorch's C++ call, with their
names. Each makes a record of the call, starts non-blocking MPI operations, and returns a
work that tests them: that way a wait has a deadline, can be interrupted, and a communication
that was started moves on while the rank computes.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
from mpi4py import MPI
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.constants import default_pg_timeout

from . import buffers
from .dtypes import op_name, reduction
from .errors import CommunicationError
from .progress import progress
from .record import Call, log
from .work import JoinedWork, MPIWork

TIMEOUT_VARIABLE = "MPI_BACKEND_TIMEOUT"
_C10D = distributed_c10d.__file__
# Of the messages inside a collective; they have a communicator of their own.
_EXCHANGE_TAG = 1


def create(ranks: Sequence[int]) -> ProcessGroupMPI | None:
    """The process group of ``ranks`` (global ranks; empty: all), ``None`` on other ranks.

    Raises:
        ValueError: a rank that does not exist.
    """
    timeout = _timeout_of_the_caller()
    world = MPI.COMM_WORLD
    members = tuple(ranks) if ranks else tuple(range(world.size))
    bad = [r for r in members if not 0 <= r < world.size]
    if bad:
        raise ValueError(f"ranks {bad} do not exist: the world has ranks 0 to {world.size - 1}")
    if world.rank not in members:
        return None
    return ProcessGroupMPI(members, timeout)


def _timeout_of_the_caller() -> float:
    """Seconds given to ``init_process_group`` or ``new_group``.

    PyTorch hands its MPI backend no timeout, so it is read from the frame that asks for the
    group. :data:`TIMEOUT_VARIABLE` stands in for PyTorch's default of 30 minutes.
    """
    frame, asked = sys._getframe(1), None
    for _ in range(4):
        frame = frame.f_back
        if frame is None:
            break
        if frame.f_code.co_name == "_new_process_group_helper":
            asked = frame.f_locals.get("timeout")
            break
    if asked is None or asked == default_pg_timeout:
        return float(os.environ.get(TIMEOUT_VARIABLE, default_pg_timeout.total_seconds()))
    return asked.total_seconds()


class ProcessGroupMPI(ProcessGroup):
    """A group of MPI ranks.

    Args:
        members: global ranks, in the order of the group.
        timeout: seconds that a wait lasts at most (an attribute too).
    """

    def __init__(self, members: tuple[int, ...], timeout: float):
        self._members = members
        self._rank = members.index(MPI.COMM_WORLD.rank)
        super().__init__(self._rank, len(members))
        self.timeout = timeout
        self._name = self._description = ""
        self._broken = ""
        self._sequence = 0
        group = MPI.COMM_WORLD.group.Incl(members)
        # Two communicators: a collective's own messages never meet the user's.
        self._collectives = MPI.COMM_WORLD.Create_group(group)
        self._messages = MPI.COMM_WORLD.Create_group(group)
        group.Free()

    # -- who am I -------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: D102  (PyTorch's name)
        return "mpi"

    name = getBackendName

    def getRank(self) -> int:  # noqa: D102
        return self._rank

    def getSize(self) -> int:  # noqa: D102
        return len(self._members)

    def getGroupName(self) -> str:  # noqa: D102
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: D102
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: D102
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a wait lasts at most, from now on."""
        self.timeout = timeout.total_seconds()

    # PyTorch asks a group for the backend of a device; this group is its own.
    supports_splitting = supports_coalescing = False
    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> ProcessGroupMPI:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # -- life -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give the communicators back. Called by ``destroy_process_group`` on every member.

        Receives under way are taken back, the rest is waited for. A communicator on which a
        collective never ends is kept: freeing it would bring the process down.
        """
        if not MPI.Is_finalized() and progress.drain(self):
            for communicator in (self._collectives, self._messages):
                if communicator != MPI.COMM_NULL:
                    communicator.Free()
        self._broken = "it was destroyed"

    def abort(self) -> None:
        """Refuse further use. MPI has no way to cancel a collective that has begun."""
        self._broken = "it was aborted"

    def split_group(
        self, ranks, timeout=None, pg_options=None, group_name=None, group_desc=None, *_
    ) -> ProcessGroupMPI | None:
        """The process group of some ranks (of this group); ``None`` on the others."""
        members = tuple(self._members[r] for r in ranks)
        if MPI.COMM_WORLD.rank not in members:
            return None
        child = ProcessGroupMPI(members, timeout.total_seconds() if timeout else self.timeout)
        child.setGroupName(group_name or f"{self._name}:split:{','.join(map(str, ranks))}")
        child.setGroupDesc(group_desc or f"{self._description}:split")
        return child

    splitGroup = split_group

    # -- point to point -------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> MPIWork:
        """Start sending one tensor to rank ``dst`` of the group."""
        tensor = _one(tensors, "send")
        self._check_peer("send", "dst", dst, tag)
        memory = buffers.readable(tensor)
        call = self._call("send", [tensor], peer=dst, tag=tag, blocking=_called_by("send"))
        return self._work(
            call,
            lambda: [self._messages.Isend(buffers.message(memory), dst, tag)],
            [tensor],
            keep=memory,
        )

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> MPIWork:
        """Start receiving one tensor from rank ``src`` of the group."""
        self._check_peer("recv", "src", src, tag)
        return self._receive(_one(tensors, "recv"), src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> MPIWork:
        """Start receiving one tensor from whichever rank sends first."""
        self._check_peer("recv", "src", None, tag)
        return self._receive(_one(tensors, "recv"), MPI.ANY_SOURCE, tag)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int) -> MPIWork:
        memory = buffers.writable(tensor, "recv")
        call = self._call("recv", [tensor], peer=src, tag=tag, blocking=_called_by("recv"))

        def start() -> list[MPI.Request]:
            return [self._messages.Irecv(buffers.message(memory), src, tag)]

        def finish(statuses: list[MPI.Status]) -> None:
            status = statuses[0]
            call.peer = status.Get_source()
            arrived = status.Get_elements(MPI.BYTE)
            if arrived != call.nbytes:
                raise CommunicationError(
                    f"{call.describe()}: rank {self._members[call.peer]} sent {arrived} bytes, "
                    f"expected {call.nbytes}. Sender and receiver must agree on shape and dtype."
                )
            buffers.deliver(tensor, memory)

        return self._work(call, start, [tensor], finish)

    def _check_peer(self, op: str, role: str, peer: int | None, tag: int) -> None:
        size = len(self._members)
        if peer is not None and not 0 <= peer < size:
            raise ValueError(
                f"{op}({role}={peer}): the group has ranks 0 to {size - 1} (global {self._members})"
            )
        if not 0 <= tag <= 2**31 - 1:
            raise ValueError(f"{op}(tag={tag}): a tag is a number from 0 to 2147483647")

    # -- one to all, all to one -----------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts=None) -> MPIWork:
        """The tensor of the root, on every rank."""
        tensor = _one(tensors, "broadcast")
        root = self._root("broadcast", opts)
        is_root = root == self._rank
        memory = buffers.readable(tensor) if is_root else buffers.writable(tensor, "broadcast")
        call = self._call("broadcast", [tensor], opts, peer=root)

        def start() -> list[MPI.Request]:
            return [self._collectives.Ibcast(buffers.message(memory), root)]

        def finish(_) -> None:
            if not is_root:
                buffers.deliver(tensor, memory)

        return self._work(call, start, [tensor], finish)

    def reduce(self, tensors: list[torch.Tensor], opts=None) -> MPIWork:
        """The reduction of all tensors, on the root; the others keep theirs."""
        tensor = _one(tensors, "reduce")
        root = self._root("reduce", opts)
        name = op_name(opts)
        datatype, op = reduction(tensor.dtype, name)
        if root == self._rank:
            buffers.check_distinct(tensor, "reduce")
        memory = buffers.readable(tensor)
        call = self._call("reduce", [tensor], opts, peer=root)

        def start() -> list[MPI.Request]:
            blocks = _blocks(memory, datatype)
            if root == self._rank:
                return [self._collectives.Ireduce(MPI.IN_PLACE, b, op, root) for b in blocks]
            return [self._collectives.Ireduce(b, None, op, root) for b in blocks]

        def finish(_) -> None:
            if root == self._rank:
                _divide(memory, name, len(self._members))
                buffers.deliver(tensor, memory)

        return self._work(call, start, [tensor], finish)

    def gather(self, outputs: list[list[torch.Tensor]], inputs, opts=None) -> MPIWork:
        """The tensors of all ranks, in a list on the root."""
        tensor = _one(inputs, "gather")
        root = self._root("gather", opts)
        call = self._call("gather", [tensor], opts, peer=root)
        receives = []
        if root == self._rank:
            receives = self._per_rank(outputs[0], tensor, "gather")
        return self._exchange(call, [(root, tensor)], receives)

    def scatter(self, outputs: list[torch.Tensor], inputs, opts=None) -> MPIWork:
        """One tensor for each rank, from a list on the root."""
        tensor = _one(outputs, "scatter")
        root = self._root("scatter", opts)
        call = self._call("scatter", [tensor], opts, peer=root)
        sends = []
        if root == self._rank:
            sends = self._per_rank(inputs[0], tensor, "scatter")
        return self._exchange(call, sends, [(root, tensor)])

    # -- all to all: reductions -----------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor] | torch.Tensor, opts=None) -> MPIWork:
        """The reduction of the tensors of all ranks, on every rank, in place.

        ``opts`` may be a ``ReduceOp``; without one it is SUM.
        """
        return self._all_reduce("all_reduce", [_one(tensors, "all_reduce")], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts=None) -> MPIWork:
        """:meth:`allreduce` of several tensors in one call."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, what: str, tensors: list[torch.Tensor], opts) -> MPIWork:
        name = op_name(opts)
        for tensor in tensors:
            buffers.check(tensor, what)
            buffers.check_distinct(tensor, what)
        kinds = [reduction(tensor.dtype, name) for tensor in tensors]
        memories = [buffers.readable(tensor) for tensor in tensors]
        call = self._call(what, tensors, opts)

        def start() -> list[MPI.Request]:
            return [
                self._collectives.Iallreduce(MPI.IN_PLACE, block, op)
                for memory, (datatype, op) in zip(memories, kinds, strict=True)
                for block in _blocks(memory, datatype)
            ]

        def finish(_) -> None:
            for tensor, memory in zip(tensors, memories, strict=True):
                _divide(memory, name, len(self._members))
                buffers.deliver(tensor, memory)

        return self._work(call, start, tensors, finish)

    def reduce_scatter(self, outputs, inputs, opts=None) -> MPIWork:
        """Rank r gets the reduction of everybody's r-th tensor. Sizes may differ between r."""
        output, parts = _one(outputs, "reduce_scatter"), inputs[0]
        self._check_count(parts, "reduce_scatter")
        if parts[self._rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: the output holds {output.numel()} elements, input "
                f"{self._rank} (this rank's) {parts[self._rank].numel()}"
            )
        return self._reduce_scatter("reduce_scatter", output, parts, opts)

    def reduce_scatter_single(self, output, tensor, opts=None) -> MPIWork:
        """Rank r gets the reduction of everybody's r-th equal part of one tensor."""
        parts = self._equal_parts(tensor, output, "reduce_scatter_tensor")
        return self._reduce_scatter("reduce_scatter_tensor", output, parts, opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> MPIWork:
        """:meth:`reduce_scatter_single` of several tensors."""
        works = [
            self.reduce_scatter_single(output, tensor, opts)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return JoinedWork(works, list(outputs))

    def _reduce_scatter(self, what: str, output, parts, opts) -> MPIWork:
        name = op_name(opts)
        buffers.check(output, what)
        _check_alike([output, *parts], what)
        datatype, op = reduction(output.dtype, name)
        call = self._call(what, list(parts), opts)
        stage = _flat(parts)
        memory = buffers.writable(output, what)
        if buffers.overlap(memory, stage):
            memory = torch.empty_like(memory)
        counts = [part.numel() for part in parts]

        def start() -> list[MPI.Request]:
            if stage.numel() > buffers.MAX_COUNT:
                return self._reduce_each(stage.split(counts), memory, datatype, op)
            send = [buffers.address(stage), stage.numel(), datatype]
            receive = [buffers.address(memory), memory.numel(), datatype]
            return [self._collectives.Ireduce_scatter(send, receive, counts, op)]

        def finish(_) -> None:
            _divide(memory, name, len(self._members))
            buffers.deliver(output, memory)

        return self._work(call, start, [output], finish, keep=stage)

    def _reduce_each(self, parts, memory, datatype, op) -> list[MPI.Request]:
        """Reduce part r to rank r, for counts that are too large for one MPI call."""
        requests = []
        for root, part in enumerate(parts):
            targets = _blocks(memory, datatype) if root == self._rank else None
            for k, block in enumerate(_blocks(part, datatype)):
                target = targets[k] if targets else None
                requests.append(self._collectives.Ireduce(block, target, op, root))
        return requests

    # -- all to all: data -----------------------------------------------------------------

    def allgather(self, outputs, inputs, opts=None) -> MPIWork:
        """The tensors of all ranks, in a list on every rank. Shapes may differ between ranks."""
        tensor, parts = _one(inputs, "all_gather"), outputs[0]
        self._check_count(parts, "all_gather")
        if parts[self._rank].numel() != tensor.numel():
            raise ValueError(
                f"all_gather: the input has shape {list(tensor.shape)}, place {self._rank} "
                f"(this rank's) of the output list {list(parts[self._rank].shape)}"
            )
        return self._all_gather("all_gather", parts, tensor, opts)

    def all_gather_single(self, output, tensor, opts=None) -> MPIWork:
        """The tensors of all ranks, one after the other in one tensor."""
        parts = self._equal_parts(output, tensor, "all_gather_into_tensor")
        return self._all_gather("all_gather_into_tensor", parts, tensor, opts, whole=output)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> MPIWork:
        """:meth:`all_gather_single` of several tensors."""
        works = [
            self.all_gather_single(output, tensor, opts)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return JoinedWork(works, list(outputs))

    def allgather_coalesced(self, outputs, inputs, opts=None) -> MPIWork:
        """:meth:`allgather` of several tensors: ``outputs[rank][i]`` is rank's i-th."""
        works = [
            self.allgather([[row[i] for row in outputs]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        ]
        return JoinedWork(works, [tensor for row in outputs for tensor in row])

    def _all_gather(self, what: str, parts, tensor, opts, whole=None) -> MPIWork:
        _check_alike([tensor, *parts], what)
        outputs = list(parts) if whole is None else [whole]
        for output in outputs:
            buffers.check_distinct(output, what)
        call = self._call(what, [tensor], opts)
        counts = [part.numel() for part in parts]
        if whole is not None:
            stage = buffers.writable(whole, what).view(-1)
        else:
            stage = torch.empty(sum(counts), dtype=tensor.dtype, device="cpu")

        def deliver() -> None:
            if whole is not None:
                buffers.deliver(whole, stage)
                return
            for part, piece in zip(parts, stage.split(counts), strict=True):
                part.detach().copy_(piece.view(part.shape))

        if stage.numel() > buffers.MAX_COUNT:
            sends = [(rank, tensor) for rank in range(len(parts))]
            return self._exchange(call, sends, list(enumerate(stage.split(counts))), deliver)
        memory = buffers.readable(tensor)
        if buffers.overlap(memory, stage):
            memory = memory.clone()

        def start() -> list[MPI.Request]:
            carrier = buffers.CARRIERS[tensor.element_size()]
            receive = [buffers.address(stage), (counts, _offsets(counts)), carrier]
            return [self._collectives.Iallgatherv(buffers.message(memory), receive)]

        return self._work(call, start, outputs, lambda _: deliver(), keep=memory)

    def alltoall(self, outputs: list, inputs: list, opts=None) -> MPIWork:
        """Input r goes to rank r, output r comes from rank r."""
        self._check_count(outputs, "all_to_all")
        self._check_count(inputs, "all_to_all")
        _check_alike([*inputs, *outputs], "all_to_all")
        call = self._call("all_to_all", inputs, opts)
        return self._exchange(call, list(enumerate(inputs)), list(enumerate(outputs)))

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None) -> MPIWork:
        """Rows of one tensor, split between the ranks; splits are numbers of rows."""
        what = "all_to_all_single"
        buffers.check(output, what)
        buffers.check(tensor, what)
        sends = self._split(tensor, input_splits, "input")
        receives = self._split(output, output_splits, "output")
        call = self._call(what, [tensor], opts)
        _check_alike([tensor, output], what)
        memory, stage = buffers.readable(tensor), buffers.writable(output, what)
        if buffers.overlap(memory, stage):
            stage = torch.empty_like(stage)
        if max(memory.numel(), stage.numel()) > buffers.MAX_COUNT:
            return self._exchange(
                call,
                list(enumerate(memory.view(-1).split(sends))),
                list(enumerate(stage.view(-1).split(receives))),
                lambda: buffers.deliver(output, stage),
            )

        def start() -> list[MPI.Request]:
            carrier = buffers.CARRIERS[tensor.element_size()]
            outgoing = [buffers.address(memory), (sends, _offsets(sends)), carrier]
            incoming = [buffers.address(stage), (receives, _offsets(receives)), carrier]
            return [self._collectives.Ialltoallv(outgoing, incoming)]

        return self._work(
            call, start, [output], lambda _: buffers.deliver(output, stage), keep=memory
        )

    def barrier(self, opts=None) -> MPIWork:
        """Over when every rank of the group has called it."""
        call = self._call("barrier", [], opts)
        return self._work(call, lambda: [self._collectives.Ibarrier()], [])

    # The names that PyTorch used before, and that its C++ still asks for.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- the machinery --------------------------------------------------------------------

    def _call(self, op: str, tensors, opts=None, *, peer=None, tag=None, blocking=None) -> Call:
        """Check the tensors and put the call on record."""
        if self._broken:
            raise CommunicationError(
                f"{op} on a process group that cannot be used any more: {self._broken}"
            )
        for tensor in tensors:
            buffers.check(tensor, op)
        first = tensors[0] if tensors else None
        call = Call(
            op,
            self._members,
            buffers.nbytes(*tensors),
            () if first is None else tuple(first.shape),
            "" if first is None else str(first.dtype).removeprefix("torch."),
            peer,
            tag,
            not getattr(opts, "asyncOp", True) if blocking is None else blocking,
        )
        self._sequence += tag is None
        log.add(call)
        return call

    def _work(self, call: Call, start, result, finish=None, keep=None) -> MPIWork:
        """Start a call; see :class:`MPIWork`."""
        work = MPIWork(self, call, start, list(result), finish, keep)
        if not call.blocking:
            work.progress()
        return work

    def given_up(self, call: Call) -> None:
        """A wait for ``call`` ended early. MPI can take a receive back, but no collective."""
        if call.tag is None:
            self._broken = (
                f"its {call.describe()} was given up half-way, and MPI cannot take a collective "
                f"back. Restart the ranks: ranks.restart()"
            )

    def _exchange(self, call: Call, sends, receives, then=None) -> MPIWork:
        """Messages of a collective that MPI has no fitting call for: ``(rank, tensor)`` pairs."""
        homes = {tensor.untyped_storage().data_ptr() for _, tensor in receives}
        outgoing = [(peer, _apart(tensor, homes)) for peer, tensor in sends]
        mine = [memory for peer, memory in outgoing if peer == self._rank]
        memories = [
            (peer, tensor, buffers.writable(tensor, call.op))
            for peer, tensor in receives
            if peer != self._rank
        ]
        deliveries = [(tensor, memory) for _, tensor, memory in memories]
        deliveries += [(tensor, mine[0]) for peer, tensor in receives if peer == self._rank]

        def start() -> list[MPI.Request]:
            incoming = [
                self._collectives.Irecv(buffers.message(memory), peer, _EXCHANGE_TAG)
                for peer, _, memory in memories
            ]
            return incoming + [
                self._collectives.Isend(buffers.message(memory), peer, _EXCHANGE_TAG)
                for peer, memory in outgoing
                if peer != self._rank
            ]

        def finish(statuses: list[MPI.Status]) -> None:
            for (peer, tensor, _), status in zip(memories, statuses, strict=False):
                arrived, expected = status.Get_elements(MPI.BYTE), buffers.nbytes(tensor)
                if arrived != expected:
                    raise CommunicationError(
                        f"{call.describe()}: rank {self._members[peer]} sent {arrived} bytes, "
                        f"expected {expected}"
                    )
            for tensor, memory in deliveries:
                buffers.deliver(tensor, memory)
            if then is not None:
                then()

        return self._work(call, start, [t for _, t in receives], finish, keep=outgoing)

    def _root(self, op: str, opts) -> int:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        if not 0 <= root < len(self._members):
            raise ValueError(
                f"{op}(root {root}): the group has ranks 0 to {len(self._members) - 1}"
            )
        return root

    def _check_count(self, tensors, op: str) -> None:
        if len(tensors) != len(self._members):
            raise ValueError(
                f"{op}: {len(tensors)} tensors in the list, expected one per rank: "
                f"{len(self._members)}"
            )
        for tensor in tensors:
            buffers.check(tensor, op)

    def _per_rank(self, tensors, like: torch.Tensor, op: str) -> list[tuple[int, torch.Tensor]]:
        self._check_count(tensors, op)
        for rank, tensor in enumerate(tensors):
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise ValueError(
                    f"{op}: the tensors must be alike: place {rank} of the list is "
                    f"{tensor.dtype}{list(tensor.shape)}, the single tensor "
                    f"{like.dtype}{list(like.shape)}"
                )
        return list(enumerate(tensors))

    def _equal_parts(self, whole: torch.Tensor, part: torch.Tensor, op: str) -> list[torch.Tensor]:
        """Views of ``whole``, one per rank, each with the number of elements of ``part``."""
        buffers.check(whole, op)
        buffers.check(part, op)
        size = len(self._members)
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{op}: the large tensor must be {size} times the small one (world size {size}) "
                f"and of its dtype, got {whole.dtype}{list(whole.shape)} and "
                f"{part.dtype}{list(part.shape)}"
            )
        if whole.dim() and whole.shape[0] % size == 0:
            return list(whole.detach().chunk(size)) if whole.numel() else [whole.detach()] * size
        return list(whole.detach().reshape(-1).split(part.numel())) or [whole.detach()] * size

    def _split(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """Numbers of elements per rank, from numbers of rows per rank."""
        size = len(self._members)
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise ValueError(
                    f"all_to_all_single: the {what} has {rows} rows, which {size} ranks cannot "
                    f"share equally; give {what}_split_sizes"
                )
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all_single: {what}_split_sizes {list(splits)} must be {size} numbers "
                f"that add up to the {rows} rows of the {what}"
            )
        per_row = tensor.numel() // rows if rows else 0
        return [rows_of_rank * per_row for rows_of_rank in splits]


def _apart(tensor: torch.Tensor, homes: set[int]) -> torch.Tensor:
    """Plain memory to send from, outside of the storages that are received into."""
    if tensor.untyped_storage().data_ptr() in homes:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return buffers.readable(tensor)


def _check_alike(tensors: Sequence[torch.Tensor], op: str) -> None:
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if len(dtypes) > 1:
        raise TypeError(f"{op}: all tensors must have the same dtype, got {' and '.join(dtypes)}")


def _one(tensors: list[torch.Tensor] | torch.Tensor, op: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if len(tensors) != 1:
        raise ValueError(f"{op}: one tensor per rank, got a list of {len(tensors)}")
    buffers.check(tensors[0], op)
    return tensors[0]


def _called_by(name: str) -> bool:
    """Whether PyTorch's blocking ``name`` is among the callers (it calls ``isend``, ``irecv``)."""
    frame = sys._getframe(2)
    for _ in range(6):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code.co_name == name and frame.f_code.co_filename == _C10D:
            return True
    return False


def _blocks(memory: torch.Tensor, datatype: MPI.Datatype) -> list[list]:
    return [[buffers.address(p), p.numel(), datatype] for p in buffers.pieces(memory)]


def _divide(memory: torch.Tensor, name: str, size: int) -> None:
    if name == "AVG":
        memory.div_(size)


def _offsets(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:k]) for k in range(len(counts))]


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements one after the other; not copied where they already lie like that."""
    first = parts[0]
    consecutive = all(buffers.is_plain(p) for p in parts) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in itertools.pairwise(parts)
    )
    if consecutive:
        total = sum(part.numel() for part in parts)
        return first.detach().as_strided((total,), (1,))
    return torch.cat([buffers.readable(part).reshape(-1) for part in parts])
