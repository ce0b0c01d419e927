"""The probes of private and masked updates, and of images in gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.probe import number, reading_answer, told

from .probes import seeded

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
    return _drawn(layers[:-1], draw, 0.25)


def _drawn(layers: list[nn.Module], draw: torch.Generator, size: float = 1.0) -> nn.Sequential:
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
    net = _drawn(layers, draw)
    image, guess = torch.randn(2, n, 1, wide, wide, generator=draw, dtype=torch.float64)
    label = torch.randint(4, (n,), generator=draw)
    return net, guess.requires_grad_(), label, gradients_of(net, image, label)


def probe_mismatch(user_ns: dict, *, rank: int, seed: int, wide: int) -> dict:
    """Return the distance, its derivative by the guess, and what is left in the parameters."""
    net, guess, label, seen = attack(seed, wide)
    function = reading_answer(user_ns, "mismatch")
    function(net, guess, label, [torch.zeros_like(gradient) for gradient in seen])  # another victim
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    distance = function(net, guess, label, seen)
    left = any(p.grad is not None and not bool((p.grad == 1).all()) for p in net.parameters())
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

#: The bound of a mean without noise.
QUIET = 0.75


def drawn_deltas(seed: int) -> list[Tensor]:
    """Return updates longer and shorter than 1; one is zero."""
    draw = seeded(seed)
    lengths = (0.5, 40.0, 0.0, 1.5)
    drawn = [torch.randn(6, generator=draw, dtype=torch.float64) for _ in lengths]
    return [length * delta / delta.norm() for length, delta in zip(lengths, drawn, strict=True)]


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
    draw = seeded(seed)
    alone, following = (mean([torch.zeros(MANY)], bound, z, draw) for _ in range(2))
    return {
        "clips": clips,
        "quiet": quiet,
        "few": len(few),
        "noise": _summary(noises[0].double()),
        "again": torch.equal(noises[0], noises[1]),
        "other": torch.equal(noises[0], noises[2]),
        "next": torch.equal(alone, following),
        "one draw": torch.allclose(m * noises[0], alone, rtol=1e-4),
    }


def _summary(noise: Tensor) -> dict[str, float]:
    """Return statistics of noise, with the strongest correlation of its halves in three orders."""
    half = len(noise) // 2
    spread = noise.std().item()
    first, second = noise[:half], noise[half : 2 * half]
    pairs = ((first, second), (first, second.flip(0)), (noise[: 2 * half : 2], noise[1::2][:half]))
    alike = [abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) for pair in pairs]
    return {
        "std": spread,
        "mean": noise.mean().item(),
        "size": len(noise),
        "alike": max(alike),
        "different": len(noise.unique()),
        "largest": noise.abs().max().item(),
        "fourth": ((noise - noise.mean()) / max(spread, 1e-30)).pow(4).mean().item(),
    }


LENGTH = 20_000
TAKING_PART = [5, 2, 11, 9]
#: Bits of a masked entry that are counted, and how far the counts may be from equal: with 15
#: degrees of freedom, chi² stays below this in all but one of a million cases.
TOP_BITS = 4


def _plain(seed: int) -> dict[int, Tensor]:
    """Return the update of each participating client."""
    draw = seeded(seed)
    return {client: 0.02 * torch.randn(LENGTH, generator=draw) for client in TAKING_PART}


def probe_masked(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Return properties of the masked updates of four clients, and of their sum."""
    mask, back = (reading_answer(user_ns, name) for name in ("masked", "unmasked"))
    me = TAKING_PART[0]
    scale = user_ns["SCALE"]
    t = seed % 1000
    updates = _plain(seed)

    def hide(update: Tensor, client: int = me, clients: list[int] = TAKING_PART, t: int = t) -> Any:
        return mask(update.clone(), client, list(clients), t)

    hidden = [hide(update, client) for client, update in updates.items()]
    kinds = [_kind(message) for message in hidden]
    if set(kinds) != {"int32"}:
        return {"kinds": kinds}
    bare = {client: (update * scale).round().to(torch.int32) for client, update in updates.items()}
    expected = [_masked(client, bare[client], t, user_ns["pair_mask"]) for client in bare]
    few = hide(updates[me][:50])
    alone = hide(updates[me], clients=[me])
    again = hide(updates[me], t=t + 1)
    dtype, worst = _dtype_and_error(back(sum(hidden)), sum(updates.values()))
    unhidden = [torch.equal(*pair) for pair in zip(hidden, bare.values(), strict=True)]
    return {
        "kinds": kinds,
        "back": told(back(torch.tensor([scale, -3 * scale // 2, 0], dtype=torch.int32))),
        "float": dtype,
        "worst": worst,
        "chi2": [_chi2(message) for message in hidden],
        "pairs": _chi2_of_pairs(hidden),
        "bare": unhidden,
        "alone": (alone - bare[me]).abs().max().item() if alone.dtype == torch.int32 else None,
        "few": list(few.shape),
        "renewed": not torch.equal(again, hidden[0]),
        "as told": [torch.equal(*pair) for pair in zip(hidden, expected, strict=True)],
    }


def _dtype_and_error(result: Any, right: Tensor) -> tuple[str | None, float | None]:
    """Return a result's dtype and its largest error; None for what isn't a tensor."""
    if not isinstance(result, Tensor):
        return None, None
    return str(result.dtype), (result - right).abs().max().item()


def _kind(message: Any) -> str:
    """Return the dtype of a tensor, or the type of anything else."""
    if isinstance(message, Tensor):
        return str(message.dtype).removeprefix("torch.")
    return type(message).__name__


def _masked(me: int, update: Tensor, t: int, pair_mask: Callable) -> Tensor:
    """Return an update with the masks of all pairs that this client is in."""
    for other in TAKING_PART:
        if other != me:
            mask = pair_mask(min(me, other), max(me, other), t, update.numel())
            update = update + mask if me < other else update - mask
    return update


def _chi2(hidden: Tensor) -> float:
    """Return how far the highest bits are from equally frequent."""
    bins = 2**TOP_BITS
    top = (hidden.to(torch.int64) + 2**31) >> (32 - TOP_BITS)
    counts = torch.bincount(top, minlength=bins).double()
    expected = hidden.numel() / bins
    return ((counts - expected).square() / expected).sum().item()


def _chi2_of_pairs(messages: list[Tensor]) -> list[float]:
    pairs = itertools.combinations(messages, 2)
    return [_chi2(both) for a, b in pairs for both in (a - b, a + b)]
