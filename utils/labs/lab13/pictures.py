"""Deaths, checkpoints and what they cost, drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
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

#: (seconds, accuracy).
Curve = Sequence[tuple[float, float]]


def deaths(victim: int = 2, ranks: int = 4) -> Figure:
    """What becomes of a job whose rank dies: without ULFM, and with it."""
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
    legend = [Patch(facecolor=SKY, edgecolor=INK, label="works"),
              Patch(facecolor=PALE, edgecolor=INK, label="waits in all_reduce"),
              Patch(facecolor=ORANGE, edgecolor=INK, label="shrink()"),
              Patch(facecolor=GREEN, edgecolor=INK, label="works, one fewer")]  # fmt: skip
    figure.legend(handles=legend, loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.alt_text = (
        f"Two drawings of {ranks} ranks over time. In both rank {victim} is killed, and the others "
        "wait in all_reduce until they get an error. Without ULFM the launcher then ends them. "
        "With ULFM they call shrink() and go on, one fewer."
    )
    return figure


def _life(axes, rank: int, dies: bool, survive: bool) -> None:
    spans = [(0, 4, SKY)]
    if not dies:
        spans += [(4, 6, PALE)] + [(6, 7, ORANGE), (7, 10, GREEN)] * survive
    for begin, end, color in spans:
        axes.add_patch(Rectangle((begin, rank - 0.32), end - begin, 0.64, facecolor=color,
                                 edgecolor=INK, linewidth=0.7))  # fmt: skip
    if dies or not survive:
        at = 4 if dies else 6
        axes.plot(at, rank, "X", color=RED, markersize=13, zorder=3)
        axes.text(at + 0.35, rank, "killed" if dies else "ended by the launcher", va="center")


def order_of_writes() -> Figure:
    """A save as a row of operations, and what `latest` names meanwhile."""
    figure, axes = canvas(11, 2.9)
    steps = ["write\na .tmp file", "fsync", "rename to\nrank-r.pt", "barrier",
             "write\na .tmp file", "fsync", "rename to\nlatest"]  # fmt: skip
    colors = [SKY, SKY, SKY, PINK, ORANGE, ORANGE, ORANGE]
    for k, (text, color) in enumerate(zip(steps, colors, strict=True)):
        box(axes, 2.1 * k, 0, text, width=1.7, height=0.95, color=color)
        if k:
            arrow(axes, (2.1 * k - 1.22, 0), (2.1 * k - 0.88, 0))
    for text, begin, end in (("every rank", -0.85, 5.05), ("together", 5.45, 7.15),
                             ("one rank", 7.55, 13.45)):  # fmt: skip
        axes.text((begin + end) / 2, 0.75, text, ha="center")
        axes.plot([begin, end], [0.65, 0.65], color=GREY, linewidth=1.2)
    axes.annotate("", (13.3, -0.8), (-0.85, -0.8), arrowprops={"arrowstyle": "->", "color": BLUE})
    axes.text(6, -0.95, "a crash up to here: `latest` names the old checkpoint, which is whole",
              ha="center", va="top", color=BLUE)  # fmt: skip
    axes.text(13.6, -0.95, "from here on\nthe new one", ha="center", va="top", color=GREEN)
    axes.set_xlim(-1.1, 14.7)
    axes.set_ylim(-1.8, 1.1)
    figure.alt_text = (
        "A save as seven operations in a row: " + ", ".join(s.replace("\n", " ") for s in steps)
        + ". The first three on every rank, the last three on one. A crash before the last one "
        "leaves `latest` at the old checkpoint, which is whole; after it, at the new one."
    )  # fmt: skip
    return figure


def shards(n: int, counts: Sequence[int]) -> Figure:
    """n elements cut for several numbers of ranks, as torch.chunk cuts them."""
    figure, axes = canvas(9, 0.75 * len(counts) + 0.5)
    said = []
    for row, p in enumerate(counts):
        each, parts = -(-n // p), []
        for rank in range(p):
            begin, end = min(n, rank * each), min(n, (rank + 1) * each)
            for k in range(begin, end):
                axes.add_patch(Rectangle((k, -row), 1, 0.6, facecolor=CYCLE[rank], alpha=0.55,
                                         edgecolor=INK))  # fmt: skip
                axes.text(k + 0.5, -row + 0.3, str(k), ha="center", va="center", fontsize=9)
            has = f"{begin} to {end - 1}" if end > begin else "none"
            parts.append(f"rank {rank} {has}")
        axes.text(-0.3, -row + 0.3, f"{p} rank{'s' * (p > 1)}", ha="right", va="center")
        said.append(f"{p} ranks: {', '.join(parts)}")
    axes.set_xlim(-2.2, n + 0.3)
    axes.set_ylim(-len(counts) + 0.7, 0.9)
    figure.alt_text = f"{n} elements in shards of consecutive ones. {'; '.join(said)}."
    return figure


def resumed(curves: Mapping[str, Mapping[int, float]], deaths: Mapping[str, float]) -> Figure:
    """Losses by step; a vertical line where something happened."""
    use_style()
    figure, axes = plt.subplots(figsize=(9, 3.5))
    for k, (name, losses) in enumerate(curves.items()):
        style = {"linewidth": 6, "alpha": 0.35} if k == 0 else {"linewidth": 1.8}
        axes.plot(list(losses), list(losses.values()), color=CYCLE[k], label=name, **style)
    for name, step in deaths.items():
        axes.axvline(step, color=GREY, linestyle="--", linewidth=1.2)
        axes.annotate(name, (step, 1), xycoords=("data", "axes fraction"), xytext=(4, -2),
                      textcoords="offset points", va="top", color=GREY, fontsize=10)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    return figure


def account(pieces: Sequence[tuple[str, float, float]]) -> Figure:
    """A job's time: (kind, begin, end) with kinds work, save, lost, restart."""
    use_style()
    colors = {"work": SKY, "save": ORANGE, "lost": RED, "restart": GREY}
    names = {"work": "work that stays", "save": "saving", "lost": "work that is done again",
             "restart": "restart"}  # fmt: skip
    figure, axes = plt.subplots(figsize=(9, 1.9))
    for kind, begin, end in pieces:
        axes.add_patch(Rectangle((begin, 0), end - begin, 1, facecolor=colors[kind],
                                 edgecolor=INK, linewidth=0.6))  # fmt: skip
    axes.set_xlim(0, max(end for *_, end in pieces) * 1.01)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_xlabel("time (s)")
    used = [kind for kind in colors if any(one[0] == kind for one in pieces)]
    handles = [Patch(facecolor=colors[k], edgecolor=INK, label=names[k]) for k in used]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=4)
    figure.tight_layout()
    totals = {k: sum(e - b for kind, b, e in pieces if kind == k) for k in used}
    figure.alt_text = "A job's time: " + ", ".join(
        f"{total:.3g} s of {names[k]}" for k, total in totals.items()) + "."  # fmt: skip
    return figure


