"""Pictures of a class's points, tasks and mistakes, drawn from :mod:`utils.grading.statistics`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from utils.figures import BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, RED, SKY, YELLOW, use_style

from .results import KIND_LABELS

if TYPE_CHECKING:
    from utils.grading.statistics import ClassResults, Mistake, Task

#: The states of answers in drawing order, each with its words, color and hatch. Readers who can't
#: distinguish the colors can distinguish the hatches.
STATES = {
    "good": (KIND_LABELS["good"], GREEN, ""),
    "hand": (KIND_LABELS["hand"], SKY, ".."),
    "waits": (KIND_LABELS["waits"], YELLOW, "xx"),
    "bad": (KIND_LABELS["bad"], RED, "//"),
    "stuck": (KIND_LABELS["stuck"], PINK, "\\\\"),
    "none": (KIND_LABELS["none"], PALE, ""),
    "ungraded": (KIND_LABELS["ungraded"], GREY, "--"),
}
#: Kinds of problems, see utils.checks.verdict.
KINDS = {
    "mistake": ("a known mistake", ORANGE, ""),
    "value": ("another result", GREEN, "//"),
    "communication": ("communication", BLUE, ".."),
    "error": ("an error", RED, "\\\\"),
    "interrupted": ("no answer in time", PINK, "xx"),
    "unreceived": ("a message that no rank received", SKY, "--"),
    "open": ("not begun, or needs another task", PALE, ""),
    "": ("an accident, or an older result", GREY, ""),
}
#: The edges of all bars.
EDGES: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.6}
#: Bars in a picture, and pictures in a row.
BINS = 10
ACROSS = 3
#: The size of a mistake's text: characters in a line, and lines.
LETTERS = 58
LINES = 2


def points(class_: ClassResults) -> Figure:
    """Draw for each lab a histogram of the students' shares of the points."""
    use_style()
    labs = class_.labs
    rows = -(-len(labs) // ACROSS)
    columns = min(len(labs), ACROSS)
    figure, grid = plt.subplots(rows, columns, figsize=(9, 2.8 * rows), squeeze=False, sharey=True)
    sentences = []
    for axes in grid.flat[len(labs) :]:
        axes.set_axis_off()
    for axes, lab in zip(grid.flat, labs, strict=False):
        counts = [0] * BINS
        for share in class_.shares(lab):
            counts[min(BINS - 1, int(BINS * share))] += 1
        axes.bar([(k + 0.5) / BINS for k in range(BINS)], counts, width=0.9 / BINS, color=BLUE)
        axes.set_title(f"{lab}: {sum(counts)} students", fontsize=11)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the points")
        tenths = ", ".join(map(str, counts))
        sentences.append(f"{lab}: number of students in each tenth of the points: {tenths}.")
    for row in grid:
        row[0].set_ylabel("students")
    figure.tight_layout()
    _describe(figure, " ".join(sentences))
    return figure


def tasks(rows: Sequence[Task]) -> Figure:
    """Draw for each task the shares of answers that passed, were wrong, hung, or are missing."""
    use_style()
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.42 * len(rows)))
    names = [_cut(f"{task.number} · {task.title}") for task in rows]
    start = [0.0] * len(rows)
    for state, (words, color, hatch) in STATES.items():
        shares = [task.states[state] / task.answers for task in rows]
        if any(shares):
            axes.barh(names, shares, left=start, label=words, color=color, hatch=hatch, **EDGES)
        start = [a + b for a, b in zip(start, shares, strict=True)]
    for row, task in enumerate(rows):
        axes.text(1.01, row, f"{task.answers}", va="center", fontsize=9, color=GREY)
    _finish(figure, axes, "share of the students (right: number of students)")
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    _describe(figure, "; ".join(map(_in_words, rows)) + ".")
    return figure


def mistakes(rows: Sequence[Mistake]) -> Figure | None:
    """Draw how many students got which message about a mistake; None if all answers were right."""
    if not rows:
        return None
    use_style()
    texts = ["\n".join(_lines(f"{mistake.task}  {mistake.text}")) for mistake in rows]
    lines = sum(text.count("\n") + 1 for text in texts)
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.08 * len(rows) + 0.19 * lines))
    for kind, (words, color, hatch) in KINDS.items():
        places = [row for row, mistake in enumerate(rows) if mistake.kind == kind]
        if places:
            students = [rows[row].students for row in places]
            axes.barh(places, students, label=words, color=color, hatch=hatch, **EDGES)
    axes.set_yticks(range(len(rows)), texts, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.01)
    _finish(figure, axes, "students who got this message")
    each = " ".join(f"{one.task}: {one.text}: {one.students}." for one in rows)
    _describe(figure, f"Mistakes, and how many students made each of them. {each}")
    return figure


def _describe(figure: Figure, words: str) -> None:
    """Store the description of a figure where `utils.figures.alt` reads it."""
    figure.alt_text = words  # type: ignore[attr-defined]  # matplotlib has no such attribute


def _finish(figure: Figure, axes: Axes, label: str) -> None:
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel(label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, fontsize=9)
    figure.tight_layout()


def _in_words(task: Task) -> str:
    present = [state for state in STATES if task.states[state]]
    counts = ", ".join(f"{task.states[state]} {STATES[state][0]}" for state in present)
    return f"{task.number} {task.title}: {counts}"


def _cut(text: str, letters: int = 44) -> str:
    return textwrap.shorten(text, letters, placeholder=" …")


def _lines(text: str) -> list[str]:
    lines = textwrap.wrap(text, LETTERS)
    return [*lines[: LINES - 1], _cut(" ".join(lines[LINES - 1 :]), LETTERS)][:LINES]
