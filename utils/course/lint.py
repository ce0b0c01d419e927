"""Find problems in notebooks that nbval, ruff and reviewers overlook.

For example, nbval ignores a misspelled marker, and passes a reference cell that was never executed.
An id that an editor made up means nothing to a grader.
"""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from nbformat import NotebookNode
from nbval.plugin import comment_markers, metadata_tags

from utils.figures import forms

from . import about
from .notebook import (
    LABS,
    NEEDED,
    ROOT,
    SHARED_FOLDER,
    SOLUTIONS,
    VOLATILE_METADATA,
    NotebookError,
    cell_problems,
    descriptions,
    notebooks,
    read,
)

READABLE_ID = re.compile(r"[a-z0-9][a-z0-9-_]+")
MADE_UP_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){0,4}(-[0-9a-f]+)?")
MARKER_LIKE = re.compile(r"#+\s*((?:nbval|pytest[ _-]validate)[\w -]*)\s*", re.IGNORECASE)
#: Tags of other tools, and of ours, that look like misspelled tags of nbval.
OTHER_TAGS = {"skip-execution", NEEDED, SHARED_FOLDER}
#: Fewest words of a picture's alternative text.
FEWEST_WORDS = 3
#: Columns of code that fit beside JupyterLab's file browser, as in solutions/ruff.toml.
WIDEST = 86


def lint(solutions_dir: Path = SOLUTIONS, labs_dir: Path = LABS) -> list[str]:
    """Return every problem in both folders, with the notebook, the cell and the cure."""
    problems = []
    numbers = {about.number_of(path) for path in notebooks(solutions_dir)}
    for folder in (solutions_dir, labs_dir):
        for path in notebooks(folder):
            try:
                nb = read(path)
            except NotebookError as error:
                problems.append(f"{folder.name}/{error}")
                continue
            if folder == solutions_dir:
                faults = solution_problems(nb, about.number_of(path), numbers)
            else:
                faults = cell_problems(nb, id_problems, width_problems, student_problems)
            problems += [f"{folder.name}/{path.name}: {text}" for text in faults]
    return problems


def solution_problems(nb: NotebookNode, number: str, numbers: set[str]) -> Iterator[str]:
    """Yield the problems of a solution; `numbers` are the numbers of all labs."""
    yield from about.problems_of(nb, number, numbers)
    rules = (
        *(id_problems, marker_problems, width_problems, list_problems),
        *(output_problems, picture_problems),
    )
    yield from cell_problems(nb, *rules)


def student_problems(cell: NotebookNode) -> Iterator[str]:
    """Yield the parts of a cell that do not belong in a student's notebook."""
    if cell.get("outputs") or cell.get("execution_count") is not None:
        yield "has outputs of an execution: run make release"
    if re.search(r"\b(BEGIN|END) (SOLUTION|HIDDEN TESTS)\b", cell.source):
        yield "shows a solution or a hidden test: run make release"


def id_problems(cell: NotebookNode) -> Iterator[str]:
    """Yield the problems of an id. Grading finds answers by ids, so they must be stable words."""
    if not READABLE_ID.fullmatch(cell.id):
        yield "an id has small letters, digits, '-' and '_' only: rename it"
    elif MADE_UP_ID.fullmatch(cell.id):
        yield "an editor made up this id: replace it by a readable id, such as 'ring-task'"


def marker_problems(cell: NotebookNode) -> Iterator[str]:
    """Yield comments and tags that look like nbval's comments and tags, but aren't."""
    if cell.cell_type == "code":
        yield from _comment_problems(cell.source)
    for tag in cell.metadata.get("tags", []):
        if tag in metadata_tags or tag in OTHER_TAGS:
            continue
        guess = _nearest(tag.lower().replace("_", "-"), metadata_tags, cutoff=0.8)
        if guess or tag.lower().startswith("nbval"):
            yield f"nbval ignores the tag {tag!r}: did you mean {guess or 'nbval-…'!r}?"


