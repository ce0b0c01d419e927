"""The capstone's pictures: the played machine, and all entries compared with the budget."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import COMMUNICATING, CYCLE, GREY, INK, SERIES
from utils.figures.charts import finish, legend_beside, name_rows, panels
from utils.figures.shapes import box, canvas, fit_limits, rank_box
from utils.labs.lab14.entry_judge import Entry
from utils.labs.lab14.rules import NODES, Rules

_MARKS = "oDs^vP*X"


def machine(rules: Rules) -> Figure:
    """Draw two nodes with two ranks each, and the networks between them."""
    figure, axes = canvas(8.5, 3.0)
    places = {
        rank: (4.4 * k, -0.95 * j) for k, node in enumerate(NODES) for j, rank in enumerate(node)
    }
    for k, node in enumerate(NODES):
        box(axes, 4.4 * k, -0.475, "", width=2.6, height=2.3, color="#FFFFFF", alpha=1)
        axes.text(4.4 * k, 0.82, f"node {k}", ha="center", weight="bold")
        (x, top), (_, bottom) = (places[rank] for rank in (node[0], node[-1]))
        axes.plot([x, x], [top - 0.27, bottom + 0.27], color=COMMUNICATING, linewidth=5)
        inside = {"va": "center", "fontsize": 9, "color": COMMUNICATING}
        axes.text(x + 0.1, (top + bottom) / 2, str(rules.inside), **inside)
    for rank, (x, y) in places.items():
        rank_box(axes, x, y, rank)
    axes.plot([1.34, 3.06], [-0.475] * 2, color=COMMUNICATING, linewidth=1.5, linestyle="--")
    between = str(rules.between).replace(", ", "\n")
    axes.text(2.2, -0.4, between, ha="center", va="bottom", color=COMMUNICATING)
    fit_limits(axes, [-1.3, 5.7], [-1.6, 0.9], margin=0.1)
    return finish(figure)


def entries(results: Sequence[Entry], rules: Rules) -> Figure:
    """Draw accuracy over bytes between the nodes and over seconds, with the budget as lines."""
    figure, (left, right) = panels(9, 4.0, columns=2, sharey=True)
    shown = [entry for entry in results if entry.accuracy is not None]
    for k, entry in enumerate(shown):
        style = {"color": CYCLE[k % len(CYCLE)], "label": entry.name}
        mark = _MARKS[k % len(_MARKS)]
        left.plot([entry.slow_bytes / 1e6], [100 * entry.accuracy], mark, markersize=9, **style)
        seconds, reached = zip(*entry.curve, strict=True)
        percent = [100 * share for share in reached]
        right.plot(seconds, percent, marker=mark, markersize=4, linewidth=1.5, **style)
    left.set_xscale("symlog", linthresh=0.1)  # an entry without a byte between the nodes is at 0
    left.set_xlim(left=-0.02)
    left.set(xlabel="between the nodes [MB]", ylabel="accuracy on the test images [%]")
    left.set_title("Accuracy over bytes")
    right.set(xlabel="on the clock of the played machine [s]", title="Accuracy over seconds")
    right.set_xlim(left=0)
    _budget(left, rules.slow_bytes / 1e6, rules)
    _budget(right, rules.seconds, rules)
    look = {"transform": right.get_yaxis_transform(), "ha": "right", "va": "bottom", "zorder": 5}
    card = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
    right.text(0.98, 100 * rules.target, "target", bbox=card, **look)
    if shown:
        legend_beside(right)
    return finish(figure, _in_words(shown, rules))


def both_machines(results: Sequence[Entry], rules: Rules) -> Figure:
    """Draw the seconds of each entry on both machines, and its accuracy on the second one."""
    figure, (left, right) = panels(9, 3.6, columns=2)
    shown = [entry for entry in results if entry.elsewhere]
    second = " and ".join(sorted({entry.elsewhere for entry in shown})) or "no second machine"
    told = []
    for k, entry in enumerate(shown):
        _draw_seconds(left, k, entry, second)
        at, shares = zip(*entry.elsewhere_curve, strict=True)
        look = {"color": CYCLE[k % len(CYCLE)], "markersize": 4, "label": entry.name}
        right.plot(at, [100 * share for share in shares], f"{_MARKS[k % len(_MARKS)]}-", **look)
        here, there = map(_reached, (entry.seconds, entry.elsewhere_seconds))
        told.append(f"{entry.name}: {here}, and {there} on {entry.elsewhere}")
    name_rows(left, [entry.name for entry in shown])
    left.invert_yaxis()
    left.margins(x=0.25)
    left.set(title="Until the target", xlabel="seconds")
    right.axhline(100 * rules.target, color=GREY, linewidth=1)
    right.set(title=f"Accuracy on {second} [%]", xlabel="seconds", xlim=(0, None))
    for axes in (left, right) if shown else ():
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.22), fontsize=9)
    words = "; ".join(told) or "No entry has a second score"
    return finish(figure, f"Seconds to the target on the rules' machine and elsewhere. {words}.")


def _draw_seconds(axes: Axes, k: int, entry: Entry, second: str) -> None:
    """Draw the seconds of entry k on both machines as bars, one below the other."""
    bars = (("the rules' machine", entry.seconds), (second, entry.elsewhere_seconds))
    for (label, seconds), offset, color in zip(bars, (-0.2, 0.2), SERIES, strict=False):
        look = {"color": color, "edgecolor": INK, "label": label if k == 0 else None}
        axes.barh(k + offset, seconds or 0, 0.36, **look)
        axes.text(seconds or 0, k + offset, f" {_reached(seconds)}", va="center", fontsize=9)


def _reached(seconds: float | None) -> str:
    return "target not reached" if seconds is None else f"{seconds:.3g} s"


def _budget(axes: Axes, limit: float, rules: Rules) -> None:
    """Draw the target and the limit as lines."""
    axes.axhline(100 * rules.target, color=GREY, linewidth=1)
    axes.axvline(limit, color=GREY, linewidth=1, linestyle="--")
    low, high = axes.get_xlim()
    axes.set_xlim(low, 1.15 * max(high, limit))
    words = f"budget {limit:g}"
    place = axes.get_xaxis_transform()
    axes.text(limit, 0.02, words, transform=place, rotation=90, ha="right", va="bottom", color=INK)


def _in_words(shown: Sequence[Entry], rules: Rules) -> str:
    texts = [
        f"{entry.name}: {100 * entry.accuracy:.1f} %, {entry.slow_bytes / 1e6:.1f} MB, "
        + ("target not reached" if entry.seconds is None else f"target after {entry.seconds:.1f} s")
        for entry in shown
    ]
    return (
        "Accuracy of the entries over the bytes between the nodes, and over seconds. "
        f"Target {100 * rules.target:g} %, budget {rules.slow_bytes / 1e6:g} MB and "
        f"{rules.seconds:g} s. " + "; ".join(texts or ["No entry has submitted weights"]) + "."
    )
