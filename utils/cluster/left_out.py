"""Cells that ranks inside the kernel leave out, and the later cells that need what those make.

A cell that needs ranks that are processes raises :class:`utils.jobs.NeedsProcesses`. A notebook
then shows an amber line instead of an error, and Run All goes on. The names that the cell would
have made are missing from then on, so a later cell that needs one of them is left out, too.
"""

from __future__ import annotations

from typing import Any

from IPython import get_ipython

from torch_mpi.lines import wrapped
from utils.cluster import lost_names
from utils.cluster.notebook_words import AMBER, PLAIN, running_cell, show_errors
from utils.jobs import NeedsProcesses, thread_plan

GO_ON = "Go on with the next one."

# The names that cells would have made that were left out.
_names: set[str] = set()


def need_processes(why: str) -> None:
    """Raise an error on a rank inside the kernel, and where ranks can't be processes.

    A cell of a notebook that calls this shows an amber line instead of the error.

    Args:
        why: what needs processes, and what the student does instead, in one or two sentences.

    Raises:
        NeedsProcesses: ranks can't be processes here.
    """
    if thread_plan.is_rank_here():
        raise NeedsProcesses(why)
    if reason := thread_plan.missing():
        prepare(get_ipython())
        raise NeedsProcesses(f"{why} ({reason[:1].upper()}{reason[1:]}.)")


def prepare(shell: Any) -> None:
    """Let cells of the kernel that are left out show a line instead of an error."""
    if shell is None:
        return
    show_errors(shell, NeedsProcesses, _of_a_cell)
    show_errors(shell, NameError, _of_a_name)
    shell.events.register("post_run_cell", _go_on)


def lacks(name: str) -> bool:
    """Return whether a cell that was left out would have made the name."""
    return name in _names


def show(cell: str, error: BaseException | None = None, *, name: str = "") -> None:
    """Print that a cell is left out, and note the names that it would have made.

    Args:
        cell: its source.
        error: why; with an error of the kernel's cell, the kernel goes on.
        name: the name that it lacks because of an earlier cell.
    """
    _names.update(lost_names.made_by(cell))
    needs, reason = getattr(error, "needs", NeedsProcesses.needs), str(error or "")
    if name:
        needs, reason = f"`{name}` from a cell above that was left out", ""
    lines = [f"{AMBER} ○ This cell needs {needs}. {GO_ON} {PLAIN}"]
    lines += wrapped(reason)
    print("\n".join(lines))
    if error is not None:
        vars(error)["_left_out"] = True


def _of_a_cell(shell: Any, error: NeedsProcesses) -> None:
    show(running_cell(shell), error)


def _of_a_name(shell: Any, error: NameError) -> BaseException | None:
    name = error.name or ""
    if not lacks(name):
        return error
    show(running_cell(shell), error, name=name)
    return None


def _go_on(result: Any) -> None:
    """Let the kernel answer that the cell has run, so that Run All goes on."""
    if hasattr(result.error_in_exec, "_left_out"):
        result.error_in_exec = None
