"""Pictures of serving: curves, and what stages or slots do over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import CYCLE, FORWARD, PAPER, WAITING_LOOK
from utils.figures.charts import add_lanes, chart, finish, legend_beside, panels
from utils.figures.shapes import cell


def curves(
    lines: Mapping, points: Mapping, title: str, across: str, up: str, log: bool = False
) -> Figure:
    """Draw lines and points by their names, x → y in each; the same name has the same color."""
    figure, axes = chart(8, 3.6)
    looks = zip(CYCLE, ("-", "--", "-."), "osD", strict=False)
    for name, (color, dashes, mark) in zip(dict(lines) | dict(points), looks, strict=False):
        for of, style, label in ((lines, dashes, name), (points, mark, f"{name}, measured")):
            if name in of:
                axes.plot(*zip(*of[name].items(), strict=True), style, color=color, label=label)
    look = {"xscale": "log", "yscale": "log"} if log else {"ylim": (0, None)}
    axes.set(title=title, xlabel=across, ylabel=up, **look)
    legend_beside(axes, fontsize=9)
    return finish(figure)


def lanes(
    charts: Mapping[str, Sequence[tuple]], name: str, until: float, unit: str = "seconds"
) -> Figure:
    """Draw what each lane does until some time, from spans (lane, start, end, number)."""
    counts = [1 + max(lane for lane, *_ in spans) for spans in charts.values()]
    look = {"sharex": True, "height_ratios": [n + 1 for n in counts]}
    figure, rows = panels(9, 0.32 * sum(counts) + 0.75 * len(counts), rows=len(counts), **look)
    words = []
    for axes, (title, spans), n in zip(rows, charts.items(), counts, strict=True):
        add_lanes(axes, [f"{name} {k}" for k in range(n)], until)
        end = min(until, max(span[2] for span in spans))
        busy = _draw_spans(axes, spans, n, end, until) / (n * end)
        words.append(f"{title}: {n} {name}s are busy for {busy:.0%} of {end:.2f} {unit}")
        axes.set_title(words[-1], fontsize=11)
    rows[-1].set_xlabel(unit)
    return finish(figure, ". ".join(words) + ".")


def _draw_spans(axes: Axes, spans: Sequence[tuple], n: int, end: float, until: float) -> float:
    """Draw n lanes with their spans until some time; return for how long they are busy together."""
    for lane in range(n):
        cell(axes, 0, lane, end, PAPER, **WAITING_LOOK)
    shown = [(lane, a, min(b, until) - a, k) for lane, a, b, k in spans if a < until]
    for lane, start, width, number in shown:
        text = str(number) if width > 0.013 * until * len(str(number)) else ""
        cell(axes, start, lane, width, FORWARD, text, fontsize=8, linewidth=0.6)
    return sum(width for _, _, width, _ in shown)
