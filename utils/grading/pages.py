"""Pages to read: feedback for each student, a summary for the instructor, written answers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment

from utils.course.files import write_text
from utils.course.numbers import number
from utils.course.page_templates import environment

from .book import by_student, tasks
from .explain import written
from .made import Made
from .reference import Reference
from .results import Result, TaskResult, total
from .similar import copies, groups
from .suspicion import LOOK
from .verdicts import ADVICE

TEMPLATES = Path(__file__).with_name("templates")

LABELS = {
    "passed": "passed",
    "wrong": "not yet right",
    "failed": "the check failed",
    "hung": "out of time",
    "lost": "ended the run",
    "unchanged": "not answered",
    "missing": "no such cell",
    "not reached": "not reached",
    "not graded": "not graded",
    "read": "read by a person",
    "waits": "awaits a person",
}
#: A mark for each kind: colours alone tell nothing to whoever does not see them.
MARKS = {
    "good": "✓",
    "bad": "✗",
    "stuck": "!",
    "none": "–",
    "hand": "✎",
    "waits": "…",
    "ungraded": "?",
}
#: The colours: passed, wrong, hung and its like, no answer, read or to be read by a person.
KINDS = {
    "passed": "good",
    "wrong": "bad",
    "failed": "bad",
    "hung": "stuck",
    "lost": "stuck",
    "not reached": "stuck",
    "not graded": "ungraded",
    "unchanged": "none",
    "missing": "none",
    "read": "hand",
    "waits": "waits",
}
KIND_LABELS = {
    "good": "passed",
    "bad": "wrong",
    "stuck": "hung, or ended the run",
    "none": "no answer",
    "hand": "read by a person",
    "waits": "awaits a person",
    "ungraded": "not graded",
}
NO_ANSWER = {
    "unchanged": "The cell is still as it was handed out.",
    "missing": "No cell with this task's mark was found. Where the file could be read at all, "
    "keep the cells of the lab: copying or deleting them loses the mark.",
    "not reached": "What happened in another task kept this one from being run.",
}
MOST_COMMON, BINS = 3, 10
#: Names beside a problem; lines of a check at the top of a feedback.
MOST_NAMES, MOST_LINES = 12, 8


def state(task: TaskResult) -> str:
    """The status; a written answer was read when it has points, and waits before."""
    if task.status != "by hand":
        return task.status
    return "waits" if task.points is None else "read"


def label(task: TaskResult) -> str:
    """The status in words."""
    return LABELS[state(task)]


def kind(task: TaskResult) -> str:
    """What colour and mark it has."""
    return KINDS[state(task)]


def _environment() -> Environment:
    made = environment(TEMPLATES)
    made.globals |= {"label": label, "kind": kind, "NO_ANSWER": NO_ANSWER}
    made.globals |= {"MARKS": MARKS, "KIND_LABELS": KIND_LABELS, "MOST_NAMES": MOST_NAMES}
    return made


def _render(template: str, **values: object) -> str:
    return _environment().get_template(template).render(**values)


# --- feedback ------------------------------------------------------------------------------------


def feedback(student: str, results: list[Result]) -> str:
    """What one student gets back."""
    return _render(
        "feedback.html.j2",
        student=student,
        results=[(one, _not_said_below(one)) for one in results],
        points=total(results),
        most=sum(one.most for one in results),
        open=[task for one in results for task in one.open],
        next=next_step(results),
    )


@dataclass
class Step:
    """What a student best does next: the task, and the beginning of what its check said."""

    lab: str
    task: TaskResult
    said: str


def next_step(results: list[Result]) -> Step | None:
    """The first task that has no points yet and could; None where none is left to the student."""
    for result in results:
        if result.error or not result.file:
            continue
        for task in result.tasks:
            if task.status not in {"passed", "by hand", "not graded"}:
                return Step(result.lab, task, _beginning(task))
    return None


def _beginning(task: TaskResult) -> str:
    """Return the first lines of what was said of an answer, and its advice.

    The line that names the task is left out.
    """
    texts = [task.said, *(one.text for one in task.shown)]
    lines = next((text.strip().splitlines() for text in texts if text.strip()), [])
    if lines and lines[0].startswith("✗ Task") and len(lines) > 1:
        lines = lines[1:]
    more = ["…"] if len(lines) > MOST_LINES else []
    advice = [k for k, line in enumerate(lines) if ADVICE in line and k >= MOST_LINES]
    return "\n".join([*lines[:MOST_LINES], *more, *(lines[advice[0] :] if advice else [])])


def _not_said_below(result: Result) -> list[str]:
    """Remarks that don't repeat what a task's own note says."""
    noted = tuple(f"Task {task.task}: " for task in result.tasks if task.note)
    return [text for text in result.remarks if not (noted and text.startswith(noted))]


# --- written answers -----------------------------------------------------------------------------


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
    return _render("explain.html.j2", sections=sections)


# --- summary -------------------------------------------------------------------------------------


@dataclass
class TaskSummary:
    """How a class did in one task."""

    lab: str
    task: str
    title: str
    most: float
    mean: float | None
    counts: dict[str, int]
    failures: list[tuple[str, int, list[str]]]


def summary(
    results: list[Result],
    references: list[Reference],
    remarks: dict[str, list[str]],
    links: dict[str, str],
    made: Made | None = None,
) -> str:
    """What the instructor wants to know of the class."""
    students = by_student(results)
    every = {name: total(own) for name, own in students.items()}
    totals = [points for points in every.values() if points is not None]
    most = max((sum(one.most for one in own) for own in students.values()), default=0)
    columns = tasks(results)
    summaries = [task_summary(results, lab, task) for lab, task in columns]
    said = {name: list(dict.fromkeys(texts)) for name, texts in remarks.items() if texts}
    looks = {}
    for name, own in students.items():
        own_remarks = lines((one.lab, text) for one in own for text in one.remarks)
        said.setdefault(name, []).extend(own_remarks)
        found = ((one.lab, text.replace(LOOK, "", 1)) for one in own for text in one.look)
        looks[name] = lines(found)
    return _render(
        "summary.html.j2",
        made=made,
        columns=[(lab, [t for one, t in columns if one == lab]) for lab in dict(columns)],
        students=[(name, every[name], own, tasks_of(own)) for name, own in students.items()],
        links={name: quote(link) for name, link in links.items()},
        failed=[one for own in students.values() for one in own if one.error],
        most=most,
        mean=sum(totals) / len(totals) if totals else None,
        bins=histogram(totals, most),
        tasks=summaries,
        problems=sorted(
            ((task, problem) for task in summaries for problem in task.failures),
            key=lambda found: -found[1][1],
        ),
        looks={name: texts for name, texts in looks.items() if texts},
        groups=groups(results, references),
        copies=copies(results, references),
        remarks={name: texts for name, texts in sorted(said.items()) if texts},
        open=sum(len(one.open) for one in results),
        seconds=sum(one.seconds for one in results),
        unprotected=[(ref.lab, task) for ref in references for task in ref.unprotected],
    )


def lines(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """Remarks of (lab, text), each told once: with all tasks that it is of, else with the lab."""
    said: dict[tuple[str, str], list[str]] = defaultdict(list)
    for lab, text in remarks:
        if found := re.fullmatch(r"Task (\S+): (.*)", text, re.DOTALL):
            said["", found[2]].append(found[1])
        else:
            said[lab, text] = [lab]
    return [
        f"{'' if lab else 'Tasks ' if len(of) > 1 else 'Task '}{', '.join(of)}: {text}"
        for (lab, text), of in said.items()
    ]


def tasks_of(own: list[Result]) -> dict[tuple[str, str], TaskResult]:
    """A student's tasks by (lab, task)."""
    return {(one.lab, task.task): task for one in own for task in one.tasks}


