"""gradebook.csv, and the files that Moodle and Canvas read back."""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from pathlib import Path

from utils.course.files import write_text
from utils.course.pages import number

from .results import Result, total
from .zips import clean

#: What a formula begins with, also as East Asian keyboards write it.
FORMULA = {*"=+-@\t\r", *"\uff1d\uff0b\uff0d\uff20"}


def by_student(results: list[Result]) -> dict[str, list[Result]]:
    """The results of each student, students and labs in order."""
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda one: (one.student.casefold(), one.student, one.lab)):
        found.setdefault(result.student, []).append(result)
    return found


def tasks(results: list[Result]) -> list[tuple[str, str]]:
    """(lab, task) of every column, in the order of the labs."""
    found: dict[tuple[str, str], None] = {}
    for result in sorted(results, key=lambda one: one.lab):
        for task in result.tasks:
            found.setdefault((result.lab, task.task))
    return list(found)


def gradebook(results: list[Result], remarks: dict[str, list[str]] | None = None) -> str:
    """One row per student, a column per task; empty: waits to be read, or could not be graded."""
    columns = tasks(results)
    often = Counter(task for _, task in columns)
    names = [task if often[task] == 1 else f"{lab} {task}" for lab, task in columns]
    labs = list(dict.fromkeys(lab for lab, _ in columns))
    totals = [f"{lab} total" for lab in labs] if len(labs) > 1 else []
    rows = [["student", *names, *totals, "total", "max", "to grade by hand", "remarks"]]
    for student, own in by_student(results).items():
        graded = [one for one in own if not one.error]
        points = {(one.lab, task.task): task.points for one in graded for task in one.tasks}
        of_lab = {lab: [one for one in own if one.lab == lab] for lab in labs if totals}
        said = [text for one in own for text in _remarks(one)]
        said += (remarks or {}).get(student, [])
        rows.append([
            student,
            *(number(points.get(column)) for column in columns),
            *(number(total(found)) if found else "" for found in of_lab.values()),
            number(total(own)),
            number(sum(one.most for one in own)),
            " ".join(task for one in own for task in one.open),
            "; ".join(dict.fromkeys(said)),
        ])  # fmt: skip
    return table(rows)


def _remarks(result: Result) -> list[str]:
    failed = [f"NOT GRADED: {result.error}"] if result.error else []
    return [f"{result.lab}: {clean(text)}" for text in (*failed, *result.look, *result.remarks)]


def moodle(results: list[Result]) -> str:
    """An offline grading worksheet: Moodle knows a student by the number in the folder's name."""
    rows = [["Identifier", "Full name", "Grade", "Maximum grade"]]
    for student, own in by_student(results).items():
        identifier = own[0].lms.get("id", "")
        most = sum(one.most for one in own)
        rows.append([f"Participant {identifier}" if identifier else "", student,
                     number(total(own)), number(most)])  # fmt: skip
    return table(rows)


def canvas(results: list[Result]) -> str:
    """A gradebook to import: a column per lab, and the row of possible points."""
    labs = {one.lab: one.most for one in sorted(results, key=lambda one: one.lab)}
    rows = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *labs]]
    rows.append(["Points Possible", "", "", "", "", *map(number, labs.values())])
    for student, own in by_student(results).items():
        points = {one.lab: total([one]) for one in own}
        grades = [number(points.get(lab)) for lab in labs]
        rows.append([student, own[0].lms.get("id", ""), "", "", "", *grades])
    return table(rows)


FORMATS = {"moodle": moodle, "canvas": canvas}


def moodle_feedback(results: list[Result], pages: dict[str, Path], path: Path) -> None:
    """A zip for Moodle's "upload multiple feedback files": the names that it gave us."""
    temporary = path.with_name(f".{path.name}.tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for student, own in by_student(results).items():
            lms = own[0].lms
            place = f"{lms['folder']}/" if "folder" in lms else lms.get("prefix")
            if place and student in pages:
                archive.write(pages[student], f"{place}feedback.html")
    temporary.replace(path)


def table(rows: list[list[str]]) -> str:
    """CSV in which no cell is a formula: names and remarks come from students."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([harmless(cell) for cell in row])
    return text.getvalue()


def harmless(cell: str) -> str:
    """A spreadsheet would calculate what begins with one of these."""
    return f"'{cell}" if cell[:1] in FORMULA else cell


def write_books(
    results: list[Result],
    out: Path,
    formats: list[str],
    remarks: dict[str, list[str]] | None = None,
) -> None:
    """gradebook.csv, and gradebook-FORMAT.csv for each format asked for."""
    write_text(out / "gradebook.csv", gradebook(results, remarks))
    for name in formats:
        write_text(out / f"gradebook-{name}.csv", FORMATS[name](results))
