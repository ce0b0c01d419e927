"""Reading and writing notebooks so that the same content is always the same bytes."""

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

#: Notebook metadata that stays; the rest depends on who opened it last.
KEPT_METADATA = ("lab", "title")
#: Cell metadata that depends on when and where a cell was run or looked at.
VOLATILE_METADATA = ("ExecuteTime", "collapsed", "execution", "scrolled", "trusted")

#: A lab's file name: 01_c10d.ipynb. Other files (a student's Untitled.ipynb) are nobody's business.
LAB_NAME = re.compile(r"\d\d_\w+\.ipynb")

#: The tag of cells that only draw: a grading run leaves them out.
ONLY_DRAWS = "only-draws"


class NotebookError(CourseError, ValueError):
    """A notebook that can't be used; the message says which cell and what to do."""


def notebooks(folder: Path) -> list[Path]:
    """Return the labs' notebooks in a folder, by number."""
    return sorted(path for path in folder.glob("*.ipynb") if LAB_NAME.fullmatch(path.name))


def is_named(name: str, path: Path) -> bool:
    """Is a lab's notebook meant by this: 01, 01_c10d, 01_c10d.ipynb?"""
    return name in (path.stem, path.name, path.stem.partition("_")[0])


def read(path: Path) -> NotebookNode:
    """Read a notebook as it is, without the repairs that nbformat would make.

    nbformat invents ids for cells that have none, another one at each reading: refused here.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except ValueError as error:
        raise NotebookError(f"{path.name}: not a notebook ({error})") from error
    version = (content.get("nbformat"), content.get("nbformat_minor"))
    if version != (4, 5):
        raise NotebookError(
            f"{path.name}: format {version[0]}.{version[1]}, but 4.5 is needed (cells with ids): "
            "open it in JupyterLab and save it"
        )
    nb: NotebookNode = nbformat.v4.reads(text)
    _require_ids(nb, path.name)
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        raise NotebookError(f"{path.name}: not a valid notebook: {error.message}") from error
    return nb


def _require_ids(nb: NotebookNode, name: str) -> None:
    seen: dict[str, int] = {}
    for index, cell in enumerate(nb.cells):
        if "id" not in cell:
            raise NotebookError(
                f'{name}: cell number {index} has no id: add "id": "a-readable-name" to it'
            )
        if cell.id in seen:
            raise NotebookError(
                f"{name}: cells number {seen[cell.id]} and {index} share the id '{cell.id}': "
                "rename one"
            )
        seen[cell.id] = index


def dumps(nb: NotebookNode) -> str:
    """Return the notebook as text: format 4.5, sorted keys, indent 1, one newline at the end."""
    nb.nbformat = 4
    nb.nbformat_minor = 5
    nbformat.validate(nb)
    return str(nbformat.writes(nb)).rstrip("\n") + "\n"


def write(nb: NotebookNode, path: Path) -> None:
    """Write a notebook in one step: a reader sees the old file or the new one."""
    write_text(path, dumps(nb))


def normalise(nb: NotebookNode) -> NotebookNode:
    """Take out, in place, what differs between two executions of the same notebook."""
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
    """Return what stays of an output's metadata: the words for those who don't see a picture."""
    return {
        kind: {"alt": about["alt"]}
        for kind, about in metadata.items()
        if isinstance(about, dict) and "alt" in about
    }


def cell_problems(
    nb: NotebookNode, *rules: Callable[[NotebookNode], Iterable[str]]
) -> Iterator[str]:
    """Yield what rules find in each cell, with the cell's id."""
    for cell in nb.cells:
        for rule in rules:
            yield from (f"cell '{cell.id}': {text}" for text in rule(cell))


def lab(cell: NotebookNode) -> dict[str, Any]:
    """Return the cell's metadata under ``lab``: task, title, points, check."""
    return dict(cell.metadata.get("lab", {}))


def tasks_checked(nb: NotebookNode) -> list[str]:
    """Return the tasks that have a check cell, in order, each once."""
    tasks = [str(lab(cell)["task"]) for cell in nb.cells if lab(cell).get("check") is True]
    return list(dict.fromkeys(tasks))
