"""The arguments of ``ranks.network``, checked: what network they ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_mpi.network import Network

_SIZES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
# One way through a switch, in a data centre; for a network that is given by its bandwidth only.
USUAL_LATENCY = 50e-6  # seconds


def parse(
    speed: str | None = None,
    latency: float | None = None,
    bandwidth: float | None = None,
    *,
    nodes: Sequence[Sequence[int]] | None = None,
    inside: str | None = None,
    inside_latency: float | None = None,
    size: int | None = None,
) -> Network | None:
    """Return the network for the arguments of ``ranks.network``; ``None`` is the machine's own.

    Args:
        size: how many ranks there are; each must then be in one of the nodes.

    Raises:
        TypeError, ValueError: arguments that make no sense; says what was expected.
    """
    whole = _simple(speed, latency, bandwidth, USUAL_LATENCY)
    within = _simple(inside, inside_latency, None, 0.0, "inside")
    if nodes is None:
        if within is not None:
            raise ValueError("inside=… is the network within a node: say which nodes there are")
        return whole
    if whole is None:
        raise ValueError(
            'nodes=… needs the network between them, as in network("1gbit", nodes=[[0, 1], [2, 3]])'
        )
    return Network(whole.latency, whole.bandwidth, _nodes(nodes, size), within)


def _simple(
    speed: str | None,
    latency: float | None,
    bandwidth: float | None,
    usual_latency: float,
    name: str = "",
) -> Network | None:
    """A network without nodes; ``name`` comes before the names of the arguments."""
    if speed in (None, "off", False) and latency is None and bandwidth is None:
        return None
    given = repr(speed) if not name else f"{name}={speed!r}"
    if speed is not None:
        if bandwidth is not None:
            raise ValueError(f"network({given}, bandwidth={bandwidth}): give one of the two")
        bandwidth = _bytes_per_second(speed, given)
        latency = usual_latency if latency is None else latency
    said = f"{name}_latency" if name else "latency"
    network = Network(
        _number(said, 0.0 if latency is None else latency, "seconds, such as 50e-6"),
        _number("bandwidth", math.inf if bandwidth is None else bandwidth, "bytes per second"),
    )
    if network.bandwidth == 0:
        raise ValueError(f"network({given}): nothing would ever arrive; give bytes per second")
    if not math.isfinite(network.latency):
        raise ValueError(f"{said}={network.latency}: nothing would ever arrive")
    return network


def _nodes(nodes: Sequence[Sequence[int]], size: int | None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, checked."""
    if not _is_list(nodes) or not all(_is_list(node) and len(node) for node in nodes):
        raise TypeError(f"nodes={nodes!r}: must be lists of ranks, such as [[0, 1], [2, 3]]")
    ranks = [rank for node in nodes for rank in node]
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise TypeError(f"nodes={nodes!r}: ranks are whole numbers, as in [[0, 1], [2, 3]]")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ValueError(f"nodes={nodes!r}: rank {twice[0]} stands there twice")
    if size is not None and sorted(ranks) != list(range(size)):
        strange = sorted(set(ranks) - set(range(size)))
        missing = sorted(set(range(size)) - set(ranks))
        what = f"there is no rank {strange[0]}" if strange else f"rank {missing[0]} is in no node"
        raise ValueError(f"nodes={nodes!r}: {what}; the ranks are 0 to {size - 1}")
    return tuple(tuple(node) for node in nodes)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | range) and not isinstance(value, str)


def _bytes_per_second(speed: str, given: str) -> float:
    text = str(speed).lower().replace("/s", "").replace(" ", "")
    for unit, factor in _SIZES.items():
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    raise ValueError(f'network({given}): expected a speed such as "1gbit", "100mbit", or "off"')


def _number(name: str, value: object, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: must be a number ({unit})")
    if not value >= 0:
        raise ValueError(f"{name}={value}: must not be negative ({unit})")
    return float(value)
