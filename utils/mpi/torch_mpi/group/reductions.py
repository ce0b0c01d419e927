"""Check the tensors of each reduction and return an :class:`.Operation`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch

from . import arguments, arithmetic, tensors
from .arguments import Tensors
from .operation import Caller, MPICall, Operation, same

if TYPE_CHECKING:
    from .algorithms import Ranks

# From this size on, Open MPI's Iallreduce needs two to four times as long as Allreduce. A ring of
# messages that PyTorch adds up doesn't.
RING_FROM = 512 * 1024  # bytes


def reduce(group: Caller, inputs: Tensors, opts: object = None) -> Operation:
    """Reduce the tensors of all ranks into the root's tensor; the other ranks keep theirs."""
    tensor = arguments.single(inputs, "reduce")
    root = arguments.root(group, "reduce", opts)
    is_root = root == group.rank()
    name = arithmetic.op_name(opts)
    arithmetic.check_reduction(tensor.dtype, name)
    if is_root:
        arguments.check_writable(tensor, "reduce")
    memory = arithmetic.premultiplied(tensors.readable(tensor), opts, name)
    call = group.record("reduce", [tensor], opts, peer=root, reduce_op=name)
    call.received = call.nbytes if is_root else 0
    elements = _Elements(memory)

    def mpi(at: Sequence[int]) -> list[MPICall]:
        from . import datatypes

        _, op = datatypes.reduction(memory.dtype, name)
        here = datatypes.IN_PLACE if is_root else None
        pairs = [
            (here, block) if is_root else (block, None) for block in elements.blocks(at[0], name)
        ]
        return [("Reduce", (*pair, op, root)) for pair in pairs]

    def algorithm(ranks: Ranks) -> Generator:
        from . import algorithms

        flat = memory.view(-1) if is_root else memory.view(-1).clone()
        return algorithms.reduce(ranks, flat, arithmetic.combine(tensor.dtype, name), root)

    return Operation(
        call,
        (memory.numel(),),
        [tensor],
        inputs=[memory],
        outputs=[memory] if is_root else [],
        definition=lambda given: [_reduced(given, 0, name)] if is_root else (),
        algorithm=algorithm,
        mpi=mpi,
        memory=[memory],
        compute=_compute(group, name, [memory] if is_root else []),
        finish=(lambda: tensors.deliver(tensor, memory)) if is_root else None,
        shown=[tensor],
        repeatable=same([memory], [tensor]) and arithmetic.is_unscaled(name),
    )


def all_reduce(group: Caller, inputs: Tensors | torch.Tensor, opts: object = None) -> Operation:
    """Reduce the tensors of all ranks in place on every rank.

    ``opts`` may be a ``ReduceOp``; the default is SUM.
    """
    return _all_reduce(group, "all_reduce", [arguments.single(inputs, "all_reduce")], opts)


def all_reduce_coalesced(group: Caller, inputs: Tensors, opts: object = None) -> Operation:
    """Reduce several tensors in one call, as :func:`all_reduce` reduces one."""
    op = "all_reduce_coalesced"
    return _all_reduce(group, op, [arguments.check(tensor, op) for tensor in inputs], opts)


def _all_reduce(group: Caller, op: str, inputs: Tensors, opts: object) -> Operation:
    name = arithmetic.op_name(opts)
    for tensor in inputs:
        arguments.check_writable(tensor, op)
        arithmetic.check_reduction(tensor.dtype, name)
    memories = [arithmetic.premultiplied(tensors.readable(each), opts, name) for each in inputs]
    call = group.record(op, inputs, opts, reduce_op=name)
    call.received = call.nbytes
    kinds = [_Elements(memory) for memory in memories]

    def mpi(at: Sequence[int]) -> list[MPICall]:
        from . import datatypes

        return [
            ("Allreduce", (datatypes.IN_PLACE, block, datatypes.reduction(kind.dtype, name)[1]))
            for kind, address in zip(kinds, at, strict=True)
            for block in kind.blocks(address, name)
        ]

    def algorithm(ranks: Ranks) -> Generator:
        from . import algorithms

        for memory in memories:
            add = arithmetic.combine(memory.dtype, name)
            yield from algorithms.all_reduce(ranks, memory.view(-1), add)

    def finish() -> None:
        for tensor, memory in zip(inputs, memories, strict=True):
            tensors.deliver(tensor, memory)

    return Operation(
        call,
        tuple((arguments.dtype_name(t.dtype), t.numel()) for t in inputs),
        inputs,
        inputs=memories,
        outputs=memories,
        definition=lambda given: [_reduced(given, k, name) for k in range(len(memories))],
        algorithm=algorithm,
        mpi=mpi,
        memory=memories,
        compute=_compute(group, name, memories),
        finish=finish,
        shown=inputs,
        messages_from=RING_FROM,
        repeatable=same(memories, inputs) and arithmetic.is_unscaled(name),
    )