def histogram(totals: list[float], most: float) -> list[tuple[str, int, float]]:
    """Label, number of students and height (0 to 1) of each bar."""
    counts = [0] * BINS
    for points in totals:
        counts[min(BINS - 1, int(BINS * points / most)) if most else 0] += 1
    highest = max(counts) or 1
    width = most / BINS
    return [
        (f"{number(i * width)}–{number((i + 1) * width)}", count, count / highest)
        for i, count in enumerate(counts)
    ]


def task_summary(results: list[Result], lab: str, number_: str) -> TaskSummary:
    """Counts and the commonest problems of one task, of those who could be graded."""
    every = [(one, task) for one in results if one.lab == lab for task in one.tasks]
    every = [(one, task) for one, task in every if task.task == number_]
    own = [(one.student, task) for one, task in every if not one.error]
    points = [task.points for _, task in own]
    counts = Counter(kind(task) for _, task in own)
    first = every[0][1]
    known = [one for one in points if one is not None]
    mean = sum(known) / len(known) if known and len(known) == len(points) else None
    return TaskSummary(lab, number_, first.title, first.most, mean, counts, common(own))


def common(own: list[tuple[str, TaskResult]]) -> list[tuple[str, int, list[str]]]:
    """The problems that most students have: text, how many, who."""
    who: dict[str, list[str]] = defaultdict(list)
    example: dict[str, str] = {}
    for student, task in own:
        for text in dict.fromkeys(problems(task)):
            shape = blurred(text)
            example.setdefault(shape, text)
            if student not in who[shape]:
                who[shape].append(student)
    ranked = sorted(who.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(example[s], len(names), names) for s, names in ranked[:MOST_COMMON]]


def problems(task: TaskResult) -> list[str]:
    """Return what was wrong with an answer, each problem once.

    If the run ended at this task, its note says what the check repeats.
    """
    if task.status in {"passed", "by hand", "missing", "unchanged"}:
        return []
    if task.note:
        return [task.note]
    if task.problems:
        return list(dict.fromkeys(problem["text"] for problem in task.problems))
    lines = [line[4:] for line in task.said.splitlines() if line.startswith("  - ")]
    lines = [re.sub(r"^ranks? \d[\d–, and]*: ", "", line) for line in lines]
    if not lines:
        lines = [one.text.splitlines()[0] for one in task.shown if one.text]
    return lines or task.said.splitlines()[:1] or [NO_ANSWER.get(task.status, task.status)]


def blurred(text: str) -> str:
    """The same for problems that differ in numbers only."""
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return re.sub(r"#(, #)+", "#", text)


def write_pages(
    results: list[Result],
    references: list[Reference],
    out: Path,
    folders: dict[str, Path],
    remarks: dict[str, list[str]],
    made: Made | None = None,
) -> dict[str, Path]:
    """Write all pages; returns where each student's feedback is."""
    written_to = {}
    for student, own in by_student(results).items():
        written_to[student] = folders[student] / "feedback.html"
        write_text(written_to[student], feedback(student, own))
    links = {name: path.relative_to(out).as_posix() for name, path in written_to.items()}
    write_text(out / "summary.html", summary(results, references, remarks, links, made))
    if any(task.by_hand for reference in references for task in reference.tasks.values()):
        write_text(out / "explain.html", explain(results, references))
    return written_to
