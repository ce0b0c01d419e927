"""Assembles the notebook that grading runs: the reference notebook with the student's answers.

The student's file contributes only the source of answer cells and of added cells for the ranks.
Answer cells are found by grade_id, then by cell id, then by what the cell defines. Everything that
remains comes from the reference.

Own cells hold helper functions, imports, or an answer that is spread over several cells. The ranks
run them in the student's order, next to the answers. Cells that only the kernel runs are left out,
because the checks run there. A cell of the lab isn't copied, but imports added to it are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from utils.course.cell_names import not_needed
from utils.course.notebook import is_solution, lab

from .notebook_file import Cell, UnreadableError, read_cells
from .reference import MOST_SOURCE, Reference, body, bound, defined, imports, on_ranks, parsed

SKIP = "nbval-skip"
#: The ids of the student's own cells begin with this.
OWN = "own-"
MOST_OWN_CELLS = 100
LOST_ID = "The answer's cell has lost its id and was found"
NEW_TYPE = "The answer's cell has another type now,"
#: A line of Markdown before or after code.
FENCE = re.compile(r"^```.*\n?", re.MULTILINE)


@dataclass
class Answer:
    """A student's answer.

    Attributes:
        source: Its text; None if there is no such cell.
        changed: Whether it differs from the stub.
        elsewhere: Whether another cell of the student defines what this answer must define.
    """

    source: str | None
    changed: bool = False
    elsewhere: bool = False

    @property
    def given(self) -> bool:
        """Return whether the student has answered at all."""
        return self.changed or self.elsewhere


#: The verdict of a check that counts tries, and so many tries that a person should hear of them.
SOLVED = re.compile(r"✓ passed.{1,20}Task ([\d.]+)<.*\btry (\d{1,6})\b", re.DOTALL)
MANY = 9


@dataclass(frozen=True)
class OwnCell:
    """A student's own cell for the ranks. after: the reference's cell after which it runs."""

    after: str
    source: str


@dataclass(frozen=True)
class View:
    """A view says which answers, stubs and own cells the notebook of a run holds.

    Attributes:
        blanked: Tasks whose answers are replaced by stubs.
        given: Tasks whose answers come from the reference.
        own: Whether the notebook includes the student's own cells.
        only: The task whose checks run, with nothing after them; None for all tasks.
    """

    blanked: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    own: bool = True
    only: str | None = None


WHOLE = View()


@dataclass
class Assembled:
    """The answers and own cells of a submission, from which its notebooks are assembled.

    Attributes:
        remarks: What an instructor should know about how the file was read.
        error: Why the file could not be read, so that nobody knows what it contains; "" if it was.
    """

    reference: Reference
    answers: dict[str, Answer] = field(default_factory=dict)
    own: list[OwnCell] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def is_begun(self) -> bool:
        """Return whether the submission has any answer."""
        return any(answer.given for answer in self.answers.values())

    @property
    def is_spread(self) -> bool:
        """Return whether any of the student's code is outside the answer cells."""
        return bool(self.own) or any(answer.elsewhere for answer in self.answers.values())

    def notebook(self, view: View = WHOLE) -> NotebookNode:
        """Return the notebook to run.

        Only check cells keep their outputs, so that nbval compares nothing else.
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
        nb.cells = self._needed(nb.cells, view.only)
        return nb

    def _prepare(self, cell: NotebookNode, only: str | None) -> None:
        """Clear the output of a code cell that isn't a check, and tag checks that must not run."""
        is_check = lab(cell).get("check")
        if not is_check:
            cell.outputs = []
            cell.execution_count = None
        elif only not in (None, lab(cell)["task"]):
            cell.metadata.tags = [*cell.metadata.get("tags", []), SKIP]

    def _needed(self, cells: list[NotebookNode], only: str | None) -> list[NotebookNode]:
        """Return the cells without those that no answer needs: the lab's examples and pictures.

        For one task, the student's own cells run only if the answer needs their names.
        """
        reference = self.reference
        kept = {cell.id for cell in cells if reference.must_run(cell)}
        kept |= {cell.id for cell in cells if only is None and cell.id.startswith(OWN)}
        # A cell that shows an error may end a rank, and the next cell starts fresh ranks.
        left_out = reference.deliberate - kept
        cells = [cell for cell in cells if cell.id not in left_out]
        left_out = not_needed(cells, kept, self._looked_up(only))
        return [cell for cell in cells if cell.id not in left_out]

    def _looked_up(self, only: str | None) -> set[str]:
        """Return the names that checks look up, and those that the answers to one task bind."""
        reference = self.reference
        names = set(reference.looked_up or ())
        for grade_id in reference.tasks[only].answers if only else ():
            names |= bound(body(reference.answer_cells[grade_id].source))
        return names

    def sources(self) -> list[str]:
        """Return the student's code for the ranks: own cells and changed answers."""
        changed = [body(answer.source or "") for answer in self.answers.values() if answer.changed]
        return [*(cell.source for cell in self.own), *changed]

    def code_of(self, grade_id: str) -> str:
        """Return a student's answer, from whichever cells define it."""
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
            # Later answers may need what this answer imports.
            return _with_imports(answer.source or "", source)
        if view.own and answer.elsewhere:
            return str(cell.source).split("\n", 1)[0]
        if answer.source is None:
            return self.reference.stubs[cell.id]
        return forced(answer.source, cell)


