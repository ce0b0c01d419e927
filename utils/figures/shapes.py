"""Drawings without axes: boxes, arrows, cells, and words beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from .charts import chart
from .palette import INK, SKY, WAITING_LOOK, ink_on, rank_color

Pair = tuple[float, float]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure (inches) without axes, for boxes and arrows."""
    figure, axes = chart(width, height)
    axes.set_axis_off()
    axes.grid(False)
    return figure, axes


def frame(axes: Axes, x: Pair, y: Pair, words: str, *, equal: bool = False) -> Figure:
    """Show this part of a drawing, and return the figure with its words.

    Args:
        x, y: limits of the part.
        equal: use the same unit across and up.
    """
    axes.set(xlim=x, ylim=y)
    if equal:
        axes.set_aspect("equal")
    axes.figure.alt_text = words
    return axes.figure


def fit_limits(axes: Axes, xs: Sequence[float], ys: Sequence[float], margin: float = 0.8) -> None:
    """Show all of a drawing, with the same unit across and up."""
    axes.set_xlim(min(xs) - margin, max(xs) + margin)
    axes.set_ylim(min(ys) - margin, max(ys) + margin)
    axes.set_aspect("equal")


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
    **look: Any,
) -> None:
    """Draw a labeled box, centered at (x, y) in the units of the axes.

    Args:
        look: as for `FancyBboxPatch`, such as `WAITING_LOOK`.
    """
    corner = (x - width / 2, y - height / 2)
    look = {"facecolor": color, "edgecolor": INK, "alpha": alpha} | look
    form = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=form, **look))
    axes.text(x, y, text, ha="center", va="center", **_words_on(look))


def rank_box(
    axes: Axes,
    x: float,
    y: float,
    rank: int,
    text: str = "",
    *,
    width: float = 1.0,
    height: float = 0.5,
) -> None:
    """Draw a box in the color of a rank; without a text, the box names the rank."""
    look = {"width": width, "height": height, "color": rank_color(rank), "alpha": 1.0}
    box(axes, x, y, text or f"rank {rank}", **look)


def waiting_box(
    axes: Axes, x: float, y: float, text: str, *, width: float = 1.0, height: float = 0.5
) -> None:
    """Draw a box with the look of waiting."""
    box(axes, x, y, text, width=width, height=height, alpha=1.0, **WAITING_LOOK)


def _words_on(look: dict[str, Any]) -> dict[str, Any]:
    """Return the look of words on a patch: readable on its color, with a card above a hatch."""
    ground = to_rgba(look["facecolor"], look.get("alpha"))
    words: dict[str, Any] = {"color": ink_on(ground)}
    if look.get("hatch"):
        words["bbox"] = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1.5}
    return words


def arrow(
    axes: Axes,
    start: Pair,
    end: Pair,
    text: str = "",
    *,
    color: str = INK,
    bend: float = 0.0,
    style: str = "-",
) -> None:
    """Draw an arrow with a word beside its middle; `style` is of its line, such as "--"."""
    look = {"color": color, "linewidth": 1.6, "connectionstyle": f"arc3,rad={bend}"}
    look |= {"arrowstyle": "-|>", "mutation_scale": 14, "linestyle": style}
    axes.add_patch(FancyArrowPatch(start, end, **look))
    if text:
        across, up = end[0] - start[0], end[1] - start[1]
        # The middle of matplotlib's arc3, a quadratic Bézier curve.
        x = (start[0] + end[0] + bend * up) / 2
        y = (start[1] + end[1] - bend * across) / 2
        axes.text(x, y + 0.06, text, ha="center", va="bottom", color=color, fontsize=10)


def link(axes: Axes, start: Pair, end: Pair, style: str = "->", **look: Any) -> None:
    """Draw a thin arrow; `style` is matplotlib's arrow style, such as "<|-|>" for both ways."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": style} | look)


def write_beside(axes: Axes, text: str, place: Pair, offset: Pair, **look: Any) -> None:
    """Write a text at an offset (across, up) in points from a place in units of the axes."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **look)


def cell(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    color: Any,
    text: str = "",
    *,
    height: float = 0.8,
    fontsize: float | None = None,
    **look: Any,
) -> None:
    """Draw a rectangle of a table or a lane, with a text in its middle.

    Args:
        x: position of the left side.
        y: position of the middle.
        fontsize: size of the text in points.
        look: as for `Rectangle`.
    """
    corner = (x, y - height / 2)
    look = {"facecolor": color, "edgecolor": INK} | look
    axes.add_patch(Rectangle(corner, width, height, **look))
    if text:
        words = {"ha": "center", "va": "center", "fontsize": fontsize} | _words_on(look)
        axes.text(x + width / 2, y, text, **words)
