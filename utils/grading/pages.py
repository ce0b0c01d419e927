"""The pages for people: feedback for each student, the class's summary, and written answers.

``--format github`` writes a table for GitHub Actions, too.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from nbformat.v4 import new_markdown_cell, new_notebook

from torch_mpi.protocol.diagnosis import ADVICE
from utils.course.files import write_text
from utils.course.notebook import dumps
from utils.course.page_templates import environment, number

from .copies import copies, groups
from .gradebook import write_zip
from .inspection import LOOK
from .reference import Reference, Task
from .results import (
    KIND_LABELS,
    MARKS,
    NO_ANSWER,
    Common,
    Result,
    TaskResult,
    answers_to,
    by_student,
    columns,
    common,
    kind,
    label,
    most_of,
    problems,
    total,
)
from .submissions import NOTEBOOK

TEMPLATES = Path(__file__).with_name("templates")
#: Names next to a problem; the remaining names are folded.
MOST_NAMES = 12
#: Lines of a check's message at the top of the feedback.
MOST_LINES = 8
#: Bars in the picture of points.
BINS = 10
#: The file to which a job of GitHub Actions appends its summary.
GITHUB_VARIABLE = "GITHUB_STEP_SUMMARY"
#: GitHub refuses summaries of more than 1 MiB, and a character has up to 4 bytes.
MOST_OF_GITHUB = 200_000


def write_pages(
    results: list[Result],
    references: list[Reference],
    out: Path,
    folders: dict[str, Path],
    remarks: dict[str, list[str]],
    provenance: dict[str, str] | None = None,
) -> dict[str, Path]:
    """Write all pages; return where each student's feedback is."""
    pages = {}
    for student, student_results in by_student(results).items():
        pages[student] = folders[student] / "feedback.html"
        write_text(pages[student], feedback(student, student_results))
    links = {name: path.relative_to(out).as_posix() for name, path in pages.items()}
    write_text(out / "summary.html", summary(results, references, remarks, links, provenance))
    if any(task.by_hand for reference in references for task in reference.tasks.values()):
        write_text(out / "explain.html", explain(results, references))
    return pages


def _rendered(template: str, **values: object) -> str:
    templates = environment(TEMPLATES)
    templates.globals |= {"label": label, "kind": kind, "NO_ANSWER": NO_ANSWER}
    templates.globals |= {"MARKS": MARKS, "KIND_LABELS": KIND_LABELS, "MOST_NAMES": MOST_NAMES}
    return templates.get_template(template).render(**values)


# --- a student's feedback -------------------------------------------------------------------------


def feedback(student: str, results: list[Result]) -> str:
    """Return a student's feedback page: points, messages of the checks, and what to do next."""
    return _rendered(
        "feedback.html.j2",
        student=student,
        results=[(result, list(_remarks(result))) for result in results],
        points=total(results),
        most=most_of(results),
        open=[task for result in results for task in result.open],
        changed=any(task.by_person for result in results for task in result.tasks),
        next=next_step(results),
    )


def _remarks(result: Result) -> Iterator[str]:
    """Yield the remarks that don't repeat a task's note."""
    noted = tuple(f"Task {task.task}: " for task in result.tasks if task.note)
    yield from (text for text in result.remarks if not text.startswith(noted))


@dataclass
class Step:
    """The next task for a student, and the beginning of its check's message."""

    lab: str
    task: TaskResult
    said: str


def next_step(results: list[Result]) -> Step | None:
    """Return the first task in which the student can still get points; None if there is none."""
    for result in results:
        if result.error or not result.file:
            continue
        for task in result.tasks:
            if task.status not in {"passed", "by hand", "not graded"} and not task.by_person:
                return Step(result.lab, task, _beginning(task))
    return None


def _beginning(task: TaskResult) -> str:
    """Return the first lines of the message about an answer, and its advice, without the title."""
    texts = [task.said, *(shown.text for shown in task.shown)]
    lines = next((text.strip().splitlines() for text in texts if text.strip()), [])
    if lines and lines[0].startswith("✗ Task") and len(lines) > 1:
        lines = lines[1:]
    if len(lines) <= MOST_LINES:
        return "\n".join(lines)
    rest = lines[MOST_LINES:]
    advice = next((rest[k:] for k, line in enumerate(rest) if ADVICE in line), [])
    return "\n".join([*lines[:MOST_LINES], "…", *advice])


# --- the instructor's summary ---------------------------------------------------------------------


