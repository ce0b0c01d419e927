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
    if variant == "fixed outer":
        rate = 0.7
        momentum = 0.9
    v = pseudo_gradient if variant == "forgets v" else momentum * velocity + pseudo_gradient
    if variant == "heavy ball":
        return center - rate * v, v
    if variant == "averages":
        return center - pseudo_gradient, v
    return center - rate * (pseudo_gradient + momentum * v), v


# -- gradients, first weights, rates ----------------------------------------------------------


class Toy:
    """A gradient of a valley of its own, with noise that is another one at each call.

    Attributes:
        at: the weights that it was asked at.
        seen: what this rank had communicated by then.
    """

    def __init__(self, seed: int, size: int, look: Callable[[], Any] = lambda: None):
        self.draw = torch.Generator().manual_seed(seed)
        self.size = size
        self.goal = self._random()
        self.scale = 0.5 + self._random().abs() / 4
        self.look = look
        self.at: list[list[float]] = []
        self.seen: list[Any] = []

    def __call__(self, w: Tensor) -> Tensor:
        """Return the gradient at w."""
        self.at.append(w.tolist())
        self.seen.append(self.look())
        return (self.scale * (w - self.goal) + self._random()).to(w.dtype)

    def _random(self) -> Tensor:
        return 4 * torch.randn(self.size, generator=self.draw, dtype=torch.float64)


def start(seed: int, like: int | None = None) -> Tensor:
    """Return the weights that all ranks begin with: 3 to 40 numbers, in double precision or not.

    Args:
        like: the seed of other weights, which have the same length and type.
    """
    form = seed if like is None else like
    kind = form % 3
    size = random.Random(form).randint(*((20, 40), (3, 6), (7, 19))[kind])
    return numbers(seed, size, double=True).to(torch.float64 if kind else torch.float32)


