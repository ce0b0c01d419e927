"""Check the tensors of each collective and return an :class:`.Operation`; see PROTOCOL.md."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..record import Call
from . import arguments, tensors
from .arguments import Tensors
from .operation import Caller, MPICall, Operation, same

if TYPE_CHECKING:
    from .algorithms import Ranks

#: The rank to which a tensor is sent, or from which it comes, and the tensor.
Pair = tuple[int, torch.Tensor]


# -- one to all, all to one -------------------------------------------------------------------


def broadcast(group: Caller, inputs: Tensors, opts: object = None) -> Operation:
    """Copy the root's tensor to every rank."""
    tensor = arguments.single(inputs, "broadcast")
    root = arguments.root(group, "broadcast", opts)
    is_root = root == group.rank()
    memory = tensors.readable(tensor) if is_root else tensors.writable(tensor, "broadcast")
    call = group.record("broadcast", [tensor], opts, peer=root)
    if not is_root:
        call.sent = 0
        call.received = call.nbytes
    numel, itemsize = memory.numel(), memory.element_size()

    def algorithm(ranks: Ranks) -> Generator:
        from . import algorithms

        return algorithms.broadcast(ranks, memory.view(-1), root)

    def mpi(at: Sequence[int]) -> list[MPICall]:
        from . import datatypes

        return [("Bcast", (datatypes.message_at(at[0], numel, itemsize), root))]

    return Operation(
        call,
        (numel,),
        [tensor],
        inputs=[memory] if is_root else [],
        outputs=[] if is_root else [memory],
        definition=lambda given: () if is_root else given[root],
        algorithm=algorithm,
        mpi=mpi,
        memory=[memory],
        finish=None if is_root else lambda: tensors.deliver(tensor, memory),
        shown=[tensor],
        repeatable=same([memory], [tensor]),
    )


def gather(
    group: Caller, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
) -> Operation:
    """Gather the tensors of all ranks into a list on the root."""
    tensor = arguments.single(inputs, "gather")
    root = arguments.root(group, "gather", opts)
    is_root = root == group.rank()
    receives = arguments.per_rank(group, outputs[0], tensor, "gather") if is_root else []
    for _, output in receives:
        arguments.check_writable(output, "gather")
    call = group.record("gather", [tensor], opts, peer=root)
    call.received = group.size() * call.nbytes if is_root else 0
    return _exchange(
        group,
        call,
        (tensor.numel(),),
        [(root, tensor)],
        receives,
        lambda given: [each for (each,) in given] if is_root else (),
    )


def scatter(
    group: Caller, outputs: Tensors, inputs: Sequence[Tensors], opts: object = None
) -> Operation:
    """Send one tensor to each rank, from a list on the root."""
    tensor = arguments.single(outputs, "scatter")
    root = arguments.root(group, "scatter", opts)
    is_root = root == group.rank()
    arguments.check_writable(tensor, "scatter")
    sends = arguments.per_rank(group, inputs[0], tensor, "scatter") if is_root else []
    call = group.record("scatter", [tensor], opts, peer=root, sent=0)
    call.sent = group.size() * call.nbytes if is_root else 0
    call.received = call.nbytes
    rank = group.rank()
    return _exchange(
        group,
        call,
        (tensor.numel(),),
        sends,
        [(root, tensor)],
        lambda given: [given[root][rank]],
    )


# -- all to all: data -------------------------------------------------------------------------


def all_gather(
    group: Caller, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
) -> Operation:
    """Gather the tensors of all ranks into a list on every rank; their shapes may differ."""
    tensor = arguments.single(inputs, "all_gather")
    parts = arguments.check_count(group, outputs[0], "all_gather")
    arguments.check_own(group, parts, tensor, "all_gather")
    return _all_gather(group, "all_gather", parts, tensor, opts)


def all_gather_single(
    group: Caller, output: torch.Tensor, tensor: torch.Tensor, opts: object = None
) -> Operation:
    """Gather the tensors of all ranks, one after the other, into one tensor on every rank."""
    op = "all_gather_into_tensor"
    output = arguments.check(output, op)
    tensor = arguments.check(tensor, op)
    parts = arguments.equal_parts(group, output, tensor, op)
    return _all_gather(group, op, parts, tensor, opts, whole=output)