@dataclass
class TaskSummary:
    """The results of a class in one task."""

    lab: str
    task: str
    title: str
    most: float
    mean: float | None
    counts: dict[str, int]
    failures: list[Common]


def summary(
    results: list[Result],
    references: list[Reference],
    remarks: dict[str, list[str]],
    links: dict[str, str],
    provenance: dict[str, str] | None = None,
) -> str:
    """Return the instructor's page about the class."""
    students = by_student(results)
    points = {name: total(own_results) for name, own_results in students.items()}
    known = [value for value in points.values() if value is not None]
    most = max((most_of(own_results) for own_results in students.values()), default=0)
    summaries = [task_summary(results, lab, task) for lab, task in columns(results)]
    labs: dict[str, list[str]] = defaultdict(list)
    for task in summaries:
        labs[task.lab].append(task.task)
    return _rendered(
        "summary.html.j2",
        provenance=provenance,
        columns=list(labs.items()),
        students=students,
        points=points,
        tasks_of={name: _tasks_of(own_results) for name, own_results in students.items()},
        links={name: quote(link) for name, link in links.items()},
        most=most,
        mean=sum(known) / len(known) if known else None,
        bins=histogram(known, most),
        tasks=summaries,
        problems=_commonest(summaries),
        looks=_to_look_at(students),
        groups=groups(results, references),
        copies=copies(results, references),
        own_cells=_own_cells(students),
        remarks=_all_remarks(students, remarks),
        references=references,
    )


def _tasks_of(results: list[Result]) -> dict[tuple[str, str], TaskResult]:
    return {(one.lab, task.task): task for one in results for task in one.tasks}


def _commonest(summaries: list[TaskSummary]) -> list[tuple[TaskSummary, Common]]:
    problems = [(task, problem) for task in summaries for problem in task.failures]
    return sorted(problems, key=lambda pair: -pair[1][1])


def task_summary(results: list[Result], lab: str, task_number: str) -> TaskSummary:
    """Return counts and the commonest problems of one task, without ungraded submissions."""
    pairs = answers_to(results, lab, task_number)
    answers = [(result.student, task) for result, task in pairs if not result.error]
    counts = Counter(kind(task) for _, task in answers)
    points = [task.points for _, task in answers if task.points is not None]
    mean = sum(points) / len(points) if points and len(points) == len(answers) else None
    first = pairs[0][1]
    return TaskSummary(lab, task_number, first.title, first.most, mean, counts, common(answers))


def histogram(totals: list[float], most: float) -> list[tuple[str, int, float]]:
    """Return label, number of students and height (0 to 1) of each bar."""
    counts = [0] * BINS
    for points in totals:
        counts[min(BINS - 1, int(BINS * points / most)) if most else 0] += 1
    highest = max(counts) or 1
    width = most / BINS
    return [
        (f"{number(i * width)}–{number((i + 1) * width)}", count, count / highest)
        for i, count in enumerate(counts)
    ]


def _to_look_at(students: dict[str, list[Result]]) -> dict[str, list[str]]:
    """Return for each student what a person should look at, without students that have nothing."""
    looks = {
        name: _lines((one.lab, text.replace(LOOK, "", 1)) for one in own for text in one.look)
        for name, own in students.items()
    }
    return {name: texts for name, texts in looks.items() if texts}


def _own_cells(students: dict[str, list[Result]]) -> dict[str, list[str]]:
    """Return for each student how many own cells ran in each lab, for labs with such cells."""
    lines = {
        name: [f"{one.lab}: {one.own_cells}" for one in own if one.own_cells]
        for name, own in students.items()
    }
    return {name: texts for name, texts in lines.items() if texts}


