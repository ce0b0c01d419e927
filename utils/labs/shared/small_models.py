"""Small models and their samples, what a training step does on a rank, and the rank's network.

The sequential reference model is in :mod:`.replicas`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from utils.checks.probe import fingerprint, recorded, told


def net(seed: int, sizes: Sequence[int] = (6, 8, 8, 4)) -> nn.Sequential:
    """Return an MLP with tanh for :func:`samples`; its weights follow from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # ten times as fast as for all devices
        layers: list[nn.Module] = [nn.Flatten()]
        for wide, narrow in itertools.pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.Tanh()]
        return nn.Sequential(*layers[:-1])


def samples(seed: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return images [count, 1, 2, 3], or float64 [count, 3, 2]; labels int64 [count], 0 to 3."""
    draw = torch.Generator().manual_seed(seed)
    shape = (3, 2) if dtype == torch.float64 else (1, 2, 3)
    images = torch.randn(count, *shape, generator=draw, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 4, (count,), generator=draw)


def weights_of(model: nn.Module) -> Tensor:
    """Return a copy of all parameters in one row, in the order of ``model.parameters()``."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def gradient_of(model: nn.Module) -> Tensor:
    """Return all gradients in one row, with zeros for gradients that are ``None``."""
    rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([row.detach().reshape(-1) for row in rows]).clone()


def watched(model: nn.Module) -> list[Tensor]:
    """Return a list to which each later input of the model is appended as a copy."""
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    return seen


def samples_found(seen: list[Tensor], images: Tensor) -> list[list[int]]:
    """Return for each forward pass its samples of the minibatch; -1 for any other sample."""
    passes = []
    for tensor in seen:
        rows = tensor.reshape(-1, images[0].numel())
        matches = [(images.flatten(1) == row).all(1).nonzero().flatten().tolist() for row in rows]
        passes.append([match[0] if match else -1 for match in matches])
    return passes


def one_number(value: Any) -> Any:
    """Return the number in a list of one, which was a tensor of one number; else the value."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


#: What a student reads if a step has switched the model's mode, see :func:`taken`.
SWITCHED = "You switched the model to another mode. Leave train() and eval() to the caller"


def taken(
    function: Callable,
    model: nn.Module,
    seen: list[Tensor],
    optimizer: Optimizer,
    batch: tuple[Tensor, Tensor],
    **kw: Any,
) -> dict:
    """Take a step; return its loss, the weights after it, the model's samples, and the calls."""
    images, labels = batch
    before, modes = weights_of(model), [module.training for module in model.modules()]
    steps: list[str] = []
    noted = optimizer.register_step_pre_hook(
        lambda *_: steps.append(fingerprint(gradient_of(model)))
    )
    loss, calls = recorded(function, model, optimizer, images.clone(), labels.clone(), **kw)
    noted.remove()
    passes = samples_found(seen, images)
    seen.clear()
    return {
        "loss": one_number(told(loss)),
        "weights": weights_of(model),
        "moved": not torch.equal(before, weights_of(model)),
        "switched": modes != [module.training for module in model.modules()],
        "steps": len(steps),
        "stepped": steps,
        "passes": passes,
        "gradients": sum(p.grad is not None for p in model.parameters()),
        "calls": calls,
    }


@contextlib.contextmanager
def network(latency: float | None = None, bandwidth: float = 1e9) -> Iterator[None]:
    """Put this rank on a network (seconds, bytes/s), by default the machine's own.

    After the block, the rank is on the previous network again.
    """
    from torch_mpi.network import Network, link

    before = link.network
    link.set(None if latency is None else Network(latency, bandwidth))
    try:
        yield
    finally:
        link.set(before)
