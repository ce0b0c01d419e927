"""Student notebooks from solutions.

``solutions/NN_name.ipynb`` is the one source of a lab. What follows from it:

* a region between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` becomes
  ``raise NotImplementedError("Task 1.2: blocking send and recv")``, as far indented as the region;
* a written answer (a markdown cell that is graded) becomes :data:`TEXT_STUB`;
* in a cell with ``"lab": {"predict": true}`` the author's prediction, the second argument of
  ``predict``, becomes ``...``, and so does each text given to ``five_metrics.fill``, but for those
  that hold a measured value, ``f"… {sent} …"``;
* lines between ``### BEGIN HIDDEN TESTS`` and ``### END HIDDEN TESTS`` go;
* the answers themselves go into ``labs/.models``, for ``use_model``;
* an instructor's notes, cells with ``"lab": {"instructor": …}``, go;
* outputs and counters go; ids, nbgrader's metadata and ours stay.

nbgrader's and nbconvert's preprocessors do the work; the same notebook gives the same bytes.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from nbconvert.preprocessors import ClearOutputPreprocessor, Preprocessor
from nbformat import NotebookNode
from nbgrader.nbgraderformat.v3 import MetadataValidatorV3
from nbgrader.preprocessors import ClearHiddenTests, ClearSolutions, LockCells

from utils.checks.model import FOLDER, pack

from .notebook import (
    LABS,
    SOLUTIONS,
    NotebookError,
    cell_problems,
    dumps,
    lab,
    normalise,
    notebooks,
    read,
)

TEXT_STUB = "*Write your answer here.*"
REGIONS = ("SOLUTION", "HIDDEN TESTS")
FILL = "five_metrics.fill"


class MarkupError(NotebookError):
    """A solution that no student notebook can be made from."""


def stub(cell: NotebookNode) -> str:
    """Return the line that stands in a student's cell where the solution was."""
    about = lab(cell)
    text = f"Task {about['task']}: {about['title']}"
    return f"raise NotImplementedError({json.dumps(text, ensure_ascii=False)})"


class ClearLabSolutions(ClearSolutions):  # type: ignore[misc]  # nbgrader has no types
    """nbgrader's ClearSolutions with a stub that names the task."""

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], cell_index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """Replace the cell's solution by its stub."""
        if is_solution(cell) and cell.cell_type == "code":
            self.code_stub = {"python": stub(cell)}
        cleared: tuple[NotebookNode, dict[str, Any]]
        cleared = super().preprocess_cell(cell, resources, cell_index)
        return cleared


class ClearPredictions(Preprocessor):
    """Takes the author's predictions away: the student commits one."""

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], cell_index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """Put ``...`` where the cell's predictions were."""
        if lab(cell).get("predict"):
            lines = cell.source.encode().split(b"\n")
            for value in reversed(own_words(cell.source)):
                first = value.lineno - 1
                last = (value.end_lineno or value.lineno) - 1
                after = lines[last][value.end_col_offset :]
                lines[first : last + 1] = [lines[first][: value.col_offset] + b"..." + after]
            cell.source = b"\n".join(lines).decode()
        return cell, resources


def predictions(source: str) -> list[ast.expr]:
    """Return what is predicted in a cell: each number and each choice."""
    values: list[ast.expr] = []
    for call in _calls(source, "predict"):
        answer = call.args[1] if len(call.args) > 1 else ast.Dict([], [])
        values += answer.values if isinstance(answer, ast.Dict) else [answer]
    return values


def judgements(source: str) -> list[ast.keyword]:
    """Return the author's texts of the five metrics in a cell, by name.

    Without those that say what was measured, ``f"… {sent} …"``, and without ``...``.
    """
    words = [word for call in _calls(source, FILL) for word in call.keywords]
    return [word for word in words if _is_own(word.value)]


def _is_own(value: ast.expr) -> bool:
    """Is it neither ``...`` nor an f-string with a name in it? ``f"{2 / 10}"`` has none."""
    if not isinstance(value, ast.JoinedStr):
        return ast.unparse(value) != "..."
    parts = [part.value for part in value.values if isinstance(part, ast.FormattedValue)]
    return not any(isinstance(node, ast.Name) for part in parts for node in ast.walk(part))


