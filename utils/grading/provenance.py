"""By what a summary was made: when, with which version of the course, by which command."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import utils

GIT_SECONDS = 10


@dataclass(frozen=True)
class Provenance:
    """Local time, version, the command that wrote the pages, and the one that graded.

    Without the version nobody can tell later by which checks points were given.
    """

    date: str
    version: str
    command: str
    graded_by: str = ""


def provenance_now(command: str, graded_by: str = "") -> Provenance:
    """What this run says of itself."""
    other = "" if graded_by == command else graded_by
    return Provenance(time.strftime("%Y-%m-%d %H:%M"), version(), command, other)


def version() -> str:
    """The package's version, and the commit where this is a clone: "0.1.0 (v0.1.0-3-gabc1234)"."""
    found = "?"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version("ddl-labs")
    commit = described(Path(utils.__file__).parents[1])
    return f"{found} ({commit})" if commit else found


def described(folder: Path) -> str:
    """`git describe` of a clone; "" where it is none, or git is not there."""
    if not (folder / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--tags", "--dirty"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return done.stdout.strip()
    return ""
