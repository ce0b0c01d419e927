"""Check the tensors of each collective and return an :class:`Operation`; see PROTOCOL.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..mpi import MPI
from ..record import Call
from . import algorithms, tensors
from .tensors import Tensors

if TYPE_CHECKING:
    from .process_group import ProcessGroupMPI

#: The name of a method of ``MPI.Intracomm``, and its arguments.
MPICall = tuple[str, tuple[Any, ...]]


@dataclass(slots=True)
class Operation:
    """A call of a collective on this rank as data; PROTOCOL.md has a table of the fields."""

    call: Call
    key: tuple[object, ...]
    result: Sequence[torch.Tensor]
    algorithm: Callable[[algorithms.Ranks], Generator]
    mpi: Callable[[Sequence[int]], list[MPICall]] | None = None
    memory: Sequence[torch.Tensor] = ()
    finish: Callable[[], None] | None = None
    inputs: Sequence[torch.Tensor] | None = None
    messages_from: float = math.inf
    repeatable: bool = False

    def mpi_calls(self) -> list[MPICall]:
        """Return the calls of MPI for the memory of this operation."""
        assert self.mpi is not None
        return self.mpi([tensor.data_ptr() for tensor in self.memory])


def same(memory: Tensors, tensors_: Tensors) -> bool:
    """Return whether MPI works on the memory of the user's tensors themselves."""
    pairs = zip(memory, tensors_, strict=False)
    return len(memory) == len(tensors_) and all(a.data_ptr() == b.data_ptr() for a, b in pairs)


# -- one to all, all to one -------------------------------------------------------------------


def broadcast(group: ProcessGroupMPI, inputs: Tensors, opts: object = None) -> Operation:
    """Copy the root's tensor to every rank."""
    tensor = tensors.single(inputs, "broadcast")
    root = tensors.root(group, "broadcast", opts)
    is_root = root == group.rank()
    memory = tensors.readable(tensor) if is_root else tensors.writable(tensor, "broadcast")
    call = group.record("broadcast", [tensor], opts, peer=root)
    if not is_root:
        call.sent = 0
        call.received = call.nbytes

    def finish() -> None:
        if not is_root:
            tensors.deliver(tensor, memory)

    message = tensors.message_like(memory)
    return Operation(
        call,
        (tuple(tensor.shape),),
        [tensor],
        lambda ranks: algorithms.broadcast(ranks, memory.view(-1), root),
        mpi=lambda at: [("Bcast", (message(at[0]), root))],
        memory=[memory],
        finish=finish,
        repeatable=same([memory], [tensor]),
    )


def gather(
    group: ProcessGroupMPI, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
) -> Operation:
    """Gather the tensors of all ranks into a list on the root."""
    tensor = tensors.single(inputs, "gather")
    root = tensors.root(group, "gather", opts)
    call = group.record("gather", [tensor], opts, peer=root)
    receives = []
    if root == group.rank():
        call.received = group.size() * call.nbytes
        receives = tensors.per_rank(group, outputs[0], tensor, "gather")
    return _exchange(group, call, (tensor.numel(),), [(root, tensor)], receives)


def scatter(
    group: ProcessGroupMPI, outputs: Tensors, inputs: Sequence[Tensors], opts: object = None
) -> Operation:
    """Send one tensor to each rank, from a list on the root."""
    tensor = tensors.single(outputs, "scatter")
    root = tensors.root(group, "scatter", opts)
    call = group.record("scatter", [tensor], opts, peer=root, sent=0)
    call.received = call.nbytes
    sends = []
    if root == group.rank():
        call.sent = group.size() * call.nbytes
        sends = tensors.per_rank(group, inputs[0], tensor, "scatter")
    return _exchange(group, call, (tensor.numel(),), sends, [(root, tensor)])


# -- all to all: data -------------------------------------------------------------------------


def all_gather(
    group: ProcessGroupMPI, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
) -> Operation:
    """Gather the tensors of all ranks into a list on every rank; their shapes may differ."""
    tensor = tensors.single(inputs, "all_gather")
    parts = tensors.check_count(group, outputs[0], "all_gather")
    tensors.check_own(group, parts, tensor)
    return _all_gather(group, "all_gather", parts, tensor, opts)


