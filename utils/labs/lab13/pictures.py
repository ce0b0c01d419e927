"""Pictures of deaths and checkpoints, and of what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from utils.figures import (
    BLUE,
    COMMUNICATING,
    COMPUTING,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PINK,
    RED,
    SHARED,
    SKY,
    UPDATE,
    WAITING_LOOK,
    rank_color,
)
from utils.figures import use_style as use_style
from utils.figures.charts import add_lanes, chart, finish, legend_below, legend_beside, panels
from utils.figures.shapes import arrow, box, canvas, cell, frame, link, write_beside

_MARKS = "os^Dv"
_PIECES = {
    "work": {"facecolor": COMPUTING, "edgecolor": INK},
    "save": WAITING_LOOK,
    "lost": {"facecolor": UPDATE, "edgecolor": PAPER, "hatch": "xx"},
    "restart": {"facecolor": PAPER, "edgecolor": INK},
}
_WORKS, _SHRINKS = ({"facecolor": color, "edgecolor": INK} for color in (COMPUTING, COMMUNICATING))
_PHASES = {
    "works": _WORKS,
    "waits in all_reduce": WAITING_LOOK,
    "shrink()": _SHRINKS,
    "works with one rank fewer": {"facecolor": UPDATE, "edgecolor": INK},
}

#: The number of devices for which students predict, see :func:`at_scale`.
AT = 4096

#: (seconds, accuracy).
Curve = Sequence[tuple[float, float]]


def deaths() -> Figure:
    """Draw what happens to a job when a rank dies, without ULFM and with it."""
    figure, both = panels(9, 2.9, columns=2, sharey=True)
    titles = ("without ULFM: the launcher ends all ranks", "with ULFM: the others survive")
    for survive, (axes, title) in enumerate(zip(both, titles, strict=True)):
        add_lanes(axes, [f"rank {rank}" for rank in range(4)], 10)
        for rank in range(4):
            _life(axes, rank, rank == 2, bool(survive))
        axes.set(title=title, xticks=[], xlabel="time →")
    handles = [Patch(label=label, **look) for label, look in _PHASES.items()]
    figure.legend(handles=handles, loc="lower center", ncols=4)
    words = (
        "Two drawings of 4 ranks over time. In both, rank 2 is killed, and the other "
        "ranks wait in all_reduce until they get an error. Without ULFM, the launcher then ends "
        "them. With ULFM, they call shrink() and continue with one rank fewer."
    )
    return finish(figure, words, below=0.1)


def _life(axes: Axes, rank: int, dies: bool, survive: bool) -> None:
    ends = (4,) if dies else (4, 6, 7, 10) if survive else (4, 6)
    begin = 0
    for end, look in zip(ends, _PHASES.values(), strict=False):
        cell(axes, begin, rank, end - begin, PAPER, height=0.64, **{"linewidth": 0.7} | look)
        begin = end
    if dies or not survive:
        axes.plot(begin, rank, "X", color=RED, markersize=13, zorder=3)
        said = "killed" if dies else "ended by the launcher"
        axes.text(begin + 0.35, rank, said, va="center")


def order_of_writes() -> Figure:
    """Draw a save as a row of operations, and which checkpoint `latest` names before and after."""
    _, axes = canvas(11, 2.9)
    data = ["write\na .tmp file", "fsync", "rename to\nrank-r.pt"]
    steps = [*data, "barrier", *data[:2], "rename to\nlatest"]
    colors = [SHARED] * 3 + [COMMUNICATING] + [rank_color(0)] * 3
    for k, (text, color) in enumerate(zip(steps, colors, strict=True)):
        box(axes, 2.1 * k, 0, text, width=1.7, height=0.95, color=color, alpha=1.0)
        if k:
            arrow(axes, (2.1 * k - 1.22, 0), (2.1 * k - 0.88, 0))
    spans = {"every rank": (-0.85, 5.05), "together": (5.45, 7.15), "one rank": (7.55, 13.45)}
    for text, (begin, end) in spans.items():
        axes.text((begin + end) / 2, 0.75, text, ha="center")
        axes.plot([begin, end], [0.65, 0.65], color=GREY, linewidth=1.2)
    link(axes, (-0.85, -0.8), (13.3, -0.8), color=GREY)
    before = "after a crash up to here, `latest` names the old checkpoint, which is complete"
    axes.text(6, -0.95, before, ha="center", va="top", color=GREY)
    axes.text(13.6, -0.95, "after this,\nthe new one", ha="center", va="top", weight="bold")
    operations = ", ".join(step.replace("\n", " ") for step in steps)
    words = (
        f"A save as seven operations in a row: {operations}. Every rank does the first three, and "
        "one rank does the last three. After a crash before the last operation, `latest` names the "
        "old checkpoint, which is complete. After the last operation it names the new one."
    )
    return frame(axes, (-1.1, 14.7), (-1.8, 1.1), words)


def shards(n: int, counts: Sequence[int]) -> Figure:
    """Draw how torch.chunk cuts n elements for several numbers of ranks."""
    _, axes = canvas(9, 0.75 * len(counts) + 0.5)
    look = {"height": 0.6, "fontsize": 9}
    rows = []
    for row, p in enumerate(counts):
        each = -(-n // p)
        parts = []
        for rank in range(p):
            begin, end = min(n, rank * each), min(n, (rank + 1) * each)
            for k in range(begin, end):
                cell(axes, k, -row, 1, rank_color(rank), str(k), **look)
            parts.append(f"rank {rank} {f'{begin} to {end - 1}' if end > begin else 'none'}")
        axes.text(-0.3, -row, f"{p} rank{'s' * (p > 1)}", ha="right", va="center")
        rows.append(f"{p} ranks: {', '.join(parts)}")
    words = f"{n} elements, cut into shards of consecutive elements. {'; '.join(rows)}."
    return frame(axes, (-2.2, n + 0.3), (-len(counts) + 0.4, 0.6), words)


def resumed(curves: Mapping[str, Mapping[int, float]], deaths: Mapping[str, float]) -> Figure:
    """Draw losses over steps, with a vertical line at each death."""
    figure, axes = chart(9, 3.5)
    for k, (name, losses) in enumerate(curves.items()):
        style = {"linewidth": 6, "alpha": 0.35} if k == 0 else {"linewidth": 1.8}
        axes.plot(list(losses), list(losses.values()), color=CYCLE[k], label=name, **style)
    look = {"xycoords": ("data", "axes fraction"), "va": "top", "color": GREY, "fontsize": 10}
    for name, step in deaths.items():
        axes.axvline(step, color=GREY, linestyle="--", linewidth=1.2)
        write_beside(axes, name, (step, 1), (4, -2), **look)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="step", ylabel="training loss")
    legend_beside(axes)
    return finish(figure)


def account(pieces: Sequence[tuple[str, float, float]]) -> Figure:
    """Draw a job's time from pieces (kind, begin, end): work, save, lost or restart."""
    names = {"work": "work that stays", "save": "saving", "lost": "work that is done again"}
    figure, axes = chart(9, 1.9)
    totals = {}
    for kind, begin, end in pieces:
        cell(axes, begin, 0.5, end - begin, PAPER, height=1, **_PIECES[kind])
        totals[kind] = totals.get(kind, 0) + (end - begin)
    axes.set(xlim=(0, max(end for *_, end in pieces) * 1.01), ylim=(0, 1), yticks=[])
    axes.grid(visible=False)
    axes.set_xlabel("time (s)")
    shown = {kind: names.get(kind, kind) for kind in _PIECES if kind in totals}
    handles = [Patch(label=name, **_PIECES[kind]) for kind, name in shown.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=4)
    words = ", ".join(f"{totals[kind]:.3g} s of {name}" for kind, name in shown.items())
    return finish(figure, f"A job's time: {words}.")


