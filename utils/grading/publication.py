"""Books and pages of a class: all that instructor and students read of a grading."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import github, written_answers
from .gradebook import FORMATS, moodle_feedback, write_books
from .options import GradingOptions
from .provenance import provenance_now
from .reference import Reference
from .result_pages import write_pages
from .results import Result
from .roster import folders, load_class
from .watch import Stamp, stamp


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
    path, remarks = out / "explain.csv", {name: list(said) for name, said in remarks.items()}
    grades, said, unmended = hand_points(results, path)
    remarks.setdefault("", []).extend(said)
    for text in said:
        print(text, file=sys.stderr)
    refs = [ref for ref in refs if any(one.lab == ref.lab for one in results)]
    formats = [
        one for one in FORMATS if one in options.formats or (out / f"gradebook-{one}.csv").exists()
    ]
    provenance = provenance_now(options.command, load_class(out).command)
    pages: dict[str, Path] = {}
    steps: dict[str, Callable[[], object]] = {}
    if not unmended and (path.exists() or any(written_answers.written(one) for one in results)):
        steps["explain.csv"] = partial(write_explain, results, path, grades, known)
    steps["gradebook"] = lambda: write_books(results, out, formats, remarks)
    steps["pages"] = lambda: pages.update(
        write_pages(results, refs, out, folders(results, out), remarks, provenance)
    )
    if "moodle" in formats:
        steps["feedback"] = lambda: moodle_feedback(results, pages, out / "feedback-moodle.zip")
    if "github" in options.formats:
        steps["summary on GitHub"] = lambda: github.append(results)
    unwritten = [unmended] if unmended else []
    for name, step in steps.items():
        try:
            step()
        except (OSError, UnicodeError) as error:
            unwritten.append(f"{name}: {error}")
    return unwritten


def write_explain(
    results: list[Result], path: Path, grades: written_answers.Grades, known: Stamp | None
) -> None:
    """The table of written answers; `known` gets its stamp."""
    written_answers.write(results, path, grades)
    if known is not None:
        known |= stamp(path)


def hand_points(results: list[Result], path: Path) -> tuple[written_answers.Grades, list[str], str]:
    """Put the grades of explain.csv into the results.

    Returns the grades, remarks, and why the file must stay as it is ("" if it is written anew): a
    row that was skipped is in no other place.
    """
    try:
        grades = written_answers.read(path)
    except written_answers.ExplainError as error:
        said = [f"{error}\nits points are in no book; mend it, then --merge"]
        return written_answers.Grades(), said, f"{path.name} can't be read"
    said = [f"{text}; this row counts for nobody" for text in grades.bad]
    said += written_answers.merge(results, grades)
    if written_answers.open_elsewhere(path):
        said.append("explain.csv is open in a spreadsheet: close it there without saving")
    skipped = f"{path.name} keeps {len(grades.bad)} bad rows: mend them" if grades.bad else ""
    return grades, said, skipped