def all_gather_coalesced(
    group: Caller, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
) -> Operation:
    """Gather several tensors in one call: ``outputs[rank][i]`` is the i-th tensor of ``rank``."""
    size = group.size()
    op = "all_gather_coalesced"
    if len(outputs) != size or any(len(row) != len(inputs) for row in outputs):
        raise ValueError(
            f"{op}: the outputs must be {size} lists, one per rank, each of {len(inputs)} tensors, "
            f"one per input"
        )
    inputs = [arguments.check(tensor, op) for tensor in inputs]
    outputs = _checked_rows(outputs, inputs, op)
    call = group.record(op, inputs, opts)
    call.received = size * call.nbytes
    sends = [(rank, tensor) for rank in range(size) for tensor in inputs]
    receives = [(rank, tensor) for rank, row in enumerate(outputs) for tensor in row]
    key = tuple((arguments.dtype_name(tensor.dtype), tensor.numel()) for tensor in inputs)
    operation = _exchange(group, call, key, sends, receives, itertools.chain.from_iterable)
    return replace(operation, inputs=operation.inputs[: len(inputs)], shown=inputs)


def _checked_rows(outputs: Sequence[Tensors], inputs: Tensors, op: str) -> list[list[torch.Tensor]]:
    """Return a row of writable tensors per rank, each of which is like the input at its place."""
    rows = [[arguments.check(tensor, op) for tensor in row] for row in outputs]
    for row in rows:
        arguments.check_each(row, inputs, op)
        for output in row:
            arguments.check_writable(output, op)
    return rows


def _all_gather(
    group: Caller,
    op: str,
    parts: Tensors,
    tensor: torch.Tensor,
    opts: object,
    whole: torch.Tensor | None = None,
) -> Operation:
    arguments.check_alike([tensor, *parts], op)
    outputs = list(parts) if whole is None else [whole]
    for output in outputs:
        arguments.check_writable(output, op)
    call = group.record(op, [tensor], opts)
    call.received = tensors.nbytes(*parts)
    counts = [part.numel() for part in parts]
    call.parts = tuple(counts)
    homes, pieces = _places(parts, whole)

    def definition(given: Sequence[Tensors]) -> list[torch.Tensor]:
        return [each for (each,) in given]

    def finish() -> None:
        for output, memory in zip(outputs, pieces if whole is None else homes, strict=True):
            tensors.deliver(output, memory)

    if sum(counts) > tensors.MAX_COUNT:
        sends = [(rank, tensor) for rank in range(len(parts))]
        receives = list(enumerate(pieces))
        operation = _exchange(group, call, call.parts, sends, receives, definition, finish)
        return replace(operation, inputs=operation.inputs[:1], result=outputs, shown=[tensor])
    source = tensors.readable(tensor)
    if any(tensors.overlap(source, piece) for piece in pieces):
        source = source.clone()

    def algorithm(ranks: Ranks) -> Generator:
        from . import algorithms

        chunks = [piece.view(-1) for piece in pieces]
        chunks[ranks.rank].copy_(source.view(-1))
        yield from algorithms.all_gather(ranks, chunks)

    memory = [*homes, source]
    return Operation(
        call,
        call.parts,
        outputs,
        inputs=[source],
        outputs=pieces,
        definition=definition,
        algorithm=algorithm,
        mpi=_gathering(counts, source),
        memory=memory,
        finish=finish,
        shown=[tensor],
        repeatable=same(memory, [*outputs, tensor]),
    )


