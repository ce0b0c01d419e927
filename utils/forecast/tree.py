"""The time of messages that start together on a tree of links and share its bandwidth.

A message of n bytes costs α + nβ (R. Hockney, 1994). Here β depends on the other messages: all
messages that cross a link share its bandwidth. If messages of equal size start together, the last
one ends when the busiest link has carried all its bytes. A device starts its messages one by one,
with a gap between them (D. Culler et al., "LogP", PPoPP 1993).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .machines import Machine

Devices = NDArray[np.int64]
#: The load of a level: the messages on its busiest link, the most messages of one device among
#: them, and whether the level's switch joins the two ends of a message.
Load = tuple[float, int, bool]


@dataclass(frozen=True)
class Cost:
    """What a round of messages costs: a + b × n seconds if each message has n bytes.

    Attributes:
        latency: seconds until the first byte of the last message has arrived.
        per_byte: seconds that the busiest link needs if each message has one byte.
        level: the number of the level with this link.
    """

    latency: float = 0.0
    per_byte: float = 0.0
    level: int = 0

    def seconds(self, nbytes: float) -> float:
        """Return the time of the round."""
        return self.latency + self.per_byte * nbytes


def of_messages(machine: Machine, sources: Devices, targets: Devices) -> Cost:
    """Return the cost of messages that start together.

    Args:
        machine: the tree.
        sources, targets: device numbers of each message's sender and receiver, of equal length.
    """

    def loads() -> Iterator[Load]:
        below = 1
        for size in machine.sizes:
            # A message uses its units' links to this switch if it leaves the unit.
            leaves = sources // below != targets // below
            if not leaves.any():
                return
            busiest = max(_most(sources[leaves] // below), _most(targets[leaves] // below))
            one = max(_most(sources[leaves]), _most(targets[leaves]))
            yield busiest, one, bool((leaves & (sources // size == targets // size)).any())
            below = size

    return _cost(machine, loads())


def of_all_pairs(machine: Machine, groups: Devices) -> Cost:
    """Return the cost of messages from each device to all others of its group.

    A unit with k of the group's p members sends k(p − k) messages over its link, so no message has
    to be counted one by one.

    Args:
        machine: the tree.
        groups: device numbers, a row for each group. The groups send at the same time.
    """
    members = groups.shape[1]
    rows = np.broadcast_to(np.arange(len(groups))[:, None], groups.shape)

    def loads() -> Iterator[Load]:
        for below in (1, *machine.sizes[:-1]):
            units = int(groups.max()) // below + 1
            keys, inside = np.unique(rows * units + groups // below, return_counts=True)
            load = np.bincount(keys % units, weights=inside * (members - inside))
            if not load.any():
                return
            # The device with the fewest neighbors in its unit sends the most messages out of it.
            yield float(load.max()), members - int(inside.min()), True

    return _cost(machine, loads())


def _cost(machine: Machine, loads: Iterator[Load]) -> Cost:
    """Return the cost of messages with these loads, from the lowest level up."""
    latency, worst, level, most = 0.0, 0.0, 0, 1
    for number, (links, (busiest, one, joins)) in enumerate(
        zip(machine.levels, loads, strict=False)
    ):
        latency = max(latency, links.latency if joins else 0.0)
        most = max(most, one)
        needs = max(busiest / links.link, one / links.lane)
        if needs > worst:
            worst, level = needs, number
    return Cost(latency + (most - 1) * machine.device.gap, worst, level)


def _most(numbers: Devices) -> int:
    """Return how often the most frequent number occurs."""
    return int(np.bincount(numbers).max())
