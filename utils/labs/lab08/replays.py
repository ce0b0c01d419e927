"""The algorithms of lab 08, replayed with a gradient that the check knows; or a mistake in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import EXACT, TOLERANCE
from utils.checks.probe import numbers
from utils.checks.trials import WORLD

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
        center = weights[0]
        w = weights[j]
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
    eta = rates(seed, variant)[0]
    weights: Sequence[Tensor] = [start(seed)] * len(valleys)
    centers = weights
    velocities: Sequence[Tensor] = [torch.zeros_like(weights[0])] * len(valleys)
    toys = [Toy(valley, len(weights[0])) for valley in valleys]
    words = "η = {:.3g}" + (f", rate {rate:.3g}, momentum {mom:.3g}" if mom > 0 else "")
    replayed = [begun(seed, words) for _ in valleys]
    for length in _lengths(steps, tau, variant):
        weights = _descended(weights, toys, length, eta, shared=variant == "gradients")
        before = weights if variant == "aliased" else centers
        means = _pseudo_gradients(before, weights, tau, eta, variant)
        moves = zip(before, means, velocities, strict=True)
        moved = [moved_outer(*each, rate, mom, variant) for each in moves]
        centers, velocities = zip(*moved, strict=True)
        centers = _centers(centers, weights, variant)
        for run, w, center in zip(replayed, weights, centers, strict=True):
            noted = w if variant in ("gradients", "notes local") else center
            run.notes.append(noted.tolist())
        weights = weights if variant in ("not reset", "gradients") else centers
    return replayed


def _lengths(steps: int, tau: int, variant: str) -> list[int]:
    """Return how many local steps each round has."""
    begins = range(0, steps, tau)
    return {
        "early": [min(tau, begin + 1) for begin in begins],
        "whole last round": [tau for _ in begins],
        "forgets the rest": [tau] * (steps // tau),
    }.get(variant, [min(tau, steps - begin) for begin in begins])


def _descended(
    weights: Sequence[Tensor], toys: list[Toy], steps: int, eta: float, shared: bool
) -> Sequence[Tensor]:
    """Return each rank's weights after local steps; `shared`: the last gradient is averaged."""
    for k in range(1, steps + 1):
        slopes = [toy(w) for toy, w in zip(toys, weights, strict=True)]
        if shared and k == steps:
            slopes = [sum(slopes) / len(toys)] * len(toys)
        weights = [w - eta * slope for w, slope in zip(weights, slopes, strict=True)]
    return weights


def _centers(
    centers: Sequence[Tensor], weights: Sequence[Tensor], variant: str
) -> Sequence[Tensor]:
    """Return what each rank takes for the centre after the outer step."""
    divisor = {"sum of weights": 1, "over the world": WORLD}.get(variant)
    return centers if divisor is None else [sum(weights) / divisor] * len(weights)


def _pseudo_gradients(
    centers: Sequence[Tensor], weights: Sequence[Tensor], tau: int, eta: float, variant: str
) -> list[Tensor]:
    """Return what each rank takes for the mean of what the local steps have changed."""
    size = len(centers)
    changes = [center - w for center, w in zip(centers, weights, strict=True)]
    mean = sum(changes) / size
    return {
        "sum": [mean * size] * size,
        "world": [mean * size / WORLD] * size,
        "own": changes,
        "sign": [-mean] * size,
        "over tau": [mean / tau] * size,
        "inner rate": [mean * eta] * size,
        "summed weights": [center - sum(weights) for center in centers],
    }.get(variant, [mean] * size)


# -- what to say of each variant ------------------------------------------------------------------

_FIXED = {"fixed rate": "the gradient is multiplied by 0.1, whatever η is: use the argument eta"}
_BOTH_FIXED = _FIXED | {
    "fixed rates": "these are the weights with η = 0.1 and ρ = 3, the numbers of the notebook: use "
    "the arguments eta and rho"
}
ROUND_ROBIN_MISTAKES = _BOTH_FIXED | {
    "new": "the centre was moved by the worker's new weights. Line 14 has W^j as it was before "
    "line 13: send the old ones",
    "at center": "the gradient is taken at the centre's weights. Line 11 computes it at the "
    "worker's own, W^j",
    "center as worker": "the worker goes on with the centre's weights. It keeps its own: only the "
    "spring pulls it",
}

