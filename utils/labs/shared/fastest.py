"""Which all-reduce is the fastest: a picture with sliders for α, the bandwidth and the ranks.

For each number of ranks, an algorithm has two numbers: its rounds, each with a latency α, and how
many tensors its busiest link carries in all rounds. A tensor of n bytes then takes
``rounds * alpha + tensors * n / bandwidth`` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from utils.figures import GREY
from utils.figures.charts import chart, finish, legend_beside
from utils.figures.interactive import Interactive

SCRIPT = Path(__file__).with_name("fastest.js")
RANKS = range(2, 65)
SIZES = (1.0, 1e9)
LATENCIES, BANDWIDTHS = (1e-6, 1e-2), (1e6, 1e11)


class Cost(NamedTuple):
    """The cost of an all-reduce on p ranks: its rounds, and the tensors on the busiest link."""

    rounds: float
    tensors: float

    def seconds(self, nbytes: float, alpha: float, bandwidth: float) -> float:
        """Return the time for a tensor of so many bytes."""
        return self.rounds * alpha + self.tensors * nbytes / bandwidth


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce to be compared.

    Attributes:
        name, color: how the picture shows it.
        cost: returns its cost on p ranks, or None if it can't run on p ranks.
        all_pairs: whether it needs a link between each pair of ranks.
    """

    name: str
    color: str
    cost: Callable[[int], Cost | None]
    all_pairs: bool = False


def fastest(costs: Mapping[str, Cost], alpha: float, bandwidth: float) -> list[tuple[str, float]]:
    """Return the fastest algorithms in order of size, each with its smallest number of bytes."""
    name = min(costs, key=lambda name: costs[name])
    best = [(name, 0.0)]
    while True:
        cost = costs[name]
        meetings = {
            other: (steep.rounds - cost.rounds) * alpha * bandwidth / (cost.tensors - steep.tensors)
            for other, steep in costs.items()
            if steep.tensors < cost.tensors
        }
        if not meetings:
            return best
        name = min(meetings, key=lambda other: (meetings[other], costs[other].tensors))
        best.append((name, meetings[name]))


def moving(
    algorithms: Sequence[Algorithm],
    ranks: int = 4,
    alpha: float = 5e-3,
    bandwidth: float = 12.5e6,
    nbytes: float = 1000,
) -> Interactive:
    """Return times against bytes, with sliders for α, the bandwidth, the ranks and a tensor.

    Args:
        algorithms: the algorithms to compare.
        ranks, alpha, bandwidth, nbytes: where the sliders begin (seconds, bytes per second).
    """
    alpha = float(np.clip(alpha, *LATENCIES))
    bandwidth = float(np.clip(bandwidth, *BANDWIDTHS))
    data = {
        "ranks": [RANKS[0], RANKS[-1], ranks],
        "alpha": [*LATENCIES, alpha],
        "bandwidth": [*BANDWIDTHS, bandwidth],
        "bytes": [*SIZES, nbytes],
        "groups": _groups(algorithms),
        "algorithms": [
            {"name": each.name, "color": each.color, "costs": list(map(each.cost, RANKS))}
            for each in algorithms
        ],
    }
    return Interactive(SCRIPT, data, _still(algorithms, ranks, alpha, bandwidth))


def _groups(algorithms: Sequence[Algorithm]) -> dict[str, list[str]]:
    """Return the names of the algorithms that can run, by which links exist."""
    few = [each.name for each in algorithms if not each.all_pairs]
    groups = {"between all pairs": [each.name for each in algorithms]}
    return groups if len(few) == len(algorithms) else groups | {"few": few}


def _still(algorithms: Sequence[Algorithm], ranks: int, alpha: float, bandwidth: float) -> Figure:
    figure, axes = chart(8.5, 4.2)
    sizes = np.geomspace(*SIZES, 200)
    costs = {each.name: cost for each in algorithms if (cost := each.cost(ranks))}
    for k, each in enumerate(algorithms):
        if each.name in costs:
            times = [costs[each.name].seconds(n, alpha, bandwidth) for n in sizes]
            style = ("-", "--", ":", "-.")[k % 4]
            axes.loglog(sizes, times, style, color=each.color, label=each.name)
    best = fastest(costs, alpha, bandwidth)
    for _, begin in best[1:]:
        axes.axvline(begin, color=GREY, linestyle=":", linewidth=1.2)
    axes.set(xlabel="bytes of the tensor", ylabel="time [s]")
    axes.set_title(f"{ranks} ranks, α = {alpha:.3g} s, {bandwidth / 1e6:.4g} MB/s")
    legend_beside(axes)
    later = "".join(f", from {begin:,.0f} bytes on {name}" for name, begin in best[1:])
    words = (
        f"Times of {len(costs)} all-reduces against the bytes of the tensor on {ranks} ranks, with "
        f"a latency of {alpha:.3g} s and {bandwidth / 1e6:.4g} MB/s. The fastest is "
        f"{best[0][0]}{later}."
    )
    return finish(figure, words)
