"""The small layers on which lab 11's probes of ZeRO and offload train, and what they notice.

Checks compare numbers on a small model. They meter memory on a chain of many equal layers, where an
answer that keeps too much exceeds the bound by whole layers. All numbers are double precision.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.probe import in_double
from utils.labs.shared.memory import Meter

BYTES = 8  # of a float64
#: Features of the small model, and of the chain whose memory is metered.
SMALL = (5, 4, 6, 3)
CHAIN = 24
WIDE = 48
RATE = 0.3
MOMENTUM = 0.9
STEPS = 2
SAMPLES = 4


def layers_of(seed: int, sizes: Sequence[int] = SMALL) -> list[nn.Linear]:
    """Return linear layers whose weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return [in_double(nn.Linear(*pair)) for pair in itertools.pairwise(sizes)]


def uneven_layers(seed: int) -> list[nn.Module]:
    """Return a layer with one parameter, and one with four."""
    first, *others = layers_of(seed)
    first.bias = None
    return [first, nn.Sequential(others[0], nn.Tanh(), others[1])]


def parameters_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of all layers."""
    return [parameter for layer in layers for parameter in layer.parameters()]


def chained(layers: Sequence[Callable], x: Tensor) -> Tensor:
    """Call one layer after the other, with tanh in between."""
    for layer in layers[:-1]:
        x = torch.tanh(layer(x))
    return layers[-1](x)


def samples(own_seed: int, step: int, width: int = SMALL[0]) -> Tensor:
    """Return the samples of a step for the rank with this seed."""
    draw = torch.Generator().manual_seed(own_seed + step + 1)
    return torch.randn(SAMPLES, width, generator=draw, dtype=torch.float64)


def loss_of(y: Tensor) -> Tensor:
    """Return a loss that is easy to differentiate."""
    return (torch.sin(y) + y**2).mean()


def row_of(tensors: Iterable[Tensor], p: int) -> Tensor:
    """Return all numbers in a row, padded to a multiple of p."""
    row = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return nn.functional.pad(row, (0, -len(row) % p))


def shards_of(layers: Sequence[nn.Module], p: int, k: int) -> list[nn.Parameter]:
    """Return the k-th of p parts of each layer's row, as a parameter."""
    rows = [row_of(layer.parameters(), p) for layer in layers]
    return [nn.Parameter(row.chunk(p)[k].clone()) for row in rows]


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.SGD:
    """Return the optimizer of the checks: unlike Adam, it shows every wrong factor."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, foreach=False)


def collected(function: Callable, *args: Any) -> tuple[Any, float]:
    """Return a result, and the peak of newly made bytes, in rows of the chain's layers."""
    with Meter() as meter:
        result = function(*args)
    return result, meter.peak / ((WIDE + 1) * WIDE * BYTES)


class Named(nn.Module):
    """A linear layer whose parameters have other names.

    After :meth:`begin`, the gradient of parameter number ``late`` arrives only after backward has
    passed all layers, because autograd starts with the node that was made last.
    """

    def __init__(self, linear: nn.Linear, late: int):
        super().__init__()
        self.one = linear.weight
        self.two = linear.bias
        self.late = late
        self.copies: list[Tensor] = []

    def begin(self) -> None:
        """Prepare a forward whose backward runs in another order."""
        self.copies = list(self.parameters())
        self.copies[self.late] = self.copies[self.late] * 1

    def forward(self, x: Tensor) -> Tensor:
        """Return what the linear layer computes."""
        return nn.functional.linear(x, *(self.copies or self.parameters()))


def overdue(layers: Sequence[nn.Module]) -> list[int]:
    """Return the layers that still have gradients after their last hook.

    The list grows in each backward.
    """
    late: list[int] = []
    arrivals = [0] * len(layers)

    def look(i: int, parameters: list[nn.Parameter], _: nn.Parameter) -> None:
        arrivals[i] += 1
        complete = arrivals[i] % len(parameters) == 0
        if complete and any(q.grad is not None for q in parameters):
            late.append(i)

    for i, layer in enumerate(layers):
        parameters = list(layer.parameters())
        for parameter in parameters:
            hook = functools.partial(look, i, parameters)
            parameter.register_post_accumulate_grad_hook(hook)
    return late


@contextlib.contextmanager
def patched(name: str, function: Callable) -> Iterator[None]:
    """Replace a function of `torch.distributed` in both modules that offer it."""
    with (
        mock.patch.object(dist, name, function),
        mock.patch.object(dist.distributed_c10d, name, function),
    ):
        yield
