"""Check the tensors of each reduction and return an :class:`~.collectives.Operation`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..mpi import MPI
from . import algorithms, tensors
from .arithmetic import combine
from .collectives import MPICall, Operation, same
from .tensors import Tensors

if TYPE_CHECKING:
    from .process_group import ProcessGroupMPI

# From this size on, Open MPI's Iallreduce needs two to four times as long as Allreduce. A ring of
# messages that PyTorch adds up doesn't.
RING_FROM = 512 * 1024  # bytes


def reduce(group: ProcessGroupMPI, inputs: Tensors, opts: object = None) -> Operation:
    """Reduce the tensors of all ranks into the root's tensor; the other ranks keep theirs."""
    tensor = tensors.single(inputs, "reduce")
    root = tensors.root(group, "reduce", opts)
    is_root = root == group.rank()
    name = tensors.op_name(opts)
    datatype, op = tensors.reduction(tensor.dtype, name)
    if is_root:
        tensors.check_writable(tensor, "reduce")
    memory = tensors.premultiplied(tensors.readable(tensor), opts, name)
    call = group.record("reduce", [tensor], opts, peer=root, reduce_op=name)
    call.received = call.nbytes if is_root else 0

    blocks = _blocks_like(memory, datatype)

    def mpi(at: Sequence[int]) -> list[MPICall]:
        if is_root:
            return [("Reduce", (MPI.IN_PLACE, block, op, root)) for block in blocks(at[0])]
        return [("Reduce", (block, None, op, root)) for block in blocks(at[0])]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        flat = memory.view(-1) if is_root else memory.view(-1).clone()
        return algorithms.reduce(ranks, flat, combine(tensor.dtype, name), root)

    return Operation(
        call,
        (tuple(tensor.shape),),
        [tensor],
        algorithm,
        mpi,
        [memory],
        _reduced(group, name, [(tensor, memory)] if is_root else []),
        repeatable=same([memory], [tensor]) and _is_mpis_own(op, name),
    )


def all_reduce(
    group: ProcessGroupMPI, inputs: Tensors | torch.Tensor, opts: object = None
) -> Operation:
    """Reduce the tensors of all ranks in place on every rank.

    ``opts`` may be a ``ReduceOp``; the default is SUM.
    """
    return _all_reduce(group, "all_reduce", [tensors.single(inputs, "all_reduce")], opts)


def all_reduce_coalesced(group: ProcessGroupMPI, inputs: Tensors, opts: object = None) -> Operation:
    """Reduce several tensors in one call, as :func:`all_reduce` reduces one."""
    op = "all_reduce_coalesced"
    return _all_reduce(group, op, [tensors.check(tensor, op) for tensor in inputs], opts)


def _all_reduce(group: ProcessGroupMPI, op: str, inputs: Tensors, opts: object) -> Operation:
    name = tensors.op_name(opts)
    for tensor in inputs:
        tensors.check_writable(tensor, op)
    kinds = [tensors.reduction(tensor.dtype, name) for tensor in inputs]
    memories = [tensors.premultiplied(tensors.readable(tensor), opts, name) for tensor in inputs]
    call = group.record(op, inputs, opts, reduce_op=name)
    call.received = call.nbytes

    blocks = [
        _blocks_like(memory, datatype)
        for memory, (datatype, _) in zip(memories, kinds, strict=True)
    ]

    def mpi(at: Sequence[int]) -> list[MPICall]:
        return [
            ("Allreduce", (MPI.IN_PLACE, block, mpi_op))
            for blocks_at, address, (_, mpi_op) in zip(blocks, at, kinds, strict=True)
            for block in blocks_at(address)
        ]

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        for memory in memories:
            yield from algorithms.all_reduce(ranks, memory.view(-1), combine(memory.dtype, name))

    return Operation(
        call,
        tuple((tensors.dtype_name(t.dtype), tuple(t.shape)) for t in inputs),
        inputs,
        algorithm,
        mpi,
        memories,
        _reduced(group, name, list(zip(inputs, memories, strict=True))),
        messages_from=RING_FROM,
        repeatable=same(memories, inputs) and all(_is_mpis_own(o, name) for _, o in kinds),
    )


