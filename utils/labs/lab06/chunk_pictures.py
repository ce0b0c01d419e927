"""Pictures of a student's all-reduce: which chunk travels when, and which ranks are in its sum.

They show what the ranks really did, as :func:`utils.labs.lab06.chunk_trace.watch` noted it::

    stories = ranks.view["story"]
    chunk_pictures.still(stories)                   # all steps in one figure
    chunk_pictures.film({"ring": stories, "tree": others})    # round by round, side by side
"""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from utils.checks.verdict import named
from utils.figures import GREY, INK, PAPER, RED, ink_on, rank_color
from utils.figures.interactive import Interactive
from utils.figures.page import Page
from utils.figures.shapes import cell as draw_cell
from utils.labs.lab06.chunk_steps import Cell, Move, RingSteps, steps
from utils.labs.lab06.chunk_trace import watch

__all__ = ["film", "steps", "still", "watch"]

SCRIPT = Path(__file__).with_name("film.js")
MOST_RANKS = 6
_INCHES = 8.8
_MARGIN = 0.12
_COMPLETE = "#DCEFE6"
_ABSENT = "#C9C9C9"
_LINES = {
    "added": "-",
    "copied": (0, (4, 2)),
    "kept": (0, (1, 1.5)),
    "other": (0, (6, 1.5, 1, 1.5)),
}
_EFFECTS = {
    "added": "is added to the old values",
    "copied": "replaces the old values",
    "kept": "does not change x (yet)",
    "other": "changes x in another way",
}


def still(stories: Sequence[dict], title: str = "") -> Figure:
    """Return all steps of an all-reduce in one figure.

    Args:
        stories: what :func:`watch` returned on each rank of the group.
        title: the title above the picture.
    """
    return stills({title: stories})


def film(runs: Mapping[str, Sequence[dict]] | Sequence[dict], title: str = "") -> Interactive:
    """Return one or more all-reduces side by side, with buttons and a slider for the round.

    Args:
        runs: what :func:`watch` returned on each rank of the group, by title, or for one run only.
        title: the title if there is only one run.
    """
    named = runs if isinstance(runs, Mapping) else {title: runs}
    films = [film_of(name, steps(stories)) for name, stories in named.items()]
    return Interactive(SCRIPT, {"films": films}, stills(named))


def stills(runs: Mapping[str, Sequence[dict]]) -> Figure:
    """Return all steps of several all-reduces, one below the other in one figure.

    Args:
        runs: what :func:`watch` returned on each rank of the group, by title.
    """
    rings = {title: _drawable(stories) for title, stories in runs.items()}
    sheet = _Sheet(list(rings.values()))
    for title, ring in rings.items():
        sheet.add(ring, title)
    return sheet.finish(" ".join(_in_words(ring, title) for title, ring in rings.items()))


def _drawable(stories: Sequence[dict]) -> RingSteps:
    """Return the steps, if there are few enough ranks for a picture.

    Raises:
        ValueError: there are too many.
    """
    ring = steps(stories)
    if len(ring.members) > MOST_RANKS:
        raise ValueError(
            f"the picture has room for {MOST_RANKS} ranks, but there are {len(ring.members)}: "
            "watch a smaller group"
        )
    return ring


def _panels_across(ring: RingSteps) -> int:
    """Return how many steps are drawn beside each other."""
    chunks = len(ring.bounds) - 1
    if chunks > 6:
        return 1
    return min(3 if chunks <= 2 else 2, len(ring.states))


# -- drawing: all lengths are inches --------------------------------------------------------------

_MARK = 0.155
_TEXT = 9

# A function that draws a key of the legend at x and y.
Key = Callable[[Axes, float, float], None]


