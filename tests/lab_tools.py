"""What the tests of labs share: a lab's cells, and answers run on real ranks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import nbformat

from utils.checks.task import CheckFailed

ROOT = Path(__file__).resolve().parents[1]


def answers(name: str, folder: str = "solutions") -> dict[str, str]:
    """Code of a lab's answer cells by ``grade_id``, without the ``%%px`` line."""
    notebook = nbformat.read(ROOT / folder / name, as_version=4)
    return {
        cell.metadata.nbgrader.grade_id: cell.source.split("\n", 1)[1]
        for cell in notebook.cells
        if cell.cell_type == "code" and "nbgrader" in cell.metadata
    }


def verdict(check, ranks) -> tuple[bool, str]:
    """Whether the check passed, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            check(ranks)
        except CheckFailed:
            return False, printed.getvalue()
    return True, printed.getvalue()


def checks_of(module) -> dict[str, object]:
    """The checks of a module of ``utils.checks`` by task number."""
    found = [value for value in vars(module).values() if hasattr(value, "points")]
    return {check.number: check for check in found}
