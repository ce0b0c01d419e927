"""Pictures of an all-reduce by hand: which chunk travels when, and over whom each is summed.

Made of what the ranks did, noted there by :func:`utils.timeline.chunks.watch`::

    stories = ranks.view["story"]
    chunks.still(stories)    # all steps in one figure
    chunks.film(stories)     # one step at a time, with a slider
"""

from __future__ import annotations

import base64
import html
import io
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from utils.timeline.chunks import Cell, Move, Steps, steps, watch

from . import BLUE, CYCLE, GREEN, GREY, INK, PALE, PAPER, RED, alt, use_style

__all__ = ["film", "still", "steps", "watch"]

MOST_RANKS = len(CYCLE)
_INCHES = 9.0
_MARGIN = 0.12
# Colours on which white is easier to read than ink.
_DARK = {BLUE, GREEN, RED}
_COMPLETE = "#DCEFE6"
_LINES = {"added": "-", "copied": (0, (4, 2)), "kept": (0, (1, 1.5))}
_EFFECTS = {
    "added": "is added to what is there",
    "copied": "replaces what is there",
    "kept": "waits in a buffer",
}


def still(stories: Sequence[dict], title: str = "") -> Figure:
    """All steps of an all-reduce in one figure.

    Args:
        stories: what :func:`watch` returned, of each rank of the group.
        title: above the picture.
    """
    told = _checked(stories)
    across = _panels_across(told)
    gap = 0.3
    width = (_INCHES - 2 * _MARGIN - gap * (across - 1)) / across
    panels = [_Panel(told, step, width) for step in range(len(told.states))]
    rows = [panels[k : k + across] for k in range(0, len(panels), across)]
    sheet = _Sheet(told, title)
    for row in rows:
        for k, panel in enumerate(row):
            panel.draw(sheet.axes, _MARGIN + k * (width + gap), sheet.y)
        sheet.y -= row[0].height + 0.2
    return sheet.finish(_in_words(told, title))


def frame(told: Steps, step: int, title: str = "") -> Figure:
    """One step of an all-reduce."""
    panel = _Panel(told, step, _INCHES - 2 * _MARGIN, scale=1.35)
    sheet = _Sheet(told, title)
    panel.draw(sheet.axes, _MARGIN, sheet.y)
    sheet.y -= panel.height + 0.2
    return sheet.finish(_step_in_words(told, step))


def film(stories: Sequence[dict], title: str = "") -> None:
    """Show one step at a time, with a slider; all of them at once where nobody can move it.

    That is where `IPP_NONINTERACTIVE` is set: tests, grading, the stored notebooks.
    """
    from IPython.display import display

    told = _checked(stories)
    if os.environ.get("IPP_NONINTERACTIVE"):
        display(still(stories, title))
        return
    import ipywidgets

    pictures = [_as_html(frame(told, step, title)) for step in range(len(told.states))]
    shown = ipywidgets.HTML(pictures[0])
    last = len(pictures) - 1
    slider = ipywidgets.IntSlider(
        value=0, min=0, max=last, description="step", layout={"width": "30em"}
    )
    play = ipywidgets.Play(value=0, min=0, max=last, interval=1500)
    ipywidgets.jslink((play, "value"), (slider, "value"))
    slider.observe(lambda change: setattr(shown, "value", pictures[change["new"]]), "value")
    display(ipywidgets.VBox([ipywidgets.HBox([play, slider]), shown]))


