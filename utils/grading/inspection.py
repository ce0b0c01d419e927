"""Finds what a person should look at in a result. A remark costs no points.

No remark is about the words in an answer: the kernel carries and records all messages of the ranks,
and the ranks' boxes hold no reference, so code can look as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator

from .reference import Reference
from .results import Result

#: The beginning of a remark on an answer, left out below a heading that says the same.
LOOK = "look at this answer: "
#: Characters of an answer that are kept.
MOST_CODE = 20_000


def look(result: Result, reference: Reference) -> list[str]:
    """Return remarks on what a person should look at in a result, one line each."""
    return [f"Task {number}: {LOOK}{text}" for number, text in _remarks(result, reference)]


def _remarks(result: Result, reference: Reference) -> Iterator[tuple[str, str]]:
    for task in result.tasks:
        for problem in task.problems:
            if problem.get("kind") == "forged":
                yield task.task, f"its check found a forgery: {problem['text']}"
        if task.status != "passed":
            continue
        if task.code.split() == reference.tasks[task.task].stub.split():
            yield task.task, "it is still the stub, but its check passed"
        if len(task.code) >= MOST_CODE:
            yield task.task, f"only the first {MOST_CODE} characters are kept"
