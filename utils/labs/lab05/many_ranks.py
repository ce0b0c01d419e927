"""What a recorded step would need on up to 4,096 ranks of three machines.

The step must communicate nothing while it computes, as a step by hand. Then its seconds are those
of computing, plus what it waits for slower ranks, plus those of its collectives.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from utils.forecast import Level, Machine, Run, flat, forecast, machine
from utils.forecast.collectives import price, rounds

RANKS = tuple(2**k for k in range(13))
SPINES = (1, 2, 4, 8, 16)
#: How many times as many weights the model has. Devices compute so many times as fast, too.
SIZES = (1, 10, 100, 1000)
LATENCY = "latencies"
NVLINK, TO_SPINE = "a device's NVLink", "a rack's link to the spine"
#: Each machine's usual oversubscription, and its links from the devices up.
LINKS = {
    "1 Gbit/s nodes": (1, ("a core's link in its node", "a node's link to the switch")),
    "cluster": (4, (NVLINK, "a node's link to its rack's switch", TO_SPINE)),
    "NVL72 racks": (1, (NVLINK, TO_SPINE)),
}


class Point(NamedTuple):
    """What the collectives of a step cost.

    Attributes:
        seconds: of all its collectives.
        reason: the link that takes the largest part of them, or `LATENCY` if latencies do.
        algorithm: of the collective that takes most of the time.
    """

    seconds: float
    reason: str
    algorithm: str


@dataclass(frozen=True)
class Survey:
    """A step on all machines; each list has one entry for each number in `RANKS`.

    Attributes:
        step: seconds without collectives.
        computing: seconds in which a rank computes.
        straggling: how much longer ranks wait for the slowest one if steps differ as recorded.
        errors: expected relative errors.
        points: the collectives, by machine, oversubscription and size.
    """

    step: list[float]
    computing: list[float]
    straggling: list[float]
    errors: list[float]
    points: dict[tuple[str, int, int], list[Point]]

    def efficiencies(self, name: str, size: int, spine: int = 0) -> list[float]:
        """Return the efficiencies of weak scaling, without stragglers."""
        points = self.points[name, spine or LINKS[name][0], size]
        rows = zip(self.step, points, strict=True)
        return [self.step[0] / (step + point.seconds) for step, point in rows]

    def bend(self, name: str, size: int) -> int | None:
        """Return the first number of ranks whose efficiency is below 1/2, or None."""
        rows = zip(RANKS, self.efficiencies(name, size), strict=True)
        return next((p for p, efficiency in rows if efficiency < 0.5), None)


def machines() -> dict[str, Machine]:
    """Return three machines of the catalog, each with room for the largest number of ranks.

    In an NVL72, eight of 72 devices are spare, so that a power of two fits. For other racks, each
    device has an adapter of 400 Gbit/s (NVIDIA DGX GB200 data sheet).
    """
    rack = replace(machine("nvl72").levels[0], units=64)
    spine = Level("spine", RANKS[-1] // 64, 10e-6, 64 * 50e9, lane=50e9)
    each = (
        machine("four-nodes").with_level("switch", units=RANKS[-1] // 2),
        machine("cluster").with_level("spine", units=RANKS[-1] // 32),
        replace(machine("nvl72"), levels=(rack, spine)),
    )
    return dict(zip(LINKS, each, strict=True))


def survey(run: Run) -> Survey:
    """Return what a recorded step would need on each machine, with each number of ranks."""
    ideal = flat(0.0, math.inf, RANKS[-1])
    calm = [forecast(run, ideal, p, jitter=0.0) for p in RANKS]
    noisy = [forecast(run, ideal, p) for p in RANKS]
    points = {
        (name, spine, size): [
            _point(name, one.with_level(oversubscription=spine), grown, p) for p in RANKS
        ]
        for size in SIZES
        for grown in [larger(run, size)]
        for name, one in machines().items()
        for spine in SPINES
    }
    return Survey(
        [told.seconds for told in calm],
        [told.computing for told in calm],
        [max(0.0, more.seconds - told.seconds) for told, more in zip(calm, noisy, strict=True)],
        [told.error for told in noisy],
        points,
    )


def larger(run: Run, size: int) -> Run:
    """Return the run of a model with so many times as many weights, in the same computing time."""
    return replace(run, calls=tuple(replace(one, nbytes=one.nbytes * size) for one in run.calls))


def _point(name: str, machine: Machine, run: Run, p: int) -> Point:
    if p == 1:
        return Point(0.0, "", "")
    ranks = np.arange(p)[None]
    parts: Counter[str] = Counter()
    costs = []
    # All ranks make the same calls, so their prices don't need a replay.
    for call, count in Counter(run.started(0)).items():
        cost = price(machine, call.op, ranks, call.nbytes)
        times = count / run.steps
        costs.append((cost.seconds * times, cost.algorithm))
        for one in rounds(machine, call.op, cost.algorithm, ranks):
            repeated, carried = times * one.times, one.cost.per_byte * one.share * call.nbytes
            parts[LATENCY] += repeated * one.cost.latency
            parts[LINKS[name][1][one.cost.level]] += repeated * carried
    if not parts:
        return Point(0.0, "", "")
    return Point(sum(row[0] for row in costs), max(parts, key=parts.__getitem__), max(costs)[1])
