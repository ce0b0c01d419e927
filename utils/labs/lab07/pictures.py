"""Drawings of parameter servers: which ranks wait, and by how many updates gradients are late.

The results of a run are a list of pairs (worker, staleness), one for each update of the server. A
bound of ``math.inf`` means no bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tabulate import tabulate

from utils.figures import (
    BLUE,
    COMMUNICATING,
    COMPUTING,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PINK,
    RED,
    SKY,
    WAITING_LOOK,
    rank_color,
)
from utils.figures.charts import add_lanes, chart, finish, keys, legend_beside, panels
from utils.figures.shapes import arrow, canvas, cell, frame, rank_box
from utils.labs.lab07.bounded_steps import bounded_run

Applied = Sequence[tuple[int, int]]

# The line style shows the rank as well as its color does.
LINES = ("-", "-", "--", "-.", ":")
MODEL_COLORS = (BLUE, SKY, ORANGE, GREEN, PINK, RED)
# A run's accuracy is the mean over so many last snapshots, because single ones vary.
LAST = 8
# A table shows the time until a run has this accuracy.
GOAL = 0.7


def star(workers: int, servers: int = 1) -> Figure:
    """Draw workers, and one or more servers that hold the weights or parts of them.

    The servers are the first ranks, and the workers follow.
    """
    _, axes = canvas(9, 3.0)
    middle = 3.2 * (workers - 1) / 2
    for j in range(servers):
        x = middle + 4.2 * (j - (servers - 1) / 2)
        part = "the weights" if servers == 1 else f"part {j} of the weights"
        rank_box(axes, x, 3, j, f"server\n{part}", width=3.4, height=1.0)
        for i in range(workers):
            left = 3.2 * i - 0.35
            arrow(axes, (x - 0.25, 2.45), (left, 0.45), color=COMMUNICATING)
            arrow(axes, (left + 0.7, 0.45), (x + 0.25, 2.45), color=COMMUNICATING, style=":")
    for i in range(workers):
        words = f"worker {i + 1}\nminibatches"
        rank_box(axes, 3.2 * i, 0, servers + i, words, width=2.4, height=0.9)
    right = 3.2 * (workers - 1) + 2.2
    axes.text(right, 1.8, "— weights", color=COMMUNICATING, va="center")
    axes.text(right, 1.2, "┈ gradients", color=COMMUNICATING, va="center")
    cut = "" if servers == 1 else " Each server has a part of the weights."
    words = (
        f"{servers} server{'s' * (servers > 1)} above {workers} workers. Weights go down to each "
        f"worker, and gradients go up from each worker.{cut}"
    )
    return frame(axes, (-1.55, right + 1.35), (-0.65, 3.65), words, equal=True)


def updates_between() -> Figure:
    """Draw what staleness counts: updates after weights are sent and before their gradient."""
    _, axes = canvas(10, 2.4)
    axes.plot([0, 10.6], [0, 0], color=INK, linewidth=1.5)
    own = {1.0: 2, 2.6: 1, 4.2: 2, 5.6: 1, 6.8: 2, 8.6: 3}
    for version, (x, worker) in enumerate(own.items(), 1):
        axes.plot(x, 0, "o", markersize=11, color=rank_color(worker), markeredgecolor=INK)
        axes.text(x, -0.28, f"{version}", ha="center", va="top")
    axes.plot([1.8, 8.6], [0.62, 0.62], color=COMPUTING, linewidth=9, solid_capstyle="butt")
    axes.text(5.2, 0.8, "worker 3 computes", ha="center", va="bottom")
    for x, words in ((1.8, "weights of version 1 sent"), (8.6, "its gradient is update 6")):
        axes.plot([x, x], [0, 0.6], color=rank_color(3), linestyle=":", linewidth=1.5)
        axes.text(x, 0.8, words, ha="right" if x < 5 else "left", va="bottom", fontsize=10)
    axes.text(5.2, -0.75, "updates 2, 3, 4 and 5 come between: staleness 4", ha="center", va="top")
    axes.text(10.7, 0, "updates of\nthe server", va="center", fontsize=10)
    described = (
        "The server's updates 1 to 6 on a line. Worker 3 gets the weights after update 1, and its "
        "gradient is update 6. Other workers' updates 2 to 5 come between, so its staleness is 4."
    )
    return frame(axes, (-0.6, 12.2), (-1.15, 1.15), described)


def histograms(staleness: Mapping[int, Sequence[int]]) -> Figure:
    """Draw a histogram of the staleness for each number of workers."""
    figure, all_axes = panels(9, 2.9, columns=len(staleness), sharey=True)
    most = max(max(values) for values in staleness.values())
    for axes, (workers, values) in zip(all_axes, staleness.items(), strict=True):
        heights = [100 * values.count(s) / len(values) for s in range(most + 1)]
        axes.bar(range(most + 1), heights, color=SKY)
        mean = _mean(values)
        axes.axvline(mean, color=RED, linestyle="--", linewidth=1.5)
        axes.set_title(f"{workers} worker{'s' * (workers > 1)}\nmean {mean:.2f}", fontsize=11)
        step = 1 if most < 8 else 2 if most < 16 else 5
        axes.set(xlabel="staleness", xticks=range(0, most + 1, step))
        axes.grid(axis="x", visible=False)
    all_axes[0].set_ylabel("share of the gradients [%]")
    return finish(figure)


def of_each_worker(applied: Applied) -> Figure:
    """Draw the staleness of each gradient in the order of the updates, by worker."""
    figure, axes = chart(9, 3.2)
    for worker in sorted({worker for worker, _ in applied}):
        points = [(k, stale) for k, (w, stale) in enumerate(applied) if w == worker]
        mean = _mean([stale for _, stale in points])
        label = f"rank {worker}: {len(points)} gradients, mean {mean:.1f}"
        look = {"color": rank_color(worker), "markeredgecolor": INK, "markeredgewidth": 0.6}
        axes.plot(*zip(*points, strict=True), "os^Dv"[worker % 5], label=label, **look)
    mean = _mean([stale for _, stale in applied])
    axes.axhline(mean, color=RED, linestyle="--", linewidth=1.5, label=f"mean of all: {mean:.2f}")
    axes.set_title("Three workers, rank 3 sleeps six times as long")
    axes.set(xlabel="number of the update", ylabel="staleness [updates]")
    legend_beside(axes)
    return finish(figure)


def plan(bounds: Sequence[int | None], steps: Sequence[int], until: int = 24) -> Figure:
    """Draw a plan of when workers compute and wait, if their steps take so many units of time.

    A bound of None means no bound. Messages take no time here.
    """
    figure, all_axes = panels(9, 1.15 * len(bounds) + 0.9, rows=len(bounds), sharex=True)
    gradients = []
    for axes, bound in zip(all_axes, bounds, strict=True):
        done = _planned(axes, math.inf if bound is None else bound, steps, until)
        add_lanes(axes, [f"worker {k + 1}" for k in range(len(steps))], until)
        axes.set_title(f"s = {'∞' if bound is None else bound}: {done} gradients", fontsize=11)
        gradients.append(f"{done} with {'no bound' if bound is None else f'bound {bound}'}")
    all_axes[-1].set_xlabel("time [units]")
    handles = [*keys({"computes": COMPUTING}), Patch(label="waits at the bound", **WAITING_LOOK)]
    figure.legend(handles=handles, loc="upper right", ncols=2, fontsize=10)
    words = (
        f"A plan of {len(steps)} workers whose steps take {', '.join(map(str, steps))} units, over "
        f"{until} units of time. Gradients: {', '.join(gradients)}. With a bound, the fast workers "
        "wait for the slowest, and the larger the bound is, the later they begin to wait."
    )
    return finish(figure, words)


def _planned(axes: Axes, bound: float, steps: Sequence[int], until: int) -> int:
    """Draw one panel; return the number of steps that were completed."""
    run = bounded_run(steps, bound, until)
    for worker, begin, end, waits in run.bars:
        look = {"linewidth": 0.8} | (WAITING_LOOK if waits else {})
        cell(axes, begin, worker, end - begin, COMPUTING, height=0.7, **look)
    return len(run.staleness)


def clocks(served: Mapping[float, Applied]) -> Figure:
    """Draw the clock of each worker over the updates, for each bound."""
    figure, all_axes = panels(9, 3.1, columns=len(served), sharey=True)
    for axes, (bound, applied) in zip(all_axes, served.items(), strict=True):
        for worker in sorted({worker for worker, _ in applied}):
            clock = [0]
            for one, _ in applied:
                clock.append(clock[-1] + (one == worker))
            look = {"color": rank_color(worker), "linestyle": LINES[worker % len(LINES)]}
            axes.step(range(len(clock)), clock, where="post", label=f"rank {worker}", **look)
        shown = "∞" if bound == math.inf else f"{bound:g}"
        axes.set_title(f"s = {shown}\n{len(applied)} gradients", fontsize=11)
        axes.set_xlabel("updates")
    all_axes[0].set_ylabel("clock")
    all_axes[0].legend(loc="upper left", fontsize=9)
    return finish(figure)


def lost_updates(lost: Mapping[str, float], ranks: int) -> Figure:
    """Draw the shares of lost updates as bars, and the largest possible share."""
    figure, axes = chart(8, 2.4)
    names = list(lost)
    axes.barh(names, [100 * lost[name] for name in names], color=SKY, height=0.6)
    for row, name in enumerate(names):
        axes.text(100 * lost[name] + 1, row, f"{100 * lost[name]:.3g} %", va="center")
    most = 100 * (1 - 1 / ranks)
    axes.axvline(most, color=RED, linestyle="--", linewidth=1.5)
    axes.text(most - 1, len(names) - 0.45, f"1 − 1/{ranks}", color=RED, ha="right", va="bottom")
    axes.set(xlim=(0, 100), ylim=(-0.5, len(names) - 0.1), xlabel="lost updates [%]")
    axes.grid(axis="y", visible=False)
    return finish(figure)


def locks(found: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw how many updates arrived with and without a lock, and the accuracy that they gave.

    ``found`` has, for each way, the counts "pushed" and "arrived", and the "accuracy".
    """
    figure, (left, right) = panels(9, 0.5 * len(found) + 1.2, columns=2, sharey=True)
    names = list(found)
    pushed, arrived = ([run[key] for run in found.values()] for key in ("pushed", "arrived"))
    lost = [all_ - some for all_, some in zip(pushed, arrived, strict=True)]
    bars = left.barh(names, arrived, 0.6, color=SKY, edgecolor=INK, label="arrived")
    left.bar_label(bars, label_type="center")
    look = {"color": PALE, "edgecolor": RED, "hatch": "xx", "label": "lost"}
    left.barh(names, lost, 0.6, left=arrived, **look)
    left.set(xlabel="updates", title="Updates")
    left.legend(loc="lower center", bbox_to_anchor=(0.65, 1), ncols=2, fontsize=10)
    percent = [100 * run["accuracy"] for run in found.values()]
    bars = right.barh(names, percent, 0.6, color=SKY, edgecolor=INK)
    right.bar_label(bars, fmt="%.0f", padding=3)
    right.set(xlabel="test accuracy [%]", title="What the model learned", xlim=(0, 100))
    for axes in (left, right):
        axes.grid(axis="y", visible=False)
    left.invert_yaxis()
    words = [
        f"{name}: {run['arrived']} of {run['pushed']} updates arrived, accuracy {a:.0f} %."
        for (name, run), a in zip(found.items(), percent, strict=True)
    ]
    return finish(figure, "Three server processes. " + " ".join(words))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def final_accuracy(run: Mapping) -> float:
    """Return the mean over a run's last snapshots."""
    return _mean([accuracy for *_, accuracy in run["curve"][-LAST:]])


