"""The drawings of lab 06: who talks to whom, how long it takes, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    arrow,
    use_style,
)

#: One colour and one mark for each algorithm, in all figures.
LOOKS = {
    "crossbar": (BLUE, "o"),
    "central": (RED, "s"),
    "tree": (GREEN, "^"),
    "ring": (ORANGE, "D"),
    "direct": (PINK, "P"),
    "backend": (INK, "x"),
}


def task_picture(parts: Sequence[Sequence[float]]) -> Figure:
    """What an all-reduce is for: each rank's tensor before and afterwards."""
    use_style()
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.55 * len(parts)))
    _plain(axes)
    total = [sum(column) for column in zip(*parts, strict=True)]
    for r, part in enumerate(parts):
        y = -r
        axes.text(-0.4, y, f"rank {r}", ha="right", va="center")
        _cells(axes, 0, y, part, CYCLE[r])
        _cells(axes, len(total) + 4, y, total, GREY)
    middle = -(len(parts) - 1) / 2
    arrow(axes, (len(total) + 0.3, middle), (len(total) + 3.7, middle), "all-reduce")
    axes.text(0, 0.75, "before", color=GREY)
    axes.text(len(total) + 4, 0.75, "afterwards, on every rank", color=GREY)
    axes.set_xlim(-2, 2 * len(total) + 4.5)
    axes.set_ylim(-len(parts) + 0.3, 1.3)
    figure.tight_layout()
    return figure


def _cells(axes: Axes, x: float, y: float, numbers: Sequence[float], color: str) -> None:
    for k, number in enumerate(numbers):
        axes.add_patch(
            plt.Rectangle((x + k, y - 0.35), 0.94, 0.7, facecolor=color, alpha=0.35, edgecolor=INK)
        )
        axes.text(x + k + 0.47, y, f"{number:g}", ha="center", va="center", fontsize=10)


def _plain(axes: Axes) -> None:
    axes.set_axis_off()
    axes.grid(False)


def topologies() -> Figure:
    """Who sends to whom in a crossbar, to a central reducer, in a tree, on a ring."""
    use_style()
    figure, row = plt.subplots(1, 4, figsize=(10, 2.9))
    square = [(0, 1.2), (1.2, 1.2), (1.2, 0), (0, 0)]
    star = [(0.6, 1.2), (-0.2, 0), (0.6, 0), (1.4, 0)]
    heap = [(0.6, 1.5), (0.1, 0.75), (1.1, 0.75), (-0.3, 0)]
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    plans = {
        "crossbar": (square, pairs, True),
        "central": (star, [(0, 1), (0, 2), (0, 3)], True),
        "tree": (heap, [(0, 1), (0, 2), (1, 3)], True),
        "ring": (square, [(0, 1), (1, 2), (2, 3), (3, 0)], False),
    }
    for axes, (name, (places, edges, both_ways)) in zip(row, plans.items(), strict=True):
        _plain(axes)
        axes.set_title(name)
        for a, b in edges:
            axes.annotate(
                "",
                places[b],
                places[a],
                arrowprops={
                    "arrowstyle": "<|-|>" if both_ways else "-|>",
                    "color": LOOKS[name][0],
                    "linewidth": 1.8,
                    "shrinkA": 13,
                    "shrinkB": 13,
                },
            )
        for r, (x, y) in enumerate(places):
            axes.plot(x, y, "o", markersize=24, color=SKY, markeredgecolor=INK, zorder=3)
            axes.text(x, y, str(r), ha="center", va="center", zorder=4)
        axes.set_xlim(-0.75, 1.85)
        axes.set_ylim(-0.4, 1.9)
        axes.set_aspect("equal")
    figure.tight_layout()
    figure.alt_text = (
        "Four ways to add up over four ranks. Crossbar: every rank with every other one, both "
        "ways. Central: rank 0 with each of the others. Tree: 0 with 1 and 2, 1 with 3. Ring: 0 "
        "to 1 to 2 to 3 to 0, one way."
    )
    return figure


