"""What was wrong with answers, and which of it comes often in a class."""

from __future__ import annotations

import re
from collections import defaultdict

from .answer_states import NO_ANSWER
from .results import TaskResult

#: How many of the commonest problems of a task are shown.
MOST_COMMON = 3

#: A problem of several students: its text, how many they are, and who.
Common = tuple[str, int, list[str]]


def common(own: list[tuple[str, TaskResult]]) -> list[Common]:
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
