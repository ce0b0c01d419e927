"""The frame of all pages, and the environment in which their templates are filled in."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from .markdown import html_of
from .numbers import number

#: Has `base.html.j2`, which every page extends.
FOLDER = Path(__file__).with_name("templates")


def environment(folder: Path) -> Environment:
    """Return the environment of the templates in a folder, beside those in FOLDER."""
    made = Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": number, "markdown": html_of}
    return made
