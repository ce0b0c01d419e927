"""What a student reads: points, what the checks said, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from .page_rendering import render
from .results import Result, TaskResult, total
from .verdicts import ADVICE

#: Lines of a check at the top of a feedback.
MOST_LINES = 8


def feedback(student: str, results: list[Result]) -> str:
    """What one student gets back."""
    return render(
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