def seconds_to(run: Mapping, accuracy: float) -> float | None:
    """Return the seconds until a run had this accuracy, or None if it never did."""
    return next((now for now, _, a in _smooth(run["curve"]) if a >= accuracy), None)


def races(runs_of: Mapping[str, Mapping[str, Mapping]]) -> Figure:
    """Draw accuracy over time and over gradients, with a row for each kind of slowness."""
    figure, grid = panels(9, 3.6 * len(runs_of), rows=len(runs_of), columns=2, sharey=True)
    styles = [*zip(MODEL_COLORS, ("-", "-", "-", "--", "-."), strict=False)]
    for row, (kind, runs) in enumerate(runs_of.items()):
        left, right = grid[2 * row : 2 * row + 2]
        for (color, style), (name, run) in zip(styles, runs.items(), strict=False):
            seconds, gradients, accuracy = zip(*_smooth(run["curve"]), strict=True)
            percent = [100 * share for share in accuracy]
            look = {"color": color, "label": f"{name}: staleness {_mean(run['staleness']):.1f}"}
            left.plot(seconds, percent, style, **look)
            right.plot(gradients, percent, style, **look)
        left.set_title(f"{kind}: accuracy over time", fontsize=11)
        right.set_title(f"{kind}: accuracy over gradients", fontsize=11)
        left.set(xlabel="time [s]", ylabel="test accuracy [%]", ylim=(30, 90))
        right.set_xlabel("gradients")
        right.legend(loc="lower right", fontsize=9)
    return finish(figure)


