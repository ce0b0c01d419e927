"""A process group of ranks that are threads of one process: see :mod:`local_ranks`.

Each operation does what its definition says, on tensors that all ranks can reach. Messages of up to
:data:`EAGER` bytes are sent before anybody receives them, larger ones are not: as MPI does it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup, ReduceOp, Work, distributed_c10d

from torch_mpi.errors import CommunicationMismatch, count_as_library, users_place
from torch_mpi.group.arithmetic import combine
from torch_mpi.record import Call

if TYPE_CHECKING:
    from local_ranks import World

# Lines of these ranks are told as those of the student, never as ours.
count_as_library(__file__)
EAGER = 4096
OPS = {int(op): name for name, op in ReduceOp.RedOpType.__members__.items()}
# The clock itself, whatever a check puts in its place.
now = time.perf_counter


@dataclass(eq=False)
class Message:
    """One that was sent, or is asked for."""

    tensor: torch.Tensor
    work: LocalWork
    #: In the group; ``None`` where any rank will do.
    source: int | None
    to: int
    tag: int


@dataclass
class Traffic:
    """What the ranks of one group have under way: shared by all of them."""

    sent: list[Message] = field(default_factory=list)
    awaited: list[Message] = field(default_factory=list)
    #: Of each collective by its number: what came by rank.
    rounds: dict[int, dict[int, LocalWork]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what was under way."""
        self.sent.clear()
        self.awaited.clear()
        self.rounds.clear()


class LocalWork(Work):
    """A communication of one rank."""

    def __init__(self, group: LocalGroup, call: Call, result: Sequence[torch.Tensor], deliver=None):
        super().__init__()
        self.group, self.call, self._result = group, call, list(result)
        self.deliver: Callable[[list], None] | None = deliver
        self.inputs: object = None
        self.key: tuple = ()
        self.done = False
        self.error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        """It is over."""
        self.error, self.done = error, True
        self.call.matched = self.call.end = now()

    def missing(self) -> tuple[list[int], bool]:
        """Global ranks that have to come, and whether one of them is enough."""
        group = self.group
        if self.call.op in ("send", "recv"):
            if self.call.peer is None or self.call.peer < 0:
                return [rank for rank in group.members if rank != group.world.rank], True
            return [self.call.partner], False
        there = group.traffic.rounds.get(self.call.sequence, {})
        return [rank for k, rank in enumerate(group.members) if k not in there], False

    def wait(self, timeout=None) -> bool:
        self.call.waited = True
        begun = now()
        self.group.world.block(self)
        self.call.waits.append([begun, now()])
        if self.error is not None:
            raise self.error
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        self.group.world.let_others_run()
        self.call.waited |= self.done
        return self.done

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        return self.call.peer

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Complete already: PyTorch's C++ waits for one in a way that lets no other rank run."""
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._result)
        return future


