"""The notebook of a lab's page: the student's cells, with the outputs of the executed solution.

The cell of a task shows the stub. Below it the page shows the solution, folded, and its output. A
student can therefore read ahead without the answers, and an instructor sees all that a lab does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from . import predictions
from .solved import outputs_of_solution

#: The type of widgets, which only JupyterLab can show. A file has just a text such as ``Output()``.
WIDGET = "application/vnd.jupyter.widget-view+json"
VERDICT = "application/vnd.ddl-labs.verdict+json"
#: The alternative text of the picture of stuck ranks (utils/figures/waits.py): it has none.
REPORT = "Picture of the report: which rank waits for which. The words beside it say the same."


def page_of(solution: NotebookNode, student: NotebookNode) -> NotebookNode:
    """Return the notebook to be shown, and leave the two given ones unchanged."""
    own = {cell.id: cell for cell in student.cells}
    page = copy.deepcopy(solution)
    page.metadata.language_info = {"name": "python", "pygments_lexer": "lab"}
    # Cells that students don't get are for instructors, who have separate pages.
    both = [cell for cell in page.cells if cell.id in own]
    for cell in both:
        if cell.metadata.get("lab", {}).get("predict"):  # a guess isn't an answer to hide
            cell.source = own[cell.id].source
    answers = {cell.id for cell in both if cell.source != own[cell.id].source}
    solved = outputs_of_solution(both, answers)
    waits_for = predictions.covers(both)
    for cell in both:
        about = {"solved": cell.id in solved, "waits_for": waits_for.get(cell.id, [])}
        cell.metadata["site"] = about  # what `cells` does after MyST-NB has read the notebook
    page.cells = [shown for cell in both for shown in _shown(cell, own[cell.id])]
    return page


def _shown(cell: NotebookNode, own: NotebookNode) -> Iterator[NotebookNode]:
    if cell.cell_type == "markdown":
        yield new_markdown_cell(own.source, id=cell.id)
        if own.source != cell.source:
            yield new_markdown_cell(_folded(cell.source), id=f"{cell.id}-answer")
        return
    if predictions.is_prediction(own):
        yield new_code_cell(own.source, id=cell.id)
        asked = predictions.form(cell.id, predictions.questions(own.source))
        yield new_markdown_cell(asked, id=f"{cell.id}-form")
        return
    about = cell.metadata["site"]
    if cell.source != own.source:
        yield new_code_cell(own.source, id=cell.id)
        cell.source = _without_markers(cell.source)
        cell.id = f"{cell.id}-solution"
        about["fold"] = "The solution"
    elif cell.metadata.get("jupyter", {}).get("source_hidden"):
        drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
        about["fold"] = f"The code of this {'picture' if drawn else 'cell'}"
    cell.outputs = list(filter(_can_be_read, cell.outputs))
    about["pictures"] = [
        " ".join(output.metadata.get("image/png", {}).get("alt", REPORT).split())
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    yield cell


def _folded(answer: str) -> str:
    """Return a model answer as Markdown that a reader has to unfold."""
    return f'<details class="answer"><summary>A model answer</summary>\n\n{answer}\n\n</details>'


def _without_markers(source: str) -> str:
    marks = ("### BEGIN ", "### END ")
    return "\n".join(line for line in source.split("\n") if not line.strip().startswith(marks))


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
