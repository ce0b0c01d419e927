"""The layout of the figure: the page, the lanes, and parts that are too small to draw alone.

Vertical positions are inches from the top, so that a pixel has the same size for all lanes.
Horizontal positions have the unit of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from . import activity, phrases
from .activity import AWAITING, COMMUNICATING, STUCK, WAITING, Lane, Part

DPI = 100
# Inches around the lanes: room for the title, the ranks' names, the axis and the legend.
LEFT, RIGHT, TOP, BOTTOM = 0.72, 0.2, 0.62, 1.19
WITHOUT_LEGEND = 0.55  # below the lanes
# Heights in a figure with few ranks, in inches: computing thread, background operations, gap.
_THREAD, _BACKGROUND, _GAP = 0.27, 0.42, 0.16
MOST_ROWS = 8
# Operations that are narrower (in pixels) are drawn together.
_NARROW = 3
_TICK = 1.5
# The stacking order of the states, from the bottom; stronger states are lower.
_STACK = (COMMUNICATING, STUCK, AWAITING, WAITING)


@dataclass
class Page:
    """A page of lanes: the part of the run that it shows, and its sizes.

    Attributes:
        width: width of the figure in inches.
        since, until: begin and end of the part in seconds.
        background: for each lane, whether it needs room for background operations.
    """

    width: float
    since: float
    until: float
    background: tuple[bool, ...]
    scale: float = field(init=False)
    edges: list[float] = field(init=False)  # inches from the top, between lanes

    def __post_init__(self):
        self.scale = min(1.0, max(0.4, 2 / max(len(self.background), 1) ** 0.5))
        highs = (self.scale * (_THREAD + _GAP + _BACKGROUND * below) for below in self.background)
        self.edges = list(accumulate(highs, initial=0.0))
        span = self.until - self.since
        self.unit, self.second = phrases.time_unit(span)
        # A narrow part late in the run counts from a later zero, because nobody can read
        # "500000.3 ms".
        digit = 10.0 ** math.floor(math.log10(span))
        self.base = math.floor(self.since / digit) * digit if self.since > 5 * span else 0.0
        # Room for the marks of operations that never ended.
        margin = 0.012 * span
        self.shown = (self.since - margin, self.until + margin)
        self.pixel = (self.shown[1] - self.shown[0]) / ((self.width - LEFT - RIGHT) * DPI)

    @property
    def high(self) -> float:
        """Return the height of all lanes in inches; it doesn't depend on times."""
        return max(self.edges[-1], 0.5)

    def thread(self, rank: int) -> tuple[float, float]:
        """Return top and bottom of the computing thread's bar."""
        top = self.edges[rank] + self.scale * _GAP / 2
        return top, top + self.scale * _THREAD

    def row(self, rank: int, row: int, rows: int) -> tuple[float, float]:
        """Return top and bottom of a row of background operations."""
        _, top = self.thread(rank)
        top += 0.03 * self.scale
        # Two rows fill the room; a single row should be thinner than the thread's bar.
        high = self.scale * (_BACKGROUND - 0.03) / max(min(rows, MOST_ROWS), 2)
        top += min(row, MOST_ROWS - 1) * high
        return top, top + 0.88 * high

    def band(self, rank: int) -> tuple[float, float]:
        """Return top and bottom of the whole lane."""
        return self.edges[rank], self.edges[rank + 1]

    def across(self, seconds: float) -> float:
        """Return the position of a time on the axis."""
        return (seconds - self.base) / self.second

    @property
    def axis_label(self) -> str:
        """Return the label of the axis."""
        if not self.base:
            return f"time since the cell began [{self.unit}]"
        unit, second = phrases.time_unit(self.base)
        after = f"{self.base / second:.9g} {unit}"
        return f"time from {after} after the cell began [{self.unit}]"

    def pixels(self, seconds: float) -> float:
        """Return the width of a time in pixels."""
        return seconds / self.pixel

    def font(self, high: float) -> float:
        """Return the font size of a label in a bar of this height; 0 if nobody could read it."""
        return next((points for least, points in _FONTS if high >= least), 0)


# The height of a bar in inches, and the font size of its label in points.
_FONTS = ((0.155, 8), (0.09, 6.5))


def view(lanes: list[Lane]) -> tuple[float, float]:
    """Return begin and end of the part that the figure shows by default, in seconds.

    This is the whole cell. If communication takes less than a quarter of it, it is the part with
    communication and a margin, because imports at the beginning would squeeze the rest.
    """
    last = max((lane.end for lane in lanes), default=0.0)
    spans = [activity.span(record, lane) for lane in lanes for record in lane.records]
    if not spans:
        return 0.0, last or 1e-3
    begins, ends = zip(*spans, strict=True)
    first, final = min(begins), max(ends)
    margin = 0.08 * (final - first) or 0.1 * last or 1e-4
    if final - first > 0.25 * last:
        return 0.0, max(last, final)
    return max(first - margin, 0.0), final + margin


# -- what is narrower than a few pixels ---------------------------------------------------------


@dataclass
class Piece:
    """A piece of a bar: begin and end in seconds, a state, and low and high share of the bar."""

    begin: float
    end: float
    state: str
    low: float = 0.0
    high: float = 1.0


def pieces(parts: Iterable[Part], pixel: float) -> list[Piece]:
    """Return parts in order as pieces, which are few even if there are many parts.

    A single narrow part becomes a tick. If narrow parts follow each other, columns of a few pixels
    show each state's share of the time by its height.
    """
    made: list[Piece] = []
    narrow: list[Part] = []
    for part in parts:
        if narrow and part[0] - narrow[-1][1] > _NARROW * pixel:
            made += _together(narrow, pixel)
            narrow = []
        if part[1] - part[0] >= _NARROW * pixel:
            made += [*_together(narrow, pixel), Piece(*part)]
            narrow = []
        else:
            narrow.append(part)
    return made + _together(narrow, pixel)


def _together(parts: list[Part], pixel: float) -> list[Piece]:
    if not parts:
        return []
    begin, end = parts[0][0], parts[-1][1]
    if end - begin < _NARROW * pixel:
        shares = _shares(parts)
        half = max(end - begin, _TICK * pixel) / 2
        middle = (begin + end) / 2
        return [Piece(middle - half, middle + half, max(shares, key=shares.get))]
    count = max(round((end - begin) / (_NARROW * pixel)), 1)
    step = (end - begin) / count
    columns: list[list[Part]] = [[] for _ in range(count)]
    for since, until, state in parts:
        first, final = (min(int((time - begin) / step), count - 1) for time in (since, until))
        for k in range(first, final + 1):
            low, high = max(since, begin + k * step), min(until, begin + (k + 1) * step)
            columns[k].append((low, max(low, high), state))
    made = []
    for k, column in enumerate(columns):
        made += _column(begin + k * step, begin + (k + 1) * step, column)
    return made


def _shares(parts: list[Part]) -> dict[str, float]:
    """Return the seconds of each state."""
    shares: dict[str, float] = {}
    for begin, end, state in parts:
        shares[state] = shares.get(state, 0.0) + end - begin
    return shares


def _column(begin: float, end: float, parts: list[Part]) -> list[Piece]:
    shares = _shares(parts)
    low = 0.0
    made = []
    for state in _STACK:
        share = min(shares.get(state, 0.0) / (end - begin), 1 - low)
        if share > 0:
            made.append(Piece(begin, end, state, low, low + share))
            low += share
    return made
