"""What checks ask of the model on a rank."""

from __future__ import annotations

import torch
from torch import nn


def flat(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters in one row, in the order of ``model.parameters()``."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def samples_found(seen: list[torch.Tensor], images: torch.Tensor) -> list[int]:
    """Which samples of the minibatch the model got; -1 for one that is not in it."""
    numbers = []
    for tensor in seen:
        for sample in tensor.reshape(-1, images[0].numel()):
            match = (images.flatten(1) == sample).all(1).nonzero().flatten().tolist()
            numbers.append(match[0] if match else -1)
    return numbers