def _calls(source: str, name: str) -> list[ast.Call]:
    """Return the calls of functions whose names end so."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).endswith(name)]


def own_words(source: str) -> list[ast.expr]:
    """Return what students put in themselves, in order: their predictions and judgements."""
    values = predictions(source) + [word.value for word in judgements(source)]
    return sorted(values, key=lambda value: (value.lineno, value.col_offset))


def is_solution(cell: NotebookNode) -> bool:
    """Return whether students fill in this cell."""
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


def student_version(nb: NotebookNode, name: str) -> NotebookNode:
    """Return the student's notebook; the one given is left as it is.

    Raises:
        MarkupError: Names every cell in error, and what to do about it.
    """
    if problems := list(markup_problems(nb)):
        raise MarkupError("\n".join(f"{name}: {problem}" for problem in problems))
    nb = without_notes(normalise(copy.deepcopy(nb)))
    resources: dict[str, Any] = {}
    for preprocessor in (
        ClearLabSolutions(text_stub=TEXT_STUB),
        ClearPredictions(),  # type: ignore[no-untyped-call]  # nbconvert's __init__
        ClearHiddenTests(),
        LockCells(),
        ClearOutputPreprocessor(),
    ):
        nb, resources = preprocessor.preprocess(nb, resources)
    return nb


def without_notes(nb: NotebookNode) -> NotebookNode:
    """Take an instructor's notes out, in place: see :mod:`utils.course.notes`."""
    nb.cells = [cell for cell in nb.cells if not lab(cell).get("instructor")]
    return nb


def rubric_cells(nb: NotebookNode) -> Iterator[tuple[NotebookNode, NotebookNode | None]]:
    """Yield each written answer, and the cell of its rubric; None where the next cell is none."""
    for cell, below in zip(nb.cells, [*nb.cells[1:], None], strict=True):
        if is_solution(cell) and cell.cell_type == "markdown":
            yield cell, below if below and lab(below).get("instructor") == "rubric" else None


def student_text(path: Path) -> str:
    """Return the student's notebook that follows from a solution, as the text of its file."""
    return dumps(student_version(read(path), path.name))


def model_text(path: Path) -> str:
    """Return the model's answers to the tasks of a lab, as the text of their file."""
    answers: dict[str, list[str]] = defaultdict(list)
    for cell in read(path).cells:
        if is_solution(cell) and cell.cell_type == "code":
            answers[lab(cell)["task"]].append(cell.source)
    return pack(answers)


def released(path: Path, labs_dir: Path) -> dict[Path, str]:
    """Return what follows from a solution: files and their texts."""
    return {
        labs_dir / path.name: student_text(path),
        labs_dir / FOLDER / path.stem: model_text(path),
    }


