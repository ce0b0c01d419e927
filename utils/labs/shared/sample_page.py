"""A page of samples: boxes in the colors of ranks, a legend, and lists of samples in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from utils.figures import GREY, INK, PAPER, RED, rank_color, tint
from utils.figures.page import Page
from utils.figures.shapes import cell

MARKS = ("o", "s", "^", "D", "v", "P")
MOST_RANKS = len(MARKS)

# The height of a sample's box, the margin, and the least width. The box is 1 wide.
TALL, _LEFT, _WIDE = 1.5, 0.4, 30.5
_INCHES = 8.8  # the width of every figure
_LISTED = 12  # how many samples a list in words has at most
_NUMBER_COLORS = {"sample": INK, "repeated": RED, "dropped": GREY}


def require_drawable(p: int) -> None:
    """Raise ValueError if a drawing can't distinguish so many ranks."""
    if p > MOST_RANKS:
        raise ValueError(f"A drawing shows at most {MOST_RANKS} ranks, not {p}")


def listed(samples: list[int]) -> str:
    """Return sample numbers in words; of many numbers, only the first ones."""
    text = ", ".join(map(str, samples[:_LISTED]))
    more = len(samples) - _LISTED
    return f"{text}, and {more} more" if more > 0 else text


def ranks_in_words(lists: Sequence[Sequence[int]]) -> list[str]:
    """Return for each rank its name and its samples."""
    words = []
    for rank, samples in enumerate(lists):
        numbers = " ".join(map(str, samples)) or "none"
        few = len(samples) <= _LISTED
        words.append(f"rank {rank}: {numbers if few else f'{len(samples)} samples'}")
    return words


class SamplePage(Page):
    """A page of samples, whose unit is the width of a sample's box."""

    def __init__(self, width: float):
        # A few samples don't get huge, and many still fit.
        width = max(width + 2 * _LEFT, _WIDE if width <= _WIDE else 0)
        super().__init__(width, _INCHES, _LEFT)
        self.size = min(10.0, 30 * self.unit)  # points, for a sample's number

    def sample(self, x: float, number: int, rank: int, kind: str, pale: bool) -> None:
        """Draw a sample's box, whose top is at the present height."""
        x += self.x + _LEFT
        self._box(x, self.y, TALL, rank, kind, pale)
        color = tint(_NUMBER_COLORS[kind], 0.5 if pale else 1.0)
        look = {"fontsize": self.size, "color": color, "zorder": 3}
        self.axes.text(x + 0.5, self.y - 0.48, str(number), ha="center", va="center", **look)
        if kind != "dropped":
            self._mark(x + 0.5, self.y - 1.12, rank, 0.45 if pale else 1.0)

    def frame(self, first: float, last: float) -> None:
        """Draw a thick frame around the samples from `first` to `last`."""
        look = {"height": TALL + 0.2, "linewidth": 2.2, "zorder": 4}
        left = first + _LEFT - 0.1
        cell(self.axes, left, self.y - TALL / 2, last - first + 1.2, "none", **look)

    def legend(self, names: Sequence[str], others: Mapping[str, str], note: str) -> None:
        """Draw an entry for each rank and each other kind of box, and then the note."""
        self.down(0.75)
        x = 0.0
        for rank, name in enumerate(names):
            x = self._entry(x, name, rank, "sample")
        for kind, text in others.items():
            x = self._entry(x, text, None, kind)
        if note:
            self.words(x + 0.3, 0, note, color=GREY, va="center")
        self.down(0.7)

    def _entry(self, x: float, text: str, rank: int | None, kind: str) -> float:
        """Draw one entry; return where the next one begins."""
        letter = 0.078 / self.unit  # inches for a wide letter
        length = 1.5 + letter * len(text) + 0.8
        if x > 0 and x + length > self.width:
            x = 0.0
            self.down(1.2)
        left = x + _LEFT
        self._box(left + 0.1, self.y + 0.45, 0.9, rank, kind, pale=False)
        if rank is not None:
            self._mark(left + 0.6, self.y, rank, 1.0)
        self.words(x + 1.3, 0, text, va="center")
        return x + length

    def _box(
        self, x: float, top: float, height: float, rank: int | None, kind: str, pale: bool
    ) -> None:
        color = PAPER
        look: dict[str, Any] = {"edgecolor": GREY, "linewidth": 0.8}
        if kind == "sample":
            color = tint(rank_color(rank), 0.12 if pale else 0.38)
            look["edgecolor"] = tint(INK, 0.3 if pale else 0.7)
        elif kind == "repeated":
            look = {"edgecolor": RED, "linewidth": 1.6, "linestyle": (0, (3, 2))}
        cell(self.axes, x + 0.06, top - height / 2, 0.88, color, height=height, zorder=2, **look)
        if kind == "dropped":
            line = {"color": GREY, "linewidth": 1.0, "zorder": 2.5}
            self.axes.plot([x + 0.06, x + 0.94], [top - height, top], **line)

    def _mark(self, x: float, y: float, rank: int, strength: float) -> None:
        color, edge = tint(rank_color(rank), strength), tint(INK, strength)
        look: dict[str, Any] = {"color": color, "markeredgecolor": edge, "markeredgewidth": 0.6}
        self.axes.plot(x, y, MARKS[rank], markersize=5.5, zorder=3, **look)
