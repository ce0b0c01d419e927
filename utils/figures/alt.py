"""A picture in words, made from what it shows: for those who hear it, and where no picture is.

:func:`install` has the kernel send these words with every figure: as the alternative text of the
image (``metadata["image/png"]["alt"]``, which nbconvert writes into its pages), and as the plain
text of the output, in place of ``<Figure size 800x400>``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from IPython import get_ipython
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

#: Letters of a description.
MOST = 800
#: Bars and single points that are told one by one.
_FEW = 12


def install() -> None:
    """Describe each figure that this kernel shows from now on; nothing without a kernel."""
    shell = get_ipython()
    if shell is not None:
        shell.display_formatter.mimebundle_formatter.for_type(Figure, _bundle)


def _bundle(figure: Figure, include: object = None, exclude: object = None) -> tuple[dict, dict]:
    from . import forms

    said = describe(figure)
    data = {"text/plain": said}
    about = {forms.PNG: {"alt": said}}  # the PNG itself is IPython's
    if forms.wanted():
        data[forms.SVG], about[forms.SVG] = forms.svg(figure, tight=True), {"alt": said}
    return data, about


def describe(figure: Figure) -> str:
    """Return what a figure shows: titles, axes and units, every series with its values.

    A figure with an attribute ``alt_text`` is described by that.
    """
    said = getattr(figure, "alt_text", None)
    if said is None:
        said = " ".join(text for axes in figure.axes if (text := _axes(axes)))
    said = " ".join(said.replace("$", "").split()) or "A figure without words."
    return said if len(said) <= MOST else said[: MOST - 1].rsplit(" ", 1)[0] + " …"


def _axes(axes: Axes) -> str:
    title = next((t for loc in ("left", "center", "right") if (t := axes.get_title(loc=loc))), "")
    parts = [title]
    if axes.axison:
        across, up = axes.get_xlabel(), axes.get_ylabel()
        if across or up:
            parts.append(" against ".join(filter(None, (up, across))))
        parts += _series(axes)
    texts = [text.get_text() for text in axes.texts if text.get_text().strip()]
    if texts:
        parts.append(("Drawing with the words: " if not axes.axison else "") + "; ".join(texts))
    return " ".join(part if part[-1] in ".:?!" else f"{part}." for part in parts if part)


def _series(axes: Axes) -> Iterator[str]:
    """A sentence for each line and each set of bars."""
    for container in axes.containers:
        if isinstance(container, BarContainer):
            yield _bars(axes, container)
    inside = {id(part) for container in axes.containers for part in container.get_children()}
    for line in axes.get_lines():
        if id(line) not in inside and (said := _line(line)):
            yield said
    for container in axes.containers:
        if not isinstance(container, BarContainer) and container.lines and container.lines[0]:
            yield _line(container.lines[0], _own(container.get_label()))


def _line(line: Line2D, name: str = "") -> str:
    name = name or _own(line.get_label())
    try:
        x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    except (TypeError, ValueError):
        return ""
    there = np.isfinite(x) & np.isfinite(y) if x.shape == y.shape else np.zeros(0, bool)
    x, y = x[: len(there)][there], y[: len(there)][there]
    if not name or not len(x):
        return ""
    if len(x) <= _FEW:
        return f"{name}: " + ", ".join(f"{b:.3g} at {a:.3g}" for a, b in zip(x, y, strict=True))
    low, high = y.min(), y.max()
    return (
        f"{name}: {y[0]:.3g} at {x[0]:.3g} to {y[-1]:.3g} at {x[-1]:.3g}, "
        f"lowest {low:.3g}, highest {high:.3g}"
    )


def _bars(axes: Axes, bars: BarContainer) -> str:
    """The lengths, by what stands at the axis."""
    upright = getattr(bars, "orientation", "vertical") == "vertical"
    axis = axes.xaxis if upright else axes.yaxis
    ticks = {
        round(float(place), 6): label.get_text()
        for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
    }
    lengths = [bar.get_height() if upright else bar.get_width() for bar in bars]
    places = [
        bar.get_x() + bar.get_width() / 2 if upright else bar.get_y() + bar.get_height() / 2
        for bar in bars
    ]
    name = _own(bars.get_label())
    start = f"{name}: " if name else "bars: "
    if len(lengths) > _FEW:
        return f"{start}{len(lengths)} of {min(lengths):.3g} to {max(lengths):.3g}"
    said = []
    for place, length in zip(places, lengths, strict=True):
        at = ticks.get(round(float(place), 6), "")
        said.append(f"{length:.3g} ({at})" if at else f"{length:.3g}")
    return start + ", ".join(said)


def _own(label: object) -> str:
    """A name that somebody gave; matplotlib's own begin with an underscore."""
    text = str(label or "")
    return "" if text.startswith("_") else text
