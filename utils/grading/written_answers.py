"""Written answers: a CSV to fill in by hand, whose points come back with the next run.

What a person entered is nowhere else: a row that fits nobody is kept, and before the file is
written anew there is a copy of it with the date.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from utils.course.files import write_text
from utils.course.notebook import NotebookError
from utils.course.pages import number

from .gradebook import FORMULA, table
from .results import Result, TaskResult
from .zips import clean

HEADER = ["student", "lab", "task", "max", "points", "comment", "answer"]
NEEDED = HEADER[:5]
Key = tuple[str, str, str]


class ExplainError(NotebookError):
    """explain.csv can't be read at all; the message says why."""


class RowError(Exception):
    """A row is not a grade; the message names the line and what to do."""


class Grades(dict[Key, "Grade"]):
    """Grades by (student, lab, task). bad: what is wrong with each row that was skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []


@dataclass
class Grade:
    """What a person gave; the line where, the points to be had, and columns of the person's own.

    answer: the mark of the text that was there when points were given, see `mark`.
    """

    points: float | None
    comment: str = ""
    line: int = 0
    most: str = ""
    answer: str = ""
    more: dict[str, str] = field(default_factory=dict)

    @property
    def entered(self) -> bool:
        """Would anything be lost without this row?"""
        return self.points is not None or bool(self.comment) or any(self.more.values())


def read(path: Path) -> Grades:
    """Return the grades in explain.csv; nothing if there is no file.

    Spreadsheets write ';' or tabs for ',' and 1,5 for 1.5 in some countries, and UTF-16 or
    Windows-1252 for UTF-8: all are read. A row that is not a grade is skipped and noted. Raises
    ExplainError if no row can be read.
    """
    found = Grades()
    if not path.exists():
        return found
    lines = list(_lines(path))
    if not lines:
        raise ExplainError(f"{path.name} is empty: delete it, or restore it from a dated copy")
    columns = [name.strip().casefold() for name in lines[0][1]]
    missing = set(NEEDED) - set(columns)
    if missing:
        raise ExplainError(f"{path.name}: it has no column {', '.join(sorted(missing))}")
    seen: dict[Key, int] = {}
    for line, cells in lines[1:]:
        where = f"{path.name}, line {line}"
        row = dict(zip(columns, map(_plain, cells), strict=False))
        student, lab, task = (clean(row.get(name, "")) for name in HEADER[:3])
        key = student, lab, task
        try:
            if any(cell.strip() for cell in cells[len(columns) :]):
                raise RowError(f"{where}: more cells than columns: put text with a comma in quotes")
            if key in seen:
                found.pop(key, None)
                raise RowError(
                    f"{path.name}, lines {seen[key]} and {line}: both are for {', '.join(key)}: "
                    "delete one"
                )
            seen[key] = line
            found[key] = _grade(row, line, where)
        except RowError as error:
            found.bad.append(str(error))
    return found


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each row that is not empty."""
    text = _decoded(path).lstrip("\ufeff")
    first = text.lstrip("\n").split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    line = 1
    try:
        for cells in rows:
            if any(cell.strip() for cell in cells):
                yield line, cells
            line = rows.line_num + 1
    except csv.Error as error:
        raise ExplainError(f"{path.name}, line {line}: {error}") from error


def _decoded(path: Path) -> str:
    """The text: UTF-16 has a mark at its beginning, and what is no UTF-8 is Excel's old code."""
    try:
        data = path.read_bytes()
        if data[:2] in {b"\xff\xfe", b"\xfe\xff"}:
            return data.decode("utf-16")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            return data.decode("cp1252")
    except (OSError, UnicodeDecodeError) as error:
        raise ExplainError(
            f"{path.name} can't be read ({error}): save it as CSV in UTF-8"
        ) from error


def _plain(cell: str | None) -> str:
    """A cell without the mark that keeps spreadsheets from calculating it."""
    cell = cell or ""
    return cell[1:] if cell[:1] == "'" and cell[1:2] in FORMULA else cell


def _grade(row: dict[str, str], line: int, where: str) -> Grade:
    more = {name: cell for name, cell in row.items() if name and name not in HEADER}
    most, answer = (row.get(name, "").strip() for name in ("max", "answer"))
    return Grade(_points(row, where), row.get("comment", ""), line, most, answer, more)


