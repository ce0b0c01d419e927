"""The clock of the played machine: what the ranks did, gone through again with the rules' times.

An entry really trains on four processes, as fast as this machine happens to be. What each rank did,
in its order, is noted: images computed, messages sent and received. Afterwards every rank gets a
clock that begins at 0 and is moved on by the rules only. So the same work gives the same seconds on
a machine that is busy with something else. The idea is that of trace-driven simulators such as
LogGOPSim (T. Hoefler, T. Schneider, A. Lumsdaine, HPDC 2010); the times are Hockney's (1994).

Events are lists, as JSON has them:

=================================  ================================================================
``["work", samples, weights]``     a gradient of so many images, at weights with this fingerprint
``["send", size, other, bytes]``   a message to a rank; `size` is how many ranks there are by then
``["recv", size, other, bytes]``   a message was taken in
``["shrunk"]``                     the ranks that live have noticed the death, and regrouped
``["died"]``                       the last event of the rank that was killed
``["show", file]``                 weights were handed in
=================================  ================================================================

Ranks have their first numbers throughout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .rules import Rules, is_slow

Events = Sequence[Sequence]


@dataclass
class Clock:
    """What the clocks say.

    Attributes:
        end: seconds of each rank, by its first number.
        shown: (seconds, rank, file) of all weights that were handed in, by time.
        died: when a rank died; None where none did.
        worked: (seconds at its end, images) of each gradient.
        computing: seconds of each rank in which it computed.
    """

    end: dict[int, float]
    shown: list[tuple[float, int, str]]
    died: float | None
    computing: dict[int, float]
    worked: list[tuple[float, int]]

    def images_until(self, seconds: float) -> int:
        """Return how many images all ranks together had computed gradients of by then."""
        return sum(images for end, images in self.worked if end <= seconds)


def replay(traces: Mapping[int, Events], rules: Rules) -> Clock:
    """Return the clocks of ranks that did this; see the module for events.

    A message leaves when its sender is there, takes the link ``bytes / bandwidth`` of the sender's
    time, and arrives after the latency; what comes in at the same time on a rank's link comes in
    one after the other. Communication in the background counts as if it were waited for.
    """
    play = _Play(traces, rules)
    while any(play.left(rank) for rank in traces):
        moved = [rank for rank in traces if play.advance(rank)]
        if not moved and not play.regroup():
            # Received, but its sending was not noted: a rank that was killed from outside.
            play.skip(min((r for r in traces if play.left(r)), key=lambda r: play.clock[r]))
    return Clock(play.clock, sorted(play.shown), play.died, play.computing, play.worked)


@dataclass
class _Play:
    traces: Mapping[int, Events]
    rules: Rules
    died: float | None = None
    shown: list[tuple[float, int, str]] = field(default_factory=list)
    worked: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self):
        self.clock = dict.fromkeys(self.traces, 0.0)
        self.computing = dict.fromkeys(self.traces, 0.0)
        self._next = dict.fromkeys(self.traces, 0)
        self._on_the_way: dict = defaultdict(list)  # (ranks, from, to): arrivals, oldest first
        self._taken: dict = defaultdict(int)
        self._link_free: dict = defaultdict(float)

    def left(self, rank: int) -> bool:
        return self._next[rank] < len(self.traces[rank])

    def advance(self, rank: int) -> bool:
        """Let a rank go on until it has to wait for another; whether it moved."""
        before = self._next[rank]
        while self.left(rank) and self._step(rank, *self.traces[rank][self._next[rank]]):
            self._next[rank] += 1
        return self._next[rank] > before

    def regroup(self) -> bool:
        """Let all ranks that regroup go on together."""
        here = [r for r in self.traces if any(e[0] == "shrunk" for e in self._rest(r))]
        if not here or any(self._rest(rank)[0][0] != "shrunk" for rank in here):
            return False
        begin = max(self.died or 0.0, *(self.clock[rank] for rank in here))
        for rank in here:
            self.clock[rank] = begin + self.rules.notice
            self._next[rank] += 1
        return True

    def skip(self, rank: int) -> None:
        self._next[rank] += 1

    def _rest(self, rank: int) -> Events:
        return self.traces[rank][self._next[rank] :]

    def _step(self, rank: int, kind: str, *about) -> bool:
        """Play one event; return False if it cannot happen yet."""
        if kind == "work":
            seconds = about[0] * self.rules.per_sample
            self.clock[rank] += seconds
            self.computing[rank] += seconds
            self.worked.append((self.clock[rank], about[0]))
        elif kind == "send":
            size, other, nbytes = about
            network = self._network(rank, other)
            self.clock[rank] += nbytes / network.bandwidth
            self._on_the_way[size, rank, other].append(self.clock[rank] + network.latency)
        elif kind == "recv":
            return self._receive(rank, *about)
        elif kind == "show":
            self.shown.append((self.clock[rank], rank, about[0]))
        elif kind == "died":
            self.died = self.clock[rank]
        return kind != "shrunk"

    def _receive(self, rank: int, size: int, other: int, nbytes: int) -> bool:
        key = (size, other, rank)
        if self._taken[key] == len(self._on_the_way[key]):
            return False
        arrives = self._on_the_way[key][self._taken[key]]
        self._taken[key] += 1
        link = (rank, is_slow(rank, other))
        span = nbytes / self._network(rank, other).bandwidth
        arrives = self._link_free[link] = max(arrives, self._link_free[link] + span)
        self.clock[rank] = max(self.clock[rank], arrives)
        return True

    def _network(self, one: int, other: int):
        return self.rules.between if is_slow(one, other) else self.rules.inside


# --- counts ------------------------------------------------------------------------------------


def traffic(traces: Mapping[int, Events]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (messages, bytes) of each pair (from, to) of ranks, by their first numbers."""
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, events in traces.items():
        for kind, *about in events:
            if kind == "send":
                _, other, nbytes = about
                messages, sent = counts.get((rank, other), (0, 0))
                counts[rank, other] = (messages + 1, sent + nbytes)
    return counts


def lost(traces: Mapping[int, Events]) -> int:
    """Return how many images' gradients are in no weights that survive the death.

    A rank that survives, and computes its next gradient at weights that it had before, has gone
    back, and all that it computed since is lost. The rank that died has lost what it computed since
    it had those weights. If it never had them, it lost what it computed since its last message.
    """
    after = {rank: _first_after(events) for rank, events in traces.items()}
    common = next((weights for weights in after.values() if weights is not None), None)
    total = 0
    for events in traces.values():
        kinds = [event[0] for event in events]
        if "shrunk" in kinds:
            total += _since(events[: kinds.index("shrunk")], common, otherwise_all=False)
        elif "died" in kinds:
            total += _since(events, common, otherwise_all=True)
    return total


def _first_after(events: Events) -> str | None:
    """Return the fingerprint of the first weights that a rank computes with after the death."""
    kinds = [event[0] for event in events]
    start = kinds.index("shrunk") if "shrunk" in kinds else len(kinds)
    return next((event[2] for event in events[start:] if event[0] == "work"), None)


def _since(events: Events, weights: str | None, *, otherwise_all: bool) -> int:
    """Return the images computed since a rank last had these weights."""
    marks = [k for k, event in enumerate(events) if event[0] == "work" and event[2] == weights]
    if not marks and otherwise_all:
        marks = [k + 1 for k, event in enumerate(events) if event[0] in {"send", "recv"}] or [0]
    return sum(e[1] for e in events[marks[-1] :] if e[0] == "work") if marks else 0