def reduce_scatter(
    group: ProcessGroupMPI, outputs: Tensors, inputs: Sequence[Tensors], opts: object = None
) -> Operation:
    """Reduce the r-th tensor of all ranks to rank r; sizes may differ from one r to another."""
    output = tensors.single(outputs, "reduce_scatter")
    parts = tensors.check_count(group, inputs[0], "reduce_scatter")
    numel = parts[group.rank()].numel()
    if numel != output.numel():
        raise ValueError(
            f"reduce_scatter: your output has {output.numel()} elements, but input {group.rank()} "
            f"(this rank's) has {numel}"
        )
    return _reduce_scatter(group, "reduce_scatter", output, parts, opts)


def reduce_scatter_single(
    group: ProcessGroupMPI, output: torch.Tensor, tensor: torch.Tensor, opts: object = None
) -> Operation:
    """Split each rank's tensor into equal parts, and reduce all r-th parts to rank r."""
    op = "reduce_scatter_tensor"
    output = tensors.check(output, op)
    tensor = tensors.check(tensor, op)
    parts = tensors.equal_parts(group, tensor, output, op)
    return _reduce_scatter(group, op, output, parts, opts, whole=tensor)


def _reduce_scatter(
    group: ProcessGroupMPI,
    op: str,
    output: torch.Tensor,
    parts: Tensors,
    opts: object,
    whole: torch.Tensor | None = None,
) -> Operation:
    name = tensors.op_name(opts)
    tensors.check_alike([output, *parts], op)
    datatype, mpi_op = tensors.reduction(output.dtype, name)
    call = group.record(op, list(parts), opts, reduce_op=name)
    call.received = tensors.nbytes(output)
    counts = [part.numel() for part in parts]
    call.parts = tuple(counts)
    stage = tensors.premultiplied(tensors.flat(parts), opts, name)
    memory = tensors.writable(output, op)
    if tensors.overlap(memory, stage):
        memory = torch.empty_like(memory)

    send_like, receive_like = _blocks_like(stage, datatype), _blocks_like(memory, datatype)

    def mpi(at: Sequence[int]) -> list[MPICall]:
        (receive,), (send,) = receive_like(at[0]), send_like(at[1])
        return [("Reduce_scatter", (send, receive, counts, mpi_op))]

    def mpi_for_each(_at: Sequence[int]) -> list[MPICall]:
        return _reduce_each(stage.split(counts), memory, datatype, mpi_op, group.rank())

    def algorithm(ranks: algorithms.Ranks) -> Generator:
        chunks = list(stage.clone().split(counts))
        yield from algorithms.reduce_scatter(ranks, chunks, combine(stage.dtype, name))
        memory.view(-1).copy_(chunks[ranks.rank])

    fits = stage.numel() <= tensors.MAX_COUNT
    own = fits and whole is not None and same([memory, stage], [output, whole])
    return Operation(
        call,
        call.parts,
        [output],
        algorithm,
        mpi if fits else mpi_for_each,
        [memory, whole if own and whole is not None else stage],
        _reduced(group, name, [(output, memory)]),
        inputs=parts,
        repeatable=own and _is_mpis_own(mpi_op, name),
    )


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
    return _blocks_like(memory, datatype)(memory.data_ptr())


def _blocks_like(memory: torch.Tensor, datatype: MPI.Datatype) -> Callable[[int], list[list[Any]]]:
    """Return a function of an address, which returns MPI's blocks for as many elements there."""
    # MPI's ops work only on its own datatypes, and not on a big element as in `tensors.message`.
    numel, itemsize, most = memory.numel(), memory.element_size(), tensors.MAX_COUNT
    spans = [(first, min(most, numel - first)) for first in range(0, numel, most)] or [(0, 0)]

    def blocks(at: int) -> list[list[Any]]:
        return [
            [MPI.buffer.fromaddress(at + first * itemsize, n * itemsize), n, datatype]
            for first, n in spans
        ]

    return blocks


def _is_mpis_own(op: MPI.Op, name: str) -> bool:
    """Return whether MPI computes the result alone: :func:`_reduced` has nothing left to do."""
    return bool(op.is_predefined) and name not in ("AVG", "PREMUL_SUM")


def _reduced(
    group: ProcessGroupMPI, name: str, results: list[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], None]:
    """Return a function that delivers the results, given as ``(tensor, memory)`` pairs."""

    def finish() -> None:
        tensors.check_ops()
        for tensor, memory in results:
            if name == "AVG":
                memory.div_(group.size())
            tensors.deliver(tensor, memory)

    return finish
