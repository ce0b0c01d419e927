"""What a collective may be given: one tensor, one for each rank, parts of one, a root.

Whatever does not fit is refused with what was given and what was expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import buffers
from .dtypes import dtype_name

if TYPE_CHECKING:
    from .collective_group import CollectiveGroup

#: What PyTorch gives where one tensor, or one for each rank, is meant.
Tensors = Sequence[torch.Tensor]


def one(given: Sequence[torch.Tensor] | torch.Tensor, op: str) -> torch.Tensor:
    """The only tensor of a list; raises ValueError for more or fewer."""
    if isinstance(given, torch.Tensor):
        given = [given]
    if len(given) != 1:
        raise ValueError(f"{op}: one tensor per rank, got a list of {len(given)}")
    return buffers.check(given[0], op)


def root(group: CollectiveGroup, op: str, opts: object) -> int:
    """The root (in the group); raises ValueError for a rank that the group does not have."""
    rank = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
    if not 0 <= rank < group.size():
        raise ValueError(f"{op}(root {rank}): the group has ranks 0 to {group.size() - 1}")
    return rank


def check_alike(given: Sequence[torch.Tensor], op: str) -> None:
    """Raise TypeError for different dtypes."""
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in given})
    if len(dtypes) > 1:
        raise TypeError(f"{op}: all tensors must have the same dtype, got {' and '.join(dtypes)}")


def check_count(
    group: CollectiveGroup, given: Sequence[torch.Tensor], op: str
) -> list[torch.Tensor]:
    """A tensor for each rank; raises ValueError for another number of them."""
    if len(given) != group.size():
        raise ValueError(
            f"{op}: {len(given)} tensors in the list, expected one per rank: {group.size()}"
        )
    return [buffers.check(tensor, op) for tensor in given]


def per_rank(
    group: CollectiveGroup, given: Sequence[torch.Tensor], like: torch.Tensor, op: str
) -> list[tuple[int, torch.Tensor]]:
    """``(rank, tensor)`` of a list of tensors as large as ``like``; raises ValueError."""
    given = check_count(group, given, op)
    for rank, tensor in enumerate(given):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{op}: the tensors must be alike: place {rank} of the list is "
                f"{tensor.dtype}{list(tensor.shape)}, the single tensor "
                f"{like.dtype}{list(like.shape)}"
            )
    return list(enumerate(given))


def equal_parts(
    group: CollectiveGroup, whole: torch.Tensor, part: torch.Tensor, op: str
) -> list[torch.Tensor]:
    """Views of ``whole``, one per rank, each with the number of elements of ``part``."""
    size = group.size()
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{op}: the large tensor must be {size} times the small one (world size {size}) "
            f"and of its dtype, got {whole.dtype}{list(whole.shape)} and "
            f"{part.dtype}{list(part.shape)}"
        )
    if whole.dim() and whole.shape[0] % size == 0:
        return list(whole.detach().chunk(size)) if whole.numel() else [whole.detach()] * size
    return list(whole.detach().reshape(-1).split(part.numel())) or [whole.detach()] * size


def split(
    group: CollectiveGroup, tensor: torch.Tensor, splits: Sequence[int], what: str
) -> list[int]:
    """Numbers of elements per rank, from numbers of rows per rank; raises ValueError."""
    size = group.size()
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: the {what} has {rows} rows, which {size} ranks cannot "
                f"share equally; give {what}_split_sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"all_to_all_single: {what}_split_sizes {list(splits)} must be {size} numbers "
            f"that add up to the {rows} rows of the {what}"
        )
    per_row = tensor.numel() // rows if rows else 0
    return [rows_of_rank * per_row for rows_of_rank in splits]


def apart(tensor: torch.Tensor, homes: set[int]) -> torch.Tensor:
    """Plain memory to send from, outside of the storages that are received into."""
    if tensor.untyped_storage().data_ptr() in homes:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return buffers.readable(tensor)


def flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements one after the other; not copied where they already lie like that."""
    first = parts[0]
    consecutive = all(buffers.is_plain(p) for p in parts) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in itertools.pairwise(parts)
    )
    if consecutive:
        total = sum(part.numel() for part in parts)
        return first.detach().as_strided((total,), (1,))
    return torch.cat([buffers.readable(part).reshape(-1) for part in parts])
