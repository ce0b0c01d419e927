"""Words for the report: paths as one types them, sizes, errors on one line, what to install."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from pathlib import Path

from utils.jobs import ROOT

# What `make env` builds.
OWN_COMMAND = ROOT / ".venv" / "bin" / "ddl-labs"
# Is this a clone of the course? On a hub it is a package among others, in a shared environment.
IS_CLONE = (ROOT / "pyproject.toml").exists()


def one_line(failure: BaseException) -> str:
    """Kind, message and cause of an exception, on one line of bearable length."""
    text = str(failure)
    if not text.startswith("No module"):
        text = f"{type(failure).__name__}: {text}"
    if failure.__cause__ is not None:
        text += f" ({one_line(failure.__cause__)})"
    return textwrap.shorten(text, 200, placeholder=" …")


def short(path: Path | str) -> str:
    """A path as one would type it: in the course's folder relative to it, or from ~."""
    path = Path(path)
    if path.is_relative_to(ROOT) and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    with contextlib.suppress(ValueError, RuntimeError):
        return str("~" / path.relative_to(Path.home()))
    return str(path)


def gigabytes(size: float) -> str:
    """1.5e9 as "1.5 GB", 2e7 as "20 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def gist(text: str) -> str:
    """The line to read in the output of a launcher: a Python error, else the first words."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE)
    lines = errors[-1:] or [line.strip(" -*") for line in text.splitlines() if line.strip(" -*")]
    return textwrap.shorten(lines[0], 200, placeholder=" …") if lines else "it printed nothing"


def install_command(extra: str = "") -> str:
    """What brings the course's packages, and those of an extra, to the Python that runs this."""
    if not IS_CLONE:
        return f"{short(sys.prefix)} is not complete: its administrator runs hpc/install.sh again"
    there = "" if Path.cwd() == ROOT else f"cd {short(ROOT)} && "
    if in_environment():
        python = short(sys.executable)
        more = f" -e '.[{extra}]'" if extra else ""
        return f"{there}{python} -m pip install -r requirements.txt{more}"
    # Nothing is to be installed into the system's Python.
    return in_own_python() or f"{there}make env"


def in_own_python() -> str:
    """The command of a doctor in the course's .venv; "" where there is none."""
    return f"{short(OWN_COMMAND)} doctor" if os.access(OWN_COMMAND, os.X_OK) else ""


def in_environment() -> bool:
    """Does this Python belong to a virtual environment, or to one of conda?"""
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").exists()
