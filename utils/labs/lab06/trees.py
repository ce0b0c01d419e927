"""All-reduces on trees of links: the picture of a tree, and the fastest by size and ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from utils.figures import GREEN, ORANGE, PINK, SKY, YELLOW, tint
from utils.figures.charts import finish, keys, panels
from utils.figures.shapes import cell
from utils.forecast import Level, Machine, machine
from utils.forecast.collectives import price

#: Each algorithm's sign and color, and its forms in `collectives`, of which the fastest counts.
ALGORITHMS = {
    "ring": ("R", ORANGE, ["ring"]),
    "direct": ("D", PINK, ["direct"]),
    "tree": ("T", GREEN, ["tree"]),
    "halving and doubling": ("½", SKY, ["halving and doubling"]),
    "hierarchical": ("H", YELLOW, ["hierarchical", "hierarchical halving"]),
}
SIZES = [4e3 * 4**k for k in range(10)]
RANKS = [4 * 2**k for k in range(9)]
#: A winner within this share of the second one's time is a tie: a forecast is not more exact.
TIE = 0.1


def pcie_cluster() -> Machine:
    """Return 1,024 devices like "cluster", but each node has PCI Express and one adapter."""
    spine = Level("spine", 32, 10e-6, 4 * 25e9, oversubscription=4)
    return replace(machine("rack-pcie"), levels=(*machine("rack-pcie").levels, spine))


def times(machine: Machine, devices: Sequence[int], nbytes: float) -> dict[str, float]:
    """Return the seconds of each all-reduce that these devices can run, the fastest first."""
    found = {}
    for name, (_, _, forms) in ALGORITHMS.items():
        for form in forms:
            with contextlib.suppress(ValueError):  # for example, there is only one node
                cost = price(machine, "all_reduce", np.array([devices]), nbytes, form)
                found[name] = min(cost.seconds, found.get(name, cost.seconds))
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def winners(machines: Mapping[str, Machine]) -> Figure:
    """Draw the fastest all-reduce by size and ranks; a tie is pale and names the second, too."""
    figure, row = panels(9, 4.6, columns=len(machines), sharey=True)
    words = []
    for axes, (title, one) in zip(row, machines.items(), strict=True):
        for y, p in enumerate(RANKS):
            for x, nbytes in enumerate(SIZES):
                (best, least), (second, next_one) = list(times(one, range(p), nbytes).items())[:2]
                tie = next_one < (1 + TIE) * least
                letters = ALGORITHMS[best][0] + (f"≈{ALGORITHMS[second][0]}" if tie else "")
                color = tint(ALGORITHMS[best][1], 0.35 if tie else 1.0)
                cell(axes, x, y, 1, color, letters, height=1, fontsize=8, edgecolor="white")
                if p in (8, RANKS[-1]) and x in (0, 4, 9):
                    words.append(f"{title}, {p} ranks, {nbytes:,.0f} bytes: {letters}")
        axes.set(title=title, xlabel="bytes of the tensor", xlim=(0, 10), ylim=(-0.5, 8.5))
        axes.set_xticks([0.5, 4.5, 9.5], ["4 kB", "1 MB", "1 GB"])
        axes.set_yticks(range(9), [f"{p:,}" for p in RANKS])
        axes.grid(False)
    row[0].set_ylabel("ranks")
    legend = {f"{letter} {name}": color for name, (letter, color, _) in ALGORITHMS.items()}
    figure.legend(handles=keys(legend), loc="lower center", ncols=5, fontsize=9)
    return finish(figure, f"The fastest all-reduce. {'; '.join(words)}.", below=0.08)
