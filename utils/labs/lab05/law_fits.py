"""Tasks 5.3 and 5.4: two laws of scaling, and fits of the serial fraction to made-up times."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from utils.checks.comparison import Mistake, same, short, table
from utils.checks.task import Report, Step, each_of, task, value
from utils.cluster.questions import Ranks, Reply

from .probes import probe_law

# Rank counts, and errors of a measurement. A straight line through all points doesn't change with
# these errors, and neither does the mean of all points' fractions in 5.3, which 5.3 allows. Answers
# that use some points only, another line, or this mean in 5.4 give wrong results.
NOISY = [1, 2, 3, 5, 13, 13, 20]
SHARE_NOISE = 0.09 * np.array([0, 0.235, -1, 0.674, 1, 0.066, -0.974])  # of T(p) / T(1)
SPEEDUP_NOISE = 0.5 * np.array([0, 1.94, 3, -2, -7.72, -13, 11.82])  # of p · T(1) / T(p)


@dataclass(frozen=True)
class LawCase:
    """A law and its fit, at the rank counts `ps` of one measurement.

    Attributes:
        serial: the serial fraction that a fit must find.
        times, right: measured times, and the speedups by the law, for each rank count.
        laws, fits: wrong results at the last rank count, and of the fit.
    """

    law: str
    ps: list[int]
    serial: float
    times: np.ndarray
    right: np.ndarray
    laws: Mapping[str, float]
    fits: Mapping[str, float]


@task("5.3", "Amdahl's law and its fit", points=3)
def fit_amdahl(ranks: Ranks, report: Report) -> None:
    """Check the law, and the serial fraction of exact, noisy and too good times."""
    _judge_laws(ranks, report, itertools.starmap(_amdahl, _law_data(report.seed)))


@task("5.4", "Gustafson's law and its fit", points=2)
def fit_gustafson(ranks: Ranks, report: Report) -> None:
    """Check the law, and the serial fraction of exact, noisy and too good times."""
    _judge_laws(ranks, report, itertools.starmap(_gustafson, _law_data(report.seed + 1)))


def _judge_laws(ranks: Ranks, report: Report, cases: Iterable[LawCase]) -> None:
    """Judge one case after the other until one has a problem."""
    for case in cases:
        asked = {"law": case.law, "ps": case.ps, "serial": case.serial}
        for answer in report.answers(ranks, probe_law, times=case.times.tolist(), **asked):
            report.follow(answer.rank, _law_and_fit(case, answer))
        if report.found:
            return


def _law_and_fit(case: LawCase, answer: Reply) -> Iterator[Step]:
    """Yield the steps for the law at one rank count and at several, and for its fit."""
    ps = case.ps
    law = case.law
    results = answer.value
    # Several mistakes may give similar numbers by chance, so we look for an exact match first.
    mistakes = [
        Mistake(functools.partial(same, expected=share, tolerance=tolerance), text)
        for tolerance in (1e-6, 2e-3)
        for text, share in case.fits.items()
    ]
    fit = value(
        results["fit"],
        case.serial,
        mistakes,
        what=f"fit_{law}, with {ps} ranks and {short(case.times.tolist())} s",
        form="the serial fraction",
        tolerance=0.01,
    )
    right = case.right.tolist()
    at_one = value(
        results["one"], right[-1], table(case.laws), what=f"{law}({ps[-1]}, {case.serial})"
    )
    at_several = each_of(
        [value(results["array"], right, what=f"{law} of an array of p")],
        [value(results["whole"], right, what=f"{law} of an array of int")],
    )
    yield each_of([at_one, at_several], [fit])


def _amdahl(s: float, time: float, ps: list[int], noisy: bool) -> LawCase:
    """Return a case of Amdahl's law, with times from s and T(1); see :func:`_law_data`."""
    p = ps[-1]
    x = 1 / np.array(ps)
    serial = min(max(0.0, s), 1.0)
    share = s + (1 - s) * x
    if noisy:
        inverse = np.append(0, 1 / (1 - x[1:]))
        share += _unseen(SHARE_NOISE, np.ones_like(x), x, inverse)
    times = time * share
    slope, start = np.polyfit(x, times, 1)
    laws = {
        "You used Gustafson's law": p - serial * (p - 1),
        "The serial part s is missing in the denominator": p / max(1 - serial, 1e-9),
        "The parallel part is 1 − s, not 1": 1 / (serial + 1 / p),
        "You exchanged the serial and the parallel part": 1 / (1 - serial + serial / p),
        "You returned T(p) / T(1). The speedup is its inverse": serial + (1 - serial) / p,
    }
    fits = {
        "You returned the parallel fraction. Return the serial fraction, 1 minus this": 1 - serial,
        "You returned the serial time T(1) · s in seconds. Divide it by T(1)": start,
        "You returned the parallel time in seconds. Return the serial share": slope,
        "You fitted speedups as if they were times": _share(x, 1 / share),
        _beyond(s): s,
        "You left out T(1). Use all points": _line(x[1:], times[1:]),
    }
    fits |= _alone(share[1:] / share[0], x[1:], 1 - x[1:])
    right = 1 / (serial + (1 - serial) * x)
    return LawCase("amdahl", ps, serial, times, right, laws, fits)