class _Sheet(Page):
    """A page of panels, with a legend below them."""

    def __init__(self, rings: Sequence[RingSteps]):
        super().__init__(_INCHES, _INCHES, _MARGIN)
        self.rings = rings
        self.y = -0.08

    def add(self, ring: RingSteps, title: str) -> None:
        """Draw all steps of an all-reduce below the last drawing."""
        if title:
            self.words(0, 0, title, va="top", fontsize=12)
            self.down(0.34)
        across = _panels_across(ring)
        gap = 0.25
        width = (_INCHES - 2 * _MARGIN - gap * (across - 1)) / across
        for step in range(len(ring.states)):
            panel = _Panel(ring, step, width)
            column = step % across
            panel.draw(self.axes, _MARGIN + column * (width + gap), self.y)
            if column == across - 1 or step == len(ring.moves):
                self.down(panel.height + 0.2)

    def finish(self, words: str) -> Figure:
        """Return the figure with a legend and notes below; `words` describe it."""
        self._legend()
        for note in itertools.chain(*(ring.notes for ring in self.rings)):
            for line in textwrap.wrap(f"{note}.", 110):
                self.words(0, 0, line, va="top", fontsize=9, color=RED)
                self.down(0.2)
        self.down(0.05)
        return super().finish(words)

    def _legend(self) -> None:
        x = 0.0
        self.down(0.12)
        for width, text, draw in _entries(self.rings):
            length = width + 0.08 + 0.068 * len(text) + 0.25
            if x > 0 and _MARGIN + x + length > _INCHES:
                x = 0.0
                self.down(0.28)
            draw(self.axes, _MARGIN + x, self.y)
            self.words(x + width + 0.08, 0, text, va="center", fontsize=_TEXT)
            x += length
        self.down(0.22)


def _entries(rings: Sequence[RingSteps]) -> Iterator[tuple[float, str, Key]]:
    """Yield the width of each key, its words, and the function that draws it."""
    ring = rings[0]
    who = _contributors(ring)
    both = dict(list(who.items())[:2])
    first = next(iter(both))
    members = range(len(ring.members))
    once = Cell(tuple(int(r in both) for r in members))
    twice = Cell(tuple(2 * (r == first) for r in members))
    ranks = f"rank{'s' * (len(both) > 1)} " + " and ".join(map(str, both.values()))
    marks = functools.partial(_Marks(who).draw, cell=once)
    yield _MARK * len(who), f"after the round: the sum over {ranks}", marks
    yield 0.28, "changed in this round", _key(PAPER, edgecolor=INK, linewidth=1.6)
    yield 0.28, "the sum over all ranks", _key(_COMPLETE)
    looks = set().union(*map(_looks, rings))
    for effect, words in _EFFECTS.items():
        if effect in looks:
            yield 0.4, words, functools.partial(_draw_arrow, across=0.4, up=0.0, effect=effect)
    two = functools.partial(_Marks({first: 0}).draw, cell=twice)
    others: dict[str, tuple[float, str, Key]] = {
        "buffer": (0.28, "a buffer, not x", _key(PAPER, linestyle=":")),
        "twice": (_MARK, f"rank {who[first]} was added twice", two),
        "no sum": (0.1, "not a sum of the ranks' numbers", functools.partial(_say, text="?")),
        "moved": (0.5, "numbers of other elements", functools.partial(_say, text="not here")),
    }
    yield from (entry for look, entry in others.items() if look in looks)


def _key(color: str, **look: Any) -> Key:
    look = {"edgecolor": GREY, "linewidth": 0.8} | look
    return functools.partial(draw_cell, width=0.28, height=0.18, color=color, **look)


def _looks(ring: RingSteps) -> set[str]:
    """Return the looks of cells and arrows that occur in the picture."""
    looks = {move.effect for row in ring.moves for move in row if move.chunk is not None}
    for cell in itertools.chain(*itertools.chain(*ring.states)):
        if cell.buffer:
            looks.add("buffer")
        if cell.moved:
            looks.add("moved")
        if cell.counts is None:
            looks.add("no sum")
        elif max(cell.counts) > 1:
            looks.add("twice")
    return looks


