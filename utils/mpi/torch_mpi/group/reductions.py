"""The collectives that reduce: ``reduce``, ``all_reduce``, ``reduce_scatter``."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..mpi import MPI
from . import algorithms, buffers, tensors
from .arithmetic import combine
from .dtypes import check_ops, dtype_name, factor_of, multiplied, op_name, reduction
from .operation import MPICall, Operation
from .tensors import Tensors

if TYPE_CHECKING:
    from .collective_group import CollectiveGroup

# Open MPI's Iallreduce takes two to four times as long as Allreduce from here on; a ring of
# messages that are added up by PyTorch does not.
RING_FROM = 512 * 1024  # bytes


def reduce(group: CollectiveGroup, given: Tensors, opts: object) -> Operation:
    """The reduction of all tensors, on the root; the others keep theirs."""
    tensor = tensors.one(given, "reduce")
    root = tensors.root(group, "reduce", opts)
    is_root, name = root == group.rank(), op_name(opts)
    datatype, op = reduction(tensor.dtype, name)
    if is_root:
        buffers.check_writable(tensor, "reduce")
    memory = multiplied(buffers.readable(tensor), factor_of(opts, name, tensor.dtype))
    call = group.record("reduce", [tensor], opts, peer=root, reduce_op=name)
    call.received = call.nbytes if is_root else 0

    def mpi() -> list[MPICall]:
        blocks = _blocks(memory, datatype)
        if is_root:
            return [("Reduce", (MPI.IN_PLACE, block, op, root)) for block in blocks]
        return [("Reduce", (block, None, op, root)) for block in blocks]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        flat = memory.view(-1) if is_root else memory.view(-1).clone()
        return algorithms.reduce(ranks, flat, combine(tensor.dtype, name), root)

    def finish() -> None:
        check_ops()
        if is_root:
            _divide(memory, name, group.size())
            buffers.deliver(tensor, memory)

    return Operation(call, (tuple(tensor.shape),), [tensor], algorithm, mpi, finish, memory)


def all_reduce(group: CollectiveGroup, given: Tensors | torch.Tensor, opts: object) -> Operation:
    """The reduction of the tensors of all ranks, on every rank, in place."""
    return _all_reduce(group, "all_reduce", [tensors.one(given, "all_reduce")], opts)


def all_reduce_coalesced(group: CollectiveGroup, given: Tensors, opts: object) -> Operation:
    """:func:`all_reduce` of several tensors in one call."""
    what = "all_reduce_coalesced"
    return _all_reduce(group, what, [buffers.check(tensor, what) for tensor in given], opts)


def _all_reduce(group: CollectiveGroup, what: str, given: Tensors, opts: object) -> Operation:
    name = op_name(opts)
    for tensor in given:
        buffers.check_writable(tensor, what)
    kinds = [reduction(tensor.dtype, name) for tensor in given]
    memories = [
        multiplied(buffers.readable(tensor), factor_of(opts, name, tensor.dtype))
        for tensor in given
    ]
    call = group.record(what, given, opts, reduce_op=name)
    call.received = call.nbytes

    def mpi() -> list[MPICall]:
        return [
            ("Allreduce", (MPI.IN_PLACE, block, op))
            for memory, (datatype, op) in zip(memories, kinds, strict=True)
            for block in _blocks(memory, datatype)
        ]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        for memory in memories:
            yield from algorithms.all_reduce(ranks, memory.view(-1), combine(memory.dtype, name))

    def finish() -> None:
        check_ops()
        for tensor, memory in zip(given, memories, strict=True):
            _divide(memory, name, group.size())
            buffers.deliver(tensor, memory)

    key = tuple((dtype_name(t.dtype), tuple(t.shape)) for t in given)
    return Operation(call, key, given, algorithm, mpi, finish, memories, messages_from=RING_FROM)


def reduce_scatter(
    group: CollectiveGroup, outputs: Tensors, inputs: Sequence[Tensors], opts: object
) -> Operation:
    """Rank r gets the reduction of everybody's r-th tensor. Sizes may differ between r."""
    output = tensors.one(outputs, "reduce_scatter")
    parts = tensors.check_count(group, inputs[0], "reduce_scatter")
    own = parts[group.rank()].numel()
    if own != output.numel():
        raise ValueError(
            f"reduce_scatter: the output holds {output.numel()} elements, input "
            f"{group.rank()} (this rank's) {own}"
        )
    return _reduce_scatter(group, "reduce_scatter", output, parts, opts)


def reduce_scatter_single(
    group: CollectiveGroup, output: torch.Tensor, tensor: torch.Tensor, opts: object
) -> Operation:
    """Rank r gets the reduction of everybody's r-th equal part of one tensor."""
    what = "reduce_scatter_tensor"
    output = buffers.check(output, what)
    parts = tensors.equal_parts(group, buffers.check(tensor, what), output, what)
    return _reduce_scatter(group, what, output, parts, opts)


def _reduce_scatter(
    group: CollectiveGroup, what: str, output: torch.Tensor, parts: Tensors, opts: object
) -> Operation:
    name = op_name(opts)
    tensors.check_alike([output, *parts], what)
    datatype, op = reduction(output.dtype, name)
    call = group.record(what, list(parts), opts, reduce_op=name)
    call.received = buffers.nbytes(output)
    stage = multiplied(tensors.flat(parts), factor_of(opts, name, output.dtype))
    memory = buffers.writable(output, what)
    if buffers.overlap(memory, stage):
        memory = torch.empty_like(memory)
    counts = [part.numel() for part in parts]

    def mpi() -> list[MPICall]:
        if stage.numel() > buffers.MAX_COUNT:
            return _reduce_each(stage.split(counts), memory, datatype, op, group.rank())
        send = [buffers.address(stage), stage.numel(), datatype]
        receive = [buffers.address(memory), memory.numel(), datatype]
        return [("Reduce_scatter", (send, receive, counts, op))]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        chunks = list(stage.clone().split(counts))
        yield from algorithms.reduce_scatter(ranks, chunks, combine(stage.dtype, name))
        memory.view(-1).copy_(chunks[ranks.rank])

    def finish() -> None:
        check_ops()
        _divide(memory, name, group.size())
        buffers.deliver(output, memory)

    key = tuple(counts)
    return Operation(call, key, [output], algorithm, mpi, finish, stage, inputs=parts)


def _reduce_each(
    parts: Tensors, memory: torch.Tensor, datatype: MPI.Datatype, op: MPI.Op, rank: int
) -> list[MPICall]:
    """Reduce part r to rank r, for counts that are too large for one MPI call."""
    calls = []
    for root, part in enumerate(parts):
        targets = _blocks(memory, datatype) if root == rank else None
        for k, block in enumerate(_blocks(part, datatype)):
            calls.append(("Reduce", (block, targets[k] if targets else None, op, root)))
    return calls


def _blocks(memory: torch.Tensor, datatype: MPI.Datatype) -> list[list[Any]]:
    return [[buffers.address(p), p.numel(), datatype] for p in buffers.pieces(memory)]


def _divide(memory: torch.Tensor, name: str, size: int) -> None:
    if name == "AVG":
        memory.div_(size)
