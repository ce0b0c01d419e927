"""From a submission to the notebook that is run: the reference with the student's answers.

Of the student's file only the source of answer cells is used (found by grade_id, by cell id, and as
a second chance by what the cell defines), and of own cells for the ranks. All else is the
reference's.

Own cells are helper functions, imports, an answer that is spread over several cells. They are run
on the ranks beside the answers, where the student has put them. A cell for the kernel alone stays
out: there the checks run. So do cells that the lab has put there itself; of those that a student
has changed the imports are taken.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ijson
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from utils.course.notebook import lab
from utils.course.release import is_solution

from .reference import MOST_SOURCE, Reference, body, bound, defined, imports, on_ranks, parsed
from .submissions import MB, MOST_FILE

SKIP = "nbval-skip"
#: Begins the ids of the student's own cells.
OWN = "own-"
MOST_OWN_CELLS = 100
#: JSON of 200 MB takes gigabytes: what is larger is read without outputs, and no more than this.
MOST_NOTEBOOK = 25 * MB
#: Cells of a notebook; twenty labs together have fewer.
MOST_CELLS = 10_000
#: Parts of a cell that no answer is in, and the depth from which on nothing is an answer.
HEAVY = {"outputs", "attachments"}
DEEPEST = 12
#: What a student can do about a file that can't be read, whatever is wrong with it.
AGAIN = "Open your notebook in JupyterLab, clear its outputs, save it, and hand it in again."

#: Type, id, grade_id and source of a cell.
Cell = dict[str, str]


@dataclass
class Answer:
    """A student's answer.

    Attributes:
        source: Its text; None where there is none.
        changed: Whether it is more than the stub.
        elsewhere: Whether what it has to define is defined in another cell of the student's.
    """

    source: str | None
    changed: bool = False
    elsewhere: bool = False

    @property
    def given(self) -> bool:
        """Return whether the student has answered at all."""
        return self.changed or self.elsewhere


@dataclass(frozen=True)
class OwnCell:
    """A student's own cell for the ranks. after: the reference's cell behind which it is run."""

    after: str
    source: str


@dataclass(frozen=True)
class View:
    """Which notebook is made of a submission.

    Attributes:
        blanked: Tasks whose answers are stubs.
        given: Tasks with the reference's answers.
        own: Whether the student's own cells are in it.
        only: The task whose checks are run, and nothing behind them; None for all.
    """

    blanked: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    own: bool = True
    only: str | None = None


WHOLE = View()


@dataclass
class Assembled:
    """A submission taken apart.

    Attributes:
        remarks: What an instructor should know of how it was read.
        error: Why the file could not be read from the disk: nobody knows what was in it.
    """

    reference: Reference
    answers: dict[str, Answer] = field(default_factory=dict)
    own: list[OwnCell] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def is_begun(self) -> bool:
        """Return whether there is any answer."""
        return any(answer.given for answer in self.answers.values())

    @property
    def is_spread(self) -> bool:
        """Return whether there is more than the answers in their cells."""
        return bool(self.own) or any(answer.elsewhere for answer in self.answers.values())

    def notebook(self, view: View = WHOLE) -> NotebookNode:
        """Return the notebook to run.

        Only check cells have outputs to compare with, so that nbval compares nothing else.
        """
        nb = copy.deepcopy(self.reference.nb)
        if view.only is not None:
            last = list(self.reference.tasks[view.only].checks)[-1]
            nb.cells = nb.cells[: [cell.id for cell in nb.cells].index(last) + 1]
        for cell in nb.cells:
            if is_solution(cell):
                cell.source = self._source(cell, view)
            if cell.cell_type == "code":
                self._prepare(cell, view.only)
        if view.own:
            nb.cells = list(self._with_own(nb.cells))
        return nb

    def _prepare(self, cell: NotebookNode, only: str | None) -> None:
        """Leave a code cell's output if it is a check's, and skip what is not to be run."""
        is_check = lab(cell).get("check")
        if not is_check:
            cell.outputs = []
            cell.execution_count = None
        unwanted = is_check and only not in (None, lab(cell)["task"])
        if unwanted or cell.id in self.reference.drawings:
            cell.metadata.tags = [*cell.metadata.get("tags", []), SKIP]

    def sources(self) -> list[str]:
        """Return what the student has written for the ranks: own cells, and changed answers."""
        changed = [body(answer.source or "") for answer in self.answers.values() if answer.changed]
        return [*(cell.source for cell in self.own), *changed]

    def code_of(self, grade_id: str) -> str:
        """Return a student's answer, from wherever it stands."""
        answer = self.answers[grade_id]
        mine = "" if answer.elsewhere else body(answer.source or "")
        missing = defined(body(self.reference.answer_cells[grade_id].source)) - defined(mine)
        others = [source for source in self.sources() if missing & defined(source)]
        return "\n\n".join([mine, *others] if mine.strip() else others)

    def _with_own(self, cells: list[NotebookNode]) -> Iterator[NotebookNode]:
        for cell in cells:
            yield cell
            for number, own_cell in enumerate(self.own):
                if own_cell.after == cell.id:
                    about = {"id": f"{OWN}{number}", "metadata": {"own": True}}
                    yield new_code_cell(f"%%px\n{own_cell.source}", **about)

    def _source(self, cell: NotebookNode, view: View) -> str:
        answer = self.answers[cell.metadata.nbgrader.grade_id]
        task = lab(cell)["task"]
        if task in view.given or task in view.blanked:
            source = str(cell.source) if task in view.given else self.reference.stubs[cell.id]
            # Later answers may rest on what this one has imported.
            return _with_imports(answer.source or "", source)
        if view.own and answer.elsewhere:
            return str(cell.source).split("\n", 1)[0]
        if answer.source is None:
            return self.reference.stubs[cell.id]
        return forced(answer.source, cell)