def _places(
    parts: Tensors, whole: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the plain tensors that an all_gather fills, and a piece of them for each part.

    MPI fills the parts themselves if it can. Otherwise, it fills one tensor.
    """
    counts = [part.numel() for part in parts]
    if whole is not None:
        table = tensors.room(whole)
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
    numel, itemsize = source.numel(), source.element_size()
    in_a_row = list(itertools.accumulate(counts[:-1], initial=0))

    def mpi(at: Sequence[int]) -> list[MPICall]:
        from . import datatypes

        places = at[:-1]
        offsets = tensors.offsets(places, counts, itemsize) if len(places) > 1 else in_a_row
        if offsets is None:
            return []
        first = min((place for place in places if place), default=0)
        end = max(offset + count for offset, count in zip(offsets, counts, strict=True))
        room = datatypes.memory_at(first, end * itemsize)
        receive = [room, (counts, offsets), datatypes.CARRIERS[itemsize]]
        return [("Allgatherv", (datatypes.message_at(at[-1], numel, itemsize), receive))]

    return mpi


def all_to_all(group: Caller, outputs: Tensors, inputs: Tensors, opts: object = None) -> Operation:
    """Send input r to rank r, and receive output r from rank r."""
    op = "all_to_all"
    outputs = arguments.check_count(group, outputs, op)
    inputs = arguments.check_count(group, inputs, op)
    arguments.check_alike([*inputs, *outputs], op)
    arguments.check_own(group, outputs, inputs[group.rank()], op)
    for output in outputs:
        arguments.check_writable(output, op)
    call = group.record(op, inputs, opts)
    call.received = tensors.nbytes(*outputs)
    return _all_to_all(group, call, inputs, outputs)


def all_to_all_single(
    group: Caller,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: object = None,
) -> Operation:
    """Exchange rows of one tensor between all ranks; the splits are numbers of rows."""
    op = "all_to_all_single"
    output = arguments.check(output, op)
    tensor = arguments.check(tensor, op)
    sends = arguments.split(group, tensor, input_splits, "input")
    receives = arguments.split(group, output, output_splits, "output")
    arguments.check_alike([tensor, output], op)
    memory = tensors.readable(tensor)
    stage = tensors.writable(output, op)
    if tensors.overlap(memory, stage):
        stage = torch.empty_like(stage)
    inputs = memory.view(-1).split(sends)
    outputs = stage.view(-1).split(receives)
    arguments.check_own(group, outputs, inputs[group.rank()], op)
    call = group.record(op, [tensor], opts)
    call.received = tensors.nbytes(output)
    operation = _all_to_all(group, call, inputs, outputs, lambda: tensors.deliver(output, stage))
    return replace(operation, result=[output], shown=[tensor])


def _all_to_all(
    group: Caller,
    call: Call,
    inputs: Tensors,
    outputs: Tensors,
    then: Callable[[], None] = lambda: None,
) -> Operation:
    rank = group.rank()
    sends, receives = list(enumerate(inputs)), list(enumerate(outputs))
    return _exchange(
        group,
        call,
        (),  # no rank knows the sizes of the others
        sends,
        receives,
        lambda given: [each[rank] for each in given],
        then,
        sizes_agree=False,
    )


def barrier(group: Caller, opts: object = None) -> Operation:
    """Wait until every rank of the group has called the barrier."""
    call = group.record("barrier", [], opts)

    def algorithm(ranks: Ranks) -> Generator:
        from . import algorithms

        return algorithms.barrier(ranks)

    return Operation(
        call,
        (),
        [],
        inputs=[],
        outputs=[],
        definition=lambda _: (),
        algorithm=algorithm,
        mpi=lambda _: [("Barrier", ())],
        repeatable=True,
    )


def _exchange(
    group: Caller,
    call: Call,
    key: tuple[object, ...],
    sends: Sequence[Pair],
    receives: Sequence[Pair],
    definition: Callable[[Sequence[Tensors]], Sequence[torch.Tensor]],
    then: Callable[[], None] = lambda: None,
    sizes_agree: bool = True,
) -> Operation:
    """Return a collective that consists of messages, because MPI has no fitting call.

    Args:
        sends, receives: ``(rank, tensor)`` pairs; a pair with this rank itself needs no message.
        then: called at the end.
        sizes_agree: whether the key makes sure that each message fits its place.
    """
    rank = group.rank()
    homes = {tensor.untyped_storage().data_ptr() for _, tensor in receives}
    given = [(peer, tensors.apart(tensor, homes)) for peer, tensor in sends]
    places = [(peer, tensors.room(tensor)) for peer, tensor in receives]
    outgoing = _with_others(given, rank)
    incoming = _with_others(places, rank)

    def algorithm(ranks: Ranks) -> Generator:
        from . import algorithms

        return algorithms.exchange(ranks, outgoing, incoming, sizes_agree)

    def finish() -> None:
        for (_, tensor), (_, place) in zip(receives, places, strict=True):
            tensors.deliver(tensor, place)
        then()

    return Operation(
        call,
        key,
        [tensor for _, tensor in receives],
        inputs=[memory for _, memory in given],
        outputs=[place for _, place in places],
        definition=definition,
        algorithm=algorithm,
        memory=[memory for _, memory in outgoing],
        compute=_copies_to_itself(given, places, rank),
        finish=finish,
        shown=[tensor for _, tensor in sends],
        sources=() if sizes_agree else [peer for peer, _ in receives],
    )


def _with_others(pairs: Sequence[Pair], rank: int) -> list[Pair]:
    """Return the ``(rank, tensor)`` pairs that need a message."""
    return [pair for pair in pairs if pair[0] != rank]


def _copies_to_itself(
    given: Sequence[Pair], places: Sequence[Pair], rank: int
) -> Callable[[], None]:
    """Return the function that copies what this rank sends to itself."""
    kept = [memory for peer, memory in given if peer == rank]
    own = [place for peer, place in places if peer == rank]

    def compute() -> None:
        for place, memory in zip(own, kept, strict=True):
            place.copy_(memory.view(place.shape))

    return compute