def _gustafson(s: float, time: float, ps: list[int], noisy: bool) -> LawCase:
    """Return a case of Gustafson's law, with times from s and T(1); see :func:`_law_data`."""
    p = ps[-1]
    all_p = np.array(ps, float)
    serial = min(max(0.0, s), 1.0)
    more = all_p - 1
    missing = s * more  # speedup
    if noisy:
        missing += _unseen(SPEEDUP_NOISE, more)
    times = time * all_p / (all_p - missing)
    unscaled = more @ (all_p - time / times) / (more @ more)
    any_start = np.polyfit(more, missing, 1)[0]
    to_shortest = more @ (all_p - all_p * times.min() / times) / (more @ more)
    cut = float(np.clip(more @ np.maximum(missing, 0) / (more @ more), 0, 1))
    laws = {
        "You used Amdahl's law": 1 / (serial + (1 - serial) / p),
        "You subtracted s p times. Subtract it p − 1 times": p - serial * p,
        "You exchanged the serial and the parallel part": 1 + serial * (p - 1),
    }
    each = np.mean(missing[1:] / more[1:])
    small = "Here p ranks do p times the work, so their speedup is p · T(1) / T(p)"
    fits = {
        "You returned the parallel fraction. Return the serial fraction, 1 minus this": 1 - serial,
        _beyond(s): s,
        "You returned the mean of all points' fractions. Use least squares": each,
        "The line goes through the origin, so fit it without an intercept": any_start,
        "You compared with the shortest time. Compare with T(1), the first time": to_shortest,
        "You cut points with a speedup of more than p. Clip only the result": cut,
        small: _share(1 / all_p, times),
        f"{small}, in the fit": float(np.clip(unscaled, 0, 1)),
    }
    fits |= _alone(missing[1:], 0.0, more[1:])
    return LawCase("gustafson", ps, serial, times, all_p - serial * more, laws, fits)


def _law_data(seed: int) -> Iterator[tuple[float, float, list[int], bool]]:
    """Yield serial fraction, T(1), rank counts, and whether the times are noisy.

    The cases are ordinary, noisy, better than ideal, slower than one rank, and only two points.
    """
    chance = random.Random(seed)
    serials = chance.uniform(0.05, 0.2), chance.uniform(0.3, 0.45), -0.05, 1.03
    for k, serial in enumerate((*serials, chance.uniform(0.5, 0.8))):
        ps = [1, *sorted(chance.sample(range(2, 20), 4 if k < 4 else 1))]
        noisy = k == 1
        seconds = chance.uniform(2, 30) * 10.0 ** (-k)  # from seconds to parts of a millisecond
        yield round(serial, 3), seconds, NOISY if noisy else ps, noisy


def _beyond(s: float) -> str:
    """Return the message if an answer returns s itself, which may not be between 0 and 1."""
    return f"You returned a share {'below 0' if s < 0 else 'above 1'}. Use np.clip(s, 0, 1)"


def _unseen(noise: np.ndarray, *lines: np.ndarray) -> np.ndarray:
    """Return the noise without the component that would change a fit of these lines."""
    basis, _ = np.linalg.qr(np.stack(lines)[:, 1:].T)
    return np.append(0.0, noise[1:] - basis @ (basis.T @ noise[1:]))


def _share(x: np.ndarray, times: np.ndarray) -> float:
    """Return Amdahl's fraction by a straight line in x = 1/p, clipped."""
    return float(np.clip(_line(x, times), 0, 1))


def _line(x: np.ndarray, times: np.ndarray) -> float:
    """Return Amdahl's fraction by a straight line in x = 1/p, without clipping."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one point is too few
        slope, start = np.polyfit(x, times, 1)
    return start / (start + slope)


def _alone(values: np.ndarray, start: np.ndarray | float, width: np.ndarray) -> dict[str, float]:
    text = "You used only the {} point. Use all points"
    fractions = np.clip((values - start) / width, 0, 1)
    return {text.format("last"): fractions[-1], text.format("second"): fractions[0]}
