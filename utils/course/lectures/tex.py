"""Formulas as plain text, for programs that can't draw LaTeX."""

from __future__ import annotations

import re

from pylatexenc.latex2text import LatexNodes2Text, MacroTextSpec, get_default_latex_context_db

_FORMULA = re.compile(r"(\$\$?)([^$]+)\1")


def plain(text: str) -> str:
    r"""Return a text whose formulas are plain: ``$2\frac{p-1}{p}n$`` becomes 2(p-1)/(p)n."""
    return _FORMULA.sub(lambda formula: _plain(formula[2]), text)


def _plain(formula: str) -> str:
    # A group of several characters keeps its braces, which become parentheses.
    text = str(_WORDS.latex_to_text(formula))
    return text.replace("{", "(").replace("}", ")")


def _converter() -> LatexNodes2Text:
    known = get_default_latex_context_db()
    fractions = [MacroTextSpec(name, simplify_repl="(%s)/(%s)") for name in ("frac", "tfrac")]
    others = [
        MacroTextSpec("sqrt", simplify_repl="√(%(2)s)"),
        MacroTextSpec("bmod", simplify_repl=" mod "),
        MacroTextSpec("operatorname", simplify_repl="%(2)s"),
    ]
    known.add_context_category("slides", macros=[*fractions, *others], prepend=True)
    return LatexNodes2Text(
        latex_context=known,
        math_mode="text",
        keep_braced_groups=True,
        keep_braced_groups_minlen=2,
    )


_WORDS = _converter()
