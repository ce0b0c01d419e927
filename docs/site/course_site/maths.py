"""Formulas as MathML, which browsers draw themselves: no script of a third party is loaded."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

#: What docutils does not know, and what it knows instead.
INSTEAD = {r"\dots": r"\ldots", "…": r"\ldots ", "←": r"\leftarrow ", r"\big|": "|"}


def setup(app: Sphinx) -> None:
    """Register the renderer that conf.py names."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))


def inline(translator, node: nodes.math) -> None:
    """Draw a formula within a line."""
    translator.body.append(drawn(node.astext()))
    raise nodes.SkipNode


def block(translator, node: nodes.math_block) -> None:
    """Draw a formula on lines of its own."""
    # It scrolls where it is wider than the page, by keyboard, too.
    start = '<div class="math" tabindex="0">'
    translator.body.append(f"{start}{drawn(node.astext(), as_block=True)}</div>")
    raise nodes.SkipNode


def drawn(formula: str, as_block: bool = False) -> str:
    """A formula of LaTeX as MathML.

    Raises ExtensionError for what docutils can't draw: the build ends with the formula's name.
    """
    text = formula
    for unknown, known in INSTEAD.items():
        text = text.replace(unknown, known)
    try:
        return latex2mathml.tex2mathml(text, as_block=as_block)
    except MathError as error:
        raise ExtensionError(
            f"a formula that the site can't draw, {formula!r}: {error} Write it another way, "
            "or add it to INSTEAD in docs/site/course_site/maths.py"
        ) from error
