"""A page that is drawn from top to bottom; at the end, the figure is fitted around it."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from . import INK, canvas


class Page:
    """A page without axes, which grows downward from 0.

    Args:
        width: width in units of the page.
        inches: the same width in inches.
        left: left margin in units of the page.

    Attributes:
        x, y: position of the next words and shapes, in units of the page; y is never positive.
        unit: inches per unit.
    """

    def __init__(self, width: float, inches: float, left: float = 0.0):
        self.width = width
        self.unit = inches / width
        self.left = left
        self.x, self.y = 0.0, -0.1
        self.figure, self.axes = canvas(inches, 1)

    def down(self, by: float) -> None:
        """Move the position down by some units."""
        self.y -= by

    def heading(self, text: str) -> None:
        """Write a heading below the present position."""
        self.down(0.9)
        self.words(0, 0.1, text, fontsize=12)

    def words(self, x: float, up: float, text: str, **look: Any) -> None:
        """Write a text at an offset from the present position; `look` is as for `Axes.text`."""
        look = {"fontsize": 10.0, "color": INK} | look
        self.axes.text(self.x + x + self.left, self.y + up, text, **look)

    def finish(self, words: str) -> Figure:
        """Fit the figure around the page, and return it with its words.

        The figure is closed in pyplot, so that a notebook shows it only once.
        """
        height = -self.y
        self.figure.set_size_inches(self.width * self.unit, height * self.unit)
        self.axes.set_position([0, 0, 1, 1])
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(-height, 0)
        plt.close(self.figure)
        self.figure.alt_text = words
        return self.figure
