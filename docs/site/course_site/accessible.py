"""What axe-core finds in pages that Markdown and the theme make, and the name of the sidebar."""

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
    """Drop the head of a table that is empty, and name a column for those who hear it."""
    for head in list(doctree.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)
            continue
        for number, entry in enumerate(head.findall(nodes.entry), 1):
            if not entry.astext().strip():
                hidden = f'<span class="said">column {number}</span>'
                entry[:] = [nodes.raw("", hidden, format="html")]


def name_toggles(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Give pydata-sphinx-theme's arrows beside a link of the contents a name."""
    made = context.get("generate_toctree_html")
    if not made:
        return

    def named(*arguments, **options):
        return str(made(*arguments, **options)).replace(
            "<summary>", '<summary aria-label="The pages below">'
        )

    context["generate_toctree_html"] = named


def name_part(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Give the sidebar the name of the part of the site that a page belongs to, such as Labs."""
    above = context.get("parents") or [context]
    context["part"] = Markup(above[0].get("title", "")).striptags()
