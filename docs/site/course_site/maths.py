"""Formulas as MathML, which browsers draw themselves, so that pages need no script for them."""

from __future__ import annotations

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

#: Commands that latex2mathml doesn't know, and what to write instead.
INSTEAD = {r"\arg": r"\operatorname{arg}"}
#: An unknown command in MathML: latex2mathml leaves it as a name that begins with a backslash.
UNKNOWN = re.compile(r"<m\w+>(\\\w+)</m")


def setup(app: Sphinx) -> None:
    """Register the renderer that conf.py names."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))


def inline(translator, node: nodes.math) -> None:
    """Draw a formula within a line."""
    translator.body.append(drawn(node.astext(), "inline"))
    raise nodes.SkipNode


def block(translator, node: nodes.math_block) -> None:
    """Draw a formula on separate lines."""
    # A formula that is wider than the page can be scrolled, by keyboard, too.
    translator.body.append(f'<div class="math" tabindex="0">{drawn(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def drawn(formula: str, display: str) -> str:
    """Return a LaTeX formula as MathML.

    Raises:
        ExtensionError: latex2mathml doesn't know a command; the message names it and the formula.
    """
    text = formula
    for unknown, known in INSTEAD.items():
        text = text.replace(unknown, known)
    made = convert(text, display=display)
    if unknown := UNKNOWN.search(made):
        raise ExtensionError(
            f"the site can't draw {unknown[1]} of the formula {formula!r}: write it another way, "
            "or add it to INSTEAD in docs/site/course_site/maths.py"
        )
    return made
