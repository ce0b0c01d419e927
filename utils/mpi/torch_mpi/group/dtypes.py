"""PyTorch's dtypes and reductions in MPI's terms (MPI 4.1, sections 3.2.2 and 6.9)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributed import ReduceOp

from .. import compat
from ..mpi import MPI
from .arithmetic import combine

# To move a tensor only the size of its elements matters, so every dtype can be moved.
CARRIERS = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}

_INTEGERS = {
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
_COMPLEX = {torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX}
# MPI has no 16-bit floats: they travel as 16-bit integers and are reduced by an op of ours.
_HALVES = {torch.float16: MPI.UINT16_T, torch.bfloat16: MPI.UINT16_T}

_NUMBERS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
}
# By the number of PyTorch's op, as its name takes long to get.
_NAMES = {int(op): name for name, op in ReduceOp.RedOpType.__members__.items()}
# Sums, with something to do for every rank before or after.
_SUMS = ("AVG", "PREMUL_SUM")
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
# Open MPI's vector instructions saturate at the ends of small integers, what is left over after
# the last whole vector wraps around. PyTorch and gloo wrap, so these get an op of ours as well.
_SMALL = {torch.int8, torch.uint8, torch.int16, torch.uint16}


def _all_reductions() -> dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]]:
    of_integers = {n: op for n, op in (_NUMBERS | _BITS).items() if n not in _SUMS}
    of_complex = {n: _NUMBERS[n] for n in ("SUM", "AVG", "PRODUCT")}
    kinds = [
        ({torch.bool: MPI.C_BOOL}, _TRUTHS),
        (_HALVES, _NUMBERS),
        (_INTEGERS, of_integers),
        (_FLOATS, _NUMBERS),
        (_COMPLEX, of_complex),
    ]
    table = {}
    for datatypes, ops in kinds:
        for dtype, datatype in datatypes.items():
            table |= {(dtype, name): (datatype, op) for name, op in ops.items()}
    return table


_REDUCTIONS = _all_reductions()
# Errors inside of an op of ours: MPI would end the job if the op raised them.
_failures: list[BaseException] = []


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32``."""
    return str(dtype).removeprefix("torch.")


def premultiplied(memory: torch.Tensor, opts: object, name: str) -> torch.Tensor:
    """Return the elements times the factor of ``PREMUL_SUM``; for other ops as they are.

    It is NCCL's op, made by ``torch.distributed._make_nccl_premul_sum``, and what FSDP2 reduces
    with after ``set_gradient_divide_factor``. The factor is a number, or a tensor of one element.
    """
    if name != "PREMUL_SUM":
        return memory
    factor = compat.premul_factor(getattr(opts, "reduceOp", opts))
    if isinstance(factor, torch.Tensor):
        factor = factor.detach().reshape(()).to("cpu", memory.dtype)
    return memory * factor


def op_name(opts: object) -> str:
    """Return ``SUM``, ``AVG``, … of a collective's options or a ``ReduceOp``; SUM for ``None``."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "SUM"
    return _NAMES[int(getattr(op, "op", op))]


def user_function(dtype: torch.dtype, name: str) -> Callable[..., None]:
    """Return what MPI calls for an op of ours with ``(incoming, inout, datatype)``, two as memory.

    It never raises: see :func:`check_ops`.
    """
    reduce_into = combine(dtype, name)

    def reduce(incoming: MPI.buffer, inout: MPI.buffer, _datatype: MPI.Datatype) -> None:
        try:
            if len(inout):  # nothing, for an empty part of a reduce_scatter
                mine = torch.frombuffer(inout, dtype=dtype)
                reduce_into(mine, torch.frombuffer(incoming, dtype=dtype))
        except BaseException as error:
            _failures.append(error)

    return reduce


def check_ops() -> None:
    """Raise what went wrong inside of an op of ours since the last call, after the reduction."""
    if _failures:
        error = _failures[0]
        _failures.clear()
        raise error


@functools.cache
def _own_op(dtype: torch.dtype, name: str) -> MPI.Op:
    return MPI.Op.Create(user_function(dtype, name), commute=True)


@functools.cache
def reduction(dtype: torch.dtype, name: str) -> tuple[MPI.Datatype, MPI.Op]:
    """Return MPI's datatype and op for the reduction ``name`` over elements of ``dtype``.

    Raises:
        TypeError: no such reduction exists, with what to do instead.
    """
    if (dtype, name) not in _REDUCTIONS:
        raise TypeError(_refusal(dtype, name))
    datatype, op = _REDUCTIONS[dtype, name]
    if dtype in _HALVES or (dtype in _SMALL and name in ("SUM", "PRODUCT")):
        op = _own_op(dtype, "SUM" if name in _SUMS else name)
    return datatype, op


def _refusal(dtype: torch.dtype, name: str) -> str:
    text = f"the mpi backend cannot reduce {dtype_name(dtype)} with {name}: "
    if name in _BITS:
        return text + "bitwise reductions need an integer or bool tensor"
    if name == "PREMUL_SUM":
        return text + "the factor needs a floating-point tensor"
    if name == "AVG" and not dtype.is_floating_point:
        return text + "a mean needs a floating-point tensor; use SUM and divide, or .float()"
    if dtype.is_complex:
        return text + "complex numbers have no order, and complex32 no MPI type; use SUM"
    return text + "convert it first, to float32 for example"
