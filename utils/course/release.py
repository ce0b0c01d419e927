"""The release of student notebooks from solutions.

``solutions/NN_name.ipynb`` is the one source of a lab. The release changes it as follows:

* A region between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` becomes
  ``raise NotImplementedError("Task 1.2: blocking send and recv")``, indented like the region.
* A written answer (a markdown cell that is graded) becomes :data:`TEXT_STUB`.
* In a cell with ``"lab": {"predict": true}``, the author's prediction, the second argument of
  ``predict``, becomes ``...``. So does each text for ``five_metrics.fill``, except for a text with
  a measured value, ``f"… {sent} …"``.
* Lines between ``### BEGIN HIDDEN TESTS`` and ``### END HIDDEN TESTS`` are removed.
* The answers themselves are written to ``labs/.models``, for ``use_model``, and so are the tasks of
  the core path with the minutes that are left after each, for the checks.
* An instructor's notes, cells with ``"lab": {"instructor": …}``, are removed.
* Outputs and counters are removed; ids, nbgrader's metadata and the lab metadata stay.

nbgrader's and nbconvert's preprocessors do the work. The same notebook gives the same bytes.
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

from utils.checks import progress
from utils.checks.model import FOLDER, pack

from .about import core_path, number_of
from .notebook import (
    LABS,
    SOLUTIONS,
    NotebookError,
    cell_problems,
    dumps,
    is_solution,
    lab,
    normalise,
    notebooks,
    read,
)

TEXT_STUB = "*Write your answer here.*"
REGIONS = ("SOLUTION", "HIDDEN TESTS")
FILL = "five_metrics.fill"


class MarkupError(NotebookError):
    """A solution from which no student notebook can be made."""


def stub(cell: NotebookNode) -> str:
    """Return the line that replaces the solution in a student's cell."""
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
    """A preprocessor that removes the author's predictions, so that students make their own."""

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], cell_index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """Replace the cell's predictions by ``...``."""
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
    """Return the predictions in a cell: each number and each choice."""
    values: list[ast.expr] = []
    for call in _calls(source, "predict"):
        answer = call.args[1] if len(call.args) > 1 else ast.Dict([], [])
        values += answer.values if isinstance(answer, ast.Dict) else [answer]
    return values


def judgements(source: str) -> list[ast.keyword]:
    """Return the author's texts of the five metrics in a cell, by name.

    Texts with a measured value, ``f"… {sent} …"``, and ``...`` are left out.
    """
    words = [word for call in _calls(source, FILL) for word in call.keywords]
    return [word for word in words if _is_own(word.value)]


def _is_own(value: ast.expr) -> bool:
    """Return whether this is neither ``...`` nor an f-string with a name, as ``f"{sent}"``."""
    if not isinstance(value, ast.JoinedStr):
        return ast.unparse(value) != "..."
    parts = [part.value for part in value.values if isinstance(part, ast.FormattedValue)]
    return not any(isinstance(node, ast.Name) for part in parts for node in ast.walk(part))


def _calls(source: str, name: str) -> list[ast.Call]:
    """Return the calls of functions whose names end with `name`."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).endswith(name)]


def own_words(source: str) -> list[ast.expr]:
    """Return the values that students fill in, in order: predictions and judgements."""
    values = predictions(source) + [word.value for word in judgements(source)]
    return sorted(values, key=lambda value: (value.lineno, value.col_offset))


def student_version(nb: NotebookNode, name: str) -> NotebookNode:
    """Return the student's notebook; the given notebook stays unchanged.

    Raises:
        MarkupError: The markup is wrong; the message names every such cell, and what to do.
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
    """Remove an instructor's notes in place, see :mod:`utils.course.notes`."""
    nb.cells = [cell for cell in nb.cells if not lab(cell).get("instructor")]
    return nb


def student_text(nb: NotebookNode, name: str) -> str:
    """Return the student's notebook for a solution, as the text of its file."""
    return dumps(student_version(nb, name))


