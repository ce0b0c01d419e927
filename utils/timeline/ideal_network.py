"""The time that a run would have taken on an infinitely fast network.

The recorded run is replayed: each rank computes as long as it did, and communication takes no time.
Only the waiting that the program itself requires remains: a receiver waits until its message was
sent, and a rank in a collective waits until all ranks have called it. A sender never waits, because
an ideal network accepts every message at once. This is the dependency replay of performance tools
such as Dimemas (R. M. Badia et al., "DIMEMAS: Predicting MPI Applications Behavior in Grid
Environments", 2003), which calls it "ideal network".
"""

from __future__ import annotations

import bisect
from itertools import accumulate

from . import activity
from .activity import COMPUTING, Lane

# Seconds after a wait in which an operation's end may still be recorded.
_NOTED = 1e-3


class StuckError(Exception):
    """The run has a wait that never ended, so it would not end on any network."""


def seconds(lanes: list[Lane]) -> float | None:
    """Return the seconds of the run on an ideal network; None if the run would not end.

    They count from the first rank's begin to the last rank's end. Ranks that did not answer are
    left out.
    """
    answered = _answered(lanes)
    if not answered:
        return None
    try:
        moments = _Replay(answered).run()
    except StuckError:
        return None
    end = max(moments[lane.rank].at(lane.end) for lane in answered)
    return end - min(lane.begin for lane in answered)


def measured(lanes: list[Lane]) -> float:
    """Return the seconds of the recorded run, to compare `seconds` with."""
    answered = _answered(lanes)
    if not answered:
        return 0.0
    return max(lane.end for lane in answered) - min(lane.begin for lane in answered)


def _answered(lanes: list[Lane]) -> list[Lane]:
    return [lane for lane in lanes if not lane.problem]


class Computed:
    """How long a rank had computed at each time of the recorded run."""

    def __init__(self, lane: Lane):
        parts = [part for part in activity.states(lane) if part[2] == COMPUTING]
        self._begins = [begin for begin, *_ in parts]
        self._lengths = [end - begin for begin, end, _ in parts]
        self._before = [0.0, *accumulate(self._lengths)]

    def until(self, time: float) -> float:
        """Return the seconds that the rank had computed until this time."""
        k = bisect.bisect_right(self._begins, time) - 1
        if k < 0:
            return 0.0
        return self._before[k] + min(time - self._begins[k], self._lengths[k])


class _Moments:
    """The moments of a rank in the replay, by times of the recorded run.

    A moment is the rank's begin, plus the time it had computed, plus its waiting in the replay.
    """

    def __init__(self, lane: Lane):
        self.begin = lane.begin
        self.computed = Computed(lane).until
        self._times: list[float] = []
        self._ends: list[float] = []
        self._waited: list[float] = []

    def __call__(self, time: float) -> float:
        k = bisect.bisect_right(self._times, time)
        return self.begin + self.computed(time) + (self._waited[k - 1] if k else 0.0)

    def at(self, time: float) -> float:
        """Return the moment of a time that may be in the middle of a wait."""
        k = bisect.bisect_right(self._times, time)
        if not k or time >= self._ends[k - 1]:
            return self(time)
        before = self._waited[k - 2] if k > 1 else 0.0
        waited = min(self._waited[k - 1], before + time - self._times[k - 1])
        return self.begin + self.computed(time) + waited

    def wait(self, time: float, end: float, until: float) -> None:
        """Note that the wait from ``time`` to ``end`` lasts to ``until`` in the replay."""
        before = self._waited[-1] if self._waited else 0.0
        self._waited.append(before + max(until - self(time), 0.0))
        self._times.append(time)
        self._ends.append(end)


class _Replay:
    """A replay of all ranks; each rank runs until it waits for a rank that is not as far."""

    def __init__(self, lanes: list[Lane]):
        self.moments = {lane.rank: _Moments(lane) for lane in lanes}
        records = activity.all_records(lanes)
        self._needs = _needs(records)
        self._begun: dict[int, float] = {}  # when each record began in the replay, by identity
        self._events = {lane.rank: events(lane) for lane in lanes}

    def run(self) -> dict[int, _Moments]:
        """Play all events.

        Raises:
            StuckError: no rank can continue.
        """
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
        """Play one event of a rank; return False if another event must come first."""
        here = self.moments[rank]
        if not waits:
            self._begun[id(record)] = here(time)
            return True
        needed = [self._begun.get(id(other)) for other in self._needs.get(id(record), [record])]
        if None in needed:
            return False
        here.wait(time, end, max(needed))
        return True


def events(lane: Lane) -> list[tuple[float, bool, float, dict]]:
    """Return a rank's events by time: (when, whether it is a wait or a call's begin, end, record).

    If a call begins while the rank is blocked, another of its threads begins it, without waiting.
    """
    made = []
    blocked = _blocked(lane)
    for record in lane.records:
        start = record["start"]
        k = bisect.bisect_left(blocked, (start,)) - 1
        inside = k >= 0 and start < blocked[k][1]
        made.append((blocked[k][0] if inside else start, False, start, record))
    for record in lane.records:
        if record["waits"] and record["end"] is None:
            raise StuckError
        # A wait that was given up before the operation ended does not wait in the replay.
        made += [
            (begin, True, end, record)
            for begin, end in record["waits"]
            if end is not None and end >= record["end"] - _NOTED
        ]
    return sorted(made, key=lambda event: event[:2])


def _blocked(lane: Lane) -> list[tuple[float, float]]:
    """Return when the rank was blocked; overlapping waits are merged, touching waits are not."""
    spans: list[tuple[float, float]] = []
    waits = (wait for record in lane.records for wait in record["waits"] if wait[1] is not None)
    for begin, end in sorted(map(tuple, waits)):
        if spans and begin < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _needs(records: list[dict]) -> dict[int, list[dict]]:
    """Return for each record, by identity, the records that must have begun before it can end.

    A partner that is not among the records was called before the cell, so it needs no wait.
    """
    needs = {id(recv): [send, recv] for send, recv in activity.messages(records)}
    for met in activity.collectives(records):
        needs |= dict.fromkeys(map(id, met), met)
    return needs
