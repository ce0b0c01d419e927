"""The colors and the style of every figure.

Colors are those of Okabe and Ito (2008), which people with any color vision can tell
apart. Figures stand on a white card, so that they read on light and dark pages alike.
"""

from __future__ import annotations

import matplotlib.pyplot as plt

from . import alt, forms

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, YELLOW, GREY = "#D55E00", "#56B4E9", "#F0E442", "#6E6E6E"
CYCLE = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
INK, PAPER, PALE = "#222222", "#FFFFFF", "#EDEDED"

# What a rank does has one color in all labs. Waiting is also hatched, so that it differs without
# colors. Exposed communication is communication during which the rank can't compute.
COMPUTING, COMMUNICATING, WAITING, EXPOSED = "#B8B8B8", BLUE, ORANGE, RED
HATCH = "//////"
#: The colors of ranks 0, 1, …; none of them means an activity.
RANKS = ("#009E73", "#CC79A7", "#7A4FBF", "#56B4E9", "#8C6D1F", "#F0E442", "#117733", "#AA4499")


def rank_color(rank: int) -> str:
    """Return the color that a rank has in every picture of the course."""
    return RANKS[rank % len(RANKS)]


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
