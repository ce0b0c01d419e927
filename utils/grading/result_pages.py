"""The pages of a results folder: feedback for each student, a summary, written answers."""

from __future__ import annotations

from pathlib import Path

from utils.course.files import write_text

from .feedback import feedback
from .gradebook import by_student
from .page_rendering import render
from .provenance import Provenance
from .reference import Reference
from .results import Result
from .summary import summary
from .written_answers import written


def write_pages(
    results: list[Result],
    references: list[Reference],
    out: Path,
    folders: dict[str, Path],
    remarks: dict[str, list[str]],
    provenance: Provenance | None = None,
) -> dict[str, Path]:
    """Write all pages; returns where each student's feedback is."""
    written_to = {}
    for student, own in by_student(results).items():
        written_to[student] = folders[student] / "feedback.html"
        write_text(written_to[student], feedback(student, own))
    links = {name: path.relative_to(out).as_posix() for name, path in written_to.items()}
    write_text(out / "summary.html", summary(results, references, remarks, links, provenance))
    if any(task.by_hand for reference in references for task in reference.tasks.values()):
        write_text(out / "explain.html", explain(results, references))
    return written_to


def explain(results: list[Result], references: list[Reference]) -> str:
    """Every written answer beside the model's, task by task."""
    sections = []
    for reference in references:
        own = [one for one in results if one.lab == reference.lab]
        for task in reference.tasks.values():
            if not task.by_hand:
                continue
            answers = [
                (one.student, found)
                for one in sorted(own, key=lambda one: one.student.casefold())
                for found in written(one)
                if found.task == task.number
            ]
            cell = reference.answer_cells[task.answers[0]]
            cells = reference.nb.cells
            question = cells[cells.index(cell) - 1].source
            rubric = reference.rubrics.get(task.answers[0], "")
            sections.append((reference.lab, task, question, cell.source, rubric, answers))
    return render("explain.html.j2", sections=sections)
