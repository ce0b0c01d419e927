"""Replays the algorithms of lab 08, or mistakes in them, with a gradient that the check knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.checks.comparison import EXACT, TOLERANCE
from utils.checks.trials import WORLD

from .probes import Toy, moved_center, moved_outer, moved_worker, rates, start

# -- the rules, and mistakes in them ----------------------------------------------------------


def outer_by(
    variant: str,
    center: Tensor,
    pseudo_gradient: Tensor,
    velocity: Tensor,
    rate: float,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """Return center and velocity after an outer step with a mistake; "" is the right step."""
    if variant == "fixed outer":
        rate = 0.7
        momentum = 0.9
    right = moved_outer(center, pseudo_gradient, velocity, rate, momentum)
    v = pseudo_gradient if variant == "forgets v" else right[1]
    if variant == "heavy ball":
        return center - rate * v, v
    if variant == "averages":
        return center - pseudo_gradient, v
    if variant == "forgets v":
        return center - rate * (pseudo_gradient + momentum * v), v
    return right


def rates_by(variant: str, seed: int) -> tuple[float, float]:
    """Return the η and ρ that an answer with this mistake uses; "" uses those of the case."""
    if variant == "fixed rates":
        return 0.1, 3.0
    eta, rho = rates(seed)
    if variant == "fixed rate":
        return 0.1, eta * rho / 0.1
    return eta, rho


# -- what is replayed -------------------------------------------------------------------------


@dataclass
class Replayed:
    """What one rank does in a replay.

    Attributes:
        first: the weights at the start.
        notes: the weights that the rank must note.
        exact: the tolerance for numbers that follow from these weights.
        rates: the rates of the case, in words.
    """

    first: list[float]
    notes: list[list[float]]
    exact: float
    rates: str


#: A function that returns what the rank at each place does, in a wrong variant if one is named.
Replay = Callable[..., list[Replayed]]


def precision(weights: Tensor) -> float:
    """Return the tolerance for numbers that follow from these weights after dozens of steps."""
    return EXACT if weights.dtype == torch.float64 else 10 * TOLERANCE


def begun(seed: int, words: str = "η = {:.3g}, ρ = {:.3g}") -> Replayed:
    """Return a replay without notes."""
    first = start(seed)
    return Replayed(first.tolist(), [], precision(first), words.format(*rates(seed)))


# The replays get one seed for the first weights, and one for the gradient of each rank of a group.


def round_robin_replayed(
    seed: int, valleys: Sequence[int], steps: int, variant: str = ""
) -> list[Replayed]:
    """Return what the rank at each place does if the workers come in turn."""
    weights = [start(seed)] * len(valleys)
    moves = rates_by(variant, seed)
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
    moves = rates_by("" if delta else variant, seed)  # with momentum, only workers make mistakes
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
    """A replayed worker, which has momentum if `delta` isn't 0."""

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
        # The next gradient, if a wrong variant computes it early.
        self.ready: Tensor | None = None
        self.eta, self.rho = rates_by(self.variant, self.seed)
        self.replayed = begun(self.seed)

    def until_exchange(self) -> None:
        """Take local steps until the next step with an exchange."""
        due = self.tau - 1 if self.variant == "late" else 0
        while self.k < self.steps and self.k % self.tau != due:
            self._step(self.rho if self.variant == "every step" else 0.0)

    def sends(self) -> Tensor:
        """Return what the worker sends to the master."""
        ahead = self.w + self.delta * self.v
        if self.variant == "new":
            self.ready = self.toy(ahead)
            return ahead - self.eta * self.ready
        return ahead if self.variant == "sends ahead" else self.w

    def exchange(self, center: Tensor) -> None:
        """Take the step with the center."""
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
    eta = rates_by(variant, seed)[0]
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
        moved = [outer_by(variant, *each, rate, mom) for each in moves]
        centers, velocities = zip(*moved, strict=True)
        centers = _centers(centers, weights, variant)
        for run, w, center in zip(replayed, weights, centers, strict=True):
            noted = w if variant in ("gradients", "notes local") else center
            run.notes.append(noted.tolist())
        weights = weights if variant in ("not reset", "gradients") else centers
    return replayed


