"""The probes of private and masked updates, and of images in gradients."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.draws import drawn, seeded
from utils.checks.probe import number, reading_answer, told
from utils.checks.raw_tensors import raw

# -- images in gradients ---------------------------------------------------------------------------


#: The second network's second hidden layer has tanh, and its outputs are negative. There, only the
#: last bias's gradient reveals the label, and the last weights' gradient does not.
MLPS = ((12, 7, 4), (20, 9, 5, 6), (8, 16, 3), (9, 12, 2))
#: What is added to the seed, and the layers, of each sample that is read.
VICTIMS = tuple(itertools.product(range(4), MLPS))


def victim(seed: int, sizes: tuple) -> tuple[list[Tensor], int]:
    """Return one sample's gradients for an MLP with many dead neurons, and the sample's label."""
    draw = seeded(seed)
    deep = len(sizes) > 3
    net = _mlp(sizes, draw)
    with torch.no_grad():
        for layer in net[:-1:2]:  # so that most neurons are alive
            layer.bias.fill_(3.0)
        if deep:
            net[2].bias.fill_(-3.0)
        alive = torch.randperm(sizes[1], generator=draw)[: sizes[1] // 3]
        dead = [k for k in range(sizes[1]) if k not in alive]
        net[0].weight[dead] = 0
        net[0].bias[dead] = -1
    image = torch.randn(sizes[0], generator=draw, dtype=torch.float64)
    image *= sizes != MLPS[0]  # the first one is black
    label = torch.randint(sizes[-1], (1,), generator=draw)
    gradients = gradients_of(net, image[None], label)
    # A little noise makes every neuron reveal another image.
    noise = torch.randn(gradients[0].shape, generator=draw, dtype=torch.float64)
    gradients[0] += 1e-3 * gradients[1].abs().max() * noise
    return gradients, int(label)


def _mlp(sizes: tuple, draw: torch.Generator) -> nn.Sequential:
    """Return an MLP with ReLU in double precision, and tanh after the second of three layers."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.Tanh() if len(layers) == 2 else nn.ReLU()]
    return _with_normal_weights(layers[:-1], draw, 0.25)


def _with_normal_weights(
    layers: list[nn.Module], draw: torch.Generator, size: float = 1.0
) -> nn.Sequential:
    """Return a network in double precision, with normal weights of this size."""
    net = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=draw))
    return net


def gradients_of(net: nn.Module, x: Tensor, label: Tensor, graph: bool = False) -> list[Tensor]:
    """Return the gradients of all parameters; with `graph`, they can be differentiated again."""
    loss = functional.cross_entropy(net(x), label)
    return list(torch.autograd.grad(loss, list(net.parameters()), create_graph=graph))


