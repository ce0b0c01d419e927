"""Drawings of elastic averaging: springs to a center, two loops, and paths of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import COMMUNICATING, COMPUTING, GREY, INK, ink_on, rank_color
from utils.figures.charts import add_lanes, finish, legend_below, panels
from utils.figures.shapes import arrow, box, canvas, cell, frame, link

#: Workers 1 to 3 are ranks 1 to 3; rank 0 has the center.
WORKERS = tuple(map(rank_color, (1, 2, 3)))


def springs() -> Figure:
    """Draw three workers on springs to the center, and the gradient that drives each one away."""
    _, axes = canvas(8.6, 4.2)
    for k, degrees in enumerate((150, 35, -60)):
        angle = math.radians(degrees)
        at = np.array([2.7 * math.cos(angle), 1.75 * math.sin(angle)])
        _spring(axes, at, WORKERS[k])
        out = at / np.linalg.norm(at)
        turned = np.array([-out[1], out[0]]) * 0.6 + out * 0.9
        arrow(axes, tuple(at + 0.25 * turned), tuple(at + 1.15 * turned), color=WORKERS[k])
        axes.plot(*at, "o", color=WORKERS[k], markersize=26)
        axes.text(*at, f"$W^{k + 1}$", ha="center", va="center", color=ink_on(WORKERS[k]))
        label = at + 1.15 * turned + 0.42 * (turned / np.linalg.norm(turned))
        axes.text(*label, rf"$-\eta\,\Delta W^{k + 1}$", ha="center", va="center")
    axes.plot(0, 0, "o", color=INK, markersize=30)
    axes.text(0, 0, r"$\bar{W}$", ha="center", va="center", color="white")
    axes.text(-4.5, -1.5, "a spring pulls both of its ends:", color=GREY)
    axes.text(-4.5, -1.95, r"$\eta\rho\,(W^i-\bar{W})$, with opposite signs", color=GREY)
    words = (
        "A center, and three workers around it. A spring connects each worker with the center and "
        "pulls both of them. An arrow from each worker shows the step along its gradient, which "
        "leads away in a different direction."
    )
    return frame(axes, (-4.7, 3.6), (-2.3, 2.5), words, equal=True)


def _spring(axes: Axes, end: np.ndarray, color: str) -> None:
    along = np.linspace(0, 1, 200)
    across = np.array([-end[1], end[0]]) / np.linalg.norm(end)
    swing = 0.13 * np.sin(2 * math.pi * 9 * along) * (abs(along - 0.5) < 0.32)
    points = along[:, None] * end + swing[:, None] * across
    axes.plot(*points.T, color=color, linewidth=1.6)


def two_loops() -> Figure:
    """Draw DiLoCo over time: inner steps without communication, then one outer step."""
    tau = 5
    _, axes = canvas(9.6, 3.4)
    width = tau + 2.4
    for worker in range(3):
        for round_ in range(2):
            for k in range(tau):
                x = round_ * width + k
                box(axes, x, 2 - worker, "", width=0.8, height=0.5, color=COMPUTING, alpha=1.0)
        axes.text(-0.8, 2 - worker, f"worker {worker + 1}", ha="right", va="center")
    for round_ in range(2):
        x = round_ * width + tau + 0.35
        look = {"color": COMMUNICATING, "alpha": 1.0}
        box(axes, x, 1, "outer\nstep", width=1.5, height=2.6, **look)
    link(axes, (-0.5, -0.75), (tau - 0.5, -0.75), "<->")
    axes.text((tau - 1) / 2, -1.2, r"$\tau$ inner steps: no communication", ha="center")
    axes.text(width + tau + 1.1, -1.2, r"one all_reduce of $\bar{W} - W^i$", ha="right", color=INK)
    words = (
        f"Three workers over time, in two rounds. In each round, every worker takes {tau} inner "
        "steps without communication, and then all take one outer step together, which needs one "
        "all_reduce."
    )
    return frame(axes, (-3.2, 2 * width + 1.2), (-1.6, 2.8), words)


def paths(runs: Mapping[str, Sequence], loss: Mapping[str, Sequence] | None = None) -> Figure:
    """Draw the paths of center and workers in a plane.

    Args:
        runs: by title, the points ``[[x, y], …]`` of the center, and then of each worker.
        loss: "x", "y" and "z" of a grid over the plane, drawn as contours behind the paths.
    """
    shared = {"sharex": True, "sharey": True}
    figure, row = panels(4.5 * len(runs), 4.4, columns=len(runs), **shared)
    for axes, (title, tracks) in zip(row, runs.items(), strict=True):
        if loss:
            z = np.asarray(loss["z"])
            levels = np.geomspace(z.min() * 1.02, z.max(), 12)
            axes.contour(loss["x"], loss["y"], z, levels=levels, colors=GREY, linewidths=0.5)
        for k, (points, color) in enumerate(zip(tracks, (INK, *WORKERS), strict=False)):
            x, y = np.asarray(points).T
            look = {"label": "center", "linewidth": 2.6, "zorder": 3}
            if k:
                look = {"label": f"worker {k}", "linewidth": 1.4, "zorder": 2}
            axes.plot(x, y, "-", color=color, **look)
            axes.plot(x[-1], y[-1], "o" if k else "D", color=color, markersize=7, zorder=4)
        axes.set(title=title, xlabel="first principal component")
        axes.grid(False)
    row[0].set_ylabel("second principal component")
    legend_below(figure, row[-1])
    return finish(figure, below=0.07)


def turns(lanes: Mapping[str, Mapping[str, Sequence[tuple]]], first: int, last: int) -> Figure:
    """Draw turns of round robin: what is on the line, and what computes, when.

    Args:
        lanes: by title, for each lane, a span (start, end) in seconds for each turn. The lane
            "computing" computes, and all others communicate. A turn ends with its "weights".
        first, last: the turns to draw, counted from 0; not the first of all.
    """
    figure, rows = panels(9, 1.75 * len(lanes) + 0.6, rows=len(lanes), sharex=True)
    begins = {title: of["weights"][first - 1][1] for title, of in lanes.items()}
    took = {title: 1e3 * (of["weights"][last][1] - begins[title]) for title, of in lanes.items()}
    words = []
    for axes, (title, of_lanes) in zip(rows, lanes.items(), strict=True):
        add_lanes(axes, list(of_lanes), 1.02 * max(took.values()))
        words.append(f"{title}: {took[title] / (last - first + 1):.0f} ms for a turn")
        axes.set_title(words[-1], fontsize=11)
        for row, (name, spans) in enumerate(of_lanes.items()):
            color = COMPUTING if name == "computing" else COMMUNICATING
            for t, (start, end) in enumerate(spans[: last + 1]):
                left = 1e3 * (start - begins[title])
                if left >= -1:
                    worker = f"{1 + t % len(WORKERS)}"
                    cell(axes, left, row, 1e3 * (end - start), color, worker, linewidth=0.5)
    rows[-1].set_xlabel("time [ms]; each number is a worker")
    said = (
        "What is on the line and which worker computes, in some turns of round robin. If the batch "
        "is sent ahead, the next worker's batch is on the line while this worker computes. "
    )
    return finish(figure, f"{said}{'. '.join(words)}.")
