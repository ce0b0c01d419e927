"""What a check finds, and the words of a report: short paths, sizes, commands."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from utils.jobs import ROOT

# What `make env` builds.
OWN_COMMAND = ROOT / ".venv" / "bin" / "ddl-labs"
# Is this a clone of the course? On a hub it is a package among others, in a shared environment.
IS_CLONE = (ROOT / "pyproject.toml").exists()


@dataclass(eq=False)
class Finding(Exception):
    """A finding is a line of the report; its status is ok, warning (the labs run) or error.

    A check returns it, or what the check asks raises it. The table of checks has the names.
    """

    status: str
    name: str
    fact: str
    remedy: str = ""


ok = functools.partial(Finding, "ok", "")
warning = functools.partial(Finding, "warning", "")
error = functools.partial(Finding, "error", "")


def not_tested(needs: str) -> Finding:
    """Return a finding whose cause has a line of its own, which is the one to read."""
    return warning(f"not tested: needs {needs}")


# --- words -------------------------------------------------------------------------------------


def one_line(failure: BaseException) -> str:
    """Return kind, message and cause of an exception, on one line of bearable length."""
    text = str(failure)
    if not text.startswith("No module"):
        text = f"{type(failure).__name__}: {text}"
    if failure.__cause__ is not None:
        text += f" ({one_line(failure.__cause__)})"
    return textwrap.shorten(text, 200, placeholder=" …")


def short(path: Path | str) -> str:
    """Write a path as one would type it: in the course's folder relative to it, or from ~."""
    path = Path(path)
    if path.is_relative_to(ROOT) and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    with contextlib.suppress(ValueError, RuntimeError):
        return str("~" / path.relative_to(Path.home()))
    return str(path)


def gigabytes(size: float) -> str:
    """Write 1.5e9 as "1.5 GB", 2e7 as "20 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def gist(text: str) -> str:
    """Return the line to read in a launcher's output: a Python error, else the first words."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE)
    lines = errors[-1:] or [line.strip(" -*") for line in text.splitlines() if line.strip(" -*")]
    return textwrap.shorten(lines[0], 200, placeholder=" …") if lines else "it printed nothing"


def install_command(extra: str = "") -> str:
    """Return what brings the course's packages, and those of an extra, to this Python."""
    if not IS_CLONE:
        return f"{short(sys.prefix)} is not complete: its administrator runs hpc/install.sh again"
    change = "" if Path.cwd() == ROOT else f"cd {short(ROOT)} && "
    if in_environment():
        python = short(sys.executable)
        more = f" -e '.[{extra}]'" if extra else ""
        return f"{change}{python} -m pip install -r requirements.txt{more}"
    # Nothing is to be installed into the system's Python.
    return in_own_python() or f"{change}make env"


def in_own_python() -> str:
    """Return the command of a doctor in the course's .venv; "" where there is none."""
    return f"{short(OWN_COMMAND)} doctor" if os.access(OWN_COMMAND, os.X_OK) else ""


def in_environment() -> bool:
    """Return whether this Python belongs to a virtual environment, or to one of conda."""
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").exists()