class LocalGroup(ProcessGroup):
    """A group of ranks.

    Args:
        world: the ranks; the caller is one of them.
        members: global ranks, in the order of the group.
        traffic: what they share.
    """

    def __init__(self, world: World, members: tuple[int, ...], traffic: Traffic):
        self.world, self.members, self.traffic = world, members, traffic
        self._rank = members.index(world.rank)
        super().__init__(self._rank, len(members))
        self._name = self._description = ""
        self.number = 0

    # -- who it is ------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "mpi"

    name = getBackendName

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return len(self.members)

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    supports_splitting = supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> LocalGroup:
        return self

    def set_timeout(self, timeout) -> None:
        """Nothing: a wait ends, or it is certain that it never will."""

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def shutdown(self) -> None:
        pass

    # -- messages -------------------------------------------------------------------------

    def send(self, tensors, dst: int, tag: int = 0) -> LocalWork:
        (tensor,) = tensors
        self._check_peer("send", "dst", dst)
        work = self._work("send", tensors, peer=dst, tag=tag, blocking=_called_by("send"))
        eager = work.call.nbytes <= EAGER
        data = tensor.detach().clone() if eager else tensor.detach()
        work.call.message = (self.world.rank, self.world.count("sent"))
        message = Message(data, work, self._rank, dst, tag)
        for wanted in self.traffic.awaited:
            if _fits(message, wanted):
                self.traffic.awaited.remove(wanted)
                _deliver(message, wanted, self.members)
                return work
        self.traffic.sent.append(message)
        if eager:
            work.end()
        return work

    def recv(self, tensors, src: int, tag: int = 0) -> LocalWork:
        (tensor,) = tensors
        self._check_peer("recv", "src", src)
        peer = -1 if src is None else src
        work = self._work("recv", tensors, peer=peer, tag=tag, blocking=_called_by("recv"))
        work.call.sent, work.call.received = 0, work.call.nbytes
        work.call.any_source = src is None
        wanted = Message(tensor, work, src, self._rank, tag)
        for message in self.traffic.sent:
            if _fits(message, wanted):
                self.traffic.sent.remove(message)
                _deliver(message, wanted, self.members)
                return work
        self.traffic.awaited.append(wanted)
        return work

    def recv_anysource(self, tensors, tag: int = 0) -> LocalWork:
        return self.recv(tensors, None, tag)

    def _check_peer(self, op: str, role: str, peer: int | None) -> None:
        """As the backend does."""
        size = len(self.members)
        if peer is not None and not 0 <= peer < size:
            raise ValueError(
                f"{op}({role}={peer}): the group has ranks 0 to {size - 1} (global {self.members})"
            )

    # -- collectives: what is done with the inputs of all ranks, in group order -----------

    def broadcast(self, tensors, opts=None) -> LocalWork:
        (tensor,) = tensors
        root = _root(opts)

        def deliver(inputs: list) -> None:
            if root != self._rank:
                _fill(tensor, inputs[root][0])

        work = self._collective("broadcast", tensors, opts, deliver, [tensor], peer=root)
        if root != self._rank:
            work.call.sent, work.call.received = 0, work.call.nbytes
        return work

    def allreduce(self, tensors, opts=None, what: str = "all_reduce") -> LocalWork:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        name = _op(opts)

        def deliver(inputs: list) -> None:
            for k, tensor in enumerate(tensors):
                _fill(tensor, _reduced([given[k] for given in inputs], name))

        return self._collective(what, tensors, opts, deliver, tensors, reduce_op=name, back=1)

    def allreduce_coalesced(self, tensors, opts=None) -> LocalWork:
        return self.allreduce(tensors, opts, "all_reduce_coalesced")

    def reduce(self, tensors, opts=None) -> LocalWork:
        (tensor,) = tensors
        root, name = _root(opts), _op(opts)

        def deliver(inputs: list) -> None:
            if root == self._rank:
                _fill(tensor, _reduced([given[0] for given in inputs], name))

        back = int(root == self._rank)
        return self._collective(
            "reduce", tensors, opts, deliver, [tensor], peer=root, reduce_op=name, back=back
        )

    def gather(self, outputs, inputs, opts=None) -> LocalWork:
        root = _root(opts)

        def deliver(given: list) -> None:
            if root == self._rank:
                for output, (tensor,) in zip(outputs[0], given, strict=True):
                    _fill(output, tensor)

        back = len(self.members) * (root == self._rank)
        return self._collective("gather", inputs, opts, deliver, inputs, peer=root, back=back)

    def scatter(self, outputs, inputs, opts=None) -> LocalWork:
        root = _root(opts)
        parts = inputs[0] if root == self._rank else []

        def deliver(given: list) -> None:
            _fill(outputs[0], given[root][self._rank])

        work = self._collective("scatter", outputs, opts, deliver, parts, peer=root, back=1)
        work.call.sent = sum(part.nbytes for part in parts)
        return work

    def allgather(self, outputs, inputs, opts=None) -> LocalWork:
        def deliver(given: list) -> None:
            for output, (tensor,) in zip(outputs[0], given, strict=True):
                _fill(output, tensor)

        work = self._collective("all_gather", inputs, opts, deliver, inputs)
        work.call.received = sum(output.nbytes for output in outputs[0])
        return work

    def all_gather_single(self, output, tensor, opts=None) -> LocalWork:
        def deliver(given: list) -> None:
            _fill(output, torch.cat([one.reshape(-1) for (one,) in given]).view(output.shape))

        what = "all_gather_into_tensor"
        return self._collective(what, [tensor], opts, deliver, [tensor], back=len(self.members))

    def reduce_scatter(self, outputs, inputs, opts=None) -> LocalWork:
        return self._reduce_scatter("reduce_scatter", outputs[0], list(inputs[0]), opts)

    def reduce_scatter_single(self, output, tensor, opts=None) -> LocalWork:
        parts = [part.view(output.shape) for part in tensor.reshape(-1).split(output.numel())]
        return self._reduce_scatter("reduce_scatter_tensor", output, parts, opts)

    def _reduce_scatter(self, what: str, output, parts, opts) -> LocalWork:
        name = _op(opts)

        def deliver(given: list) -> None:
            _fill(output, _reduced([one[self._rank] for one in given], name))

        work = self._collective(what, parts, opts, deliver, parts, reduce_op=name)
        work.call.received = output.nbytes
        return work

    def alltoall(self, outputs, inputs, opts=None) -> LocalWork:
        def deliver(given: list) -> None:
            for output, one in zip(outputs, given, strict=True):
                _fill(output, one[self._rank])

        work = self._collective("all_to_all", inputs, opts, deliver, inputs)
        work.call.received = sum(output.nbytes for output in outputs)
        return work

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None):
        size = len(self.members)
        outputs = list(output.split(output_splits or [len(output) // size] * size))
        inputs = list(tensor.split(input_splits or [len(tensor) // size] * size))
        work = self.alltoall(outputs, inputs, opts)
        work.call.op = "all_to_all_single"
        return work

    def barrier(self, opts=None) -> LocalWork:
        return self._collective("barrier", [], opts, lambda inputs: None, [])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    # -- the machinery --------------------------------------------------------------------

    def _work(self, op: str, tensors, deliver=None, *, blocking: bool = True, **about) -> LocalWork:
        first = tensors[0] if tensors else None
        call = Call(
            op,
            self.members,
            sum(tensor.nbytes for tensor in tensors),
            () if first is None else tuple(first.shape),
            "" if first is None else str(first.dtype).removeprefix("torch."),
            blocking=blocking,
            place=users_place(),
            start=now(),
            **about,
        )
        call.sent = call.nbytes
        self.world.begin(call)
        return LocalWork(self, call, tensors, deliver)

    def _collective(
        self, op: str, tensors, opts, deliver, inputs, *, back: int = 0, **about
    ) -> LocalWork:
        """Come to a collective; who comes last does the work of all.

        Args:
            inputs: of this rank, as they are now.
            back: how many times the bytes of ``tensors`` this rank gets.
        """
        blocking = not getattr(opts, "asyncOp", True)
        work = self._work(op, tensors, deliver, blocking=blocking, **about)
        self.number += 1
        work.call.sequence, work.call.received = self.number, back * work.call.nbytes
        work.call.waited = blocking
        work.inputs = [tensor.detach().clone() for tensor in inputs]
        sizes = [tuple(t.shape) for t in tensors] if op.startswith(("all_reduce", "broad")) else ()
        work.key = (op, work.call.dtype, sizes, work.call.reduce_op, work.call.peer)
        there = self.traffic.rounds.setdefault(self.number, {})
        there[self._rank] = work
        if len(there) == len(self.members):
            del self.traffic.rounds[self.number]
            _complete([there[k] for k in range(len(self.members))])
        return work


def _complete(works: list[LocalWork]) -> None:
    """All ranks have come to a collective."""
    error = None
    odd = next((work for work in works if work.key != works[0].key), None)
    if odd is not None:
        sides = [
            f"rank {work.group.members[work.group._rank]} called {work.call.describe()}"
            for work in (works[0], odd)
        ]
        error = CommunicationMismatch(
            f"{', but '.join(sides)}. All ranks of a group have to make the same collective calls "
            "in the same order."
        )
    else:
        inputs = [work.inputs for work in works]
        for work in works:
            work.deliver(inputs)
    for work in works:
        work.end(error)


def _fits(message: Message, wanted: Message) -> bool:
    return (
        message.to == wanted.to
        and message.tag == wanted.tag
        and wanted.source in (None, message.source)
    )


def _deliver(message: Message, wanted: Message, members: tuple[int, ...]) -> None:
    sent, call = message.work.call, wanted.work.call
    call.peer, call.message = message.source, sent.message
    error = None
    if (sent.dtype, sent.nbytes) != (call.dtype, call.nbytes):
        error = CommunicationMismatch(
            f"rank {members[message.source]} sent {sent.dtype}{list(sent.shape)} ({sent.nbytes} "
            f"bytes, tag={sent.tag}), but rank {members[wanted.to]} receives {call.dtype}"
            f"{list(call.shape)} ({call.nbytes} bytes). Sender and receiver must agree on dtype "
            "and number of elements."
        )
    else:
        _fill(wanted.tensor, message.tensor.reshape(wanted.tensor.shape))
    wanted.work.end(error)
    if not message.work.done:
        message.work.end(error)


def _fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.detach().copy_(value)


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


def _root(opts) -> int:
    return getattr(opts, "rootRank", 0)


def _called_by(name: str) -> bool:
    """Whether PyTorch's blocking ``name`` is among the callers (it calls ``isend``, ``irecv``)."""
    frames = itertools.islice(_frames(sys._getframe(1)), 8)
    here = distributed_c10d.__file__
    return any(f.f_code.co_name == name and f.f_code.co_filename == here for f in frames)


def _frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
