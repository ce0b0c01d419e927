"""What instructors wrote into a solution, in cells that no student gets.

They are markdown cells with ``"lab": {"instructor": KIND}`` and the tag ``remove-cell``, which
keeps them off web pages. The release leaves them out. There are three kinds:

* ``rubric``, below each written answer: what earns points (they add up to the answer's), and what
  answers that come often get::

      **Rubric**
      - **1** says that a send promises nothing about the receiver
      - **1** names the limit between eager and rendezvous

      **Answers that come often**
      - **0** "the network was slow": the size decides, not the speed

* ``questions``, once, to ask in class, each with an answer of a sentence or two::

      1. **Who waits for whom?** Rank 0 for rank 1, whose receive comes later.

* ``shorter``, once, what to leave out of a shorter session: tasks or headings, and why::

      - **1.7; 1.B**: α and β come again in lab 05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

from .notebook import NotebookError, lab
from .release import is_solution

RUBRIC, QUESTIONS, SHORTER = "rubric", "questions", "shorter"
KINDS = (RUBRIC, QUESTIONS, SHORTER)
#: Keeps a cell off pages that are made of the solutions: myst-nb and nbconvert know it.
TAG = "remove-cell"
FEWEST_QUESTIONS, MOST_QUESTIONS = 4, 6
OFTEN = "**Answers that come often**"

_MARK = re.compile(r"- \*\*(\d+(?:\.\d+)?)\*\* +(.+)")
_QUESTION = re.compile(r"\d+\. \*\*(.+?)\*\* +(.+)")
_CUT = re.compile(r"- \*\*(.+?)\*\*: +(.+)")


@dataclass(frozen=True)
class Mark:
    """Points, and what for."""

    points: float
    text: str


@dataclass(frozen=True)
class Rubric:
    """Of a written answer: its task, what earns points, what answers that come often get."""

    task: str
    earns: tuple[Mark, ...]
    often: tuple[Mark, ...]


@dataclass(frozen=True)
class Question:
    """To ask in class, and its answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Cut:
    """What a shorter session leaves out: numbers of tasks or headings; and why."""

    what: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Notes:
    """All of a lab; rubrics by task."""

    questions: tuple[Question, ...]
    shorter: tuple[Cut, ...]
    rubrics: dict[str, Rubric]


def read(nb: NotebookNode, name: str) -> Notes:
    """An instructor's notes to a lab.

    Raises:
        NotebookError: something is missing or not understood; says all of it, cell by cell.
    """
    if found := list(problems(nb)):
        raise NotebookError("\n".join(f"{name}: {text}" for text in found))
    (questions,), (shorter,) = _of_kind(nb, QUESTIONS), _of_kind(nb, SHORTER)
    return Notes(
        tuple(Question(*one) for one in _QUESTION.findall(_lines(questions.source))),
        tuple(_cut(*one) for one in _CUT.findall(_lines(shorter.source))),
        {lab(answer)["task"]: _rubric(answer, cell) for answer, cell in rubric_cells(nb) if cell},
    )


def rubric_cells(nb: NotebookNode) -> Iterator[tuple[NotebookNode, NotebookNode | None]]:
    """Each written answer, and the cell of its rubric; None where the next cell is none."""
    for cell, following in zip(nb.cells, [*nb.cells[1:], None], strict=True):
        if is_solution(cell) and cell.cell_type == "markdown":
            yield cell, following if following and kind(following) == RUBRIC else None


def kind(cell: NotebookNode) -> str:
    """Of an instructor's cell; nothing for all others."""
    return str(lab(cell).get("instructor", ""))


def problems(nb: NotebookNode) -> Iterator[str]:
    """What is missing, or not written as it must be."""
    for cell in (one for one in nb.cells if kind(one)):
        if kind(cell) not in KINDS:
            yield f"cell '{cell.id}': instructor is {kind(cell)!r}: one of {', '.join(KINDS)}"
        elif cell.cell_type != "markdown" or TAG not in cell.metadata.get("tags", []):
            yield f"cell '{cell.id}': an instructor's cell is markdown, with the tag '{TAG}'"
    for one in (QUESTIONS, SHORTER):
        if len(_of_kind(nb, one)) != 1:
            yield f"{len(_of_kind(nb, one))} cells of the kind {one!r}: write one, at the end"
    for cell in _of_kind(nb, QUESTIONS):
        yield from (f"cell '{cell.id}': {text}" for text in _question_problems(cell.source))
    for cell in _of_kind(nb, SHORTER):
        yield from (f"cell '{cell.id}': {text}" for text in _cut_problems(nb, cell.source))
    for answer, cell in rubric_cells(nb):
        if cell is None:
            yield f"cell '{answer.id}': no rubric below it: add a cell of the kind {RUBRIC!r}"
        else:
            yield from (f"cell '{cell.id}': {text}" for text in _rubric_problems(answer, cell))


def _of_kind(nb: NotebookNode, wanted: str) -> list[NotebookNode]:
    return [cell for cell in nb.cells if kind(cell) == wanted]


def _lines(source: str) -> str:
    """Each item of a list on one line."""
    return re.sub(r"\n +(?=\S)", " ", source)


def _question_problems(source: str) -> Iterator[str]:
    found = _QUESTION.findall(_lines(source))
    if not FEWEST_QUESTIONS <= len(found) <= MOST_QUESTIONS:
        yield f"{len(found)} questions, written as '1. **Who waits?** Rank 0.': write 4 to 6"
    for text, _ in found:
        if not text.endswith("?"):
            yield f"{text!r} is no question: end it with '?'"


def _cut_problems(nb: NotebookNode, source: str) -> Iterator[str]:
    found = [_cut(*one) for one in _CUT.findall(_lines(source))]
    if not found:
        yield "nothing to leave out, written as '- **1.7; 1.B**: why': write at least one"
    there = names(nb)
    for what in (one for cut in found for one in cut.what):
        if what not in there:
            yield f"{what!r} is no task and no heading of this lab"


def names(nb: NotebookNode) -> set[str]:
    """By which a part of a lab is called: numbers of tasks, and headings."""
    tasks = {str(lab(cell)["task"]) for cell in nb.cells if lab(cell).get("task")}
    texts = [cell.source for cell in nb.cells if cell.cell_type == "markdown" and not kind(cell)]
    return tasks | {head for text in texts for head in re.findall(r"^## (.+)$", text, re.MULTILINE)}


def _cut(what: str, why: str) -> Cut:
    return Cut(tuple(one.strip() for one in what.split(";")), why)


def _rubric_problems(answer: NotebookNode, cell: NotebookNode) -> Iterator[str]:
    rubric, points = _rubric(answer, cell), lab(answer).get("points", 0)
    if not rubric.earns or not rubric.often:
        yield "says not both what earns points and what answers that come often get"
    if (total := sum(mark.points for mark in rubric.earns)) != points:
        yield f"its points add up to {total:g}, but the answer '{answer.id}' has {points:g}"
    if any(mark.points > points for mark in rubric.often):
        yield f"gives an answer more than the {points:g} points that there are"


def _rubric(answer: NotebookNode, cell: NotebookNode) -> Rubric:
    earns, _, often = _lines(cell.source).partition(OFTEN)
    marks = [
        tuple(Mark(float(points), text) for points, text in _MARK.findall(part))
        for part in (earns, often)
    ]
    return Rubric(lab(answer)["task"], *marks)
