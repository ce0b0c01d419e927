"""What grading one submission gave, as data: written in one step, read again by --resume."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from utils.course.files import write_text

Status = Literal[
    "passed",  # the check said so
    "wrong",  # the check ran and found problems
    "failed",  # the check ended with an error of its own
    "hung",  # out of time
    "lost",  # the ranks or the kernel were gone
    "unchanged",  # the stub is still there
    "missing",  # there is no answer
    "not reached",  # no run came this far
    "not graded",  # the machine failed, not the answer: no points, not even none
    "by hand",  # a written answer
]

#: Goes up when the same submission could be graded otherwise than before.
FORMAT = 4


@dataclass
class Shown:
    """Something for the feedback: a title, a text, and perhaps a picture (PNG, base64)."""

    title: str
    text: str
    png: str = ""


@dataclass
class TaskResult:
    """One task of one student. points: None until a written answer has been read, and where
    grading failed. problems: what its check found, as data of
    :class:`utils.checks.verdict.Problem`.
    """

    task: str
    title: str
    most: float
    points: float | None
    status: Status
    said: str = ""
    shown: list[Shown] = field(default_factory=list)
    code: str = ""
    note: str = ""
    problems: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Result:
    """One submission. error: why it could not be graded; then its points are no grade.

    look: what a person should look at, see `suspicion`; for the instructor only. own: the code of
    the student's own cells, which is run beside the answers.
    """

    student: str
    lab: str
    key: str
    file: str = ""
    lms: dict[str, str] = field(default_factory=dict)
    tasks: list[TaskResult] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    look: list[str] = field(default_factory=list)
    own: str = ""
    error: str = ""
    runs: int = 0
    seconds: float = 0.0

    @property
    def points(self) -> float:
        """The sum of what is known."""
        return sum(task.points or 0 for task in self.tasks)

    @property
    def most(self) -> float:
        """What could be reached."""
        return sum(task.most for task in self.tasks)

    @property
    def open(self) -> list[str]:
        """Tasks that wait to be graded by hand."""
        waiting = (task for task in self.tasks if task.status == "by hand")
        return [task.task for task in waiting if task.points is None]

    def task(self, number: str) -> TaskResult:
        """The result of one task."""
        return next(task for task in self.tasks if task.task == number)


def total(results: list[Result]) -> float | None:
    """Points in all; None where a part could not be graded: the rest is no grade."""
    return None if any(one.error for one in results) else sum(one.points for one in results)


def file_key(path: Path, most: int) -> str:
    """Of a submission; what lies beyond the limit is never read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.sha256(file.read(most + 1)).hexdigest()
    return "unreadable"


def save(result: Result, path: Path) -> None:
    """Write in one step: after an interruption there is the whole file, or none."""
    write_text(path, json.dumps(dataclasses.asdict(result), ensure_ascii=False, indent=1))


def load(path: Path) -> Result | None:
    """The result in a file; None where there is none, or one that can't be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tasks = [
            TaskResult(**{**task, "shown": [Shown(**one) for one in task["shown"]]})
            for task in data.pop("tasks")
        ]
        return Result(**data, tasks=tasks)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
