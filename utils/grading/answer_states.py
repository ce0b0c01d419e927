"""What became of an answer: its words, its mark and its color, on pages and in pictures."""

from __future__ import annotations

from .results import TaskResult

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
