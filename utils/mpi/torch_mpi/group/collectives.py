"""The collectives that move data, and ``barrier``.

A collective is one function, and a method of
:class:`~torch_mpi.group.collective_group.CollectiveGroup` that calls it. The function checks the
tensors and returns an :class:`~torch_mpi.group.operation.Operation`: what goes in and out, MPI's
call for it, and the same as messages. PROTOCOL.md says how to add one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch

from ..record import Call
from . import algorithms, buffers, tensors
from .dtypes import dtype_name
from .operation import MPICall, Operation
from .tensors import Tensors

if TYPE_CHECKING:
    from .collective_group import CollectiveGroup

# -- one to all, all to one -------------------------------------------------------------------


def broadcast(group: CollectiveGroup, given: Tensors, opts: object) -> Operation:
    """The tensor of the root, on every rank."""
    tensor = tensors.one(given, "broadcast")
    root = tensors.root(group, "broadcast", opts)
    is_root = root == group.rank()
    memory = buffers.readable(tensor) if is_root else buffers.writable(tensor, "broadcast")
    call = group.record("broadcast", [tensor], opts, peer=root)
    if not is_root:
        call.sent, call.received = 0, call.nbytes

    def finish() -> None:
        if not is_root:
            buffers.deliver(tensor, memory)

    return Operation(
        call,
        (tuple(tensor.shape),),
        [tensor],
        lambda ranks: algorithms.broadcast(ranks, memory.view(-1), root),
        mpi=lambda: [("Bcast", (buffers.message(memory), root))],
        finish=finish,
    )


def gather(
    group: CollectiveGroup, outputs: Sequence[Tensors], inputs: Tensors, opts: object
) -> Operation:
    """The tensors of all ranks, in a list on the root."""
    tensor = tensors.one(inputs, "gather")
    root = tensors.root(group, "gather", opts)
    call = group.record("gather", [tensor], opts, peer=root)
    receives = []
    if root == group.rank():
        call.received = group.size() * call.nbytes
        receives = tensors.per_rank(group, outputs[0], tensor, "gather")
    return _exchange(group, call, (tensor.numel(),), [(root, tensor)], receives)


def scatter(
    group: CollectiveGroup, outputs: Tensors, inputs: Sequence[Tensors], opts: object
) -> Operation:
    """One tensor for each rank, from a list on the root."""
    tensor = tensors.one(outputs, "scatter")
    root = tensors.root(group, "scatter", opts)
    call = group.record("scatter", [tensor], opts, peer=root, sent=0)
    call.received, sends = call.nbytes, []
    if root == group.rank():
        call.sent = group.size() * call.nbytes
        sends = tensors.per_rank(group, inputs[0], tensor, "scatter")
    return _exchange(group, call, (tensor.numel(),), sends, [(root, tensor)])


# -- all to all: data -------------------------------------------------------------------------


def all_gather(
    group: CollectiveGroup, outputs: Sequence[Tensors], inputs: Tensors, opts: object
) -> Operation:
    """The tensors of all ranks, in a list on every rank. Shapes may differ between ranks."""
    tensor = tensors.one(inputs, "all_gather")
    parts = tensors.check_count(group, outputs[0], "all_gather")
    own = parts[group.rank()]
    if own.numel() != tensor.numel():
        raise ValueError(
            f"all_gather: the input has shape {list(tensor.shape)}, place {group.rank()} "
            f"(this rank's) of the output list {list(own.shape)}"
        )
    return _all_gather(group, "all_gather", parts, tensor, opts)


def all_gather_single(
    group: CollectiveGroup, output: torch.Tensor, tensor: torch.Tensor, opts: object
) -> Operation:
    """The tensors of all ranks, one after the other in one tensor."""
    what = "all_gather_into_tensor"
    output, tensor = buffers.check(output, what), buffers.check(tensor, what)
    parts = tensors.equal_parts(group, output, tensor, what)
    return _all_gather(group, what, parts, tensor, opts, whole=output)


def all_gather_coalesced(
    group: CollectiveGroup, outputs: Sequence[Tensors], inputs: Tensors, opts: object
) -> Operation:
    """:func:`all_gather` of several tensors: ``outputs[rank][i]`` is rank's i-th."""
    size, what = group.size(), "all_gather_coalesced"
    if len(outputs) != size or any(len(row) != len(inputs) for row in outputs):
        raise ValueError(
            f"{what}: the outputs must be {size} lists (world size) of {len(inputs)} tensors, as "
            f"there are inputs"
        )
    inputs = [buffers.check(tensor, what) for tensor in inputs]
    outputs = [[buffers.check(tensor, what) for tensor in row] for row in outputs]
    call = group.record(what, inputs, opts)
    call.received = size * call.nbytes
    sends = [(rank, tensor) for rank in range(size) for tensor in inputs]
    receives = [(rank, tensor) for rank, row in enumerate(outputs) for tensor in row]
    key = tuple((dtype_name(tensor.dtype), tensor.numel()) for tensor in inputs)
    return _exchange(group, call, key, sends, receives, inputs=inputs)


