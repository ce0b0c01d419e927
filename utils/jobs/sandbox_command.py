"""The sandbox in which grading runs a student's code: ranks in boxes, and jobs of a notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

#: The command of the sandbox, as a JSON list; the program follows it. Grading sets it.
VARIABLE = "DDL_LABS_SANDBOX"
#: The option of bubblewrap after which nothing can be mounted.
CLOSED = "--remount-ro"


def is_set() -> bool:
    """Return whether a student's code has to run in a sandbox."""
    return VARIABLE in os.environ


def confined(program: Sequence[str], *writable: Path) -> list[str]:
    """Return the command that runs a program in the sandbox; without a sandbox, the program.

    Args:
        program: a command.
        writable: folders that the program may write to. All users may do so afterward.
    """
    sandbox: list[str] = json.loads(os.environ.get(VARIABLE, "[]"))
    if CLOSED in sandbox:
        at = sandbox.index(CLOSED)
        for folder in writable:
            folder.chmod(0o777)
            sandbox[at:at] = [*_parents(folder), "--bind", str(folder), str(folder)]
    return [*sandbox, *program]


def _parents(folder: Path) -> list[str]:
    """Return options that make the folders above a folder, which other users may enter."""
    above = list(reversed(folder.parents))[1:]
    return [word for path in above for word in ("--perms", "0755", "--dir", str(path))]
