"""Figures with axes: panels beside each other, lanes of time, groups of bars, and legends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .palette import INK, SERIES, use_style


def chart(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure (inches) with one pair of axes, in the course's look."""
    use_style()
    return plt.subplots(figsize=(width, height))


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, **look: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure (inches) and its axes, row by row; `look` is as for `plt.subplots`."""
    use_style()
    figure, grid = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **look)
    return figure, list(grid.flat)


def finish(figure: Figure, words: str = "", *, above: float = 0.0, below: float = 0.0) -> Figure:
    """Fit the drawing into the figure, and return the figure with its words.

    Args:
        words: description; by default, :func:`utils.figures.alt.describe` makes it.
        above, below: shares of the height that are left for a legend.
    """
    figure.tight_layout(rect=(0, below, 1, 1 - above))
    if words:
        figure.alt_text = words
    return figure


def name_rows(
    axes: Axes,
    names: Sequence[str],
    places: Sequence[float] | None = None,
    size: float | None = None,
) -> None:
    """Name the rows at 0, 1, …, or at `places`, without ticks and grid; `size` is in points."""
    axes.set_yticks(range(len(names)) if places is None else places, names, fontsize=size)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def add_lanes(axes: Axes, names: Sequence[str], until: float) -> None:
    """Make room for a lane per name, from top to bottom, and for times from 0 to `until`."""
    name_rows(axes, names)
    axes.grid(False)
    axes.set(xlim=(0, until), ylim=(len(names) - 0.4, -0.6))


def group_bars(
    axes: Axes,
    heights: Mapping[str, Sequence[float]],
    names: Sequence[str],
    share: float = 0.9,
    colors: Sequence[str] = SERIES,
) -> list[BarContainer]:
    """Draw groups of bars beside each other, and name the groups.

    Args:
        heights: for each label of the legend, the height of its bar in each group.
        share: share of its place that a bar fills.
        colors: colors of the labels, in the same order.
    """
    width = 0.8 / len(heights)
    drawn = []
    for k, (label, values) in enumerate(heights.items()):
        places = [group - 0.4 + width * (k + 0.5) for group in range(len(values))]
        drawn.append(axes.bar(places, values, width * share, color=colors[k], label=label))
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    return drawn


def keys(colors: Mapping[str, Any], **look: Any) -> list[Patch]:
    """Return keys of a legend, from the color of each label; `look` is as for `Patch`."""
    look = {"edgecolor": INK} | look
    return [Patch(facecolor=color, label=label, **look) for label, color in colors.items()]


def legend_beside(axes: Axes, **look: Any) -> None:
    """Put the legend to the right of the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), **look)


def legend_below(figure: Figure, axes: Axes, columns: int | None = None, **look: Any) -> None:
    """Put the legend of these axes below all panels of a figure."""
    handles, labels = axes.get_legend_handles_labels()
    columns = columns or len(labels)
    figure.legend(handles, labels, loc="lower center", ncols=columns, **look)