def _with_imports(answer: str, source: str) -> str:
    """Return the source of a cell for the ranks, with the imports of an answer before it."""
    first, _, rest = source.partition("\n")
    added = imports(answer) if first.startswith("%%") else ""
    return f"{first}\n{added}\n{rest}" if added else source


def forced(source: str, cell: NotebookNode) -> str:
    """Return the student's text under the reference's first line, so that it stays on the ranks.

    Without `--local` it doesn't run in the kernel, where the checks run.
    """
    first = cell.source.split("\n", 1)[0].replace(" --local", "")
    return f"{first}\n{body(source)}" if first.startswith("%%") else source


def assemble(reference: Reference, path: Path) -> Assembled:
    """Return the answers and own cells in a file; no content of the file raises an error."""
    assembled = Assembled(reference)
    cells = None
    try:
        cells = read_cells(path, assembled.remarks)
    except OSError as error:
        assembled.error = f"{path.name} can't be read: {error.strerror or error}"
    except UnreadableError as error:
        assembled.error = str(error)
        assembled.remarks.append(error.advice)
    finder = Finder(reference, cells or [])
    for grade_id, cell in reference.answer_cells.items():
        answer, remark = finder.answer(grade_id, cell)
        assembled.answers[grade_id] = answer
        if remark and cells is not None:
            assembled.remarks.append(f"Task {lab(cell)['task']}: {remark}")
    _look_elsewhere(assembled, cells or [])
    assembled.remarks += _tries(cells or [])
    return assembled


def _tries(cells: list[Cell]) -> list[str]:
    """Return a remark on tasks that took many tries. Only the student's outputs tell them."""
    found = filter(None, (SOLVED.search(cell["shown"]) for cell in cells))
    many = [f"{one[1]} ({one[2]})" for one in found if int(one[2]) > MANY]
    return [f"The submission shows many tries at tasks {', '.join(many)}."] if many else []


def _look_elsewhere(assembled: Assembled, cells: list[Cell]) -> None:
    """Add the student's own cells, and mark the answers that other cells define."""
    added, remarks = _own_cells(assembled, cells)
    added = [cell for cell in added if cell.source.strip()]
    assembled.own = added[:MOST_OWN_CELLS]
    assembled.remarks += remarks
    if len(added) > MOST_OWN_CELLS:
        most = f"the first {MOST_OWN_CELLS} of {len(added)}"
        assembled.remarks.append(f"Only {most} of the student's own cells were run.")
    known = set().union(*map(defined, assembled.sources()))
    for grade_id, answer in assembled.answers.items():
        names = defined(body(assembled.reference.answer_cells[grade_id].source))
        answer.elsewhere = not answer.changed and bool(names) and names <= known


# --- finding the answers -------------------------------------------------------------------------


