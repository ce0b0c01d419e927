"""Formulas as MathML, which browsers draw themselves: no script of a third party is loaded."""

from __future__ import annotations

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

#: What latex2mathml does not know, and what it knows instead.
INSTEAD = {r"\arg": r"\operatorname{arg}"}
#: It passes what it does not know on, as a name that begins with a backslash.
UNKNOWN = re.compile(r"<m\w+>(\\\w+)</m")


def setup(app: Sphinx) -> None:
    """Register the renderer that conf.py names."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))


def inline(translator, node: nodes.math) -> None:
    """Draw a formula within a line."""
    translator.body.append(drawn(node.astext(), "inline"))
    raise nodes.SkipNode


def block(translator, node: nodes.math_block) -> None:
    """Draw a formula on lines of its own."""
    # It scrolls where it is wider than the page, by keyboard, too.
    translator.body.append(f'<div class="math" tabindex="0">{drawn(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def drawn(formula: str, display: str) -> str:
    """A formula of LaTeX as MathML.

    Raises ExtensionError for a command that is not known: the build ends with the formula's name.
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
