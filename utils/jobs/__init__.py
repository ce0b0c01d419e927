"""Jobs of ranks as processes. Here: their errors, and how a fresh Python runs the course.

``python -m utils`` and ``python -c`` look into the current folder first, where a user's own
``utils.py`` would be imported instead of the course.
"""

import sys
from pathlib import Path

# The course's folder: a clone, or site-packages.
ROOT = Path(__file__).resolve().parents[2]


class RanksError(RuntimeError):
    """The ranks can't be started or used; the message says why and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message says it all, the frames are ours."""
        return [f"RanksError: {self}"]


class DeadRankError(RanksError):
    """A rank that was asked is dead, or can't communicate any more: only fresh ranks help."""


def python_words(code: str, *arguments: str) -> list[str]:
    """Return what follows `python` to run `code`, in which `utils` is this one.

    `sys.argv[1:]` are the arguments. The path is then as it was, so that all other modules come
    from where they always do.
    """
    first = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import utils; del sys.path[0]"
    return ["-c", f"{first}\n{code}", *arguments]


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `code` as `python_words` says."""
    return [sys.executable, *python_words(code, *arguments)]
