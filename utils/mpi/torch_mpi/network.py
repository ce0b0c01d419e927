"""A slower network than there is: each message takes ``latency + bytes / bandwidth`` at least.

The model is Hockney's (1994) for one link per rank in each direction: a rank's messages leave one
after the other, and arrive one after the other. A message that has nothing before it arrives
``latency + bytes / bandwidth`` after it was sent, however fast the machine moved it.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from dataclasses import dataclass

_SIZES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
# One way through a switch, in a data centre; for a network that is given by its bandwidth only.
USUAL_LATENCY = 50e-6  # seconds

# Of a wait that ended late, what is put down to Python at most.
MOST_LATE = 1e-3  # seconds
# What PyTorch's Python takes around one of our calls, until :meth:`Link.calibrate` has measured it.
AROUND = 5e-6  # seconds
# More than that is not PyTorch's code, but a machine that is busy with something else.
MOST_AROUND = 50e-6  # seconds


@dataclass(frozen=True)
class Network:
    """Latency in seconds, one way; bandwidth in bytes per second, each direction of each rank."""

    latency: float = 0.0
    bandwidth: float = math.inf

    @classmethod
    def parse(cls, speed=None, latency=None, bandwidth=None) -> Network | None:
        """The network for the arguments of ``ranks.network``; ``None`` is the machine's own.

        Raises:
            TypeError, ValueError: arguments that make no sense; says what was expected.
        """
        if speed in (None, "off", False) and latency is None and bandwidth is None:
            return None
        if speed is not None:
            if bandwidth is not None:
                raise ValueError(f"network({speed!r}, bandwidth={bandwidth}): give one of the two")
            bandwidth = _bytes_per_second(speed)
            latency = USUAL_LATENCY if latency is None else latency
        network = cls(
            _number("latency", 0.0 if latency is None else latency, "seconds, such as 50e-6"),
            _number("bandwidth", math.inf if bandwidth is None else bandwidth, "bytes per second"),
        )
        if network.bandwidth == 0:
            raise ValueError("bandwidth=0: nothing would ever arrive; give bytes per second")
        if not math.isfinite(network.latency):
            raise ValueError(f"latency={network.latency}: nothing would ever arrive")
        return network

    def __str__(self) -> str:
        rate = "no limit" if math.isinf(self.bandwidth) else f"{self.bandwidth * 8 / 1e9:g} Gbit/s"
        return f"{rate}, {self.latency * 1e6:g} µs"


def _bytes_per_second(speed: str) -> float:
    text = str(speed).lower().replace("/s", "").replace(" ", "")
    for unit, factor in _SIZES.items():
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    raise ValueError(f'network({speed!r}): expected a speed such as "1gbit", "100mbit", or "off"')


def _number(name: str, value: object, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: must be a number ({unit})")
    if not value >= 0:
        raise ValueError(f"{name}={value}: must not be negative ({unit})")
    return float(value)


class _Nothing:
    def wait(self) -> None:
        pass


class Link:
    """This rank's end of the network.

    Attributes:
        network: the present one; ``None`` is the machine's own.
        shared_clock: whether all ranks read the same clock.
        late: by how much the last wait ended later than the message was there, in seconds. What
            the rank sends afterwards counts from that much earlier: the time that Python needs
            is not the network's.
        around: what PyTorch's own code takes from the end of a ``recv`` to the beginning of the
            next ``send``, in seconds.
    """

    def __init__(self):
        self.network: Network | None = None
        self.shared_clock = True
        self.late = 0.0
        self.around = AROUND
        self._out_free = self._in_free = 0.0
        self._lock = threading.Lock()

    def set(self, network: Network | None) -> None:
        """Use this network from now on."""
        self.network = network
        self.late = self._out_free = self._in_free = 0.0

    def calibrate(self, group, samples: int = 200) -> None:
        """Measure :attr:`around`: `dist.send` with a group that does nothing."""
        import torch
        import torch.distributed as dist

        if group.size() == 1:
            return
        nothing, peer = torch.empty(1), (group.rank() + 1) % group.size()
        spans = []
        group.send = lambda *_: _Nothing()  # hides the method of the class
        try:
            for _ in range(samples):
                start = time.perf_counter()
                dist.send(nothing, group=group, group_dst=peer)
                spans.append(time.perf_counter() - start)
        finally:
            del group.send
        self.around = min(statistics.median(spans), MOST_AROUND)

    def called(self, start: float) -> float:
        """When a call that came at ``start`` would have come if Python took no time."""
        return start - self.late - self.around

    def ended(self, due: float) -> None:
        """A wait for something that was there at ``due`` ends now."""
        late = time.perf_counter() - due
        self.late = late if 0 < late < MOST_LATE else 0.0

    def sends(self, nbytes: int, at: float) -> tuple[float, float]:
        """A message leaves at ``at``. When its last byte is gone; what to tell the receiver."""
        with self._lock:
            gone = max(at, self._out_free) + nbytes / self.network.bandwidth
            self._out_free = gone
        arrives = gone + self.network.latency
        return gone, arrives if self.shared_clock else arrives - time.perf_counter()

    def receives(self, nbytes: int, told: float) -> float:
        """When a message has arrived, by what its sender told."""
        arrives = told if self.shared_clock else told + time.perf_counter()
        if self.network is None:
            return arrives
        span = nbytes / self.network.bandwidth
        with self._lock:
            arrives = max(arrives - span, self._in_free) + span
            self._in_free = arrives
        return arrives


link = Link()