def _with_imports(answer: str, source: str) -> str:
    """Return a cell for the ranks behind the imports of an answer."""
    first, _, rest = source.partition("\n")
    added = imports(answer) if first.startswith("%%") else ""
    return f"{first}\n{added}\n{rest}" if added else source


def forced(source: str, cell: NotebookNode) -> str:
    """Return the student's text under the reference's first line: it can't leave the ranks.

    Nor come to the kernel as well, where the checks run: without `--local`.
    """
    first = cell.source.split("\n", 1)[0].replace(" --local", "")
    return f"{first}\n{body(source)}" if first.startswith("%%") else source


def assemble(reference: Reference, path: Path) -> Assembled:
    """Take the answers out of a file, whatever it is; never raises for its content."""
    assembled = Assembled(reference)
    cells = None
    try:
        cells = read_cells(path, assembled.remarks)
    except OSError as error:
        assembled.error = f"{path.name} can't be read: {error.strerror or error}"
    except UnreadableError as error:
        assembled.error = str(error)
        assembled.remarks.append(AGAIN)
    finder = Finder(reference, cells or [])
    for grade_id, cell in reference.answer_cells.items():
        answer, remark = finder.answer(grade_id, cell)
        assembled.answers[grade_id] = answer
        if remark and cells is not None:
            assembled.remarks.append(f"Task {lab(cell)['task']}: {remark}")
    _look_elsewhere(assembled, cells or [])
    return assembled


def _look_elsewhere(assembled: Assembled, cells: list[Cell]) -> None:
    """Take in the student's own cells; which of them, or of other answers, define an answer?"""
    added, remarks = _own_cells(assembled, cells)
    added = [cell for cell in added if cell.source.strip()]
    assembled.own = added[:MOST_OWN_CELLS]
    if added:
        count = len(assembled.own)
        assembled.remarks.append(f"run beside the answers: {count} cells of the student's own")
    assembled.remarks += remarks
    if len(added) > MOST_OWN_CELLS:
        most = f"the first {MOST_OWN_CELLS} of {len(added)}"
        assembled.remarks.append(f"only {most} cells of the student's own were run")
    known = set().union(*map(defined, assembled.sources()))
    for grade_id, answer in assembled.answers.items():
        names = defined(body(assembled.reference.answer_cells[grade_id].source))
        answer.elsewhere = not answer.changed and bool(names) and names <= known


# --- the cells of a file, whatever it is ----------------------------------------------------------


class UnreadableError(Exception):
    """A file that can't be read as JSON, or is larger than is read: nobody knows what is in it."""


def read_cells(path: Path, remarks: list[str]) -> list[Cell] | None:
    """Return the cells of a file, or None with a remark on why there are none.

    Raises:
        OSError, UnreadableError: The file can't be read, which says nothing of what is in it: an
            upload that broke off is no wrong answer.
    """
    content = _content(path, remarks)
    try:
        if "cells" in content:
            cells = content["cells"]
        else:  # format 3, which came before 2015, and of converters since
            cells = [cell for sheet in content["worksheets"] for cell in sheet["cells"]]
    except (KeyError, TypeError):
        remarks.append(f"{path.name}: not a notebook: it has no cells")
        return None
    if not isinstance(cells, list):
        remarks.append(f"{path.name}: not a notebook: its cells are no list")
        return None
    if len(cells) > MOST_CELLS:
        remarks.append(f"only the first {MOST_CELLS} of {len(cells)} cells were read")
    return [_cell(cell) for cell in cells[:MOST_CELLS] if isinstance(cell, dict)]


