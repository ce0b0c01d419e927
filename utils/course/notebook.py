"""Read and write notebooks, so that the same content always has the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import nbformat.v4
from nbformat import NotebookNode

from . import CourseError
from .files import write_text

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = ROOT / "solutions"
LABS = ROOT / "labs"

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python"}

#: Notebook metadata that stays; the rest depends on the program that last opened the notebook.
KEPT_METADATA = ("lab", "title")
#: Cell metadata that depends on when and where a cell was run or looked at.
VOLATILE_METADATA = ("ExecuteTime", "collapsed", "execution", "scrolled", "trusted")

#: A lab's file name: 01_c10d.ipynb. Other files, such as a student's Untitled.ipynb, don't count.
LAB_NAME = re.compile(r"\d\d_\w+\.ipynb")

#: The tag of cells that grading runs although no answer needs the names that they bind.
NEEDED = "needed"
#: The tag of checks that need a folder for the files of all ranks, which grading otherwise refuses.
SHARED_FOLDER = "shared-folder"


class NotebookError(CourseError, ValueError):
    """A notebook that can't be used; the message says which cell and what to do."""


def notebooks(folder: Path) -> list[Path]:
    """Return the labs' notebooks in a folder, by number."""
    return sorted(path for path in folder.glob("*.ipynb") if LAB_NAME.fullmatch(path.name))


def is_named(name: str, path: Path) -> bool:
    """Return whether a name means this notebook: 01, 01_c10d or 01_c10d.ipynb."""
    return name in (path.stem, path.name, path.stem.partition("_")[0])


def read(path: Path) -> NotebookNode:
    """Read a notebook unchanged, without the repairs that nbformat would make.

    nbformat would invent an id for a cell without one, a new id at each reading, so such a notebook
    is an error here.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except ValueError as error:
        raise NotebookError(f"{path.name} is not a notebook ({error})") from error
    version = (content.get("nbformat"), content.get("nbformat_minor"))
    if version != (4, 5):
        raise NotebookError(
            f"{path.name} has the format {version[0]}.{version[1]}, but only 4.5 has ids of cells. "
            "Open the notebook in JupyterLab and save it"
        )
    nb: NotebookNode = nbformat.v4.reads(text)
    _require_ids(nb, path.name)
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        raise NotebookError(f"{path.name} is not a valid notebook: {error.message}") from error
    return nb


def _require_ids(nb: NotebookNode, name: str) -> None:
    seen: dict[str, int] = {}
    for index, cell in enumerate(nb.cells):
        if "id" not in cell:
            raise NotebookError(
                f'{name}: cell number {index} has no id. Add "id": "a-readable-name" to it'
            )
        if cell.id in seen:
            raise NotebookError(
                f"{name}: cells number {seen[cell.id]} and {index} share the id '{cell.id}'. "
                "Rename one of them"
            )
        seen[cell.id] = index


def dumps(nb: NotebookNode) -> str:
    """Return the notebook as text: format 4.5, sorted keys, indent 1, one newline at the end."""
    nb.nbformat = 4
    nb.nbformat_minor = 5
    nbformat.validate(nb)
    return str(nbformat.writes(nb)).rstrip("\n") + "\n"


def write(nb: NotebookNode, path: Path) -> None:
    """Write a notebook in one step, so that a reader sees the old file or the new file."""
    write_text(path, dumps(nb))


def normalise(nb: NotebookNode) -> NotebookNode:
    """Remove, in place, everything that differs between two executions of the same notebook."""
    kept = {key: nb.metadata[key] for key in KEPT_METADATA if key in nb.metadata}
    nb.metadata = nbformat.from_dict(kept | {"kernelspec": KERNELSPEC, "language_info": LANGUAGE})
    for cell in nb.cells:
        for key in VOLATILE_METADATA:
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict(descriptions(output.metadata))
    return nb


def descriptions(metadata: NotebookNode) -> dict[str, Any]:
    """Return the part of an output's metadata that stays: the descriptions of pictures."""
    return {
        kind: {"alt": about["alt"]}
        for kind, about in metadata.items()
        if isinstance(about, dict) and "alt" in about
    }


def cell_problems(
    nb: NotebookNode, *rules: Callable[[NotebookNode], Iterable[str]]
) -> Iterator[str]:
    """Yield the problems that rules find in each cell, with the cell's id."""
    for cell in nb.cells:
        for rule in rules:
            yield from (f"cell '{cell.id}': {text}" for text in rule(cell))


def lab(cell: NotebookNode) -> dict[str, Any]:
    """Return the cell's metadata under ``lab``: task, title, points, check."""
    return dict(cell.metadata.get("lab", {}))


def is_solution(cell: NotebookNode) -> bool:
    """Return whether students fill in this cell."""
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


def tasks_checked(nb: NotebookNode) -> list[str]:
    """Return the tasks that have a check cell, in order and without duplicates."""
    tasks = [str(lab(cell)["task"]) for cell in nb.cells if lab(cell).get("check") is True]
    return list(dict.fromkeys(tasks))
