"""The links of a machine while a run is replayed: how long each one is busy.

Calls that come at different times wait for each other: a link serves them in the order in which
they begin. Messages that come together share the links, see :mod:`.tree`.

All times are arrays of shape [samples, …], because a replay plays several samples at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import tree
from .machines import Machine
from .tree import Devices

Times = NDArray[np.float64]


class Links:
    """When each link of a machine is free again.

    Args:
        machine: the tree.
        devices: the device number of every rank, of shape [positions, replicas].
        samples: how many samples are played at once.
    """

    def __init__(self, machine: Machine, devices: Devices, samples: int):
        self.machine = machine
        self.devices = devices
        below = (1, *machine.sizes[:-1])
        self._units = [devices // size for size in below]
        shapes = [(samples, int(units.max()) + 1) for units in self._units]
        self._up = [np.zeros(shape) for shape in shapes]
        self._down = [np.zeros(shape) for shape in shapes]

    def message(self, source: int, target: int, nbytes: float, start: Times) -> tuple[Times, Times]:
        """Send a message in every replica; return when it has left, and when it has arrived.

        Args:
            source, target: positions.
            nbytes: of the message.
            start: when each replica's sender starts it, of shape [samples, replicas].
        """
        cost = tree.of_messages(self.machine, self.devices[source], self.devices[target])
        span = cost.per_byte * nbytes
        up, down = self._path(source, target)
        begin = np.maximum(start, _latest(self._up, up))
        left = begin + span
        arrived = np.maximum(left + cost.latency, _latest(self._down, down) + span)
        _keep_busy(self._up, up, left)
        _keep_busy(self._down, down, arrived)
        return left, arrived

    def _path(self, source: int, target: int) -> tuple[list[NDArray], list[NDArray]]:
        """Return for each level the units whose links a message crosses, by replica.

        Replicas can differ: a message crosses a level in some replicas, and not in others. Then
        the level counts for all replicas.
        """
        up, down = [], []
        for units in self._units:
            if (units[source] == units[target]).all():
                break
            up.append(units[source])
            down.append(units[target])
        return up, down

    def collective(
        self, positions: list[int], begin: Times, seconds: float, busy: float | None = None
    ) -> Times:
        """Run a collective of these positions; return its end.

        It waits for the devices' links. Its price accounts for the higher links, which the groups
        of its axis share.

        Args:
            positions: the members in a replica.
            begin: when the last member has called, of shape [samples, 1 or replicas].
            seconds: its price.
            busy: after how many seconds the next call may begin; by default, at the end.
        """
        for position in positions:
            free = np.maximum(self._up[0], self._down[0])[:, self.devices[position]]
            begin = np.maximum(begin, _joined(free, begin.shape[1]))
        end = begin + seconds
        for position in positions:
            free = end if busy is None else begin + busy
            self._up[0][:, self.devices[position]] = free
            self._down[0][:, self.devices[position]] = free
        return end


def _joined(times: Times, replicas: int) -> Times:
    """Return times by replica, or the latest of all replicas if they act together."""
    return times if replicas > 1 else times.max(axis=1, keepdims=True)


def _latest(links: list[Times], units: list[NDArray]) -> Times | float:
    """Return when all links of a path are free. The path may end below the highest levels."""
    latest: Times | float = 0.0
    for free, unit in zip(links, units, strict=False):
        latest = np.maximum(latest, free[:, unit])
    return latest


def _keep_busy(links: list[Times], units: list[NDArray], until: Times) -> None:
    """Mark a path's links as busy; replicas may share a link."""
    for free, unit in zip(links, units, strict=False):
        # Transposed, because `at` takes one index for the first axis.
        np.maximum.at(free.T, unit, until.T)
