"""The cells of a lab's page: their folds, the label above outputs, and the words of pictures.

`lab_pages` writes into a cell's metadata what this module does, because MyST-NB keeps the metadata.
"""

from __future__ import annotations

from html import escape

from docutils import nodes
from sphinx.application import Sphinx

SOLVED = '<p class="of-solution">Output of the solution</p>'
COVERED = "The output, after your prediction"


def setup(app: Sphinx) -> None:
    """Finish the cells of each page."""
    app.connect("doctree-read", finish_cells)


def finish_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Finish each cell about which `lab_pages` has written something."""
    for cell in list(doctree.findall(nodes.container)):
        if about := cell.get("cell_metadata", {}).get("site"):
            finish(cell, about)


def finish(cell: nodes.container, about: dict) -> None:
    """Describe a cell's pictures, fold its source or its outputs, and label the outputs."""
    for image, words in zip(cell.findall(nodes.image), about["pictures"], strict=True):
        image["alt"] = words
    source, *outputs = cell.children
    if outputs and about["solved"]:
        outputs[0].insert(0, nodes.raw("", SOLVED, format="html"))
    if waits_for := about["waits_for"]:
        ids = escape(" ".join(waits_for))
        outputs = outputs and folded(COVERED, f'class="outcome" data-waits-for="{ids}"', outputs)
    shown = folded(about["fold"], 'class="answer"', [source]) if "fold" in about else [source]
    cell[:] = [*shown, *outputs]


def folded(name: str, attributes: str, inside: list[nodes.Node]) -> list[nodes.Node]:
    """Return nodes in a fold with this name, which the reader opens."""
    begin = nodes.raw("", f"<details {attributes}><summary>{name}</summary>", format="html")
    return [begin, *inside, nodes.raw("", "</details>", format="html")]
