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

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from utils.course.notebook import lab
from utils.course.release import is_solution

from .cells import (
    MOST_SOURCE,
    Cell,
    UnreadableError,
    body,
    bound,
    defined,
    imports,
    parses,
    read_cells,
)
from .reference import Reference

SKIP = "nbval-skip"
#: Begins the ids of the student's own cells.
OWN = "own-"
#: By which of the lab's cells a student's is one of them, the surest first.
MARKS = ("grade_id", "id", "source")
#: A page full of experiments is no harm; a thousand cells are no homework.
MOST_OWN_CELLS = 100
#: What a student can do about a file that can't be read, whatever is wrong with it.
AGAIN = "Open your notebook in JupyterLab, clear its outputs, save it, and hand it in again."


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
            last = list(self.reference.task(view.only).checks)[-1]
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
        parts = [mine] if mine.strip() else []
        others = [source for source in self.sources() if missing & defined(source)]
        return "\n\n".join(parts + others)

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
        code = cell.cell_type == "code"
        if task in view.given or task in view.blanked:
            source = str(cell.source) if task in view.given else self.reference.stubs[cell.id]
            # Later answers may rest on what this one has imported.
            return _with_imports(answer.source or "", source) if code else source
        if view.own and answer.elsewhere:
            return str(cell.source).split("\n", 1)[0]
        if answer.source is None:
            return self.reference.stubs[cell.id]
        return forced(answer.source, cell) if code else answer.source


def _with_imports(answer: str, source: str) -> str:
    """A cell for the ranks behind the imports of an answer."""
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
        answer, remark = _answer(finder, grade_id, cell)
        assembled.answers[grade_id] = answer
        if remark and cells is not None:
            assembled.remarks.append(f"Task {lab(cell)['task']}: {remark}")
    _look_elsewhere(assembled, cells or [])
    return assembled


def _answer(finder: Finder, grade_id: str, cell: NotebookNode) -> tuple[Answer, str]:
    """Return a student's answer, and a remark where it is not plainly there."""
    source, remark = finder.find(grade_id, cell)
    if source is None:
        return Answer(None), remark or "there is no such cell"
    if len(source) > MOST_SOURCE:
        return Answer(None), f"its answer has {len(source)} characters: not looked at"
    changed = body(source).strip() != body(finder.reference.stubs[cell.id]).strip()
    return Answer(source, changed), remark


def _look_elsewhere(assembled: Assembled, cells: list[Cell]) -> None:
    """Take in the student's own cells; which of them, or of other answers, define an answer?"""
    answers = [answer.source for answer in assembled.answers.values()]
    sources = [source for source in answers if source is not None]
    remarks = _take_own_cells(assembled, cells, sources)
    if assembled.own:
        count = len(assembled.own)
        assembled.remarks.append(f"run beside the answers: {count} cells of the student's own")
    assembled.remarks += remarks
    known = set().union(*map(defined, assembled.sources()))
    for grade_id, cell in assembled.reference.answer_cells.items():
        names = defined(body(cell.source))
        answer = assembled.answers[grade_id]
        answer.elsewhere = not answer.changed and bool(names) and names <= known


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

    def find(self, grade_id: str, cell: NotebookNode) -> tuple[str | None, str]:
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
        """A cell that defines what the answer must define, or that names the task."""
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
        """A written answer: the unknown text below the question."""
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
    if not overlap and len(set(changed)) == count and parses(parts):
        return parts, f"there are {count} cells with its mark; taken together"
    return changed[-1], f"there are {count} cells with its mark; the last one was taken"


# --- the student's own cells ---------------------------------------------------------------------


def _take_own_cells(assembled: Assembled, cells: list[Cell], answers: list[str]) -> list[str]:
    """Take in what a student has added, in order; return remarks on what of it is not run.

    The sources in `answers` are taken for answers already.
    """
    reference = assembled.reference
    known = {cell.id: cell for cell in reference.nb.cells}
    after = next(cell.id for cell in known.values() if cell.cell_type == "code")
    marks = _marks(reference)
    added = []
    remarks = []
    for cell in cells:
        at = next((marks[name, cell[name]] for name in MARKS if (name, cell[name]) in marks), None)
        after = at or after
        if not _is_own(cell, known.get(at)):
            continue
        source = body(cell["source"])
        if len(source) > MOST_SOURCE:
            remarks.append(f"a cell of the student's own has {len(source)} characters: not run")
        elif at is not None:
            added.append(OwnCell(at, _changed_imports(source, known[at])))
        elif not any(source.strip() in answer for answer in answers):
            added.append(OwnCell(_behind_its_answer(reference, source, after), source))
    added = [cell for cell in added if cell.source.strip()]
    if len(added) > MOST_OWN_CELLS:
        remarks.append(
            f"only the first {MOST_OWN_CELLS} of {len(added)} cells of the student's own were run"
        )
    assembled.own = added[:MOST_OWN_CELLS]
    return remarks


def _marks(reference: Reference) -> dict[tuple[str, str], str]:
    """The id of the lab's cell by each mark of a student's: its grade_id, its id, its source."""
    cells = reference.nb.cells
    marks = {("source", cell.source): cell.id for cell in cells if cell.source.strip()}
    marks |= {("id", cell.id): cell.id for cell in cells}
    return marks | {("grade_id", key): cell.id for key, cell in reference.answer_cells.items()}


def is_on_the_ranks(source: str) -> bool:
    """Return whether all ranks run a cell; it is graded there, also where the kernel ran it."""
    first = source.lstrip().split("\n", 1)[0].split()
    return first in (["%%px"], ["%%px", "--local"])


def _is_own(cell: Cell, labs: NotebookNode | None) -> bool:
    """Return whether the ranks run a cell that is not an answer. labs: the lab's cell, if any."""
    if cell["type"] != "code" or not is_on_the_ranks(cell["source"]):
        return False
    return labs is None or not ("task" in lab(labs) and is_solution(labs))


def _changed_imports(source: str, cell: NotebookNode) -> str:
    """Return the imports of a cell of the lab's that a student has changed; "" if unchanged."""
    return "" if source == body(cell.source) else imports(source)


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
