"""Two laws of scaling, and the serial fraction that fits measured times best.

Amdahl asks how much sooner the *same* work is done by p ranks; Gustafson asks how much *more* work
p ranks do in the same time. Both split the work into a serial fraction s and a parallel rest.

Sources: G. M. Amdahl, "Validity of the single processor approach to achieving large scale computing
capabilities", AFIPS Spring Joint Computer Conference, 1967. J. L. Gustafson, "Reevaluating Amdahl's
law", Communications of the ACM 31(5), 1988.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from utils.mpi.benchmark.alpha_beta import nonnegative

RESAMPLES = 400
# The interval holds the middle 90 % of the resampled fits.
PERCENTILES = (5, 95)

Rounds = Mapping[int, Sequence[float] | float]


def amdahl(p, serial: float):
    """Speedup of p ranks over one, for the same work; p is a number or an array of them."""
    p = np.asarray(p, dtype=float)[()]
    return 1 / (serial + (1 - serial) / p)


def gustafson(p, serial: float):
    """Scaled speedup: the work that p ranks do while one rank does one unit of it."""
    p = np.asarray(p, dtype=float)[()]
    return p - serial * (p - 1)


@dataclass(frozen=True)
class LawFit:
    """A law fitted to measured times.

    Attributes:
        law: :func:`amdahl` or :func:`gustafson`.
        serial: the serial fraction that fits best, from 0 to 1.
        low, high: 90 % interval of it. It tells the noise of the rounds, and nothing about
            whether the law holds: look at the points.
        time: seconds at one rank, by the fit.
    """

    law: Callable
    serial: float
    low: float
    high: float
    time: float

    def speedup(self, p):
        """The law's speedup at p ranks."""
        return self.law(p, self.serial)

    def band(self, p) -> tuple:
        """The lowest and the highest speedup at p ranks that the interval allows."""
        return self.law(p, self.high), self.law(p, self.low)


def fit_amdahl(rounds: Rounds, *, seed: int = 0) -> LawFit:
    """Amdahl's serial fraction of a strong-scaling measurement: T(p) = T(1) · (s + (1 − s)/p).

    rounds: seconds of each round by rank count, the work being the same at all of them.

    Raises:
        ValueError: fewer than two rank counts, one below 1, no rounds, or a time that is not
            positive and finite.
    """
    # T = a + b/p. Divided by T both columns count relative errors, as a fit of times should.
    return _fit(rounds, amdahl, lambda p, t: np.stack([1 / t, 1 / (p * t)], axis=1), _time, seed)


def fit_gustafson(rounds: Rounds, *, seed: int = 0) -> LawFit:
    """Gustafson's serial fraction of a weak-scaling measurement: p·T(1)/T(p) = p − s·(p − 1).

    rounds: seconds of each round by rank count, the work *of each rank* being the same.

    Raises:
        ValueError: as :func:`fit_amdahl`.
    """
    # Divided by p·T(1) that is 1/T = u/p + v with u = s/T(1) and v = (1 − s)/T(1).
    return _fit(rounds, gustafson, lambda p, t: np.stack([t / p, t], axis=1), _rate, seed)


def _time(first: float, second: float) -> tuple[float, float]:
    """Serial fraction and T(1) of T = first + second/p."""
    return first / (first + second), first + second


def _rate(first: float, second: float) -> tuple[float, float]:
    """Serial fraction and T(1) of 1/T = first/p + second."""
    return first / (first + second), 1 / (first + second)


def _fit(rounds: Rounds, law: Callable, columns: Callable, meaning: Callable, seed: int) -> LawFit:
    measured = _checked(rounds)
    p = np.array(list(measured), dtype=float)

    def fit(times: list[float]) -> tuple[float, float]:
        return meaning(*nonnegative(columns(p, np.array(times)), np.ones(len(p))))

    serial, time = fit([float(np.median(all_)) for all_ in measured.values()])
    random = np.random.default_rng(seed)
    resampled = [
        fit([float(np.median(random.choice(all_, len(all_)))) for all_ in measured.values()])[0]
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(resampled, PERCENTILES)
    return LawFit(law, float(serial), float(low), float(high), float(time))


def _checked(rounds: Rounds) -> dict[int, np.ndarray]:
    measured = {p: np.atleast_1d(np.asarray(times, float)) for p, times in sorted(rounds.items())}
    if len(measured) < 2:
        raise ValueError(f"a fit needs at least 2 rank counts, got {list(measured)}")
    if min(measured) < 1:
        raise ValueError(f"rank counts begin at 1, got {min(measured)}")
    for p, times in measured.items():
        if times.ndim != 1 or not len(times):
            raise ValueError(f"{p} ranks: expected a list of seconds, one for each round")
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise ValueError(f"{p} ranks: times must be positive and finite, got {times.tolist()}")
    return measured


def speedup_band(one: Sequence[float], many: Sequence[float]) -> tuple[float, float, float]:
    """Lowest, middle and highest speedup of the rounds `many` over the rounds `one`.

    The middle is the ratio of the medians. The ends pair the slow quarter of one side with the
    fast quarter of the other, so they are cautious.

    Raises:
        ValueError: no rounds, or a time that is not positive.
    """
    if not len(one) or not len(many) or min(*one, *many, 1.0) <= 0:
        raise ValueError("a speedup needs rounds on both sides, and positive times")
    fast_one, mid_one, slow_one = np.percentile(one, [25, 50, 75])
    fast_many, mid_many, slow_many = np.percentile(many, [25, 50, 75])
    return float(fast_one / slow_many), float(mid_one / mid_many), float(slow_one / fast_many)
