"""Texts of the labs' authors on pages: never a student's, as HTML in them stays HTML."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from markupsafe import Markup
from nbconvert.filters import markdown2html

_FORMULA = re.compile(r"(\$\$?)([^$]+)\1")


def html_of(text: str) -> Markup:
    """Markdown as HTML, formulas as MathML: the pages need no network."""
    return Markup(_FORMULA.sub(_mathml, markdown2html(text)))


def _mathml(found: re.Match[str]) -> str:
    return convert(html.unescape(found[2]), display="block" if found[1] == "$$" else "inline")
