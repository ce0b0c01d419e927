"""The finding of a check, and the words of the report: short paths, sizes, commands."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from utils.jobs import POSIX, ROOT

# The command that `make env` installs.
OWN_COMMAND = ROOT / ".venv" / ("bin/ddl-labs" if POSIX else "Scripts/ddl-labs.exe")
# The command that builds the course's environment.
IN_WINDOWS = "py -m venv .venv\n.venv\\Scripts\\python -m pip install -e . -c .ci/constraints.txt"
NEW_ENVIRONMENT = "make env" if POSIX else IN_WINDOWS
# Whether this is a clone of the course. On a hub, the course is a package in a shared environment.
IS_CLONE = (ROOT / "pyproject.toml").exists()


@dataclass(frozen=True)
class Finding:
    """A line of the report; its status is ok, warning (the labs still run) or error.

    Checks return findings without a name, because the table of checks has the names.
    """

    status: str
    name: str
    fact: str
    remedy: str = ""


class SettledError(Exception):
    """Raised if the answer to a check's question already decides the finding."""

    def __init__(self, finding: Finding):
        super().__init__(finding.fact)
        self.finding = finding


def ok(fact: str) -> Finding:
    """Return the finding that there is no problem."""
    return Finding("ok", "", fact)


def warning(fact: str, remedy: str = "") -> Finding:
    """Return the finding that the labs run, but that there is something to know."""
    return Finding("warning", "", fact, remedy)


def error(fact: str, remedy: str) -> Finding:
    """Return the finding that some or all labs don't run."""
    return Finding("error", "", fact, remedy)


def not_tested(needs: str) -> Finding:
    """Return the finding that another line of the report names the cause."""
    return warning(f"not tested: needs {needs}")


# --- words -------------------------------------------------------------------------------------


def one_line(failure: BaseException) -> str:
    """Return kind, message and cause of an exception on one line of at most 200 characters."""
    text = str(failure)
    if not text.startswith("No module"):
        text = f"{type(failure).__name__}: {text}"
    if failure.__cause__ is not None:
        text += f" ({one_line(failure.__cause__)})"
    return textwrap.shorten(text, 200, placeholder=" …")


def short(path: Path | str) -> str:
    """Return a path as you would type it: relative to the current folder, or from ~."""
    path = Path(path)
    if path.is_relative_to(ROOT) and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    with contextlib.suppress(ValueError, RuntimeError):
        return str("~" / path.relative_to(Path.home()))
    return str(path)


def gigabytes(size: float) -> str:
    """Return 1.5e9 as "1.5 GB", 2e7 as "20 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def gist(text: str) -> str:
    """Return the important line of a launcher's output: a Python error, or else the first line."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE)
    lines = errors[-1:] or [line.strip(" -*") for line in text.splitlines() if line.strip(" -*")]
    return textwrap.shorten(lines[0], 200, placeholder=" …") if lines else "it printed nothing"


def in_this_shell(remedy: str) -> str:
    """Return a remedy with its variables as PowerShell sets them, if this is Windows."""
    if POSIX:
        return remedy
    remedy = re.sub(r"\bexport (\w+)=(\S+)", r'$env:\1 = "\2"', remedy)
    return re.sub(r"\bunset (\w+)", r"Remove-Item Env:\1", remedy).replace(" && ", "; ")


def install_command(extra: str = "") -> str:
    """Return the command that installs the course's packages, and an extra, into this Python."""
    if not IS_CLONE:
        return f"{short(sys.prefix)} is incomplete: ask its admin to run hpc/install.sh again"
    change = "" if Path.cwd() == ROOT else f"cd {short(ROOT)} && "
    if in_environment():
        python = short(sys.executable)
        more = f" -e '.[{extra}]'" if extra else ""
        return f"{change}{python} -m pip install -r requirements.txt{more}"
    # Never advise to install packages into the system's Python.
    return in_own_python() or f"{change}{NEW_ENVIRONMENT}"


def in_own_python() -> str:
    """Return the command of the doctor in the course's .venv; "" if there is no .venv."""
    return f"{short(OWN_COMMAND)} doctor" if os.access(OWN_COMMAND, os.X_OK) else ""


def in_environment() -> bool:
    """Return whether this Python belongs to a virtual environment or a conda environment."""
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").exists()