def intervals(
    theory: Mapping[float, float],
    simulated: Mapping[float, float],
    best: Mapping[str, float],
    unit: str,
    measured: Mapping[float, float] | None = None,
) -> Figure:
    """Draw the overhead against the interval between checkpoints; lines mark the best ones."""
    figure, axes = chart(9, 3.8)

    def plot(points: Mapping[float, float], *mark: str, **look: Any) -> None:
        if points:
            axes.plot(list(points), [100 * v for v in points.values()], *mark, **look)

    plot(theory, color=INK, linewidth=1.5, label="expected (Daly)")
    plot(simulated, "o", color=BLUE, markersize=8, label="replayed, many failures")
    plot(measured or {}, "D", color=ORANGE, markersize=8, label="measured on the ranks")
    for (name, at), color, line in zip(best.items(), (GREEN, PINK), ("--", ":"), strict=False):
        axes.axvline(at, color=color, linestyle=line, label=f"{name}: {at:.3g}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    label = f"work between two checkpoints ({unit})"
    axes.set(xlabel=label, ylabel="overhead (% of the work)")
    legend_beside(axes)
    return finish(figure)


def at_scale(
    formula: Mapping[int, Mapping[int, tuple[float, float]]],
    simulated: Mapping[int, float],
    of_one: float,
    guess: Mapping[str, float | str | None],
) -> Figure:
    """Draw the share of useful time and the interval between saves over the number of devices.

    Args:
        formula: for each time of a save and number of devices, the interval and the share.
        simulated: for each time of a save, the share on `AT` devices with random failures.
        of_one: MTBF of one device.
        guess: predicted minutes between saves and percent of lost time on `AT` devices, in order.
    """
    figure, (left, right) = panels(9, 4.0, columns=2)
    devices = list(next(iter(formula.values())))
    told = []
    for k, (save, points) in enumerate(sorted(formula.items())):
        look = {"color": CYCLE[k], "marker": ".", "label": f"a save of {save} s"}
        left.plot(devices, [100 * points[n][1] for n in devices], **look)
        right.plot(devices, [points[n][0] / 60 for n in devices], **look)
        drawn = 100 * simulated[save]
        label = "with random failures" if k == len(formula) - 1 else None
        left.plot([AT], [drawn], "o", color=CYCLE[k], markersize=9, fillstyle="none", label=label)
        last = ", ".join(f"{100 * points[n][1]:.1f} % of {n:,}" for n in (AT, devices[-1]))
        every = f"every {points[AT][0] / 60:.0f} min on {AT:,}"
        told.append(
            f"a save of {save} s: {every}, useful {last}, simulated {drawn:.1f} % of {AT:,}"
        )
    right.plot(devices, [of_one / n / 60 for n in devices], "--", color=GREY, label="MTBF")
    minutes, lost = guess.values()
    for axes, value in ((left, None if lost is None else 100 - lost), (right, minutes)):
        if value is not None:
            axes.plot([AT], [value], "D", color=INK, markersize=8, label="your prediction")
        axes.set_xscale("log", base=2)
        axes.set_xticks(devices[::2], [f"{n:,}" for n in devices[::2]], fontsize=9)
        axes.set_xlabel("devices")
    left.set(title="Useful time [%]", ylim=(None, 101))
    right.set(title="Minutes between two saves", yscale="log")
    right.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    legend_below(figure, left, columns=5, fontsize=9)
    right.legend(*(part[-2:] for part in right.get_legend_handles_labels()), fontsize=9)
    words = "Useful time, and minutes between two saves, over the number of devices. "
    return finish(figure, words + "; ".join(told) + ".", below=0.09)


def still(seconds: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw for each way to save how long training stands still, and how long the save takes."""
    figure, axes = chart(8, 2.3)
    rows = range(len(seconds))
    bars = {
        "stands still": (-0.2, WAITING_LOOK, "training stands still"),
        "save": (0.2, {"facecolor": SKY, "edgecolor": INK}, "until the checkpoint is complete"),
    }
    for key, (offset, look, label) in bars.items():
        lengths = [of_way[key] for of_way in seconds.values()]
        places = [k + offset for k in rows]
        axes.barh(places, lengths, 0.36, label=label, **look)
    axes.set_yticks(rows, list(seconds))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    legend_beside(axes)
    words = [
        f"{name}: training stands still for {of_way['stands still']:.2f} s, and the checkpoint is "
        f"complete after {of_way['save']:.2f} s"
        for name, of_way in seconds.items()
    ]
    return finish(figure, "; ".join(words) + ".")


def schemes(situations: Mapping[str, Mapping[str, Curve]], died: float) -> Figure:
    """Draw accuracy over time, with a panel for each situation and a curve for each scheme."""
    figure, row = panels(9, 3.4, columns=len(situations), sharey=True)
    for axes, (situation, curves) in zip(row, situations.items(), strict=True):
        for k, (name, curve) in enumerate(curves.items()):
            seconds = [time for time, _ in curve]
            accuracy = [100 * share for _, share in curve]
            look = {"color": CYCLE[k], "markersize": 4, "label": name}
            axes.plot(seconds, accuracy, f"{_MARKS[k]}-", **look)
        if "dead" in situation:
            axes.axvline(died, color=GREY, linestyle="--", linewidth=1.2)
            axes.text(died, 3, " rank 3 is dead", color=GREY, fontsize=10)
        axes.set(title=situation, ylim=(0, 100), xlabel="time (s)")
    row[0].set_ylabel("test accuracy (%)")
    legend_below(figure, row[0])
    return finish(figure, below=0.09)