def ring_plan(p: int = 4) -> Figure:
    """The first two steps of a reduce-scatter: which chunk each rank sends."""
    use_style()
    figure, row = plt.subplots(1, 2, figsize=(9.5, 0.9 + 0.55 * p), sharey=True)
    for step, axes in enumerate(row):
        _plain(axes)
        axes.set_title(f"step {step}")
        for r in range(p):
            axes.text(-0.3, -r, f"rank {r}", ha="right", va="center")
            for k in range(p):
                leaves, comes = k == (r - step) % p, k == (r - step - 1) % p
                held = 1 + (step if k == (r - step) % p else 0)
                color = ORANGE if leaves else SKY if comes else "white"
                axes.add_patch(
                    plt.Rectangle(
                        (k, -r - 0.36), 0.94, 0.72, facecolor=color, alpha=0.6, edgecolor=INK
                    )
                )
                said = f"chunk {k}" + (f"\nof {held}" if held > 1 else "")
                axes.text(k + 0.47, -r, said, ha="center", va="center", fontsize=8.5)
        for r in range(p):
            k, to = (r - step) % p, (r + 1) % p
            if to:
                arrow(axes, (k + 0.8, -r - 0.3), (k + 0.8, -to + 0.3), color=RED)
        axes.text(p + 0.15, -(p - 1) / 2, f"rank {p - 1}\nsends to\nrank 0", va="center", color=RED,
                  fontsize=9)  # fmt: skip
        axes.set_xlim(-1.3, p + 1.3)
        axes.set_ylim(-p + 0.4, 0.6)
    figure.tight_layout()
    figure.alt_text = (
        "Reduce-scatter on a ring, the first two steps. In step 0 rank r sends chunk r to rank "
        "r + 1 and receives chunk r − 1. In step 1 it sends the chunk that it has just added to."
    )
    return figure


def direct_plan(p: int = 4) -> Figure:
    """The two rounds of a direct all-reduce: part k goes to rank k, and its sum to all others."""
    use_style()
    figure, row = plt.subplots(1, 2, figsize=(9.5, 1.2 + 0.55 * p), sharey=True)
    titles = "round 1: part k goes to rank k", "round 2: rank k sends its sum to all"
    for again, (axes, title) in enumerate(zip(row, titles, strict=True)):
        _plain(axes)
        axes.set_title(title, pad=16)
        for r in range(p):
            axes.text(-0.2, -r, f"rank {r}", ha="right", va="center")
        for k in range(p):
            axes.text(k + 0.47, 0.5, f"part {k}", ha="center", fontsize=9)
            for r in range(p):
                alpha = 0.6 if r == k else 0.12
                axes.add_patch(plt.Rectangle((k, -r - 0.36), 0.94, 0.72, facecolor=CYCLE[k],
                                             alpha=alpha, edgecolor=INK))  # fmt: skip
            for turn, r in enumerate(r for r in range(p) if r != k):
                x, side = k + 0.47 + 0.2 * (turn - (p - 2) / 2), 0.2 if k < r else -0.2
                ends = (x, -r + side), (x, -k - side)
                arrow(axes, *(ends[::-1] if again else ends), color=CYCLE[k])
        axes.set_xlim(-1.1, p + 0.1)
        axes.set_ylim(-p + 0.4, 0.7)
    figure.tight_layout()
    figure.alt_text = (
        "A direct all-reduce. In round 1 every rank sends its part k to rank k, which adds up what "
        "comes. In round 2 rank k sends the sum of part k to all other ranks."
    )
    return figure


