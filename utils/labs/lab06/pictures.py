"""Drawings of lab 06: which ranks talk to each other, predicted times, and measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import (
    BLUE,
    COMMUNICATING,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    RANKS,
    RED,
    SHARED,
    WAITING_LOOK,
    ink_on,
    rank_color,
    tint,
)
from utils.figures.charts import chart, finish, group_bars, legend_beside, panels
from utils.figures.shapes import arrow, cell, link

#: One color and one mark for each algorithm, in all curves.
LOOKS = {
    "crossbar": (BLUE, "o"),
    "central": (RED, "s"),
    "tree": (GREEN, "^"),
    "ring": (ORANGE, "D"),
    "direct": (PINK, "P"),
    "backend": (INK, "x"),
}


def task_picture(parts: Sequence[Sequence[float]]) -> Figure:
    """Draw what an all-reduce does: each rank's tensor before and after."""
    figure, (axes,) = _drawings(9, 0.6 + 0.55 * len(parts), [""])
    total = [sum(column) for column in zip(*parts, strict=True)]
    after = len(total) + 4
    look = {"height": 0.7, "fontsize": 10}
    for r, part in enumerate(parts):
        axes.text(-0.4, -r, f"rank {r}", ha="right", va="center")
        for x, numbers, color in ((0, part, rank_color(r)), (after, total, SHARED)):
            for k, number in enumerate(numbers):
                cell(axes, x + k, -r, 0.94, color, f"{number:g}", **look)
    middle = -(len(parts) - 1) / 2
    arrow(axes, (len(total) + 0.3, middle), (len(total) + 3.7, middle), "all-reduce")
    axes.text(0, 0.75, "before", color=GREY)
    axes.text(after, 0.75, "after, on every rank", color=GREY)
    axes.set(xlim=(-2, 2 * len(total) + 4.5), ylim=(-len(parts) + 0.3, 1.3))
    return finish(figure)


