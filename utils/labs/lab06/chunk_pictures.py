"""Pictures of an all-reduce by hand: which chunk travels when, and over whom each is summed.

Made of what the ranks did, noted there by :func:`utils.labs.lab06.chunk_trace.watch`::

    stories = ranks.view["story"]
    chunks.still(stories)    # all steps in one figure
    chunks.film(stories)     # one step at a time, with a slider
"""

from __future__ import annotations

import base64
import html
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from utils.figures import BLUE, CYCLE, GREEN, GREY, INK, PAPER, RED, alt, forms, use_style
from utils.labs.lab06.chunk_trace import Cell, Move, RingSteps, steps, watch

if TYPE_CHECKING:
    import ipywidgets

__all__ = ["film", "steps", "still", "watch"]

MOST_RANKS = len(CYCLE)
_INCHES = 9.0
_MARGIN = 0.12
# Colours on which white is easier to read than ink.
_DARK = {BLUE, GREEN, RED}
_COMPLETE, _ABSENT = "#DCEFE6", "#C9C9C9"
_LINES = {
    "added": "-",
    "copied": (0, (4, 2)),
    "kept": (0, (1, 1.5)),
    "other": (0, (6, 1.5, 1, 1.5)),
}
_EFFECTS = {
    "added": "is added to what is there",
    "copied": "replaces what is there",
    "kept": "does not change x (yet)",
    "other": "something else happens to it",
}


def still(stories: Sequence[dict], title: str = "") -> Figure:
    """All steps of an all-reduce in one figure.

    Args:
        stories: what :func:`watch` returned, of each rank of the group.
        title: above the picture.
    """
    told = _checked(stories)
    across = _panels_across(told)
    gap = 0.25
    width = (_INCHES - 2 * _MARGIN - gap * (across - 1)) / across
    panels = [_Panel(told, step, width) for step in range(len(told.states))]
    rows = [panels[k : k + across] for k in range(0, len(panels), across)]
    sheet = _Sheet(told, title)
    for row in rows:
        for k, panel in enumerate(row):
            panel.draw(sheet.axes, _MARGIN + k * (width + gap), sheet.y)
        sheet.y -= row[0].height + 0.2
    return sheet.finish(_in_words(told, title))


def frame(told: RingSteps, step: int, title: str = "") -> Figure:
    """One step of an all-reduce."""
    panel = _Panel(told, step, _INCHES - 2 * _MARGIN, scale=1.35)
    sheet = _Sheet(told, title)
    panel.draw(sheet.axes, _MARGIN, sheet.y)
    sheet.y -= panel.height + 0.2
    return sheet.finish(_step_in_words(told, step))


def film(stories: Sequence[dict], title: str = "") -> None:
    """Show one step at a time, with a slider; all of them at once where nobody can move it.

    That is where `IPP_NONINTERACTIVE` is set: tests, grading, the stored notebooks; and where a
    notebook is shown without its kernel.
    """
    from IPython.display import display

    whole = still(stories, title)
    if os.environ.get("IPP_NONINTERACTIVE"):
        display(whole)
        return
    data, metadata = forms.bundle(whole)
    shown = player(steps(stories), title)._repr_mimebundle_()
    display(shown | data, metadata=metadata, raw=True)


def player(told: RingSteps, title: str = "") -> ipywidgets.VBox:
    """A slider, and the step that it stands at."""
    import ipywidgets

    pictures = [_as_html(frame(told, step, title)) for step in range(len(told.states))]
    shown = ipywidgets.HTML(pictures[0])
    span = {"value": 0, "min": 0, "max": len(pictures) - 1}
    slider = ipywidgets.IntSlider(**span, description="step", layout={"width": "30em"})
    play = ipywidgets.Play(**span, interval=1500)
    ipywidgets.jslink((play, "value"), (slider, "value"))
    slider.observe(lambda change: setattr(shown, "value", pictures[change["new"]]), "value")
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), shown])


def _as_html(figure: Figure) -> str:
    said = html.escape(alt.describe(figure), quote=True)
    data = f"data:image/png;base64,{base64.b64encode(forms.png(figure)).decode()}"
    return f'<img src="{data}" alt="{said}" style="max-width: 100%">'


def _checked(stories: Sequence[dict]) -> RingSteps:
    told = steps(stories)
    if len(told.members) > MOST_RANKS:
        raise ValueError(
            f"{MOST_RANKS} ranks can be told apart in the picture, and these are "
            f"{len(told.members)}: watch a smaller group"
        )
    return told


