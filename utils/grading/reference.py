"""The reference notebook: the tasks of a solution, their cells, and the verdicts of their checks.

The functions at the end read a cell's source: what it defines, binds and imports.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from utils.checks import verdict
from utils.course.cell_names import body as body
from utils.course.imports import closure, file_of
from utils.course.notebook import (
    NEEDED,
    SHARED_FOLDER,
    NotebookError,
    dumps,
    is_named,
    is_solution,
    lab,
    notebooks,
    read,
)
from utils.course.notes import rubric_cells
from utils.course.release import student_version, without_notes

#: Longer sources are not parsed, because parsing a megabyte needs a gigabyte of memory.
MOST_SOURCE = 200_000
#: What each rank's box holds, whatever the lab is.
RANK_SIDE = (
    *("utils.cluster.rank_side", "utils.cluster.boxes.rank_program", "utils.checks.probe"),
    *("utils.grading.confinement", "utils.data", "utils.models"),
)
DATA = (".json", ".toml", ".txt")
#: The folder that has the folder `utils`.
ROOT = Path(__file__).parents[2]
#: The line with which a notebook opens its lab's room.
OPENS_ROOM = r"^from utils\.labs(?:\.| import )(lab\d\d)"


class LabError(NotebookError):
    """Grading can't use a solution; the message names the cell and says what to do."""


@dataclass
class Task:
    """A task of a lab.

    Attributes:
        by_hand: Whether it is a written answer.
        answers: The grade_ids of its answers.
        checks: The points of each check cell, by the cell's id.
        personal: Whether later tasks differ from student to student by this answer, such as a name.
        model: Its solution as one text.
        stub: The stub in the student's notebook, as one text.
    """

    number: str
    title: str
    points: float
    by_hand: bool = False
    answers: list[str] = field(default_factory=list)
    checks: dict[str, float] = field(default_factory=dict)
    personal: bool = False
    model: str = ""
    stub: str = ""


