"""Colors of a lab's cells: as in IPython, but cells that begin with %%px are Python, too."""

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
    """IPython's lexer, extended by %%px, because it knows only IPython's own magics."""

    name = "Lab"
    aliases = ("lab",)
    tokens = {**IPython3Lexer.tokens, "root": [PX, *IPython3Lexer.tokens["root"]]}  # noqa: RUF012


def setup(app: Sphinx) -> None:
    """Register the lexer under the name that the pages' notebooks use."""
    app.add_lexer("lab", LabLexer)
