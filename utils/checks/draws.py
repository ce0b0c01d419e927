"""Random numbers that follow from a seed: a probe and the kernel draw the same ones."""

from __future__ import annotations

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    """Return a generator that begins with this seed."""
    return torch.Generator().manual_seed(seed)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normally distributed numbers, the same for the same seed."""
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def across(tensor: Tensor) -> Tensor:
    """Return a copy that isn't contiguous, because its first dimension varies fastest in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1).clone()
