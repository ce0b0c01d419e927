"""What errors say in a notebook: its cells, the calls of ``ranks``, and tasks that are still open.

The kernel uses it, and the ranks of a notebook, but not the ranks of a program that the same
process may have been forked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch_mpi import settings

Error = TypeVar("Error", bound=BaseException)

# A student has not seen the files of the checks, so a line number in one of them says nothing.
_CHECKS = tuple(os.path.join("", "utils", room, "") for room in ("checks", "labs"))
#: The text that `make release` writes into a stub: ``Task 9.3: one head of attention``.
_STUB = re.compile(r"Task (?P<number>\d+\.\d+): (?P<title>.*)")
_LABS = Path(__file__).parents[1] / "labs"

# What shows the errors of each kind: IPython keeps one function for all of them.
_shows: dict[type[BaseException], Callable[[Any, Any], BaseException | None]] = {}


def use() -> None:
    """Have the backend's messages in this process say "cell" and name the calls of ``ranks``."""
    settings.section = "cell"
    settings.fresh_ranks = "call ranks.restart() for fresh ranks, or start the program again"
    settings.fault_tolerant = "cluster.start(n, fault_tolerant=True)"
    settings.place = _place


def _place(filename: str, line: int, function: str) -> str | None:
    """Return ``cell line 3 in ring()``, ``the check``, or ``None`` for another file."""
    if any(room in filename for room in _CHECKS):
        return "the check"
    if "ipykernel_" not in filename and not filename.startswith("<ipython-input"):
        return None
    inside = f" in {function}()" if function and not function.startswith("<") else ""
    return f"cell line {line}{inside}"


# --- the stub of a task -----------------------------------------------------------------------


def way_on(number: str) -> str:
    """Return the call that replaces a task's answer; "" in a lab that has no model answers."""
    lab = f"lab{number.partition('.')[0].zfill(2)}"
    if not (_LABS / lab / "checks.py").is_file():
        return ""
    return f'{lab}.use_model(ranks, "{number}")'


def open_task(kind: str, text: str) -> tuple[str, str] | None:
    """Return number and title of the task whose stub raised this error; ``None`` for another."""
    stub = _STUB.match(text) if kind == NotImplementedError.__name__ else None
    return (stub["number"], stub["title"]) if stub else None


def explained(kind: str, text: str) -> str | None:
    """Return what to show of a stub's error; ``None`` for another error."""
    if not (task := open_task(kind, text)):
        return None
    number, title = task
    reason = f"{kind}: Task {number}: {title}\nThis task is still open, and the cell needs it."
    call = way_on(number)
    return f"{reason} To go on without it:\n  {call}" if call else reason


# --- what a notebook shows of an error --------------------------------------------------------


def show_errors(
    shell: Any, kind: type[Error], show: Callable[[Any, Error], BaseException | None]
) -> None:
    """Have ``show(shell, error)`` decide from now on what is shown of errors of this kind.

    It returns the error to show: the same one, with its frames, or another one, without frames;
    ``None`` shows nothing.
    """
    _shows[kind] = show
    shell.set_custom_exc(tuple(_shows), _handle)


def _handle(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType,
    tb_offset: int | None = None,
) -> None:
    show = next(show for shown_kind, show in _shows.items() if isinstance(error, shown_kind))
    shown = show(shell, error)
    if shown is error:
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
    elif shown is not None:
        shell.showtraceback((type(shown), shown, None))
