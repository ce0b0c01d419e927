"""The layout of the figure: the page, the lanes, and what is too small to be drawn alone.

Up and down is measured in inches from the top, so that a pixel is a pixel whatever the lanes are;
across is measured in the unit of the axis.
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
# A lane of a few ranks, in inches: computing thread, background operations, gap below.
_THREAD, _BACKGROUND, _GAP = 0.27, 0.42, 0.16
MOST_ROWS = 8
# Narrower than that (pixels), operations are drawn together.
_NARROW = 3
_TICK = 1.5
# From the bottom: the stronger a state, the firmer it stands.
_STACK = (COMMUNICATING, STUCK, AWAITING, WAITING)


@dataclass
class Page:
    """A page of lanes: what it shows, and how large.

    Attributes:
        width: of the figure in inches.
        since, until: seconds.
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
        # A close look at what happened late counts from there: "500000.3 ms" can't be read.
        digit = 10.0 ** math.floor(math.log10(span))
        self.base = math.floor(self.since / digit) * digit if self.since > 5 * span else 0.0
        # Room for the marks of what has no end.
        margin = 0.012 * span
        self.shown = (self.since - margin, self.until + margin)
        self.pixel = (self.shown[1] - self.shown[0]) / ((self.width - LEFT - RIGHT) * DPI)

    @property
    def high(self) -> float:
        """Return the inches of all lanes. They depend on who communicated how, not on times."""
        return max(self.edges[-1], 0.5)

    def thread(self, rank: int) -> tuple[float, float]:
        """Return top and bottom of the computing thread's bar."""
        top = self.edges[rank] + self.scale * _GAP / 2
        return top, top + self.scale * _THREAD

    def row(self, rank: int, row: int, rows: int) -> tuple[float, float]:
        """Return top and bottom of a row of background operations."""
        _, top = self.thread(rank)
        top += 0.03 * self.scale
        # Two rows fill the room well; a single one need not be as thick as the thread's bar.
        high = self.scale * (_BACKGROUND - 0.03) / max(min(rows, MOST_ROWS), 2)
        top += min(row, MOST_ROWS - 1) * high
        return top, top + 0.88 * high

    def band(self, rank: int) -> tuple[float, float]:
        """Return top and bottom of the whole lane."""
        return self.edges[rank], self.edges[rank + 1]

    def across(self, seconds: float) -> float:
        """Return where a time is on the axis."""
        return (seconds - self.base) / self.second

    @property
    def axis_label(self) -> str:
        """Return what the axis shows."""
        if not self.base:
            return f"time since the cell began [{self.unit}]"
        unit, second = phrases.time_unit(self.base)
        after = f"{self.base / second:.9g} {unit}"
        return f"time from {after} after the cell began [{self.unit}]"

    def pixels(self, seconds: float) -> float:
        """Return how wide a time is."""
        return seconds / self.pixel

    def font(self, high: float) -> float:
        """Return the points of a label in a bar of so many inches; 0 where it can't be read."""
        return next((points for least, points in _FONTS if high >= least), 0)


# Inches of a bar and points of its label.
_FONTS = ((0.155, 8), (0.09, 6.5))


def view(lanes: list[Lane]) -> tuple[float, float]:
    """Return from when to when the figure shows by default (seconds).

    All of the cell, or where communication takes less than a quarter, that part with a margin:
    imports and data sets at the cell's beginning would squeeze the rest.
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
    """A piece of a bar: a state, seconds across, and from which to which share of the height."""

    begin: float
    end: float
    state: str
    low: float = 0.0
    high: float = 1.0


def pieces(parts: Iterable[Part], pixel: float) -> list[Piece]:
    """Return parts in order as pieces, few of them however many parts there are.

    A narrow part alone becomes a tick. Where narrow parts follow each other, columns of a few
    pixels show by height how the time was shared.
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
