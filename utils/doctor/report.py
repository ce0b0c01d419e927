"""The report: all checks in their order, as text or as JSON, and the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from utils.doctor import data_side, jupyter_side, machine_side, mpi_side, python_side
from utils.doctor.finding import Finding
from utils.doctor.patient import Machine

# In the order in which one repairs: what comes first is the cause of what fails below.
CHECKS = [
    python_side.check_system,
    python_side.check_python,
    python_side.check_packages,
    python_side.check_imports,
    python_side.check_pytorch,
    python_side.check_backend,
    python_side.check_torchvision,
    mpi_side.check_library,
    mpi_side.check_launcher,
    mpi_side.check_ranks,
    mpi_side.check_thread_level,
    machine_side.check_cores,
    machine_side.check_memory,
    machine_side.check_shared_memory,
    machine_side.check_temp_folder,
    machine_side.check_home,
    machine_side.check_ports,
    data_side.check_data,
    jupyter_side.check_jupyterlab,
    jupyter_side.check_ipyparallel,
    jupyter_side.check_nbval,
]

WIDTH = 80
SYMBOLS = {"ok": "✓", "warning": "!", "error": "✗"}
IN_ASCII = {"✓": "+", "✗": "x", "→": ">", "…": "..."}


def examine(machine: Machine) -> Iterator[Finding]:
    """All findings, in order, as they come."""
    if sys.platform == "win32":
        yield python_side.check_system(machine)  # the others ask for what Windows does not have
        return
    # They import for seconds: all at once, and not beside the ranks, whose time is taken.
    with contextlib.suppress(OSError):  # what can't be started is told by its own line
        _ = machine.pytorch, machine.jupyter, machine.mpi
        if machine.has_launcher:  # on a rank it would wait for the others
            _ = machine.backend
    for function in CHECKS:
        yield function(machine)


def as_text(finding: Finding) -> str:
    """A line for the finding, wrapped at words, and the lines of its remedy."""
    indent = " " * 17
    head = f"{SYMBOLS[finding.status]} {finding.name}".ljust(len(indent))
    fact = textwrap.fill(
        finding.fact,
        WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    # Remedies keep their lines: a command is there to be copied.
    remedy = finding.remedy.replace("\n", "\n    ")
    return f"{fact}\n  → {remedy}" if remedy else fact


def summary(findings: list[Finding], seconds: float) -> str:
    """The last line: is there something to do?"""
    errors = sum(finding.status == "error" for finding in findings)
    result = f"{errors} of them to repair first" if errors else "the labs run"
    return f"{len(findings)} checks in {seconds:.1f} s: {result}"


def main(as_json: bool = False, timeout: float = 60.0) -> int:
    """Print the report; 0 if nothing is in the way of the labs, else 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` ends the probes
    say = (lambda text: None) if as_json else _printer()
    started, findings = time.monotonic(), []
    try:
        with Machine(timeout) as machine:
            for finding in examine(machine):
                findings.append(finding)
                say(as_text(finding))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `… doctor | head`; Python would complain again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    seconds = time.monotonic() - started
    healthy = all(finding.status != "error" for finding in findings)
    say(summary(findings, seconds))
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": healthy, "seconds": round(seconds, 1), "checks": checks}, indent=1))
    return 0 if healthy else 1


def _printer() -> Callable[[str], None]:
    """What prints at once, in ASCII where the terminal knows no more."""

    def say(text: str) -> None:
        print(text, flush=True)

    def say_in_ascii(text: str) -> None:
        for symbol, letters in IN_ASCII.items():
            text = text.replace(symbol, letters)
        say(text.encode("ascii", "replace").decode())

    try:
        "".join(IN_ASCII).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return say_in_ascii
    return say