def reduce_scatter(
    group: Caller, outputs: Tensors, inputs: Sequence[Tensors], opts: object = None
) -> Operation:
    """Reduce the r-th tensor of all ranks to rank r; sizes may differ from one r to another."""
    output = arguments.single(outputs, "reduce_scatter")
    parts = arguments.check_count(group, inputs[0], "reduce_scatter")
    numel = parts[group.rank()].numel()
    if numel != output.numel():
        raise ValueError(
            f"reduce_scatter: your output has {output.numel()} elements, but input {group.rank()} "
            f"(this rank's) has {numel}"
        )
    return _reduce_scatter(group, "reduce_scatter", output, parts, opts)


def reduce_scatter_single(
    group: Caller, output: torch.Tensor, tensor: torch.Tensor, opts: object = None
) -> Operation:
    """Split each rank's tensor into equal parts, and reduce all r-th parts to rank r."""
    op = "reduce_scatter_tensor"
    output = arguments.check(output, op)
    tensor = arguments.check(tensor, op)
    parts = arguments.equal_parts(group, tensor, output, op)
    return _reduce_scatter(group, op, output, parts, opts, whole=tensor)


def _reduce_scatter(
    group: Caller,
    op: str,
    output: torch.Tensor,
    parts: Tensors,
    opts: object,
    whole: torch.Tensor | None = None,
) -> Operation:
    name = arithmetic.op_name(opts)
    arguments.check_alike([output, *parts], op)
    arithmetic.check_reduction(output.dtype, name)
    arguments.check_writable(output, op)
    call = group.record(op, list(parts), opts, reduce_op=name)
    call.received = tensors.nbytes(output)
    counts = [part.numel() for part in parts]
    call.parts = tuple(counts)
    stage = arithmetic.premultiplied(tensors.flat(parts), opts, name)
    memory = tensors.room(output)
    if tensors.overlap(memory, stage):
        memory = torch.empty_like(memory)
    rank = group.rank()
    sent, received = _Elements(stage), _Elements(memory)

    def mpi(at: Sequence[int]) -> list[MPICall]:
        from . import datatypes

        (receive,), (send,) = received.blocks(at[0], name), sent.blocks(at[1], name)
        op = datatypes.reduction(sent.dtype, name)[1]
        return [("Reduce_scatter", (send, receive, counts, op))]

    def mpi_for_each(_at: Sequence[int]) -> list[MPICall]:
        return _reduce_each(stage.split(counts), memory, name, rank)

    def algorithm(ranks: Ranks) -> Generator:
        from . import algorithms

        chunks = list(stage.clone().split(counts))
        add = arithmetic.combine(stage.dtype, name)
        yield from algorithms.reduce_scatter(ranks, chunks, add)
        memory.view(-1).copy_(chunks[ranks.rank])

    fits = stage.numel() <= tensors.MAX_COUNT
    own = fits and whole is not None and same([memory, stage], [output, whole])
    return Operation(
        call,
        call.parts,
        [output],
        inputs=stage.split(counts),
        outputs=[memory],
        definition=lambda given: [_reduced(given, rank, name)],
        algorithm=algorithm,
        mpi=mpi if fits else mpi_for_each,
        memory=[memory, whole if own and whole is not None else stage],
        compute=_compute(group, name, [memory]),
        finish=lambda: tensors.deliver(output, memory),
        shown=parts,
        repeatable=own and arithmetic.is_unscaled(name),
    )


def _reduce_each(parts: Tensors, memory: torch.Tensor, name: str, rank: int) -> list[MPICall]:
    """Reduce part r to rank r, for counts that are too large for one MPI call."""
    from . import datatypes

    _, op = datatypes.reduction(memory.dtype, name)
    targets = _Elements(memory).blocks(memory.data_ptr(), name)
    calls = []
    for root, part in enumerate(parts):
        for k, block in enumerate(_Elements(part).blocks(part.data_ptr(), name)):
            calls.append(("Reduce", (block, targets[k] if root == rank else None, op, root)))
    return calls


class _Elements:
    """What MPI asks of a tensor in addition to its address. It doesn't keep the tensor alive."""

    def __init__(self, memory: torch.Tensor):
        self.dtype = memory.dtype
        self._numel, self._itemsize = memory.numel(), memory.element_size()

    def blocks(self, at: int, name: str) -> list:
        """Return MPI's blocks for as many elements at this address, see ``datatypes.blocks_at``."""
        from . import datatypes

        datatype, _ = datatypes.reduction(self.dtype, name)
        return datatypes.blocks_at(at, self._numel, self._itemsize, datatype)


def _reduced(given: Sequence[Tensors], k: int, name: str) -> torch.Tensor:
    """Return the reduction of the k-th input of all ranks."""
    return arithmetic.reduced([inputs[k] for inputs in given], name)


def _compute(group: Caller, name: str, memories: Tensors) -> Callable[[], None]:
    """Return a function that completes a reduction by MPI, which has no means."""

    def compute() -> None:
        from . import datatypes

        datatypes.check_ops()
        for memory in memories if name == "AVG" else ():
            memory.div_(group.size())

    return compute