def levels(m: int = 2, g: int = 3) -> Figure:
    """The three steps of a hierarchical all-reduce, on m machines with g ranks each."""
    use_style()
    figure, row = plt.subplots(1, 3, figsize=(10, 1.1 + 0.85 * m))
    titles = "1: reduce-scatter within", "2: all-reduce between", "3: all-gather within"
    for step, (axes, title) in enumerate(zip(row, titles, strict=True)):
        _plain(axes)
        axes.set_title(title)
        for machine in range(m):
            box = plt.Rectangle((-0.6, -1.3 * machine - 0.45), g + 0.2, 0.9, facecolor="white",
                                edgecolor=GREY)  # fmt: skip
            axes.add_patch(box)
            for place in range(g):
                at, y = float(place), -1.3 * machine
                color = CYCLE[place] if step == 1 else SKY
                axes.plot(at, y, "o", markersize=22, color=color, markeredgecolor=INK, zorder=3)
                axes.text(at, y, str(machine * g + place), ha="center", va="center", zorder=4)
                if step != 1 and place:
                    _both_ways(axes, (at - 1, y), (at, y), ORANGE)
                if step == 1 and machine:
                    _both_ways(axes, (at, y + 1.3), (at, y), CYCLE[place])
        axes.set_xlim(-0.8, g - 0.2)
        axes.set_ylim(-1.3 * (m - 1) - 0.6, 0.6)
    figure.tight_layout()
    figure.alt_text = (
        f"Three steps on {m} machines with {g} ranks each: a reduce-scatter within each machine; "
        "an all-reduce between the ranks that have the same place in their machines; an all-gather "
        "within each machine."
    )
    return figure


def _both_ways(axes: Axes, start: tuple, end: tuple, color: str) -> None:
    style = {"arrowstyle": "<|-|>", "color": color, "linewidth": 1.8, "shrinkA": 12, "shrinkB": 12}
    axes.annotate("", end, start, arrowprops=style)


def stretches_of_time(
    plans: Mapping[str, tuple[int, float]], nbytes: Sequence[int], alpha: float, beta: float
) -> Figure:
    """What each algorithm waits for: latencies (hatched) and bytes (filled), one after the other.

    Args:
        plans: of each algorithm the steps, and how many times n bytes a link carries in a step.
    """
    use_style()
    figure, row = plt.subplots(1, len(nbytes), figsize=(10, 2.6), sharey=True)
    for axes, n in zip(row, nbytes, strict=True):
        for y, (name, (steps, share)) in enumerate(plans.items()):
            start, color = 0.0, LOOKS[name][0]
            for _ in range(steps):
                for width, fill in ((alpha, False), (share * n * beta, True)):
                    axes.barh(
                        y,
                        1e3 * width,
                        left=1e3 * start,
                        height=0.6,
                        color=color if fill else "white",
                        edgecolor=color,
                        hatch=None if fill else "////",
                        linewidth=0.8,
                    )
                    start += width
        axes.set_title(f"{n:,} bytes")
        axes.set_xlabel("time [ms]")
        axes.set_yticks(range(len(plans)), list(plans))
        axes.grid(axis="y", visible=False)
    row[0].invert_yaxis()
    figure.tight_layout()
    said = [
        f"{name}: {steps} steps, each a latency and {share:.3g} times n bytes"
        for name, (steps, share) in plans.items()
    ]
    figure.alt_text = f"Where the time goes by the α–β model. {'; '.join(said)}."
    return figure


