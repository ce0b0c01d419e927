"""Who was to be graded in what, and the results that a folder has of them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from utils.course.files import write_text

from .reference import LabError, Reference
from .results import Result, load
from .submissions import Student
from .worklist import NOT_YET, Job, ungraded


@dataclass
class Class:
    """Who was to be graded in what: a run that was killed, or a result that is broken, shows.

    students: name → folder and what the LMS knows them by. remarks: by student's name.
    command: the line by which they were graded.
    """

    students: dict[str, dict[str, Any]] = field(default_factory=dict)
    labs: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    command: str = ""

    @classmethod
    def of(cls, jobs: list[Job], remarks: dict[str, list[str]], command: str = "") -> Class:
        """The class of these jobs."""
        students = {
            job.student.name: {"folder": job.folder.parent.name, "lms": job.student.lms}
            for job in jobs
        }
        return cls(
            students, list(dict.fromkeys(job.reference.lab for job in jobs)), remarks, command
        )


def save_class(about: Class, out: Path) -> None:
    """Store it in the results folder. Raises LabError where nothing can be written."""
    try:
        write_text(out / "class.json", json.dumps(asdict(about), ensure_ascii=False, indent=1))
    except OSError as error:
        raise LabError(f"{out}: can't be written: {error}") from error


def load_class(out: Path) -> Class:
    """What `save_class` wrote."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Class(**json.loads((out / "class.json").read_text(encoding="utf-8")))
    return Class()


def stored_results(out: Path, refs: list[Reference]) -> list[Result]:
    """All results in the folder; in place of one that is missing or broken, what it lacks.

    A student whose folder was another one before has one result for a lab all the same.
    """
    about, known = load_class(out), {ref.lab: ref for ref in refs}
    names = {one["folder"]: name for name, one in about.students.items()}
    expected = {(one["folder"], lab) for one in about.students.values() for lab in about.labs}
    there = {
        path.parts[-2:]
        for path in out.glob("students/*/*")
        if path.name in known or (path / "result.json").exists()
    }
    found: dict[tuple[str, str], Result] = {}
    for folder, lab in sorted(expected | there):
        path = out / "students" / folder / lab / "result.json"
        if stored := load(path):
            found.setdefault((stored.student, lab), stored)
            continue
        name = names.get(folder, folder)
        student = Student(name, about.students.get(name, {}).get("lms", {}))
        why = "its result.json can't be read: --resume grades it again"
        why = why if path.exists() else NOT_YET
        found.setdefault((name, lab), ungraded(student, lab, known.get(lab), why))
    return list(found.values())


def folders(results: list[Result], out: Path) -> dict[str, Path]:
    """Where each student's page goes."""
    about = load_class(out).students
    found: dict[str, Path] = {}
    for path in sorted(out.glob("students/*/*/result.json")):
        if stored := load(path):
            found.setdefault(stored.student, path.parents[1])
    for result in results:
        name = about.get(result.student, {}).get("folder", result.student)
        found.setdefault(result.student, out / "students" / name)
    return found
