"""What a cell says when it meets the stub of a task that is still open."""

from __future__ import annotations

import re
from pathlib import Path

#: The text that `make release` writes into a stub: ``Task 9.3: one head of attention``.
_STUB = re.compile(r"Task (?P<number>\d+\.\d+): (?P<title>.*)")
_LABS = Path(__file__).parents[1] / "labs"


def way_on(number: str) -> str:
    """Return the call that replaces a task's answer; "" in a lab that has no model answers."""
    lab = f"lab{number.partition('.')[0].zfill(2)}"
    if not (_LABS / lab / "checks.py").is_file():
        return ""
    return f'{lab}.use_model(ranks, "{number}")'


def open_task(kind: str, text: str) -> tuple[str, str] | None:
    """Return number and title of the task whose stub raised an error; ``None`` for another error.

    Args:
        kind: the name of the error's class.
        text: the error's message.
    """
    found = _STUB.match(text) if kind == NotImplementedError.__name__ else None
    return (found["number"], found["title"]) if found else None


def explained(kind: str, text: str) -> str | None:
    """Return what to show of a stub's error; ``None`` for another error."""
    if not (task := open_task(kind, text)):
        return None
    number, title = task
    said = f"{kind}: Task {number}: {title}\nThis task is still open, and the cell needs it."
    call = way_on(number)
    return f"{said} To go on without it:\n  {call}" if call else said
