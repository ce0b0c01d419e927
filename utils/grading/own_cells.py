"""A student's own cells: helper functions, imports, an answer that is spread over several cells.

They are run on the ranks beside the answers, where the student has put them. A cell for the kernel
alone stays out: there the checks run. So do cells that the lab has put there itself; of those that
a student has changed the imports are taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nbformat import NotebookNode

from utils.course.notebook import lab

from .cells import Cell
from .reference import Reference
from .source import MOST_SOURCE, body, defined, imports

#: A page full of experiments is no harm; a thousand cells are no homework.
MOST_CELLS = 100


@dataclass(frozen=True)
class OwnCell:
    """A cell for the ranks. after: the id of the reference's cell behind which it is run."""

    after: str
    source: str


def own_cells(
    reference: Reference, cells: Iterable[Cell], answers: Collection[str]
) -> tuple[list[OwnCell], list[str]]:
    """What a student has added, in order; and remarks on what of it is not run.

    Args:
        cells: of the submission: type, id, grade_id, source.
        answers: sources that are taken for answers already.
    """
    known = {cell.id: cell for cell in reference.nb.cells}
    by_source = {cell.source: cell.id for cell in reference.nb.cells if cell.source.strip()}
    by_grade_id = {grade_id: cell.id for grade_id, cell in reference.answer_cells.items()}
    first = next(cell.id for cell in reference.nb.cells if cell.cell_type == "code")
    after, found, remarks = first, [], []
    for cell in cells:
        at = by_grade_id.get(cell["grade_id"]) or known.get(cell["id"], {}).get("id")
        at = at or by_source.get(cell["source"])
        if at is not None:
            after = at
        if cell["type"] != "code" or not is_on_the_ranks(cell["source"]):
            continue
        source = body(cell["source"])
        if len(source) > MOST_SOURCE:
            if at is None or _is_the_labs(known[at]):
                remarks.append(f"a cell of the student's own has {len(source)} characters: not run")
            continue
        if at is None and not any(source.strip() in answer for answer in answers):
            found.append(OwnCell(_behind_its_answer(reference, source, after), source))
        elif at is not None and _is_the_labs(known[at]) and source != body(known[at].source):
            found.append(OwnCell(at, imports(source)))
    found = [one for one in found if one.source.strip()]
    if len(found) > MOST_CELLS:
        remarks.append(
            f"only the first {MOST_CELLS} of {len(found)} cells of the student's own were run"
        )
    return found[:MOST_CELLS], remarks


def is_on_the_ranks(source: str) -> bool:
    """Whether a cell is run by all ranks; it is graded there, also where the kernel ran it, too."""
    first = source.lstrip().split("\n", 1)[0].split()
    return first in (["%%px"], ["%%px", "--local"])


def _is_the_labs(cell: NotebookNode) -> bool:
    return "task" not in lab(cell) or not cell.metadata.get("nbgrader", {}).get("solution")


def _behind_its_answer(reference: Reference, source: str, after: str) -> str:
    """Where a cell is run: one that defines an answer anew, at the latest behind that answer.

    A student who goes back to an answer further down has run the check again afterwards.
    """
    order = [cell.id for cell in reference.nb.cells]
    names = defined(source)
    for cell in reference.answer_cells.values():
        if cell.cell_type == "code" and names & defined(body(cell.source)):
            return min(after, str(cell.id), key=order.index)
    return after
