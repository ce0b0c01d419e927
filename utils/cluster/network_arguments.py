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
    whole = _simple(speed, latency, bandwidth, repr(speed), "latency", USUAL_LATENCY)
    within = _simple(inside, inside_latency, None, f"inside={inside!r}", "inside_latency", 0.0)
    if nodes is None:
        if within is not None:
            raise ValueError("inside=… is the network within a node: say which nodes there are")
        return whole
    if whole is None:
        raise ValueError(
            'nodes=… needs the network between them, as in network("1gbit", nodes=[[0, 1], [2, 3]])'
        )
    _check_nodes(nodes, size)
    return Network(whole.latency, whole.bandwidth, tuple(tuple(node) for node in nodes), within)


def _simple(
    speed: str | None,
    latency: float | None,
    bandwidth: float | None,
    shown: str,
    shown_latency: str,
    usual_latency: float,
) -> Network | None:
    """Return a network without nodes; errors name its arguments as they are shown."""
    if speed in (None, "off", False) and latency is None and bandwidth is None:
        return None
    if speed is None:
        usual_latency = 0.0
    else:
        if bandwidth is not None:
            raise ValueError(f"network({shown}, bandwidth={bandwidth}): give one of the two")
        bandwidth = _bytes_per_second(speed, shown)
    network = Network(
        _number(shown_latency, latency, usual_latency, "seconds, such as 50e-6"),
        _number("bandwidth", bandwidth, math.inf, "bytes per second"),
    )
    if network.bandwidth == 0:
        raise ValueError(f"network({shown}): nothing would ever arrive; give bytes per second")
    if not math.isfinite(network.latency):
        raise ValueError(f"{shown_latency}={network.latency}: nothing would ever arrive")
    return network


def _bytes_per_second(speed: str, shown: str) -> float:
    text = str(speed).lower().replace("/s", "").replace(" ", "")
    number = text[:-4]
    factor = _SIZES.get(text[-4:])
    if factor is None or not number.replace(".", "", 1).isdigit():
        raise ValueError(f'network({shown}): expected a speed such as "1gbit", "100mbit", or "off"')
    return float(number) * factor


def _number(name: str, value: object, default: float, unit: str) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: must be a number ({unit})")
    if not value >= 0:
        raise ValueError(f"{name}={value}: must not be negative ({unit})")
    return float(value)


def _check_nodes(nodes: Sequence[Sequence[int]], size: int | None) -> None:
    if not _is_list(nodes) or not all(_is_list(node) and len(node) for node in nodes):
        raise TypeError(f"nodes={nodes!r}: must be lists of ranks, such as [[0, 1], [2, 3]]")
    ranks = [rank for node in nodes for rank in node]
    if any(type(rank) is not int for rank in ranks):
        raise TypeError(f"nodes={nodes!r}: ranks are whole numbers, as in [[0, 1], [2, 3]]")
    if mistake := _mistake(ranks, size):
        raise ValueError(f"nodes={nodes!r}: {mistake}")


def _mistake(ranks: list[int], size: int | None) -> str:
    """Return what is wrong with the ranks of all nodes; "" if each is in one node."""
    if len(set(ranks)) < len(ranks):
        twice = min(rank for rank in ranks if ranks.count(rank) > 1)
        return f"rank {twice} stands there twice"
    if size is None or set(ranks) == set(range(size)):
        return ""
    strange = sorted(set(ranks) - set(range(size)))
    missing = sorted(set(range(size)) - set(ranks))
    reason = f"there is no rank {strange[0]}" if strange else f"rank {missing[0]} is in no node"
    return f"{reason}; the ranks are 0 to {size - 1}"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | range) and not isinstance(value, str)