def _smooth(curve: Sequence[tuple]) -> list[tuple]:
    """Return means of three snapshots in a row, because one snapshot varies by several percent."""
    return [
        tuple(sum(column) / 3 for column in zip(*curve[k : k + 3], strict=True))
        for k in range(len(curve) - 2)
    ]


def race_table(found: Mapping[str, Mapping[str, Mapping]]) -> None:
    """Print gradients, staleness and accuracy of each run."""
    heads = ["gradients", "mean staleness", "largest", f"{100 * GOAL:.0f} % after", "accuracy"]
    align = ("left", *["right"] * 6)
    for kind, runs in found.items():
        rows = []
        for name, run in runs.items():
            after = seconds_to(run, GOAL)
            late = run["staleness"]
            when = "never" if after is None else f"{after:.1f} s"
            accuracy = f"{100 * final_accuracy(run):.1f} %"
            lost = f"{100 * run['lost']:.2f} %" if "lost" in run else ""
            mean = f"{_mean(late):.2f}"
            rows.append([name, run["gradients"], mean, max(late), when, accuracy, lost])
        form = {"tablefmt": "simple", "colalign": align, "disable_numparse": True}
        print(tabulate(rows, [kind, *heads, "lost updates"], **form), end="\n\n")


def delays(versions: Sequence[int], accuracies: Mapping[str, Sequence[float]]) -> Figure:
    """Draw accuracy against the number of versions by which each gradient was late."""
    figure, axes = chart(8, 3.3)
    for mark, (name, accuracy) in zip("os^", accuracies.items(), strict=False):
        axes.plot(range(len(versions)), [100 * a for a in accuracy], f"{mark}-", label=name)
    axes.set_xticks(range(len(versions)), [str(d) for d in versions])
    axes.axhline(10, color=GREY, linestyle=":", linewidth=1.5, label="chance")
    axes.set_title("300 gradients, each applied late")
    axes.set(ylim=(0, 100), xlabel="versions late", ylabel="test accuracy [%]")
    axes.legend()
    return finish(figure)


