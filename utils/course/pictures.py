"""Pictures of a lab for slides, from an executed copy of its solution.

The solution itself stays unchanged, because nbval compares with its outputs. A copy is kept and
used again until the solution or ``utils`` changes.
"""

from __future__ import annotations

import base64
import html
import io
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from PIL import Image, PngImagePlugin

from utils.figures import forms

from .execute import require_kernel, run_cells, verdicts
from .files import folder_key, key
from .notebook import ROOT, NotebookError, read
from .notes import kind

#: The folder for copies.
RUNS = ROOT / "build" / "runs"
#: Seconds for each cell.
TIMEOUT = 300
#: Increase this number if copies are made in a new way.
VERSION = 4
#: Parts of utils that don't change the outputs of labs.
BESIDE_THE_POINT = {"course", "grading", "doctor", "__main__.py"}


class RunError(NotebookError):
    """A solution that does not run to its end with all checks passed."""


def executed_copies(paths: list[Path]) -> Iterator[tuple[Path, NotebookNode]]:
    """Yield the copies of solutions; print the error of a solution that fails, and skip it."""
    for path in paths:
        try:
            yield path, executed(path)
        except RunError as error:
            print(error, file=sys.stderr, flush=True)


def executed(path: Path, folder: Path = RUNS) -> NotebookNode:
    """Return the copy of a solution: from `folder`, or executed now (up to two minutes).

    Raises:
        RunError: A cell fails or a check does not pass.
    """
    nb = read(path)
    mark = _mark(nb)
    copy = folder / path.name
    if not (copy.is_file() and nbformat.read(copy, 4).metadata.get("mark") == mark):
        _run(path, deepcopy(nb), copy, mark)
    # Outputs and times come from the copy, and everything else from the present solution.
    cells = {cell.id: cell for cell in nbformat.read(copy, 4).cells}
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = cells[cell.id].outputs
            cell.metadata["execution"] = cells[cell.id].metadata.get("execution", {})
    return nb


def _run(path: Path, nb: NotebookNode, copy: Path, mark: str) -> None:
    """Execute a solution in place, and store the copy with its mark."""
    require_kernel()
    error = run_cells(nb, path.parent, TIMEOUT, timing=True, variables={forms.VARIABLE: "1"})
    _, failed, _ = verdicts(nb)
    if error or failed:
        why = error or f"{failed} checks did not pass"
        raise RunError(f"{path.name}: {why}\nTry again, or run: make run ARGS={path.stem}")
    nb.metadata["mark"] = mark
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, copy)


def _mark(nb: NotebookNode) -> str:
    """Return the fingerprint of everything on which the outputs depend."""
    parts = [path for path in (ROOT / "utils").iterdir() if path.name not in BESIDE_THE_POINT]
    folders = sorted(path for path in parts if path.is_dir())
    files = [path.read_bytes() for path in sorted(parts) if path.suffix == ".py"]
    cells = [f"{cell.cell_type} {cell.id} {cell.source}" for cell in nb.cells if not kind(cell)]
    return key(folder_key(folders), *files, *cells, version=VERSION)


def seconds(cell: NotebookNode) -> float:
    """Return for how many seconds an executed cell ran; 0 for text."""
    times = cell.metadata.get("execution", {})
    begin = times.get("iopub.execute_input")
    end = times.get("shell.execute_reply")
    if not (begin and end):
        return 0.0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


@dataclass(frozen=True)
class Picture:
    """A picture of an executed notebook.

    Attributes:
        name: Name of its files without an ending: the id of the cell, with ``-2`` for its second
            picture.
        section: The heading above the picture.
        words: Its alternative text.
    """

    name: str
    section: str
    words: str
    svg: str
    png: bytes


def pictures_of(nb: NotebookNode) -> Iterator[Picture]:
    """Yield the pictures of a notebook that `executed` gave, in order.

    Raises:
        NotebookError: A picture has no words, or no SVG.
    """
    section = ""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            section = next(iter(re.findall(r"^##? (.+)$", cell.source, re.MULTILINE)), section)
        shown = [
            output for output in cell.get("outputs", []) if forms.PNG in output.get("data", {})
        ]
        for place, output in enumerate(shown, start=1):
            name = cell.id if place == 1 else f"{cell.id}-{place}"
            words = output.metadata.get(forms.PNG, {}).get("alt", "")
            if not words or forms.SVG not in output.data:
                lacking = "SVG" if words else "alternative text"
                raise NotebookError(f"cell '{cell.id}': a picture has no {lacking}")
            png = base64.b64decode(output.data[forms.PNG])
            yield Picture(name, section, words, output.data[forms.SVG], png)


def save(pictures: list[Picture], folder: Path) -> None:
    """Write ``NAME.svg``, ``NAME.png``, and ``NAME.txt`` with the words, for each picture.

    The picture files contain the words, too: as a title of the SVG, which browsers and office
    programs read, and as the description of the PNG.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        svg = _titled(picture.svg, picture.words)
        (folder / f"{picture.name}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{picture.name}.png").write_bytes(_described(picture.png, picture.words))
        (folder / f"{picture.name}.txt").write_text(picture.words + "\n", encoding="utf-8")


def _titled(svg: str, words: str) -> str:
    """Return an SVG with the words as its title."""
    before, _, rest = svg.partition("<svg")
    attributes, _, content = rest.partition(">")
    start = f'<svg role="img" aria-label="{html.escape(words, quote=True)}"{attributes}>'
    return f"{before}{start}\n <title>{html.escape(words)}</title>{content}"


def _described(png: bytes, words: str) -> bytes:
    """Return a PNG with the words in its text field "Description"."""
    file = io.BytesIO()
    text = PngImagePlugin.PngInfo()
    text.add_itxt("Description", words)
    with Image.open(io.BytesIO(png)) as image:
        image.save(file, "png", pnginfo=text, dpi=image.info.get("dpi"))
    return file.getvalue()