class Finder:
    """Finds a lab's answers among a student's cells."""

    def __init__(self, reference: Reference, cells: list[Cell]):
        self.reference = reference
        self.cells = cells
        #: Cells that may be a lost answer, because no mark says that they are something different.
        self.lost = [
            cell
            for cell in cells
            if cell["id"] not in reference.ids and cell["grade_id"] not in reference.answer_cells
        ]

    def answer(self, grade_id: str, cell: NotebookNode) -> tuple[Answer, str]:
        """Return a student's answer, and a remark if its cell was missing, changed or doubled."""
        source, remark = self._find(grade_id, cell)
        if source is None:
            return Answer(None), remark or "The cell of the answer is missing."
        if len(source) > MOST_SOURCE:
            return Answer(None), f"The answer has {len(source)} characters and was not graded."
        changed = body(source).strip() != body(self.reference.stubs[cell.id]).strip()
        return Answer(source, changed), remark

    def _find(self, grade_id: str, cell: NotebookNode) -> tuple[str | None, str]:
        """Return the answer's source, or None, and a remark on how it was found ("" if usual)."""
        changed: list[Cell] = []
        for mark, value in (("grade_id", grade_id), ("id", cell.id)):
            marked = [one for one in self.cells if one[mark] == value]
            sources = [one["source"] for one in marked if one["type"] == cell.cell_type]
            if sources:
                return choose(sources, self.reference.stubs[cell.id])
            changed = changed or marked
        found = self._by_definition(cell) if cell.cell_type == "code" else self._by_neighbour(cell)
        return self._with_new_type(cell, changed, found) if changed else found

    def _with_new_type(
        self, cell: NotebookNode, changed: list[Cell], found: tuple[str | None, str]
    ) -> tuple[str | None, str]:
        """Return the answer in cells whose type was changed, unless what was found is better."""
        source, _ = choose([FENCE.sub("", one["source"]) for one in changed], "")
        if found[0] is None or defined(body(cell.source)) <= defined(body(source)):
            return source, f"{NEW_TYPE} '{changed[0]['type']}'. Its text counts as the answer."
        return found

    def _by_definition(self, cell: NotebookNode) -> tuple[str | None, str]:
        """Return a cell that defines what the answer must define or names the task; a remark."""
        sources, how = self._candidates(cell)
        if not sources:
            return None, ""
        source, remark = choose(sources, self.reference.stubs[cell.id])
        more = f" {remark}" if remark else ""
        return source, f"{LOST_ID} {how}.{more}"

    def _candidates(self, cell: NotebookNode) -> tuple[list[str], str]:
        """Return the sources that may be a lost answer, and how they were found."""
        code = [one for one in self.lost if one["type"] == "code" or on_ranks(one["source"])]
        lost = [one["source"] for one in code]
        if names := defined(body(cell.source)):
            sources = [source for source in lost if names <= defined(body(source))]
            if sources:
                return sources, "by the names that it defines"
        marker = re.compile(rf"\bTask {re.escape(lab(cell)['task'])}\b(?!\.\d)", re.IGNORECASE)
        return list(filter(marker.search, lost)), "by the task's number"

    def _by_neighbour(self, cell: NotebookNode) -> tuple[str | None, str]:
        """Return a written answer, which is the unknown text below the question; and a remark."""
        cells = self.reference.nb.cells
        before = cells[cells.index(cell) - 1]
        for question, below in zip(self.cells, self.cells[1:], strict=False):
            asked = question["id"] == before.id or question["source"] == before.source
            if asked and below in self.lost and below["type"] != "code":
                return below["source"], f"{LOST_ID} below the question."
        return None, ""


def choose(sources: list[str], stub: str) -> tuple[str, str]:
    """Return the answer among several copies, and a remark if there are several.

    Parts of a split cell are joined; otherwise the last copy counts, as in a run of the notebook.
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
        return parts, f"There are {count} cells for this answer, and they were joined."
    return changed[-1], f"There are {count} cells for this answer, and the last one counts."


# --- the student's own cells ---------------------------------------------------------------------


def _own_cells(assembled: Assembled, cells: list[Cell]) -> tuple[list[OwnCell], list[str]]:
    """Return the cells that a student has added, in order, and remarks on cells that don't run."""
    answers = [answer.source for answer in assembled.answers.values() if answer.source is not None]
    added = []
    remarks = []
    for source, at, after in _beside_the_answers(cells, assembled.reference):
        if len(source) > MOST_SOURCE:
            remarks.append(f"A cell of the student has {len(source)} characters and was not run.")
        elif at is not None:
            added.append(OwnCell(at.id, "" if source == body(at.source) else imports(source)))
        elif not any(f"\n{source.strip()}\n" in f"\n{answer}\n" for answer in answers):
            added.append(OwnCell(_behind_its_answer(assembled.reference, source, after), source))
    return added, remarks


def _beside_the_answers(
    cells: list[Cell], reference: Reference
) -> Iterator[tuple[str, NotebookNode | None, str]]:
    """Yield the student's cells for the ranks that aren't answers.

    With each source come the lab's cell that it is, if any, and the id of the lab's last cell.
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
    """Return the lab's cells by the marks of a student's cell: grade_id, id or source."""
    cells = reference.nb.cells
    marks = {("source", cell.source): cell for cell in cells if cell.source.strip()}
    marks |= {("id", cell.id): cell for cell in cells}
    return marks | {("grade_id", key): cell for key, cell in reference.answer_cells.items()}


def _is_own(cell: Cell, at: NotebookNode | None) -> bool:
    """Return whether the ranks run this cell and it isn't an answer. at: the lab's cell, if any."""
    if cell["type"] != "code" or not on_ranks(cell["source"]):
        return False
    return at is None or not ("task" in lab(at) and is_solution(at))


def _behind_its_answer(reference: Reference, source: str, after: str) -> str:
    """Return the id of the cell after which an own cell runs.

    A cell that redefines an answer runs with it, because the student has run the check again.
    """
    order = [cell.id for cell in reference.nb.cells]
    names = defined(source)
    for cell in reference.answer_cells.values():
        if cell.cell_type == "code" and names & defined(body(cell.source)):
            return min(after, str(cell.id), key=order.index)
    return after