class _Panel:
    """The drawing of one step, with a row for each rank and a column for each chunk."""

    def __init__(self, ring: RingSteps, step: int, width: float):
        self.ring = ring
        self.step = step
        self.who = _contributors(ring)
        self.names = 0.25 + 0.06 * len(f"rank {ring.members[-1]}")
        self.head = 0.43
        inside = width - self.names
        # The marks of all ranks are in one line if it leaves a lane for the arrows.
        self.marks = _Marks(self.who)
        if sum(self._needed()) > inside and len(self.who) > 2:
            self.marks = self.marks._replace(lines=2)
        self.row = 0.27 if self.marks.lines == 1 else 0.43
        self.height = self.head + len(ring.members) * self.row
        needed = self._needed()
        spare = max(0.0, inside - sum(needed)) / max(1, ring.length)
        shrink = min(1.0, inside / sum(needed))
        lengths = [end - begin for begin, end in itertools.pairwise(ring.bounds)]
        self.columns = [
            shrink * least + spare * length for least, length in zip(needed, lengths, strict=True)
        ]

    def _needed(self) -> list[float]:
        """Return the least width of each column: the marks, and a lane for each arrow."""
        needed = []
        for chunk in range(len(self.ring.bounds) - 1):
            arrows = [sum(move.chunk == chunk for move in row) for row in self.ring.moves]
            lanes = max([1, *arrows])
            needed.append(self._taken() + (0.05 + 0.08 * lanes))
        return needed

    def _taken(self) -> float:
        """Return the width of the marks of a cell."""
        return self.marks.per_line * self.marks.size + 0.06

    @property
    def title(self) -> str:
        if self.step == 0:
            return "at the start"
        messages, elements = self.ring.amounts[self.step - 1]
        numbers = f"{elements} number{'s' * (elements != 1)}"
        return f"round {self.step}: {messages} message{'s' * (messages != 1)}, {numbers}"

    def draw(self, axes: Axes, left: float, top: float) -> None:
        """Draw the panel with its upper left corner at this point."""
        ring = self.ring
        size = _TEXT
        self.x = left + self.names
        self.top = top - self.head
        axes.text(left, top, self.title, va="top", fontsize=size + 1, fontweight="bold")
        for chunk, (begin, end) in enumerate(itertools.pairwise(ring.bounds)):
            x, width = self._column(chunk)
            text = f"x[{begin}:{end}]"
            if 0.0085 * size * len(text) > width:
                text = f"{begin}:{end}"
            look = {"ha": "center", "va": "bottom", "fontsize": size - 1, "color": GREY}
            axes.text(x + width / 2, self.top + 0.03, text, **look)
        moves = ring.moves[self.step - 1] if self.step else ()
        reached = {(move.to, move.chunk) for move in moves}
        for r, row in enumerate(ring.states[self.step]):
            name = f"rank {ring.members[r]}"
            axes.text(self.x - 0.06, self._middle(r), name, ha="right", va="center", fontsize=size)
            for chunk, cell in enumerate(row):
                before = ring.states[max(0, self.step - 1)][r][chunk]
                self._cell(axes, r, chunk, cell, (r, chunk) in reached and before != cell)
        self._arrows(axes, moves)

    def _column(self, chunk: int) -> tuple[float, float]:
        """Return the left edge and the width of a column."""
        return self.x + sum(self.columns[:chunk]), self.columns[chunk]

    def _middle(self, rank: int) -> float:
        """Return the height of a rank's row."""
        return self.top - (rank + 0.5) * self.row

    def _cell(self, axes: Axes, rank: int, chunk: int, cell: Cell, changed: bool) -> None:
        x, width = self._column(chunk)
        y = self._middle(rank)
        members = range(len(self.ring.members))
        complete = cell == Cell(tuple(int(r in self.who) for r in members), buffer=cell.buffer)
        look = {"linewidth": 0.8, "linestyle": ":" if cell.buffer else "-", "edgecolor": GREY}
        color = _COMPLETE if complete else PAPER
        draw_cell(axes, x, y, width, color, height=self.row, zorder=1, **look)
        if changed:
            rim = 0.012
            look = {"height": self.row - 2 * rim, "linewidth": 1.6, "zorder": 2}
            draw_cell(axes, x + rim, y, width - 2 * rim, "none", **look)
        self.marks.draw(axes, x + 0.045, y, cell)

    def _arrows(self, axes: Axes, moves: Sequence[Move]) -> None:
        for chunk in range(len(self.columns)):
            here = [move for move in moves if move.chunk == chunk]
            x, width = self._column(chunk)
            taken = min(self._taken(), 0.85 * width)
            for k, move in enumerate(here):
                at = x + taken + (width - taken - 0.03) * (k + 0.5) / len(here)
                y = self._middle(move.source)
                _draw_arrow(axes, at, y, 0.0, self._middle(move.to) - y, move.effect)


def _contributors(ring: RingSteps) -> dict[int, int]:
    """Return group rank and rank of all members except for ranks that only reduce."""
    last = enumerate(ring.states[-1])
    return {r: ring.members[r] for r, row in last if not all(cell.buffer for cell in row)}


def _say(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, va="center", color=RED, fontsize=_TEXT, zorder=4)