def probe_read(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return what an answer reads from the gradients of several samples."""
    function = reading_answer(user_ns, "read_image")
    readings = []
    for k, sizes in VICTIMS:
        read = function(victim(seed + k, sizes)[0])
        pair = isinstance(read, tuple | list) and len(read) == 2
        readings.append([told(number(read[0])), told(read[1])] if pair else told(read))
    return readings


def attack(seed: int, wide: int) -> tuple[nn.Module, Tensor, Tensor, list[Tensor]]:
    """Return a small network, a guess, a label, and gradients of another image, wide × wide.

    The larger network gets a minibatch of three images.
    """
    draw = seeded(seed)
    layers = [nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten()]
    layers.append(nn.Linear(2 * (wide - 2) ** 2, 4))
    n = 1 if wide == 5 else 3
    if n > 1:
        layers += [nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)]
    net = _with_normal_weights(layers, draw)
    image, guess = torch.randn(2, n, 1, wide, wide, generator=draw, dtype=torch.float64)
    label = torch.randint(4, (n,), generator=draw)
    return net, guess.requires_grad_(), label, gradients_of(net, image, label)


def probe_mismatch(user_ns: dict, *, rank: int, seed: int, wide: int) -> dict:
    """Return the distance, its derivative by the guess, and what is left in the parameters."""
    net, guess, label, seen = attack(seed, wide)
    function = reading_answer(user_ns, "mismatch")
    function(net, guess, label, [torch.zeros_like(gradient) for gradient in seen])  # another victim
    left = any(p.grad is not None for p in (guess, *net.parameters()))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    distance = function(net, guess, label, seen)
    left |= any(p.grad is not None and not bool((p.grad == 1).all()) for p in net.parameters())
    guess.grad = None
    modes = all(module.training for module in net.modules())
    is_number = isinstance(distance, Tensor) and distance.numel() == 1
    return {
        "value": distance.item() if is_number else told(distance),
        "slope": _slope(distance, guess) if is_number else None,
        "left": left,
        "tensor": is_number,
        "modes": modes,
    }


def _slope(distance: Tensor, guess: Tensor) -> Any:
    """Return the derivative of a distance; None if the guess is not in its graph."""
    if not distance.requires_grad:
        return None
    (slope,) = torch.autograd.grad(distance.sum(), guess, allow_unused=True)
    return None if slope is None else told(slope.flatten())


# -- noise and masks -------------------------------------------------------------------------------


MANY = 40_000
#: Clients, bound, noise multiplier; with these, all wrong formulas give different results.
NOISE = (5, 0.5, 3.0)

#: So many first numbers tell whether two long tensors are the same.
FIRST = 500

#: Another bound of a clipped update.
SHORTER = 0.3
#: The bound of a mean without noise.
QUIET = 0.75


def drawn_deltas(seed: int) -> list[Tensor]:
    """Return updates longer and shorter than 1; one is zero."""
    draw = seeded(seed)
    lengths = (0.5, 40.0, 0.0, 1.5)
    drawn = [torch.randn(6, generator=draw, dtype=torch.float64) for _ in lengths]
    return [length * delta / delta.norm() for length, delta in zip(lengths, drawn, strict=True)]


def sparse_updates(seed: int) -> list[Tensor]:
    """Return as many updates as get noise, as long, with some large numbers at the beginning."""
    rows = drawn(seed, NOISE[0], FIRST, dtype=torch.float32)
    return [functional.pad(row, (0, MANY - FIRST)) for row in rows]


def probe_private(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Return clipped updates, a mean without noise, and noise on zeros."""
    clip, mean = (reading_answer(user_ns, name) for name in ("clipped", "private_mean"))
    clips = [told(clip(delta, 1.0)) for delta in drawn_deltas(seed)]
    quiet = told(mean(drawn_deltas(seed), QUIET, 0.0, seeded(seed)))
    few = mean([torch.zeros(7)], 1.0, 1.0, seeded(seed))
    m, bound, z = NOISE
    noises = []
    for draw_seed in (seed, seed, seed + 1):
        torch.default_generator.manual_seed(len(noises))
        noises.append(mean([torch.zeros(MANY) for _ in range(m)], bound, z, seeded(draw_seed)))
    on_updates = mean(sparse_updates(seed), bound, z, seeded(seed))
    draw = seeded(seed)
    alone, following = (mean([torch.zeros(MANY)], bound, z, draw) for _ in range(2))
    noise, again, other = noises
    return {
        "clips": clips,
        "quiet": quiet,
        "few": len(few),
        "noise": raw(noise),
        "on updates": raw(on_updates[:FIRST]),
        "shorter": told(clip(drawn_deltas(seed)[1], SHORTER)),
        "again": raw(again[:FIRST]),
        "other": raw(other[:FIRST]),
        "alone": raw(alone[:FIRST]),
        "next": raw(following[:FIRST]),
    }


LENGTH = 20_000
TAKING_PART = [5, 2, 11, 9]


def plain_updates(seed: int) -> dict[int, Tensor]:
    """Return the update of each participating client."""
    draw = seeded(seed)
    return {client: 0.02 * torch.randn(LENGTH, generator=draw) for client in TAKING_PART}


def round_of(seed: int) -> int:
    """Return the number of the round in which the updates are masked."""
    return seed % 1000


def probe_masked(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Return the masked updates of four clients, their sum, and what else is masked."""
    mask, back = (reading_answer(user_ns, name) for name in ("masked", "unmasked"))
    me = TAKING_PART[0]
    updates = plain_updates(seed)

    def hide(update: Tensor, client: int = me, clients: list[int] = TAKING_PART, later: int = 0):
        return mask(update.clone(), client, list(clients), round_of(seed) + later)

    hidden = [hide(update, client) for client, update in updates.items()]
    kinds = [_kind(message) for message in hidden]
    if set(kinds) != {"int32"}:
        return {"kinds": kinds}
    few = hide(updates[me][:50])
    scale = user_ns["SCALE"]
    return {
        "kinds": kinds,
        "messages": [raw(message) for message in hidden],
        "back": told(back(torch.tensor([scale, -3 * scale // 2, 0], dtype=torch.int32))),
        "sum": raw(back(sum(hidden))),
        "alone": raw(hide(updates[me], clients=[me])),
        "few": list(few.shape),
        "again": raw(hide(updates[me], later=1)[:FIRST]),
    }


def _kind(message: Any) -> str:
    """Return the dtype of a tensor, or the type of anything else."""
    if isinstance(message, Tensor):
        return str(message.dtype).removeprefix("torch.")
    return type(message).__name__
