"""Colours of a lab's cells: those of IPython, and a cell that begins with %%px is Python, too."""

from __future__ import annotations

from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers.python import Python3Lexer
from pygments.token import Keyword, Operator, Text
from sphinx.application import Sphinx

PX = (
    r"(?s)(\s*)(%%)(px)([^\n]*\n)(.*)",
    bygroups(Text, Operator, Keyword, Text, using(Python3Lexer)),
)


class LabLexer(IPython3Lexer):
    """IPython's, which knows no magics of other packages."""

    name = "Lab"
    aliases = ("lab",)
    tokens = {**IPython3Lexer.tokens, "root": [PX, *IPython3Lexer.tokens["root"]]}  # noqa: RUF012


def setup(app: Sphinx) -> None:
    """Give it the name that the notebooks of pages ask for."""
    app.add_lexer("lab", LabLexer)
