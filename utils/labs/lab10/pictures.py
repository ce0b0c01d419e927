"""Pictures of pipelines: layers placed on ranks, schedules as Gantt charts, bubbles, memory.

`F2` is the forward of microbatch 2 in a schedule, and `B2` its backward. A **span** is an action
with its stage and its time, in any unit: ``(stage, kind, microbatch, start, end)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.figures import (
    BACKWARD,
    COMMUNICATING,
    FORWARD,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    SKY,
    UPDATE,
    WAITING_LOOK,
)
from utils.figures.charts import add_lanes, chart, finish, group_bars, keys, legend_beside, panels
from utils.figures.shapes import arrow, canvas, cell, frame, rank_box
from utils.labs.shared.schedules import idle as idle_share

# A notebook from before the move, which imports this module as `schedules`, uses these four.
from utils.labs.shared.schedules import one_f_one_b as one_f_one_b
from utils.labs.shared.schedules import parse as parse
from utils.labs.shared.schedules import planned as planned
from utils.labs.shared.schedules import zero_bubble as zero_bubble

from . import graphs

Span = tuple[int, str, int, float, float]

#: Color and name of each kind of action.
KINDS = {
    "F": (FORWARD, "forward"),
    "B": (BACKWARD, "backward"),
    "I": (BACKWARD, "backward: input"),
    "W": (UPDATE, "backward: weights"),
}


def placed(layers: Sequence[str], stages: int) -> Figure:
    """Draw a chain of layers, split into stages of equal length with one rank each."""
    _, axes = canvas(9, 1.8)
    each = len(layers) // stages
    step = 3.9
    for k, name in enumerate(layers):
        rank_box(axes, step * k, 0, k // each, name, width=1.9, height=0.8)
    for k in range(len(layers) - 1):
        right = step * k + 1.0
        left = step * (k + 1) - 1.0
        crosses = (k + 1) % each == 0
        arrow(
            axes, (right, 0.18), (left, 0.18), "activations" if crosses else "", color=COMMUNICATING
        )
        arrow(axes, (left, -0.18), (right, -0.18), color=COMMUNICATING, style=":")
        if crosses:
            style = {"color": COMMUNICATING, "fontsize": 10}
            axes.text((left + right) / 2, -0.3, "gradients", ha="center", va="top", **style)
    for s in range(stages):
        middle = step * (each * s + (each - 1) / 2)
        axes.text(middle, -0.6, f"stage {s}, rank {s}", ha="center", va="top", weight="bold")
    words = (
        f"{len(layers)} layers in a row on {stages} ranks: {', '.join(layers)}. Activations go to "
        "the next rank, and gradients come back."
    )
    return frame(axes, (-1.1, step * (len(layers) - 1) + 1.1), (-1.3, 0.9), words, equal=True)


def gantt(charts: Mapping[str, Sequence[Span]], unit: str = "s", lane: str = "stage") -> Figure:
    """Draw schedules one above the other, a lane per stage; each begins at 0, on one scale.

    Args:
        charts: title → the spans of a schedule, planned or measured.
        unit: the unit of their times.
        lane: what the first entry of a span counts.

    Raises:
        ValueError: a chart has no spans.
    """
    for title, spans in charts.items():
        if not spans:
            raise ValueError(f"{title}: There is nothing to draw. First run the cell above.")
    stages = [1 + max(span[0] for span in spans) for spans in charts.values()]
    heights = [0.42 * n + 0.5 for n in stages]
    height = sum(heights) + 0.9
    look = {"sharex": True, "height_ratios": heights}
    figure, rows = panels(9, height, rows=len(charts), **look)
    longest = max(map(_length, charts.values()))
    words = [
        _lanes(axes, title, spans, n, longest, unit, lane)
        for axes, (title, spans), n in zip(rows, charts.items(), stages, strict=True)
    ]
    rows[-1].set_xlabel(f"time ({unit})")
    figure.legend(handles=_keys(charts), loc="lower center", ncols=5, fontsize=10)
    return finish(figure, " ".join(words), below=0.42 / height)


def _keys(charts: Mapping[str, Sequence[Span]]) -> list[Patch]:
    present = {kind for spans in charts.values() for _, kind, *_ in spans}
    colors = {name: color for kind, (color, name) in KINDS.items() if kind in present}
    return [*keys(colors), Patch(label="idle: the bubble", **WAITING_LOOK)]


def _length(spans: Sequence[Span]) -> float:
    return max(span[4] for span in spans) - min(span[3] for span in spans)


def _lanes(
    axes: Axes,
    title: str,
    spans: Sequence[Span],
    n: int,
    longest: float,
    unit: str,
    lane: str,
) -> str:
    first = min(span[3] for span in spans)
    length = _length(spans)
    lanes = [f"{lane} {stage}" for stage in range(n)]
    add_lanes(axes, lanes, longest * 1.01)
    axes.set_title(f"{title} · bubble {idle_share(spans):.2f}", fontsize=11)
    for stage in range(n):
        cell(axes, 0, stage, length, PAPER, **WAITING_LOOK)
    for stage, kind, k, start, end in spans:
        number = str(k) if end - start > longest * 0.011 * len(str(k)) else ""
        color, _ = KINDS[kind]
        cell(axes, start - first, stage, end - start, color, number, fontsize=8, linewidth=0.6)
    for stage, kind, k, *_ in sorted(spans, key=lambda span: span[3]):
        lanes[stage] += f" {kind}{k}"
    return f"{title}: {length:.3g} {unit}, bubble {idle_share(spans):.2f}. {'; '.join(lanes)}."


def bubbles(p: int, measured: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw the bubble against the number of microbatches, next to (p − 1) / (m + p − 1).

    Args:
        measured: for each schedule, m → bubble.
    """
    figure, axes = chart(7, 3.6)
    ms = list(range(1, 9))
    formula = [(p - 1) / (m + p - 1) for m in ms]
    axes.plot(ms, formula, color=INK, linewidth=1.5, label="(p − 1) / (m + p − 1)")
    style = {"markersize": 8, "markerfacecolor": "none", "markeredgewidth": 2}
    for (name, points), mark in zip(measured.items(), "os^D", strict=False):
        axes.plot(list(points), list(points.values()), mark, label=name, **style)
    axes.set(ylim=(0, 0.85), xticks=ms, xlabel="microbatches m", ylabel="bubble (share of time)")
    axes.set_title(f"Idle time of {p} stages")
    axes.legend()
    return finish(figure)


