"""Written answers: a CSV to fill in by hand, whose points come back with the next run."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from ..notebook import NotebookError
from .book import number, table
from .results import Result, TaskResult, write_text

HEADER = ["student", "lab", "task", "max", "points", "comment"]
Key = tuple[str, str, str]


class ExplainError(NotebookError):
    """explain.csv holds something that is no grade; the message names the line."""


@dataclass
class Grade:
    """What a person gave."""

    points: float | None
    comment: str = ""


def read(path: Path) -> dict[Key, Grade]:
    """The grades in explain.csv by (student, lab, task); nothing where there is no file.

    Spreadsheets write ';' for ',' and 1,5 for 1.5 in some countries: both are read.
    """
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8-sig")
    first = text.split("\n", 1)[0]
    rows = csv.DictReader(text.splitlines(), delimiter=";" if ";" in first else ",")
    missing = set(HEADER[:5]) - set(rows.fieldnames or [])
    if missing:
        raise ExplainError(f"{path.name}: it has no column {', '.join(sorted(missing))}")
    found = {}
    for line, row in enumerate(rows, start=2):
        where = f"{path.name}, line {line}"
        key = tuple(_plain(row[name]) for name in HEADER[:3])
        found[key] = Grade(_points(row, where), _plain(row.get("comment")))
    return found


def _plain(cell: str | None) -> str:
    """A cell without the mark that keeps spreadsheets from calculating it."""
    cell = cell or ""
    return cell[1:] if cell[:1] == "'" and cell[1:2] in {"=", "+", "-", "@"} else cell


def _points(row: dict, where: str) -> float | None:
    text = (row["points"] or "").strip().replace(",", ".")
    if not text:
        return None
    try:
        points, most = float(text), float((row["max"] or "").replace(",", "."))
    except ValueError:
        raise ExplainError(f"{where}: {text!r} is no number of points") from None
    if not 0 <= points <= most:
        raise ExplainError(f"{where}: {text} points; there are 0 to {number(most)}")
    return points


def merge(results: list[Result], grades: dict[Key, Grade]) -> None:
    """Put the points that a person gave into the results."""
    for result in results:
        for task in written(result):
            grade = grades.get((result.student, result.lab, task.task))
            if grade is None:
                continue
            if grade.points is not None:
                task.points = min(grade.points, task.most)
            task.note = grade.comment or task.note


def written(result: Result) -> list[TaskResult]:
    """The tasks that a person grades."""
    return [task for task in result.tasks if task.status == "by hand"]


def write(results: list[Result], path: Path) -> None:
    """All written answers, those that wait to be read without points."""
    rows = [HEADER]
    for result in sorted(results, key=lambda one: (one.lab, one.student.casefold())):
        for task in written(result):
            rows.append([result.student, result.lab, task.task, number(task.most),
                         number(task.points), task.note])  # fmt: skip
    write_text(path, table(rows))
