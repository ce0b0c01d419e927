"""How a class did: points, tasks, mistakes. Drawn from :mod:`utils.grading.statistics`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from utils.figures import BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, RED, SKY, YELLOW, use_style

if TYPE_CHECKING:
    from utils.grading.statistics import ClassResults, Mistake, Task

#: What became of answers, in the order in which they are drawn: words, colour, hatch. Hatches tell
#: them apart where colours do not.
STATES = {
    "good": ("passed", GREEN, ""),
    "hand": ("read by a person", SKY, ".."),
    "waits": ("awaits a person", YELLOW, "xx"),
    "bad": ("wrong", RED, "//"),
    "stuck": ("hung, or ended the run", PINK, "\\\\"),
    "none": ("no answer", PALE, ""),
    "ungraded": ("not graded", GREY, "--"),
}
#: Kinds of problems, see utils.checks.verdict.
KINDS = {
    "mistake": ("a known mistake", ORANGE, ""),
    "value": ("another result", BLUE, "//"),
    "communication": ("communication", GREEN, ".."),
    "error": ("an error", RED, "\\\\"),
    "silent": ("no answer in time", PINK, "xx"),
    "unreceived": ("a message that nobody received", SKY, "--"),
    "open": ("not begun, or needs another task", PALE, ""),
    "": ("an accident, or an older result", GREY, ""),
}
BINS, ACROSS = 10, 3
#: Letters in a line of a mistake's text, and lines.
LETTERS, LINES = 58, 2


def points(found: ClassResults) -> Figure:
    """For each lab: how many students have which share of the points."""
    use_style()
    labs = found.labs
    rows, columns = -(-len(labs) // ACROSS), min(len(labs), ACROSS)
    figure, grid = plt.subplots(rows, columns, figsize=(9, 2.8 * rows), squeeze=False, sharey=True)
    said = []
    for axes in grid.flat[len(labs) :]:
        axes.set_axis_off()
    for axes, lab in zip(grid.flat, labs, strict=False):
        counts = [0] * BINS
        for share in found.shares(lab):
            counts[min(BINS - 1, int(BINS * share))] += 1
        axes.bar([(k + 0.5) / BINS for k in range(BINS)], counts, width=0.9 / BINS, color=BLUE)
        axes.set_title(f"{lab}: {sum(counts)} students", fontsize=11)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the points")
        said.append(f"{lab}, students by tenths of the points: {', '.join(map(str, counts))}.")
    for row in grid:
        row[0].set_ylabel("students")
    figure.tight_layout()
    _describe(figure, " ".join(said))
    return figure


def tasks(found: Sequence[Task]) -> Figure:
    """For each task: which share of the answers passed, was wrong, hung, is missing."""
    use_style()
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.42 * len(found)))
    names = [_cut(f"{one.number} · {one.title}") for one in found]
    start = [0.0] * len(found)
    for state, (words, color, hatch) in STATES.items():
        shares = [one.states[state] / one.answers for one in found]
        if any(shares):
            axes.barh(
                names, shares, left=start, label=words, color=color, hatch=hatch,
                edgecolor=INK, linewidth=0.6,
            )  # fmt: skip
        start = [a + b for a, b in zip(start, shares, strict=True)]
    for row, one in enumerate(found):
        axes.text(1.01, row, f"{one.answers}", va="center", fontsize=9, color=GREY)
    _finish(figure, axes, "share of the students; at the right, how many there are")
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    _describe(figure, "; ".join(map(_in_words, found)) + ".")
    return figure


def mistakes(found: Sequence[Mistake]) -> Figure | None:
    """What was said of wrong answers, and to how many; None where all were right."""
    if not found:
        return None
    use_style()
    texts = ["\n".join(_lines(f"{one.task}  {one.text}")) for one in found]
    lines = sum(text.count("\n") + 1 for text in texts)
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.08 * len(found) + 0.19 * lines))
    rows = range(len(found))
    for kind, (words, color, hatch) in KINDS.items():
        own = [row for row in rows if found[row].kind == kind]
        if own:
            axes.barh(
                own, [found[row].students for row in own], label=words, color=color, hatch=hatch,
                edgecolor=INK, linewidth=0.6,
            )  # fmt: skip
    axes.set_yticks(rows, texts, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.01)
    _finish(figure, axes, "students who were told")
    each = " ".join(f"{one.task}: {one.text}: {one.students}." for one in found)
    _describe(figure, f"Mistakes and how many students made them. {each}")
    return figure


def _describe(figure: Figure, words: str) -> None:
    """Say what a figure shows, where `utils.figures.alt` looks for that."""
    figure.alt_text = words  # type: ignore[attr-defined]  # matplotlib has no place for it


def _finish(figure: Figure, axes: Axes, label: str) -> None:
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel(label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, fontsize=9)
    figure.tight_layout()


def _in_words(one: Task) -> str:
    counts = ", ".join(f"{one.states[state]} {STATES[state][0]}" for state in _present(one))
    return f"{one.number} {one.title}: {counts}"


def _present(one: Task) -> Iterable[str]:
    return (state for state in STATES if one.states[state])


def _cut(text: str, letters: int = 44) -> str:
    return textwrap.shorten(text, letters, placeholder=" …")


def _lines(text: str) -> list[str]:
    """A text in few lines."""
    lines = textwrap.wrap(text, LETTERS)
    return [*lines[: LINES - 1], _cut(" ".join(lines[LINES - 1 :]), LETTERS)][:LINES]
