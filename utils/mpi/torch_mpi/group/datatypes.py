"""Give MPI the memory, dtypes and reductions of tensors (MPI 4.1, sections 3.2.2 and 6.9)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..mpi import MPI
from . import tensors
from .arithmetic import SUMS, combine, needs_our_op

IN_PLACE = MPI.IN_PLACE
# A move depends only on the size of the elements, so these types move every dtype.
CARRIERS = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}

# -- memory ---------------------------------------------------------------------------------------


def address(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a plain tensor, without a copy."""
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def memory_at(at: int, nbytes: int) -> MPI.buffer:
    """Return so many bytes of memory at this address."""
    return MPI.buffer.fromaddress(at, nbytes)


def message(tensor: torch.Tensor) -> list:
    """Return ``[buffer, count, datatype]`` of a plain tensor."""
    return message_at(tensor.data_ptr(), tensor.numel(), tensor.element_size())


def message_at(at: int, numel: int, itemsize: int) -> list:
    """Return ``[buffer, count, datatype]`` of so many elements at this address.

    A large message counts as one element.
    """
    count, datatype = numel, CARRIERS[itemsize]
    if numel > tensors.MAX_COUNT:
        count, datatype = 1, _big_element(numel, itemsize)
    return [memory_at(at, numel * itemsize), count, datatype]


@functools.lru_cache(maxsize=64)
def _big_element(numel: int, itemsize: int) -> MPI.Datatype:
    carrier = CARRIERS[itemsize]
    page = carrier.Create_contiguous(2**20)
    pages, rest = divmod(numel, 2**20)
    whole = MPI.Datatype.Create_struct(
        [pages, rest], [0, pages * 2**20 * itemsize], [page, carrier]
    ).Commit()
    page.Free()
    return whole


def blocks_at(at: int, numel: int, itemsize: int, datatype: MPI.Datatype) -> list[list[Any]]:
    """Return ``[buffer, count, datatype]`` of each block of memory that a reduction may have.

    MPI's ops work only on its own datatypes, and not on a big element as in :func:`message_at`.
    """
    most = tensors.MAX_COUNT
    spans = [(first, min(most, numel - first)) for first in range(0, numel, most)] or [(0, 0)]
    return [[memory_at(at + first * itemsize, n * itemsize), n, datatype] for first, n in spans]


# -- reductions -----------------------------------------------------------------------------------

_NUMBERS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
}
_BITS = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
# As in NCCL, a sum of truth values is true if one of them is true.
_TRUTHS = {
    "SUM": MPI.LOR,
    "PRODUCT": MPI.LAND,
    "MIN": MPI.LAND,
    "MAX": MPI.LOR,
    "BAND": MPI.LAND,
    "BOR": MPI.LOR,
    "BXOR": MPI.LXOR,
}
# 16-bit floats travel as 16-bit integers, and our own op reduces them.
# MPI's datatype of each dtype.
_TYPES = {
    torch.bool: MPI.C_BOOL,
    torch.float16: MPI.UINT16_T,
    torch.bfloat16: MPI.UINT16_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
} | {
    getattr(torch, name): getattr(MPI, f"{name.upper()}_T")
    for name in ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
}
# Errors inside our own ops are kept here, because MPI would end the job if an op raised them.
_failures: list[BaseException] = []


def user_function(dtype: torch.dtype, name: str) -> Callable[..., None]:
    """Return the function that MPI calls for our own op; it never raises, see :func:`check_ops`."""
    reduce_into = combine(dtype, name)

    def reduce(incoming: MPI.buffer, inout: MPI.buffer, _datatype: MPI.Datatype) -> None:
        try:
            if len(inout):  # a part of a reduce_scatter may be empty
                mine = torch.frombuffer(inout, dtype=dtype)
                reduce_into(mine, torch.frombuffer(incoming, dtype=dtype))
        except BaseException as error:
            _failures.append(error)

    return reduce


def check_ops() -> None:
    """Raise the first error that our own ops had since the last call of this function."""
    if _failures:
        error = _failures[0]
        _failures.clear()
        raise error


@functools.cache
def _own_op(dtype: torch.dtype, name: str) -> MPI.Op:
    return MPI.Op.Create(user_function(dtype, name), commute=True)


@functools.cache
def reduction(dtype: torch.dtype, name: str) -> tuple[MPI.Datatype, MPI.Op]:
    """Return MPI's datatype and op, if :func:`.arithmetic.check_reduction` allows the reduction."""
    op = (_TRUTHS if dtype is torch.bool else _NUMBERS | _BITS)[name]
    if needs_our_op(dtype, name):
        op = _own_op(dtype, "SUM" if name in SUMS else name)
    return _TYPES[dtype], op