SERVE_MISTAKES = _BOTH_FIXED | {
    "new": "the worker sends its weights after its step; the rule has W as it was before"
}
WORK_MISTAKES = _BOTH_FIXED | {
    "new center": "the pull goes to a centre that this worker has moved already: the master "
    "answers first, and moves the centre afterwards",
    "no pull": "nothing pulls the worker when it has the centre: move_worker",
    "every step": "the worker is pulled in every step, by a centre that it got earlier; between "
    "two exchanges it descends only",
    "pull only": "in the step with an exchange the gradient is missing: every step descends",
    "late": "the exchange comes in the last of τ steps. It belongs into step 0, τ, 2τ, …: "
    "k % tau == 0",
    "replaced": "the worker takes over the centre's weights. It keeps its own: the spring pulls it",
    "whole": "the pull is the whole distance; it is the share α = ηρ of it",
    "climbs": "the gradient has the wrong sign: the worker climbs",
}

MOMENTUM_MISTAKES = _BOTH_FIXED | {
    "no look-ahead": "the gradient is taken at w. Nesterov's momentum takes it ahead, at w + δv",
    "pull in v": "the spring is part of v, which keeps it for the next steps. It pulls w only, "
    "once: w ← w + v − α(w − W̄)",
    "pull ahead": "the spring is measured from w + δv; it is measured from w, which was sent",
    "forgets v": "v is 0 again in every step: keep it from step to step",
    "undamped": "v has all of its old value and the gradient: multiply the old v by δ",
    "far ahead": "the gradient is taken at w + v, expected at w + δv",
    "sends ahead": "the worker sends w + δv; the master needs w",
    "kept pull": "the pull of the last exchange acts in the steps after it, too: between two "
    "exchanges there is no spring",
    "whole": "the pull is the whole distance; it is the share α = ηρ of it",
    "climbs": "the gradient has the wrong sign: the worker climbs. v ← δv − η ΔW",
    "no pull": "nothing pulls the worker when it has the centre",
    "every step": "the worker is pulled in every step; between two exchanges there is no spring",
    "late": "the exchange comes in the last of τ steps. It belongs into step 0, τ, 2τ, …",
    "new": "the worker sends its weights after its step; send them before",
    "replaced": "the worker takes over the centre's weights; it keeps its own",
}

LOCAL_MISTAKES = _FIXED | {
    "over the world": f"divided by {WORLD}, the size of the world: dist.get_world_size(group)",
    "gradients": "a gradient is averaged in the last step of a round, and not the weights: they "
    "differ between the ranks. all_reduce the weights, after the step",
    "sum of weights": "these are sums over the ranks: divide by the size of the group",
    "own": "these are this rank's own weights: all_reduce writes into the tensor that it is given, "
    "so go on with that one",
    "not reset": "the average was made, but the rank goes on from its own weights: go on from the "
    "average",
    "early": "the weights are averaged after the first of τ steps: count the steps from 1, "
    "k % tau == 0",
    "forgets the rest": "the last round is missing: where τ does not divide the steps, it is "
    "shorter",
    "whole last round": "the last round has τ steps, and there are more than `steps` of them: it "
    "has what is left",
}

OUTER_MISTAKES = {
    "heavy ball": "this is heavy-ball momentum: Nesterov's step is along g + μv, with the new v; "
    "first v ← μv + g",
    "forgets v": "the old velocity is not used: v ← μv + g",
    "averages": "the outer rate and the momentum are not used",
}
DILOCO_MISTAKES = {
    "sign": "the centre moves away from the workers. The pseudo-gradient is W̄ − Wⁱ, and the outer "
    "step descends along it",
    "sum": "the pseudo-gradients were summed; DiLoCo takes their mean: divide by the size of the "
    "group",
    "world": f"divided by {WORLD}, the size of the world: dist.get_world_size(group)",
    "own": "each rank has used its own pseudo-gradient: all_reduce writes into the tensor that it "
    "is given, so use that one",
    "not reset": "the ranks go on from their own weights after an outer step. In DiLoCo they go on "
    "from the centre",
    "over tau": "divided by τ: the pseudo-gradient is what τ steps have changed, as it is",
    "inner rate": "multiplied by η: the outer step has a rate of its own",
    "summed weights": "W was summed over the ranks before it was taken from the centre: sum the "
    "differences W̄ − Wⁱ, and divide by the size of the group",
    "aliased": "the pseudo-gradients are zero: w is the same tensor as the centre, and w -= … "
    "changes both. w = w - … makes a new one",
    "notes local": "these are the weights of this rank before the outer step: note the centre",
    "fixed outer": "these are the weights with rate 0.7 and momentum 0.9, the numbers of the "
    "notebook: use the arguments rate and momentum",
    "averages": "the outer step is a plain average: use outer_step with rate and momentum",
    "forgets v": "the velocity is 0 again in each round: keep it from round to round",
} | {name: LOCAL_MISTAKES[name] for name in ("forgets the rest", "whole last round", "fixed rate")}