def release(solutions_dir: Path = SOLUTIONS, labs_dir: Path = LABS) -> list[Path]:
    """Write every student notebook that is missing or differs; return those written.

    Nothing is written when one of the solutions is in error.
    """
    texts: dict[Path, str] = {}
    for path in notebooks(solutions_dir):
        texts |= released(path, labs_dir)
    (labs_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    changed = [path for path, text in texts.items() if not _is(path, text)]
    for path in changed:
        path.write_bytes(texts[path].encode())
    return changed


def drift(solutions_dir: Path = SOLUTIONS, labs_dir: Path = LABS) -> list[str]:
    """Return what keeps ``labs_dir`` from being exactly what follows from ``solutions_dir``."""
    solutions = notebooks(solutions_dir)
    lines = []
    for path in solutions:
        try:
            for target, text in released(path, labs_dir).items():
                name = target.relative_to(labs_dir)
                if not target.exists():
                    lines.append(f"{name}: not released yet: make release")
                elif not _is(target, text):
                    lines.append(f"{name}: differs from what its solution gives: make release")
        except NotebookError as error:
            lines.append(str(error))
    names = {path.name for path in solutions}
    orphans = [path.name for path in notebooks(labs_dir) if path.name not in names]
    return lines + [f"{name}: has no solution: delete it, or add one" for name in orphans]


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() == text.encode()


# --- markup ------------------------------------------------------------------------------------


def markup_problems(nb: NotebookNode) -> Iterator[str]:
    """Yield what an author must repair before the notebook can be released."""
    yield from cell_problems(nb, _region_problems, _metadata_problems, _lab_problems)
    owners = defaultdict(list)
    for cell in nb.cells:
        owners[cell.metadata.get("nbgrader", {}).get("grade_id")].append(f"'{cell.id}'")
    for grade_id, ids in owners.items():
        if grade_id and len(ids) > 1:
            several = ", ".join(ids)
            yield f"cells {several}: all have the grade_id '{grade_id}': give each its own"


def markers(source: str, region: str) -> list[str]:
    """Return the region's BEGIN and END markers in order of appearance."""
    return re.findall(rf"^.*?(BEGIN|END) {region}", source, re.MULTILINE)


def _region_problems(cell: NotebookNode) -> Iterator[str]:
    for region in REGIONS:
        present = markers(cell.source, region)
        if present != ["BEGIN", "END"] * (len(present) // 2):
            yield (
                f"its markers are {' '.join(present)}: every '### BEGIN {region}' needs one "
                f"'### END {region}' after it, and regions don't nest"
            )
    if markers(cell.source, "SOLUTION") and not is_solution(cell):
        yield (
            "has a solution region, but is no solution cell: add the nbgrader metadata "
            '{"schema_version": 3, "grade_id": "…", "solution": true, "grade": false, '
            '"locked": false, "task": false}'
        )
    if is_solution(cell) and cell.cell_type == "code" and not markers(cell.source, "SOLUTION"):
        yield "is a solution cell without a region: put ### BEGIN SOLUTION, ### END SOLUTION in"
    graded = cell.metadata.get("nbgrader", {}).get("grade")
    if markers(cell.source, "HIDDEN TESTS") and not graded:
        yield 'has hidden tests, but is no grade cell: set "grade": true and points in nbgrader'


def _metadata_problems(cell: NotebookNode) -> Iterator[str]:
    meta = cell.metadata.get("nbgrader")
    if meta is None:
        return
    if (meta.get("solution") or meta.get("grade") or meta.get("locked")) and not meta.get(
        "grade_id"
    ):
        yield 'its nbgrader metadata has no grade_id: add "grade_id": "a-name-of-its-own"'
        return
    try:
        MetadataValidatorV3().validate_cell(copy.deepcopy(cell))
    except jsonschema.ValidationError as error:
        yield f"nbgrader refuses its metadata: {error.message}"
    except Exception as error:  # too old, too new: nbgrader has a class for each
        yield f"nbgrader refuses its metadata: {error}"


def _lab_problems(cell: NotebookNode) -> Iterator[str]:
    about = lab(cell)
    for key in ("task", "title") if is_solution(cell) else ():
        if not (isinstance(about.get(key), str) and about[key].strip()):
            yield (
                f"is a solution cell whose lab metadata has no {key}: add "
                '"lab": {"task": "1.2", "title": "what it is about", "points": 2}'
            )
    yield from _prediction_problems(cell, about)
    if about.get("check") and not isinstance(about.get("task"), str):
        yield 'is a check without a task: add "lab": {"task": "1.2", "check": true}'


def _prediction_problems(cell: NotebookNode, about: dict[str, Any]) -> Iterator[str]:
    if about.get("predict") and not (predictions(cell.source) or _calls(cell.source, FILL)):
        yield (
            'is a prediction without a call of predict("what is measured", a number or a choice) '
            "or of five_metrics.fill"
        )
    if not about.get("predict") and cell.cell_type == "code":
        if predictions(cell.source):
            yield 'shows a prediction to students: add "lab": {"predict": true}'
        if judgements(cell.source):
            yield 'shows texts of five_metrics.fill to students: add "lab": {"predict": true}'
    if any(word.arg is None for word in judgements(cell.source)):
        yield "gives five_metrics.fill its texts by **: name each, or students would see them"
