"""The tables of a class: gradebook.csv, tables for Moodle and Canvas, and points given by hand.

What a person entered in explain.csv is stored nowhere else. So rows that match no answer are kept,
and a dated copy is made before the file is overwritten.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import math
import shutil
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from utils.course.files import write_text
from utils.course.notebook import NotebookError
from utils.course.page_templates import number

from .results import Result, TaskResult, by_student, columns, most_of, total
from .submissions import clean

#: The first characters of formulas, including their full-width East Asian forms.
FORMULA = {*"=+-@\t\r", *"\uff1d\uff0b\uff0d\uff20"}
#: The columns of explain.csv, and the columns without which no row can be read.
HEADER = ["student", "lab", "task", "max", "points", "comment", "answer"]
NEEDED = HEADER[:5]
#: The task of a row that says how many days late a submission counts.
LATE = "late"
#: Student, lab and task.
Key = tuple[str, str, str]


# --- books that nobody edits ---------------------------------------------------------------------


def gradebook(results: list[Result], remarks: dict[str, list[str]] | None = None) -> str:
    """Return a row per student and a column per task, which is empty if there are no points yet."""
    tasks = columns(results)
    labs = list(dict.fromkeys(lab for lab, _ in tasks))
    totals = labs if len(labs) > 1 else []
    late = sorted({result.lab for result in results if result.days_late is not None})
    head = ["student", *_task_names(tasks)]
    head += [f"{lab} {name}" for lab in late for name in ("days late", "before penalty")]
    head += [f"{lab} total" for lab in totals]
    rows = [[*head, "total", "max", "to grade by hand", "remarks"]]
    for student, own_results in by_student(results).items():
        points = [*_points_of(own_results, tasks), *_lateness_of(own_results, late)]
        points += _totals_of(own_results, totals)
        points += [number(total(own_results)), number(most_of(own_results))]
        by_hand = [task for result in own_results for task in result.open]
        more = (remarks or {}).get(student, [])
        rows.append([student, *points, " ".join(by_hand), _all_remarks(own_results, more)])
    return table(rows)


def _all_remarks(results: list[Result], more: list[str]) -> str:
    """Return the remarks on one student's results, and more, in one cell."""
    texts = [*(text for result in results for text in _remarks(result)), *more]
    return "; ".join(text.rstrip(".") for text in dict.fromkeys(texts))


def _task_names(tasks: list[tuple[str, str]]) -> list[str]:
    """Return the tasks' numbers, preceded by the lab if two labs use the same number."""
    often = Counter(task for _, task in tasks)
    return [task if often[task] == 1 else f"{lab} {task}" for lab, task in tasks]


def _points_of(results: list[Result], tasks: list[tuple[str, str]]) -> list[str]:
    graded = [result for result in results if not result.error]
    points = {(result.lab, task.task): task.points for result in graded for task in result.tasks}
    return [number(points.get(task)) for task in tasks]


def _totals_of(results: list[Result], labs: list[str]) -> list[str]:
    """Return the points of one student in each lab; "" for a lab without a submission."""
    points = {result.lab: total([result]) for result in results}
    return [number(points.get(lab)) for lab in labs]


def _lateness_of(results: list[Result], labs: list[str]) -> list[str]:
    """Return for each lab the days that one student is late, and the points without a penalty."""
    found = {one.lab: one for one in results if one.days_late is not None and not one.error}
    pairs = {lab: (one.days_late, one.points + one.penalty) for lab, one in found.items()}
    return [number(cell) for lab in labs for cell in pairs.get(lab, (None, None))]


def _remarks(result: Result) -> list[str]:
    failed = [f"NOT GRADED: {result.error}"] if result.error else []
    return [f"{result.lab}: {clean(text)}" for text in (*failed, *result.look, *result.remarks)]


def moodle(results: list[Result]) -> str:
    """Return a grading worksheet, in which Moodle finds a student by the number from the folder."""
    rows = [["Identifier", "Full name", "Grade", "Maximum grade"]]
    for student, own_results in by_student(results).items():
        identifier = own_results[0].lms.get("id", "")
        participant = f"Participant {identifier}" if identifier else ""
        points = [number(total(own_results)), number(most_of(own_results))]
        rows.append([participant, student, *points])
    return table(rows)


def canvas(results: list[Result]) -> str:
    """Return a gradebook to import, with a column per lab and a row of possible points."""
    labs = {result.lab: result.most for result in sorted(results, key=lambda one: one.lab)}
    rows = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *labs]]
    rows.append(["Points Possible", "", "", "", "", *map(number, labs.values())])
    for student, own_results in by_student(results).items():
        identifier = own_results[0].lms.get("id", "")
        rows.append([student, identifier, "", "", "", *_totals_of(own_results, list(labs))])
    return table(rows)


FORMATS = {"moodle": moodle, "canvas": canvas}