def _comment_problems(source: str) -> Iterator[str]:
    for line in source.splitlines():
        # nbval needs the marker alone on its line.
        text = line[line.find("#") :] if "#" in line else ""
        match = MARKER_LIKE.match(text)
        if match and not (line.strip().startswith("#") and match[1] in comment_markers):
            guess = _nearest(match[1].upper().replace("-", "_"), comment_markers)
            yield f"nbval ignores {text.strip()!r}: write '# {guess}' on a separate line"


def width_problems(cell: NotebookNode) -> Iterator[str]:
    """Yield lines of code for which a student would have to scroll sideways."""
    if cell.cell_type == "code":
        for number, line in enumerate(cell.source.splitlines(), start=1):
            if len(line) > WIDEST:
                yield f"line {number} has {len(line)} columns, more than {WIDEST}: break it"


def list_problems(cell: NotebookNode) -> Iterator[str]:
    """Yield items of a list that an editor has joined to a paragraph."""
    if cell.cell_type == "markdown" and (item := re.search(r"\S+[.:] - \S+", cell.source)):
        yield f"{item[0]!r} looks like an item inside a paragraph: begin each item on its own line"


def _nearest(word: str, known: Iterable[str], cutoff: float = 0.0) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=cutoff)), None)


def output_problems(cell: NotebookNode) -> Iterator[str]:
    """Yield reasons why a cell's stored outputs are unusable as a reference for executions."""
    if cell.cell_type != "code":
        return
    if cell.source.strip() and cell.execution_count is None:
        yield "was never executed, so nbval compares nothing: run make solutions"
    volatile = cell.metadata.keys() & set(VOLATILE_METADATA)
    metadata = [output.get("metadata", {}) for output in cell.outputs]
    if volatile or metadata != list(map(descriptions, metadata)):
        yield "has times or ids of one execution: run make solutions"
    text = str(cell.outputs)
    for folder in {str(ROOT), str(Path.home())}:
        if re.search(re.escape(folder) + r"[/\\\"']", text):
            yield f"its output names {folder}, a folder of this machine: print something else"


def picture_problems(cell: NotebookNode) -> Iterator[str]:
    """Yield pictures that have no description, or are wider than a page.

    The description of an output's picture is in ``metadata["image/png"]["alt"]``, which nbconvert
    writes into its pages. A picture in Markdown has it between ``![`` and ``]``.
    """
    for output in cell.get("outputs", []):
        for kind in output.get("data", {}):
            words = output.metadata.get(kind, {}).get("alt", "").split()
            if kind.startswith("image/") and len(words) < FEWEST_WORDS:
                yield (
                    "shows a picture without alternative text: give the figure titles and labels, "
                    "or an attribute alt_text, and run make solutions"
                )
        width = _pixels_across(output)
        if width > forms.MOST_PIXELS:
            yield (
                f"shows a picture of {width} pixels across, so JupyterLab scales it and its words "
                f"down: draw it in at most {forms.MOST_PIXELS / forms.DPI:g} inches"
            )
    if cell.cell_type == "markdown":
        yield from _picture_problems_of_text(cell.source)


def _pixels_across(output: NotebookNode) -> int:
    """Return the width of an output's PNG in pixels; 0 without a PNG."""
    start = base64.b64decode(output.get("data", {}).get(forms.PNG, "")[:32])
    return int.from_bytes(start[16:20])


def _picture_problems_of_text(source: str) -> Iterator[str]:
    for words in re.findall(r"!\[([^\]]*)\]\(", source):
        if len(words.split()) < FEWEST_WORDS:
            yield f"shows a picture as ![{words}](…): describe it between the brackets"
    for tag in re.findall(r"<img\b[^>]*>", source):
        if not re.search(r"\balt=[\"'][^\"']*\w", tag):
            yield f'shows a picture without alternative text: add alt="…" to {tag[:40]}'
