"""The result of grading one submission, as data that --resume reads again.

The functions below describe the state of an answer in words, and read from a run's records whether
a task passed, what its check said, and which errors the feedback shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch_mpi.protocol.diagnosis import ADVICE
from utils.checks.verdict import Verdict
from utils.course.files import write_text
from utils.course.notebook import lab

if TYPE_CHECKING:  # the plugin imports this module in each run, and needs no reference
    from .reference import Reference
    from .sandbox import Limits

Status = Literal[
    "passed",  # the check said so
    "wrong",  # the check ran and found problems
    "failed",  # the check itself ended with an error
    "hung",  # out of time
    "lost",  # the ranks or the kernel were gone
    "unchanged",  # the stub is still there
    "missing",  # there is no answer
    "not reached",  # no run came this far
    "not graded",  # the machine failed, not the answer: neither points nor a zero
    "by hand",  # a written answer
]

#: For each state of an answer its kind, which decides the color, and its label.
STATES = {
    "passed": ("good", "passed"),
    "wrong": ("bad", "not yet right"),
    "failed": ("bad", "the check failed"),
    "hung": ("stuck", "out of time"),
    "lost": ("stuck", "ended the run"),
    "not reached": ("stuck", "not reached"),
    "not graded": ("ungraded", "not graded"),
    "unchanged": ("none", "not answered"),
    "missing": ("none", "cell missing"),
    "read": ("hand", "graded by hand"),
    "waits": ("waits", "awaits grading"),
}
#: For each kind a mark, because not every reader can distinguish colors, and its label.
KINDS = {
    "good": ("✓", "passed"),
    "bad": ("✗", "wrong"),
    "stuck": ("!", "hung, or ended the run"),
    "none": ("–", "no answer"),
    "hand": ("✎", "graded by hand"),
    "waits": ("…", "awaits grading"),
    "ungraded": ("?", "not graded"),
}
MARKS = {key: mark for key, (mark, _) in KINDS.items()}
KIND_LABELS = {key: words for key, (_, words) in KINDS.items()}
NO_ANSWER = {
    "unchanged": "The cell still holds only the stub.",
    "missing": "The notebook has no cell with this task's mark. Keep the cells of the lab: a cell "
    "that you copy or delete loses its mark.",
    "not reached": "This task was not run, because another task ended the run before it.",
}
#: Statuses of answers that are right, need a person, or don't exist.
NOTHING_WRONG = {"passed", "by hand", "missing", "unchanged"}
#: How many of the commonest problems of a task are shown.
MOST_COMMON = 3

#: A problem of several students: its text, their number, and their names.
Common = tuple[str, int, list[str]]
#: Increase this number if the same submission may now be graded differently.
FORMAT = 4
#: How many errors of a task are shown.
MOST_SHOWN = 3
#: Errors of the kernel that explain what went wrong on the ranks.
OF_RANKS = {"CellFailed", "RanksLostError"}
#: A check interrupts ranks that do not answer.
STILL_RUNNING = "did not finish and was interrupted "

#: The plugin's record of a cell, in the types of JSON: `cell` (its id), `outcome` (pytest's word),
#: `seconds`, `end` (why the run ended there, or None), `outputs`, `verdicts` (of a check, as data),
#: and `message` (what nbval says about the cell).
Record = dict[str, Any]


class End(StrEnum):
    """Why a run ended before its last cell, if the reason says something about the answers."""

    CELL_TIME = "out of time"
    TOTAL_TIME = "out of time for the notebook"
    MEMORY = "too much memory"
    OUTPUT = "too much output"
    MACHINE_MEMORY = "out of memory"
    KERNEL = "the kernel died"
    RANKS = "the ranks are gone"
    STOPPED = "interrupted"


@dataclass
class Shown:
    """Something for the feedback: a title, a text, and perhaps a picture (PNG, base64)."""

    title: str
    text: str
    png: str = ""


@dataclass
class TaskResult:
    """One task of one student.

    Attributes:
        points: None if grading failed, or until a written answer has been graded by hand.
        by_person: Whether a person has entered the points of an answer that its check has graded.
        problems: The problems found by its check, data of :class:`utils.checks.verdict.Problem`.
    """

    task: str
    title: str
    most: float
    points: float | None
    status: Status
    said: str = ""
    shown: list[Shown] = field(default_factory=list)
    code: str = ""
    note: str = ""
    problems: list[dict[str, Any]] = field(default_factory=list)
    by_person: bool = False


@dataclass
class Result:
    """The result of one submission.

    Attributes:
        error: Why it could not be graded; then its points don't count.
        look: What a person should look at, see `inspection`; for the instructor only.
        own: The code of the student's own cells, which the ranks run, too.
        own_cells: How many own cells there are.
        days_late: None if there is no deadline, or if nobody knows the time of the submission.
        penalty: The points that lateness costs, see `deadlines`; no stored result has one.
    """

    student: str
    lab: str
    key: str
    file: str = ""
    lms: dict[str, str] = field(default_factory=dict)
    tasks: list[TaskResult] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    look: list[str] = field(default_factory=list)
    own: str = ""
    own_cells: int = 0
    error: str = ""
    runs: int = 0
    seconds: float = 0.0
    days_late: float | None = None
    penalty: float = 0.0

    @property
    def points(self) -> float:
        """Return the sum of the points so far, less the penalty."""
        return sum(task.points or 0 for task in self.tasks) - self.penalty

    @property
    def most(self) -> float:
        """Return the possible points."""
        return sum(task.most for task in self.tasks)

    @property
    def written(self) -> list[TaskResult]:
        """Return the tasks that a person grades."""
        return [task for task in self.tasks if task.status == "by hand"]

    @property
    def open(self) -> list[str]:
        """Return the tasks that wait to be graded by hand."""
        return [task.task for task in self.written if task.points is None]

    def task(self, number: str) -> TaskResult:
        """Return the result of one task."""
        return next(task for task in self.tasks if task.task == number)


def total(results: list[Result]) -> float | None:
    """Return the points in all results; None if one of them could not be graded."""
    return None if any(one.error for one in results) else sum(one.points for one in results)


def most_of(results: list[Result]) -> float:
    """Return the possible points in all results."""
    return sum(one.most for one in results)


def by_student(results: list[Result]) -> dict[str, list[Result]]:
    """Return the results of each student, sorted by student and lab."""
    students: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda one: (one.student.casefold(), one.student, one.lab)):
        students.setdefault(result.student, []).append(result)
    return students


def columns(results: list[Result]) -> list[tuple[str, str]]:
    """Return (lab, task) of every task, in the order of the labs."""
    ordered = sorted(results, key=lambda one: one.lab)
    return list(dict.fromkeys((one.lab, task.task) for one in ordered for task in one.tasks))


def answers_to(results: list[Result], lab: str, number: str) -> list[tuple[Result, TaskResult]]:
    """Return all answers to a task; a result from an older version of the lab may not have it."""
    of_lab = [result for result in results if result.lab == lab]
    return [(result, task) for result in of_lab for task in result.tasks if task.task == number]


def file_key(path: Path, most: int) -> str:
    """Return a hash of a submission; bytes beyond the limit are never read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.sha256(file.read(most + 1)).hexdigest()
    return "unreadable"


