"""What a notebook's fresh kernel says where ranks are used that are not there yet.

Who opens yesterday's notebook sees its outputs, and the kernel knows nothing of them. This is an
IPython extension, which every kernel of the course's environment loads (see
``jupyterlab/ipython_kernel_config.py``); ``cluster.start`` puts the real ``%%px`` in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from utils.cluster.notebook_words import show_errors
from utils.jobs import RanksError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

ADVICE = (
    "there are no ranks: this kernel is fresh, and knows nothing of what was run before it "
    "started. Run the cell with `ranks = cluster.start(…)`, and those below it "
    "(Run → Run All Above Selected Cell)."
)

#: A picture cell, folded, has been run before the cell that makes what it draws.
NOT_YET = (
    "If a cell above makes `{}`, run that one first (Run → Run All Above Selected Cell). What a "
    "%%px cell makes is on the ranks only."
)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register a ``%%px`` and a NameError that say what to do. IPython calls this function."""
    if "px" not in shell.magics_manager.magics["cell"]:
        # IPython hides the method's own parameters behind a decorator.
        shell.register_magic_function(_px, "line_cell", "px")  # type: ignore[arg-type]
    show_errors(shell, NameError, _explained)


def _px(line: str, cell: str | None = None) -> NoReturn:
    """Run a cell on the ranks, once there are some: ``ranks = cluster.start(4)``."""
    raise RanksError(ADVICE)


def _explained(shell: InteractiveShell, error: NameError) -> Exception:
    """Say what to do where ``ranks`` has no value, or what else a missing name can be."""
    if error.name == "ranks":
        return RanksError(ADVICE)
    if error.name and f"{error.name!r} is not defined" in str(error):
        error.add_note(NOT_YET.format(error.name))
    return error
