"""Two laws of scaling, and the serial fraction that fits measured times best.

Amdahl asks how much sooner p ranks finish the *same* work. Gustafson asks how much *more* work p
ranks do in the same time. Both split the work into a serial fraction s and a parallel rest.

Sources: G. M. Amdahl, "Validity of the single processor approach to achieving large scale computing
capabilities", AFIPS Spring Joint Computer Conference, 1967. J. L. Gustafson, "Reevaluating Amdahl's
law", Communications of the ACM 31(5), 1988.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from utils.mpi.benchmark.alpha_beta import nonnegative

RESAMPLES = 400
# The interval holds the middle 90 % of the resampled fits.
PERCENTILES = (5, 95)

Rounds = Mapping[int, Sequence[float] | float]


def amdahl(p: ArrayLike, serial: float):
    """Return the speedup of p ranks over one, for the same work; p may be an array."""
    p = np.asarray(p, dtype=float)[()]
    return 1 / (serial + (1 - serial) / p)


def gustafson(p: ArrayLike, serial: float):
    """Return the scaled speedup: the work that p ranks do while one rank does one unit."""
    p = np.asarray(p, dtype=float)[()]
    return p - serial * (p - 1)


@dataclass(frozen=True)
class LawFit:
    """A law fitted to measured times.

    Attributes:
        law: :func:`amdahl` or :func:`gustafson`.
        serial: the serial fraction that fits best, from 0 to 1.
        low, high: its 90 % interval, which shows the noise of the rounds. It doesn't show whether
            the law holds, so look at the points.
        time: seconds on one rank, by the fit.
    """

    law: Callable
    serial: float
    low: float
    high: float
    time: float

    def speedup(self, p: ArrayLike):
        """Return the law's speedup at p ranks."""
        return self.law(p, self.serial)

    def band(self, p: ArrayLike) -> tuple:
        """Return the lowest and the highest speedup at p ranks that the interval allows."""
        return self.law(p, self.high), self.law(p, self.low)


def fit_amdahl(rounds: Rounds) -> LawFit:
    """Return Amdahl's fit of a strong-scaling measurement: T(p) = T(1) · (s + (1 − s)/p).

    Args:
        rounds: seconds of each round by rank count, for the same work on all rank counts.

    Raises:
        ValueError: there are fewer than two rank counts, a count below 1, no rounds, or a time that
            isn't positive and finite.
    """

    def fit(p: np.ndarray, times: np.ndarray) -> tuple[float, float]:
        # T = a + b/p. We divide by T, so that the fit minimizes relative errors.
        a, b = _nonnegative(1 / times, 1 / (p * times))
        return a / (a + b), a + b

    return _fit(rounds, amdahl, fit)


def fit_gustafson(rounds: Rounds) -> LawFit:
    """Return Gustafson's fit of a weak-scaling measurement: p·T(1)/T(p) = p − s·(p − 1).

    Args:
        rounds: seconds of each round by rank count, for the same work *on each rank*.

    Raises:
        ValueError: as in :func:`fit_amdahl`.
    """

    def fit(p: np.ndarray, times: np.ndarray) -> tuple[float, float]:
        # Divided by p·T(1), the law is 1/T = u/p + v with u = s/T(1) and v = (1 − s)/T(1).
        u, v = _nonnegative(times / p, times)
        return u / (u + v), 1 / (u + v)

    return _fit(rounds, gustafson, fit)


def _nonnegative(*columns: np.ndarray) -> np.ndarray:
    """Return the nonnegative factors of these columns that bring their sum closest to 1."""
    return nonnegative(np.stack(columns, axis=1), np.ones(len(columns[0])))


def _fit(rounds: Rounds, law: Callable, fit: Callable) -> LawFit:
    """Return the fit of the medians; its interval comes from resampled rounds.

    Args:
        fit: a function that returns serial fraction and T(1) from rank counts and times.
    """
    measured = _checked(rounds)
    p = np.array(list(measured), dtype=float)
    serial, time = fit(p, np.array([np.median(times) for times in measured.values()]))
    random = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        medians = [np.median(random.choice(times, len(times))) for times in measured.values()]
        resampled.append(fit(p, np.array(medians))[0])
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


def speedup_band(alone: Sequence[float], many: Sequence[float]) -> tuple[float, float, float]:
    """Return lowest, middle and highest speedup of the rounds `many` over the rounds `alone`.

    The middle is the ratio of the medians. The ends are cautious, because they pair the slow
    quartile of one side with the fast quartile of the other side.

    Raises:
        ValueError: there are no rounds, or a time isn't positive.
    """
    if not len(alone) or not len(many) or min(*alone, *many, 1.0) <= 0:
        raise ValueError("a speedup needs rounds on both sides, and positive times")
    ratios = np.percentile(alone, [25, 50, 75]) / np.percentile(many, [75, 50, 25])
    low, middle, high = ratios.tolist()
    return low, middle, high
