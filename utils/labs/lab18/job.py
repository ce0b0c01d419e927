"""What all jobs of the ward share: samples, a small network, and sums over the ranks.

No patient's mistake is in this file.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def samples(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Return n samples of 6 numbers, and n targets; equal on all ranks for equal seeds."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=draw)
    noise = 0.3 * torch.randn(n, generator=draw)
    return x, x[:, 0] - 2 * x[:, 1] * x[:, 2] + noise


def network(seed: int, width: int = 16, dropout: float = 0.0) -> nn.Sequential:
    """Return a network from 6 numbers to one; equal on all ranks for equal seeds."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1), nn.Flatten(0)
    )


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks, with one all_reduce for all of them."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def norms(model: nn.Module) -> list[float]:
    """Return the norm of each parameter, by which two replicas can be compared."""
    return [float(p.detach().norm()) for p in model.parameters()]
