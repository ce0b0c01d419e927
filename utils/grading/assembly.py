"""From a submission to the notebook that is run: the reference with the student's answers.

Of the student's file only the source of answer cells is used (found by grade_id, by cell id, and as
a second chance by what the cell defines), and of own cells for the ranks (:mod:`.own_cells`). All
else is the reference's.
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

from .cells import Cell, UnreadableError, read_cells
from .own_cells import OwnCell, own_cells
from .reference import Reference
from .source import MOST_SOURCE, body, bound, defined, imports, parses

SKIP = "nbval-skip"
#: Begins the ids of the student's own cells.
OWN = "own-"


@dataclass
class Answer:
    """A student's answer.

    source: None where there is none. changed: is it more than the stub? elsewhere: what it has to
    define is defined in another cell of the student's.
    """

    source: str | None
    changed: bool = False
    elsewhere: bool = False

    @property
    def given(self) -> bool:
        """Whether the student has answered at all."""
        return self.changed or self.elsewhere


@dataclass(frozen=True)
class View:
    """Which notebook is made of a submission.

    blanked: tasks whose answers are stubs. given: tasks with the reference's answers. own: with the
    student's own cells. only: the task whose checks are run, and nothing behind them; None: all.
    """

    blanked: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    own: bool = True
    only: str | None = None


WHOLE = View()


@dataclass
class Assembled:
    """A submission taken apart. remarks: what an instructor should know of how it was read.

    error: why the file could not be read from the disk: nobody knows what was in it.
    """

    reference: Reference
    answers: dict[str, Answer] = field(default_factory=dict)
    own: list[OwnCell] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def is_spread(self) -> bool:
        """Whether there is more than the answers in their cells."""
        return bool(self.own) or any(answer.elsewhere for answer in self.answers.values())

    def notebook(self, view: View = WHOLE) -> NotebookNode:
        """The notebook to run.

        Only check cells have outputs to compare with, so that nbval compares nothing else.
        """
        nb = copy.deepcopy(self.reference.nb)
        if view.only is not None:
            last = list(self.reference.task(view.only).checks)[-1]
            nb.cells = nb.cells[: [cell.id for cell in nb.cells].index(last) + 1]
        for cell in nb.cells:
            if cell.metadata.get("nbgrader", {}).get("solution"):
                cell.source = self._source(cell, view)
            if cell.cell_type != "code":
                continue
            check = lab(cell).get("check")
            if not check:
                cell.outputs, cell.execution_count = [], None
            if cell.id in self.reference.drawings or (check and not _is_wanted(cell, view)):
                cell.metadata.tags = [*cell.metadata.get("tags", []), SKIP]
        if view.own:
            nb.cells = list(self._with_own(nb.cells))
        return nb

    def code_of(self, grade_id: str) -> str:
        """A student's answer, from wherever it stands."""
        answer, cell = self.answers[grade_id], self.reference.answer_cells[grade_id]
        mine = "" if answer.elsewhere else body(answer.source or "")
        names = defined(body(cell.source)) - defined(mine)
        others = [body(one.source or "") for one in self.answers.values() if one.changed]
        sources = [*(own.source for own in self.own), *others] if names else []
        found = [source for source in sources if names & defined(source)]
        return "\n\n".join([mine, *found] if mine.strip() else found)

    def _with_own(self, cells: list[NotebookNode]) -> Iterator[NotebookNode]:
        for cell in cells:
            yield cell
            for number, own in enumerate(self.own):
                if own.after == cell.id:
                    about = {"id": f"{OWN}{number}", "metadata": {"own": True}}
                    yield new_code_cell(f"%%px\n{own.source}", **about)

    def _source(self, cell: NotebookNode, view: View) -> str:
        answer = self.answers[cell.metadata.nbgrader.grade_id]
        task, code = lab(cell)["task"], cell.cell_type == "code"
        if task in view.given or task in view.blanked:
            source = str(cell.source) if task in view.given else self.reference.stubs[cell.id]
            # Later answers may rest on what this one has imported.
            return _with_imports(answer.source or "", source) if code else source
        if view.own and answer.elsewhere:
            return str(cell.source).split("\n", 1)[0]
        if answer.source is None:
            return self.reference.stubs[cell.id]
        return forced(answer.source, cell) if code else answer.source


def _is_wanted(check: NotebookNode, view: View) -> bool:
    return view.only is None or lab(check)["task"] == view.only


def _with_imports(of: str, source: str) -> str:
    """A cell for the ranks behind the imports of another one."""
    first, _, rest = source.partition("\n")
    added = imports(of) if first.startswith("%%") else ""
    return f"{first}\n{added}\n{rest}" if added else source


#: What a student can do about a file that can't be read, whatever is wrong with it.
AGAIN = "Open your notebook in JupyterLab, clear its outputs, save it, and hand it in again."


def assemble(reference: Reference, path: Path) -> Assembled:
    """Take the answers out of a file, whatever it is; never raises for its content."""
    done = Assembled(reference)
    cells = None
    try:
        cells = read_cells(path, done.remarks)
    except OSError as error:
        done.error = f"{path.name} can't be read: {error.strerror or error}"
    except UnreadableError as error:
        done.error = str(error)
        done.remarks.append(AGAIN)
    finder = Finder(reference, cells)
    for grade_id, cell in reference.answer_cells.items():
        source, remark = finder.find(grade_id, cell)
        if source is not None and len(source) > MOST_SOURCE:
            remark = f"its answer has {len(source)} characters: not looked at"
            source = None
        if source is None and not remark:
            remark = "there is no such cell"
        stub = reference.stubs[cell.id]
        changed = source is not None and body(source).strip() != body(stub).strip()
        done.answers[grade_id] = Answer(source, changed)
        if remark and cells is not None:
            done.remarks.append(f"Task {lab(cell)['task']}: {remark}")
    _look_elsewhere(done, cells or [])
    return done


def _look_elsewhere(done: Assembled, cells: list[Cell]) -> None:
    """Take in the student's own cells; which of them, or of other answers, define an answer?"""
    sources = [answer.source for answer in done.answers.values() if answer.source is not None]
    done.own, remarks = own_cells(done.reference, cells, sources)
    if done.own:
        done.remarks.append(f"run beside the answers: {len(done.own)} cells of the student's own")
    done.remarks += remarks
    changed = [body(answer.source or "") for answer in done.answers.values() if answer.changed]
    found = set().union(*map(defined, [*changed, *(own.source for own in done.own)]))
    for grade_id, cell in done.reference.answer_cells.items():
        names = defined(body(cell.source))
        answer = done.answers[grade_id]
        answer.elsewhere = not answer.changed and bool(names) and names <= found


# --- which cell is the answer --------------------------------------------------------------------


class Finder:
    """Finds a lab's answers among a student's cells."""

    def __init__(self, reference: Reference, cells: list[Cell] | None):
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
    if not overlap and len(set(changed)) == count and parses(parts):
        return parts, f"there are {count} cells with its mark; taken together"
    return changed[-1], f"there are {count} cells with its mark; the last one was taken"


def forced(source: str, cell: NotebookNode) -> str:
    """The student's text under the reference's first line: it can't leave the ranks.

    Nor come to the kernel as well, where the checks run: without `--local`.
    """
    first = cell.source.split("\n", 1)[0].replace(" --local", "")
    return f"{first}\n{body(source)}" if first.startswith("%%") else source
