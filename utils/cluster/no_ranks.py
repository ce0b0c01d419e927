"""The errors of a notebook's fresh kernel if a cell uses ranks that have not been started.

A student who opens yesterday's notebook sees its outputs, but the kernel knows nothing of them.
This module is an IPython extension that every kernel of the course's environment loads (see
``jupyterlab/ipython_kernel_config.py``). ``cluster.start`` replaces its ``%%px`` by the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from utils.cluster.notebook_words import show_errors
from utils.jobs import RanksError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

ADVICE = (
    "there are no ranks yet, because this kernel is fresh and has run none of the cells above. "
    "Run the cell with `ranks = cluster.start(…)` and the cells below it "
    "(Run → Run All Above Selected Cell)."
)

#: For example, a folded picture cell was run before the cell that makes its data.
NOT_YET = (
    "Run the cell that makes `{0}` first (Run → Run All Above Selected Cell). If this cell begins "
    "with %%px, `{0}` exists only on the ranks."
)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register a ``%%px`` and a NameError that advise the student. IPython calls this function."""
    if "px" not in shell.magics_manager.magics["cell"]:
        # IPython hides the method's own parameters behind a decorator.
        shell.register_magic_function(_px, "line_cell", "px")  # type: ignore[arg-type]
    show_errors(shell, NameError, _explained)


def _px(line: str, cell: str | None = None) -> NoReturn:
    """Run a cell on the ranks after you started them: ``ranks = cluster.start(4)``."""
    raise RanksError(ADVICE)


def _explained(shell: InteractiveShell, error: NameError) -> Exception:
    """Return the NameError with advice, or another error if the missing name is ``ranks``."""
    if error.name == "ranks":
        return RanksError(ADVICE)
    if error.name and f"{error.name!r} is not defined" in str(error):
        error.add_note(NOT_YET.format(error.name))
    return error
