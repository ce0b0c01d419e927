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


class Stuck(Exception):
    """The run has a wait that never ended: on no network does it come to an end."""


def seconds(lanes: list[Lane], spans: Sequence[Span] | None = None) -> float | None:
    """Seconds that the run takes on an ideal network; None where it does not come to an end.

    spans: of each rank, from when to when (seconds) it is looked at; default: its whole cell. The
    result counts from the first rank's begin to the last one's end, as `measured` does.
    """
    told = [lane for lane in lanes if not lane.problem]
    if not told:
        return None
    try:
        moments = _Replay(told).run()
    except Stuck:
        return None
    cut = _cut(lanes, spans)
    ends = [moments[lane.rank](until) for lane, (_, until) in cut]
    return max(ends) - min(moments[lane.rank](since) for lane, (since, _) in cut)


def measured(lanes: list[Lane], spans: Sequence[Span] | None = None) -> float:
    """Seconds from the first rank's begin to the last one's end, as the run was."""
    cut = [span for _, span in _cut(lanes, spans)]
    return max((until for _, until in cut), default=0) - min((since for since, _ in cut), default=0)


def _cut(lanes: list[Lane], spans: Sequence[Span] | None) -> list[tuple[Lane, Span]]:
    """The ranks that have told something, and what of their cells lies in the spans."""
    spans = spans or [(-math.inf, math.inf)] * len(lanes)
    return [
        (lane, (max(since, lane.begin), max(lane.begin, min(until, lane.end))))
        for lane, (since, until) in zip(lanes, spans, strict=True)
        if not lane.problem
    ]


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

    def wait(self, time: float, until: float) -> None:
        """The wait that began at ``time`` lasts to ``until`` in the replay."""
        late = max(until - self(time), 0.0)
        self._waited.append((self._waited[-1] if self._waited else 0.0) + late)
        self._times.append(time)


class _Replay:
    """All ranks, each of which goes on until it waits for one that is not so far."""

    def __init__(self, lanes: list[Lane]):
        self.moments = {lane.rank: _Moments(lane) for lane in lanes}
        records = [record for lane in lanes for record in lane.records]
        self._needs = _needs(records)
        self._begun: dict[int, float] = {}  # when each record began in the replay, by identity
        self._events = {lane.rank: _events(lane) for lane in lanes}

    def run(self) -> dict[int, _Moments]:
        """Play all events; raises `Stuck`."""
        nexts = dict.fromkeys(self._events, 0)
        while any(nexts[rank] < len(events) for rank, events in self._events.items()):
            before = dict(nexts)
            for rank, events in self._events.items():
                while nexts[rank] < len(events) and self._play(rank, *events[nexts[rank]]):
                    nexts[rank] += 1
            if nexts == before:
                raise Stuck
        return self.moments

    def _play(self, rank: int, time: float, waits: bool, record: dict) -> bool:
        """One event of a rank; False where it has to wait for another one first."""
        here = self.moments[rank]
        if not waits:
            self._begun[id(record)] = here(time)
            return True
        needed = [self._begun.get(id(other)) for other in self._needs.get(id(record), [record])]
        if None in needed:
            return False
        here.wait(time, max(needed))
        return True


def _events(lane: Lane) -> list[tuple[float, bool, dict]]:
    """What a rank does, by time: (when, whether it is a wait or the begin of a call, record)."""
    found = [(record["start"], False, record) for record in lane.records]
    for record in lane.records:
        if record["waits"] and record["end"] is None:
            raise Stuck
        # A wait that was given up before the operation was over waits for nothing in the replay.
        found += [
            (begin, True, record)
            for begin, end in record["waits"]
            if end is not None and end >= record["end"] - _NOTED
        ]
    return sorted(found, key=lambda event: event[:2])


def _needs(records: list[dict]) -> dict[int, list[dict]]:
    """By identity of a record: what has to have begun before it can be over.

    A message or a call that is not among the records was made before the cell: it is there.
    """
    needs = {id(recv): [send, recv] for send, recv in collect.messages(records)}
    for met in collect.collectives(records):
        needs |= dict.fromkeys(map(id, met), met)
    return needs