def rates(seed: int, variant: str = "") -> tuple[float, float]:
    """Return η and ρ of a case: of four seeds in a row, each has another mix of small and large."""
    if variant == "fixed rates":
        return 0.1, 3.0
    chance = random.Random(seed)
    eta = chance.uniform(*((0.02, 0.08), (0.15, 0.3))[seed % 2])
    alpha = chance.uniform(*((0.1, 0.4), (0.65, 0.8))[seed // 2 % 2])
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


def begun(seed: int, words: str = "η = {:.3g}, ρ = {:.3g}") -> Replayed:
    """Return a replay without notes."""
    first = start(seed)
    return Replayed(first.tolist(), [], precision(first), words.format(*rates(seed)))


def rounds(steps: int, tau: int) -> int:
    """Return how many times τ steps begin."""
    return -(-steps // tau)


# The replays get the seed of the first weights, and that of the valley of each rank of a group.


def round_robin_replayed(
    seed: int, valleys: Sequence[int], steps: int, variant: str = ""
) -> list[Replayed]:
    """Return what the rank at each place does, where the workers come in turn."""
    weights = [start(seed)] * len(valleys)
    moves = rates(seed, variant)
    toys = [Toy(valley, len(weights[0])) for valley in valleys]
    replayed = [begun(seed) for _ in valleys]
    for t in range(steps):
        j = 1 + t % (len(valleys) - 1)
        center, w = weights[0], weights[j]
        new = moved_worker(w, center, toys[j](center if variant == "at center" else w), *moves)
        weights[0] = moved_center(center, new if variant == "new" else w, *moves)
        weights[j] = weights[0] if variant == "center as worker" else new
        for place in (0, j):
            replayed[place].notes.append(weights[place].tolist())
    return replayed


def asynchronous_replayed(
    seed: int,
    valleys: Sequence[int],
    order: Sequence[int],
    steps: int,
    tau: int,
    variant: str = "",
    delta: float = 0.0,
) -> list[Replayed]:
    """Return what the rank at each place does if the workers at these places come in this order."""
    center = start(seed)
    master = begun(seed)
    runs = [_Worker(seed, valley, steps, tau, variant, delta) for valley in valleys[1:]]
    moves = rates(seed, "" if delta else variant)  # with momentum, the master is right
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


@dataclass
class _Worker:
    """A worker that is replayed; with momentum, if there is a `delta`."""

    seed: int
    valley: int
    steps: int
    tau: int
    variant: str
    delta: float

    def __post_init__(self) -> None:
        self.w = self.center = start(self.seed)
        self.v = self.pull = torch.zeros_like(self.w)
        self.k = 0
        self.toy = Toy(self.valley, len(self.w))
        # The next gradient, where a mistake needs it early.
        self.ready: Tensor | None = None
        self.eta, self.rho = rates(self.seed, self.variant)
        self.replayed = begun(self.seed)

    def until_exchange(self) -> None:
        """Make local steps, until one with an exchange comes."""
        due = self.tau - 1 if self.variant == "late" else 0
        while self.k < self.steps and self.k % self.tau != due:
            self._step(self.rho if self.variant == "every step" else 0.0)

    def sends(self) -> Tensor:
        """Return what the master gets."""
        ahead = self.w + self.delta * self.v
        if self.variant == "new":
            self.ready = self.toy(ahead)
            return ahead - self.eta * self.ready
        return ahead if self.variant == "sends ahead" else self.w

    def exchange(self, center: Tensor) -> None:
        """Make the step with the centre."""
        self.center = center
        if self.variant == "replaced":
            self.w = center
        rho = 0.0 if self.variant in ("no pull", "replaced") else self.rho
        self._step(rho, 0 if self.variant == "pull only" else 1)

    def _step(self, rho: float, sign: int = 1) -> None:
        looks = {"no look-ahead": 0.0, "far ahead": 1.0, "forgets v": 0.0}
        ahead = self.w + looks.get(self.variant, self.delta) * self.v
        g = self.toy(ahead) if self.ready is None else self.ready
        self.ready = None
        pull = self._pull(ahead, rho)
        kept = {"undamped": 1.0, "forgets v": 0.0}.get(self.variant, self.delta)
        self.v = self.v * kept - self.eta * (-sign if self.variant == "climbs" else sign) * g
        if self.variant == "pull in v":
            self.v = self.v - pull
            pull = torch.zeros_like(pull)
        self.w = self.w + self.v - pull
        self.k += 1
        self.replayed.notes.append(self.w.tolist())

    def _pull(self, ahead: Tensor, rho: float) -> Tensor:
        if self.variant == "kept pull" and not rho:
            return self.pull
        share = 1.0 if self.variant == "whole" and rho else self.eta * rho
        self.pull = share * ((ahead if self.variant == "pull ahead" else self.w) - self.center)
        return self.pull


def local_replayed(
    seed: int,
    valleys: Sequence[int],
    steps: int,
    tau: int,
    variant: str = "",
    rate: float = 1.0,
    mom: float = 0.0,
) -> list[Replayed]:
    """Replay rounds of τ local steps, each followed by an outer step; see :func:`moved_outer`."""
    first = start(seed)
    eta = rates(seed, variant)[0]
    toys = [Toy(valley, len(first)) for valley in valleys]
    words = "η = {:.3g}" + (f", rate {rate:.3g}, momentum {mom:.3g}" if mom > 0 else "")
    replayed = [begun(seed, words) for _ in valleys]
    weights = centers = [first] * len(valleys)
    velocities = [torch.zeros_like(first)] * len(valleys)
    for length in _lengths(steps, tau, variant):
        weights = _descended(weights, toys, length, eta, shared=variant == "gradients")
        before = weights if variant == "aliased" else centers
        means = _pseudo_gradients(before, weights, tau, eta, variant)
        moves = zip(before, means, velocities, strict=True)
        moved = [moved_outer(*each, rate, mom, variant) for each in moves]
        centers = _centers([center for center, _ in moved], weights, variant)
        velocities = [velocity for _, velocity in moved]
        noted = weights if variant in ("gradients", "notes local") else centers
        for run, w in zip(replayed, noted, strict=True):
            run.notes.append(w.tolist())
        weights = weights if variant in ("not reset", "gradients") else centers
    return replayed


def _lengths(steps: int, tau: int, variant: str) -> list[int]:
    """Return how many local steps each round has."""
    begins = range(0, steps, tau)
    variants = {
        "early": [min(tau, begin + 1) for begin in begins],
        "whole last round": [tau for _ in begins],
        "forgets the rest": [tau] * (steps // tau),
    }
    return variants.get(variant, [min(tau, steps - begin) for begin in begins])


def _descended(
    weights: list[Tensor], toys: list[Toy], steps: int, eta: float, shared: bool
) -> list[Tensor]:
    """Return each rank's weights after local steps; `shared`: the last gradient is averaged."""
    for k in range(1, steps + 1):
        slopes = [toy(w) for toy, w in zip(toys, weights, strict=True)]
        if shared and k == steps:
            slopes = [sum(slopes) / len(toys)] * len(toys)
        weights = [w - eta * slope for w, slope in zip(weights, slopes, strict=True)]
    return weights


def _centers(centers: list[Tensor], weights: list[Tensor], variant: str) -> list[Tensor]:
    """Return what each rank takes for the centre after the outer step."""
    divisor = {"sum of weights": 1, "over the world": WORLD}.get(variant)
    return centers if divisor is None else [sum(weights) / divisor] * len(weights)


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
