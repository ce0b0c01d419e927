"""The clock of the played machine, which replays what the ranks did with the times of the rules.

An entry really trains on four processes, as fast as this machine happens to be. The harness records
in order what each rank does: images computed, messages sent and received. Then every rank gets a
clock that begins at 0, and only the rules advance it. So the same work takes the same seconds, even
on a busy machine. Trace-driven simulators such as LogGOPSim (T. Hoefler, T. Schneider,
A. Lumsdaine, HPDC 2010) do the same. The times are Hockney's (1994).

Events are lists, because JSON has lists:

=================================  ================================================================
``["work", samples, weights]``     a gradient of so many images, at weights with this fingerprint
``["send", size, other, bytes]``   a message to a rank; `size` is the number of ranks at this time
``["recv", size, other, bytes]``   a message was received
``["shrunk"]``                     the surviving ranks have noticed the death, and regrouped
``["died"]``                       the last event of the rank that was killed
``["show", file]``                 weights were submitted
=================================  ================================================================

Ranks keep their first numbers here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mpi.network import Network

from .rules import Rules, is_slow

Events = Sequence[Sequence]


def replay(traces: Mapping[int, Events], rules: Rules, clock: Clock | None = None) -> Clock:
    """Return the clocks of ranks with these events, which the module describes.

    A message leaves when its sender reaches the send, costs the sender ``bytes / bandwidth``, and
    arrives after the latency. Messages that arrive at the same time on a rank's link come in one
    after the other. Communication in the background counts as if the rank waited for it.

    The rank with the earliest clock goes on, so messages reach links that ranks share in order.

    Args:
        clock: of another machine, at the beginning; by default, of the machine of the rules.
    """
    clock = clock or Clock(traces, rules)
    while behind := [rank for rank in traces if clock.left(rank)]:
        earliest = sorted(behind, key=lambda rank: (clock.end[rank], rank))
        if not any(map(clock.advance, earliest)) and not clock.regroup():
            # A rank that was killed from outside sent this message without recording it.
            clock.skip(min(behind, key=clock.end.__getitem__))
    clock.shown.sort(key=lambda shown: shown[:2])  # stable: keeps each rank's order
    return clock


@dataclass
class Clock:
    """The clocks of all ranks, which advance from event to event.

    Attributes:
        traces, rules: the events of each rank, and how long events take.
        end: seconds of each rank, by its first number.
        shown: (seconds, rank, file) of all submitted weights, in order of time.
        died: when a rank died; None if no rank died.
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
        """Return for how many images all ranks together had computed gradients by then."""
        return sum(images for end, images in self.worked if end <= seconds)

    def left(self, rank: int) -> bool:
        """Return whether a rank has events that weren't replayed yet."""
        return self._next[rank] < len(self.traces[rank])

    def advance(self, rank: int) -> bool:
        """Replay a rank's next event; return False if it has to wait for another rank."""
        if not self._step(rank, *self.traces[rank][self._next[rank]]):
            return False
        self.skip(rank)
        return True

    def regroup(self) -> bool:
        """Let all ranks that regroup continue together, if all of them have come this far."""
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
        """Advance to the next event of a rank."""
        self._next[rank] += 1

    def _step(self, rank: int, kind: str, *about: Any) -> bool:
        """Replay one event; return False if it can't happen yet."""
        if kind == "work":
            self.end[rank] += self._computing(about[0])
            self.worked.append((self.end[rank], about[0]))
        elif kind == "send":
            size, other, nbytes = about
            self.end[rank], arrival = self._send(rank, other, nbytes)
            self._on_the_way[size, rank, other].append(arrival)
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
        self.end[rank] = max(self.end[rank], self._arrival(rank, other, nbytes, arrivals.popleft()))
        return True

    def _computing(self, images: int) -> float:
        """Return the seconds of a gradient of so many images."""
        return images * self.rules.per_sample

    def _send(self, rank: int, other: int, nbytes: int) -> tuple[float, float]:
        """Return when a message that starts now has left its rank, and when it arrives."""
        network = self._network(rank, other)
        left = self.end[rank] + nbytes / network.bandwidth
        return left, left + network.latency

    def _arrival(self, rank: int, other: int, nbytes: int, arrival: float) -> float:
        """Return when a message is there, behind earlier ones on the receiver's link."""
        link = (rank, is_slow(rank, other))
        span = nbytes / self._network(rank, other).bandwidth
        self._link_free[link] = max(arrival, self._link_free[link] + span)
        return self._link_free[link]

    def _network(self, one: int, other: int) -> Network:
        return self.rules.between if is_slow(one, other) else self.rules.inside


# --- counts ------------------------------------------------------------------------------------


def traffic(traces: Mapping[int, Events]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (messages, bytes) for each pair (from, to) of ranks, by their first numbers."""
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, events in traces.items():
        for kind, *about in events:
            if kind == "send":
                _, other, nbytes = about
                messages, sent = counts.get((rank, other), (0, 0))
                counts[rank, other] = (messages + 1, sent + nbytes)
    return counts


def lost(traces: Mapping[int, Events]) -> int:
    """Return for how many images the gradients are lost, because no surviving weights use them.

    If a survivor computes its next gradient at weights that it had before, it went back, and
    everything that it computed since then is lost. The rank that died loses what it computed since
    it had those weights. If it never had them, it loses what it computed since its last message.
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
    """Return the fingerprint of the first weights with which a rank computes after the death."""
    kinds = [event[0] for event in events]
    start = kinds.index("shrunk") if "shrunk" in kinds else len(kinds)
    return next((event[2] for event in events[start:] if event[0] == "work"), None)


def _last_with(weights: str | None, events: Events, default: int) -> int:
    """Return the index where a rank last computed with these weights, or else the default."""
    marks = [k for k, (kind, *about) in enumerate(events) if kind == "work" and about[1] == weights]
    return max(marks, default=default)


def _images(events: Events) -> int:
    """Return for how many images gradients were computed."""
    return sum(event[1] for event in events if event[0] == "work")