class Reference:
    """The executed solution of a lab, against which submissions are graded."""

    def __init__(self, path: Path):
        self.path = path
        self.lab = path.stem
        nb = read(path)
        self.rubrics = {
            answer.metadata.nbgrader.grade_id: below.source
            for answer, below in rubric_cells(nb)
            if below
        }
        self.nb = without_notes(nb)
        student = student_version(self.nb, path.name)
        self.stubs: dict[str, str] = {cell.id: cell.source for cell in student.cells}
        #: The cells that students fill in, by grade_id, in order.
        self.answer_cells: dict[str, NotebookNode] = {
            cell.metadata.nbgrader.grade_id: cell for cell in self.nb.cells if is_solution(cell)
        }
        #: The ids and grade_ids that identify a notebook of this lab.
        self.ids: set[str] = {cell.id for cell in self.nb.cells} | set(self.answer_cells)
        #: Whether the ranks need a folder for files that all of them use.
        self.shares_folder = bool(self._tagged(SHARED_FOLDER))
        #: The ids of the cells whose error the lab shows on purpose.
        self.deliberate = self._tagged("raises-exception")
        #: The verdicts of each check if it passes (there is one), by cell id.
        self.expected: dict[str, list[dict[str, Any]]] = {
            cell.id: [one.data() for one in verdict.read(cell.outputs)]
            for cell in self.nb.cells
            if lab(cell).get("check")
        }
        self.tasks = self._find_tasks()
        self._require_verdicts()

    def must_run(self, cell: NotebookNode) -> bool:
        """Return whether a cell of the lab runs even if no other cell needs its names."""
        if self.looked_up is None:
            return cell.id in self.ids
        tags = cell.metadata.get("tags", [])
        return "task" in lab(cell) or "check" in lab(cell) or NEEDED in tags

    @cached_property
    def room(self) -> list[Path]:
        """Return the modules of the lab's room in `utils.labs`; [] for a lab without a room."""
        sources = [cell.source for cell in self.nb.cells if cell.cell_type == "code"]
        rooms = set(re.findall(OPENS_ROOM, "\n".join(sources), re.MULTILINE))
        folder = Path(__file__).parents[1] / "labs"
        return [file for room in rooms for file in sorted((folder / room).rglob("*.py"))]

    @cached_property
    def looked_up(self) -> set[str] | None:
        """Return the names that the lab's probes look up among the names of a rank's cells.

        None for a lab whose checks aren't in a room of `utils.labs`: nobody knows these names.
        """
        return set().union(*map(_looked_up, self.room)) if self.room else None

    @cached_property
    def rank_files(self) -> tuple[Path, ...] | None:
        """Return the files of `utils` that the ranks' boxes hold: for the lab's cells on ranks.

        None for a lab whose checks aren't in a room of `utils.labs`: nobody knows its two sides.
        """
        if not self.room:
            return None
        names = {_name_of(file) for file in self.room if file.name == "job.py"}
        cells = [cell.source for cell in self.nb.cells if cell.source.startswith("%%")]
        names |= {name for source in cells for name in _imported_of_ours(body(source))}
        found = set(closure([*RANK_SIDE, *names], ROOT).values())
        return tuple(sorted(found | {data for file in found for data in _data_beside(file)}))

    @cached_property
    def given(self) -> dict[str, dict[str, str]]:
        """Return by the module of each probe: name and file of all modules that it needs."""
        held = set(self.rank_files or ())
        return {
            probe: {
                name: str(file) for name, file in closure([probe], ROOT).items() if file not in held
            }
            for probe in map(_name_of, filter(_has_probes, self.room))
        }

    def _tagged(self, tag: str) -> set[str]:
        return {cell.id for cell in self.nb.cells if tag in cell.metadata.get("tags", [])}

    @cached_property
    def owners(self) -> dict[str, str | None]:
        """Return the task of each code cell: its own, or the task of the last answer above it."""
        task = None
        owners = {}
        for cell in self.nb.cells:
            if cell.cell_type == "code":
                task = lab(cell).get("task") or task
                owners[cell.id] = task
        return owners

    @cached_property
    def unprotected(self) -> list[str]:
        """Return the tasks whose answer runs in the kernel, in the same process as its check."""
        return [
            lab(cell)["task"]
            for cell in self.answer_cells.values()
            if cell.cell_type == "code" and not cell.source.startswith("%%")
        ]

    def fingerprint(self) -> str:
        """Return a hash of everything that a grade may depend on, which leaves out the notes."""
        return hashlib.sha256(dumps(self.nb).encode()).hexdigest()

    def _find_tasks(self) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        for cell in self.nb.cells:
            about = lab(cell)
            number = str(about.get("task", ""))
            if not number:
                continue
            task = tasks.setdefault(number, Task(number, str(about.get("title", number)), 0.0))
            if is_solution(cell):
                graded = cell.metadata.nbgrader
                task.title = str(about.get("title", task.title))
                task.answers.append(graded.grade_id)
                task.by_hand = cell.cell_type == "markdown"
                task.personal = bool(about.get("personal"))
                points = about.get("points", graded.get("points", 0))
                task.points = max(task.points, float(points))
            if about.get("check"):
                task.checks[cell.id] = float(about.get("points", 0))
        for task in tasks.values():
            cells = [self.answer_cells[grade_id] for grade_id in task.answers]
            task.model = "\n\n".join(body(cell.source) for cell in cells)
            task.stub = "\n\n".join(body(self.stubs[cell.id]) for cell in cells)
            task.points = sum(task.checks.values()) or task.points
        return tasks

    def _require_verdicts(self) -> None:
        for task in self.tasks.values():
            if not task.by_hand and not task.checks:
                raise LabError(f"{self.path.name}: task {task.number} has no check cell. Add one.")
            for cell_id in task.checks:
                verdicts = [(one["task"], one["passed"]) for one in self.expected[cell_id]]
                if verdicts != [(task.number, True)]:
                    raise LabError(
                        f"{self.path.name}: the stored output of cell '{cell_id}' is not "
                        f"'✓ Task {task.number} …'. Run make solutions."
                    )


def _named(paths: list[Path], names: Collection[str], folder: Path) -> list[Path]:
    """Return the labs with these names; all labs if there are no names."""
    unknown = [name for name in names if not any(is_named(name, path) for path in paths)]
    if unknown:
        raise LabError(f"There is no lab {', '.join(unknown)} in {folder}.")
    return [p for p in paths if not names or any(is_named(name, p) for name in names)]


