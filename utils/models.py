"""The models that the labs share."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

SIZES = (784, 512, 512, 10)


class MLP(nn.Module):
    """A multilayer perceptron: flatten, then Linear + ReLU, the last Linear gives logits.

    Args:
        sizes: features in, hidden features …, classes out; at least two positive integers.

    It has Σ (inᵢ + 1) · outᵢ parameters over its Linear layers, the 1 being the bias:
    785 · 512 + 513 · 512 + 513 · 10 = 669,706 for the default sizes, 2.7 MB in float32.

    Raises:
        TypeError, ValueError: `sizes` is not such a sequence.

    Source: the network of PyTorch's "Quickstart" tutorial (2021).
    """

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__()
        self.sizes = _checked(sizes)
        layers: list[nn.Module] = [nn.Flatten()]
        for wide, narrow in itertools.pairwise(self.sizes):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])  # no ReLU behind the logits

    def forward(self, images: Tensor) -> Tensor:
        """Logits float32 [m, sizes[-1]] of images float32 [m, …] with sizes[0] values each."""
        return self.layers(images)

    @torch.no_grad()
    def reset(self, seed: int) -> MLP:
        """Draw all parameters anew from `seed`, in place, and return the model.

        The values are those of `torch.manual_seed(seed); MLP(sizes)`: weights and biases
        uniform in ±1/√in. The global random state is neither read nor changed.
        """
        random = torch.Generator().manual_seed(operator.index(seed))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                bound = 1 / math.sqrt(layer.in_features)
                for parameter in (layer.weight, layer.bias):
                    # On the CPU first: another device's generator would draw other numbers.
                    drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=random)
                    parameter.copy_(drawn)
        return self


def mlp(seed: int = 0, sizes: Sequence[int] = SIZES) -> MLP:
    """An `MLP(sizes)` whose weights follow from `seed` alone.

    The same seed gives the same weights on every rank, whatever was drawn before, and the
    global random state stays as it was. Different seeds on different ranks give replicas
    that differ: what DDP's first broadcast is there to repair.

    Raises:
        TypeError, ValueError: `sizes` is not a sequence of at least two positive integers, or
            `seed` is not an integer.
    """
    with torch.random.fork_rng(devices=[]):  # MLP() itself draws from the global state
        model = MLP(sizes)
    return model.reset(seed)


def _checked(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes as integers, or an error that shows them."""
    try:
        checked = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"sizes must be a sequence of integers, got {sizes!r}") from None
    if len(checked) < 2 or min(checked) < 1:
        raise ValueError(
            f"sizes must be at least two positive integers (features in, …, classes), got {sizes!r}"
        )
    return checked
