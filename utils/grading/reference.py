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


class LabError(NotebookError):
    """A solution that can't be graded against; the message names the cell and the cure."""


@dataclass
class Task:
    """A task of a lab. by_hand: a written answer. answers: grade_ids; checks: cell ids.

    foundation: what other tasks stand on, such as joining the process group.
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
        """Ids of the cells that a grading run leaves out."""
        return self._tagged(ONLY_DRAWS)

    @cached_property
    def answer_cells(self) -> dict[str, NotebookNode]:
        """The cells that students fill in, by grade_id, in order."""
        return {
            cell.metadata.nbgrader.grade_id: cell for cell in self.nb.cells if is_solution(cell)
        }

    @cached_property
    def owners(self) -> dict[str, str | None]:
        """The task of each code cell: its own, else that of the last answer above it."""
        owner, found = None, {}
        for cell in self.nb.cells:
            if cell.cell_type != "code":
                continue
            own = lab(cell).get("task")
            owner = own or owner
            found[cell.id] = owner
        return found

    @cached_property
    def deliberate(self) -> set[str]:
        """Ids of the cells whose error the lab shows on purpose."""
        return self._tagged("raises-exception")

    @cached_property
    def ids(self) -> set[str]:
        """By which a notebook of this lab is known: ids and grade_ids."""
        return {cell.id for cell in self.nb.cells} | set(self.answer_cells)

    @cached_property
    def expected(self) -> dict[str, list[dict[str, Any]]]:
        """The verdicts of each check when it passes (there is one), by cell id."""
        return {
            cell.id: [one.data() for one in verdict.read(cell.outputs)]
            for cell in self.nb.cells
            if lab(cell).get("check")
        }

    @cached_property
    def unprotected(self) -> list[str]:
        """Tasks whose answer runs in the kernel, beside its own check."""
        return [
            lab(cell)["task"]
            for cell in self.answer_cells.values()
            if cell.cell_type == "code" and not cell.source.startswith("%%")
        ]

    def _tagged(self, tag: str) -> set[str]:
        return {cell.id for cell in self.nb.cells if tag in cell.metadata.get("tags", [])}

    def fingerprint(self) -> str:
        """Changes with anything that the grade may depend on; an instructor's notes are not."""
        return hashlib.sha256(dumps(self.nb).encode()).hexdigest()

    def task(self, number: str) -> Task:
        """The task of this number."""
        return self.tasks[number]

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
                found = [(one["task"], one["passed"]) for one in self.expected[cell_id]]
                if found != [(task.number, True)]:
                    raise LabError(
                        f"{self.path.name}: cell '{cell_id}': its stored output is no "
                        f"'✓ Task {task.number} …': make solutions"
                    )


def references(folder: Path, only: Collection[str] = ()) -> tuple[list[Reference], dict[str, str]]:
    """The labs to grade against, and those that can't be: name → why.

    Raises LabError for a name in `only` that is no lab, and where there is nothing to grade.
    """
    paths = notebooks(folder)
    if only:
        unknown = [name for name in only if not any(is_named(name, path) for path in paths)]
        if unknown:
            raise LabError(f"no such lab in {folder}: {', '.join(unknown)}")
        paths = [path for path in paths if any(is_named(name, path) for name in only)]
    found, broken = [], {}
    for path in paths:
        try:
            found.append(Reference(path))
        except NotebookError as error:
            broken[path.stem] = str(error)
    found = [one for one in found if one.tasks]
    if not found:
        why = "".join(f"\n  {text}" for text in broken.values())
        raise LabError(f"there is no lab that can be graded in {folder}{why}")
    return found, broken