def references(folder: Path, only: Collection[str] = ()) -> tuple[list[Reference], dict[str, str]]:
    """Return the references, and for each lab that can't be graded its name and the reason.

    Raises:
        LabError: `only` names an unknown lab, or no lab can be graded.
    """
    paths = _named(notebooks(folder), only, folder)
    refs = []
    broken = {}
    for path in paths:
        try:
            reference = Reference(path)
            if reference.tasks:
                refs.append(reference)
        except NotebookError as error:
            broken[path.stem] = str(error)
    if not refs:
        why = "".join(f"\n  {text}" for text in broken.values())
        raise LabError(f"There is no lab in {folder} that can be graded.{why}")
    return refs, broken


def _looked_up(file: Path) -> set[str]:
    """Return the constant names that a module looks up in `user_ns`, or has a function look up."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Subscript(ast.Name("user_ns"), ast.Constant(str(name))):
                found.add(name)
            case ast.Call(ast.Attribute(ast.Name("user_ns")), [ast.Constant(str(name)), *_]):
                found.add(name)
            case ast.Call(_, [ast.Name("user_ns"), *names]):
                found |= {str(one.value) for one in names if isinstance(one, ast.Constant)}
    return found


def _name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def _has_probes(file: Path) -> bool:
    return "probe" in file.name


def _imported_of_ours(source: str) -> Iterator[str]:
    """Yield the modules of the course that a source imports."""
    for node in ast.walk(parsed(source) or ast.Module([], [])):
        match node:
            case ast.Import(names):
                candidates = [one.name for one in names]
            case ast.ImportFrom(str(module), names):
                candidates = [module, *(f"{module}.{one.name}" for one in names)]
            case _:
                candidates = []
        yield from (name for name in candidates if file_of(name, ROOT))


def _data_beside(file: Path) -> Iterator[Path]:
    """Yield the files that modules of this folder may read."""
    yield from (path for path in file.parent.iterdir() if path.suffix in DATA)


# --- the source of a cell -------------------------------------------------------------------------


def on_ranks(source: str) -> bool:
    """Return whether all ranks run a cell, with or without the kernel; grading runs it on ranks."""
    first = source.lstrip().split("\n", 1)[0].split()
    return first in (["%%px"], ["%%px", "--local"])


def parsed(source: str) -> ast.Module | None:
    """Return the syntax tree; None if the source isn't Python, or is too long or deep to parse."""
    if len(source) > MOST_SOURCE:
        return None
    try:  # shell commands and line magics become empty lines
        return ast.parse(re.sub(r"^[!%].*$", "", source, flags=re.MULTILINE))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statements(source: str) -> list[ast.stmt]:
    """Return the statements at the top level; an empty list if the source can't be parsed."""
    tree = parsed(source)
    return tree.body if tree else []


def defined(source: str) -> frozenset[str]:
    """Return the functions and classes that a source defines at its top level."""
    # The cache must not keep a source of many megabytes.
    return _defined(source) if len(source) <= MOST_SOURCE else _searched(source)


@lru_cache(maxsize=1_000)  # each cell of a notebook is looked up for each answer
def _defined(source: str) -> frozenset[str]:
    tree = parsed(source)
    if tree is None:
        return _searched(source)
    return frozenset(node.name for node in tree.body if hasattr(node, "name"))


def _searched(source: str) -> frozenset[str]:
    """Return what `defined` returns, for a source that can't be parsed."""
    return frozenset(re.findall(r"^(?:def|class)\s+(\w+)", source, re.MULTILINE))


def bound(source: str) -> frozenset[str]:
    """Return what `defined` returns, and the variables that are assigned at the top level."""
    assigned = [node for node in _statements(source) if isinstance(node, ast.Assign)]
    targets = [target for node in assigned for target in node.targets]
    return defined(source) | {t.id for t in targets if isinstance(t, ast.Name)}


def imports(source: str) -> str:
    """Return the imports at the top level; "" for a source with a syntax error."""
    nodes = _statements(source)
    return "\n".join(ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
