"""The words of errors in a notebook: its cells, the calls of ``ranks``, and open tasks.

The kernel and the ranks of a notebook use this module. The ranks of a program don't, even if the
same fork server started them.
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

FRESH_RANKS = "Call ranks.restart() for fresh ranks."
WITHOUT_IT = "To continue without it, run:"
# Students have not seen the files of the checks, so a line number in them would not help.
_CHECKS = tuple(os.path.join("", "utils", room, "") for room in ("checks", "labs"))
#: The text that `make release` writes into a stub: ``Task 9.3: one head of attention``.
_STUB = re.compile(r"Task (?P<number>\d+\.\d+): (?P<title>.*)")
# Dark letters on amber can be read whatever colors the page has.
AMBER, PLAIN = "\x1b[48;2;255;193;7m\x1b[38;2;34;34;34m", "\x1b[0m"
_LABS = Path(__file__).parents[1] / "labs"

# On a rank: the number of each cell in the notebook by the cell's file, and of the running cell.
_cells: dict[str, int] = {}
_now = SimpleNamespace(number=None)
# The function that shows the errors of each kind, because IPython keeps only one function for all.
_shows: dict[type[BaseException], Callable[[Any, Any], BaseException | None]] = {}


def use() -> None:
    """Make the backend's messages in this process say "cell" and name the calls of ``ranks``.

    Each ``isend`` is watched, too, because nobody sees this mistake in the numbers of one run.
    """
    settings.section = "cell"
    settings.fresh_ranks = "call ranks.restart() for fresh ranks, or start the program again"
    settings.fault_tolerant = "cluster.start(n, fault_tolerant=True)"
    settings.place = _place
    settings.seals_sends = True


def _place(filename: str, line: int, function: str) -> str | None:
    """Return the place in a cell (see `place_in_cell`), ``the check``, or ``None`` for a file."""
    if any(room in filename for room in _CHECKS):
        return "the check"
    if "ipykernel_" not in filename and not filename.startswith("<ipython-input"):
        return None
    number = _cells.get(filename)
    return place_in_cell(line, function, None if number == _now.number else number)


def place_in_cell(line: int, function: str, number: int | None) -> str:
    """Return ``In[2], line 3, in ring()``, or ``cell line 3 in ring()`` for the cell that runs.

    Args:
        line, function: the place; a function such as ``<module>`` counts as nameless.
        number: number of the cell; ``None`` for the running cell or a cell without a number.
    """
    inside = f"in {function}()" if function and not function.startswith("<") else ""
    if number is None:
        return f"cell line {line} {inside}".rstrip()
    return f"In[{number}], line {line}" + (f", {inside}" if inside else "")


def number_cell(filename: str, number: int | None) -> None:
    """Tell this process which of the notebook's cells is in this file; ``None`` if none is."""
    if number is not None:
        _cells[filename] = number


def number_of(filename: str) -> int | None:
    """Return which of the notebook's cells is in this file; ``None`` for other files."""
    return _cells.get(filename)


def running() -> int | None:
    """Return which cell runs now."""
    number: int | None = _now.number
    return number


def cell_runs(number: int | None) -> None:
    """Tell this process which cell runs now; after ``None``, every line is shown with its cell."""
    _now.number = number


# --- the stub of a task -----------------------------------------------------------------------


def way_on(number: str) -> str:
    """Return the call that loads a task's model answer; "" in a lab without model answers."""
    lab = f"lab{number.partition('.')[0].zfill(2)}"
    if not (_LABS / lab / "checks.py").is_file():
        return ""
    return f'{lab}.use_model(ranks, "{number}")'


def open_task(kind: str, text: str) -> tuple[str, str] | None:
    """Return number and title of the task whose stub raised the error; ``None`` if no stub did."""
    stub = _STUB.match(text) if kind == NotImplementedError.__name__ else None
    return (stub["number"], stub["title"]) if stub else None


def explained(kind: str, text: str) -> str | None:
    """Return the text to show for a stub's error; ``None`` for any other error."""
    if not (task := open_task(kind, text)):
        return None
    number, title = task
    reason = f"{kind}: Task {number}: {title}\nThis task is still open, and the cell needs it."
    call = way_on(number)
    return f"{reason} {WITHOUT_IT}\n  {call}" if call else reason


def stopped_here(task: tuple[str, str], cell: str = "") -> list[str]:
    """Return the lines that a notebook shows if it meets an open task; the first line is amber.

    Args:
        task: number and title.
        cell: the source of the cell that ran, which may contain the stub itself.
    """
    number, _ = task
    is_here = re.search(rf"NotImplementedError\(.Task {re.escape(number)}:", cell)
    place = "this cell" if is_here else "the cell above"
    said = f"○ Task {number} is still open. Write it in {place}."
    call = way_on(number)
    return [f"{AMBER} {said} {PLAIN}", *([f"{WITHOUT_IT} {call}"] if call else [])]


def shown_as(error: Error, lines: list[str]) -> Error:
    """Make IPython show these lines for an error; the error's class and text stay unchanged."""
    vars(error)["_render_traceback_"] = lambda: lines
    return error


def running_cell(shell: Any) -> str:
    """Return the source of the kernel's running cell."""
    history = shell.history_manager
    return str(history.input_hist_raw[-1]) if history else ""


# --- what a notebook shows of an error --------------------------------------------------------


def show_errors(
    shell: Any, kind: type[Error], show: Callable[[Any, Error], BaseException | None]
) -> None:
    """Let ``show(shell, error)`` decide from now on how errors of this kind are shown.

    If ``show`` returns the same error, it is shown with its frames. Another error is shown without
    frames, and for ``None`` nothing is shown.
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
