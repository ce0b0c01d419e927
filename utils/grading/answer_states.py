"""What became of an answer: its words, its mark and its color, and what was wrong with it."""

from __future__ import annotations

import re
from collections import defaultdict

from .results import TaskResult

#: Of each state of an answer the kind, which is its color, and the words.
STATES = {
    "passed": ("good", "passed"),
    "wrong": ("bad", "not yet right"),
    "failed": ("bad", "the check failed"),
    "hung": ("stuck", "out of time"),
    "lost": ("stuck", "ended the run"),
    "not reached": ("stuck", "not reached"),
    "not graded": ("ungraded", "not graded"),
    "unchanged": ("none", "not answered"),
    "missing": ("none", "no such cell"),
    "read": ("hand", "read by a person"),
    "waits": ("waits", "awaits a person"),
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
#: Statuses of answers with which nothing is wrong, or which are not there.
NOTHING_WRONG = {"passed", "by hand", "missing", "unchanged"}
#: How many of the commonest problems of a task are shown.
MOST_COMMON = 3

#: A problem of several students: its text, how many they are, and who.
Common = tuple[str, int, list[str]]


def _state(task: TaskResult) -> str:
    """The status; a written answer was read when it has points, and waits before."""
    if task.status != "by hand":
        return task.status
    return "waits" if task.points is None else "read"


def label(task: TaskResult) -> str:
    """Return the state of an answer in words."""
    return STATES[_state(task)][1]


def kind(task: TaskResult) -> str:
    """Return which color and mark an answer has."""
    return STATES[_state(task)][0]


def problems(task: TaskResult) -> list[str]:
    """Return what was wrong with an answer, each problem once.

    If the run ended at this task, its note says what the check repeats.
    """
    if task.status in NOTHING_WRONG:
        return []
    if task.note:
        return [task.note]
    if task.problems:
        return list(dict.fromkeys(problem["text"] for problem in task.problems))
    lines = [line[4:] for line in task.said.splitlines() if line.startswith("  - ")]
    lines = [re.sub(r"^ranks? \d[\d–, and]*: ", "", line) for line in lines]
    if not lines:
        lines = [shown.text.splitlines()[0] for shown in task.shown if shown.text]
    return lines or task.said.splitlines()[:1] or [NO_ANSWER.get(task.status, task.status)]


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
    """Return the same for problems that differ in numbers only."""
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return re.sub(r"#(, #)+", "#", text)
