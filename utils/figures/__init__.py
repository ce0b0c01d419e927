"""The look of every figure, and the drawings that labs share.

Colors are those of Okabe and Ito (2008), which people with any color vision can tell
apart. Figures stand on a white card, so that they read on light and dark pages alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from . import alt, forms

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, YELLOW, GREY = "#D55E00", "#56B4E9", "#F0E442", "#6E6E6E"
CYCLE = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
INK, PAPER, PALE = "#222222", "#FFFFFF", "#EDEDED"

_STYLE = {
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.prop_cycle": plt.cycler(color=CYCLE),
    "grid.color": PALE,
    "axes.axisbelow": True,
    "font.size": 11,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def use_style() -> None:
    """Give every figure of this kernel the course's look, and a description in words."""
    plt.rcParams.update({**_STYLE, "figure.dpi": forms.dpi()})
    alt.install()


def chart(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure (inches) with one pair of axes, in the course's look."""
    use_style()
    return plt.subplots(figsize=(width, height))


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure (inches) without axes, to draw boxes and arrows on."""
    figure, axes = chart(width, height)
    axes.set_axis_off()
    axes.grid(False)
    return figure, axes


def box(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    width: float = 1.0,
    height: float = 0.5,
    color: str = SKY,
    alpha: float = 0.35,
) -> None:
    """Draw a labeled box, centered at (x, y) in the units of the axes."""
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0.02,rounding_size=0.08",
            facecolor=color,
            edgecolor=INK,
            alpha=alpha,
        )
    )
    axes.text(x, y, text, ha="center", va="center")


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    *,
    color: str = INK,
    bend: float = 0.0,
) -> None:
    """Draw an arrow with a word beside its middle."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=14,
            color=color,
            linewidth=1.6,
            connectionstyle=f"arc3,rad={bend}",
        )
    )
    if text:
        across, up = end[0] - start[0], end[1] - start[1]
        # The middle of matplotlib's arc3, a quadratic Bézier curve.
        x = (start[0] + end[0] + bend * up) / 2
        y = (start[1] + end[1] - bend * across) / 2
        axes.text(x, y + 0.06, text, ha="center", va="bottom", color=color, fontsize=10)


def fit_limits(axes: Axes, xs: Sequence[float], ys: Sequence[float], margin: float = 0.8) -> None:
    """Show all of a drawing, with the same unit across and up."""
    axes.set_xlim(min(xs) - margin, max(xs) + margin)
    axes.set_ylim(min(ys) - margin, max(ys) + margin)
    axes.set_aspect("equal")


def name_rows(
    axes: Axes,
    names: Sequence[str],
    places: Sequence[float] | None = None,
    size: float | None = None,
) -> None:
    """Name the rows of a picture at its left, without ticks or grid lines.

    Args:
        axes: to draw on.
        names: of the rows.
        places: of the rows, by default 0, 1, …
        size: of the names in points.
    """
    axes.set_yticks(range(len(names)) if places is None else places, names, fontsize=size)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def write_beside(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **look: Any
) -> None:
    """Write a text so many points (across, up) away from a place in the units of the axes."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **look)
