"""Jobs of ranks as processes. This file has their errors, and the command for a fresh Python.

``python -m utils`` and ``python -c`` search the current folder first, and would import a user's
own ``utils.py`` instead of the course. The commands made here avoid that.
"""

import os
import sys
from pathlib import Path

# The course's folder: a clone, or site-packages.
ROOT = Path(__file__).resolve().parents[2]

# Whether this system is like Unix, so that ranks can be processes. Windows isn't.
POSIX = hasattr(os, "fork")
NO_PROCESSES = (
    "Ranks can't be processes here, because there is no Open MPI for Windows. Use ranks inside the "
    'kernel, cluster.start(…, where="here"), or install WSL: docs/install-windows.md.'
)


class RanksError(RuntimeError):
    """The ranks can't be started or used; the message says why and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: only the message, because the frames are ours."""
        return [f"RanksError: {self}"]


class NeedsProcesses(RanksError):
    """Ranks that are threads of the kernel can't do this; the message says how to go on.

    A notebook shows an amber line for it, and Run All goes on: see `utils.cluster.left_out`.
    """

    needs = "ranks that are processes"


class NeedsBackend(NeedsProcesses):
    """Only the course's backend can do this; the message says what another one does."""

    needs = "the course's backend"


class NeedsLinux(NeedsProcesses):
    """Only Linux can do this, whatever the ranks are; the message says why."""

    needs = "Linux"


class DeadRankError(RanksError):
    """A rank is dead or can't communicate any more; the user has to start fresh ranks."""


def python_words(code: str, *arguments: str) -> list[str]:
    """Return the words after `python` that run `code` with the course as its `utils`.

    `sys.argv[1:]` has the arguments. `sys.path` is restored after the import of `utils`, so that
    Python finds all other modules as usual.
    """
    first = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import utils; del sys.path[0]"
    return ["-c", f"{first}\n{code}", *arguments]


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the full command that runs `code`, with the words of `python_words`."""
    return [sys.executable, *python_words(code, *arguments)]
