"""An executed copy of a solution, with SVGs and with the seconds that each cell took.

The solution itself, whose outputs nbval compares with, stays as it is. A copy is kept and used
again until the solution or ``utils`` changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from datetime import datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from utils.figures import forms

from ..execute import require_kernel, run_cells, verdicts
from ..fingerprints import folder_key, key
from ..notebook import ROOT, NotebookError, read
from ..notes import kind

#: Where copies are kept.
RUNS = ROOT / "build" / "runs"
#: Goes up when copies are made in another way than before.
VERSION = 4
#: Parts of utils that change no output of a lab.
BESIDE_THE_POINT = {
    *(
        "course",
        "grading",
        "bench",
        "doctor",
        "labelled",
        "jupyterlab",
        "__main__.py",
        "install.py",
    ),
}


class RunError(NotebookError):
    """A solution that does not run to its end with all checks passed."""


def executed(path: Path, kept: Path = RUNS, timeout: float = 300) -> NotebookNode:
    """The copy of a solution: from ``kept``, or executed now (up to two minutes on two cores).

    timeout: seconds for each cell.
    Raises RunError where a cell fails or a check does not pass.
    """
    nb = read(path)
    mark = _mark(nb)
    copy = kept / path.name
    if not (copy.is_file() and nbformat.read(copy, 4).metadata.get("mark") == mark):
        _run(path, deepcopy(nb), copy, mark, timeout)
    return _with_outputs(nb, nbformat.read(copy, 4))


def _run(path: Path, nb: NotebookNode, copy: Path, mark: str, timeout: float) -> None:
    """Execute a solution, in place, and keep it with its mark."""
    require_kernel()
    error = run_cells(nb, path.parent, timeout, timing=True, variables={forms.VARIABLE: "1"})
    _, failed, _ = verdicts(nb)
    if error or failed:
        why = error or f"{failed} checks did not pass"
        raise RunError(f"{path.name}: {why}\nTry it again, or look: make run ARGS={path.stem}")
    nb.metadata["mark"] = mark
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, copy)


def executed_ones(paths: list[Path]) -> Iterator[tuple[Path, NotebookNode]]:
    """The copies of solutions, one after the other; one that does not run is told, and left out."""
    for path in paths:
        try:
            yield path, executed(path)
        except RunError as error:
            print(error, file=sys.stderr, flush=True)


def _with_outputs(nb: NotebookNode, ran: NotebookNode) -> NotebookNode:
    """A notebook with what a run of its cells gave; all else in it is that of today."""
    cells = {cell.id: cell for cell in ran.cells}
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = cells[cell.id].outputs
            cell.metadata["execution"] = cells[cell.id].metadata.get("execution", {})
    return nb


def seconds(cell: NotebookNode) -> float:
    """How long an executed cell ran; 0 for text."""
    times = cell.metadata.get("execution", {})
    begin, end = times.get("iopub.execute_input"), times.get("shell.execute_reply")
    if not (begin and end):
        return 0.0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def _mark(nb: NotebookNode) -> str:
    parts = [one for one in (ROOT / "utils").iterdir() if one.name not in BESIDE_THE_POINT]
    folders = sorted(one for one in parts if one.is_dir())
    files = sorted(one for one in parts if one.suffix == ".py")
    cells = [f"{cell.cell_type} {cell.id} {cell.source}" for cell in nb.cells if not kind(cell)]
    return key(folder_key(folders), *(one.read_bytes() for one in files), *cells, version=VERSION)