def moodle_feedback(results: list[Result], pages: dict[str, Path], path: Path) -> None:
    """Write a zip for Moodle's "upload multiple feedback files", using Moodle's own file names."""
    files = {}
    for student, own_results in by_student(results).items():
        lms = own_results[0].lms
        place = f"{lms['folder']}/" if "folder" in lms else lms.get("prefix")
        if place and student in pages:
            files[f"{place}feedback.html"] = pages[student].read_text(encoding="utf-8")
    write_zip(path, files)


def write_zip(path: Path, files: dict[str, str]) -> None:
    """Write a zip of these texts in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    temporary.replace(path)


def table(rows: list[list[str]]) -> str:
    """Return CSV in which no cell is a formula, because names and remarks come from students."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([harmless(cell) for cell in row])
    return text.getvalue()


def harmless(cell: str) -> str:
    """Return the cell with a quote before a formula, so that no spreadsheet calculates it."""
    return f"'{cell}" if cell[:1] in FORMULA else cell


def write_books(
    results: list[Result],
    out: Path,
    formats: list[str],
    remarks: dict[str, list[str]] | None = None,
) -> None:
    """Write gradebook.csv, and gradebook-FORMAT.csv for each requested format."""
    write_text(out / "gradebook.csv", gradebook(results, remarks))
    for name in formats:
        write_text(out / f"gradebook-{name}.csv", FORMATS[name](results))


# --- explain.csv, in which a person fills in points ----------------------------------------------


class ExplainError(NotebookError):
    """explain.csv can't be read at all; the message says why."""


class RowError(Exception):
    """A row is not a grade; the message names the line and the problem."""


class Grades(dict[Key, "Grade"]):
    """Grades by (student, lab, task). bad: the problem with each row that was skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []


@dataclass
class Grade:
    """The points and the comment that a person gave for an answer.

    Attributes:
        answer: The mark of the graded text, see `mark`.
        more: Cells in columns that the person has added.
    """

    points: float | None
    comment: str = ""
    line: int = 0
    most: str = ""
    answer: str = ""
    more: dict[str, str] = field(default_factory=dict)

    @property
    def entered(self) -> bool:
        """Return whether a person has entered anything in this row."""
        return self.points is not None or bool(self.comment) or any(self.more.values())


def read_explain(path: Path) -> Grades:
    """Return the grades in explain.csv; no grades if there is no file.

    In some countries spreadsheets write ';' or tabs instead of ',', 1,5 instead of 1.5, and UTF-16
    or Windows-1252 instead of UTF-8. All are read. A row that is not a grade is skipped and noted.

    Raises:
        ExplainError: No row can be read.
    """
    grades = Grades()
    if not path.exists():
        return grades
    lines = list(numbered_rows(path))
    if not lines:
        raise ExplainError(f"{path.name} is empty. Delete it, or restore it from a dated copy.")
    names = [name.strip().casefold() for name in lines[0][1]]
    missing = set(NEEDED) - set(names)
    if missing:
        raise ExplainError(f"{path.name} has no column {', '.join(sorted(missing))}.")
    seen: dict[Key, int] = {}
    for line, cells in lines[1:]:
        row = dict(zip(names, map(_plain, cells), strict=False))
        student, lab, task = (clean(row.get(name, "")) for name in HEADER[:3])
        key = student, lab, task
        try:
            _require_columns(cells, len(names), f"{path.name}, line {line}")
            if key in seen:
                grades.pop(key, None)
                raise RowError(
                    f"{path.name}, lines {seen[key]} and {line} are both for {', '.join(key)} "
                    "(delete one)."
                )
            seen[key] = line
            grades[key] = _grade(row, line, f"{path.name}, line {line}")
        except RowError as error:
            grades.bad.append(str(error))
    return grades


def _require_columns(cells: list[str], count: int, where: str) -> None:
    if "".join(cells[count:]).strip():
        raise RowError(f"{where}: more cells than columns. Put text with a comma in quotes.")


def numbered_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row that is not empty."""
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
    """Return the text, from UTF-16 with its mark, from UTF-8, or otherwise from Windows-1252."""
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
            f"{path.name} can't be read ({error}). Save it as CSV in UTF-8."
        ) from error


def _plain(cell: str) -> str:
    """Return a cell without the quote that `harmless` added."""
    return cell[1:] if cell[:1] == "'" and cell[1:2] in FORMULA else cell


def _grade(row: dict[str, str], line: int, where: str) -> Grade:
    more = {name: cell for name, cell in row.items() if name and name not in HEADER}
    points, most, answer = (row.get(name, "").strip() for name in ("points", "max", "answer"))
    grade = Grade(None, row.get("comment", ""), line, most, answer, more)
    if points:
        grade.points = _points(points.replace(",", "."), most.replace(",", "."), where)
    return grade


def _points(text: str, most_text: str, where: str) -> float:
    try:
        points = float(text)
        most = float(most_text) if most_text else math.inf  # a row that a person has added
    except ValueError:
        raise RowError(f"{where}: {text!r} of {most_text!r} is not a number of points.") from None
    if not 0 <= points <= most or math.isinf(points):
        raise RowError(f"{where}: {text} points are not between 0 and {number(most)}.")
    return points


