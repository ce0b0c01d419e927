"""Did a cell end as it must?"""

from __future__ import annotations

import re

from tests.mpi.fault_tools import Shown

from .cells import RESTART, WORKS, Cell


def problem(cell: Cell, shown: Shown, n: int) -> str:
    """What is wrong with how a cell ended; empty where nothing is."""
    if not shown.failed():
        return _problem_without_error(cell, shown, n)
    if not cell.says:
        return "it failed"
    if not re.search(cell.says, squeezed(shown)):
        return f"not said: {cell.says}"
    if len(shown.errors) > 1:
        return f"{len(shown.errors)} errors instead of one"
    if advises_restart(shown) and not cell.restart:
        return "it advises to restart the ranks, which survive this"
    if cell.restart and cell.kind != RESTART and not advises_restart(shown):
        return "it does not advise to restart the ranks"
    return ""


def _problem_without_error(cell: Cell, shown: Shown, n: int) -> str:
    if cell.says and not cell.may_pass:
        return f"nothing was said; expected: {cell.says}"
    if cell.prints and not re.search(cell.prints, squeezed(shown)):
        return f"not printed: {cell.prints}"
    if WORKS in cell.text and shown.streams.count("works on") != n:
        return "it ended well, and some ranks have not printed"
    return ""


def advises_restart(shown: Shown) -> bool:
    return "ranks.restart()" in shown.everything()


def squeezed(shown: Shown) -> str:
    """All of it in one line: the notebook wraps long ones."""
    return re.sub(r"\s+", " ", "\n".join([*(text for _, text in shown.errors), shown.streams]))


def beginning(shown: Shown) -> str:
    """What kind of error it was: its first words, without numbers."""
    kind, text = shown.errors[0]
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    named = [line for line in lines if re.match(r"\w+(Error|Interrupt)\b", line)]
    first = named[0] if named and lines[0] != named[0] and len(lines) > 3 else lines[0]
    return f"{kind}: {re.sub(r'[0-9]+', '#', first)[:60]}"
