"""A second clock for an entry: its recorded events on a machine of `utils.forecast`'s catalog.

The machine is a tree of links, and messages that cross a link at the same time wait for each other.
For example, both ranks of a node share the node's link to the switch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from utils.forecast.errors import MachineError
from utils.forecast.links import Links
from utils.forecast.machines import Device, Machine

from .replay import Clock, Events, replay
from .rules import NODES, RANKS, SIZES, Rules

#: A slower device is a core. It computes an image as the rules say.
GPU_FLOPS = 1e12
#: Operations for the gradient of one image: 2 for each weight forward, 4 backward.
FLOPS = 6 * sum(a * b for a, b in itertools.pairwise(SIZES))
#: Seconds of a gradient on a GPU, at least: about 20 kernels, which Python starts in 10 µs each.
LEAST = 2e-4


def score(
    traces: Mapping[int, Events], rules: Rules, accuracies: Mapping[str, float], machine: Machine
) -> dict:
    """Return the fields of an entry for a second machine, from the accuracy of each file."""
    clock = replay(traces, rules, TreeClock(traces, rules, machine))
    curve = tuple((seconds, accuracies[file]) for seconds, _, file in clock.shown)
    reached = next((seconds for seconds, right in curve if right >= rules.target), None)
    return {"elsewhere": machine.name, "elsewhere_seconds": reached, "elsewhere_curve": curve}


def places(machine: Machine) -> list[int]:
    """Return each rank's device: two in the first node and two in the second, if there is one.

    Raises:
        MachineError: the machine has too few devices.
    """
    node = next((size for size in machine.sizes if size > 1), 1)
    step = node if machine.devices >= 2 * node else len(NODES[0])
    found = [k * step + j for k, ranks in enumerate(NODES) for j, _ in enumerate(ranks)]
    if machine.devices <= found[-1]:
        raise MachineError(
            f"The machine {machine.name!r} has {machine.devices} devices. "
            f"Choose a machine with at least {RANKS}."
        )
    return found


def of_gradient(device: Device, images: int, rules: Rules) -> float:
    """Return the seconds in which a device computes the gradient of some images."""
    if device.flops < GPU_FLOPS:
        return images * rules.per_sample
    return max(device.seconds(images * FLOPS), LEAST)


class TreeClock(Clock):
    """The clocks of ranks on a tree of links, see :class:`utils.forecast.links.Links`."""

    def __init__(self, traces: Mapping[int, Events], rules: Rules, machine: Machine):
        super().__init__(traces, rules)
        self._device = machine.device
        self._links = Links(machine, np.array(places(machine))[:, None], samples=1)

    def _computing(self, images: int) -> float:
        return of_gradient(self._device, images, self.rules)

    def _send(self, rank: int, other: int, nbytes: int) -> tuple[float, float]:
        start = np.full((1, 1), self.end[rank])
        left, arrived = self._links.message(rank, other, nbytes, start)
        return left.item(), arrived.item()

    def _arrival(self, rank: int, other: int, nbytes: int, arrival: float) -> float:
        return arrival  # the links have made it wait