def intervals(
    theory: Mapping[float, float],
    simulated: Mapping[float, float],
    best: Mapping[str, float],
    unit: str,
    measured: Mapping[float, float] | None = None,
) -> Figure:
    """Overhead against the interval between checkpoints; vertical lines at the best ones."""
    use_style()
    figure, axes = plt.subplots(figsize=(9, 3.8))
    axes.plot(list(theory), [100 * v for v in theory.values()], color=INK, linewidth=1.5,
              label="expected (Daly)")  # fmt: skip
    for points, mark, color, name in (
        (simulated, "o", BLUE, "replayed, many failures"),
        (measured or {}, "D", ORANGE, "measured on the ranks"),
    ):
        if points:
            axes.plot(list(points), [100 * v for v in points.values()], mark, color=color,
                      markersize=8, label=name)  # fmt: skip
    for k, (name, at) in enumerate(best.items()):
        axes.axvline(at, color=(GREEN, PINK)[k], linestyle=("--", ":")[k],
                     label=f"{name}: {at:.3g}")  # fmt: skip
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
    """How long training stood still, and how long the save took, for each way to save."""
    use_style()
    figure, axes = plt.subplots(figsize=(8, 2.3))
    names = list(seconds)
    for offset, (what, color) in zip((-0.2, 0.2), (("stands still", ORANGE), ("save", SKY)),
                                     strict=True):  # fmt: skip
        axes.barh([k + offset for k in range(len(names))],
                  [seconds[name][what] for name in names], 0.36, color=color, edgecolor=INK,
                  label={"stands still": "training stands still",
                         "save": "until the checkpoint is there"}[what])  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.alt_text = "; ".join(
        f"{name}: training stands still for {of['stands still']:.2f} s, the checkpoint is there "
        f"after {of['save']:.2f} s" for name, of in seconds.items()) + "."  # fmt: skip
    return figure


def schemes(found: Mapping[str, Mapping[str, Curve]], died: float) -> Figure:
    """Accuracy over time: a panel for each situation, a curve for each scheme."""
    use_style()
    figure, rows = plt.subplots(1, len(found), figsize=(11, 3.6), sharey=True, squeeze=False)
    panels = rows[0]
    for axes, (situation, curves) in zip(panels, found.items(), strict=True):
        for k, (name, curve) in enumerate(curves.items()):
            axes.plot([t for t, _ in curve], [100 * a for _, a in curve], f"{_MARKS[k]}-",
                      color=CYCLE[k], markersize=4, label=name)  # fmt: skip
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
    """The whole table of the five metrics as a picture."""
    use_style()
    widths = (13, 27, 27, 27, 27, 27)
    rows = [["", *METRICS], *table.rows()]
    wrapped = [["\n".join(textwrap.wrap(text, w)) for text, w in zip(row, widths, strict=True)]
               for row in rows]  # fmt: skip
    heights = [max(1, *(text.count("\n") + 1 for text in row)) + 0.7 for row in wrapped]
    figure, axes = canvas(15, 0.2 * sum(heights) + 0.2)
    total, y = sum(widths) + 6, 0.0
    for k, (row, height) in enumerate(zip(wrapped, heights, strict=True)):
        color = PALE if k == 0 else (SKY if k % 2 else "white")
        axes.add_patch(Rectangle((0, y), total, height, facecolor=color, alpha=1 if k == 0 else 0.2,
                                 linewidth=0))  # fmt: skip
        x = 0.0
        for column, (text, width) in enumerate(zip(row, widths, strict=True)):
            weight = "bold" if k == 0 or column == 0 else "normal"
            pale = text.startswith("lab ") and len(text) == 6
            axes.text(x + 0.6, y + 0.35, text, va="top", fontsize=9.5, weight=weight,
                      color=GREY if pale else INK)  # fmt: skip
            x += width + 1
        y += height
    axes.set_xlim(0, total)
    axes.set_ylim(y, 0)
    figure.tight_layout(pad=0.2)
    there = [row[0] for row in table.rows() if not row[1].startswith("lab ")]
    words = "; ".join(f"{n}: {', '.join(filter(None, texts))}"
                      for n, *texts in table.rows() if n in there)  # fmt: skip
    words = words or "None is filled in"
    figure.alt_text = f"The schemes of the course by the five metrics. {words}."
    return figure
