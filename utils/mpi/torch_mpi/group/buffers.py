"""Tensors as MPI sees them: an address, a count, a datatype."""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..mpi import MPI
from . import gradients
from .dtypes import CARRIERS

# MPI counts are C ints before MPI 4, and Open MPI 5 has no others. Kept well below 2**31,
# so that a multiple of it never overflows either.
MAX_COUNT = 2**30


def check(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Refuse what cannot be handed to MPI.

    Returns:
        The tensor; of what a functional collective has returned, its result, once it is there.

    Raises:
        TypeError: not a dense tensor, or one without memory of its own.
        ValueError: not on the CPU.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} expects a tensor, got {type(tensor).__name__}")
    if type(tensor) not in _WITH_MEMORY and type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.trigger_wait()
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{what}: the mpi backend moves CPU tensors, got one on {tensor.device} of shape "
            f"{list(tensor.shape)}; move it with .cpu() first"
        )
    if hasattr(tensor, "fake_mode"):
        raise TypeError(f"{what}: a FakeTensor has no elements that could be moved")
    if tensor.is_nested or _has_no_memory(tensor):
        raise TypeError(_without_memory(tensor, what))
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TypeError(
            f"{what}: the mpi backend moves dense tensors, got a {kind} one; use .to_dense(), "
            f"or send its parts one by one"
        )
    return tensor


_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether it only stands for other tensors, as a DTensor does."""
    if type(tensor) in _WITH_MEMORY:
        return False
    if is_traceable_wrapper_subclass(tensor):
        return True
    return tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.data_ptr()


def _without_memory(tensor: torch.Tensor, what: str) -> str:
    if tensor.is_nested:
        return f"{what}: a nested tensor is several tensors; pass those of .unbind() one by one"
    text = (
        f"{what}: a {type(tensor).__name__} has no memory of its own that MPI could read or write; "
    )
    if hasattr(tensor, "to_local"):
        return text + "pass .to_local(), this rank's part, or let it communicate by .redistribute()"
    return text + "pass the plain tensors that it is made of"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of the tensor is its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in plain memory: the tensor itself where possible, else a copy."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def check_writable(tensor: torch.Tensor, what: str) -> None:
    """Refuse to write into a tensor several elements of which are one place in memory.

    A backward pass through the tensor will warn, see :mod:`torch_mpi.group.gradients`.

    Raises:
        ValueError: an expanded tensor, with what to do.
    """
    if not tensor.numel():
        return  # NumPy's empty arrays have strides of 0
    if any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{what} writes into its tensor, but elements of this one share their memory (shape "
            f"{list(tensor.shape)}, stride {list(tensor.stride())}, as after expand()): give it "
            f"a .clone()"
        )
    gradients.watch(tensor, what)


def writable(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Plain memory to receive into; :func:`deliver` brings it home."""
    check_writable(tensor, what)
    tensor = tensor.detach()
    if is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def deliver(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy ``memory`` into ``tensor``, unless it is that tensor's own."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(memory.reshape(tensor.shape))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors share memory. MPI forbids that of what it reads and writes."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    return start_a < start_b + nbytes(b) and start_b < start_a + nbytes(a)


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of all elements together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def address(tensor: torch.Tensor) -> MPI.buffer:
    """The memory of a plain tensor, not copied."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def message(tensor: torch.Tensor) -> list:
    """``[buffer, count, datatype]`` that moves all elements of a plain tensor, of any size."""
    return [address(tensor), *extent(tensor.numel(), tensor.element_size())]


def extent(numel: int, itemsize: int) -> tuple[int, MPI.Datatype]:
    """Count and datatype for ``numel`` elements; one big element where the count is too large."""
    carrier = CARRIERS[itemsize]
    if numel <= MAX_COUNT:
        return numel, carrier
    return 1, _big_element(numel, itemsize)


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


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of a plain tensor of at most :data:`MAX_COUNT` elements each.

    For reductions: MPI's ops work on its own datatypes only, not on a big element.
    """
    flat = tensor.view(-1)
    if flat.numel() <= MAX_COUNT:
        return [flat]
    return list(flat.split(MAX_COUNT))
