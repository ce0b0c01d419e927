"""Pictures of the clinic: stacks side by side, recordings, counts of operators, and a bisection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from utils.figures import CYCLE, EXPOSED, INK, PALE, box, canvas, rank_box, rank_color, tint
from utils.figures.charts import chart, finish, group_bars, legend_beside, name_rows, panels
from utils.figures.shapes import cell, frame


def stacks(frames: Sequence[Sequence[str]], odd: Sequence[int]) -> Figure:
    """Draw each rank's frames, outermost at the bottom; the innermost of odd ranks has a color."""
    tall = max(map(len, frames))
    _, axes = canvas(8.6, 0.55 * tall + 1.1)
    words = []
    for rank, own in enumerate(frames):
        rank_box(axes, rank, 0, rank, width=0.9, height=0.6)
        for k, text in enumerate(reversed(own), 1):
            is_place = k == len(own)
            color = EXPOSED if is_place and rank in odd else PALE
            width = 2.0 if is_place else 0.8
            look = {"alpha": 1.0, "linewidth": width, "height": 0.7, "width": 0.9}
            box(axes, rank, 0.9 * k, text, color=color, **look)
        words.append(f"rank {rank}: {' below '.join(own)}")
    title = "Innermost frame on top, and the rank that is elsewhere in orange"
    axes.set_title(title)
    shown = frame(axes, (-0.6, len(frames) - 0.4), (-0.5, 0.9 * tall + 0.6), "")
    shown.tight_layout()
    shown.alt_text = f"{title}. {'; '.join(words)}."
    return shown


def recordings(dumps: Sequence[Sequence[Mapping[str, Any]]], first_bad: int) -> Figure:
    """Draw one row per rank and one column per sequence number, with the line of each call."""
    figure, axes = chart(8.8, 0.5 * len(dumps) + 1.5)
    lines = sorted({entry["line"] for dump in dumps for entry in dump})
    colors = {line: tint(CYCLE[k % len(CYCLE)], 0.45) for k, line in enumerate(lines)}
    last = max(entry["seq"] for dump in dumps for entry in dump)
    words = []
    for rank, dump in enumerate(dumps):
        for entry in dump:
            number = entry["line"].rpartition(" ")[2]
            cell(axes, entry["seq"] - 0.5, rank, 1, colors[entry["line"]], number, fontsize=9)
        said = [entry["line"].rpartition(" ")[2] for entry in dump if entry["seq"] >= first_bad]
        words.append(f"rank {rank} calls from lines {', '.join(said)}")
    name_rows(axes, [f"rank {rank}" for rank in range(len(dumps))])
    axes.grid(False)
    axes.axvline(first_bad - 0.5, color=EXPOSED, linewidth=3)
    axes.set(xlim=(0.4, last + 0.6), ylim=(len(dumps) - 0.4, -0.6), xlabel="sequence number")
    axes.set_title("The line of each recorded call. The orange bar is where the ranks part")
    return finish(figure, f"From sequence number {first_bad} on: {'; '.join(words)}.")


def counts(tables: Sequence[Mapping[str, int]], labels: Sequence[str], op: str) -> Figure:
    """Draw how often each rank calls an operator in each part of a step."""
    figure, axes = chart(8, 3)
    bars = {f"rank {r}": [table[label] for label in labels] for r, table in enumerate(tables)}
    colors = [rank_color(r) for r in range(len(tables))]
    for drawn in group_bars(axes, bars, labels, colors=colors):
        axes.bar_label(drawn, fontsize=9)
    axes.margins(y=0.12)
    axes.set(ylabel="calls in one step", title=f"{op} in the parts of a step")
    legend_beside(axes, fontsize=9)
    said = [f"{name}: {dict(zip(labels, of, strict=True))}" for name, of in bars.items()]
    return finish(figure, f"Calls of {op} in one step. {'. '.join(said)}.")


def bisection(losses: Sequence[Sequence[float]], looks: Sequence[int], first_bad: int) -> Figure:
    """Draw the ranks' losses, which look equal, beside the steps that the bisection replays."""
    figure, (left, right) = panels(8.8, 3.1, columns=2, width_ratios=[1, 1.25])
    for rank, of in enumerate(losses):
        wide = 2 * (len(losses) - rank)  # so that each line stays visible below the next one
        left.plot(of, color=rank_color(rank), linewidth=wide, label=f"rank {rank}")
    left.set(title="Losses of all ranks", xlabel="step", ylim=(0, None))
    left.legend(fontsize=8)
    for k, step in enumerate(looks, 1):
        is_good = step < first_bad
        color, mark = (INK, "o") if is_good else (EXPOSED, "X")
        right.plot(step, k, mark, color=color, markersize=9)
        right.annotate(f"{step}", (step + 2, k), va="center", fontsize=9)
    right.axvline(first_bad, color=EXPOSED, linewidth=1, linestyle="--")
    right.set(xlim=(-2, len(losses[0]) + 6), ylim=(len(looks) + 0.6, 0.4))
    right.set(xlabel="step", ylabel="look", title="Circle: digests agree. Cross: they differ")
    words = ", ".join(f"{step} ({'good' if step < first_bad else 'bad'})" for step in looks)
    return finish(
        figure,
        f"Left: the losses of {len(losses)} ranks are one curve. Right: the bisection looks at "
        f"the steps {words}, and finds {first_bad}.",
    )