def _panels_across(told: RingSteps) -> int:
    """How many steps stand beside each other."""
    chunks = len(told.bounds) - 1
    return min(3 if chunks <= 2 else 2 if chunks <= 6 else 1, len(told.states))


# -- drawing: all lengths are inches --------------------------------------------------------------

_MARK = 0.155
_TEXT = 9


class _Sheet:
    """A figure that grows downwards."""

    def __init__(self, told: RingSteps, title: str, scale: float = 1.0):
        use_style()
        self.told, self.scale = told, scale
        self.figure, self.axes = plt.subplots()
        self.axes.set_axis_off()
        self.axes.grid(False)
        self.y = -0.08
        if title:
            self.axes.text(_MARGIN, self.y, title, va="top", fontsize=12)
            self.y -= 0.34

    def finish(self, words: str) -> Figure:
        self._legend()
        for note in self.told.notes:
            for line in textwrap.wrap(f"{note}.", 110):
                self.axes.text(_MARGIN, self.y, line, va="top", fontsize=9, color=RED)
                self.y -= 0.2
        height = 0.05 - self.y
        self.figure.set_size_inches(_INCHES, height)
        self.axes.set_position([0, 0, 1, 1])
        self.axes.set_xlim(0, _INCHES)
        self.axes.set_ylim(-height, 0)
        plt.close(self.figure)
        self.figure.alt_text = words
        return self.figure

    def _legend(self) -> None:
        x, self.y = _MARGIN, self.y - 0.12
        for width, text, draw in self._entries():
            length = width + 0.08 + 0.068 * len(text) + 0.25
            if x > _MARGIN and x + length > _INCHES:
                x, self.y = _MARGIN, self.y - 0.28
            if draw is not None:
                draw(x, self.y)
            self.axes.text(
                x + (width + 0.08 if width else 0), self.y, text, va="center", fontsize=_TEXT
            )
            x += length
        self.y -= 0.22

    def _entries(self) -> Iterator[tuple]:
        """Width of a key, words, and what draws it."""
        axes, told = self.axes, self.told
        who = _contributors(told)
        both = list(who)[:2]

        def marks(x, y):
            counts = tuple(int(r in both) for r in range(len(told.members)))
            _draw_marks(axes, Cell(counts), x, y, _MARK, who)

        def patch(x, y, rim=GREY, width=0.8, **look):
            look |= {"edgecolor": rim, "linewidth": width}
            axes.add_patch(Rectangle((x, y - 0.09), 0.28, 0.18, **look))

        named = f"rank{'s' * (len(both) > 1)} " + " and ".join(str(who[r]) for r in both)
        yield _MARK * len(who), f"after the step: the sum over {named}", marks
        yield 0.28, "changed by it", lambda x, y: patch(x, y, INK, 1.6, facecolor=PAPER)
        yield 0.28, "over all", lambda x, y: patch(x, y, facecolor=_COMPLETE)
        used = {move.effect for row in told.moves for move in row if move.chunk is not None}
        for effect, words in _EFFECTS.items():
            if effect in used:
                yield 0.4, words, lambda x, y, e=effect: _draw_arrow(axes, x, y, x + 0.4, y, e)
        cells = [cell for rows in told.states for row in rows for cell in row]
        if any(cell.buffer for cell in cells):
            yield 0.28, "a buffer, not x", lambda x, y: patch(x, y, facecolor=PAPER, linestyle=":")
        if any(max(cell.counts or (0,)) > 1 for cell in cells):

            def twice(x, y):
                counts = tuple(2 * int(r == both[0]) for r in range(len(told.members)))
                _draw_marks(axes, Cell(counts), x, y, _MARK, {both[0]: 0})

            yield _MARK, f"rank {who[both[0]]} is in it twice", twice
        if any(cell.counts is None for cell in cells):
            yield 0.1, "no sum of the ranks' numbers", lambda x, y: _say(axes, x, y, "?")
        if any(cell.moved for cell in cells):
            yield 0.5, "numbers of other elements", lambda x, y: _say(axes, x, y, "not here")