def _all_gather(
    group: CollectiveGroup,
    what: str,
    parts: Tensors,
    tensor: torch.Tensor,
    opts: object,
    whole: torch.Tensor | None = None,
) -> Operation:
    tensors.check_alike([tensor, *parts], what)
    outputs = list(parts) if whole is None else [whole]
    for output in outputs:
        buffers.check_writable(output, what)
    call = group.record(what, [tensor], opts)
    call.received = buffers.nbytes(*parts)
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

    key = tuple(counts)
    if stage.numel() > buffers.MAX_COUNT:
        sends = [(rank, tensor) for rank in range(len(parts))]
        return _exchange(group, call, key, sends, list(enumerate(stage.split(counts))), deliver)
    memory = buffers.readable(tensor)
    if buffers.overlap(memory, stage):
        memory = memory.clone()

    def mpi() -> list[MPICall]:
        carrier = buffers.CARRIERS[tensor.element_size()]
        if len(set(counts)) == 1:
            receive = [buffers.address(stage), counts[0], carrier]
            return [("Allgather", (buffers.message(memory), receive))]
        offsets = list(itertools.accumulate(counts[:-1], initial=0))
        receive = [buffers.address(stage), (counts, offsets), carrier]
        return [("Allgatherv", (buffers.message(memory), receive))]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        chunks = list(stage.split(counts))
        chunks[ranks.rank].copy_(memory.view(-1))
        yield from algorithms.all_gather(ranks, chunks)

    return Operation(call, key, outputs, algorithm, mpi, deliver, memory, inputs=[tensor])


def all_to_all(
    group: CollectiveGroup, outputs: Tensors, inputs: Tensors, opts: object
) -> Operation:
    """Input r goes to rank r, output r comes from rank r."""
    outputs = tensors.check_count(group, outputs, "all_to_all")
    inputs = tensors.check_count(group, inputs, "all_to_all")
    tensors.check_alike([*inputs, *outputs], "all_to_all")
    call = group.record("all_to_all", inputs, opts)
    call.received = buffers.nbytes(*outputs)
    return _exchange(group, call, (), list(enumerate(inputs)), list(enumerate(outputs)))


def all_to_all_single(
    group: CollectiveGroup,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: object,
) -> Operation:
    """Rows of one tensor, split between the ranks; splits are numbers of rows."""
    what = "all_to_all_single"
    output, tensor = buffers.check(output, what), buffers.check(tensor, what)
    sends = tensors.split(group, tensor, input_splits, "input")
    receives = tensors.split(group, output, output_splits, "output")
    call = group.record(what, [tensor], opts)
    call.received = buffers.nbytes(output)
    tensors.check_alike([tensor, output], what)
    memory, stage = buffers.readable(tensor), buffers.writable(output, what)
    if buffers.overlap(memory, stage):
        stage = torch.empty_like(stage)
    return _exchange(
        group,
        call,
        (),
        list(enumerate(memory.view(-1).split(sends))),
        list(enumerate(stage.view(-1).split(receives))),
        lambda: buffers.deliver(output, stage),
        inputs=[tensor],
    )


def barrier(group: CollectiveGroup, opts: object) -> Operation:
    """Over when every rank of the group has called it."""
    call = group.record("barrier", [], opts)
    return Operation(call, (), [], algorithms.barrier, mpi=lambda: [("Barrier", ())])


def _exchange(
    group: CollectiveGroup,
    call: Call,
    key: tuple[object, ...],
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    then: Callable[[], None] | None = None,
    inputs: Tensors | None = None,
) -> Operation:
    """A collective of messages, for which MPI has no fitting call: ``(rank, tensor)`` pairs."""
    mine = group.rank()
    homes = {tensor.untyped_storage().data_ptr() for _, tensor in receives}
    outgoing = [(peer, tensors.apart(tensor, homes)) for peer, tensor in sends]
    incoming = [
        (peer, tensor, buffers.writable(tensor, call.op))
        for peer, tensor in receives
        if peer != mine
    ]
    deliveries = [(tensor, memory) for _, tensor, memory in incoming]
    own = [tensor for peer, tensor in receives if peer == mine]
    deliveries += zip(own, [memory for peer, memory in outgoing if peer == mine], strict=True)

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        return algorithms.exchange(
            ranks,
            [(peer, memory) for peer, memory in outgoing if peer != mine],
            [(peer, memory) for peer, _, memory in incoming],
        )

    def finish() -> None:
        for tensor, memory in deliveries:
            buffers.deliver(tensor, memory)
        if then is not None:
            then()

    result = [tensor for _, tensor in receives]
    inputs = inputs or [tensor for _, tensor in sends]
    return Operation(call, key, result, algorithm, None, finish, outgoing, inputs)
