"""A slower network than there is: each message takes ``latency + bytes / bandwidth`` at least.

The model is Hockney's (1994) for one link per rank in each direction: a rank's messages leave one
after the other, and arrive one after the other. Ranks may be put together to nodes, with another
network inside of each; then each rank has a link out and a link in for either of the two.
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

# Of a wait that ended late, what is put down to Python at most.
MOST_LATE = 1e-3  # seconds
# What PyTorch's Python takes around one of our calls, until :meth:`Link.calibrate` has measured it.
AROUND = 5e-6  # seconds
# More than that is not PyTorch's code, but a machine that is busy with something else.
MOST_AROUND = 50e-6  # seconds

# Messages that a link remembers, to find the place of one that is noticed late.
REMEMBERED = 1000


@dataclass(frozen=True)
class Network:
    """What the ranks are joined by.

    Attributes:
        latency: seconds, one way.
        bandwidth: bytes per second, each direction of each rank.
        nodes: global ranks of each node; empty where all ranks are alike.
        inside: the network within a node; ``None`` is the machine's own.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    nodes: tuple[tuple[int, ...], ...] = ()
    inside: Network | None = None

    @classmethod
    def from_dict(cls, fields: dict | None) -> Network | None:
        """Return the network that :meth:`to_dict` was called on."""
        if fields is None:
            return None
        nodes = tuple(tuple(node) for node in fields["nodes"])
        return cls(fields["latency"], fields["bandwidth"], nodes, cls.from_dict(fields["inside"]))

    def to_dict(self) -> dict:
        """Return it for JSON."""
        return asdict(self)

    def between(self, rank: int, other: int) -> Network | None:
        """Return the network of messages between two ranks; ``None`` is the machine's own."""
        together = any(rank in node and other in node for node in self.nodes)
        return self.inside if together else self

    def __str__(self) -> str:
        bits = self.bandwidth * 8
        rate = f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
        rate = "no limit" if math.isinf(bits) else rate
        ms = self.latency * 1e3
        text = f"{rate}, {ms:g} ms" if ms >= 1 else f"{rate}, {self.latency * 1e6:g} µs"
        if not self.nodes:
            return text
        nodes = ", ".join(str(list(node)) for node in self.nodes)
        return f"{text} between the nodes {nodes}; inside {self.inside or 'that of this machine'}"


class Arrival:
    """A message that comes in: a point in time, which an earlier message may still put off.

    Attributes:
        begin: when its first byte comes if nothing is before it, by ``time.perf_counter``.
        span: seconds that it takes the link.
    """

    __slots__ = ("begin", "end", "span")

    def __init__(self, begin: float, span: float):
        self.begin = begin
        self.span = span
        self.end = begin + span

    def due(self) -> float:
        """Return when it is here, by all that is known now."""
        return self.end


class Wire:
    """This rank's end of one network: a link out, and a link in."""

    def __init__(self, network: Network, shared_clock: bool):
        self.network = network
        self._shared_clock = shared_clock
        self._out_free = 0.0
        self._in_free = -math.inf
        self._arrivals: list[Arrival] = []
        self._lock = threading.Lock()

    def sends(self, nbytes: int, at: float) -> tuple[float, float]:
        """Return when the last byte of a message from ``at`` is gone; what to tell the receiver."""
        with self._lock:
            gone = max(at, self._out_free) + nbytes / self.network.bandwidth
            self._out_free = gone
        arrives = gone + self.network.latency
        return gone, arrives if self._shared_clock else arrives - time.perf_counter()

    def receives(self, nbytes: int, told: float) -> Arrival:
        """Return when a message arrives that was noticed, and whose sender told ``told``."""
        arrives = told if self._shared_clock else told + time.perf_counter()
        span = nbytes / self.network.bandwidth
        with self._lock:
            return self._noticed(arrives - span, span)

    def _noticed(self, begin: float, span: float) -> Arrival:
        """Give a message its place among those that come in, one after the other.

        The rank does not notice them in the order in which they begin to come: those behind this
        one end later.
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
    """This rank's end of the network.

    Attributes:
        network: the present one; ``None`` is the machine's own.
        shared_clock: whether all ranks read the same clock.
        late: seconds by which the last wait ended later than the message was there. What the rank
            sends afterwards counts from that much earlier: Python's time is not the network's.
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
        """Return the wire between two global ranks; ``None``: the machine's own network."""
        network = self.network and self.network.between(me, other)
        if network is None:
            return None
        return self._wires.get(network) or self._wires.setdefault(
            network, Wire(network, self.shared_clock)
        )

    def calibrate(self, group: ProcessGroup) -> None:
        """Measure :attr:`around`: `dist.send` with a group that does nothing."""
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
        """Return when a call that came at ``start`` would have come if Python took no time."""
        return start - self.late - self.around

    def ended(self, due: float) -> None:
        """Note that a wait for something that was there at ``due`` ends now."""
        late = time.perf_counter() - due
        self.late = late if 0 < late < MOST_LATE else 0.0


link = Link()
