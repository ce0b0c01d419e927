"""Repair what axe-core finds in pages of Markdown and the theme, and name the sidebar."""

from __future__ import annotations

from docutils import nodes
from markupsafe import Markup
from sphinx.application import Sphinx


def setup(app: Sphinx) -> None:
    """Repair tables, the buttons that unfold the contents, and the sidebar's heading."""
    app.connect("doctree-read", name_columns)
    app.connect("html-page-context", name_toggles, priority=900)  # after the theme's
    app.connect("html-page-context", name_part)


def name_columns(app: Sphinx, doctree: nodes.document) -> None:
    """Remove a table's empty head, or name the empty cells of a head for screen readers."""
    for head in list(doctree.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)
            continue
        for number, entry in enumerate(head.findall(nodes.entry), 1):
            if not entry.astext().strip():
                hidden = f'<span class="said">column {number}</span>'
                entry[:] = [nodes.raw("", hidden, format="html")]


def name_toggles(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Name the arrows that pydata-sphinx-theme puts beside links in the table of contents."""
    made = context.get("generate_toctree_html")
    if not made:
        return

    def named(*arguments, **options):
        return str(made(*arguments, **options)).replace(
            "<summary>", '<summary aria-label="The pages below">'
        )

    context["generate_toctree_html"] = named


def name_part(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Name the sidebar after the part of the site to which a page belongs, such as Labs."""
    above = context.get("parents") or [context]
    context["part"] = Markup(above[0].get("title", "")).striptags()
