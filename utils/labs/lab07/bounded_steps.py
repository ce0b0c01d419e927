"""Plans on paper how workers compute and wait if none may be ahead of the slowest by over a bound.

The rule is stale synchronous parallel (SSP) on a parameter server. Messages take no time here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Bar(NamedTuple):
    """A time span in which a worker computes a gradient or waits at the bound."""

    worker: int
    begin: float
    end: float
    waits: bool


@dataclass(frozen=True)
class BoundedRun:
    """What the workers did.

    Attributes:
        bars: when each worker computes and waits; bars are cut at the end of the run.
        staleness: the staleness of each gradient, in the order of the updates: how many updates
            the server applied after it had sent the weights and before this gradient's update.
        lead: the largest number of clocks by which a worker was ahead of the slowest.
    """

    bars: tuple[Bar, ...]
    staleness: tuple[int, ...]
    lead: int


def bounded_run(steps: Sequence[float], bound: float, until: float) -> BoundedRun:
    """Return what the workers do up to a time.

    Args:
        steps: how long a gradient takes on each worker.
        bound: the largest lead, or ``math.inf`` for no bound.
        until: the time at which the run ends.
    """
    clock = [0] * len(steps)
    since: dict[int, float] = dict.fromkeys(range(len(steps)), 0)  # waiting workers, since when
    sent_at = [0] * len(steps)
    ends: list[tuple[float, int]] = []
    bars: list[Bar] = []
    staleness: list[int] = []
    lead = 0
    now: float = 0
    while now <= until:
        slowest = min(clock)
        for k in sorted(k for k in since if clock[k] - slowest <= bound):
            bars.append(Bar(k, since.pop(k), now, waits=True))
            bars.append(Bar(k, now, min(now + steps[k], until), waits=False))
            heapq.heappush(ends, (now + steps[k], k))
            sent_at[k] = len(staleness)
            lead = max(lead, clock[k] - slowest)
        now, k = heapq.heappop(ends)
        if now <= until:
            staleness.append(len(staleness) - sent_at[k])
            clock[k] += 1
            since[k] = now
    bars += [Bar(k, begin, until, waits=True) for k, begin in since.items()]
    there = tuple(bar for bar in bars if bar.end > bar.begin)
    return BoundedRun(there, tuple(staleness), lead)
