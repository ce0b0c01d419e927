"""From a submission to the notebook that is run: the reference with the student's answers.

Of the student's file only the source of answer cells is used: found by grade_id, by cell id, and
as a second chance by what the cell defines. All else is the reference's.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from nbformat import NotebookNode

from ..notebook import lab
from .reference import Reference
from .submissions import MB, MOST_NOTEBOOK

#: Characters of one answer.
MOST_ANSWER = 200_000
SKIP = "nbval-skip"


@dataclass
class Answer:
    """A student's answer. source: None where there is none; changed: is it more than the stub?"""

    source: str | None
    changed: bool = False


@dataclass
class Assembled:
    """A submission taken apart. remarks: what an instructor should know of how it was read.

    error: why the file could not be read from the disk: nobody knows what was in it.
    """

    reference: Reference
    answers: dict[str, Answer] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    error: str = ""

    def notebook(
        self, blanked: set[str] = frozenset(), given: set[str] = frozenset()
    ) -> NotebookNode:
        """The notebook to run; answers of `blanked` tasks are stubs, of `given` the reference's.

        Only check cells have outputs to compare with, so that nbval compares nothing else.
        """
        nb = copy.deepcopy(self.reference.nb)
        for cell in nb.cells:
            solution = cell.metadata.get("nbgrader", {}).get("solution")
            if solution and lab(cell)["task"] not in given:
                cell.source = self._source(cell, blanked)
            if cell.cell_type != "code" or lab(cell).get("check"):
                continue
            cell.outputs, cell.execution_count = [], None
            if cell.id in self.reference.drawings:
                cell.metadata.tags = [*cell.metadata.get("tags", []), SKIP]
        return nb

    def _source(self, cell: NotebookNode, blanked: set[str]) -> str:
        answer = self.answers[cell.metadata.nbgrader.grade_id]
        if answer.source is None or lab(cell)["task"] in blanked:
            return self.reference.stubs[cell.id]
        return forced(answer.source, cell) if cell.cell_type == "code" else answer.source


def assemble(reference: Reference, path: Path) -> Assembled:
    """Take the answers out of a file, whatever it is; never raises for its content."""
    done = Assembled(reference)
    cells = None
    try:
        cells = read_cells(path, done.remarks)
    except OSError as error:
        done.error = f"{path.name} can't be read: {error.strerror or error}"
    finder = Finder(reference, cells)
    for grade_id, cell in reference.answer_cells.items():
        source, remark = finder.find(grade_id, cell)
        if source is not None and len(source) > MOST_ANSWER:
            source, remark = None, f"its answer has {len(source)} characters: not looked at"
        if source is None and not remark:
            remark = "there is no such cell"
        stub = reference.stubs[cell.id]
        changed = source is not None and body(source).strip() != body(stub).strip()
        done.answers[grade_id] = Answer(source, changed)
        if remark and cells is not None:
            done.remarks.append(f"Task {lab(cell)['task']}: {remark}")
    return done


def read_cells(path: Path, remarks: list[str]) -> list[dict] | None:
    """The cells of a file, or None with a remark on why there are none.

    Raises OSError where the file can't be read, which says nothing of what is in it.
    """
    try:
        size = path.stat().st_size
        if size > MOST_NOTEBOOK:
            limit = MOST_NOTEBOOK // MB
            remarks.append(f"{path.name}: {size // MB} MB or more, over the limit of {limit} MB")
            return None
        content = json.loads(path.read_bytes())
        cells = content["cells"]
    except (ValueError, RecursionError) as error:
        remarks.append(f"{path.name}: not a notebook: {str(error)[:120] or type(error).__name__}")
        return None
    except (KeyError, TypeError):
        remarks.append(f"{path.name}: not a notebook: it has no cells")
        return None
    if not isinstance(cells, list):
        remarks.append(f"{path.name}: not a notebook: its cells are no list")
        return None
    return [_cell(cell) for cell in cells if isinstance(cell, dict)]


def _cell(cell: dict) -> dict:
    """Type, id, grade_id and source of a cell, whatever they were."""
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    metadata = cell.get("metadata")
    graded = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    found = {
        "type": cell.get("cell_type"),
        "id": cell.get("id"),
        "grade_id": graded.get("grade_id") if isinstance(graded, dict) else None,
        "source": source,
    }
    texts = {key: value if isinstance(value, str) else "" for key, value in found.items()}
    return texts | {"source": _printable(texts["source"])}


