"""The algorithms of lab 08, replayed with a gradient that the check knows; or a mistake in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils.checks.groups import WORLD
from utils.checks.mistakes import EXACT, TOLERANCE
from utils.checks.probe import numbers
from utils.labs.shared.replicas import Seeds

# -- the rules --------------------------------------------------------------------------------


def moved_worker(w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float) -> Tensor:
    """Return the worker after equation (1)."""
    return w - eta * (gradient + rho * (w - center))


def moved_center(center: Tensor, w: Tensor, eta: float, rho: float) -> Tensor:
    """Return the centre after equation (2), of one worker."""
    return center + eta * rho * (w - center)


def moved_outer(
    center: Tensor,
    pseudo_gradient: Tensor,
    velocity: Tensor,
    rate: float,
    momentum: float,
    variant: str = "",
) -> tuple[Tensor, Tensor]:
    """Return centre and velocity after a step of ``torch.optim.SGD(…, nesterov=True)``."""
    v = momentum * velocity + pseudo_gradient
    if variant == "forgets v":
        v = pseudo_gradient * 1.0
        return center - rate * (pseudo_gradient + momentum * v), v
    if variant == "heavy ball":
        return center - rate * v, v
    if variant == "averages":
        return center - pseudo_gradient, v
    if variant == "fixed outer":
        v = 0.9 * velocity + pseudo_gradient
        return center - 0.7 * (pseudo_gradient + 0.9 * v), v
    return center - rate * (pseudo_gradient + momentum * v), v


# -- gradients, first weights, rates ----------------------------------------------------------


class Toy:
    """A gradient of a valley of its own, with noise that is another one at each call.

    Attributes:
        at: the weights that it was asked at.
        seen: what this rank had communicated by then.
    """

    def __init__(self, seed: int, size: int, look: Callable[[], Any] = lambda: None):
        self.draw, self.size = torch.Generator().manual_seed(seed), size
        self.goal, self.scale = self._random(), 0.5 + self._random().abs() / 4
        self.look, self.at, self.seen = look, [], []

    def __call__(self, w: Tensor) -> Tensor:
        """Return the gradient at w."""
        self.at.append(w.tolist())
        self.seen.append(self.look())
        return (self.scale * (w - self.goal) + self._random()).to(w.dtype)

    def _random(self) -> Tensor:
        return 4 * torch.randn(self.size, generator=self.draw, dtype=torch.float64)


def start(seed: int, like: int | None = None) -> Tensor:
    """Return the weights that all ranks begin with: 3 to 40 numbers, in double precision or not.

    like: the seed of other weights, which have the same length and type.
    """
    form = seed if like is None else like
    kind, chance = form % 3, random.Random(form)
    size = chance.randint(*((20, 40), (3, 6), (7, 19))[kind])
    return numbers(seed, size, double=True).to(torch.float64 if kind else torch.float32)


def rates(seed: int, variant: str = "") -> tuple[float, float]:
    """Return η and ρ of a case: of four seeds in a row, each has another mix of small and large."""
    chance = random.Random(seed)
    eta = chance.uniform(*((0.02, 0.08), (0.15, 0.3))[seed % 2])
    alpha = chance.uniform(*((0.1, 0.4), (0.65, 0.8))[seed // 2 % 2])
    if variant == "fixed rates":
        return 0.1, 3.0
    eta = 0.1 if variant == "fixed rate" else eta
    return eta, alpha / eta


# -- what is replayed -------------------------------------------------------------------------


@dataclass
class Replayed:
    """What one rank does in a replay.

    Attributes:
        first: the weights at first.
        notes: the weights that it has to note.
        exact: how far numbers made of these may be apart.
        rates: those of the case, in words.
    """

    first: list[float]
    notes: list[list[float]]
    exact: float
    rates: str


#: Gives what the rank at each place does; in a variant, if it is named, which is a mistake.
Replay = Callable[..., list[Replayed]]


def precision(weights: Tensor) -> float:
    """Return how far numbers made of these may be apart, after some dozens of steps."""
    return EXACT if weights.dtype == torch.float64 else 10 * TOLERANCE


def begun(seeds: Seeds) -> Replayed:
    """Return a replay without notes."""
    first, (eta, rho) = start(seeds.model), rates(seeds.model)
    return Replayed(first.tolist(), [], precision(first), f"η = {eta:.3g}, ρ = {rho:.3g}")


def rounds(steps: int, tau: int) -> int:
    """Return how many times τ steps begin."""
    return -(-steps // tau)


def round_robin_replayed(
    seeds: Seeds, workers: int, steps: int, variant: str = ""
) -> list[Replayed]:
    """Return what the rank at each place does."""
    weights, moves = [start(seeds.model)] * (workers + 1), rates(seeds.model, variant)
    toys = [Toy(own, len(weights[0])) for own in seeds.own]
    replayed = [begun(seeds) for _ in weights]
    for t in range(steps):
        j = 1 + t % workers
        center, w = weights[0], weights[j]
        new = moved_worker(w, center, toys[j](center if variant == "at center" else w), *moves)
        weights[0] = moved_center(center, new if variant == "new" else w, *moves)
        if variant == "center as worker":
            new = weights[0]
        weights[j] = new
        for place in (0, j):
            replayed[place].notes.append(weights[place].tolist())
    return replayed


def asynchronous_replayed(
    seeds: Seeds,
    order: Sequence[int],
    workers: int,
    steps: int,
    tau: int,
    variant: str = "",
    delta: float = 0.0,
) -> list[Replayed]:
    """Return what the rank at each place does if the workers at these places come in this order."""
    center, master = start(seeds.model), begun(seeds)
    runs = [_Worker(seeds, place, steps, tau, variant, delta) for place in range(1, workers + 1)]
    moves = rates(seeds.model, "" if delta else variant)  # with momentum, the master is right
    for place in order:
        run = runs[place - 1]
        run.until_exchange()
        new = moved_center(center, run.sends(), *moves)
        run.exchange(new if variant == "new center" else center)
        center = new
        master.notes.append(center.tolist())
    for run in runs:
        run.until_exchange()
    return [master, *(run.replayed for run in runs)]


class _Worker:
    """A worker that is replayed; with momentum, if there is a `delta`.

    Attributes:
        replayed: the weights at first, and those noted.
    """

    def __init__(self, seeds: Seeds, place: int, steps: int, tau: int, variant: str, delta: float):
        self.w, self.k, self.replayed = start(seeds.model), 0, begun(seeds)
        self.toy = Toy(seeds.own[place], len(self.w))
        self.v = self.pull = torch.zeros_like(self.w)
        # The next gradient, where a mistake needs it early.
        self.ready: Tensor | None = None
        self.center = self.w
        self.steps, self.tau, self.variant, self.delta = steps, tau, variant, delta
        self.eta, self.rho = rates(seeds.model, variant)

    def until_exchange(self) -> None:
        """Make local steps, until one with an exchange comes."""
        due = self.tau - 1 if self.variant == "late" else 0
        while self.k < self.steps and self.k % self.tau != due:
            self._step(self.rho if self.variant == "every step" else 0.0)

    def sends(self) -> Tensor:
        """Return what the master gets."""
        if self.variant == "sends ahead":
            return self.w + self.delta * self.v
        if self.variant == "new":
            self.ready = self.toy(self.w + self.delta * self.v)
            return self.w + self.delta * self.v - self.eta * self.ready
        return self.w

    def exchange(self, center: Tensor) -> None:
        """Make the step with the centre."""
        self.center = center
        rho = 0.0 if self.variant == "no pull" else self.rho
        if self.variant == "replaced":
            self.w = center
            rho = 0.0
        self._step(rho, 0 if self.variant == "pull only" else 1)

    def _step(self, rho: float, sign: int = 1) -> None:
        variant, delta = self.variant, self.delta
        if variant == "forgets v":
            self.v = torch.zeros_like(self.v)
        look = {"no look-ahead": 0.0, "far ahead": 1.0}.get(variant, delta)
        ahead = self.w + look * self.v
        g = self.toy(ahead) if self.ready is None else self.ready
        g = (-sign if variant == "climbs" else sign) * g
        self.ready = None
        share = 1.0 if variant == "whole" and rho else self.eta * rho
        pull = share * ((ahead if variant == "pull ahead" else self.w) - self.center)
        if variant == "kept pull":
            pull = self.pull = pull if rho else self.pull
        old = self.v * (1.0 if variant == "undamped" else delta)
        self.v = old - self.eta * g - (pull if variant == "pull in v" else 0)
        self.w = self.w + self.v - (0 if variant == "pull in v" else pull)
        self.k += 1
        self.replayed.notes.append(self.w.tolist())


def local_replayed(
    seeds: Seeds,
    size: int,
    steps: int,
    tau: int,
    variant: str = "",
    rate: float = 1.0,
    mom: float = 0.0,
) -> list[Replayed]:
    """Replay rounds of τ local steps, each followed by an outer step; see :func:`moved_outer`."""
    first, (eta, _) = start(seeds.model), rates(seeds.model, variant)
    toys = [Toy(own, len(first)) for own in seeds.own]
    centers, velocities = [first] * size, [torch.zeros_like(first)] * size
    weights, replayed = list(centers), [begun(seeds) for _ in toys]
    for begin in range(0, steps, tau):
        length = _steps_of_round(begin, steps, tau, variant)
        if length == 0:
            break
        for left in reversed(range(length)):
            slopes = [toy(w) for toy, w in zip(toys, weights, strict=True)]
            if variant == "gradients" and not left:
                slopes = [sum(slopes) / size] * size
            weights = [w - eta * slope for w, slope in zip(weights, slopes, strict=True)]
        if variant == "aliased":
            centers = list(weights)
        means = _pseudo_gradients(centers, weights, tau, eta, variant)
        for place in range(size):
            given = (centers[place], means[place], velocities[place], rate, mom)
            centers[place], velocities[place] = moved_outer(*given, variant=variant)
        if variant in ("sum of weights", "over the world"):
            centers = [sum(weights) / (WORLD if variant == "over the world" else 1)] * size
        noted = weights if variant in ("gradients", "notes local") else centers
        for run, w in zip(replayed, noted, strict=True):
            run.notes.append(w.tolist())
        if variant not in ("not reset", "gradients"):
            weights = list(centers)
    for run in replayed:
        run.rates = f"η = {rates(seeds.model)[0]:.3g}"
        run.rates += f", rate {rate:.3g}, momentum {mom:.3g}" if mom > 0 else ""
    return replayed


def _steps_of_round(begin: int, steps: int, tau: int, variant: str) -> int:
    """Return how many local steps the round has that begins with this step."""
    if variant == "early":
        return min(tau, begin + 1)
    if variant == "whole last round":
        return tau
    if variant == "forgets the rest" and begin + tau > steps:
        return 0
    return min(tau, steps - begin)


def _pseudo_gradients(
    centers: list[Tensor], weights: list[Tensor], tau: int, eta: float, variant: str
) -> list[Tensor]:
    """Return what each rank takes for the mean of what the local steps have changed."""
    size = len(centers)
    changes = [center - w for center, w in zip(centers, weights, strict=True)]
    mean = sum(changes) / size
    variants = {
        "sum": [mean * size] * size,
        "world": [mean * size / WORLD] * size,
        "own": changes,
        "sign": [-mean] * size,
        "over tau": [mean / tau] * size,
        "inner rate": [mean * eta] * size,
        "summed weights": [center - sum(weights) for center in centers],
    }
    return variants.get(variant, [mean] * size)
