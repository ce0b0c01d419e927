"""A process group of ranks that are threads of one process.

Each operation does what its definition says, on tensors that all ranks can reach. Messages of up to
:data:`EAGER` bytes are sent before anybody receives them, larger ones are not, as in MPI.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

from torch_mpi import record
from torch_mpi.errors import count_as_library, users_place
from torch_mpi.group import arguments as args
from torch_mpi.group.arithmetic import combine
from torch_mpi.record import Call

from .work import Message, Traffic, Work, complete, deliver, fill, fits

if TYPE_CHECKING:
    from .world import SharedRanks

# A line of this file is never shown as the student's.
count_as_library(__file__)
EAGER = 4096
# As in Open MPI and MPICH.
LARGEST_TAG = 2**31 - 1
OPS = {int(op): name for name, op in ReduceOp.RedOpType.__members__.items()}


class Group(ProcessGroup):
    """A group of ranks.

    Args:
        ranks: all ranks; the caller is one of them.
        members: global ranks, in the order of the group.
        traffic: what they share.

    Attributes:
        me: this rank's global number.
        number: how many collectives this rank has called in the group.
    """

    def __init__(self, ranks: SharedRanks, members: tuple[int, ...], traffic: Traffic):
        self.ranks, self.members, self.traffic = ranks, members, traffic
        self.me = ranks.turns.rank
        self._rank = members.index(self.me)
        super().__init__(self._rank, len(members))
        self._name = self._description = ""
        self.number = 0

    # -- who it is ------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return "mpi", the name by which programs ask for it."""
        return "mpi"

    name = getBackendName

    def getRank(self) -> int:
        """Return this rank's number in the group."""
        return self._rank

    def getSize(self) -> int:
        """Return how many ranks the group has."""
        return len(self.members)

    def getGroupName(self) -> str:
        """Return PyTorch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set PyTorch's name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return PyTorch's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set PyTorch's description of the group."""
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    supports_splitting = supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def set_timeout(self, timeout) -> None:
        """Do nothing: a wait ends, or a deadlock is reported at once."""

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def shutdown(self) -> None:
        """Do nothing: there is nothing to close."""

    # -- messages -------------------------------------------------------------------------

    def send(self, tensors, dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        (tensor,) = tensors
        args.check_message(self, "send", "dst", dst, tag, LARGEST_TAG)
        work = self._work("send", tensors, peer=dst, tag=tag, blocking=_called_by("send"))
        eager = work.call.nbytes <= EAGER
        data = tensor.detach().clone() if eager else tensor.detach()
        work.call.message = (self.me, self.ranks.count(self.me, "sent"))
        message = Message(data, work, self._rank, dst, tag)
        start, to = work.call.start, self.members[dst]
        leaves = self.ranks.clocks.leaves(self.me, to, tensor.nbytes, start)
        message.gone, message.arrives = leaves
        if eager:
            work.end(start)
        wanted = _taken(self.traffic.awaited, lambda wanted: fits(message, wanted))
        if wanted is None:
            self.traffic.sent.append(message)
        else:
            deliver(message, wanted)
        return work

    def recv(self, tensors, src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group; ``None`` accepts any rank."""
        (tensor,) = tensors
        args.check_message(self, "recv", "src", src, tag, LARGEST_TAG)
        args.check_writable(tensor, "recv")
        peer = -1 if src is None else src
        work = self._work("recv", tensors, peer=peer, tag=tag, blocking=_called_by("recv"))
        work.call.sent, work.call.received = 0, work.call.nbytes
        work.call.any_source = src is None
        wanted = Message(tensor, work, src, self._rank, tag)
        message = _taken(self.traffic.sent, lambda message: fits(message, wanted))
        if message is None:
            self.traffic.awaited.append(wanted)
        else:
            deliver(message, wanted)
        return work

    def recv_anysource(self, tensors, tag: int = 0) -> Work:
        """Receive a tensor from any rank of the group."""
        return self.recv(tensors, None, tag)

    # -- collectives: what is done with the inputs of all ranks, in group order -----------

    def broadcast(self, tensors, opts=None) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor, root = args.single(tensors, "broadcast"), args.root(self, "broadcast", opts)
        if root != self._rank:
            args.check_writable(tensor, "broadcast")

        def deliver(inputs: list) -> None:
            if root != self._rank:
                fill(tensor, inputs[root][0])

        work = self._collective("broadcast", tensors, opts, deliver, [tensor], peer=root)
        if root != self._rank:
            work.call.sent, work.call.received = 0, work.call.nbytes
        return work

    def allreduce(self, tensors, opts=None, what: str = "all_reduce") -> Work:
        """Reduce the tensors of all ranks, for all ranks."""
        tensors = tensors if isinstance(tensors, list) else [tensors]
        name = _op(opts)
        for tensor in tensors:
            args.check_writable(args.check(tensor, what), what)

        def deliver(inputs: list) -> None:
            for k, tensor in enumerate(tensors):
                fill(tensor, _reduced([given[k] for given in inputs], name))

        return self._collective(what, tensors, opts, deliver, tensors, reduce_op=name, back=1)

    def allreduce_coalesced(self, tensors, opts=None) -> Work:
        """Reduce several tensors at once."""
        return self.allreduce(tensors, opts, "all_reduce_coalesced")

    def reduce(self, tensors, opts=None) -> Work:
        """Reduce the tensors of all ranks, for the root."""
        tensor, root = args.single(tensors, "reduce"), args.root(self, "reduce", opts)
        name = _op(opts)
        if root == self._rank:
            args.check_writable(tensor, "reduce")

        def deliver(inputs: list) -> None:
            if root == self._rank:
                fill(tensor, _reduced([given[0] for given in inputs], name))

        back = int(root == self._rank)
        return self._collective(
            "reduce", tensors, opts, deliver, [tensor], peer=root, reduce_op=name, back=back
        )

    def gather(self, outputs, inputs, opts=None) -> Work:
        """Collect the tensors of all ranks on the root."""
        tensor, root = args.single(inputs, "gather"), args.root(self, "gather", opts)
        if root == self._rank:
            args.per_rank(self, outputs[0], tensor, "gather")

        def deliver(given: list) -> None:
            if root == self._rank:
                for output, (part,) in zip(outputs[0], given, strict=True):
                    fill(output, part)

        back = len(self.members) * (root == self._rank)
        return self._collective("gather", inputs, opts, deliver, inputs, peer=root, back=back)

    def scatter(self, outputs, inputs, opts=None) -> Work:
        """Give each rank its part of the root's tensors."""
        tensor, root = args.single(outputs, "scatter"), args.root(self, "scatter", opts)
        parts = inputs[0] if root == self._rank else []
        if parts:
            args.per_rank(self, parts, tensor, "scatter")

        def deliver(given: list) -> None:
            fill(outputs[0], given[root][self._rank])

        work = self._collective("scatter", outputs, opts, deliver, parts, peer=root, back=1)
        work.call.sent = sum(part.nbytes for part in parts)
        return work

    def allgather(self, outputs, inputs, opts=None) -> Work:
        """Collect the tensors of all ranks on all ranks."""
        tensor = args.single(inputs, "all_gather")
        args.check_alike([tensor, *args.check_count(self, outputs[0], "all_gather")], "all_gather")
        args.check_own(self, outputs[0], tensor)
        for output in outputs[0]:
            args.check_writable(output, "all_gather")

        def deliver(given: list) -> None:
            for output, (part,) in zip(outputs[0], given, strict=True):
                fill(output, part)

        parts = tuple(output.numel() for output in outputs[0])
        work = self._collective("all_gather", inputs, opts, deliver, inputs, parts=parts)
        work.call.received = sum(output.nbytes for output in outputs[0])
        return work

    def all_gather_single(self, output, tensor, opts=None) -> Work:
        """Collect the tensors of all ranks in one tensor."""
        args.equal_parts(self, output, tensor, "all_gather_into_tensor")
        args.check_writable(output, "all_gather_into_tensor")

        def deliver(given: list) -> None:
            fill(output, torch.cat([one.reshape(-1) for (one,) in given]).view(output.shape))

        what, parts = "all_gather_into_tensor", len(self.members) * (tensor.numel(),)
        back = len(self.members)
        return self._collective(what, [tensor], opts, deliver, [tensor], back=back, parts=parts)

    def reduce_scatter(self, outputs, inputs, opts=None) -> Work:
        """Reduce the tensors of all ranks, and give each rank one part."""
        parts = args.check_count(self, inputs[0], "reduce_scatter")
        args.check_alike([*outputs, *parts], "reduce_scatter")
        return self._reduce_scatter("reduce_scatter", outputs[0], parts, opts)

    def reduce_scatter_single(self, output, tensor, opts=None) -> Work:
        """Do the same with one tensor that has all parts."""
        args.equal_parts(self, tensor, output, "reduce_scatter_tensor")
        parts = [part.view(output.shape) for part in tensor.reshape(-1).split(output.numel())]
        return self._reduce_scatter("reduce_scatter_tensor", output, parts, opts)

    def _reduce_scatter(self, what: str, output, parts, opts) -> Work:
        name = _op(opts)

        def deliver(given: list) -> None:
            fill(output, _reduced([one[self._rank] for one in given], name))

        sizes = tuple(part.numel() for part in parts)
        work = self._collective(what, parts, opts, deliver, parts, reduce_op=name, parts=sizes)
        work.call.received = output.nbytes
        return work

    def alltoall(self, outputs, inputs, opts=None) -> Work:
        """Give each rank its part of the tensors of each rank."""
        outputs = args.check_count(self, outputs, "all_to_all")
        inputs = args.check_count(self, inputs, "all_to_all")
        args.check_alike([*inputs, *outputs], "all_to_all")
        for output in outputs:
            args.check_writable(output, "all_to_all")

        def deliver(given: list) -> None:
            for output, one in zip(outputs, given, strict=True):
                fill(output, one[self._rank])

        def refuse(given: list) -> str:
            for rank, (output, one) in enumerate(zip(outputs, given, strict=True)):
                came = one[self._rank].nbytes
                if came != output.nbytes:
                    there = f"rank {self.members[rank]} sent {came} bytes"
                    return f"{there}, rank {self.me} expects {output.nbytes}"
            return ""

        work = self._collective("all_to_all", inputs, opts, deliver, inputs, refuse=refuse)
        work.call.received = sum(output.nbytes for output in outputs)
        return work

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None):
        """Do the same with one tensor that has all parts."""
        args.split(self, tensor, input_splits, "input")
        args.split(self, output, output_splits, "output")
        size = len(self.members)
        outputs = list(output.split(output_splits or [len(output) // size] * size))
        inputs = list(tensor.split(input_splits or [len(tensor) // size] * size))
        work = self.alltoall(outputs, inputs, opts)
        work.call.op = "all_to_all_single"
        return work

    def barrier(self, opts=None) -> Work:
        """Wait until all ranks have called it."""
        return self._collective("barrier", [], opts, lambda inputs: None, [])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> Work:
        """Collect several tensors, each in one tensor."""
        return _joined(map(self.all_gather_single, outputs, inputs, itertools.repeat(opts)))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> Work:
        """Reduce several tensors that have all parts, and give each rank one part of each."""
        return _joined(map(self.reduce_scatter_single, outputs, inputs, itertools.repeat(opts)))

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    # -- the machinery --------------------------------------------------------------------

    def _work(self, op: str, tensors, deliver=None, *, blocking: bool = True, **about) -> Work:
        first = tensors[0] if tensors else None
        call = Call(
            op,
            self.members,
            sum(tensor.nbytes for tensor in tensors),
            () if first is None else tuple(first.shape),
            "" if first is None else str(first.dtype).removeprefix("torch."),
            blocking=blocking,
            place=users_place(),
            start=self.ranks.clocks.now(self.me),
            group_name=self._name,
            **about,
        )
        call.sent = call.nbytes
        record.recorder.add(call)
        return Work(self, call, tensors, deliver)

    def _collective(
        self, op: str, tensors, opts, deliver, inputs, *, back: int = 0, refuse=None, **about
    ) -> Work:
        """Come to a collective; the rank that comes last does the work of all.

        Args:
            tensors: what the call's record describes.
            deliver: puts the inputs of all ranks, in group order, into this rank's outputs.
            inputs: this rank's inputs; the call copies them.
            back: how many times the bytes of ``tensors`` this rank gets.
            refuse: says from the inputs of all ranks why this rank can't take them; "" if it can.
        """
        blocking = not getattr(opts, "asyncOp", True)
        work = self._work(op, tensors, deliver, blocking=blocking, **about)
        self.number += 1
        work.call.sequence, work.call.received = self.number, back * work.call.nbytes
        work.call.waited = blocking
        with self.ranks.clocks.stopped(self.me):
            work.inputs = [tensor.detach().clone() for tensor in inputs]
        work.key = (op, work.call.dtype, _sizes(op, tensors), work.call.parts)
        work.key += (work.call.reduce_op, work.call.peer)
        work.refuse = refuse
        there = self.traffic.rounds.setdefault(self.number, {})
        there[self._rank] = work
        if len(there) == len(self.members):
            del self.traffic.rounds[self.number]
            complete([there[k] for k in range(len(self.members))])
        return work


def _taken(queue: list[Message], suits: Callable[[Message], bool]) -> Message | None:
    """Remove the first suitable message of a queue and return it; ``None`` if there is none."""
    found = next(filter(suits, queue), None)
    if found is not None:
        queue.remove(found)
    return found


def _joined(works: Iterable[Work]) -> Work:
    """Return a work that is over when all of them are."""
    *others, last = works
    last.others = others
    return last


def _sizes(op: str, tensors: Sequence[torch.Tensor]) -> list[object]:
    """Return what must be equal on all ranks of the tensors of a collective without parts."""
    if op.startswith(("all_reduce", "broadcast", "reduce")) and not op.startswith("reduce_"):
        return [tuple(tensor.shape) for tensor in tensors]
    return [tensor.numel() for tensor in tensors[:1]] if op == "gather" else []


def _reduced(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """In the order of the ranks, so that every rank gets the same bits."""
    into = combine(parts[0].dtype, name)
    total = parts[0].clone()
    for part in itertools.islice(parts, 1, None):
        into(total, part)
    return total / len(parts) if name == "AVG" else total


def _op(opts) -> str:
    op = getattr(opts, "reduceOp", opts)
    return "SUM" if op is None else OPS[int(getattr(op, "op", op))]


def _called_by(name: str) -> bool:
    """Whether PyTorch's blocking ``name`` is among the callers (it calls ``isend``, ``irecv``)."""
    frames = itertools.islice(_frames(sys._getframe(1)), 8)
    here = distributed_c10d.__file__
    return any(f.f_code.co_name == name and f.f_code.co_filename == here for f in frames)


def _frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
