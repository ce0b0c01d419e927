"""What the tests of labs share: a lab's cells, and ranks without processes for pure functions."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any

from utils import cluster
from utils.checks.task import CheckFailed

ROOT = Path(__file__).resolve().parents[2]
#: Labs whose notebooks need the most processor time. Only `make test-all` runs them, while `make
#: test` still tries their checks and answers.
LONG = {
    *("05_scaling", "08_elastic_averaging", "11_hybrid", "12_federated", "13_faults"),
    *("14_capstone", "18_the_clinic"),
}


@functools.cache
def answers(name: str, folder: str = "solutions") -> dict[str, str]:
    """Code of a lab's answer cells by ``grade_id``, without the ``%%px`` line."""
    return {
        cell["metadata"]["nbgrader"]["grade_id"]: "".join(cell["source"]).split("\n", 1)[1]
        for cell in _cells(folder, name)
        if cell["cell_type"] == "code" and "nbgrader" in cell["metadata"]
    }


@functools.cache
def _cells(folder: str, name: str) -> list[dict[str, Any]]:
    """A notebook's cells. This is much faster than nbformat, which also validates them."""
    cells: list[dict[str, Any]] = json.loads((ROOT / folder / name).read_text("utf-8"))["cells"]
    return cells


def source_of(name: str, cell_id: str) -> str:
    """Code of a solution's cell, without the ``%%px`` line."""
    source = next(cell["source"] for cell in _cells("solutions", name) if cell["id"] == cell_id)
    return "".join(source).removeprefix("%%px\n")


def verdict(check, ranks) -> tuple[bool, str]:
    """Whether the check passed, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            check(ranks)
        except CheckFailed:
            return False, printed.getvalue()
    return True, printed.getvalue()


def run_cell(ranks: Any, code: str) -> None:
    """Run a cell on every rank; raises what it raises there."""
    if not isinstance(ranks, cluster.Ranks):
        ranks.run(code)
    else:
        ranks.view.execute(code, silent=True).get()


def checks_of(module) -> dict[str, object]:
    """The checks of a lab's module `checks` by task number."""
    found = [value for value in vars(module).values() if hasattr(value, "points")]
    return {check.number: check for check in found}
