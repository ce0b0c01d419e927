"""The colors and the style of every figure.

The colors are from Okabe and Ito (2008): people with any color vision can distinguish them.
Figures have a white background, so that they are readable on light and dark pages.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb, to_rgba

from . import alt, forms

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, YELLOW, GREY = "#D55E00", "#56B4E9", "#F0E442", "#6E6E6E"
CYCLE = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
#: Colors of adjacent bars that mean neither an activity nor a rank.
SERIES = (SKY, PINK, GREEN, YELLOW)
INK, PAPER, PALE = "#222222", "#FFFFFF", "#EDEDED"

# Each activity of a rank has one color in all labs. Waiting is hatched, so that it can be seen even
# without colors. During exposed communication, the rank can't compute.
COMPUTING, COMMUNICATING, WAITING, EXPOSED = "#B8B8B8", BLUE, ORANGE, RED
#: Three kinds of computing, from light to dark.
FORWARD, BACKWARD, UPDATE = "#DEDEDE", "#ABABAB", "#747474"
HATCH = "//////"
#: The look of waiting, as keyword arguments of matplotlib's patches.
WAITING_LOOK = {"facecolor": "#FFF6E3", "edgecolor": WAITING, "hatch": HATCH, "linewidth": 0.8}
#: The colors of ranks 0, 1, …; none of them means an activity. With normal color vision and
#: without red or green cones, any two of these and of the activities' differ clearly.
RANKS = ("#0E8370", "#BEA3F5", "#802A00", "#2B0080", "#CCEBAD", "#145252", "#F0FF66", "#150F2E")
#: The color of things that belong to no single rank: a result of all ranks, a server, the notebook.
SHARED = YELLOW


def rank_color(rank: int) -> str:
    """Return the color that a rank has in every picture of the course."""
    return RANKS[rank % len(RANKS)]


def tint(color: Any, strength: float) -> tuple[float, float, float]:
    """Return a color on white paper: strength 1 is full, 0 is white."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(color))
    return red, green, blue


def ink_on(color: Any) -> str:
    """Return the color in which words are easier to read on this color: ink or paper.

    Args:
        color: a matplotlib color; a transparent color is assumed to be on white paper.
    """
    ground = tint(color, to_rgba(color)[3])
    return max((INK, PAPER), key=lambda words: _contrast(words, ground))


def _contrast(one: Any, other: Any) -> float:
    """Return the contrast of two colors as WCAG 2 defines it, a ratio of luminances."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: Any) -> float:
    """Return the relative luminance of an sRGB color."""
    parts = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(color))
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


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
    """Give every figure of this kernel the course's look and a description in words."""
    plt.rcParams.update({**_STYLE, "figure.dpi": forms.dpi()})
    alt.install()