def _drawings(width: float, height: float, titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size with a row of axes without frames."""
    figure, row = panels(width, height, columns=len(titles))
    for axes, title in zip(row, titles, strict=True):
        axes.set_axis_off()
        axes.grid(False)
        axes.set_title(title)
    return figure, row


def _dot(axes: Axes, x: float, y: float, rank: int, size: float) -> None:
    """Draw a rank as a dot with its number."""
    color = rank_color(rank)
    axes.plot(x, y, "o", markersize=size, color=color, markeredgecolor=INK, zorder=3)
    axes.text(x, y, str(rank), ha="center", va="center", color=ink_on(color), zorder=4)


def _link(axes: Axes, start: tuple, end: tuple, style: str = "<|-|>", shrink: float = 12) -> None:
    """Draw an arrow from dot to dot, with two heads unless `style` has one."""
    look = {"linewidth": 1.8, "shrinkA": shrink, "shrinkB": shrink}
    link(axes, start, end, style, color=COMMUNICATING, **look)


def topologies() -> Figure:
    """Draw which ranks communicate in a crossbar, with a central reducer, in a tree, on a ring."""
    square = [(0, 1.2), (1.2, 1.2), (1.2, 0), (0, 0)]
    star = [(0.6, 1.2), (-0.2, 0), (0.6, 0), (1.4, 0)]
    heap = [(0.6, 1.5), (0.1, 0.75), (1.1, 0.75), (-0.3, 0)]
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    plans = {
        "crossbar": (square, pairs, "<|-|>"),
        "central": (star, [(0, 1), (0, 2), (0, 3)], "<|-|>"),
        "tree": (heap, [(0, 1), (0, 2), (1, 3)], "<|-|>"),
        "ring": (square, [(0, 1), (1, 2), (2, 3), (3, 0)], "-|>"),
    }
    figure, row = _drawings(9, 2.7, list(plans))
    for axes, (places, edges, style) in zip(row, plans.values(), strict=True):
        for a, b in edges:
            _link(axes, places[a], places[b], style, shrink=13)
        for r, (x, y) in enumerate(places):
            _dot(axes, x, y, r, 24)
        axes.set(xlim=(-0.75, 1.85), ylim=(-0.4, 1.9))
        axes.set_aspect("equal")
    words = (
        "Four ways to sum over four ranks. In the crossbar, all ranks send to all others. In "
        "central, rank 0 exchanges messages with ranks 1, 2 and 3. In the tree, rank 0 does so "
        "with ranks 1 and 2, and rank 1 with rank 3. The ring goes from 0 to 1, 2, 3 and back to 0."
    )
    return finish(figure, words)


def ring_plan() -> Figure:
    """Draw which chunk each rank sends in the first two rounds of a reduce-scatter."""
    p = 4
    figure, row = _drawings(9, 0.9 + 0.55 * p, ["round 0", "round 1"])
    for step, axes in enumerate(row):
        for r in range(p):
            axes.text(-0.3, -r, f"rank {r}", ha="right", va="center")
            leaves = (r - step) % p
            comes = (r - step - 1) % p
            for k in range(p):
                color = tint(COMMUNICATING, {leaves: 1.0, comes: 0.2}.get(k, 0.0))
                text = f"chunk {k}\nof 2" if k == leaves and step else f"chunk {k}"
                cell(axes, k, -r, 0.94, color, text, height=0.72, fontsize=9)
        for r in range(p - 1):
            x = (r - step) % p + 0.8
            arrow(axes, (x, -r - 0.3), (x, -r - 0.7), color=INK)
        text = f"rank {p - 1}\nsends to\nrank 0"
        axes.text(p + 0.15, -(p - 1) / 2, text, va="center", fontsize=9)
        axes.set(xlim=(-1.3, p + 1.3), ylim=(-p + 0.4, 0.6))
    words = (
        "The first two rounds of a reduce-scatter on a ring. In round 0, rank r sends chunk r to "
        "rank r + 1 and receives chunk r − 1. In round 1, it sends the chunk it has just added to."
    )
    return finish(figure, words)


def direct_plan() -> Figure:
    """Draw the two rounds of a direct all-reduce: part k to rank k, and its sum to all others."""
    p = 4
    titles = "round 1: part k goes to rank k", "round 2: rank k sends its sum to all"
    figure, row = _drawings(9, 1.2 + 0.55 * p, titles)
    for again, axes in enumerate(row):
        axes.set_title(titles[again], pad=16)
        for r in range(p):
            axes.text(-0.2, -r, f"rank {r}", ha="right", va="center")
        for k in range(p):
            axes.text(k + 0.47, 0.5, f"part {k}", ha="center", fontsize=9)
            for r in range(p):
                color = tint(rank_color(k), 0.6 if r == k else 0.15)
                cell(axes, k, -r, 0.94, color, height=0.72)
            others = [r for r in range(p) if r != k]
            for turn, r in enumerate(others):
                x = k + 0.47 + 0.2 * (turn - (p - 2) / 2)
                side = math.copysign(0.2, r - k)
                ends = [(x, -r + side), (x, -k - side)]
                arrow(axes, *(reversed(ends) if again else ends), color=COMMUNICATING)
        axes.set(xlim=(-1.1, p + 0.1), ylim=(-p + 0.4, 0.7))
    words = (
        "A direct all-reduce. In round 1, every rank sends its part k to rank k, which adds up "
        "what arrives. In round 2, rank k sends the sum of part k to all other ranks."
    )
    return finish(figure, words)


def incast() -> Figure:
    """Draw three workers that all begin with the same reducer, or with different ones."""
    figure, row = _drawings(9, 2.9, ["all begin with reducer 0", "worker k begins with reducer k"])
    for lower, axes in zip((0.12, 1), row, strict=True):
        for k in range(3):
            cell(axes, -0.75, -k, 1.5, rank_color(k), f"worker {k}", height=0.6)
            cell(axes, 3.25, -k, 1.5, rank_color(3 + k), f"reducer {k}", height=0.6)
            arrow(axes, (0.8, -k), (3.2, -lower * k), color=COMMUNICATING)
        axes.set(xlim=(-1, 5), ylim=(-2.6, 0.6))
    words = (
        "The first messages of three workers. Left: all three go to reducer 0 and fill its link, "
        "while reducers 1 and 2 wait. Right: worker k begins with reducer k, and all links work."
    )
    return finish(figure, words)


def levels(m: int = 2, g: int = 3) -> Figure:
    """Draw the three steps of a hierarchical all-reduce, on m machines with g ranks each."""
    titles = "1: reduce-scatter within", "2: all-reduce between", "3: all-gather within"
    figure, row = _drawings(9, 1.1 + 0.85 * m, titles)
    for step, axes in enumerate(row):
        between = step == 1
        for machine in range(m):
            y = -1.3 * machine
            cell(axes, -0.6, y, g + 0.2, "white", height=0.9, edgecolor=GREY)
            for x in range(g):
                _dot(axes, x, y, machine * g + x, 22)
                if between and machine:
                    _link(axes, (x, y + 1.3), (x, y))
                if x and not between:
                    _link(axes, (x - 1, y), (x, y))
        axes.set(xlim=(-0.8, g - 0.2), ylim=(-1.3 * (m - 1) - 0.6, 0.6))
    words = (
        f"Three steps on {m} machines with {g} ranks each: first a reduce-scatter within each "
        "machine, then an all-reduce between the ranks at the same place on their machines, and "
        "finally an all-gather within each machine."
    )
    return finish(figure, words)


def stretches_of_time(
    plans: Mapping[str, tuple[int, float]], nbytes: Sequence[int], alpha: float, beta: float
) -> Figure:
    """Draw the latencies (hatched) and bytes (filled) that each algorithm waits for, in order.

    Args:
        plans: for each algorithm, the steps and how many times n bytes a link carries in a step.
    """
    figure, row = panels(9, 2.6, columns=len(nbytes), sharey=True)
    for axes, n in zip(row, nbytes, strict=True):
        for y, (steps, share) in enumerate(plans.values()):
            sends = {"facecolor": COMMUNICATING, "edgecolor": "white", "linewidth": 0.8}
            start = 0.0
            for seconds, look in steps * [(alpha, WAITING_LOOK), (share * n * beta, sends)]:
                axes.barh(y, 1e3 * seconds, 0.6, 1e3 * start, **look)
                start += seconds
        axes.set(title=f"{n:,} bytes", xlabel="time [ms]")
        axes.set_yticks(range(len(plans)), list(plans))
        axes.grid(axis="y", visible=False)
    row[0].invert_yaxis()
    words = [
        f"{name}: {steps} steps, each with a latency and {share:.3g} times n bytes"
        for name, (steps, share) in plans.items()
    ]
    return finish(figure, f"What each algorithm waits for by α–β. {'; '.join(words)}.")


def curves(
    measured: Mapping[str, Mapping[int, float]],
    theory: Mapping[str, Callable[[float], float]],
    title: str,
    crossing: float | None = None,
) -> Figure:
    """Draw times by α–β as lines and measured times as points, against the tensor's bytes."""
    figure, axes = chart(8.5, 4.4)
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
    axes.set(xlabel="bytes of the tensor, n", ylabel="time [ms]", title=title)
    legend_beside(axes, title="points: measured\nlines: α–β")
    return finish(figure)


def bytes_per_rank(sent: Mapping[str, Sequence[float]], unit: str) -> Figure:
    """Draw bars of what each rank sent, by algorithm."""
    figure, axes = chart(8.5, 3.2)
    heights = {f"rank {r}": sizes for r, sizes in enumerate(zip(*sent.values(), strict=True))}
    group_bars(axes, heights, list(sent), colors=RANKS)
    axes.set(ylabel=f"sent [{unit}]", title="What each rank sent")
    legend_beside(axes)
    return finish(figure)


def arrivals(received: Mapping[str, Sequence[Sequence[dict]]], bandwidth: float) -> Figure:
    """Draw when each message came over a rank's link, and from which rank.

    Args:
        received: by title, the receives of each rank: ``from``, ``nbytes``, ``end`` (seconds on a
            common clock). Ranks that received nothing have no lane.
        bandwidth: bytes per second, which gives the time of a message on the link.
    """
    lanes = max(sum(map(bool, ranks)) for ranks in received.values())
    figure, row = panels(9, 0.9 + 0.5 * lanes, columns=len(received), sharey=True)
    bars_of = [_bars(by_rank, bandwidth) for by_rank in received.values()]
    ends = [max(left + width for _, left, width, _ in bars) for bars in bars_of]
    for axes, title, bars in zip(row, received, bars_of, strict=True):
        lane = sorted({rank for rank, *_ in bars})
        for rank, left, width, source in bars:
            color = rank_color(source)
            axes.barh(rank, width, left=left, height=0.6, color=color, edgecolor="white")
            if width > 0.025 * max(ends) * len(received):  # there is room for a number
                look = {"ha": "center", "va": "center", "color": ink_on(color), "fontsize": 9}
                axes.text(left + width / 2, rank, str(source), **look)
        axes.set(title=title, xlabel="time since the first byte arrived [ms]")
        axes.set_yticks(lane, [f"into rank {rank}" for rank in lane])
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.03 * max(ends))
    row[0].invert_yaxis()
    words = [
        f"{title}: the last message has arrived after {end:.0f} ms"
        for title, end in zip(received, ends, strict=True)
    ]
    return finish(figure, f"Messages on the links into each rank. {'; '.join(words)}.")


def _bars(by_rank: Sequence[Sequence[dict]], bandwidth: float) -> list[tuple]:
    """Return (rank, begin, width, source) of each message, in ms since the first byte arrived."""
    bars = []
    for rank, calls in enumerate(by_rank):
        for call in calls:
            width = 1e3 * call["nbytes"] / bandwidth
            bars.append((rank, 1e3 * call["end"] - width, width, call["from"]))
    begin = min(left for _, left, *_ in bars)
    return [(rank, left - begin, width, source) for rank, left, width, source in bars]
