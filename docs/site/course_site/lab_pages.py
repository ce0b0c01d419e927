"""The notebook of a lab's page: what students open, with the outputs of the executed solution.

A task's cell has its stub; below it stand the solution, folded, and what it printed and drew. So a
student can read ahead without the answers, and an instructor sees all that a lab does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

#: Outputs that only JupyterLab can show; each has words beside it.
LIVE = ("application/vnd.jupyter.widget-view+json", "application/vnd.ddl-labs.verdict+json")
#: A picture that is made by no figure: the one of stuck ranks (utils/figures/waits.py).
REPORT = "Picture of the report: which rank waits for which. The words beside it say the same."
SHOW, HIDE = "Show the {}", "Hide the {}"


def page_of(solution: NotebookNode, student: NotebookNode) -> NotebookNode:
    """The notebook to be shown; both that are given are left as they are."""
    own = {cell.id: cell for cell in student.cells}
    page = copy.deepcopy(solution)
    page.metadata.language_info = {"name": "python", "pygments_lexer": "lab"}
    # What students do not get is for instructors, who have pages of their own.
    both = [cell for cell in page.cells if cell.id in own]
    page.cells = [shown for cell in both for shown in _shown(cell, own[cell.id])]
    return page


def _shown(cell: NotebookNode, own: NotebookNode) -> Iterator[NotebookNode]:
    if cell.cell_type == "markdown":
        yield new_markdown_cell(own.source, id=cell.id)
        if own.source != cell.source:
            yield new_markdown_cell(_folded(cell.source), id=f"{cell.id}-answer")
        return
    if cell.metadata.get("lab", {}).get("predict"):  # a guess is no answer
        cell.source = own.source
    if cell.source != own.source:
        yield new_code_cell(own.source, id=cell.id)
        cell.source = _without_markers(cell.source)
        cell.id = f"{cell.id}-solution"
        _fold(cell, "solution")
    elif cell.metadata.get("jupyter", {}).get("source_hidden"):
        _fold(cell, "code of this picture")
    yield from _one_picture_each(cell)


def _folded(answer: str) -> str:
    """Markdown that is read when it is asked for."""
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
    """MyST-NB has one alternative text for a cell: a further picture gets a cell without code."""
    outputs, cell.outputs = cell.outputs, []
    for output in outputs:
        for kind in LIVE:
            output.get("data", {}).pop(kind, None)
        if "image/png" in output.get("data", {}):
            if "image" in cell.metadata.get("mystnb", {}):
                yield cell
                cell = new_code_cell("", id=f"{cell.id}-more", metadata={"tags": ["remove-input"]})
            alt = output.metadata.get("image/png", {}).get("alt", REPORT)
            cell.metadata.setdefault("mystnb", {})["image"] = {"alt": " ".join(alt.split())}
        cell.outputs.append(output)
    yield cell
