"""Plain memory for the tensors of a communication.

This module needs no MPI, so ranks inside a kernel use it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .arguments import Tensors, check_writable

# MPI counts are C ints before MPI 4, and Open MPI 5 has no others. The limit is well below 2**31,
# so that a small multiple of it doesn't overflow either.
MAX_COUNT = 2**30


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
    return room(tensor)


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same as :func:`writable` for a tensor that is known to be writable."""
    tensor = tensor.detach()
    if is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def deliver(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy ``memory`` into ``tensor``, unless it is the tensor's own memory.

    Raises:
        ValueError: the program has given the tensor other memory, which has another size.
    """
    if memory.data_ptr() != tensor.data_ptr():
        if memory.numel() != tensor.numel():
            raise ValueError(
                f"A tensor of {memory.numel()} elements was to get the result. It has become one "
                f"of {tensor.numel()} elements, by set_() or .data. Call wait() before"
            )
        tensor.detach().copy_(memory.reshape(tensor.shape))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two plain tensors share memory, which MPI forbids."""
    return any_overlap([a.data_ptr(), b.data_ptr()], [nbytes(a), nbytes(b)])


def nbytes(*tensors: torch.Tensor) -> int:
    """Return the number of bytes of all elements together."""
    return sum(t.numel() * t.element_size() for t in tensors)


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
