"""What a check finds, and `@check`, which makes a finding of whatever a check returns or raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from utils.doctor.patient import Machine
from utils.doctor.probes import Probe
from utils.doctor.words import install_command, one_line


@dataclass(frozen=True)
class Finding:
    """What one check found. status: ok, warning (the labs run) or error (they don't)."""

    status: str
    name: str
    fact: str
    remedy: str = ""


#: A check, which asks a machine.
Check = Callable[[Machine], Finding]


def ok(fact: str) -> Finding:
    """All is well; `check` adds the name."""
    return Finding("ok", "", fact)


def warning(fact: str, remedy: str = "") -> Finding:
    """The labs run, but someone should know."""
    return Finding("warning", "", fact, remedy)


def error(fact: str, remedy: str) -> Finding:
    """The labs don't run, or not all of them."""
    return Finding("error", "", fact, remedy)


def not_tested(because: str) -> Finding:
    """The cause has a line of its own, which is the one to read."""
    return warning(f"not tested: {because}")


class SettledError(Exception):
    """Raised in a check by what it asks, where that settles the finding."""

    def __init__(self, finding: Finding):
        super().__init__(finding.fact)
        self.finding = finding


def check(name: str) -> Callable[[Check], Check]:
    """Make a check of a function: its finding gets this name, and what it raises is a finding."""

    def with_name(function: Check) -> Check:
        @functools.wraps(function)
        def named(machine: Machine) -> Finding:
            try:
                finding = function(machine)
            except SettledError as settled:
                finding = settled.finding
            except ModuleNotFoundError as missing:
                finding = not_tested(f"needs {missing.name}")
            except Exception as failure:
                finding = error(one_line(failure), "this is new: please report it with this line")
            return replace(finding, name=name)

        return named

    return with_name


def facts_of(probe: Probe, part: str, extra: str = "") -> dict[str, Any]:
    """What a probe told about a part. Without that, the finding is: install it, by this extra."""
    facts = probe.facts(part)
    if "error" in facts:
        raise SettledError(error(facts["error"], install_command(extra)))
    return facts


def needs_pytorch(machine: Machine) -> dict[str, Any]:
    """What the probe told about PyTorch. Without that, the finding is: not tested."""
    facts = machine.pytorch.facts("torch")
    if "error" in facts:
        raise SettledError(not_tested("needs PyTorch"))
    return facts
