"""The tools of HTML pages: the environment of templates, authors' Markdown, and numbers."""

from __future__ import annotations

import html
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from latex2mathml.converter import convert
from markupsafe import Markup
from nbconvert.filters import markdown2html

#: The folder with `base.html.j2`, which every page extends.
FOLDER = Path(__file__).with_name("templates")
_FORMULA = re.compile(r"(\$\$?)([^$]+)\1")


def environment(folder: Path = FOLDER) -> Environment:
    """Return the environment of the templates in a folder, in addition to those in FOLDER."""
    made = Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": number, "markdown": html_of}
    return made


def html_of(text: str) -> Markup:
    """Return Markdown as HTML, with formulas as MathML, so that the pages need no network.

    Use it only for texts of the labs' authors, never for a student's text, because HTML in a text
    stays HTML.
    """
    return Markup(_FORMULA.sub(_mathml, markdown2html(text)))


def _mathml(formula: re.Match[str]) -> str:
    display = "block" if formula[1] == "$$" else "inline"
    return convert(html.unescape(formula[2]), display=display)


def number(value: float | None) -> str:
    """Return a number with at most two decimals, such as 2 or 1.5; "" for None."""
    return "" if value is None else f"{round(value, 2):g}"