def all_gather_single(
    group: ProcessGroupMPI, output: torch.Tensor, tensor: torch.Tensor, opts: object = None
) -> Operation:
    """Gather the tensors of all ranks, one after the other, into one tensor on every rank."""
    op = "all_gather_into_tensor"
    output = tensors.check(output, op)
    tensor = tensors.check(tensor, op)
    parts = tensors.equal_parts(group, output, tensor, op)
    return _all_gather(group, op, parts, tensor, opts, whole=output)


def all_gather_coalesced(
    group: ProcessGroupMPI, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
) -> Operation:
    """Gather several tensors in one call: ``outputs[rank][i]`` is the i-th tensor of ``rank``."""
    size = group.size()
    op = "all_gather_coalesced"
    if len(outputs) != size or any(len(row) != len(inputs) for row in outputs):
        raise ValueError(
            f"{op}: the outputs must be {size} lists, one per rank, each of {len(inputs)} tensors, "
            f"one per input"
        )
    inputs = [tensors.check(tensor, op) for tensor in inputs]
    outputs = [[tensors.check(tensor, op) for tensor in row] for row in outputs]
    call = group.record(op, inputs, opts)
    call.received = size * call.nbytes
    sends = [(rank, tensor) for rank in range(size) for tensor in inputs]
    receives = [(rank, tensor) for rank, row in enumerate(outputs) for tensor in row]
    key = tuple((tensors.dtype_name(tensor.dtype), tensor.numel()) for tensor in inputs)
    return replace(_exchange(group, call, key, sends, receives), inputs=inputs)


def _all_gather(
    group: ProcessGroupMPI,
    op: str,
    parts: Tensors,
    tensor: torch.Tensor,
    opts: object,
    whole: torch.Tensor | None = None,
) -> Operation:
    tensors.check_alike([tensor, *parts], op)
    outputs = list(parts) if whole is None else [whole]
    for output in outputs:
        tensors.check_writable(output, op)
    call = group.record(op, [tensor], opts)
    call.received = tensors.nbytes(*parts)
    counts = [part.numel() for part in parts]
    call.parts = tuple(counts)
    homes, pieces = _places(parts, whole, op)

    def finish() -> None:
        for output, memory in zip(outputs, pieces if whole is None else homes, strict=True):
            tensors.deliver(output, memory)

    if sum(counts) > tensors.MAX_COUNT:
        sends = [(rank, tensor) for rank in range(len(parts))]
        operation = _exchange(group, call, call.parts, sends, list(enumerate(pieces)), finish)
        return replace(operation, result=outputs)
    source = tensors.readable(tensor)
    if any(tensors.overlap(source, piece) for piece in pieces):
        source = source.clone()

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        chunks = [piece.view(-1) for piece in pieces]
        chunks[ranks.rank].copy_(source.view(-1))
        yield from algorithms.all_gather(ranks, chunks)

    memory = [*homes, source]
    return Operation(
        call,
        call.parts,
        outputs,
        algorithm,
        _gathering(counts, source),
        memory,
        finish,
        inputs=[tensor],
        repeatable=same(memory, [*outputs, tensor]),
    )


