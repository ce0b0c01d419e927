"""A graded class in numbers without names: solved tasks, and the mistakes with their frequencies.

:func:`read` reads a results folder of ``ddl-labs grade``. The notebook that ``ddl-labs statistics``
writes draws the numbers with :mod:`utils.grading.class_pictures`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat

from utils.checks.verdict import Problem
from utils.course.execute import require_kernel, run_cells
from utils.course.notebook import NotebookError, normalise, write

from .results import NOTHING_WRONG, Result, TaskResult, answers_to, blurred, kind, load, problems

TEMPLATE = Path(__file__).with_name("templates") / "statistics.ipynb"
#: The beginning of a verdict's first line, if the rest says why there is nothing to judge yet.
_OPEN = re.compile(r"^✗ Task \S+ · .+ · ")
#: Seconds for a cell of the statistics notebook.
TIMEOUT = 120


@dataclass(frozen=True)
class Task:
    """The results of a class in a task.

    Attributes:
        lab: Such as "01_c10d".
        number: Such as "1.4".
        states: How many answers are "good", "bad", "stuck", "none", "hand" and "waits".
    """

    lab: str
    number: str
    title: str
    most: float
    states: Counter[str]

    @property
    def answers(self) -> int:
        """Return how many students have an answer to this task."""
        return self.states.total()


@dataclass(frozen=True)
class Mistake:
    """A message of a check about answers to a task.

    Attributes:
        text: The message to one student; other students may have got other numbers in it.
        kind: The kind of the :class:`utils.checks.verdict.Problem`; "" in older results.
        students: How many students got the message.
        share: Their share of the students who did not solve the task.
    """

    lab: str
    task: str
    text: str
    kind: str
    students: int
    share: float


@dataclass(frozen=True)
class ClassResults:
    """A graded class. left_out: the number of submissions that could not be graded."""

    results: list[Result]
    left_out: int

    @property
    def students(self) -> int:
        """Return how many students have at least one graded submission."""
        return len({one.student for one in self.results})

    @property
    def labs(self) -> list[str]:
        """Return the names of the submitted labs, sorted."""
        return sorted({one.lab for one in self.results})

    def shares(self, lab: str) -> list[float]:
        """Return each submission's share of the points, 0 to 1; ungraded written answers get 0."""
        of_lab = [one for one in self._of(lab) if one.most]
        return sorted(one.points / one.most for one in of_lab)

    def tasks(self, lab: str) -> list[Task]:
        """Return the tasks of a lab, in order."""
        answers: dict[str, list[TaskResult]] = defaultdict(list)
        for one in self._of(lab):
            for task in one.tasks:
                answers[task.task].append(task)
        return [
            Task(lab, number, each[0].title, each[0].most, Counter(map(kind, each)))
            for number, each in answers.items()
        ]

    def mistakes(self, lab: str, task: str, most: int = 3) -> list[Mistake]:
        """Return the commonest mistakes in a task; a student counts once for each mistake."""
        answers = [answer for _, answer in answers_to(self.results, lab, task)]
        unsolved = sum(answer.status not in {"passed", "by hand"} for answer in answers)
        counts: Counter[str] = Counter()
        example: dict[str, Problem] = {}
        for answer in answers:
            by_shape = {blurred(problem.text): problem for problem in problems_of(answer)}
            counts.update(by_shape.keys())
            example = by_shape | example
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
        return [
            Mistake(lab, task, example[key].text, example[key].kind, n, n / unsolved)
            for key, n in ranked
        ]

    def _of(self, lab: str) -> list[Result]:
        return [one for one in self.results if one.lab == lab]


def read(folder: Path) -> ClassResults:
    """Return the class whose results are in a folder.

    Raises:
        NotebookError: The folder has no graded submission.
    """
    folder = Path(folder)
    stored = [load(path) for path in sorted(folder.glob("students/*/*/result.json"))]
    graded = [one for one in stored if one is not None and not one.error and one.file]
    if not graded:
        raise NotebookError(
            f"{folder.resolve()} has no graded submission "
            f"({len(stored)} results, students/NAME/LAB/result.json). Name the folder that "
            "`ddl-labs grade submissions/ -o FOLDER` wrote."
        )
    return ClassResults(graded, len(stored) - len(graded))


def problems_of(answer: TaskResult) -> list[Problem]:
    """Return the problems of an answer; an empty list if it is right, not begun, or written."""
    if answer.status in NOTHING_WRONG | {"not graded"}:
        return []
    if answer.problems:
        return [_with_known_kind(Problem(**one)) for one in answer.problems]
    texts = [(text, _OPEN.sub("", text)) for text in problems(answer)]
    return [Problem(short, kind="" if short == text else "open") for text, short in texts]


def _with_known_kind(problem: Problem) -> Problem:
    """Return a problem with a kind that pictures know: interrupts and lost ranks become errors."""
    return replace(problem, kind="error") if problem.kind in {"interrupted", "lost"} else problem


def main(folder: Path) -> int:
    """Write ``statistics.ipynb`` into a results folder, unless it is already there, and run it."""
    read(folder)
    require_kernel()
    path = folder / TEMPLATE.name
    nb = nbformat.read(path if path.exists() else TEMPLATE, as_version=4)
    if error := run_cells(nb, folder, TIMEOUT):
        raise NotebookError(f"{path}: {error}")
    write(normalise(nb), path)
    print(f"The statistics are in {path}. Open it in JupyterLab, change it, and run it again.")
    return 0