def _all_remarks(
    students: dict[str, list[Result]], remarks: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Return for each student the remarks on the class and on each result, if there are any."""
    lines = {name: list(dict.fromkeys(texts)) for name, texts in remarks.items()}
    for name, own in students.items():
        of_results = _lines((one.lab, text) for one in own for text in one.remarks)
        lines.setdefault(name, []).extend(of_results)
    return {name: texts for name, texts in sorted(lines.items()) if texts}


def _lines(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """Return each remark (lab, text) once, with all tasks or labs that it applies to."""
    places: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for lab, text in remarks:
        match = re.fullmatch(r"Task (\S+): (.*)", text, re.DOTALL)
        places[bool(match), match[2] if match else text].append(match[1] if match else lab)
    lines = []
    for (are_tasks, text), names in places.items():
        word = ("Tasks " if len(names) > 1 else "Task ") * are_tasks
        lines.append(f"{word}{', '.join(names)}: {text}")
    return lines


# --- written answers ------------------------------------------------------------------------------


def explain(results: list[Result], references: list[Reference]) -> str:
    """Return the page with every written answer next to the model answer, task by task."""
    sections = [
        (reference.lab, task, *_texts(reference, task), _written(results, reference.lab, task))
        for reference in references
        for task in reference.tasks.values()
        if task.by_hand
    ]
    return _rendered("explain.html.j2", sections=sections)


def _texts(reference: Reference, task: Task) -> tuple[str, str, str]:
    """Return the question of a written answer, the model answer, and the rubric."""
    cells = reference.nb.cells
    cell = reference.answer_cells[task.answers[0]]
    question = cells[cells.index(cell) - 1].source
    return question, cell.source, reference.rubrics.get(task.answers[0], "")


def _written(results: list[Result], lab: str, task: Task) -> list[tuple[str, TaskResult]]:
    """Return the students' written answers to a task, sorted by the students' names."""
    answers = [
        (result.student, answer)
        for result, answer in answers_to(results, lab, task.number)
        if answer.status == "by hand"
    ]
    return sorted(answers, key=lambda pair: pair[0].casefold())


# --- Canvas ---------------------------------------------------------------------------------------


def canvas_feedback(results: list[Result], path: Path) -> None:
    """Write a zip for Canvas' "upload submissions", with the file names of Canvas' download.

    Canvas shows a student each file under the name of the submitted file, which is a notebook.
    """
    files: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.file and NOTEBOOK.search(result.lms.get("file", "")):
            files[result.lms["file"]].append(result)
    write_zip(path, {name: _feedback_notebook(own) for name, own in sorted(files.items())})


def _feedback_notebook(results: list[Result]) -> str:
    """Return a notebook with a student's points, and the problems that the checks have found."""
    texts = [markdown(results)]
    for task in (task for result in results for task in result.tasks):
        if told := problems(task) or ([task.note] if task.note else []):
            lines = [f"- {_plain(text)}" for text in told]
            texts.append("\n".join([f"## Task {_plain(task.task)}", *lines]))
    cells = [new_markdown_cell(text, id=f"feedback-{n}") for n, text in enumerate(texts)]
    return dumps(new_notebook(cells=cells))


# --- GitHub ---------------------------------------------------------------------------------------


def append_for_github(results: list[Result]) -> None:
    """Append a table to the file that GitHub names, or print it outside GitHub Actions."""
    text = markdown(results)[:MOST_OF_GITHUB]
    if not os.environ.get(GITHUB_VARIABLE):
        print(text)
        return
    with Path(os.environ[GITHUB_VARIABLE]).open("a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def markdown(results: list[Result]) -> str:
    """Return for each student the points, a row for each task, and what to do next."""
    parts = []
    for student, student_results in by_student(results).items():
        points = total(student_results)
        most = most_of(student_results)
        text = "not graded" if points is None else f"{number(points)} of {number(most)} points"
        parts.append(f"## {_plain(student)}: {text}\n")
        parts += map(_markdown_of, student_results)
        if step := next_step(student_results):
            beginning = f"\n<pre>{_escaped(step.said)}</pre>\n" if step.said else ""
            parts.append(f"Next: task {_plain(step.task.task)}, {label(step.task)}.\n{beginning}")
    return "\n".join(parts) + "\n"


def _markdown_of(result: Result) -> str:
    if result.error:
        return f"{_plain(result.lab)} could not be graded: {_plain(result.error)}\n"
    remarks = [f"- {_plain(text)}" for text in result.remarks]
    rows = [
        f"| {_plain(task.task)} | {_plain(task.title)} | {number(task.points) or '–'} / "
        f"{number(task.most)} | {MARKS[kind(task)]} {label(task)} |"
        for task in result.tasks
    ]
    head = [f"| {_plain(result.lab)} | | points | |", "|---|---|--:|---|"]
    return "\n".join([*head, *rows, "", *remarks, ""])


def _plain(text: str) -> str:
    """Return the text as one line of Markdown without links, pictures and columns."""
    text = " ".join(text.split())
    return re.sub(r"[^\w\s.,;–-]|_", lambda match: f"&#{ord(match[0])};", text)


def _escaped(text: str) -> str:
    """Return the text escaped for HTML and Markdown; a blank line would end a `<pre>`."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(" " * (len(line) - len(line.lstrip())) + _plain(line) for line in lines)