def bottleneck(
    rates: Mapping[int, Mapping], *, nbytes: float, bandwidth: float, compute: float, latency: float
) -> Figure:
    """Draw updates per second against the number of workers, and the cap of the servers.

    ``rates`` has, for each number of servers, the updates per second by the number of workers. The
    lines are theory: the workers set the rate until the servers' links are full.
    """
    figure, axes = chart(8, 3.8)
    most = max(max(of) for of in rates.values())
    for color, mark, (servers, of) in zip((BLUE, ORANGE), "os", rates.items(), strict=False):
        cap = servers * bandwidth / nbytes
        # The parts leave a worker one after the other, and a server answers each at once.
        alone = 1 / (compute + 2 * latency + (1 + 1 / servers) * nbytes / bandwidth)
        named = f"{servers} server{'s' * (servers > 1)}"
        workers = [1 + (most - 1) * k / 100 for k in range(101)]
        theory = [min(w * alone, cap) for w in workers]
        axes.plot(workers, theory, color=color, linewidth=1, alpha=0.6)
        axes.axhline(cap, color=color, linestyle="--", linewidth=1.2)
        axes.text(most + 0.5, cap + 0.7, f"cap {cap:.0f}", color=color, ha="right", va="bottom")
        axes.plot(list(of), list(of.values()), mark, color=color, markersize=9, label=named)
    axes.set(xticks=range(1, most + 1), xlim=(0.8, most + 0.6))
    axes.set_ylim(bottom=0)
    axes.set_title("A server receives what fits through its link")
    axes.set(xlabel="workers", ylabel="updates per second")
    axes.legend(loc="upper left")
    return finish(figure)