def _printable(text: str) -> str:
    """Text that can be written as UTF-8 and run as Python: JSON can hold half characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd").replace("\r\n", "\n")


# --- which cell is the answer --------------------------------------------------------------------


class Finder:
    """Finds a lab's answers among a student's cells."""

    def __init__(self, reference: Reference, cells: list[dict] | None):
        self.reference = reference
        self.cells = cells or []
        known = reference.ids
        #: Cells that can't be taken for a lost answer: they are known to be something else.
        self.lost = [
            cell
            for cell in self.cells
            if cell["id"] not in known and cell["grade_id"] not in reference.answer_cells
        ]

    def find(self, grade_id: str, cell: NotebookNode) -> tuple[str | None, str]:
        """The answer's source, or None; and a remark where it was not plain."""
        stub = self.reference.stubs[cell.id]
        same = [one for one in self.cells if one["type"] == cell.cell_type]
        by_grade_id = [one for one in same if one["grade_id"] == grade_id]
        candidates = by_grade_id or [one for one in same if one["id"] == cell.id]
        if candidates:
            return choose([one["source"] for one in candidates], stub)
        if cell.cell_type == "code":
            return self._by_definition(cell)
        return self._by_neighbour(cell)

    def _by_definition(self, cell: NotebookNode) -> tuple[str | None, str]:
        """A cell that defines what the answer must define, or that names the task."""
        names, task = defined(body(cell.source)), lab(cell)["task"]
        marker = re.compile(rf"\bTask {re.escape(task)}\b(?!\.\d)", re.IGNORECASE)
        lost = [one for one in self.lost if one["type"] == "code"]
        for how, fits in (
            ("by what it defines", lambda one: names and names <= defined(body(one["source"]))),
            ("by the task's number in it", lambda one: marker.search(one["source"])),
        ):
            found = [one["source"] for one in lost if fits(one)]
            if found:
                source, remark = choose(found, self.reference.stubs[cell.id])
                return source, f"its cell has lost its id; found {how}" + (
                    f" ({remark})" if remark else ""
                )
        return None, ""

    def _by_neighbour(self, cell: NotebookNode) -> tuple[str | None, str]:
        """A written answer: the unknown text below the question."""
        cells = self.reference.nb.cells
        before = cells[cells.index(cell) - 1]
        for question, one in zip(self.cells, self.cells[1:], strict=False):
            asked = question["id"] == before.id or question["source"] == before.source
            if asked and one in self.lost and one["type"] == "markdown":
                return one["source"], "its cell has lost its id; found below the question"
        return None, ""


def choose(sources: list[str], stub: str) -> tuple[str, str]:
    """Of several copies the answer: the parts of a split cell together, else the last.

    The last, because it is what holds when a notebook is run from top to bottom.
    """
    changed = [one for one in sources if body(one).strip() not in {"", body(stub).strip()}]
    if len(changed) <= 1:
        return (changed or sources)[0], ""
    count = len(changed)
    names = [bound(body(one)) for one in changed]
    overlap = any(a & b for i, a in enumerate(names) for b in names[i + 1 :])
    parts = "\n".join(body(one) for one in changed)
    if not overlap and len(set(changed)) == count and _parses(parts):
        return parts, f"there are {count} cells with its mark; taken together"
    return changed[-1], f"there are {count} cells with its mark; the last one was taken"


def body(source: str) -> str:
    """A cell without the cell magics at its top."""
    lines = source.split("\n")
    while lines and (not lines[0].strip() or lines[0].lstrip().startswith("%%")):
        lines.pop(0)
    return "\n".join(lines)


def forced(source: str, cell: NotebookNode) -> str:
    """The student's text under the reference's first line: it can't leave the ranks.

    Nor come to the kernel as well, where the checks run: without `--local`.
    """
    first = cell.source.split("\n", 1)[0].replace(" --local", "")
    return f"{first}\n{body(source)}" if first.startswith("%%") else source


def defined(source: str) -> set[str]:
    """Functions and classes that a source defines at its top level."""
    try:
        tree = ast.parse(_without_magics(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^(?:def|class)\s+(\w+)", source, re.MULTILINE))
    return {node.name for node in tree.body if hasattr(node, "name")}


def bound(source: str) -> set[str]:
    """As `defined`, and the variables that are set at the top level."""
    try:
        body_of = ast.parse(_without_magics(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return defined(source)
    targets = [t for node in body_of if isinstance(node, ast.Assign) for t in node.targets]
    return defined(source) | {t.id for t in targets if isinstance(t, ast.Name)}


def _without_magics(source: str) -> str:
    return "\n".join("" if line.startswith(("!", "%")) else line for line in source.split("\n"))


def _parses(source: str) -> bool:
    try:
        ast.parse(_without_magics(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