def save(result: Result, path: Path) -> None:
    """Write a result in one step, so that an interruption never leaves half a file."""
    write_text(path, json.dumps(dataclasses.asdict(result), ensure_ascii=False, indent=1))


def load(path: Path) -> Result | None:
    """Return the result in a file; None if there is no file or it can't be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tasks = [
            TaskResult(**{**task, "shown": [Shown(**one) for one in task["shown"]]})
            for task in data.pop("tasks")
        ]
        return Result(**data, tasks=tasks)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


# --- the state of an answer in words --------------------------------------------------------------


def _state(task: TaskResult) -> str:
    """Return the status; "read" if a person has given the points, and "waits" if one must."""
    if task.status == "by hand" and task.points is None:
        return "waits"
    return "read" if task.status == "by hand" or task.by_person else task.status


def label(task: TaskResult) -> str:
    """Return the state of an answer in words."""
    return STATES[_state(task)][1]


def kind(task: TaskResult) -> str:
    """Return the kind of an answer, which decides its color and mark."""
    return STATES[_state(task)][0]


def problems(task: TaskResult) -> list[str]:
    """Return the problems of an answer, each of them once.

    If the run ended at this task, its note already says what the check would repeat.
    """
    if task.status in NOTHING_WRONG:
        return []
    if task.note:
        return [task.note]
    if task.problems:
        return list(dict.fromkeys(problem["text"] for problem in task.problems))
    first_lines = [shown.text.splitlines()[0] for shown in task.shown if shown.text]
    said = task.said.splitlines()
    no_answer = NO_ANSWER.get(task.status, task.status)
    return _listed(said) or first_lines or said[:1] or [no_answer]


def _listed(said: list[str]) -> list[str]:
    """Return the problems that a check has listed, without their ranks."""
    lines = [line[4:] for line in said if line.startswith("  - ")]
    return [re.sub(r"^ranks? \d[\d–, and]*: ", "", line) for line in lines]


def common(answers: list[tuple[str, TaskResult]]) -> list[Common]:
    """Return the problems that most students have.

    Args:
        answers: The answers to one task, with the students' names.
    """
    students: dict[str, list[str]] = defaultdict(list)
    example: dict[str, str] = {}
    for student, task in answers:
        for text in problems(task):
            shape = blurred(text)
            example.setdefault(shape, text)
            if student not in students[shape]:
                students[shape].append(student)
    ranked = sorted(students.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(example[shape], len(names), names) for shape, names in ranked[:MOST_COMMON]]


def blurred(text: str) -> str:
    """Return the text with # for numbers, so that problems with other numbers count as equal."""
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return re.sub(r"#(, #)+", "#", text)