def curves(
    measured: Mapping[str, Mapping[int, float]],
    theory: Mapping[str, Callable[[float], float]],
    title: str,
    crossing: float | None = None,
) -> Figure:
    """Times by α–β as lines, measured ones as points, against the bytes of the tensor."""
    use_style()
    figure, axes = plt.subplots(figsize=(8.5, 4.4))
    sizes = sorted({size for points in measured.values() for size in points})
    across = np.geomspace(sizes[0], sizes[-1], 200)
    for name, formula in theory.items():
        axes.loglog(across, [1e3 * formula(n) for n in across], color=LOOKS[name][0], linewidth=1.5)
    for name, points in measured.items():
        color, mark = LOOKS[name]
        times = [1e3 * seconds for seconds in points.values()]
        axes.loglog(list(points), times, mark, color=color, markersize=7, label=name)
    if crossing is not None and math.isfinite(crossing):
        axes.axvline(crossing, color=GREY, linestyle=":")
        low = axes.get_ylim()[0] * 1.15
        axes.text(crossing, low, "your crossover ", color=GREY, ha="right")
    axes.set_yticks([5, 10, 20, 50, 100, 200, 500], ["5", "10", "20", "50", "100", "200", "500"])
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("bytes of the tensor, n")
    axes.set_ylabel("time [ms]")
    axes.set_title(title)
    axes.legend(title="points: measured\nlines: α–β", loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    return figure


def bytes_per_rank(sent: Mapping[str, Sequence[float]], unit: str) -> Figure:
    """Bars: what each rank sent, by algorithm."""
    use_style()
    figure, axes = plt.subplots(figsize=(8.5, 3.2))
    ranks = len(next(iter(sent.values())))
    width = 0.8 / ranks
    for r in range(ranks):
        places = [k - 0.4 + width * (r + 0.5) for k in range(len(sent))]
        values = [of[r] for of in sent.values()]
        axes.bar(places, values, width * 0.9, color=CYCLE[r], label=f"rank {r}")
    axes.set_xticks(range(len(sent)), list(sent))
    axes.set_ylabel(f"sent [{unit}]")
    axes.grid(axis="x", visible=False)
    axes.set_title("What each rank sent")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    return figure


def incast() -> Figure:
    """Three workers, three reducers: all begin with the same one, or each with another."""
    use_style()
    figure, row = plt.subplots(1, 2, figsize=(9, 2.9))
    for axes, rotated in zip(row, (False, True), strict=True):
        _plain(axes)
        axes.set_title("each with another one" if rotated else "all begin with reducer 0")
        for k in range(3):
            for x, name, color in ((0, f"worker {k}", SKY), (4, f"reducer {k}", YELLOW)):
                axes.add_patch(
                    plt.Rectangle(
                        (x - 0.75, -k - 0.3), 1.5, 0.6, facecolor=color, alpha=0.6, edgecolor=INK
                    )
                )
                axes.text(x, -k, name, ha="center", va="center")
            arrow(axes, (0.8, -k), (3.2, -k if rotated else -0.12 * k), color=RED)
        axes.set_xlim(-1, 5)
        axes.set_ylim(-2.6, 0.6)
    figure.tight_layout()
    figure.alt_text = (
        "The first messages of three workers. Left: all three go to reducer 0, whose link is full, "
        "while reducers 1 and 2 wait. Right: worker k begins with reducer k, and all links work."
    )
    return figure


def arrivals(panels: Mapping[str, Sequence[Sequence[dict]]], bandwidth: float) -> Figure:
    """What came over each rank's link when, and from whom.

    Args:
        panels: by title, for each rank its receives: ``from``, ``nbytes``, ``end``; seconds on a
            clock that all share. Ranks that received nothing have no lane.
        bandwidth: bytes per second, for how long a message was on the link.
    """
    use_style()
    lanes = max(sum(map(bool, ranks)) for ranks in panels.values())
    size = (10, 0.9 + 0.5 * lanes)
    figure, row = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    latest, said, numbers = 0.0, [], []
    for axes, (title, by_rank) in zip(row[0], panels.items(), strict=True):
        begin = min(c["end"] - c["nbytes"] / bandwidth for calls in by_rank for c in calls)
        lane = [rank for rank, calls in enumerate(by_rank) if calls]
        for rank in lane:
            for call in by_rank[rank]:
                width = 1e3 * call["nbytes"] / bandwidth
                left = 1e3 * (call["end"] - begin) - width
                color = CYCLE[call["from"] % len(CYCLE)]
                axes.barh(rank, width, left=left, height=0.6, color=color, edgecolor="white")
                numbers.append((axes, left + width / 2, rank, width, call["from"]))
        last = 1e3 * (max(c["end"] for calls in by_rank for c in calls) - begin)
        latest = max(latest, last)
        said.append(f"{title}: the last message is there after {last:.0f} ms")
        axes.set_title(title)
        axes.set_xlabel("time since the first byte came [ms]")
        axes.set_yticks(lane, [f"into rank {rank}" for rank in lane])
        axes.grid(axis="y", visible=False)
    row[0][0].invert_yaxis()
    for axes in row[0]:
        axes.set_xlim(0, 1.03 * latest)
    for axes, middle, rank, width, source in numbers:
        if width > 0.025 * latest * len(panels):  # where a number has room
            axes.text(middle, rank, str(source), ha="center", va="center", color="white",
                      fontsize=9)  # fmt: skip
    figure.tight_layout()
    figure.alt_text = f"Messages on the links into each rank. {'; '.join(said)}."
    return figure
