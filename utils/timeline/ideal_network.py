"""How long a run would have taken on a network that is infinitely fast.

The recorded run is played again: each rank computes as long as it did, and communication takes no
time. What is left of waiting is what the program itself demands: a receiver waits until its message
was sent, and who takes part in a collective until all have called it. A sender waits for nobody, as
an ideal network takes what is sent. This is the dependency replay of performance tools such as
Dimemas (R. M. Badia et al., "DIMEMAS: Predicting MPI Applications Behavior in Grid Environments",
2003), whose "ideal network" this is.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import accumulate

from . import collect
from .collect import COMPUTING, Lane

Span = tuple[float, float]
# Seconds after a wait at which an operation's end may be noted.
_NOTED = 1e-3


class StuckError(Exception):
    """The run has a wait that never ended: on no network does it come to an end."""


def seconds(lanes: list[Lane], spans: Sequence[Span] | None = None) -> float | None:
    """Return the seconds of the run on an ideal network; None if it does not come to an end.

    Args:
        lanes: of each rank.
        spans: of each rank, from when to when (seconds) it is looked at; default: its whole cell.
            Of whole cells the result counts from the first rank's begin to the last one's end. Of
            a part it is the longest of the ranks' own parts: on an ideal network the others run
            ahead by then, and if a rank would have waited longer, no more than the part as it was.
    """
    told = [lane for lane in lanes if not lane.problem]
    if not told:
        return None
    try:
        moments = _Replay(told).run()
    except StuckError:
        return None
    cut = _cut(lanes, spans)
    begins = [moments[lane.rank].at(since) for lane, (since, _) in cut]
    ends = [moments[lane.rank].at(until) for lane, (_, until) in cut]
    if _is_whole(cut):
        return max(ends) - min(begins)
    took = (end - begin for begin, end in zip(begins, ends, strict=True))
    return max(map(min, took, (until - since for _, (since, until) in cut)))


def measured(lanes: list[Lane], spans: Sequence[Span] | None = None) -> float:
    """Return the seconds of the run as it was, which `seconds` is compared with."""
    cut = _cut(lanes, spans)
    if not cut:
        return 0.0
    if _is_whole(cut):
        return max(until for _, (_, until) in cut) - min(since for _, (since, _) in cut)
    return max(until - since for _, (since, until) in cut)


def _cut(lanes: list[Lane], spans: Sequence[Span] | None) -> list[tuple[Lane, Span]]:
    """The ranks that have told something, and what of their cells lies in the spans."""
    spans = spans or [(-math.inf, math.inf)] * len(lanes)
    return [
        (lane, tuple(max(lane.begin, min(time, lane.end)) for time in span))
        for lane, span in zip(lanes, spans, strict=True)
        if not lane.problem
    ]


def _is_whole(cut: list[tuple[Lane, Span]]) -> bool:
    return all(span == (lane.begin, lane.end) for lane, span in cut)


class _Moments:
    """When a rank would have been where it was at a time of the recorded run.

    That is its begin, what it had computed, and what it had waited in the replay.
    """

    def __init__(self, lane: Lane):
        self.begin = lane.begin
        parts = [part for part in collect.states(lane) if part[2] == COMPUTING]
        self._begins = [begin for begin, *_ in parts]
        self._lengths = [end - begin for begin, end, _ in parts]
        self._before = [0.0, *accumulate(self._lengths)]
        self._times: list[float] = []
        self._ends: list[float] = []
        self._waited: list[float] = []

    def computed(self, time: float) -> float:
        """Seconds in which the rank had computed."""
        k = bisect.bisect_right(self._begins, time) - 1
        if k < 0:
            return 0.0
        return self._before[k] + min(time - self._begins[k], self._lengths[k])

    def __call__(self, time: float) -> float:
        k = bisect.bisect_right(self._times, time)
        return self.begin + self.computed(time) + (self._waited[k - 1] if k else 0.0)

    def at(self, time: float) -> float:
        """The same where the time may lie within a wait, of which no more was over by then."""
        k = bisect.bisect_right(self._times, time)
        if not k or time >= self._ends[k - 1]:
            return self(time)
        before = self._waited[k - 2] if k > 1 else 0.0
        waited = min(self._waited[k - 1], before + time - self._times[k - 1])
        return self.begin + self.computed(time) + waited

    def wait(self, time: float, end: float, until: float) -> None:
        """The wait from ``time`` to ``end`` lasts to ``until`` in the replay."""
        late = max(until - self(time), 0.0)
        self._waited.append((self._waited[-1] if self._waited else 0.0) + late)
        self._times.append(time)
        self._ends.append(end)


class _Replay:
    """All ranks, each of which goes on until it waits for one that is not so far."""

    def __init__(self, lanes: list[Lane]):
        self.moments = {lane.rank: _Moments(lane) for lane in lanes}
        records = [record for lane in lanes for record in lane.records]
        self._needs = _needs(records)
        self._begun: dict[int, float] = {}  # when each record began in the replay, by identity
        self._events = {lane.rank: _events(lane) for lane in lanes}

    def run(self) -> dict[int, _Moments]:
        """Play all events; raises `StuckError`."""
        nexts = dict.fromkeys(self._events, 0)
        while any(nexts[rank] < len(events) for rank, events in self._events.items()):
            before = dict(nexts)
            for rank, events in self._events.items():
                while nexts[rank] < len(events) and self._play(rank, *events[nexts[rank]]):
                    nexts[rank] += 1
            if nexts == before:
                raise StuckError
        return self.moments

    def _play(self, rank: int, time: float, waits: bool, end: float, record: dict) -> bool:
        """One event of a rank; False where it has to wait for another one first."""
        here = self.moments[rank]
        if not waits:
            self._begun[id(record)] = here(time)
            return True
        needed = [self._begun.get(id(other)) for other in self._needs.get(id(record), [record])]
        if None in needed:
            return False
        here.wait(time, end, max(needed))
        return True


def _events(lane: Lane) -> list[tuple[float, bool, float, dict]]:
    """What a rank does, by time: (when, whether it is a wait or the begin of a call, end, record).

    What begins while the rank is blocked is begun by another of its threads, which does not wait.
    """
    found = []
    blocked = _blocked(lane)
    for record in lane.records:
        start = record["start"]
        k = bisect.bisect_left(blocked, (start,)) - 1
        inside = k >= 0 and start < blocked[k][1]
        found.append((blocked[k][0] if inside else start, False, start, record))
    for record in lane.records:
        if record["waits"] and record["end"] is None:
            raise StuckError
        # A wait that was given up before the operation was over waits for nothing in the replay.
        found += [
            (begin, True, end, record)
            for begin, end in record["waits"]
            if end is not None and end >= record["end"] - _NOTED
        ]
    return sorted(found, key=lambda event: event[:2])


def _blocked(lane: Lane) -> list[tuple[float, float]]:
    """When the rank was blocked, in order; waits that overlap are one, those that touch are not."""
    spans: list[tuple[float, float]] = []
    waits = (wait for record in lane.records for wait in record["waits"] if wait[1] is not None)
    for begin, end in sorted(map(tuple, waits)):
        if spans and begin < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _needs(records: list[dict]) -> dict[int, list[dict]]:
    """By identity of a record: what has to have begun before it can be over.

    A message or a call that is not among the records was made before the cell: it is there.
    """
    needs = {id(recv): [send, recv] for send, recv in collect.messages(records)}
    for met in collect.collectives(records):
        needs |= dict.fromkeys(map(id, met), met)
    return needs