def _content(path: Path, remarks: list[str]) -> Any:
    """Return what is in a file of JSON, without the outputs if it is large or deeply nested."""
    size = path.stat().st_size
    if size > MOST_FILE:
        raise UnreadableError(
            f"{path.name}: it has {size // MB} MB or more, over the limit of {MOST_FILE // MB} MB: "
            "clear its outputs"
        )
    if not size:
        raise UnreadableError(f"{path.name}: can't be read: the file is empty")
    try:
        with contextlib.suppress(RecursionError):  # ijson reads what is nested deeper
            if size <= MOST_NOTEBOOK:
                return json.loads(path.read_bytes())
        return _without_outputs(path, remarks)
    except ijson.JSONError as error:
        first_line = str(error).partition("\n")[0]
        why = f"({first_line[:120]}); clearing its outputs may help"
    except (ValueError, RecursionError) as error:
        why = f"({str(error)[:120] or type(error).__name__})"
    raise UnreadableError(f"{path.name}: can't be read, it is cut short or damaged {why}")


def _cell(cell: dict[str, Any]) -> Cell:
    """Return type, id, grade_id and source of a cell, whatever they were."""
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    values = {
        "type": cell.get("cell_type"),
        "id": cell.get("id"),
        "grade_id": _part(_part(cell.get("metadata"), "nbgrader"), "grade_id"),
        "source": source,
    }
    texts = {key: value if isinstance(value, str) else "" for key, value in values.items()}
    # JSON can hold half characters; Python reads no zeros.
    printable = texts["source"].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return texts | {"source": printable.replace("\r\n", "\n")}


def _part(data: Any, key: str) -> Any:
    return data.get(key) if isinstance(data, dict) else None


def _without_outputs(path: Path, remarks: list[str]) -> Any:
    """Return a notebook's content without what its cells have printed and drawn.

    Of more than `MOST_NOTEBOOK` the first part is read, and a remark says so.
    """
    builder = ijson.ObjectBuilder()
    size = 0
    with path.open("rb") as file:
        for event, value in _light(ijson.basic_parse(file, use_float=True)):
            size += len(value) + 8 if isinstance(value, str) else 8
            if size > MOST_NOTEBOOK:
                megabytes = MOST_NOTEBOOK // MB
                remarks.append(f"only its first {megabytes} MB without outputs were read")
                break
            builder.event(event, value)
    return builder.value


