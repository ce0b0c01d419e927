"""Check tensors for a communication, and give MPI their memory, dtypes and reductions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

from ..mpi import MPI
from .arguments import Tensors as Tensors
from .arguments import check as check
from .arguments import check_alike as check_alike
from .arguments import check_count as check_count
from .arguments import check_own as check_own
from .arguments import check_writable as check_writable
from .arguments import dtype_name as dtype_name
from .arguments import equal_parts as equal_parts
from .arguments import per_rank as per_rank
from .arguments import root as root
from .arguments import single as single
from .arguments import split as split
from .arithmetic import combine

# MPI counts are C ints before MPI 4, and Open MPI 5 has no others. The limit is well below 2**31,
# so that a small multiple of it doesn't overflow either.
MAX_COUNT = 2**30

# A move depends only on the size of the elements, so these types move every dtype.
CARRIERS = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}

# -- tensors that MPI can use ---------------------------------------------------------------------


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory has exactly its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in plain memory: the tensor itself if possible, else a copy."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return plain memory to receive into, which :func:`deliver` copies to the tensor."""
    check_writable(tensor, op)
    tensor = tensor.detach()
    if is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def deliver(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy ``memory`` into ``tensor``, unless it is the tensor's own memory."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(memory.reshape(tensor.shape))


# -- plain memory, for MPI ------------------------------------------------------------------------


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two plain tensors share memory, which MPI forbids."""
    return any_overlap([a.data_ptr(), b.data_ptr()], [nbytes(a), nbytes(b)])


def nbytes(*tensors: torch.Tensor) -> int:
    """Return the number of bytes of all elements together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def address(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a plain tensor, without a copy."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def any_overlap(addresses: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether two pieces of memory, of these lengths in bytes, share memory."""
    pieces = sorted((a, a + n) for a, n in zip(addresses, lengths, strict=True) if n)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(pieces))


def offsets(addresses: Sequence[int], counts: Sequence[int], itemsize: int) -> list[int] | None:
    """Return by how many elements each address is behind the lowest one; ``None`` if MPI can't.

    An empty tensor has the offset 0. MPI needs offsets that fit a C int, see :data:`MAX_COUNT`.
    """
    lowest = min((at for at, n in zip(addresses, counts, strict=True) if n), default=0)
    bytes_between = [at - lowest if n else 0 for at, n in zip(addresses, counts, strict=True)]
    if any(n % itemsize or n // itemsize >= 2**31 for n in bytes_between):
        return None
    return [n // itemsize for n in bytes_between]


def message(tensor: torch.Tensor) -> list:
    """Return ``[buffer, count, datatype]`` of a plain tensor; a large one counts as one element."""
    return message_like(tensor)(tensor.data_ptr())


def message_like(tensor: torch.Tensor) -> Callable[[int], list]:
    """Return a function of an address, which returns the :func:`message` of as many elements there.

    The function doesn't keep the tensor alive.
    """
    count = tensor.numel()
    itemsize = tensor.element_size()
    length = count * itemsize
    datatype = CARRIERS[itemsize]
    if count > MAX_COUNT:
        count, datatype = 1, _big_element(count, itemsize)
    return lambda at: [MPI.buffer.fromaddress(at, length), count, datatype]


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


def apart(tensor: torch.Tensor, homes: set[int]) -> torch.Tensor:
    """Return plain memory to send from, outside the storages that receive data."""
    if tensor.untyped_storage().data_ptr() in homes:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return readable(tensor)


def flat(parts: Tensors) -> torch.Tensor:
    """Return all elements one after the other, without a copy if their memory is like that."""
    consecutive = all(is_plain(p) for p in parts) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in itertools.pairwise(parts)
    )
    if consecutive:
        total = sum(part.numel() for part in parts)
        return parts[0].detach().as_strided((total,), (1,))
    return torch.cat([readable(part).reshape(-1) for part in parts])


# -- dtypes and reductions in MPI's terms (MPI 4.1, sections 3.2.2 and 6.9) ----------------------

_NUMBERS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
}
# The keys are the numbers of PyTorch's ops, because asking an op for its name is slow.
_NAMES = {int(op): name for name, op in ReduceOp.RedOpType.__members__.items()}
# These are sums, but every rank has to scale its elements before or after.
_SUMS = ("AVG", "PREMUL_SUM")
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
# Open MPI's vector instructions saturate small integers, but the elements after the last whole
# vector wrap around. PyTorch and gloo always wrap, so these dtypes get our own op, too.
_SMALL = {torch.int8, torch.uint8, torch.int16, torch.uint16}


_OF_INTEGERS = {name: op for name, op in (_NUMBERS | _BITS).items() if name not in _SUMS}
_OF_COMPLEX = {name: _NUMBERS[name] for name in ("SUM", "AVG", "PRODUCT")}
# MPI has no 16-bit floats, so they travel as 16-bit integers, and our own op reduces them.
_HALVES = (torch.float16, torch.bfloat16)
# MPI's datatype and ops for each dtype.
_REDUCTIONS = {
    torch.bool: (MPI.C_BOOL, _TRUTHS),
    torch.float16: (MPI.UINT16_T, _NUMBERS),
    torch.bfloat16: (MPI.UINT16_T, _NUMBERS),
    torch.float32: (MPI.FLOAT, _NUMBERS),
    torch.float64: (MPI.DOUBLE, _NUMBERS),
    torch.complex64: (MPI.C_FLOAT_COMPLEX, _OF_COMPLEX),
    torch.complex128: (MPI.C_DOUBLE_COMPLEX, _OF_COMPLEX),
} | {
    getattr(torch, name): (getattr(MPI, f"{name.upper()}_T"), _OF_INTEGERS)
    for name in ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
}
# Errors inside our own ops are kept here, because MPI would end the job if an op raised them.
_failures: list[BaseException] = []


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


def op_name(opts: object) -> str:
    """Return ``SUM``, ``AVG``, … for a collective's options or a ``ReduceOp``; default is SUM."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "SUM"
    return _NAMES[int(getattr(op, "op", op))]


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
    """Return MPI's datatype and op for the reduction ``name`` over elements of ``dtype``.

    Raises:
        TypeError: the reduction doesn't exist; the message says what to do instead.
    """
    datatype, ops = _REDUCTIONS.get(dtype, (None, {}))
    if name not in ops:
        raise TypeError(_refusal(dtype, name))
    op = ops[name]
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
        return text + "a mean needs a floating-point tensor. Use SUM and divide, or .float()."
    if dtype.is_complex:
        return text + "complex numbers have no order, and complex32 no MPI type. Use SUM."
    return text + "convert the tensor first, for example to float32"


# -- a warning if a gradient would silently be wrong ----------------------------------------------

# A communication writes into a tensor in place, and autograd doesn't notice. A backward pass
# through the tensor then gives the same gradient as without the communication. PyTorch's own
# backends warn about this in the backward pass, by the autograd fallback of the dispatcher. The
# fallback doesn't see a process group in Python, so here a hook on the tensor does the same.
#
# As in PyTorch, there is no warning under ``no_grad``, or without a backward pass, as for a loss
# that is summed for a log. Unlike in PyTorch, leaves never cause a warning. A leaf's gradient
# belongs to the values that it has now, so you may average parameters in place.
