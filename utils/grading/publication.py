"""What a results folder holds of a class: who was to be graded, the results, books and pages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import utils
from utils.course.files import write_text

from .gradebook import (
    FORMATS,
    ExplainError,
    Grades,
    merge_explain,
    moodle_feedback,
    open_elsewhere,
    read_explain,
    write_books,
    write_explain,
)
from .grading_options import GradingOptions
from .pages import append_for_github, write_pages
from .reference import LabError, Reference
from .results import Result, load
from .submissions import Student
from .worklist import NOT_YET, Job, ungraded

GIT_SECONDS = 10

#: Size and time of each file.
Stamp = dict[Path, tuple[int, int]]


def stamp(*places: Path) -> Stamp:
    """Return size and time of each file in some folders, or of files."""
    files = {}
    for place in places:
        for path in [place, *place.rglob("*")]:
            with contextlib.suppress(OSError):  # it vanishes meanwhile
                about = path.stat()
                files[path] = (about.st_size, about.st_mtime_ns)
    return files


def publish(
    results: list[Result],
    refs: list[Reference],
    out: Path,
    remarks: dict[str, list[str]],
    options: GradingOptions,
    known: Stamp | None = None,
) -> list[str]:
    """Write all that instructor and students read; return what could not be written, and why.

    Points by hand are read now: some may have been entered while the class was graded. known: gets
    the stamp of explain.csv as it was written: what is saved there from then on is news.
    """
    path = out / "explain.csv"
    grades, new_remarks, unmended = _hand_points(results, path)
    for text in new_remarks:
        print(text, file=sys.stderr)
    remarks = {**remarks, "": [*remarks.get("", []), *new_remarks]}
    labs = {result.lab for result in results}
    refs = [ref for ref in refs if ref.lab in labs]
    formats = [
        name
        for name in FORMATS
        if name in options.formats or (out / f"gradebook-{name}.csv").exists()
    ]
    provenance = provenance_now(options.command, load_class(out).command)
    pages: dict[str, Path] = {}
    steps: dict[str, Callable[[], object]] = {}
    if not unmended and (path.exists() or any(result.written for result in results)):
        steps["explain.csv"] = partial(_write_explain, results, path, grades, known)
    steps["gradebook"] = lambda: write_books(results, out, formats, remarks)
    steps["pages"] = lambda: pages.update(
        write_pages(results, refs, out, folders(results, out), remarks, provenance)
    )
    if "moodle" in formats:
        steps["feedback"] = lambda: moodle_feedback(results, pages, out / "feedback-moodle.zip")
    if "github" in options.formats:
        steps["summary on GitHub"] = lambda: append_for_github(results)
    unwritten = [unmended] if unmended else []
    for name, step in steps.items():
        try:
            step()
        except (OSError, UnicodeError) as error:
            unwritten.append(f"{name}: {error}")
    return unwritten


def _write_explain(results: list[Result], path: Path, grades: Grades, known: Stamp | None) -> None:
    """The table of written answers; `known` gets its stamp."""
    write_explain(results, path, grades)
    if known is not None:
        known |= stamp(path)


def _hand_points(results: list[Result], path: Path) -> tuple[Grades, list[str], str]:
    """Put the grades of explain.csv into the results.

    Returns the grades, remarks, and why the file must stay as it is ("" if it is written anew): a
    row that was skipped is in no other place.
    """
    try:
        grades = read_explain(path)
    except ExplainError as error:
        remark = f"{error}\nits points are in no book; mend it, then --merge"
        return Grades(), [remark], f"{path.name} can't be read"
    remarks = [f"{text}; this row counts for nobody" for text in grades.bad]
    remarks += merge_explain(results, grades)
    if open_elsewhere(path):
        remarks.append("explain.csv is open in a spreadsheet: close it there without saving")
    skipped = f"{path.name} keeps {len(grades.bad)} bad rows: mend them" if grades.bad else ""
    return grades, remarks, skipped


# --- the class -----------------------------------------------------------------------------------


@dataclass
class Class:
    """Who was to be graded in what: a run that was killed, or a result that is broken, shows.

    Attributes:
        students: Name → folder and what the LMS knows them by.
        remarks: By student's name.
        command: The line by which they were graded.
    """

    students: dict[str, dict[str, Any]] = field(default_factory=dict)
    labs: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    command: str = ""


def save_class(jobs: list[Job], remarks: dict[str, list[str]], command: str, out: Path) -> None:
    """Store who is to be graded. Raises LabError if nothing can be written."""
    students = {
        job.student.name: {"folder": job.folder.parent.name, "lms": job.student.lms} for job in jobs
    }
    labs = list(dict.fromkeys(job.reference.lab for job in jobs))
    about = asdict(Class(students, labs, remarks, command))
    try:
        write_text(out / "class.json", json.dumps(about, ensure_ascii=False, indent=1))
    except OSError as error:
        raise LabError(f"{out}: can't be written: {error}") from error


def load_class(out: Path) -> Class:
    """Return what `save_class` wrote."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Class(**json.loads((out / "class.json").read_text(encoding="utf-8")))
    return Class()


def stored_results(out: Path, refs: list[Reference]) -> list[Result]:
    """Return all results in the folder; in place of one that is missing or broken, what it lacks.

    A student whose folder was another one before has one result for a lab all the same.
    """
    about = load_class(out)
    known = {ref.lab: ref for ref in refs}
    names = {one["folder"]: name for name, one in about.students.items()}
    expected = {(one["folder"], lab) for one in about.students.values() for lab in about.labs}
    there = {
        path.parts[-2:]
        for path in out.glob("students/*/*")
        if path.name in known or (path / "result.json").exists()
    }
    results: dict[tuple[str, str], Result] = {}
    for folder, lab in sorted(expected | there):
        path = out / "students" / folder / lab / "result.json"
        if stored := load(path):
            results.setdefault((stored.student, lab), stored)
            continue
        name = names.get(folder, folder)
        student = Student(name, about.students.get(name, {}).get("lms", {}))
        broken = "its result.json can't be read: --resume grades it again"
        why = broken if path.exists() else NOT_YET
        results.setdefault((name, lab), ungraded(student, lab, known.get(lab), why))
    return list(results.values())


def folders(results: list[Result], out: Path) -> dict[str, Path]:
    """Return where each student's page goes."""
    about = load_class(out).students
    places: dict[str, Path] = {}
    for path in sorted(out.glob("students/*/*/result.json")):
        if stored := load(path):
            places.setdefault(stored.student, path.parents[1])
    for result in results:
        name = about.get(result.student, {}).get("folder", result.student)
        places.setdefault(result.student, out / "students" / name)
    return places


# --- by what the pages were made -----------------------------------------------------------------


def provenance_now(command: str, graded_by: str = "") -> dict[str, str]:
    """Return local time, version, the command that writes the pages, and the one that graded.

    Without the version nobody can tell later by which checks points were given.
    """
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "version": _version(),
        "command": command,
        "graded_by": "" if graded_by == command else graded_by,
    }


def _version() -> str:
    """The package's version, and the commit where this is a clone: "0.1.0 (v0.1.0-3-gabc1234)"."""
    version = "?"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("ddl-labs")
    commit = described(Path(utils.__file__).parents[1])
    return f"{version} ({commit})" if commit else version


def described(folder: Path) -> str:
    """Return `git describe` of a clone; "" if it is none, or git is not there."""
    if not (folder / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--tags", "--dirty"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return done.stdout.strip()
    return ""
