"""The texts of all pages, from which excerpts.js shows what is around a hit of the search.

A page that is opened as a file can't fetch other pages, as Sphinx's own excerpts would need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def setup(app: Sphinx) -> None:
    """Write the texts when all pages are there."""
    app.connect("build-finished", write_texts)


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write a script with the parts of each page, by the page's name."""
    if error:
        return
    pages = {name: parts(app.env.get_doctree(name)) for name in sorted(app.env.found_docs)}
    texts = json.dumps(pages, ensure_ascii=False, separators=(",", ":"))
    (app.outdir / "_static/texts.js").write_text(f"window.TEXTS = {texts};\n", "utf-8")


def parts(page: nodes.document) -> list[tuple[list[str], str]]:
    """Return each part of a page: the names by which a link leads there, and the text."""
    found: dict[tuple[str, ...], list[str]] = {}
    for block in _blocks(page):
        found.setdefault(_names(block), []).append(" ".join(block.astext().split()))
    return [([*names], " ".join(texts)) for names, texts in found.items()]


def _blocks(page: nodes.document) -> Iterator[nodes.TextElement]:
    """Yield paragraphs, code and other blocks of text, but no titles, which a result shows."""
    for block in page.findall(nodes.TextElement):
        inside = isinstance(block.parent, (nodes.TextElement, nodes.Inline))
        if not inside and not isinstance(block, (nodes.title, nodes.raw, nodes.Invisible)):
            yield block


def _names(node: nodes.Node | None) -> tuple[str, ...]:
    """Return the names of the nearest section, definition or description around a node."""
    while node is not None:
        heads = [each for each in node.children if isinstance(each, nodes.term)]
        if isinstance(node, addnodes.desc):
            heads = [node.children[0]]
        if isinstance(node, nodes.section):
            heads = [node]
        if names := tuple(name for head in heads for name in head["ids"][:1]):
            return names
        node = node.parent
    return ()