def merge_explain(results: list[Result], grades: dict[Key, Grade]) -> list[str]:
    """Put the points given by hand into the results; return remarks on rows that don't fit.

    They count for each task: instead of the points that a check has given, too.
    """
    used = set()
    remarks: list[str] = []
    for result in results:
        key = (result.student, result.lab, LATE)
        if key in grades:
            used.add(key)
            result.days_late = grades[key].points
        for task in result.tasks:
            key = (result.student, result.lab, task.task)
            if grade := grades.get(key):
                used.add(key)
                remarks += _enter(grade, task, result.student)
    for key, grade in grades.items():
        if grade.entered and key not in used:
            misfit = _misfit(key, results)
            remarks.append(f"line {grade.line}: {misfit} The row is kept, but doesn't count.")
    return [f"explain.csv, {text}" for text in remarks]


def _enter(grade: Grade, task: TaskResult, student: str) -> Iterator[str]:
    """Put a grade into a result; yield remarks for a person."""
    task.note = grade.comment or task.note
    if grade.points is None:
        return
    task.points = min(grade.points, task.most)
    task.by_person = task.status != "by hand"
    if grade.points > task.most:
        most = number(task.most)
        yield f"line {grade.line}: the task now has only {most} points, so {most} points count."
    if grade.answer not in {"", mark(task.code)}:
        yield (
            f"line {grade.line}: {student} has changed the answer to task {task.task} since you "
            "graded it. Read it again, then empty the cell 'answer'."
        )


def _misfit(key: Key, results: list[Result]) -> str:
    student, lab, task = key
    students = sorted({result.student for result in results})
    if student not in students:
        near = difflib.get_close_matches(student, students, 1, 0.75)
        hint = f" Do you mean {near[0]!r}?" if near else ""
        return f"there is no student {student!r}.{hint}"
    return f"{student} has no task {task!r} in {lab!r}."


def write_explain(results: list[Result], path: Path, grades: Grades | None = None) -> None:
    """Write a row for each answer that a person grades, then the rows that match no answer.

    The file begins with a byte order mark, so that Excel reads it as UTF-8 and keeps names intact.
    """
    left = dict(grades or {})
    more = list(dict.fromkeys(name for grade in left.values() for name in grade.more))
    rows = [[*HEADER, *more]]
    for key, grade in _entries(results, left).items():
        own = [grade.more.get(name, "") for name in more]
        rows.append([*key, grade.most, number(grade.points), grade.comment, grade.answer, *own])
    text = "\ufeff" + table(rows)
    _keep_copy(path, text)
    write_text(path, text)


def _entries(results: list[Result], left: dict[Key, Grade]) -> dict[Key, Grade]:
    """Return the rows of explain.csv as grades; rows that match no answer come last."""
    entries: dict[Key, Grade] = {}
    for result in sorted(results, key=lambda one: (one.lab, one.student.casefold())):
        for task in result.tasks:
            key = (result.student, result.lab, task.task)
            if task.status == "by hand":
                entries[key] = _by_hand(left.pop(key, Grade(None)), task)
            elif key in left and left[key].entered:
                entries[key] = _overruled(left.pop(key), task)
    return entries | {key: grade for key, grade in left.items() if grade.entered}


def _overruled(grade: Grade, task: TaskResult) -> Grade:
    """Return the row of a task that has a check, whose points a person has entered."""
    points = None if grade.points is None else min(grade.points, task.most)
    answer = grade.answer or mark(task.code)
    return replace(grade, points=points, most=number(task.most), answer=answer)


def _by_hand(grade: Grade, task: TaskResult) -> Grade:
    """Return the row of a task that a person grades."""
    answer = (grade.answer if grade.points is not None else "") or mark(task.code)
    most = number(task.most)
    return replace(grade, points=task.points, comment=task.note, most=most, answer=answer)


def mark(text: str) -> str:
    """Return a short hash of an answer; its first letter keeps it from being read as a number."""
    return "a" + hashlib.sha256(" ".join(text.split()).encode(errors="replace")).hexdigest()[:7]


def _keep_copy(path: Path, text: str) -> None:
    """Make a dated copy of a file if the new text differs from it."""
    if not path.exists() or path.read_bytes() == text.encode(errors="replace"):
        return
    stem = f"{path.stem}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    copy = path.with_name(f"{stem}{path.suffix}")
    count = 1
    while copy.exists():
        count += 1
        copy = path.with_name(f"{stem}-{count}{path.suffix}")
    shutil.copy2(path, copy)


def open_elsewhere(path: Path) -> bool:
    """Return whether LibreOffice or Excel has the file open; saving there would undo our write."""
    return any(path.with_name(name).exists() for name in (f".~lock.{path.name}#", f"~${path.name}"))
