"""A description of a picture in words, made from its contents, for readers who can't see it.

:func:`install` makes the kernel send these words with every figure. They are the alternative text
of the image (``metadata["image/png"]["alt"]``, which nbconvert writes into its pages), and the
plain text of the output, instead of ``<Figure size 800x400>``. The kernel also gets the image from
:mod:`utils.figures.forms`.
"""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
from IPython import get_ipython
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

#: Most characters of a description.
MOST = 800
#: Up to this many bars or points are described one by one.
_FEW = 12


def install() -> None:
    """Describe each figure that this kernel shows from now on; without a kernel, do nothing."""
    shell = get_ipython()
    if shell is not None:
        # This loads matplotlib's backend, which would otherwise replace the formatter later.
        plt.draw_if_interactive()
        shell.display_formatter.mimebundle_formatter.for_type(Figure, _bundle)
        shell.display_formatter.formatters["image/png"].for_type(Figure, _png)


def _bundle(figure: Figure, include: object = None, exclude: object = None) -> tuple[dict, dict]:
    from . import forms

    return forms.described(figure, tight=True)


def _png(figure: Figure) -> bytes | None:
    """Return the figure's pixels; None for an empty figure, which would be a blank area."""
    from . import forms

    return forms.png(figure, tight=True) if figure.axes or figure.lines else None


def describe(figure: Figure) -> str:
    """Return a figure in words: titles, axes and units, and every series with its values.

    If the figure has an attribute ``alt_text``, this text is the description.
    """
    words = getattr(figure, "alt_text", None)
    if words is None:
        words = " ".join(map(_axes, figure.axes))
    words = " ".join(words.replace("$", "").split()) or "A figure without words."
    return words if len(words) <= MOST else words[: MOST - 1].rsplit(" ", 1)[0] + " …"


def _axes(axes: Axes) -> str:
    titles = (axes.get_title(loc=place) for place in ("left", "center", "right"))
    parts = [next(filter(None, titles), "")]
    texts = "; ".join(text.get_text() for text in axes.texts if text.get_text().strip())
    if axes.axison:
        parts.append(" against ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel()))))
        parts += [*_series(axes), texts]
    elif texts:
        parts.append(f"Drawing with the words: {texts}")
    return " ".join(part if part[-1] in ".:?!" else f"{part}." for part in parts if part)


def _series(axes: Axes) -> Iterator[str]:
    """Yield a sentence for each line and each set of bars."""
    inside = set()
    for container in axes.containers:
        inside |= set(map(id, container.get_children()))
        if isinstance(container, BarContainer):
            yield _bars(axes, container)
    for line in axes.get_lines():
        if id(line) not in inside:
            yield _line(line)
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer) and container.lines[0]:
            yield _line(container.lines[0], _own(container.get_label()))


def _line(line: Line2D, name: str = "") -> str:
    """Return a line's values in words; "" for a line without a name or without values."""
    name = name or _own(line.get_label())
    try:
        x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    except (TypeError, ValueError):
        return ""
    if not name or x.shape != y.shape:
        return ""
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if not len(x):
        return ""
    if len(x) <= _FEW:
        return f"{name}: " + ", ".join(f"{b:.3g} at {a:.3g}" for a, b in zip(x, y, strict=True))
    return (
        f"{name}: {y[0]:.3g} at {x[0]:.3g} to {y[-1]:.3g} at {x[-1]:.3g}, "
        f"lowest {y.min():.3g}, highest {y.max():.3g}"
    )


def _bars(axes: Axes, bars: BarContainer) -> str:
    """Return the lengths of bars, with their labels on the axis."""
    upright = bars.orientation == "vertical"
    axis = axes.xaxis if upright else axes.yaxis
    lengths = bars.datavalues
    places = [bar.get_center()[0 if upright else 1] for bar in bars]
    start = f"{_own(bars.get_label()) or 'bars'}: "
    if len(lengths) > _FEW:
        return f"{start}{len(lengths)} of {min(lengths):.3g} to {max(lengths):.3g}"
    ticks = {
        round(float(place), 6): f" ({label.get_text()})"
        for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
        if label.get_text()
    }
    names = (ticks.get(round(float(place), 6), "") for place in places)
    return start + ", ".join(
        f"{length:.3g}{name}" for length, name in zip(lengths, names, strict=True)
    )


def _own(label: object) -> str:
    """Return a label, or "" for matplotlib's default labels, which begin with an underscore."""
    text = str(label or "")
    return "" if text.startswith("_") else text
