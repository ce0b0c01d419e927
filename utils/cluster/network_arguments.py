"""The check of the arguments of ``ranks.network``, and the network that they describe."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_mpi.network import Network

_SIZES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
# One way through a switch of a data center; used if only the bandwidth is given.
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
        size: number of ranks; if given, each rank must be in one of the nodes.

    Raises:
        TypeError, ValueError: the arguments make no sense; the message says what was expected.
    """
    whole = _simple(speed, latency, bandwidth, repr(speed), "latency", USUAL_LATENCY)
    within = _simple(inside, inside_latency, None, f"inside={inside!r}", "inside_latency", 0.0)
    if nodes is None:
        if within is not None:
            raise ValueError("inside=… needs nodes. Add them, as in nodes=[[0, 1], [2, 3]]")
        return whole
    if whole is None:
        raise ValueError(
            'nodes=… needs a speed, too. Add it: network("1gbit", nodes=[[0, 1], [2, 3]])'
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
    """Return a network without nodes; errors name its arguments by the texts `shown`."""
    if speed in (None, "off", False) and latency is None and bandwidth is None:
        return None
    if speed is None:
        usual_latency = 0.0
    else:
        if bandwidth is not None:
            raise ValueError(
                f"network({shown}, bandwidth={bandwidth}) sets it twice. Give only one"
            )
        bandwidth = _bytes_per_second(speed, shown)
    network = Network(
        _number(shown_latency, latency, usual_latency, "seconds, such as 50e-6"),
        _number("bandwidth", bandwidth, math.inf, "bytes per second"),
    )
    if network.bandwidth == 0:
        raise ValueError(f"network({shown}) lets no message arrive. Give a bandwidth above 0")
    if not math.isfinite(network.latency):
        raise ValueError(f"{shown_latency}={network.latency} lets no message arrive. Give seconds")
    return network


def _bytes_per_second(speed: str, shown: str) -> float:
    text = str(speed).lower().replace("/s", "").replace(" ", "")
    number = text[:-4]
    factor = _SIZES.get(text[-4:])
    if factor is None or not number.replace(".", "", 1).isdigit():
        raise ValueError(f'network({shown}) is not a speed. Pass "1gbit", "100mbit", …, or "off"')
    return float(number) * factor


def _number(name: str, value: object, default: float, unit: str) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is not a number. Give {unit}")
    if not value >= 0:
        raise ValueError(f"{name}={value} is negative or not a number. Give {unit}, at least 0")
    return float(value)


def _check_nodes(nodes: Sequence[Sequence[int]], size: int | None) -> None:
    if not _is_list(nodes) or not all(_is_list(node) and len(node) for node in nodes):
        raise TypeError(f"nodes={nodes!r} is not a list of lists, such as [[0, 1], [2, 3]]")
    ranks = [rank for node in nodes for rank in node]
    if any(type(rank) is not int for rank in ranks):
        raise TypeError(f"nodes={nodes!r} must have whole numbers, as in [[0, 1], [2, 3]]")
    if mistake := _mistake(ranks, size):
        raise ValueError(f"nodes={nodes!r}: {mistake}. Put each rank into one node")


def _mistake(ranks: list[int], size: int | None) -> str:
    """Return what is wrong with the ranks of all nodes; "" if each rank is in one node."""
    if len(set(ranks)) < len(ranks):
        twice = min(rank for rank in ranks if ranks.count(rank) > 1)
        return f"rank {twice} is listed twice"
    if size is None or set(ranks) == set(range(size)):
        return ""
    strange = sorted(set(ranks) - set(range(size)))
    missing = sorted(set(range(size)) - set(ranks))
    reason = f"there is no rank {strange[0]}" if strange else f"rank {missing[0]} is in no node"
    return f"{reason} (the ranks are 0 to {size - 1})"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | range) and not isinstance(value, str)