@dataclass
class _Panel:
    """One step: ranks below each other, chunks beside each other."""

    told: RingSteps
    step: int
    width: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        told = self.told
        self.who = _contributors(told)
        self.names = (0.25 + 0.06 * len(_name(told, len(told.members) - 1))) * self.scale
        inside = self.width - self.names
        self.mark = _MARK * self.scale
        # Marks of all ranks in a line, and a lane for the arrows; else in two lines.
        self.lines, needed = 1, self._needed(1)
        if sum(needed) > inside and len(self.who) > 2:
            self.lines, needed = 2, self._needed(2)
        spare = max(0.0, inside - sum(needed)) / max(1, told.length)
        shrink = min(1.0, inside / sum(needed))
        lengths = [b - a for a, b in zip(told.bounds, told.bounds[1:], strict=False)]
        self.columns = [
            shrink * least + spare * length for least, length in zip(needed, lengths, strict=True)
        ]
        self.row = (0.27 if self.lines == 1 else 0.43) * self.scale
        self.head = 0.43 * self.scale
        self.height = self.head + len(told.members) * self.row

    def _needed(self, lines: int) -> list[float]:
        """What each column needs at least: the marks, and a lane for each arrow."""
        told = self.told
        most = [
            max(sum(move.chunk == c for move in row) for row in (*told.moves, ()))
            for c in range(len(told.bounds) - 1)
        ]
        return [self._taken(lines) + (0.05 + 0.08 * max(1, n)) * self.scale for n in most]

    def _taken(self, lines: int) -> float:
        return -(-len(self.who) // lines) * self.mark + 0.06 * self.scale

    @property
    def title(self) -> str:
        if self.step == 0:
            return "at the start"
        messages, elements = self.told.amounts[self.step - 1]
        numbers = f"{elements} number{'s' * (elements != 1)}"
        return f"step {self.step}: {messages} message{'s' * (messages != 1)}, {numbers}"

    def draw(self, axes: Axes, left: float, top: float) -> None:
        """With its upper left corner there."""
        told, size = self.told, _TEXT * self.scale
        self.x, self.top = left + self.names, top - self.head
        axes.text(left, top, self.title, va="top", fontsize=size + 1, fontweight="bold")
        for c, (begin, end) in enumerate(zip(told.bounds, told.bounds[1:], strict=False)):
            x, wide = self._column(c)
            text = f"x[{begin}:{end}]"
            if 0.0085 * size * len(text) > wide:
                text = f"{begin}:{end}"
            axes.text(
                x + wide / 2, self.top + 0.03, text, ha="center", va="bottom", fontsize=size - 1,
                color=GREY,
            )  # fmt: skip
        reached = {
            (move.to, move.chunk)
            for move in (told.moves[self.step - 1] if self.step else ())
            if self._changed(move.to, move.chunk)
        }
        for r, row in enumerate(told.states[self.step]):
            y = self._middle(r)
            axes.text(self.x - 0.06, y, _name(told, r), ha="right", va="center", fontsize=size)
            for c, cell in enumerate(row):
                self._cell(axes, r, c, cell, (r, c) in reached)
        if self.step:
            self._arrows(axes, told.moves[self.step - 1])

    def _changed(self, rank: int, chunk: int | None) -> bool:
        before, after = (self.told.states[s][rank] for s in (self.step - 1, self.step))
        return chunk is not None and before[chunk] != after[chunk]

    def _column(self, chunk: int) -> tuple[float, float]:
        return self.x + sum(self.columns[:chunk]), self.columns[chunk]

    def _middle(self, rank: int) -> float:
        return self.top - (rank + 0.5) * self.row

    def _cell(self, axes: Axes, rank: int, chunk: int, cell: Cell, changed: bool) -> None:
        x, wide = self._column(chunk)
        y, rim = self._middle(rank), 0.012
        complete = cell.counts == tuple(int(r in self.who) for r in range(len(self.told.members)))
        axes.add_patch(
            Rectangle(
                (x, y - self.row / 2), wide, self.row, edgecolor=GREY, linewidth=0.8,
                facecolor=_COMPLETE if complete and not cell.moved else PAPER,
                linestyle=":" if cell.buffer else "-", zorder=1,
            )
        )  # fmt: skip
        if changed:
            axes.add_patch(
                Rectangle(
                    (x + rim, y - self.row / 2 + rim), wide - 2 * rim, self.row - 2 * rim,
                    facecolor="none", edgecolor=INK, linewidth=1.6, zorder=2,
                )
            )  # fmt: skip
        left = x + 0.045 * self.scale
        _draw_marks(axes, cell, left, y, self.mark, self.who, self.lines, self.scale)

    def _arrows(self, axes: Axes, moves: Sequence[Move]) -> None:
        for chunk in range(len(self.columns)):
            here = [move for move in moves if move.chunk == chunk]
            x, wide = self._column(chunk)
            taken = min(self._taken(self.lines), 0.85 * wide)
            for k, move in enumerate(here):
                at = x + taken + (wide - taken - 0.03) * (k + 0.5) / len(here)
                ends = self._middle(move.source), self._middle(move.to)
                _draw_arrow(axes, at, ends[0], at, ends[1], move.effect, self.scale)


def _name(told: RingSteps, place: int) -> str:
    return f"rank {told.members[place]}"


def _contributors(told: RingSteps) -> dict[int, int]:
    """Whose numbers are to be summed, place and rank: not those that only reduce for others."""
    last = enumerate(told.states[-1])
    return {r: told.members[r] for r, row in last if not all(cell.buffer for cell in row)}


def _say(axes: Axes, x: float, y: float, text: str, scale: float = 1.0) -> None:
    axes.text(x, y, text, va="center", color=RED, fontsize=_TEXT * scale, zorder=4)


def _draw_marks(
    axes: Axes,
    cell: Cell,
    x: float,
    y: float,
    mark: float,
    who: Mapping[int, int],
    lines=1,
    scale=1.0,
) -> None:
    """A square for each of these ranks, filled where its number is in the sum."""
    if cell.counts is None or cell.moved:
        _say(axes, x, y, "?" if cell.counts is None else "not here", scale)
        return
    per_line = -(-len(who) // lines)
    for k, (r, rank) in enumerate(who.items()):
        count = cell.counts[r]
        left = x + (k % per_line) * mark
        middle = y + (0.5 * (lines - 1) - k // per_line) * mark * 1.1
        color, rim = CYCLE[r], 0.05 * mark
        axes.add_patch(
            Rectangle(
                (left + rim, middle - mark / 2 + rim), mark - 2 * rim, mark - 2 * rim,
                facecolor=color if count else PAPER, edgecolor=INK if count else _ABSENT,
                linewidth=0.6, zorder=3,
            )
        )  # fmt: skip
        if count:
            axes.text(
                left + mark / 2, middle - 0.005, str(rank) if count == 1 else f"{count}×",
                ha="center", va="center", color=PAPER if color in _DARK else INK,
                fontsize=(8 if count == 1 else 6) * scale, zorder=4,
                fontweight="normal" if count == 1 else "bold",
            )  # fmt: skip


def _draw_arrow(axes: Axes, x0, y0, x1, y1, effect: str, scale: float = 1.0) -> None:
    color = {"kept": GREY, "other": RED}.get(effect, INK)
    axes.plot([x0], [y0], "o", color=color, markersize=3.5 * scale, zorder=5)
    axes.add_patch(
        FancyArrowPatch(
            (x0, y0), (x1, y1), arrowstyle="-|>", mutation_scale=8.5 * scale, color=color,
            linewidth=1.2 * scale, linestyle=_LINES[effect], shrinkA=0, shrinkB=0, zorder=5,
        )
    )  # fmt: skip


# -- in words -------------------------------------------------------------------------------------


def _in_words(told: RingSteps, title: str) -> str:
    chunks = len(told.bounds) - 1
    start = f"{title}: " if title else ""
    said = (
        f"{start}{len(told.members)} ranks, {told.length} elements in {chunks} "
        f"chunk{'s' * (chunks > 1)}, {len(told.moves)} step{'s' * (len(told.moves) != 1)}."
    )
    return " ".join([said, *(_step_in_words(told, s) for s in range(1, len(told.states)))])


def _step_in_words(told: RingSteps, step: int) -> str:
    if step == 0:
        return "At the start every rank has its own numbers."
    verbs = {"added": "adds", "copied": "keeps", "kept": "puts aside"}
    said = []
    for move in told.moves[step - 1]:
        if move.chunk is not None:
            begin, end = told.bounds[move.chunk : move.chunk + 2]
            ranks = ", ".join(str(told.members[r]) for r in sorted(move.cell.ranks)) or "nobody"
            source, to = told.members[move.source], told.members[move.to]
            said.append(
                f"rank {source} sends x[{begin}:{end}] over {ranks} to rank {to}, which "
                f"{verbs.get(move.effect, 'does something else with')} it"
            )
    return f"Step {step}: {'; '.join(said) or 'no elements travel'}."
