"""The report: the table of checks, its lines as text or as JSON, and the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from utils.doctor import machine_checks, mpi_checks, package_checks
from utils.doctor.finding import (
    Finding,
    SettledError,
    error,
    in_this_shell,
    not_tested,
    one_line,
)
from utils.doctor.machine import Machine

#: In the order in which you repair: an early failure is the cause of later failures.
CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "system": package_checks.check_system,
    "Python": package_checks.check_python,
    "packages": package_checks.check_packages,
    "imports": package_checks.check_imports,
    "PyTorch": package_checks.check_pytorch,
    'backend "mpi"': package_checks.check_backend,
    "torchvision": package_checks.check_torchvision,
    "MPI library": mpi_checks.check_library,
    "launcher": mpi_checks.check_launcher,
    "ranks": mpi_checks.check_ranks,
    "thread level": mpi_checks.check_thread_level,
    "cores": machine_checks.check_cores,
    "memory": machine_checks.check_memory,
    "shared memory": machine_checks.check_shared_memory,
    "temp folder": machine_checks.check_temp_folder,
    "home folder": machine_checks.check_home,
    "ports": machine_checks.check_ports,
    "Fashion-MNIST": package_checks.check_data,
    "JupyterLab": package_checks.check_jupyterlab,
    "ipyparallel": package_checks.check_ipyparallel,
    "nbval": package_checks.check_nbval,
}

#: Checks of what only ranks that are processes need.
OF_PROCESSES = {'backend "mpi"', "MPI library", "launcher", "thread level", "shared memory"}

WIDTH = 80
INDENT = 17
SYMBOLS = {"ok": "✓", "warning": "!", "error": "✗"}
IN_ASCII = {"✓": "+", "✗": "x", "→": ">", "…": "..."}


def find(name: str, machine: Machine) -> Finding:
    """Make one check; turn an error that it raises into a finding."""
    try:
        finding = CHECKS[name](machine)
    except SettledError as settled:
        finding = settled.finding
    except ModuleNotFoundError as missing:
        finding = not_tested(str(missing.name))
    except Exception as failure:
        finding = error(one_line(failure), "please report this line: the problem is new")
    return replace(finding, name=name, remedy=in_this_shell(finding.remedy))


def examine(machine: Machine) -> Iterator[Finding]:
    """Yield all findings in order, each as soon as it is known."""
    # Imports take seconds, so these probes run at once, but not while the ranks' time is measured.
    with contextlib.suppress(OSError):  # the line of a probe that can't start reports it
        for part in ("torch", "jupyterlab", *([] if machine.without_mpi else ["library"])):
            machine.probe(part)
        if machine.has_launcher:  # on a rank, this probe would wait for the other ranks
            machine.probe("all_reduce")
    for name in CHECKS:
        if not (machine.without_mpi and name in OF_PROCESSES):
            yield find(name, machine)


def as_text(finding: Finding) -> str:
    """Return the wrapped line of a finding, and the lines of its remedy."""
    head = f"{SYMBOLS[finding.status]} {finding.name}".ljust(INDENT)
    words = textwrap.TextWrapper(
        WIDTH, head, " " * INDENT, break_long_words=False, break_on_hyphens=False
    )
    fact = words.fill(finding.fact)
    # Remedies keep their lines, so that you can copy a command.
    remedy = finding.remedy.replace("\n", "\n    ")
    return f"{fact}\n  → {remedy}" if remedy else fact


def main(as_json: bool = False, timeout: float = 60.0) -> int:
    """Print the report; return 0 if the labs run, and 1 otherwise."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` ends the probes
    started = time.monotonic()
    findings = []
    try:
        with Machine(timeout) as machine:
            for finding in examine(machine):
                findings.append(finding)
                if not as_json:
                    _say(as_text(finding))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `… doctor | head`; without this, Python complains at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    seconds = round(time.monotonic() - started, 1)
    errors = sum(finding.status == "error" for finding in findings)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not errors, "seconds": seconds, "checks": checks}, indent=1))
    else:
        result = f"repair {errors} of them first" if errors else "the labs run"
        _say(f"{len(findings)} checks in {seconds:.1f} s: {result}")
    return 1 if errors else 0


def _say(text: str) -> None:
    """Print a line at once, in ASCII if the terminal can't show more."""
    try:
        "".join(IN_ASCII).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        for symbol, letters in IN_ASCII.items():
            text = text.replace(symbol, letters)
        text = text.encode("ascii", "replace").decode()
    print(text, flush=True)
