"""PyTorch's dtypes and reductions in MPI's terms (MPI 4.1, sections 3.2.2 and 6.9)."""

from __future__ import annotations

import functools

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

# To move a tensor only the size of its elements matters, so every dtype can be moved.
CARRIERS = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}

_SIGNED = {
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_UNSIGNED = {
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
_COMPLEX = {torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX}
# MPI has no 16-bit floats: they travel as 16-bit integers and are reduced by an op of ours.
_HALVES = {torch.float16: MPI.UINT16_T, torch.bfloat16: MPI.UINT16_T}

_INTEGERS = _SIGNED | _UNSIGNED
_NUMBERS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
}
_BITS = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
# A sum of truth values is true when one of them is, as NCCL has it.
_TRUTHS = {
    "SUM": MPI.LOR,
    "PRODUCT": MPI.LAND,
    "MIN": MPI.LAND,
    "MAX": MPI.LOR,
    "BAND": MPI.LAND,
    "BOR": MPI.LOR,
    "BXOR": MPI.LXOR,
}
_HALF_ARITHMETIC = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def op_name(opts) -> str:
    """``SUM``, ``AVG`` … of the options of a collective, or of a ``ReduceOp``; SUM for ``None``."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "SUM"
    return (op.op if isinstance(op, ReduceOp) else op).name


@functools.cache
def _half_op(dtype: torch.dtype, name: str) -> MPI.Op:
    arithmetic = _HALF_ARITHMETIC[name]

    def reduce(incoming: MPI.buffer, inout: MPI.buffer, _datatype: MPI.Datatype) -> None:
        mine = torch.frombuffer(inout, dtype=dtype)
        arithmetic(mine, torch.frombuffer(incoming, dtype=dtype), out=mine)

    return MPI.Op.Create(reduce, commute=True)


@functools.cache
def reduction(dtype: torch.dtype, name: str) -> tuple[MPI.Datatype, MPI.Op]:
    """MPI's datatype and op for the reduction ``name`` over elements of ``dtype``.

    Raises:
        TypeError: no such reduction exists, with what to do instead.
    """
    if name == "PREMUL_SUM":
        raise TypeError(
            "the mpi backend has no PREMUL_SUM (NCCL only): multiply the tensor by the factor, "
            "then reduce with SUM"
        )
    if dtype is torch.bool and name in _TRUTHS:
        return MPI.C_BOOL, _TRUTHS[name]
    if dtype in _HALVES and name in _HALF_ARITHMETIC:
        return _HALVES[dtype], _half_op(dtype, name.replace("AVG", "SUM"))
    if dtype in _INTEGERS and (name in _BITS or (name in _NUMBERS and name != "AVG")):
        return _INTEGERS[dtype], (_NUMBERS | _BITS)[name]
    if dtype in _FLOATS and name in _NUMBERS:
        return _FLOATS[dtype], _NUMBERS[name]
    if dtype in _COMPLEX and name in ("SUM", "AVG", "PRODUCT"):
        return _COMPLEX[dtype], _NUMBERS[name]
    raise TypeError(_refusal(dtype, name))


def _refusal(dtype: torch.dtype, name: str) -> str:
    short = str(dtype).removeprefix("torch.")
    text = f"the mpi backend cannot reduce {short} with {name}: "
    if name in _BITS:
        return text + "bitwise reductions need an integer or bool tensor"
    if name == "AVG" and not dtype.is_floating_point:
        return text + "a mean needs a floating-point tensor; use SUM and divide, or .float()"
    if dtype.is_complex:
        return text + "complex numbers have no order, and complex32 no MPI type; use SUM"
    return text + "convert it first, to float32 for example"
