"""Emulate a slow network: each message takes at least ``latency + bytes / bandwidth``.

The model is Hockney's (1994) for one link per rank in each direction: a rank's messages leave one
after the other, and arrive one after the other. Ranks may be grouped into nodes, with a different
network inside each node. Then each rank has a link out and a link in for both networks.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# If a wait ends late, Python accounts for at most this much of the delay.
MOST_LATE = 1e-3  # seconds
# PyTorch's Python code takes this long around a call, until :meth:`Link.calibrate` measures it.
AROUND = 5e-6  # seconds
# A longer time isn't due to PyTorch's code, but to a machine that is busy with something else.
MOST_AROUND = 50e-6  # seconds

# A link remembers this many messages, so that a message noticed late still gets its place.
REMEMBERED = 1000


@dataclass(frozen=True)
class Network:
    """An emulated network between the ranks.

    Attributes:
        latency: seconds, one way.
        bandwidth: bytes per second, for each direction of each rank.
        nodes: global ranks of each node; empty if one network joins all ranks.
        inside: the network within a node; ``None`` is the machine's own.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    nodes: tuple[tuple[int, ...], ...] = ()
    inside: Network | None = None

    @classmethod
    def from_dict(cls, fields: dict | None) -> Network | None:
        """Return the network whose fields :meth:`to_dict` has returned."""
        if fields is None:
            return None
        nodes = tuple(tuple(node) for node in fields["nodes"])
        return cls(fields["latency"], fields["bandwidth"], nodes, cls.from_dict(fields["inside"]))

    def to_dict(self) -> dict:
        """Return the network's fields as a dict for JSON."""
        return asdict(self)

    def between(self, rank: int, other: int) -> Network | None:
        """Return the network of messages between two ranks; ``None`` is the machine's own."""
        together = any(rank in node and other in node for node in self.nodes)
        return self.inside if together else self

    def __str__(self) -> str:
        bits = self.bandwidth * 8
        rate = f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
        rate = "any bandwidth" if math.isinf(bits) else rate
        ms = self.latency * 1e3
        text = f"{rate}, {ms:g} ms" if ms >= 1 else f"{rate}, {self.latency * 1e6:g} µs"
        if not self.nodes:
            return text
        nodes = ", ".join(str(list(node)) for node in self.nodes)
        inside = self.inside or "this machine's own network"
        return f"{text} between the nodes {nodes}; inside each node {inside}"


class Arrival:
    """The arrival of a message: a point in time, which an earlier message may still delay.

    Attributes:
        begin: when its first byte arrives on a free link, by ``time.perf_counter``.
        span: seconds for which it occupies the link.
    """

    __slots__ = ("begin", "end", "span")

    def __init__(self, begin: float, span: float):
        self.begin = begin
        self.span = span
        self.end = begin + span

    def due(self) -> float:
        """Return when the message is complete, as far as this rank knows now."""
        return self.end


class Wire:
    """This rank's connection to one network: a link out, and a link in."""

    def __init__(self, network: Network, shared_clock: bool):
        self.network = network
        self._shared_clock = shared_clock
        self._out_free = 0.0
        self._in_free = -math.inf
        self._arrivals: list[Arrival] = []
        self._lock = threading.Lock()

    def sends(self, nbytes: int, at: float) -> tuple[float, float]:
        """Return when the last byte of a message begun at ``at`` leaves, and when it arrives.

        The receiver gets the second value. Without a shared clock, it is relative to the present.
        """
        with self._lock:
            gone = max(at, self._out_free) + nbytes / self.network.bandwidth
            self._out_free = gone
        arrives = gone + self.network.latency
        return gone, arrives if self._shared_clock else arrives - time.perf_counter()

    def receives(self, nbytes: int, told: float) -> Arrival:
        """Return the arrival of a message, from the value ``told`` that its sender sent along."""
        arrives = told if self._shared_clock else told + time.perf_counter()
        span = nbytes / self.network.bandwidth
        with self._lock:
            return self._noticed(arrives - span, span)

    def _noticed(self, begin: float, span: float) -> Arrival:
        """Put a message into the queue of arrivals, which come one after the other.

        The rank may notice messages in a different order than they begin to arrive. So this message
        may delay messages that the rank has noticed already.
        """
        known = self._arrivals
        new = Arrival(begin, span)
        place = bisect.bisect_right(known, begin, key=operator.attrgetter("begin"))
        known.insert(place, new)
        free = known[place - 1].end if place else self._in_free
        for arrival in itertools.islice(known, place, None):
            end = max(free, arrival.begin) + arrival.span
            if end == arrival.end and arrival is not new:
                break
            arrival.end = free = end
        if len(known) > REMEMBERED:
            self._in_free = known[REMEMBERED // 2 - 1].end
            del known[: REMEMBERED // 2]
        return new


class Link:
    """This rank's connection to the emulated network.

    Attributes:
        network: the current one; ``None`` is the machine's own.
        shared_clock: whether all ranks read the same clock.
        late: seconds from the arrival of the last message to the end of its wait. The rank's next
            message counts as sent that much earlier, because Python's time isn't the network's.
        around: seconds that PyTorch's own code takes from the end of a ``recv`` to the beginning of
            the next ``send``.
    """

    def __init__(self):
        self.network: Network | None = None
        self.shared_clock = True
        self.late = 0.0
        self.around = AROUND
        self._wires: dict[Network, Wire] = {}

    def set(self, network: Network | None) -> None:
        """Use this network from now on."""
        self.network = network
        self.late = 0.0
        self._wires = {}

    def wire(self, me: int, other: int) -> Wire | None:
        """Return the wire between two global ranks; ``None`` means the machine's own network."""
        network = self.network and self.network.between(me, other)
        if network is None:
            return None
        return self._wires.get(network) or self._wires.setdefault(
            network, Wire(network, self.shared_clock)
        )

    def calibrate(self, group: ProcessGroup) -> None:
        """Measure :attr:`around` by the time of `dist.send` in a group that does nothing."""
        import torch
        import torch.distributed as dist

        if group.size() == 1:
            return
        nothing = torch.empty(1)
        peer = (group.rank() + 1) % group.size()
        spans = []
        group.send = lambda *_: SimpleNamespace(wait=lambda: None)  # hides the method of the class
        try:
            for _ in range(200):
                start = time.perf_counter()
                dist.send(nothing, group=group, group_dst=peer)
                spans.append(time.perf_counter() - start)
        finally:
            del group.send
        self.around = min(statistics.median(spans), MOST_AROUND)

    def called(self, start: float) -> float:
        """Return when the call of ``start`` would have been made if Python took no time."""
        return start - self.late - self.around

    def ended(self, due: float) -> None:
        """Note that a wait ends now, although the message was complete at ``due``."""
        late = time.perf_counter() - due
        self.late = late if 0 < late < MOST_LATE else 0.0


link = Link()
