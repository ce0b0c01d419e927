"""The notebook of a lab's page: the student's cells, with the outputs of the executed solution.

The cell of a task shows the stub. Below it the page shows the solution, folded, and its output. A
student can therefore read ahead without the answers, and an instructor sees all that a lab does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from . import predictions

#: The type of widgets, which only JupyterLab can show. A file has just a text such as ``Output()``.
WIDGET = "application/vnd.jupyter.widget-view+json"
VERDICT = "application/vnd.ddl-labs.verdict+json"
#: The alternative text of the picture of stuck ranks (utils/figures/waits.py): it has none.
REPORT = "Picture of the report: which rank waits for which. The words beside it say the same."
SHOW, HIDE = "Show the {}", "Hide the {}"


def page_of(solution: NotebookNode, student: NotebookNode) -> NotebookNode:
    """Return the notebook to be shown, and leave the two given ones unchanged."""
    own = {cell.id: cell for cell in student.cells}
    page = copy.deepcopy(solution)
    page.metadata.language_info = {"name": "python", "pygments_lexer": "lab"}
    # Cells that students don't get are for instructors, who have separate pages.
    both = [cell for cell in page.cells if cell.id in own]
    tags = predictions.tags(both)
    for cell in both:
        cell.metadata.tags = [*cell.metadata.get("tags", []), *tags.get(cell.id, [])]
    page.cells = [shown for cell in both for shown in _shown(cell, own[cell.id])]
    return page


def _shown(cell: NotebookNode, own: NotebookNode) -> Iterator[NotebookNode]:
    if cell.cell_type == "markdown":
        words = _without_outcome_fold(own.source)
        yield new_markdown_cell(_in_cover(words, predictions.covered(cell)), id=cell.id)
        if own.source != cell.source:
            yield new_markdown_cell(_folded(cell.source), id=f"{cell.id}-answer")
        return
    if cell.metadata.get("lab", {}).get("predict"):  # a guess isn't an answer to hide
        cell.source = own.source
    if predictions.is_prediction(own):
        yield new_code_cell(own.source, id=cell.id)
        asked = predictions.form(cell.id, predictions.questions(own.source))
        yield new_markdown_cell(asked, id=f"{cell.id}-form")
        return
    if cell.source != own.source:
        yield new_code_cell(own.source, id=cell.id)
        cell.source = _without_markers(cell.source)
        cell.id = f"{cell.id}-solution"
        _fold(cell, "solution")
    elif cell.metadata.get("jupyter", {}).get("source_hidden"):
        _fold(cell, "code of this picture")
    yield from _one_picture_each(cell)


def _in_cover(words: str, tags: Sequence[str]) -> str:
    """Put words in a box that predictions.js finds by its class, if they wait for predictions."""
    return f"::::::{{container}} {' '.join(tags)}\n{words}\n::::::" if tags else words


def _without_outcome_fold(source: str) -> str:
    """Return a text without the notebook's fold of an outcome: the site covers outcomes itself."""
    begin = re.compile(
        r'<details class="outcome"><summary>[^<]*</summary>\n\n(.*?)\n\n</details>', re.S
    )
    return begin.sub(r"\1", source)


def _folded(answer: str) -> str:
    """Return a model answer as Markdown that a reader has to unfold."""
    return (
        f'<details class="answer"><summary>Show a model answer</summary>\n\n{answer}\n\n</details>'
    )


def _without_markers(source: str) -> str:
    marks = ("### BEGIN ", "### END ")
    return "\n".join(line for line in source.split("\n") if not line.strip().startswith(marks))


def _fold(cell: NotebookNode, what: str) -> None:
    cell.metadata.tags = [*cell.metadata.get("tags", []), "hide-input"]
    own = cell.metadata.setdefault("mystnb", {})
    own["code_prompt_show"], own["code_prompt_hide"] = SHOW.format(what), HIDE.format(what)


def _one_picture_each(cell: NotebookNode) -> Iterator[NotebookNode]:
    """Yield a cell for each picture, because MyST-NB has one alternative text for a cell."""
    outputs, cell.outputs = cell.outputs, []
    covered = predictions.covered(cell)
    for output in filter(_can_be_read, outputs):
        if "image/png" in output.get("data", {}):
            if "image" in cell.metadata.get("mystnb", {}):
                yield cell
                tags = ["remove-input", *covered]
                cell = new_code_cell("", id=f"{cell.id}-more", metadata={"tags": tags})
            alt = output.metadata.get("image/png", {}).get("alt", REPORT)
            cell.metadata.setdefault("mystnb", {})["image"] = {"alt": " ".join(alt.split())}
        cell.outputs.append(output)
    yield cell


def _can_be_read(output: NotebookNode) -> bool:
    """Keep one form of an output, and return whether the page can show it.

    If an output has both an interactive page and a picture, keep the interactive page.
    """
    data = output.get("data", {})
    data.pop(VERDICT, None)
    if data.pop(WIDGET, None) and not data.keys() - {"text/plain"}:
        return False
    if "text/html" in data:
        for kind in [kind for kind in data if kind.startswith("image/")]:
            del data[kind]
    return True
