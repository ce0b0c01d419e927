"""Machines as data: devices at the leaves of a tree of links.

    machine("rack-nvlink")                                   # of the catalog, machines.toml
    machine("cluster").with_level("spine", units=128)        # more racks
    load("my-machines.toml")                                 # yours, in the catalog's format

A device is connected to a switch, this switch to a larger switch, and so on. Each connection is a
link with a latency and a bandwidth in each direction. A fat-tree network that is *oversubscribed*
4:1 has links at its top that are four times slower than all links below them together.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import MachineError

CATALOG = Path(__file__).with_name("machines.toml")
_LEAST = {"units": 1, "oversubscription": 1}


@dataclass(frozen=True)
class Device:
    """A GPU, or the core of a laptop.

    Attributes:
        name: such as "A100 80GB".
        flops: floating-point operations per second at the peak, in the training's dtype.
        efficiency: share of this peak that a training's large matrix products reach.
        memory: bytes.
        bandwidth: bytes per second of the device's memory.
        watts: power under load, with the device's share of its host and of cooling.
        price: dollars per hour.
        mtbf: mean time between failures of one device, in hours, with its share of the host.
        gap: seconds between the starts of two messages of the device (g in the model LogP).
    """

    name: str
    flops: float
    efficiency: float
    memory: float
    bandwidth: float
    watts: float
    price: float
    mtbf: float
    gap: float = 0.0

    @property
    def speed(self) -> float:
        """Return the floating-point operations per second that a training reaches."""
        return self.flops * self.efficiency

    def seconds(self, flops: float, nbytes: float = 0.0) -> float:
        """Return the time of a computation by the roofline model.

        The computation needs as long as its operations or its memory traffic, whichever is slower
        (S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009).
        """
        return max(flops / self.speed, nbytes / self.bandwidth)


@dataclass(frozen=True)
class Level:
    """A switch and the links to the units below it; on the lowest level, the units are devices.

    Attributes:
        name: of the switch, such as "node" or "rack".
        units: how many units the switch joins.
        latency: seconds of a message between two units, one way.
        bandwidth: bytes per second of one unit's link, in each direction, without oversubscription.
        oversubscription: factor by which the link is slower than `bandwidth`.
        lane: the most bytes per second that a single device gets of its unit's link.
    """

    name: str
    units: int
    latency: float
    bandwidth: float
    oversubscription: float = 1.0
    lane: float = math.inf

    @property
    def link(self) -> float:
        """Return the bytes per second of a unit's link, in each direction."""
        return self.bandwidth / self.oversubscription


@dataclass(frozen=True)
class Machine:
    """Devices at the leaves of a tree of links. Device 0, 1, … of a node are neighbors.

    Attributes:
        name: of the machine.
        device: each of its devices.
        levels: the switches from the devices up to the root.
        sources: where the numbers come from.
        library: which algorithms its communication library chooses, see `collectives.LIBRARIES`. By
            default, it is the fastest one for each size.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    sources: tuple[str, ...] = ()
    library: str = ""

    @property
    def devices(self) -> int:
        """Return how many devices the machine has."""
        return math.prod(level.units for level in self.levels)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return how many devices are below one switch of each level."""
        sizes = [1]
        for level in self.levels:
            sizes.append(sizes[-1] * level.units)
        return tuple(sizes[1:])

    def holds(self, ranks: int) -> None:
        """Make sure that each rank gets a device.

        Raises:
            MachineError: there are fewer devices than ranks, or no ranks.
        """
        if ranks < 1:
            raise MachineError(f"You asked for {ranks} ranks. Ask for at least 1.")
        if ranks > self.devices:
            raise MachineError(
                f"The machine {self.name!r} has {self.devices:,} devices, and you asked for "
                f"{ranks:,} ranks. Choose fewer ranks or a larger machine."
            )

    def with_level(self, name: str = "", **fields: Any) -> Machine:
        """Return this machine with other fields of a level, by default of the highest one.

        For example, ``with_level("spine", units=128)`` has more racks, and
        ``with_level(oversubscription=4.0)`` has slower links to the top.

        Raises:
            MachineError: the machine has no such level, or a field is impossible.
        """
        names = [level.name for level in self.levels]
        name = name or names[-1]
        if name not in names:
            raise MachineError(f"{self.name!r} has no level {name!r}, but {', '.join(names)}.")
        if wrong := [field for field, value in fields.items() if not value >= _LEAST.get(field, 0)]:
            raise MachineError(f"{wrong[0]}={fields[wrong[0]]} is impossible for a level.")
        change = {name: fields}
        levels = (replace(level, **change.get(level.name, {})) for level in self.levels)
        return replace(self, levels=tuple(levels))

    def __str__(self) -> str:
        parts = [f"{level.units} per {level.name}" for level in self.levels if level.units > 1]
        return f"{self.name}: {self.devices:,} × {self.device.name} ({', '.join(parts) or 'alone'})"


def load(path: str | Path) -> dict[str, Machine]:
    """Return the machines in a file of the catalog's format, by name.

    Raises:
        MachineError: the file is not TOML, or an entry lacks a field.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        devices = {key: Device(**fields) for key, fields in data["devices"].items()}
        return {
            name: Machine(
                name,
                devices[fields["device"]],
                tuple(Level(**level) for level in fields["levels"]),
                tuple(fields.get("sources", ())),
                fields.get("library", ""),
            )
            for name, fields in data["machines"].items()
        }
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise MachineError(
            f"{path} does not describe machines ({error}). Compare it with {CATALOG.name}."
        ) from error


@functools.cache
def catalog() -> dict[str, Machine]:
    """Return the machines that come with the course, by name."""
    return load(CATALOG)


def machine(name: str, among: dict[str, Machine] | None = None) -> Machine:
    """Return a machine by its name, from the catalog or from the given machines.

    Raises:
        MachineError: there is no such machine.
    """
    known = catalog() if among is None else among
    if name not in known:
        raise MachineError(f"There is no machine {name!r}. Choose one of: {', '.join(known)}.")
    return known[name]


def flat(
    latency: float, bandwidth: float, devices: int = 1 << 20, device: Device | None = None
) -> Machine:
    """Return equal devices at one switch: the network that `ranks.network` emulates.

    Args:
        latency: seconds, one way.
        bandwidth: bytes per second of each device's link, in each direction.
        devices: how many there are.
        device: each device; by default one core of the catalog's laptop.
    """
    device = device or replace(machine("laptop").device, gap=0.0)
    name = f"flat network, {latency * 1e6:g} µs, {bandwidth / 1e6:g} MB/s"
    return Machine(name, device, (Level("switch", devices, latency, bandwidth),), (), "emulated")
