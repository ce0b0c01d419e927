"""``--format github``: a table of points for the summary of a job of GitHub Actions."""

from __future__ import annotations

import os
import re
from pathlib import Path

from utils.course.pages import number

from .answer_states import MARKS, kind, label
from .feedback import next_step
from .gradebook import by_student
from .results import Result, total

VARIABLE = "GITHUB_STEP_SUMMARY"
#: GitHub refuses summaries of more than 1 MiB; characters take up to 4 bytes.
MOST = 200_000


def append(results: list[Result]) -> None:
    """Append the table to the file that GitHub names; print it where there is none."""
    text = markdown(results)[:MOST]
    if not os.environ.get(VARIABLE):
        print(text)
        return
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def markdown(results: list[Result]) -> str:
    """Of each student: points, a row for each task, and what to do next."""
    parts = []
    for student, own in by_student(results).items():
        points, most = total(own), sum(one.most for one in own)
        got = "not graded" if points is None else f"{number(points)} of {number(most)} points"
        parts.append(f"## {plain(student)}: {got}\n")
        parts += [_of_a_lab(one) for one in own]
        if step := next_step(own):
            said = f"\n<pre>{_escaped(step.said)}</pre>\n" if step.said else ""
            parts.append(f"Next: task {plain(step.task.task)}, {label(step.task)}.\n{said}")
    return "\n".join(parts) + "\n"


def _of_a_lab(result: Result) -> str:
    if result.error:
        return f"{plain(result.lab)} could not be graded: {plain(result.error)}\n"
    remarks = [f"- {plain(text)}" for text in result.remarks]
    rows = [
        f"| {plain(task.task)} | {plain(task.title)} | {number(task.points) or '–'} / "
        f"{number(task.most)} | {MARKS[kind(task)]} {label(task)} |"
        for task in result.tasks
    ]
    head = [f"| {plain(result.lab)} | | points | |", "|---|---|--:|---|"]
    return "\n".join([*head, *rows, "", *remarks, ""])


def plain(text: str) -> str:
    """The text in one line of Markdown in which nothing is a link, a picture or a column."""
    text = " ".join(text.split())
    return re.sub(r"[^\w\s.,;–-]|_", lambda found: f"&#{ord(found[0])};", text)


def _escaped(text: str) -> str:
    """Nothing that HTML or Markdown would obey; no blank line, which would end a `<pre>`."""
    return "\n".join(_line(line) for line in text.splitlines() if line.strip())


def _line(text: str) -> str:
    indent = len(text) - len(text.lstrip())
    return " " * indent + plain(text)