def memory(held: Mapping[str, Sequence[float]], label: str = "in-flight microbatches") -> Figure:
    """Draw bars for each stage: how many microbatches it holds, or how many megabytes."""
    figure, axes = chart(7, 3.2)
    style = "%.1f" if any(isinstance(n, float) for row in held.values() for n in row) else "%d"
    stages = range(len(next(iter(held.values()))))
    for bars in group_bars(axes, held, [f"stage {s}" for s in stages]):
        axes.bar_label(bars, fmt=style, fontsize=10)
    axes.set_ylabel(label)
    axes.margins(y=0.15)
    legend_beside(axes)
    return finish(figure)


def versions(used: Sequence[Sequence[int]]) -> Figure:
    """Draw a table in colors: the version of the weights that each microbatch saw on each stage.

    Args:
        used: for each stage, the version for each microbatch.
    """
    figure, axes = chart(8, 0.45 * len(used) + 1.2)
    axes.imshow(used, cmap="Blues", vmin=-1, vmax=1.8 * max(map(max, used)) + 1, aspect="auto")
    for stage, row in enumerate(used):
        for k, version in enumerate(row):
            axes.text(k, stage, str(version), ha="center", va="center")
    axes.set_xticks(range(len(used[0])))
    axes.set_yticks(range(len(used)), [f"stage {s}" for s in range(len(used))])
    axes.set(xlabel="microbatch", title="Version of the weights that a microbatch saw")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    rows = ". ".join(f"Stage {s}: {', '.join(map(str, row))}" for s, row in enumerate(used))
    return finish(figure, f"Version of the weights that microbatches 0, 1, … saw. {rows}")


def bars(shares: Mapping[str, float]) -> Figure:
    """Draw the bubbles of several schedules, one below the other."""
    figure, axes = chart(8, 0.38 * len(shares) + 1)
    drawn = axes.barh(list(shares), list(shares.values()), color=SKY, edgecolor=INK)
    axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("bubble (share of time)")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    return finish(figure)


def graph(places: Sequence[int], bandwidth: float) -> Figure:
    """Draw when each operator of the two towers runs, with a lane for each rank."""
    planned_spans = {span[0]: span for span in graphs.spans(graphs.TOWERS, places, bandwidth)}
    figure, axes = chart(9, 2.6)
    colors = {"patches": SKY, "vision": SKY, "tokens": ORANGE, "text": ORANGE}
    for name, (_, rank, begin, end) in planned_spans.items():
        color = colors.get(name.split()[0], GREEN)
        axes.barh(rank, end - begin, left=begin, height=0.6, color=color, edgecolor=INK)
        axes.text((begin + end) / 2, rank, name.replace(" ", "\n"), ha="center", va="center")
    for name, _, _, inputs in graphs.TOWERS:
        for one in inputs:
            (_, there, _, end), (_, here, begin, _) = planned_spans[one], planned_spans[name]
            if there != here:
                shape = {"arrowstyle": "->", "color": COMMUNICATING}
                axes.annotate("", (begin, here), (end, there), arrowprops=shape)
    axes.set_yticks(range(max(places) + 1), [f"rank {r}" for r in range(max(places) + 1)])
    axes.invert_yaxis()
    last = max(span[3] for span in planned_spans.values())
    axes.set(xlabel="time [s]", xlim=(0, last), title=f"Two towers: done after {last:g} s")
    words = "; ".join(
        f"{name} on rank {rank} from {begin:g} to {end:g} s"
        for name, rank, begin, end in planned_spans.values()
    )
    return finish(figure, f"Two towers and their join: {words}.")