def _light(events: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield ijson's events with null for heavy parts of cells, and for what is nested too deep."""
    depth = 0
    left_out_at = None
    for event, value in events:
        depth -= event.startswith("end_")
        if left_out_at is None and event.startswith("start_") and depth >= DEEPEST:
            left_out_at = depth
            yield "null", None
        depth += event.startswith("start_")
        if left_out_at is not None:
            left_out_at = None if depth == left_out_at else left_out_at
            continue
        yield event, value
        if event == "map_key" and value in HEAVY and depth >= 3:
            left_out_at = depth
            yield "null", None


# --- which cell is the answer --------------------------------------------------------------------


class Finder:
    """Finds a lab's answers among a student's cells."""

    def __init__(self, reference: Reference, cells: list[Cell]):
        self.reference = reference
        self.cells = cells
        #: Cells that may be a lost answer: they are not known to be something else.
        self.lost = [
            cell
            for cell in cells
            if cell["id"] not in reference.ids and cell["grade_id"] not in reference.answer_cells
        ]

    def answer(self, grade_id: str, cell: NotebookNode) -> tuple[Answer, str]:
        """Return a student's answer, and a remark where it is not plainly there."""
        source, remark = self._find(grade_id, cell)
        if source is None:
            return Answer(None), remark or "there is no such cell"
        if len(source) > MOST_SOURCE:
            return Answer(None), f"its answer has {len(source)} characters: not looked at"
        changed = body(source).strip() != body(self.reference.stubs[cell.id]).strip()
        return Answer(source, changed), remark

    def _find(self, grade_id: str, cell: NotebookNode) -> tuple[str | None, str]:
        """Return the answer's source, or None; and a remark where it was not plain."""
        for mark, value in (("grade_id", grade_id), ("id", cell.id)):
            marked = [one for one in self.cells if one[mark] == value]
            sources = [one["source"] for one in marked if one["type"] == cell.cell_type]
            if sources:
                return choose(sources, self.reference.stubs[cell.id])
        if cell.cell_type == "code":
            return self._by_definition(cell)
        return self._by_neighbour(cell)

    def _by_definition(self, cell: NotebookNode) -> tuple[str | None, str]:
        """Find a cell that defines what the answer must define, or that names the task."""
        sources, how = self._candidates(cell)
        if not sources:
            return None, ""
        source, remark = choose(sources, self.reference.stubs[cell.id])
        more = f" ({remark})" if remark else ""
        return source, f"its cell has lost its id; found {how}{more}"

    def _candidates(self, cell: NotebookNode) -> tuple[list[str], str]:
        """Return the sources that may be a lost answer, and by what they are found."""
        lost = [other["source"] for other in self.lost if other["type"] == "code"]
        if names := defined(body(cell.source)):
            sources = [source for source in lost if names <= defined(body(source))]
            if sources:
                return sources, "by what it defines"
        marker = re.compile(rf"\bTask {re.escape(lab(cell)['task'])}\b(?!\.\d)", re.IGNORECASE)
        return list(filter(marker.search, lost)), "by the task's number in it"

    def _by_neighbour(self, cell: NotebookNode) -> tuple[str | None, str]:
        """Find a written answer: the unknown text below the question."""
        cells = self.reference.nb.cells
        before = cells[cells.index(cell) - 1]
        for question, below in zip(self.cells, self.cells[1:], strict=False):
            asked = question["id"] == before.id or question["source"] == before.source
            if asked and below in self.lost and below["type"] == "markdown":
                return below["source"], "its cell has lost its id; found below the question"
        return None, ""


def choose(sources: list[str], stub: str) -> tuple[str, str]:
    """Choose the answer among several copies: the parts of a split cell together, else the last.

    The last, because it is what holds when a notebook is run from top to bottom.
    """
    nothing = {"", body(stub).strip()}
    changed = [source for source in sources if body(source).strip() not in nothing]
    if len(changed) <= 1:
        return (changed or sources)[0], ""
    count = len(changed)
    names = [bound(body(source)) for source in changed]
    overlap = len(set[str]().union(*names)) < sum(map(len, names))
    parts = "\n".join(map(body, changed))
    if not overlap and len(set(changed)) == count and parsed(parts):
        return parts, f"there are {count} cells with its mark; taken together"
    return changed[-1], f"there are {count} cells with its mark; the last one was taken"


# --- the student's own cells ---------------------------------------------------------------------


def _own_cells(assembled: Assembled, cells: list[Cell]) -> tuple[list[OwnCell], list[str]]:
    """Return what a student has added, in order, and remarks on what of it is not run."""
    answers = [answer.source for answer in assembled.answers.values() if answer.source is not None]
    added = []
    remarks = []
    for source, at, after in _beside_the_answers(cells, assembled.reference):
        if len(source) > MOST_SOURCE:
            remarks.append(f"a cell of the student's own has {len(source)} characters: not run")
        elif at is not None:
            added.append(OwnCell(at.id, "" if source == body(at.source) else imports(source)))
        elif not any(source.strip() in answer for answer in answers):
            added.append(OwnCell(_behind_its_answer(assembled.reference, source, after), source))
    return added, remarks


def _beside_the_answers(
    cells: list[Cell], reference: Reference
) -> Iterator[tuple[str, NotebookNode | None, str]]:
    """Yield the sources of a student's cells for the ranks, without the answers.

    With each comes the lab's cell that it is, if any, and the id of the last one of the lab's.
    """
    marks = _marks(reference)
    after = next(cell.id for cell in reference.nb.cells if cell.cell_type == "code")
    for cell in cells:
        keys = [(name, cell[name]) for name in ("grade_id", "id", "source")]
        at = next((marks[key] for key in keys if key in marks), None)
        after = at.id if at else after
        if _is_own(cell, at):
            yield body(cell["source"]), at, after


def _marks(reference: Reference) -> dict[tuple[str, str], NotebookNode]:
    """Return the lab's cell by each mark of a student's: its grade_id, its id, its source."""
    cells = reference.nb.cells
    marks = {("source", cell.source): cell for cell in cells if cell.source.strip()}
    marks |= {("id", cell.id): cell for cell in cells}
    return marks | {("grade_id", key): cell for key, cell in reference.answer_cells.items()}


def _is_own(cell: Cell, at: NotebookNode | None) -> bool:
    """Return whether the ranks run a cell that is not an answer. at: the lab's cell, if any."""
    if cell["type"] != "code" or not on_ranks(cell["source"]):
        return False
    return at is None or not ("task" in lab(at) and is_solution(at))


def _behind_its_answer(reference: Reference, source: str, after: str) -> str:
    """Return where a cell is run: at the latest behind an answer that it defines anew.

    A student who goes back to an answer further down has run the check again afterwards.
    """
    order = [cell.id for cell in reference.nb.cells]
    names = defined(source)
    for cell in reference.answer_cells.values():
        if cell.cell_type == "code" and names & defined(body(cell.source)):
            return min(after, str(cell.id), key=order.index)
    return after
