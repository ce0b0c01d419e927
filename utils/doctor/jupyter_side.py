"""Checks of JupyterLab and of what comes with it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from utils.doctor.finding import Finding, check, error, facts_of, ok
from utils.doctor.patient import Machine
from utils.doctor.words import short


@check("JupyterLab")
def check_jupyterlab(machine: Machine) -> Finding:
    """Is it there, and does it start notebooks with the Python of this environment?"""
    facts = facts_of(machine.jupyter, "jupyterlab")
    # Jupyter puts its own Python in the place of a bare "python".
    python = facts["kernel"]
    if os.path.isabs(python) and not Path(python).is_relative_to(sys.prefix):
        return error(
            f"{facts['version']}, but its kernel python3 is another Python: {short(python)}",
            f"{short(sys.executable)} -m ipykernel install --sys-prefix",
        )
    return ok(f"{facts['version']}; its kernel is this Python")


@check("ipyparallel")
def check_ipyparallel(machine: Machine) -> Finding:
    """Is it there? Its extensions of JupyterLab add a panel; the labs need none of them."""
    facts = facts_of(machine.jupyter, "ipyparallel")
    server, lab = ("on" if facts[one] else "off (not needed)" for one in ("server", "lab"))
    return ok(f"{facts['version']}; server extension {server}, lab extension {lab}")


@check("nbval")
def check_nbval(machine: Machine) -> Finding:
    """Only instructors need it."""
    if importlib.util.find_spec("nbval") is None:
        return ok("not installed; only instructors need it (make test installs it)")
    return ok(facts_of(machine.jupyter, "nbval", extra="course")["version"])
