"""Deaths, checkpoints and what they cost, drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from utils.figures import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PINK,
    RED,
    SKY,
    arrow,
    box,
    canvas,
)
from utils.figures import use_style as use_style
from utils.labs.shared.five_metrics import METRICS, Table

_MARKS = "os^Dv"
_PHASES = {"works": SKY, "waits in all_reduce": PALE, "shrink()": ORANGE, "works, one fewer": GREEN}

#: (seconds, accuracy).
Curve = Sequence[tuple[float, float]]


def _bar(axes: Axes, x: float, y: float, width: float, height: float, color: str, **look) -> None:
    """Draw a rectangle with an outline; (x, y) is its lower left corner."""
    look = {"edgecolor": INK} | look
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, **look))


def _legend(colors: Mapping[str, str]) -> list[Patch]:
    """Return a legend's handles, from the color of each label."""
    return [Patch(facecolor=color, edgecolor=INK, label=name) for name, color in colors.items()]


def deaths(victim: int = 2, ranks: int = 4) -> Figure:
    """Draw what becomes of a job whose rank dies: without ULFM, and with it."""
    use_style()
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 2.9), sharey=True)
    titles = ("without ULFM: the launcher ends all", "with ULFM: the others live on")
    for survive, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for rank in range(ranks):
            _life(axes, rank, rank == victim, bool(survive))
        axes.set_title(title)
        axes.set_xlim(0, 10)
        axes.set_ylim(ranks - 0.4, -0.6)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.set_xticks([])
        axes.set_xlabel("time →")
        axes.tick_params(length=0)
        axes.grid(visible=False)
    figure.legend(handles=_legend(_PHASES), loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.alt_text = (
        f"Two drawings of {ranks} ranks over time. In both rank {victim} is killed, and the others "
        "wait in all_reduce until they get an error. Without ULFM the launcher then ends them. "
        "With ULFM they call shrink() and go on, one fewer."
    )
    return figure


def _life(axes: Axes, rank: int, dies: bool, survive: bool) -> None:
    ends = (4,) if dies else (4, 6, 7, 10) if survive else (4, 6)
    begin = 0
    for end, color in zip(ends, _PHASES.values(), strict=False):
        _bar(axes, begin, rank - 0.32, end - begin, 0.64, color, linewidth=0.7)
        begin = end
    if dies or not survive:
        axes.plot(begin, rank, "X", color=RED, markersize=13, zorder=3)
        said = "killed" if dies else "ended by the launcher"
        axes.text(begin + 0.35, rank, said, va="center")


def order_of_writes() -> Figure:
    """Draw a save as a row of operations, and what `latest` names meanwhile."""
    figure, axes = canvas(11, 2.9)
    data = ["write\na .tmp file", "fsync", "rename to\nrank-r.pt"]
    steps = [*data, "barrier", *data[:2], "rename to\nlatest"]
    colors = [SKY, SKY, SKY, PINK, ORANGE, ORANGE, ORANGE]
    for k, (text, color) in enumerate(zip(steps, colors, strict=True)):
        box(axes, 2.1 * k, 0, text, width=1.7, height=0.95, color=color)
        if k:
            arrow(axes, (2.1 * k - 1.22, 0), (2.1 * k - 0.88, 0))
    spans = {"every rank": (-0.85, 5.05), "together": (5.45, 7.15), "one rank": (7.55, 13.45)}
    for text, (begin, end) in spans.items():
        axes.text((begin + end) / 2, 0.75, text, ha="center")
        axes.plot([begin, end], [0.65, 0.65], color=GREY, linewidth=1.2)
    axes.annotate("", (13.3, -0.8), (-0.85, -0.8), arrowprops={"arrowstyle": "->", "color": BLUE})
    before = "a crash up to here: `latest` names the old checkpoint, which is whole"
    axes.text(6, -0.95, before, ha="center", va="top", color=BLUE)
    axes.text(13.6, -0.95, "from here on\nthe new one", ha="center", va="top", color=GREEN)
    axes.set_xlim(-1.1, 14.7)
    axes.set_ylim(-1.8, 1.1)
    words = ", ".join(step.replace("\n", " ") for step in steps)
    figure.alt_text = (
        f"A save as seven operations in a row: {words}. The first three on every rank, the last "
        "three on one. A crash before the last one leaves `latest` at the old checkpoint, which is "
        "whole; after it, at the new one."
    )
    return figure


def shards(n: int, counts: Sequence[int]) -> Figure:
    """Draw n elements cut for several numbers of ranks, as torch.chunk cuts them."""
    figure, axes = canvas(9, 0.75 * len(counts) + 0.5)
    rows = []
    for row, p in enumerate(counts):
        each = -(-n // p)
        parts = []
        for rank in range(p):
            begin, end = min(n, rank * each), min(n, (rank + 1) * each)
            for k in range(begin, end):
                _bar(axes, k, -row, 1, 0.6, CYCLE[rank], alpha=0.55)
                axes.text(k + 0.5, -row + 0.3, str(k), ha="center", va="center", fontsize=9)
            parts.append(f"rank {rank} {f'{begin} to {end - 1}' if end > begin else 'none'}")
        axes.text(-0.3, -row + 0.3, f"{p} rank{'s' * (p > 1)}", ha="right", va="center")
        rows.append(f"{p} ranks: {', '.join(parts)}")
    axes.set_xlim(-2.2, n + 0.3)
    axes.set_ylim(-len(counts) + 0.7, 0.9)
    figure.alt_text = f"{n} elements in shards of consecutive ones. {'; '.join(rows)}."
    return figure


def resumed(curves: Mapping[str, Mapping[int, float]], deaths: Mapping[str, float]) -> Figure:
    """Draw losses by step; a vertical line where something happened."""
    use_style()
    figure, axes = plt.subplots(figsize=(9, 3.5))
    for k, (name, losses) in enumerate(curves.items()):
        style = {"linewidth": 6, "alpha": 0.35} if k == 0 else {"linewidth": 1.8}
        axes.plot(list(losses), list(losses.values()), color=CYCLE[k], label=name, **style)
    text = {"textcoords": "offset points", "va": "top", "color": GREY, "fontsize": 10}
    for name, step in deaths.items():
        axes.axvline(step, color=GREY, linestyle="--", linewidth=1.2)
        axes.annotate(name, (step, 1), (4, -2), xycoords=("data", "axes fraction"), **text)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    return figure


def account(pieces: Sequence[tuple[str, float, float]]) -> Figure:
    """Draw a job's time: (kind, begin, end) with kinds work, save, lost, restart."""
    use_style()
    colors = {"work": SKY, "save": ORANGE, "lost": RED, "restart": GREY}
    names = {"work": "work that stays", "save": "saving", "lost": "work that is done again"}
    figure, axes = plt.subplots(figsize=(9, 1.9))
    for kind, begin, end in pieces:
        _bar(axes, begin, 0, end - begin, 1, colors[kind], linewidth=0.6)
    axes.set_xlim(0, max(end for *_, end in pieces) * 1.01)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_xlabel("time (s)")
    kinds = {kind for kind, *_ in pieces}
    used = [kind for kind in colors if kind in kinds]
    handles = _legend({names.get(kind, kind): colors[kind] for kind in used})
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=4)
    figure.tight_layout()
    totals = []
    for kind in used:
        total = sum(end - begin for other, begin, end in pieces if other == kind)
        totals.append(f"{total:.3g} s of {names.get(kind, kind)}")
    figure.alt_text = f"A job's time: {', '.join(totals)}."
    return figure


def intervals(
    theory: Mapping[float, float],
    simulated: Mapping[float, float],
    best: Mapping[str, float],
    unit: str,
    measured: Mapping[float, float] | None = None,
) -> Figure:
    """Draw overhead against the interval between checkpoints; vertical lines at the best ones."""
    use_style()
    figure, axes = plt.subplots(figsize=(9, 3.8))

    def plot(points: Mapping[float, float], *mark: str, **look) -> None:
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
    axes.set_xlabel(f"work between two checkpoints ({unit})")
    axes.set_ylabel("overhead (% of the work)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    return figure


def still(seconds: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw how long training stood still, and how long the save took, for each way to save."""
    use_style()
    figure, axes = plt.subplots(figsize=(8, 2.3))
    rows = range(len(seconds))
    bars = {
        "stands still": (-0.2, ORANGE, "training stands still"),
        "save": (0.2, SKY, "until the checkpoint is there"),
    }
    for key, (offset, color, label) in bars.items():
        lengths = [of_way[key] for of_way in seconds.values()]
        places = [k + offset for k in rows]
        axes.barh(places, lengths, 0.36, color=color, edgecolor=INK, label=label)
    axes.set_yticks(rows, list(seconds))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    words = [
        f"{name}: training stands still for {of_way['stands still']:.2f} s, the checkpoint is "
        f"there after {of_way['save']:.2f} s"
        for name, of_way in seconds.items()
    ]
    figure.alt_text = "; ".join(words) + "."
    return figure


def schemes(found: Mapping[str, Mapping[str, Curve]], died: float) -> Figure:
    """Draw accuracy over time: a panel for each situation, a curve for each scheme."""
    use_style()
    figure, rows = plt.subplots(1, len(found), figsize=(11, 3.6), sharey=True, squeeze=False)
    panels = rows[0]
    for axes, (situation, curves) in zip(panels, found.items(), strict=True):
        for k, (name, curve) in enumerate(curves.items()):
            seconds, accuracy = [t for t, _ in curve], [100 * a for _, a in curve]
            look = {"color": CYCLE[k], "markersize": 4, "label": name}
            axes.plot(seconds, accuracy, f"{_MARKS[k]}-", **look)
        if "dead" in situation:
            axes.axvline(died, color=GREY, linestyle="--", linewidth=1.2)
            axes.text(died, 3, " rank 3 is dead", color=GREY, fontsize=10)
        axes.set_title(situation)
        axes.set_ylim(0, 100)
        axes.set_xlabel("time (s)")
    panels[0].set_ylabel("test accuracy (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def five_metrics(table: Table) -> Figure:
    """Draw the whole table of the five metrics."""
    use_style()
    widths = (13, 27, 27, 27, 27, 27)
    wrapped = [
        ["\n".join(textwrap.wrap(text, width)) for text, width in zip(row, widths, strict=True)]
        for row in (["", *METRICS], *table.rows())
    ]
    heights = [max(1, *(text.count("\n") + 1 for text in row)) + 0.7 for row in wrapped]
    figure, axes = canvas(15, 0.2 * sum(heights) + 0.2)
    total = sum(widths) + 6
    y = 0.0
    for k, (row, height) in enumerate(zip(wrapped, heights, strict=True)):
        color = SKY if k % 2 else "white"
        look = {"color": PALE, "alpha": 1} if k == 0 else {"color": color, "alpha": 0.2}
        _bar(axes, 0, y, total, height, **look, edgecolor=None, linewidth=0)
        for column, text in enumerate(row):
            x = sum(widths[:column]) + column
            weight = "bold" if k == 0 or column == 0 else "normal"
            color = GREY if text.startswith("lab ") and len(text) == 6 else INK
            look = {"weight": weight, "color": color, "fontsize": 9.5, "va": "top"}
            axes.text(x + 0.6, y + 0.35, text, **look)
        y += height
    axes.set_xlim(0, total)
    axes.set_ylim(y, 0)
    figure.tight_layout(pad=0.2)
    words = [
        f"{name}: {', '.join(filter(None, texts))}"
        for name, *texts in table.rows()
        if not texts[0].startswith("lab ")
    ]
    in_words = "; ".join(words) or "None is filled in"
    figure.alt_text = f"The schemes of the course by the five metrics. {in_words}."
    return figure