def _places(
    parts: Tensors, whole: torch.Tensor | None, op: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the plain tensors that an all_gather fills, and a piece of them for each part.

    MPI fills the parts themselves if it can. Otherwise, it fills one tensor.
    """
    counts = [part.numel() for part in parts]
    if whole is not None:
        table = tensors.writable(whole, op)
    else:
        starts = [part.data_ptr() for part in parts]
        lengths = [tensors.nbytes(part) for part in parts]
        if (
            all(tensors.is_plain(part) for part in parts)
            and not tensors.any_overlap(starts, lengths)
            and tensors.offsets(starts, counts, parts[0].element_size()) is not None
        ):
            own = [part.detach() for part in parts]
            return own, own
        table = torch.empty(sum(counts), dtype=parts[0].dtype, device="cpu")
    return [table], list(table.view(-1).split(counts))


def _gathering(counts: list[int], source: torch.Tensor) -> Callable[[Sequence[int]], list[MPICall]]:
    """Return a function of the addresses of all places, or of one place for all, and the source.

    On some ranks, the places may be apart, and on other ranks in a row. But all ranks must make the
    same call, so it is never Allgather.
    """
    message = tensors.message_like(source)
    itemsize = source.element_size()
    in_a_row = list(itertools.accumulate(counts[:-1], initial=0))

    def mpi(at: Sequence[int]) -> list[MPICall]:
        places = at[:-1]
        offsets = tensors.offsets(places, counts, itemsize) if len(places) > 1 else in_a_row
        if offsets is None:
            return []
        first = min((place for place in places if place), default=0)
        end = max(offset + count for offset, count in zip(offsets, counts, strict=True))
        room = MPI.buffer.fromaddress(first, end * itemsize)
        receive = [room, (counts, offsets), tensors.CARRIERS[itemsize]]
        return [("Allgatherv", (message(at[-1]), receive))]

    return mpi


def all_to_all(
    group: ProcessGroupMPI, outputs: Tensors, inputs: Tensors, opts: object = None
) -> Operation:
    """Send input r to rank r, and receive output r from rank r."""
    outputs = tensors.check_count(group, outputs, "all_to_all")
    inputs = tensors.check_count(group, inputs, "all_to_all")
    tensors.check_alike([*inputs, *outputs], "all_to_all")
    call = group.record("all_to_all", inputs, opts)
    call.received = tensors.nbytes(*outputs)
    return _exchange(group, call, (), list(enumerate(inputs)), list(enumerate(outputs)))


def all_to_all_single(
    group: ProcessGroupMPI,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: object = None,
) -> Operation:
    """Exchange rows of one tensor between all ranks; the splits are numbers of rows."""
    op = "all_to_all_single"
    output = tensors.check(output, op)
    tensor = tensors.check(tensor, op)
    sends = tensors.split(group, tensor, input_splits, "input")
    receives = tensors.split(group, output, output_splits, "output")
    call = group.record(op, [tensor], opts)
    call.received = tensors.nbytes(output)
    tensors.check_alike([tensor, output], op)
    memory = tensors.readable(tensor)
    stage = tensors.writable(output, op)
    if tensors.overlap(memory, stage):
        stage = torch.empty_like(stage)
    operation = _exchange(
        group,
        call,
        (),
        list(enumerate(memory.view(-1).split(sends))),
        list(enumerate(stage.view(-1).split(receives))),
        lambda: tensors.deliver(output, stage),
    )
    return replace(operation, result=[output], inputs=[tensor])


def barrier(group: ProcessGroupMPI, opts: object = None) -> Operation:
    """Wait until every rank of the group has called the barrier."""
    call = group.record("barrier", [], opts)
    return Operation(
        call, (), [], algorithms.barrier, mpi=lambda _: [("Barrier", ())], repeatable=True
    )


def _exchange(
    group: ProcessGroupMPI,
    call: Call,
    key: tuple[object, ...],
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    then: Callable[[], None] = lambda: None,
) -> Operation:
    """Return a collective that consists of messages, because MPI has no fitting call.

    Args:
        sends, receives: ``(rank, tensor)`` pairs; a pair with this rank itself needs no message.
        then: called at the end.
    """
    homes = {tensor.untyped_storage().data_ptr() for _, tensor in receives}
    outgoing = []
    kept = []
    for peer, tensor in sends:
        memory = tensors.apart(tensor, homes)
        if peer == group.rank():
            kept.append(memory)
        else:
            outgoing.append((peer, memory))
    incoming = []
    deliveries = []
    mine = iter(kept)
    for peer, tensor in receives:
        if peer == group.rank():
            memory = next(mine)
        else:
            memory = tensors.writable(tensor, call.op)
            incoming.append((peer, memory))
        deliveries.append((tensor, memory))

    def finish() -> None:
        for tensor, memory in deliveries:
            tensors.deliver(tensor, memory)
        then()

    return Operation(
        call,
        key,
        [tensor for _, tensor in receives],
        lambda ranks: algorithms.exchange(ranks, outgoing, incoming),
        memory=[memory for _, memory in outgoing],
        finish=finish,
        inputs=[tensor for _, tensor in sends],
    )
