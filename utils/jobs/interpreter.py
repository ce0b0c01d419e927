"""The course run in a fresh Python, whatever lies in the current folder.

``python -m utils`` and ``python -c`` look into the current folder first, where a user's own
``utils.py`` would be imported in place of the course.
"""

import sys
from pathlib import Path

# The course's folder: a clone, or site-packages.
ROOT = Path(__file__).resolve().parents[2]


def program(code: str, *arguments: str) -> list[str]:
    """Return what follows `python` to run `code`, in which `utils` is this one.

    `sys.argv[1:]` are the arguments. The path is then as it was, so that all other modules come
    from where they always do.
    """
    first = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import utils; del sys.path[0]"
    return ["-c", f"{first}\n{code}", *arguments]


def command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `code` as `program` says."""
    return [sys.executable, *program(code, *arguments)]
