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
            sandbox[at:at] = with_parents(["--bind", str(folder), str(folder)])
    return [*sandbox, *program]


def with_parents(mounts: Sequence[str]) -> list[str]:
    """Return options of bubblewrap that also make the mounts' parents, which all users may enter.

    Args:
        mounts: kind, source and target of each mount, one after the other.
    """
    options = []
    made = {Path("/"), Path("/tmp"), Path("/dev"), Path("/proc")}
    for kind, source, target in zip(*[iter(mounts)] * 3, strict=True):
        parents = [path for path in reversed(Path(target).parents) if path not in made]
        for path in parents:
            options += ["--perms", "0755", "--dir", str(path)]
        made |= set(parents)
        if kind == "--tmpfs":
            options += ["--perms", "0755", kind, target]
        else:
            options += [kind, source, target]
    return options
