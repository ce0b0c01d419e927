"""A network switch in user space: hosts' packets, held back as links of a given rate would.

Linux's own netem can do this, but many small machines' kernels are built without it, and tbf
shapes the rate only. Here each host has a link of `rate` bit/s in each direction to a switch;
`latency` seconds lie between the two ends of a path. The switch passes a packet on while it still
comes in (cut-through), so that a packet alone on its way takes latency + bits / rate.
"""

from __future__ import annotations

import fcntl
import gc
import heapq
import os
import select
import struct
import time

# <linux/if_tun.h>: a device whose packets a program reads and writes, without a header of its own.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# What Ethernet adds to a packet: header 14, checksum 4, preamble 8, gap 12.
FRAMING = 38  # bytes
# Jumbo frames, as on a cluster: less work for the switch, and 99 % of the rate is payload.
MTU = 9000  # bytes
_AT_ONCE = 16


def open_device(name: str) -> int:
    """A file descriptor of a new network device. Raises OSError where that isn't allowed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def in_time() -> bool:
    """Run before any ordinary process; whether that was allowed."""
    try:
        # Not inherited by children: a rank must not.
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(50))
    except OSError:
        return False
    return True


class Switch:
    """Host k has the address that ends in k + 1, and the device `devices[k]`.

    rate: bits per second of each link, each direction.
    latency: seconds.
    """

    def __init__(self, devices: list[int], rate: float, latency: float):
        self._devices, self._numbers = devices, {device: k for k, device in enumerate(devices)}
        self._rate, self._latency = rate, latency
        self._up_free, self._down_free = [0.0] * len(devices), [0.0] * len(devices)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self, until: int) -> None:
        """Pass packets on until the file descriptor `until` can be read."""
        gc.freeze()
        while True:
            pause = self._waiting[0][0] - time.perf_counter() if self._waiting else 1.0
            ready, _, _ = select.select([until, *self._devices], [], [], max(pause, 0))
            if until in ready:
                return
            for device in ready:
                self._take_in(device)
            self._deliver()

    def _take_in(self, device: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            # Bytes 16 to 19 of an IPv4 packet are the destination.
            if len(packet) >= 20 and packet[0] >> 4 == 4 and 0 < packet[19] <= len(self._devices):
                due = self.arrival(
                    time.perf_counter(), self._numbers[device], packet[19] - 1, len(packet)
                )
                self._count += 1  # packets that are due at once keep their order
                heapq.heappush(self._waiting, (due, self._count, packet[19] - 1, packet))

    def arrival(self, now: float, source: int, target: int, nbytes: int) -> float:
        """When a packet that comes from `source` now is at `target` with its last byte."""
        span = 8 * (nbytes + FRAMING) / self._rate
        start = max(now, self._up_free[source])
        self._up_free[source] = start + span
        start = max(start + self._latency, self._down_free[target])
        self._down_free[target] = start + span
        return start + span

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.perf_counter():
            _, _, target, packet = heapq.heappop(self._waiting)
            os.write(self._devices[target], packet)
