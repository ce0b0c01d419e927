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

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_mpi.network import Network

from .rules import Rules, is_slow

Events = Sequence[Sequence]


def replay(traces: Mapping[int, Events], rules: Rules) -> Clock:
    """Return the clocks of ranks that did this; see the module for events.

    A message leaves when its sender is there, takes the link ``bytes / bandwidth`` of the sender's
    time, and arrives after the latency; what comes in at the same time on a rank's link comes in
    one after the other. Communication in the background counts as if it were waited for.
    """
    clock = Clock(traces, rules)
    while behind := [rank for rank in traces if clock.left(rank)]:
        moved = [rank for rank in traces if clock.advance(rank)]
        if not moved and not clock.regroup():
            # Received, but its sending was not noted: a rank that was killed from outside.
            clock.skip(min(behind, key=clock.end.__getitem__))
    clock.shown.sort(key=lambda shown: shown[:2])  # a rank's own stay in their order
    return clock


@dataclass
class Clock:
    """The clocks of all ranks, and what they say when all events are played.

    Attributes:
        traces, rules: the events of each rank, and the times that they take.
        end: seconds of each rank, by its first number.
        shown: (seconds, rank, file) of all weights that were handed in, by time.
        died: when a rank died; None where none did.
        worked: (seconds at its end, images) of each gradient.
    """

    traces: Mapping[int, Events]
    rules: Rules
    died: float | None = None
    shown: list[tuple[float, int, str]] = field(default_factory=list)
    worked: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self):
        self.end = dict.fromkeys(self.traces, 0.0)
        self._next = dict.fromkeys(self.traces, 0)
        self._on_the_way: dict = defaultdict(deque)  # (ranks, from, to): arrivals, oldest first
        self._link_free: dict = defaultdict(float)

    def images_until(self, seconds: float) -> int:
        """Return how many images all ranks together had computed gradients of by then."""
        return sum(images for end, images in self.worked if end <= seconds)

    def left(self, rank: int) -> bool:
        """Return whether a rank has events that are still to be played."""
        return self._next[rank] < len(self.traces[rank])

    def advance(self, rank: int) -> bool:
        """Let a rank go on until it has to wait for another; return whether it moved."""
        before = self._next[rank]
        while self.left(rank) and self._step(rank, *self.traces[rank][self._next[rank]]):
            self.skip(rank)
        return self._next[rank] > before

    def regroup(self) -> bool:
        """Let all ranks that regroup go on together."""
        rests = {rank: events[self._next[rank] :] for rank, events in self.traces.items()}
        here = [rank for rank, rest in rests.items() if ["shrunk"] in rest]
        if not here or any(rests[rank][0] != ["shrunk"] for rank in here):
            return False
        begin = max(self.died or 0.0, *(self.end[rank] for rank in here))
        for rank in here:
            self.end[rank] = begin + self.rules.notice
            self.skip(rank)
        return True

    def skip(self, rank: int) -> None:
        """Go on to the next event of a rank."""
        self._next[rank] += 1

    def _step(self, rank: int, kind: str, *about) -> bool:
        """Play one event; return False if it cannot happen yet."""
        if kind == "work":
            self.end[rank] += about[0] * self.rules.per_sample
            self.worked.append((self.end[rank], about[0]))
        elif kind == "send":
            size, other, nbytes = about
            network = self._network(rank, other)
            self.end[rank] += nbytes / network.bandwidth
            self._on_the_way[size, rank, other].append(self.end[rank] + network.latency)
        elif kind == "recv":
            return self._receive(rank, *about)
        elif kind == "show":
            self.shown.append((self.end[rank], rank, about[0]))
        elif kind == "died":
            self.died = self.end[rank]
        return kind != "shrunk"

    def _receive(self, rank: int, size: int, other: int, nbytes: int) -> bool:
        arrivals = self._on_the_way[size, other, rank]
        if not arrivals:
            return False
        link = (rank, is_slow(rank, other))
        span = nbytes / self._network(rank, other).bandwidth
        self._link_free[link] = max(arrivals.popleft(), self._link_free[link] + span)
        self.end[rank] = max(self.end[rank], self._link_free[link])
        return True

    def _network(self, one: int, other: int) -> Network:
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
    after = map(_first_after, traces.values())
    common = next((weights for weights in after if weights is not None), None)
    total = 0
    for events in traces.values():
        kinds = [event[0] for event in events]
        if "shrunk" in kinds:
            before = events[: kinds.index("shrunk")]
            total += _images(before[_last_with(common, before, len(before)) :])
        elif "died" in kinds:
            told = [k + 1 for k, kind in enumerate(kinds) if kind in {"send", "recv"}]
            total += _images(events[_last_with(common, events, max(told, default=0)) :])
    return total


def _first_after(events: Events) -> str | None:
    """Return the fingerprint of the first weights that a rank computes with after the death."""
    kinds = [event[0] for event in events]
    start = kinds.index("shrunk") if "shrunk" in kinds else len(kinds)
    return next((event[2] for event in events[start:] if event[0] == "work"), None)


def _last_with(weights: str | None, events: Events, default: int) -> int:
    """Return where a rank last computed with these weights; if it never did, the default."""
    marks = [k for k, (kind, *about) in enumerate(events) if kind == "work" and about[1] == weights]
    return max(marks, default=default)


def _images(events: Events) -> int:
    """Return of how many images gradients were computed."""
    return sum(event[1] for event in events if event[0] == "work")
