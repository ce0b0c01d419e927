"""Reduce tensors element by element as PyTorch does, which means that integers wrap around.

This module needs no MPI, so ranks inside a kernel use it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed import ReduceOp

from .arguments import dtype_name

Combine = Callable[[torch.Tensor, torch.Tensor], None]

_NUMBERS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_TRUTHS = {
    "SUM": torch.logical_or,
    "MAX": torch.logical_or,
    "BOR": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
    "BAND": torch.logical_and,
    "BXOR": torch.logical_xor,
}
#: These are sums, but every rank has to scale its elements before or after; the first is plain.
SUMS = ("SUM", "AVG", "PREMUL_SUM")
_BITS = {"BAND", "BOR", "BXOR"}
_OF_FLOATS = _NUMBERS.keys() - _BITS
_OF_INTEGERS = _NUMBERS.keys() - {"AVG", "PREMUL_SUM"}
_OF_COMPLEX = {"SUM", "AVG", "PRODUCT"}
_INTEGERS = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
# MPI has no 16-bit floats.
_HALVES = {torch.float16, torch.bfloat16}
# Open MPI's vector instructions saturate small integers, but the elements after the last whole
# vector wrap around. PyTorch and gloo always wrap.
_SMALL = {torch.int8, torch.uint8, torch.int16, torch.uint16}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# The keys are the numbers of PyTorch's ops, because asking an op for its name is slow.
_NAMES = {int(op): name for name, op in ReduceOp.RedOpType.__members__.items()}
# PyTorch has no arithmetic for these dtypes, but sums of signed numbers have the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def combine(dtype: torch.dtype, name: str) -> Combine:
    """Return a function that reduces a tensor of ``dtype`` into another one, in place."""
    if dtype in _SIGNED:
        if name in ("MIN", "MAX"):
            return _unsigned_extreme(dtype, _NUMBERS[name])
        return _as(_SIGNED[dtype], _NUMBERS[name])
    arithmetic = (_TRUTHS if dtype is torch.bool else _NUMBERS)[name]
    return lambda mine, other: arithmetic(mine, other, out=mine)


def _as(signed: torch.dtype, arithmetic: Callable[..., torch.Tensor]) -> Combine:
    def apply(mine: torch.Tensor, other: torch.Tensor) -> None:
        arithmetic(mine.view(signed), other.view(signed), out=mine.view(signed))

    return apply


def _unsigned_extreme(dtype: torch.dtype, arithmetic: Callable[..., torch.Tensor]) -> Combine:
    """Return a minimum or maximum that compares unsigned numbers as signed ones, a bit flipped."""
    signed = _SIGNED[dtype]
    flip = torch.iinfo(signed).min

    def apply(mine: torch.Tensor, other: torch.Tensor) -> None:
        best = arithmetic(mine.view(signed) ^ flip, other.view(signed) ^ flip)
        mine.view(signed).copy_(best ^ flip)

    return apply


# -- which reductions there are --------------------------------------------------------------------


def op_name(opts: object) -> str:
    """Return ``SUM``, ``AVG``, … for a collective's options or a ``ReduceOp``; default is SUM."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "SUM"
    return _NAMES[int(getattr(op, "op", op))]


def check_reduction(dtype: torch.dtype, name: str) -> None:
    """Refuse a reduction that has no meaning for elements of ``dtype``.

    Raises:
        TypeError: the message says what to do instead.
    """
    if name not in _reductions(dtype):
        raise TypeError(_refusal(dtype, name))


def _reductions(dtype: torch.dtype) -> Iterable[str]:
    if dtype is torch.bool:
        return _TRUTHS
    if dtype in (torch.complex64, torch.complex128):
        return _OF_COMPLEX
    if dtype in _FLOATS:
        return _OF_FLOATS
    return _OF_INTEGERS if dtype in _INTEGERS else ()


def _refusal(dtype: torch.dtype, name: str) -> str:
    text = f"the mpi backend cannot reduce {dtype_name(dtype)} with {name}: "
    if name in _BITS:
        return text + "bitwise reductions need an integer or bool tensor"
    if name == "PREMUL_SUM":
        return text + "the factor needs a floating-point tensor"
    if name == "AVG" and not dtype.is_floating_point:
        return text + "a mean needs a floating-point tensor. Use SUM and divide, or .float()."
    if dtype.is_complex:
        return text + "complex numbers have no order, and complex32 no MPI type. Use SUM."
    return text + "convert the tensor first, for example to float32"


def needs_our_op(dtype: torch.dtype, name: str) -> bool:
    """Return whether MPI's own op would compute something else than PyTorch, or nothing.

    MPI's MIN and MAX lose a NaN or keep it, depending on which rank has it. PyTorch's keep it.
    """
    extreme_of_floats = dtype.is_floating_point and name in ("MIN", "MAX")
    return dtype in _HALVES or extreme_of_floats or (dtype in _SMALL and name in ("SUM", "PRODUCT"))


def is_unscaled(name: str) -> bool:
    """Return whether MPI's call computes a reduction alone, without a product before or after."""
    return name not in SUMS[1:]


# -- what they mean --------------------------------------------------------------------------------


def premultiplied(memory: torch.Tensor, opts: object, name: str) -> torch.Tensor:
    """Return the elements times the factor of ``PREMUL_SUM``; for other ops, don't change them.

    ``PREMUL_SUM`` is NCCL's op, which FSDP2 uses after ``set_gradient_divide_factor``. The factor
    is a number, or a tensor of one element.
    """
    if name != "PREMUL_SUM":
        return memory
    # PyTorch 2.13 has no other way to read the factor.
    factor = getattr(opts, "reduceOp", opts).__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        factor = factor.detach().reshape(()).to("cpu", memory.dtype)
    return memory * factor


def reduced(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Return the reduction of one plain tensor of each rank, in the order of the ranks.

    ``PREMUL_SUM`` expects tensors that are :func:`premultiplied`. Their shapes may differ, but not
    their numbers of elements. The result has one dimension.
    """
    combine_into = combine(parts[0].dtype, name)
    first, *others = (part.view(-1) for part in parts)
    total = first.clone()
    for part in others:
        combine_into(total, part)
    return total.div_(len(parts)) if name == "AVG" else total
