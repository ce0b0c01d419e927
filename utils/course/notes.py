"""The instructors' notes in a solution, in cells that no student gets.

They are markdown cells with ``"lab": {"instructor": KIND}`` and the tag ``remove-cell``, which
keeps them off web pages. The release leaves them out. There are three kinds:

* ``rubric``, below each written answer: what earns points (they add up to the answer's points), and
  how many points frequent answers get::

      **Rubric**
      - **1** says that a send promises nothing about the receiver
      - **1** names the limit between eager and rendezvous

      **Answers that come often**
      - **0** "the network was slow": the size decides, not the speed

* ``questions``, once: questions to ask in class, each with an answer of a sentence or two::

      1. **Who waits for whom?** Rank 0 for rank 1, whose receive comes later.

* ``shorter``, once: tasks or headings to leave out of a shorter session, and why::

      - **1.7; 1.B**: α and β come again in lab 05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

from .notebook import NotebookError, cell_problems, is_solution, lab

KINDS = RUBRIC, QUESTIONS, SHORTER = "rubric", "questions", "shorter"
#: The tag that keeps a cell off pages made from the solutions; myst-nb and nbconvert know it.
TAG = "remove-cell"
FEWEST_QUESTIONS, MOST_QUESTIONS = 4, 6
OFTEN = "**Answers that come often**"

_MARK = re.compile(r"- \*\*(\d+(?:\.\d+)?)\*\* +(.+)")
_QUESTION = re.compile(r"\d+\. \*\*(.+?)\*\* +(.+)")
_CUT = re.compile(r"- \*\*(.+?)\*\*: +(.+)")


def rubric_cells(nb: NotebookNode) -> Iterator[tuple[NotebookNode, NotebookNode | None]]:
    """Yield each written answer with the cell of its rubric; None if no rubric follows it."""
    for cell, below in zip(nb.cells, [*nb.cells[1:], None], strict=True):
        if is_solution(cell) and cell.cell_type == "markdown":
            yield cell, below if below and lab(below).get("instructor") == "rubric" else None


@dataclass(frozen=True)
class Mark:
    """A number of points, and what they are for."""

    points: float
    text: str


@dataclass(frozen=True)
class Rubric:
    """The rubric of a task: what earns points, and what frequent answers get."""

    earns: tuple[Mark, ...]
    often: tuple[Mark, ...]


@dataclass(frozen=True)
class Question:
    """A question to ask in class, and its answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Cut:
    """A cut for a shorter session: numbers of tasks or headings to leave out, and why."""

    what: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Notes:
    """All notes of a lab, with the rubrics by task."""

    questions: tuple[Question, ...]
    shorter: tuple[Cut, ...]
    rubrics: dict[str, Rubric]


def read(nb: NotebookNode, name: str) -> Notes:
    """Return the instructor's notes of a lab.

    Raises:
        NotebookError: Something is missing or can't be read; the message lists it cell by cell.
    """
    if faults := list(problems(nb)):
        raise NotebookError("\n".join(f"{name}: {text}" for text in faults))
    (questions,) = _of_kind(nb, QUESTIONS)
    (shorter,) = _of_kind(nb, SHORTER)
    return Notes(
        tuple(Question(*parts) for parts in _QUESTION.findall(_lines(questions.source))),
        _cuts(shorter.source),
        {lab(answer)["task"]: _rubric(cell) for answer, cell in rubric_cells(nb) if cell},
    )


def kind(cell: NotebookNode) -> str:
    """Return the kind of an instructor's cell; "" for all other cells."""
    return str(lab(cell).get("instructor", ""))


def problems(nb: NotebookNode) -> Iterator[str]:
    """Yield what is missing, or written in a wrong form."""
    yield from cell_problems(nb, _kind_problems)
    for wanted in (QUESTIONS, SHORTER):
        count = len(_of_kind(nb, wanted))
        if count != 1:
            yield f"there are {count} cells of the kind {wanted!r}: write one, at the end"
    yield from cell_problems(nb, _question_problems)
    parts = _parts(nb)
    yield from cell_problems(nb, lambda cell: _cut_problems(cell, parts))
    for answer, cell in rubric_cells(nb):
        if cell is None:
            yield f"cell '{answer.id}': has no rubric below it: add a cell of the kind {RUBRIC!r}"
        else:
            yield from (f"cell '{cell.id}': {text}" for text in _rubric_problems(answer, cell))


def _kind_problems(cell: NotebookNode) -> Iterator[str]:
    if kind(cell) and kind(cell) not in KINDS:
        yield f"instructor is {kind(cell)!r}: use one of {', '.join(KINDS)}"
    elif kind(cell) and (cell.cell_type != "markdown" or TAG not in cell.metadata.get("tags", [])):
        yield f"is an instructor's cell: make it markdown, with the tag '{TAG}'"


def _of_kind(nb: NotebookNode, wanted: str) -> list[NotebookNode]:
    return [cell for cell in nb.cells if kind(cell) == wanted]


def _lines(source: str) -> str:
    """Put each item of a list on one line."""
    return re.sub(r"\n +(?=\S)", " ", source)


def _question_problems(cell: NotebookNode) -> Iterator[str]:
    if kind(cell) != QUESTIONS:
        return
    questions = _QUESTION.findall(_lines(cell.source))
    if not FEWEST_QUESTIONS <= len(questions) <= MOST_QUESTIONS:
        yield f"has {len(questions)} questions: write 4 to 6, as '1. **Which rank?** Rank 0.'"
    for text, _ in questions:
        if not text.endswith("?"):
            yield f"{text!r} is not a question: end it with '?'"


def _parts(nb: NotebookNode) -> set[str]:
    """Return the names of a lab's parts: the numbers of tasks, and headings."""
    names = {str(lab(cell)["task"]) for cell in nb.cells if lab(cell).get("task")}
    for cell in nb.cells:
        if cell.cell_type == "markdown" and not kind(cell):
            names.update(re.findall(r"^## (.+)$", cell.source, re.MULTILINE))
    return names


def _cut_problems(cell: NotebookNode, parts: set[str]) -> Iterator[str]:
    if kind(cell) != SHORTER:
        return
    cuts = _cuts(cell.source)
    if not cuts:
        yield "leaves nothing out: write at least one line, such as '- **1.7; 1.B**: why'"
    for name in (name for cut in cuts for name in cut.what):
        if name not in parts:
            yield f"{name!r} is neither a task nor a heading of this lab"


def _cuts(source: str) -> tuple[Cut, ...]:
    pairs = _CUT.findall(_lines(source))
    return tuple(Cut(tuple(map(str.strip, names.split(";"))), why) for names, why in pairs)


def _rubric_problems(answer: NotebookNode, cell: NotebookNode) -> Iterator[str]:
    rubric = _rubric(cell)
    points = lab(answer).get("points", 0)
    if not rubric.earns or not rubric.often:
        yield "must say both what earns points and what frequent answers get"
    if (total := sum(mark.points for mark in rubric.earns)) != points:
        yield f"its points add up to {total:g}, but the answer '{answer.id}' has {points:g}"
    if any(mark.points > points for mark in rubric.often):
        yield f"gives an answer more than the {points:g} points of the task"


def _rubric(cell: NotebookNode) -> Rubric:
    earns, _, often = _lines(cell.source).partition(OFTEN)
    return Rubric(_marks(earns), _marks(often))


def _marks(text: str) -> tuple[Mark, ...]:
    return tuple(Mark(float(points), words) for points, words in _MARK.findall(text))