class _Marks(NamedTuple):
    """The marks of a cell: a square for each rank in `who`, in one or more lines."""

    who: Mapping[int, int]
    size: float = _MARK
    lines: int = 1

    @property
    def per_line(self) -> int:
        return -(-len(self.who) // self.lines)

    def draw(self, axes: Axes, x: float, y: float, cell: Cell) -> None:
        """Draw a cell; a mark is filled if its rank's number is in the sum."""
        if cell.counts is None or cell.moved:
            _say(axes, x, y, "?" if cell.counts is None else "not here")
            return
        for k, (r, rank) in enumerate(self.who.items()):
            left = x + (k % self.per_line) * self.size
            middle = y + (0.5 * (self.lines - 1) - k // self.per_line) * self.size * 1.1
            self._draw_one(axes, left, middle, cell.counts[r], rank_color(rank), rank)

    def _draw_one(
        self, axes: Axes, left: float, middle: float, count: int, color: str, rank: int
    ) -> None:
        rim = 0.05 * self.size
        side = self.size - 2 * rim
        fill, edge = (color, INK) if count else (PAPER, _ABSENT)
        look = {"height": side, "edgecolor": edge, "linewidth": 0.6, "zorder": 3}
        draw_cell(axes, left + rim, middle, side, fill, **look)
        if count:
            look = {"fontsize": 8, "fontweight": "normal"}
            if count > 1:
                look = {"fontsize": 6, "fontweight": "bold"}
            look |= {"ha": "center", "va": "center", "color": ink_on(color)}
            text = str(rank) if count == 1 else f"{count}×"
            axes.text(left + self.size / 2, middle - 0.005, text, zorder=4, **look)


def _draw_arrow(axes: Axes, x: float, y: float, across: float, up: float, effect: str) -> None:
    color = {"kept": GREY, "other": RED}.get(effect, INK)
    axes.plot([x], [y], "o", color=color, markersize=3.5, zorder=5)
    look = {"color": color, "linewidth": 1.2, "linestyle": _LINES[effect], "zorder": 5}
    form = {"arrowstyle": "-|>", "mutation_scale": 8.5, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch((x, y), (x + across, y + up), **form, **look))


# -- as data of the film --------------------------------------------------------------------------


def film_of(title: str, ring: RingSteps) -> dict[str, Any]:
    """Return the data from which the script draws every round of an all-reduce."""
    ends = itertools.pairwise(ring.bounds)
    who = _contributors(ring)
    return {
        "title": title,
        "members": ring.members,
        "inks": [ink_on(rank_color(rank)) for rank in ring.members],
        "chunks": [{"name": f"{begin}:{end}", "length": end - begin} for begin, end in ends],
        "complete": "".join(str(int(r in who)) for r in range(len(ring.members))),
        "rounds": [_round_of(ring, number) for number in range(len(ring.states))],
    }


def _round_of(ring: RingSteps, number: int) -> dict[str, Any]:
    moves = ring.moves[number - 1] if number else ()
    return {
        "cells": [list(map(_written, row)) for row in ring.states[number]],
        "moves": [[move.source, move.to, move.chunk, move.effect] for move in moves],
        "words": _what_travels(ring, number),
    }


def _written(cell: Cell) -> str:
    """Return how often each rank's number is in the sum, as digits; b means a buffer."""
    if cell.counts is None or cell.moved:
        return "?" if cell.counts is None else "not here"
    # A count may be up to 15, but the film has one digit for it.
    return "b" * cell.buffer + "".join(str(min(count, 9)) for count in cell.counts)


# -- in words -------------------------------------------------------------------------------------


def _in_words(ring: RingSteps, title: str) -> str:
    chunks = len(ring.bounds) - 1
    start = f"{title}: " if title else ""
    summary = (
        f"{start}{len(ring.members)} ranks, {ring.length} elements in {chunks} "
        f"chunk{'s' * (chunks > 1)}, {len(ring.moves)} round{'s' * (len(ring.moves) != 1)}."
    )
    return " ".join([summary, *(_step_in_words(ring, s) for s in range(1, len(ring.states)))])


def _step_in_words(ring: RingSteps, step: int) -> str:
    return f"Round {step}: {_what_travels(ring, step)}"


def _what_travels(ring: RingSteps, step: int) -> str:
    """Return in words what the ranks send in a step, and what the receivers do with it."""
    if step == 0:
        return "At the start, every rank has its own numbers."
    verbs = {"added": "adds", "copied": "keeps", "kept": "sets aside"}
    words = []
    for move in ring.moves[step - 1]:
        if move.chunk is not None:
            begin, end = ring.bounds[move.chunk : move.chunk + 2]
            summed = [ring.members[r] for r in move.cell.ranks]
            ranks = named(summed) if summed else "no rank"
            verb = verbs.get(move.effect, "does something else with")
            words.append(
                f"rank {ring.members[move.source]} sends x[{begin}:{end}], the sum over {ranks}, "
                f"to rank {ring.members[move.to]}, which {verb} it"
            )
    return f"{'; '.join(words) or 'no elements travel'}."
