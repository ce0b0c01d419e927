"""The links of a machine while a run is replayed: how long each one is busy.

Calls that come at different times wait for each other: a link serves them in the order in which
they begin. Messages that come together share the links, see :mod:`.tree`.

All times are arrays of shape [samples, …], because a replay plays several samples at once.
"""

from __future__ import annotations

import itertools

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

        ``start``, of shape [samples, replicas], says when the senders start it.
        """
        cost = tree.of_messages(self.machine, self.devices[source], self.devices[target])
        path = self._path(source, target)
        span = cost.per_byte * nbytes
        begin = np.maximum(start, self._up[0][:, path[0][0]])
        left = begin + span
        arrived = np.maximum(left + cost.latency, self._down[0][:, path[0][1]] + span)
        for level, (up, down) in enumerate(path[1:], start=1):
            # A higher link carries the messages of several devices at once. It delays a message
            # only if it has more bytes to carry than it can.
            link = nbytes * np.bincount(up).max() / self.machine.levels[level].link
            left = np.maximum(left, _carry(self._up[level], up, begin, link))
            arrives = _carry(self._down[level], down, begin + cost.latency, link)
            arrived = np.maximum(arrived, arrives)
        arrived = np.maximum(arrived, left + cost.latency)
        self._up[0][:, path[0][0]] = left
        self._down[0][:, path[0][1]] = arrived
        return left, arrived

    def _path(self, source: int, target: int) -> list[tuple[Devices, Devices]]:
        """Return for each level the units whose links a message leaves and enters, by replica.

        If a message crosses a level in some replicas only, the level counts for all replicas.
        """
        pairs = ((units[source], units[target]) for units in self._units)
        return list(itertools.takewhile(lambda pair: (pair[0] != pair[1]).any(), pairs))

    def collective(self, positions: list[int], begin: Times, seconds: float, busy: float) -> Times:
        """Run a collective; return its end. It waits for the devices' links.

        Its price accounts for the higher links, which the groups of its axis share. ``begin``, of
        shape [samples, 1 or replicas], says when the last member has called. The next call may
        begin after ``busy`` seconds.
        """
        for position in positions:
            free = np.maximum(self._up[0], self._down[0])[:, self.devices[position]]
            if begin.shape[1] == 1:  # all replicas act together
                free = free.max(axis=1, keepdims=True)
            begin = np.maximum(begin, free)
        for position in positions:
            self._up[0][:, self.devices[position]] = begin + busy
            self._down[0][:, self.devices[position]] = begin + busy
        return begin + seconds


def _carry(free: Times, units: Devices, begin: Times, span: float) -> Times:
    """Let the links of some units carry bytes for ``span`` seconds; return when they have done so.

    ``free`` says when each link has carried what it got before, and is changed. Replicas may share
    a unit; then the span counts the bytes of all of them.
    """
    ends = np.maximum(free[:, units], begin) + span
    np.maximum.at(free.T, units, ends.T)  # transposed, because `at` indexes the first axis
    return ends