# --- what records say about a task ----------------------------------------------------------------


def explicit_pass(record: Record, reference: Reference, limits: Limits) -> bool:
    """Return whether nbval passed a check in time, and its verdict equals the reference's."""
    return (
        record["outcome"] == "passed"
        and record["end"] is None
        and record["seconds"] < limits.cell
        and record["verdicts"] == reference.expected[record["cell"]]
    )


def failure(checks: list[Record]) -> Status:
    """Return why a task failed: "hung", "wrong" (its checks showed verdicts), or "failed"."""
    if any(problem["kind"] == "interrupted" for problem in problems_in(checks)):
        return "hung"
    return "wrong" if all(record["verdicts"] for record in checks) else "failed"


def problems_in(checks: list[Record]) -> list[dict[str, Any]]:
    """Return all problems in the verdicts of some checks, as data."""
    verdicts = [verdict for record in checks for verdict in record["verdicts"]]
    return [problem for verdict in verdicts for problem in verdict["problems"]]


def shown(records: list[Record], reference: Reference) -> list[Shown]:
    """Return errors of a task's cells for the feedback, without the source of a check."""
    errors = []
    hidden = reference.deliberate.union(*(task.checks for task in reference.tasks.values()))
    for record in records:
        if record["cell"] in hidden:
            continue
        title = name_of(record["cell"], reference)
        if error := _error(record, title):
            errors.append(error)
            if title == "the answer":
                break  # later cells need the answer
    return (errors or _pictures(records, reference))[:MOST_SHOWN]


def _pictures(records: list[Record], reference: Reference) -> list[Shown]:
    checks = [record for record in records if record["cell"] in reference.expected]
    outputs = [output for record in checks for output in record["outputs"]]
    return [
        Shown("The check", shortened(output["text"].strip()) or output["type"], output["png"])
        for output in outputs
        if output.get("png")
    ]


def _errors(record: Record) -> list[dict[str, str]]:
    return [output for output in record["outputs"] if output["type"] == "error"]


def _error(record: Record, title: str) -> Shown | None:
    """Return a cell's first error, with its picture; None if there is none."""
    errors = _errors(record)
    if not errors:
        return None
    text = errors[0]["evalue"]
    if errors[0]["ename"] not in OF_RANKS:
        text = f"{errors[0]['ename']}: {text}"
    png = next((output["png"] for output in record["outputs"] if output.get("png")), "")
    return Shown(title[0].upper() + title[1:], tidied(text), png)


def tidied(text: str) -> str:
    """Return an error without library frames, the line of dashes above them, and cell numbers."""
    blocks = re.sub(r"^-{20,}\n", "", _without_cell_numbers(text).strip()).split("\n\n")
    kept = [block for block in blocks if not block.lstrip().startswith("File /")]
    return "\n\n".join(kept).strip()


def _without_cell_numbers(text: str) -> str:
    """Return a text without the run's cell numbers, which a student has never seen."""
    colors = r"(?:\x1b\[[\d;]*m)*"
    return re.sub(rf"(?:Cell {colors}|\b)In\s?\[\d+\]{colors}", "the cell", text)


def shortened(text: str, most: int = 2000) -> str:
    """Return the beginning of a text, and all of its advice."""
    if len(text) <= most:
        return text
    at = text.find(ADVICE)
    if at < 0:
        return f"{text[:most]}\n…"
    return f"{text[:most]}\n…\n{text[at:]}" if at > most else text


def words(record: Record) -> str:
    """Return what a check said, without a traceback, because it would show the check's source."""
    text = _said(record)
    errors = _errors(record)
    if text or not errors:
        return re.sub(r"KeyboardInterrupt: *", STILL_RUNNING, _without_cell_numbers(text))
    first = (errors[0]["evalue"].strip().splitlines() or [""])[0]
    return shortened(f"The check ended with {errors[0]['ename']}: {first}", 500)


def _said(record: Record) -> str:
    """Return a check's verdicts as text, or what it has printed."""
    if record["verdicts"]:
        return "\n".join(str(Verdict.from_data(data)) for data in record["verdicts"])
    outputs = [output for output in record["outputs"] if output.get("name") == "stdout"]
    return "".join(output["text"] for output in outputs).strip()


def name_of(cell_id: str, reference: Reference) -> str:
    """Return a cell's role in its task: "the check", "the answer" or "the cell that runs it"."""
    cell = next(one for one in reference.nb.cells if one.id == cell_id)
    if lab(cell).get("check"):
        return "the check"
    return "the answer" if lab(cell) else "the cell that runs it"