def _as_html(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    data = base64.b64encode(file.getvalue()).decode()
    said = html.escape(alt.describe(figure), quote=True)
    return f'<img src="data:image/png;base64,{data}" alt="{said}" style="max-width: 100%">'


def _checked(stories: Sequence[dict]) -> Steps:
    told = steps(stories)
    if len(told.members) > MOST_RANKS:
        raise ValueError(
            f"{MOST_RANKS} ranks can be told apart in the picture, and these are "
            f"{len(told.members)}: watch a smaller group"
        )
    return told


def _panels_across(told: Steps) -> int:
    """How many steps stand beside each other."""
    chunks = len(told.bounds) - 1
    return 3 if chunks <= 2 else 2 if chunks <= 6 else 1


# -- drawing: all lengths are inches ------------------------------------------------------------------


class _Sheet:
    """A figure that grows downwards."""

    def __init__(self, told: Steps, title: str):
        use_style()
        self.told = told
        self.figure, self.axes = plt.subplots()
        self.axes.set_axis_off()
        self.axes.grid(False)
        self.y = -0.1
        if title:
            self.axes.text(_MARGIN, self.y, title, va="top", fontsize=12)
            self.y -= 0.35

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
            length = width + 0.08 + 0.075 * len(text) + 0.25
            if x > _MARGIN and x + length > _INCHES:
                x, self.y = _MARGIN, self.y - 0.3
            draw(x, self.y)
            self.axes.text(x + width + 0.08, self.y, text, va="center", fontsize=9)
            x += length
        self.y -= 0.25

    def _entries(self) -> Iterator[tuple]:
        """Width of a key, words, and what draws it."""
        axes, told = self.axes, self.told
        p = len(told.members)
        some = tuple(int(r < 2) for r in range(p))

        def marks(x, y):
            _draw_marks(axes, Cell(some), x, y, 0.17, p)

        both = "ranks 0 and 1" if p > 1 else "rank 0"
        yield 0.17 * p, f"summed over {both}", marks
        used = {move.effect for row in told.moves for move in row if move.chunk is not None}
        for effect, words in _EFFECTS.items():
            if effect in used:

                def sample(x, y, effect=effect):
                    _draw_arrow(axes, x, y, x + 0.45, y, effect)

                yield 0.45, words, sample

        def complete(x, y):
            axes.add_patch(
                Rectangle((x, y - 0.09), 0.28, 0.18, facecolor=_COMPLETE, edgecolor=GREY, lw=0.8)
            )

        yield 0.28, "complete", complete


@dataclass
class _Panel:
    """One step: ranks below each other, chunks beside each other."""

    told: Steps
    step: int
    width: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        p, told = len(self.told.members), self.told
        self.names = 0.55 * self.scale
        self.inside = self.width - self.names
        narrow = min(b - a for a, b in zip(told.bounds, told.bounds[1:], strict=False))
        narrow *= self.inside / told.length
        # Marks of all ranks in a line, and a lane for the arrows; else in two lines.
        self.mark = 0.17 * self.scale
        self.lines = 1 if p * self.mark + 0.24 * self.scale <= narrow or p < 3 else 2
        self.row = (0.3 if self.lines == 1 else 0.47) * self.scale
        self.head = 0.46 * self.scale
        self.height = self.head + p * self.row

    @property
    def title(self) -> str:
        if self.step == 0:
            return "at the start"
        messages, elements = self.told.amounts[self.step - 1]
        plural = "s" if messages != 1 else ""
        return f"step {self.step}: {messages} message{plural}, {elements} numbers"

    def draw(self, axes: Axes, left: float, top: float) -> None:
        """With its upper left corner there."""
        told, size = self.told, 9 * self.scale
        self.x, self.top = left + self.names, top - self.head
        axes.text(left, top, self.title, va="top", fontsize=size + 1, fontweight="bold")
        for c, (begin, end) in enumerate(zip(told.bounds, told.bounds[1:], strict=False)):
            x, wide = self._column(c)
            text = f"x[{begin}:{end}]" if wide > 0.085 * size * 0.9 else f"{begin}:{end}"
            axes.text(
                x + wide / 2, self.top + 0.03, text, ha="center", va="bottom", fontsize=size - 1,
                color=GREY,
            )  # fmt: skip
        goal = _goal(told)
        for r, row in enumerate(told.states[self.step]):
            y = self._middle(r)
            axes.text(self.x - 0.06, y, f"rank {r}", ha="right", va="center", fontsize=size)
            for c, cell in enumerate(row):
                self._cell(axes, r, c, cell, goal)
        if self.step:
            self._arrows(axes, told.moves[self.step - 1])

    def _column(self, chunk: int) -> tuple[float, float]:
        begin, end = self.told.bounds[chunk : chunk + 2]
        unit = self.inside / self.told.length
        return self.x + begin * unit, (end - begin) * unit

    def _middle(self, rank: int) -> float:
        return self.top - (rank + 0.5) * self.row

    def _cell(self, axes: Axes, rank: int, chunk: int, cell: Cell, goal: tuple[int, ...]) -> None:
        x, wide = self._column(chunk)
        y = self._middle(rank)
        axes.add_patch(
            Rectangle(
                (x, y - self.row / 2), wide, self.row, edgecolor=GREY, linewidth=0.8,
                facecolor=_COMPLETE if cell.counts == goal else PAPER,
                linestyle=":" if cell.buffer else "-", zorder=1,
            )
        )  # fmt: skip
        _draw_marks(
            axes, cell, x + 0.04 * self.scale, y, self.mark, len(goal), self.lines, self.scale
        )

    def _arrows(self, axes: Axes, moves: Sequence[Move]) -> None:
        p = len(self.told.members)
        taken = -(-p // self.lines) * self.mark + 0.06 * self.scale
        for chunk in range(len(self.told.bounds) - 1):
            here = [move for move in moves if move.chunk == chunk]
            x, wide = self._column(chunk)
            lane = wide - taken
            for k, move in enumerate(here):
                at = x + taken + lane * (k + 0.5) / len(here)
                _draw_arrow(
                    axes, at, self._middle(move.source), at, self._middle(move.to), move.effect,
                    self.scale,
                )  # fmt: skip


def _goal(told: Steps) -> tuple[int, ...]:
    """A complete sum: every rank that contributes to anything at the end, once."""
    whose = {
        r for row in told.states[-1] for cell in row if not cell.buffer for r in cell.ranks
    }  # fmt: skip
    idle = {r for r, row in enumerate(told.states[-1]) if all(cell.buffer for cell in row)}
    return tuple(int(r in whose and r not in idle) for r in range(len(told.members)))


def _draw_marks(axes, cell: Cell, x, y, mark: float, p: int, lines: int = 1, scale=1.0) -> None:
    """A square for each rank, filled where its number is in the sum."""
    if cell.counts is None or cell.moved:
        text = "?" if cell.counts is None else "not here"
        axes.text(x, y, text, va="center", color=RED, fontsize=9 * scale, zorder=4)
        return
    per_line = -(-p // lines)
    for r, count in enumerate(cell.counts):
        left = x + (r % per_line) * mark
        middle = y + (0.5 * (lines - 1) - r // per_line) * mark * 1.08
        color = CYCLE[r]
        axes.add_patch(
            Rectangle(
                (left + 0.008, middle - mark / 2 + 0.008), mark - 0.016, mark - 0.016,
                facecolor=color if count else PAPER, edgecolor=INK if count else PALE,
                linewidth=0.6, zorder=3,
            )
        )  # fmt: skip
        if count:
            ink = PAPER if color in _DARK else INK
            axes.text(
                left + mark / 2, middle - 0.005, str(r) if count == 1 else f"{count}×",
                ha="center", va="center", color=ink, fontsize=8 * scale, zorder=4,
            )  # fmt: skip


def _draw_arrow(axes: Axes, x0, y0, x1, y1, effect: str, scale: float = 1.0) -> None:
    color = GREY if effect == "kept" else INK
    axes.plot([x0], [y0], "o", color=color, markersize=3.5 * scale, zorder=5)
    axes.add_patch(
        FancyArrowPatch(
            (x0, y0), (x1, y1), arrowstyle="-|>", mutation_scale=9 * scale, color=color,
            linewidth=1.3 * scale, linestyle=_LINES[effect], shrinkA=0, shrinkB=0, zorder=5,
        )
    )  # fmt: skip


# -- in words -----------------------------------------------------------------------------------------


def _in_words(told: Steps, title: str) -> str:
    chunks = len(told.bounds) - 1
    start = f"{title}: " if title else ""
    said = (
        f"{start}{len(told.members)} ranks, {told.length} elements in {chunks} "
        f"chunk{'s' * (chunks > 1)}, {len(told.moves)} steps."
    )
    return " ".join([said, *(_step_in_words(told, s) for s in range(1, len(told.states)))])


def _step_in_words(told: Steps, step: int) -> str:
    if step == 0:
        return "At the start every rank has its own numbers."
    verbs = {"added": "adds", "copied": "keeps", "kept": "stores"}
    said = []
    for move in told.moves[step - 1]:
        if move.chunk is not None:
            begin, end = told.bounds[move.chunk : move.chunk + 2]
            ranks = ", ".join(map(str, sorted(move.cell.ranks))) or "nobody"
            said.append(
                f"rank {move.source} sends x[{begin}:{end}] over {ranks} to rank {move.to}, which "
                f"{verbs[move.effect]} it"
            )
    return f"Step {step}: {'; '.join(said) or 'no elements travel'}."