def model_text(nb: NotebookNode) -> str:
    """Return the model answers to the tasks of a lab, as the text of their file."""
    answers: dict[str, list[str]] = defaultdict(list)
    for cell in nb.cells:
        if is_solution(cell) and cell.cell_type == "code":
            answers[lab(cell)["task"]].append(cell.source)
    return pack(answers)


def released(path: Path, labs_dir: Path) -> dict[Path, str]:
    """Return the files that are made from a solution, with their texts."""
    nb = read(path)
    return {
        labs_dir / path.name: student_text(nb, path.name),
        labs_dir / FOLDER / path.stem: model_text(nb),
        labs_dir / FOLDER / progress.FILE.format(number_of(path)): _progress_text(nb),
    }


def _progress_text(nb: NotebookNode) -> str:
    """Return the tasks of a lab's core path, each with the minutes that are left after it."""
    return json.dumps(core_path(nb), indent=1) + "\n"


def release(solutions_dir: Path = SOLUTIONS, labs_dir: Path = LABS) -> list[Path]:
    """Write every student notebook that is missing or differs; return those written.

    Nothing is written if one of the solutions has an error.
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
    """Return the differences between ``labs_dir`` and a release of ``solutions_dir``."""
    solutions = notebooks(solutions_dir)
    lines = []
    for path in solutions:
        try:
            for target, text in released(path, labs_dir).items():
                name = target.relative_to(labs_dir)
                if not target.exists():
                    lines.append(f"{name}: is not released yet: run make release")
                elif not _is(target, text):
                    lines.append(f"{name}: differs from its solution: run make release")
        except NotebookError as error:
            lines.append(str(error))
    names = {path.name for path in solutions}
    orphans = [path.name for path in notebooks(labs_dir) if path.name not in names]
    return lines + [f"{name}: has no solution: delete it, or add one" for name in orphans]


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() == text.encode()


# --- markup ------------------------------------------------------------------------------------


def markup_problems(nb: NotebookNode) -> Iterator[str]:
    """Yield the problems that an author must repair before the release."""
    yield from cell_problems(nb, _region_problems, _metadata_problems, _lab_problems)
    owners = defaultdict(list)
    for cell in nb.cells:
        owners[cell.metadata.get("nbgrader", {}).get("grade_id")].append(f"'{cell.id}'")
    for grade_id, ids in owners.items():
        if grade_id and len(ids) > 1:
            several = ", ".join(ids)
            yield f"cells {several}: all have the grade_id '{grade_id}': give each another one"


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
            "has a solution region, but isn't a solution cell: add the nbgrader metadata "
            '{"schema_version": 3, "grade_id": "…", "solution": true, "grade": false, '
            '"locked": false, "task": false}'
        )
    if is_solution(cell) and cell.cell_type == "code" and not markers(cell.source, "SOLUTION"):
        yield "is a solution cell without a region: put ### BEGIN SOLUTION, ### END SOLUTION in"
    graded = cell.metadata.get("nbgrader", {}).get("grade")
    if markers(cell.source, "HIDDEN TESTS") and not graded:
        yield 'has hidden tests, but isn\'t a grade cell: set "grade": true and points in nbgrader'


def _metadata_problems(cell: NotebookNode) -> Iterator[str]:
    meta = cell.metadata.get("nbgrader")
    if meta is None:
        return
    if (meta.get("solution") or meta.get("grade") or meta.get("locked")) and not meta.get(
        "grade_id"
    ):
        yield 'its nbgrader metadata has no grade_id: add "grade_id": "a-unique-name"'
        return
    try:
        MetadataValidatorV3().validate_cell(copy.deepcopy(cell))
    except jsonschema.ValidationError as error:
        yield f"nbgrader refuses its metadata: {error.message}"
    except Exception as error:  # nbgrader has a class for too old, and another for too new
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
        yield "passes texts to five_metrics.fill by **: name each text, or students see them"