def _points(row: dict[str, str], where: str) -> float | None:
    text = row.get("points", "").strip().replace(",", ".")
    if not text:
        return None
    most_text = row.get("max", "").strip().replace(",", ".")
    try:
        points, most = float(text), float(most_text)
    except ValueError:
        raise RowError(f"{where}: {text!r} of {most_text!r} is not a number of points") from None
    if not 0 <= points <= most:
        raise RowError(f"{where}: {text} points; there are 0 to {number(most)}")
    return points


def merge(results: list[Result], grades: dict[Key, Grade]) -> list[str]:
    """Put the points that a person gave into the results; what fits no result, in words."""
    used = set()
    said = []
    for result in results:
        for task in written(result):
            key = (result.student, result.lab, task.task)
            grade = grades.get(key)
            if grade is None:
                continue
            used.add(key)
            if grade.points is not None:
                task.points = min(grade.points, task.most)
                if grade.points > task.most:
                    said.append(f"line {grade.line}: only {number(task.most)} points are left")
                if grade.answer not in {"", mark(task.code)}:
                    said.append(
                        f"line {grade.line}: {result.student} has changed the answer to "
                        f"{task.task} since: read it again, then empty the cell 'answer'"
                    )
            task.note = grade.comment or task.note
    said += [
        f"line {grade.line}: {_misfit(key, results)}; kept, but counts for nobody"
        for key, grade in grades.items()
        if grade.entered and key not in used
    ]
    return [f"explain.csv, {text}" for text in said]


def _misfit(key: Key, results: list[Result]) -> str:
    """Why a row is nobody's."""
    student, lab, task = key
    students = sorted({one.student for one in results})
    if student not in students:
        near = difflib.get_close_matches(student, students, 1, 0.75)
        return f"nobody here is called {student!r}" + (f" ({near[0]!r}?)" if near else "")
    own = [one for one in results if one.student == student and one.lab == lab]
    status = [found.status for one in own for found in one.tasks if found.task == task]
    if not status:
        return f"{student} has no task {task!r} in {lab!r}"
    return f"the answer of {student} to task {task} in {lab} is {status[0]}, not read by hand"


def written(result: Result) -> list[TaskResult]:
    """The tasks that a person grades."""
    return [task for task in result.tasks if task.status == "by hand"]


def write(results: list[Result], path: Path, grades: dict[Key, Grade] | None = None) -> None:
    """All written answers, those that wait to be read without points; then rows that fit nobody.

    With a mark by which Excel knows UTF-8: names that it read as something else come back wrong.
    """
    grades = dict(grades or {})
    more = list(dict.fromkeys(name for grade in grades.values() for name in grade.more))
    rows = []
    for result in sorted(results, key=lambda one: (one.lab, one.student.casefold())):
        for task in written(result):
            key = (result.student, result.lab, task.task)
            grade = grades.pop(key, Grade(None))
            read_then = grade.answer if grade.points is not None else ""
            rows.append([*key, number(task.most), number(task.points), task.note,
                         read_then or mark(task.code), *_cells(grade, more)])  # fmt: skip
    rows += [
        [*key, grade.most, number(grade.points), grade.comment, grade.answer, *_cells(grade, more)]
        for key, grade in grades.items()
        if grade.entered
    ]
    text = "\ufeff" + table([[*HEADER, *more], *rows])
    keep_copy(path, text)
    write_text(path, text)


def _cells(grade: Grade, names: list[str]) -> list[str]:
    return [grade.more.get(name, "") for name in names]


def mark(text: str) -> str:
    """The same for the same answer; its letter keeps spreadsheets from taking it for a number."""
    return "a" + hashlib.sha256(" ".join(text.split()).encode(errors="replace")).hexdigest()[:7]


def keep_copy(path: Path, text: str) -> None:
    """A dated copy of a file that is about to be written otherwise."""
    if not path.exists() or path.read_bytes() == text.encode(errors="replace"):
        return
    stem = f"{path.stem}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    copy, count = path.with_name(f"{stem}{path.suffix}"), 1
    while copy.exists():
        count += 1
        copy = path.with_name(f"{stem}-{count}{path.suffix}")
    shutil.copy2(path, copy)


def open_elsewhere(path: Path) -> bool:
    """Does LibreOffice or Excel have the file open? Saving there would undo what we write."""
    return any(path.with_name(name).exists() for name in (f".~lock.{path.name}#", f"~${path.name}"))
