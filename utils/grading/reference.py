"""What is graded: the tasks of a solution, their cells and the verdicts of their checks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from utils.checks import verdict
from utils.course.notebook import (
    ONLY_DRAWS,
    NotebookError,
    dumps,
    is_named,
    lab,
    notebooks,
    read,
)
from utils.course.notes import rubric_cells
from utils.course.release import is_solution, student_version, without_notes

from .cells import body


class LabError(NotebookError):
    """A solution that can't be graded against; the message names the cell and the cure."""


@dataclass
class Task:
    """A task of a lab.

    Attributes:
        by_hand: Whether it is a written answer.
        answers: The grade_ids of its answers.
        checks: Points by the id of each check cell.
        foundation: Whether other tasks stand on it, such as joining the process group.
    """

    number: str
    title: str
    points: float
    by_hand: bool = False
    answers: list[str] = field(default_factory=list)
    checks: dict[str, float] = field(default_factory=dict)
    foundation: bool = False


class Reference:
    """A solution, as grading sees it."""

    def __init__(self, path: Path):
        self.path = path
        self.lab = path.stem
        self.nb = read(path)
        self.rubrics = {
            answer.metadata.nbgrader.grade_id: below.source
            for answer, below in rubric_cells(self.nb)
            if below
        }
        self.nb = without_notes(self.nb)
        student = student_version(self.nb, path.name)
        self.stubs: dict[str, str] = {cell.id: cell.source for cell in student.cells}
        self.tasks = self._find_tasks()
        self._require_verdicts()

    @cached_property
    def drawings(self) -> set[str]:
        """Return the ids of the cells that a grading run leaves out."""
        return self._tagged(ONLY_DRAWS)

    @cached_property
    def deliberate(self) -> set[str]:
        """Return the ids of the cells whose error the lab shows on purpose."""
        return self._tagged("raises-exception")

    def _tagged(self, tag: str) -> set[str]:
        return {cell.id for cell in self.nb.cells if tag in cell.metadata.get("tags", [])}

    @cached_property
    def answer_cells(self) -> dict[str, NotebookNode]:
        """Return the cells that students fill in, by grade_id, in order."""
        return {
            cell.metadata.nbgrader.grade_id: cell for cell in self.nb.cells if is_solution(cell)
        }

    @cached_property
    def owners(self) -> dict[str, str | None]:
        """Return the task of each code cell: its own, else that of the last answer above it."""
        task = None
        owners = {}
        for cell in self.nb.cells:
            if cell.cell_type == "code":
                task = lab(cell).get("task") or task
                owners[cell.id] = task
        return owners

    @cached_property
    def ids(self) -> set[str]:
        """Return the ids and grade_ids by which a notebook of this lab is known."""
        return {cell.id for cell in self.nb.cells} | set(self.answer_cells)

    @cached_property
    def expected(self) -> dict[str, list[dict[str, Any]]]:
        """Return the verdicts of each check when it passes (there is one), by cell id."""
        return {
            cell.id: [one.data() for one in verdict.read(cell.outputs)]
            for cell in self.nb.cells
            if lab(cell).get("check")
        }

    @cached_property
    def unprotected(self) -> list[str]:
        """Return the tasks whose answer runs in the kernel, beside its own check."""
        return [
            lab(cell)["task"]
            for cell in self.answer_cells.values()
            if cell.cell_type == "code" and not cell.source.startswith("%%")
        ]

    @cached_property
    def provided(self) -> list[str]:
        """Return the code that the lab itself runs on the ranks, around the answers."""
        cells = [cell for cell in self.nb.cells if cell.cell_type == "code"]
        cells = [cell for cell in cells if not is_solution(cell)]
        return [body(cell.source) for cell in cells if cell.source.startswith("%%px")]

    def fingerprint(self) -> str:
        """Return what changes with anything that the grade may depend on; notes are not."""
        return hashlib.sha256(dumps(self.nb).encode()).hexdigest()

    def task(self, number: str) -> Task:
        """Return the task of this number."""
        return self.tasks[number]

    def model_of(self, task: Task) -> str:
        """Return a task's solution as one text."""
        cells = [self.answer_cells[grade_id] for grade_id in task.answers]
        return "\n\n".join(body(cell.source) for cell in cells)

    def stub_of(self, task: Task) -> str:
        """Return a task's stub as one text."""
        cells = [self.answer_cells[grade_id] for grade_id in task.answers]
        return "\n\n".join(body(self.stubs[cell.id]) for cell in cells)

    def _find_tasks(self) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        for cell in self.nb.cells:
            about = lab(cell)
            number = str(about.get("task", ""))
            if not number:
                continue
            task = tasks.setdefault(number, Task(number, str(about.get("title", number)), 0.0))
            if is_solution(cell):
                graded = cell.metadata.nbgrader
                task.title = str(about.get("title", task.title))
                task.answers.append(graded.grade_id)
                task.by_hand = cell.cell_type == "markdown"
                task.foundation = bool(about.get("foundation"))
                points = about.get("points", graded.get("points", 0))
                task.points = max(task.points, float(points))
            if about.get("check"):
                task.checks[cell.id] = float(about.get("points", 0))
        for task in tasks.values():
            task.points = sum(task.checks.values()) or task.points
        return tasks

    def _require_verdicts(self) -> None:
        for task in self.tasks.values():
            if not task.by_hand and not task.checks:
                raise LabError(f"{self.path.name}: task {task.number} has no check cell")
            for cell_id in task.checks:
                verdicts = [(one["task"], one["passed"]) for one in self.expected[cell_id]]
                if verdicts != [(task.number, True)]:
                    raise LabError(
                        f"{self.path.name}: cell '{cell_id}': its stored output is no "
                        f"'✓ Task {task.number} …': make solutions"
                    )


def _named(paths: list[Path], names: Collection[str], folder: Path) -> list[Path]:
    """Return the labs of these names; all if there are no names."""
    unknown = [name for name in names if not any(is_named(name, path) for path in paths)]
    if unknown:
        raise LabError(f"no such lab in {folder}: {', '.join(unknown)}")
    return [p for p in paths if not names or any(is_named(name, p) for name in names)]


def references(folder: Path, only: Collection[str] = ()) -> tuple[list[Reference], dict[str, str]]:
    """Return the labs to grade against, and those that can't be: name → why.

    Raises:
        LabError: A name in `only` is no lab, or there is nothing to grade.
    """
    paths = _named(notebooks(folder), only, folder)
    refs = []
    broken = {}
    for path in paths:
        try:
            reference = Reference(path)
            if reference.tasks:
                refs.append(reference)
        except NotebookError as error:
            broken[path.stem] = str(error)
    if not refs:
        why = "".join(f"\n  {text}" for text in broken.values())
        raise LabError(f"there is no lab that can be graded in {folder}{why}")
    return refs, broken
