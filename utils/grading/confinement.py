"""The first program in a sandbox: it gives up privileges, sets limits, and becomes a program.

The command is ``python -P -m utils.grading.confinement '{"uid": 61000, "processes": 512, …}'
PROGRAM ARGUMENT…``. This module imports nothing of the course, because the sandbox has little of
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

#: An option of Linux's prctl.
PR_SET_NO_NEW_PRIVS = 38
LIMITS = {
    "RLIMIT_NPROC": "processes",
    "RLIMIT_AS": "address_space",
    "RLIMIT_CPU": "cpu_seconds",
    "RLIMIT_FSIZE": "file_size",
}


def limit(settings: dict[str, Any]) -> None:
    """Set the limits of this process and of all that it starts."""
    for name, key in LIMITS.items():
        if settings.get(key):
            most = resource.getrlimit(getattr(resource, name))[1]
            value = settings[key] if most < 0 else min(settings[key], most)
            resource.setrlimit(getattr(resource, name), (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def become(uid: int | None) -> None:
    """Become this user permanently, without any capability; None: stay the same user."""
    if uid is None:
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main(options: str, *program: str) -> None:
    """Become a program.

    Args:
        options: JSON with the user's number, the home folder and the limits, see `Box.inner`.
    """
    settings = json.loads(options)
    limit(settings)
    become(settings.get("uid"))
    if home := settings.get("home"):
        Path(home).mkdir(parents=True, exist_ok=True)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
