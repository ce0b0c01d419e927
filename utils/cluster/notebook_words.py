"""What errors say in a notebook: its cells, the calls of ``ranks``, and tasks that are still open.

The kernel uses it, and the ranks of a notebook, but not the ranks of a program that the same
process may have been forked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, TypeVar

from torch_mpi import settings

Error = TypeVar("Error", bound=BaseException)

# A student has not seen the files of the checks, so a line number in one of them says nothing.
_CHECKS = tuple(os.path.join("", "utils", room, "") for room in ("checks", "labs"))
#: The text that `make release` writes into a stub: ``Task 9.3: one head of attention``.
_STUB = re.compile(r"Task (?P<number>\d+\.\d+): (?P<title>.*)")
# Dark letters on amber, whatever the page's own colors are.
_AMBER, _PLAIN = "\x1b[48;2;255;193;7m\x1b[38;2;34;34;34m", "\x1b[0m"
_LABS = Path(__file__).parents[1] / "labs"

# On a rank: each cell's number in the notebook, by its file, and the number of the cell that runs.
_cells: dict[str, int] = {}
_now = SimpleNamespace(number=None)
# What shows the errors of each kind: IPython keeps one function for all of them.
_shows: dict[type[BaseException], Callable[[Any, Any], BaseException | None]] = {}


def use() -> None:
    """Have the backend's messages in this process say "cell" and name the calls of ``ranks``."""
    settings.section = "cell"
    settings.fresh_ranks = "call ranks.restart() for fresh ranks, or start the program again"
    settings.fault_tolerant = "cluster.start(n, fault_tolerant=True)"
    settings.place = _place


def _place(filename: str, line: int, function: str) -> str | None:
    """Return a line of a cell as `place_in_cell` says, ``the check``, or ``None`` for a file."""
    if any(room in filename for room in _CHECKS):
        return "the check"
    if "ipykernel_" not in filename and not filename.startswith("<ipython-input"):
        return None
    number = _cells.get(filename)
    return place_in_cell(line, function, None if number == _now.number else number)


def place_in_cell(line: int, function: str, number: int | None) -> str:
    """Return ``In[2], line 3, in ring()``, or ``cell line 3 in ring()`` for the cell that runs.

    Args:
        line, function: where it is; a function such as ``<module>`` has no name.
        number: of the other cell; ``None`` for the cell that runs, and for one without a number.
    """
    inside = f"in {function}()" if function and not function.startswith("<") else ""
    if number is None:
        return f"cell line {line} {inside}".rstrip()
    return f"In[{number}], line {line}" + (f", {inside}" if inside else "")


def number_cell(filename: str, number: int) -> None:
    """Tell this rank which of the notebook's cells is in this file."""
    _cells[filename] = number


def cell_runs(number: int | None) -> None:
    """Tell this rank which cell runs now; ``None`` for none, so that every line names its cell."""
    _now.number = number


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


def stopped_here(task: tuple[str, str], cell: str = "") -> list[str]:
    """Return the lines that a notebook shows where it meets an open task; the first is amber.

    Args:
        task: number and title.
        cell: the source of the cell that ran, which may hold the stub itself.
    """
    number, _ = task
    is_here = re.search(rf"NotImplementedError\(.Task {re.escape(number)}:", cell)
    place = "this cell" if is_here else "the cell above"
    said = f"○ Task {number} is still open: write it in {place}. Run All stops here."
    call = way_on(number)
    return [f"{_AMBER} {said} {_PLAIN}", *([f"To go on without it: {call}"] if call else [])]


def shown_as(error: Error, lines: list[str]) -> Error:
    """Have IPython show these lines for an error, whose class and text stay as they are."""
    vars(error)["_render_traceback_"] = lambda: lines
    return error


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
