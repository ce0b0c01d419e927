"""The collectives that reduce: ``reduce``, ``all_reduce``, ``reduce_scatter``."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..mpi import MPI
from . import algorithms, tensors
from .arithmetic import combine
from .collectives import MPICall, Operation
from .dtypes import check_ops, dtype_name, op_name, premultiplied, reduction
from .tensors import Tensors

if TYPE_CHECKING:
    from .collective_group import CollectiveGroup

# Open MPI's Iallreduce takes two to four times as long as Allreduce from here on; a ring of
# messages that are added up by PyTorch does not.
RING_FROM = 512 * 1024  # bytes


def reduce(group: CollectiveGroup, inputs: Tensors, opts: object = None) -> Operation:
    """Reduce the tensors of all ranks into that of the root; the others keep theirs."""
    tensor = tensors.single(inputs, "reduce")
    root = tensors.root(group, "reduce", opts)
    is_root = root == group.rank()
    name = op_name(opts)
    datatype, op = reduction(tensor.dtype, name)
    if is_root:
        tensors.check_writable(tensor, "reduce")
    memory = premultiplied(tensors.readable(tensor), opts, name)
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
            _deliver(tensor, memory, name, group)

    return Operation(call, (tuple(tensor.shape),), [tensor], algorithm, mpi, finish, memory)


def all_reduce(
    group: CollectiveGroup, inputs: Tensors | torch.Tensor, opts: object = None
) -> Operation:
    """Reduce the tensors of all ranks, on every rank, in place.

    ``opts`` may be a ``ReduceOp``; without one it is SUM.
    """
    return _all_reduce(group, "all_reduce", [tensors.single(inputs, "all_reduce")], opts)


def all_reduce_coalesced(group: CollectiveGroup, inputs: Tensors, opts: object = None) -> Operation:
    """Do an :func:`all_reduce` of several tensors in one call."""
    op = "all_reduce_coalesced"
    return _all_reduce(group, op, [tensors.check(tensor, op) for tensor in inputs], opts)


def _all_reduce(group: CollectiveGroup, op: str, inputs: Tensors, opts: object) -> Operation:
    name = op_name(opts)
    for tensor in inputs:
        tensors.check_writable(tensor, op)
    kinds = [reduction(tensor.dtype, name) for tensor in inputs]
    memories = [premultiplied(tensors.readable(tensor), opts, name) for tensor in inputs]
    call = group.record(op, inputs, opts, reduce_op=name)
    call.received = call.nbytes

    def mpi() -> list[MPICall]:
        return [
            ("Allreduce", (MPI.IN_PLACE, block, mpi_op))
            for memory, (datatype, mpi_op) in zip(memories, kinds, strict=True)
            for block in _blocks(memory, datatype)
        ]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        for memory in memories:
            yield from algorithms.all_reduce(ranks, memory.view(-1), combine(memory.dtype, name))

    def finish() -> None:
        check_ops()
        for tensor, memory in zip(inputs, memories, strict=True):
            _deliver(tensor, memory, name, group)

    key = tuple((dtype_name(t.dtype), tuple(t.shape)) for t in inputs)
    return Operation(call, key, inputs, algorithm, mpi, finish, memories, messages_from=RING_FROM)


def reduce_scatter(
    group: CollectiveGroup, outputs: Tensors, inputs: Sequence[Tensors], opts: object = None
) -> Operation:
    """Give rank r the reduction of everybody's r-th tensor. Sizes may differ between r."""
    output = tensors.single(outputs, "reduce_scatter")
    parts = tensors.check_count(group, inputs[0], "reduce_scatter")
    numel = parts[group.rank()].numel()
    if numel != output.numel():
        raise ValueError(
            f"reduce_scatter: the output holds {output.numel()} elements, input "
            f"{group.rank()} (this rank's) {numel}"
        )
    return _reduce_scatter(group, "reduce_scatter", output, parts, opts)


def reduce_scatter_single(
    group: CollectiveGroup, output: torch.Tensor, tensor: torch.Tensor, opts: object = None
) -> Operation:
    """Give rank r the reduction of everybody's r-th equal part of one tensor."""
    op = "reduce_scatter_tensor"
    output = tensors.check(output, op)
    parts = tensors.equal_parts(group, tensors.check(tensor, op), output, op)
    return _reduce_scatter(group, op, output, parts, opts)


def _reduce_scatter(
    group: CollectiveGroup, op: str, output: torch.Tensor, parts: Tensors, opts: object
) -> Operation:
    name = op_name(opts)
    tensors.check_alike([output, *parts], op)
    datatype, mpi_op = reduction(output.dtype, name)
    call = group.record(op, list(parts), opts, reduce_op=name)
    call.received = tensors.nbytes(output)
    counts = [part.numel() for part in parts]
    call.parts = tuple(counts)
    stage = premultiplied(tensors.flat(parts), opts, name)
    memory = tensors.writable(output, op)
    if tensors.overlap(memory, stage):
        memory = torch.empty_like(memory)

    def mpi() -> list[MPICall]:
        if stage.numel() > tensors.MAX_COUNT:
            return _reduce_each(stage.split(counts), memory, datatype, mpi_op, group.rank())
        send = [tensors.address(stage), stage.numel(), datatype]
        receive = [tensors.address(memory), memory.numel(), datatype]
        return [("Reduce_scatter", (send, receive, counts, mpi_op))]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        chunks = list(stage.clone().split(counts))
        yield from algorithms.reduce_scatter(ranks, chunks, combine(stage.dtype, name))
        memory.view(-1).copy_(chunks[ranks.rank])

    def finish() -> None:
        check_ops()
        _deliver(output, memory, name, group)

    key = call.parts
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
    return [[tensors.address(p), p.numel(), datatype] for p in tensors.pieces(memory)]


def _deliver(tensor: torch.Tensor, memory: torch.Tensor, name: str, group: CollectiveGroup) -> None:
    if name == "AVG":
        memory.div_(group.size())
    tensors.deliver(tensor, memory)