def _lengths(steps: int, tau: int, variant: str) -> list[int]:
    """Return the number of local steps in each round."""
    begins = range(0, steps, tau)
    return {
        "early": [min(tau, begin + 1) for begin in begins],
        "whole last round": [tau for _ in begins],
        "forgets the rest": [tau] * (steps // tau),
    }.get(variant, [min(tau, steps - begin) for begin in begins])


def _descended(
    weights: Sequence[Tensor], toys: list[Toy], steps: int, eta: float, shared: bool
) -> Sequence[Tensor]:
    """Return each rank's weights after local steps; `shared` averages the last gradient."""
    for k in range(1, steps + 1):
        slopes = [toy(w) for toy, w in zip(toys, weights, strict=True)]
        if shared and k == steps:
            slopes = [sum(slopes) / len(toys)] * len(toys)
        weights = [w - eta * slope for w, slope in zip(weights, slopes, strict=True)]
    return weights


def _centers(
    centers: Sequence[Tensor], weights: Sequence[Tensor], variant: str
) -> Sequence[Tensor]:
    """Return what each rank uses as the center after the outer step."""
    divisor = {"sum of weights": 1, "over the world": WORLD}.get(variant)
    return centers if divisor is None else [sum(weights) / divisor] * len(weights)


def _pseudo_gradients(
    centers: Sequence[Tensor], weights: Sequence[Tensor], tau: int, eta: float, variant: str
) -> list[Tensor]:
    """Return what each rank uses as the mean pseudo-gradient."""
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


# -- the message for each variant -----------------------------------------------------------------

_FIXED = {"fixed rate": "You multiplied the gradient by 0.1, whatever η is. Use the argument eta"}
_BOTH_FIXED = _FIXED | {
    "fixed rates": "You used η = 0.1 and ρ = 3, the numbers of the notebook. Use the arguments eta "
    "and rho"
}
_WHOLE = "You pulled by the whole distance. Pull by the share α = ηρ"
_OVER_THE_WORLD = (
    f"You divided by {WORLD}, the size of the world. Divide by dist.get_world_size(group)"
)
ROUND_ROBIN_MISTAKES = _BOTH_FIXED | {
    "new": "You moved the center with the worker's new weights. Send the old ones, because line 14 "
    "has W^j as it was before line 13",
    "at center": "You computed the gradient at the center. Line 11 computes it at the worker's own "
    "weights, W^j",
    "center as worker": "The worker continues with the center's weights. Keep its own weights, "
    "because only the spring pulls it",
}

SERVE_MISTAKES = _BOTH_FIXED | {
    "new": "You send W after the worker's own step. Send W as it was before the step"
}
WORK_MISTAKES = _BOTH_FIXED | {
    "new center": "You pulled to a center that this worker has already moved. Let the master "
    "answer first, and then move the center",
    "no pull": "Nothing pulls the worker when it has the center. Call move_worker",
    "every step": "You pulled the worker in every step, to a center that came earlier. Only "
    "descend between two exchanges",
    "pull only": "The gradient is missing in the step with an exchange. Descend in every step",
    "late": "The exchange comes in the last of τ steps. Move it to steps 0, τ, 2τ, …, where "
    "k % tau == 0",
    "replaced": "The worker takes over the center's weights. Keep its own weights, because only "
    "the spring pulls it",
    "whole": _WHOLE,
    "climbs": "The gradient has the wrong sign, so the worker climbs",
}

MOMENTUM_MISTAKES = _BOTH_FIXED | {
    "no look-ahead": "You computed the gradient at w. Nesterov's momentum needs it ahead, at w + "
    "δv",
    "pull in v": "You put the spring into v, which keeps it for later steps. Pull only w, once: "
    "w ← w + v − α(w − W̄)",
    "pull ahead": "You measured the spring from w + δv. Measure it from w, which you sent",
    "forgets v": "v begins at 0 in every step. Keep it from step to step",
    "undamped": "v keeps all of its old value. Multiply the old v by δ",
    "far ahead": "You computed the gradient at w + v. Compute it at w + δv",
    "sends ahead": "You sent w + δv. Send w to the master",
    "kept pull": "The pull of the last exchange acts in later steps, too. Don't pull between two "
    "exchanges",
    "whole": _WHOLE,
    "climbs": "The gradient has the wrong sign, so the worker climbs. Use v ← δv − η ΔW",
    "no pull": "Nothing pulls the worker when it has the center",
    "every step": "You pulled the worker in every step. Don't pull between two exchanges",
    "late": "The exchange comes in the last of τ steps. Move it to steps 0, τ, 2τ, …",
    "new": "You sent the weights after the worker's step. Send them before the step",
    "replaced": "The worker takes over the center's weights. Keep its own weights",
}

LOCAL_MISTAKES = _FIXED | {
    "over the world": _OVER_THE_WORLD,
    "gradients": "You averaged a gradient in the last step of a round, so the weights still differ "
    "between the ranks. Call all_reduce on the weights, after the step",
    "sum of weights": "You noted the sum over the ranks. Divide by the size of the group",
    "own": "You noted this rank's own weights. Continue with the tensor that you passed to "
    "all_reduce, because the sum is in it",
    "not reset": "You computed the mean, but the rank continues from its own weights. Continue "
    "from the mean",
    "early": "You averaged after the first of τ steps. Count the steps from 1: k % tau == 0",
    "forgets the rest": "The last round is missing. Make it shorter if τ doesn't divide the steps",
    "whole last round": "The last round has τ steps, so you take more than `steps` in all. Take "
    "only the steps that are left",
}

OUTER_MISTAKES = {
    "heavy ball": "You used heavy-ball momentum. Compute v ← μv + g first, and then step along "
    "g + μv, as Nesterov does",
    "forgets v": "You don't use the old velocity. Use v ← μv + g",
    "averages": "You use neither the outer rate nor the momentum",
}
DILOCO_MISTAKES = {
    "sign": "The center moves away from the workers. Descend along the pseudo-gradient W̄ − Wⁱ",
    "sum": "You summed the pseudo-gradients. Divide by the size of the group, because DiLoCo uses "
    "their mean",
    "world": _OVER_THE_WORLD,
    "own": "Each rank used its own pseudo-gradient. Use the tensor that you passed to all_reduce, "
    "because the sum is in it",
    "not reset": "The ranks continue from their own weights after an outer step. Continue from the "
    "center",
    "over tau": "You divided by τ. Use the whole change of τ steps as the pseudo-gradient",
    "inner rate": "You multiplied by η. Use only the outer rate in the outer step",
    "summed weights": "You summed W over the ranks before you subtracted it from the center. Sum "
    "the differences W̄ − Wⁱ, and divide by the size of the group",
    "aliased": "The pseudo-gradients are zero, because w and the center are one tensor and w -= … "
    "changes both. Make a new tensor with w = w - …",
    "notes local": "You noted this rank's weights before the outer step. Note the center",
    "fixed outer": "You used rate 0.7 and momentum 0.9, the numbers of the notebook. Use the "
    "arguments rate and momentum",
    "averages": "The outer step is a plain mean. Use outer_step with rate and momentum",
    "forgets v": "The velocity begins at 0 in each round. Keep it from round to round",
} | {name: LOCAL_MISTAKES[name] for name in ("forgets the rest", "whole last round", "fixed rate")}
