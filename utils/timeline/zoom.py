"""Which part of a timeline a look at one training step shows.

A training loop repeats its communication: the step is found in the records, nobody marks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .collect import Lane, end_of

# Operations of one step, at most: comparing all of a long cell with itself would take minutes.
_LONGEST = 1000


@dataclass(frozen=True)
class Repeated:
    """Where a sequence of operations repeats: ``times`` × ``length`` records from ``first`` on."""

    first: int
    length: int
    times: int


def window(lanes: list[Lane], zoom: int | tuple[float, float] | None) -> tuple | None:
    """From when to when (seconds) to show; None without a zoom.

    zoom: two times in seconds, or the number k of a repetition, counted from 1; -1 is the last.
    Raises TypeError or ValueError, with what can be asked for.
    """
    if zoom is None:
        return None
    if isinstance(zoom, (tuple, list)) and len(zoom) == 2:
        return _checked(*map(float, zoom))
    if isinstance(zoom, bool) or not isinstance(zoom, int):
        raise TypeError(f"zoom is (since, until) in seconds, or the number of a step; not {zoom!r}")
    return _step(lanes, zoom)


def _checked(since: float, until: float) -> tuple[float, float]:
    if until <= since:
        raise ValueError(f"since={since:g} must be less than until={until:g} (seconds)")
    return since, until


def _step(lanes: list[Lane], k: int) -> tuple[float, float]:
    """From the end of one repetition to the end of the next, on all ranks that repeat alike."""
    found = [(lane, repeated(lane)) for lane in lanes if not lane.problem]
    found = [(lane, cycle) for lane, cycle in found if cycle is not None]
    if not found:
        raise ValueError(
            "no sequence of operations repeats in this cell, so there is no step to zoom to: "
            "give two times in seconds, zoom=(since, until)"
        )
    times = max(found, key=lambda one: one[1].length * one[1].times)[1].times
    if not 1 <= (k if k > 0 else times + 1 + k) <= times:
        raise ValueError(f"the ranks repeat their operations {times} times: zoom=1 to {times}")
    index = k - 1 if k > 0 else times + k
    spans = [_span(lane, cycle, index) for lane, cycle in found if cycle.times == times]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _span(lane: Lane, cycle: Repeated, index: int) -> tuple[float, float]:
    """Of one repetition on one rank, with the computing before it."""
    ended = _ends(lane)
    firsts = [cycle.first + k * cycle.length for k in range(cycle.times)]
    leads = [lane.records[first]["start"] - ended[first] for first in firsts]
    # Before the first one there may be imports, or data that are read.
    lead = max(0.0, min(leads[index], max(leads[1:])))
    return lane.records[firsts[index]]["start"] - lead, ended[firsts[index] + cycle.length]


def _ends(lane: Lane) -> list[float]:
    """When the first 0, 1, 2, … operations were over and no longer waited for."""
    times = (
        max(end_of(record, lane), *(end or lane.end for _, end in record["waits"]), lane.begin)
        for record in lane.records
    )
    return list(accumulate(times, max, initial=lane.begin))


def repeated(lane: Lane) -> Repeated | None:
    """The sequence that, repeated, covers most of the rank's operations; None: none does.

    Of several that cover as much it is the shortest. What comes once before it, such as the first
    step of DDP, which has a single bucket, and what comes after it do not count.
    """
    names: dict[tuple, int] = {}
    keys = np.array([names.setdefault(_key(r), len(names)) for r in lane.records], dtype=int)
    best, most = None, 0
    for length in range(1, min(len(keys) // 2, _LONGEST) + 1):
        first, count = _longest_run(keys[length:] == keys[:-length])
        times = count // length + 1
        if times > 1 and times * length > most:
            best, most = Repeated(first, length, times), times * length
    return best


def _key(record: dict) -> tuple:
    """What an operation has in common with that of another step."""
    return record["op"], record["nbytes"], tuple(record["group"]), record["peer"]


def _longest_run(same: np.ndarray) -> tuple[int, int]:
    """Where the longest stretch of True begins, and how long it is."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(int), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])
