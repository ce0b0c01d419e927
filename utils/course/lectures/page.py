"""A deck as one HTML file with reveal.js, which needs no network: its pictures stay interactive."""

from __future__ import annotations

import base64
import html
import re
from functools import cache
from importlib import resources
from pathlib import Path

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from utils.course.page_templates import environment, html_of

from .deck import Deck, Picture
from .reading import LectureError

TEMPLATES = Path(__file__).with_name("templates")
#: The size of a slide, in pixels of CSS; reveal.js scales it to the window.
WIDTH, HEIGHT = 1280, 720
#: Colors of code that keep a contrast of at least 4.5.
STYLE = "bw"


def page(deck: Deck) -> str:
    """Return the HTML page of a deck."""
    made = environment(TEMPLATES)
    made.tests["instance"] = lambda block, name: type(block).__name__ == name
    made.filters |= {"colored": colored, "picture": picture, "inline": inline}
    template = made.get_template("deck.html.j2")
    return template.render(deck=deck, width=WIDTH, height=HEIGHT, reveal=reveal, style=STYLE)


def colored(source: str) -> Markup:
    """Return lines of a cell as HTML."""
    formatter = HtmlFormatter(nowrap=True, noclasses=True, style=STYLE, nobackground=True)
    return Markup(highlight(source, PythonLexer(), formatter))


def inline(markdown: str) -> Markup:
    """Return a line of Markdown as HTML without a paragraph around it."""
    paragraph = re.fullmatch(r"\s*<p>(.*)</p>\s*", str(html_of(markdown)), re.DOTALL)
    if paragraph is None:
        raise LectureError(f"{markdown!r} is not one line: write it without lists and paragraphs")
    return Markup(paragraph[1])


def picture(shown: Picture) -> Markup:
    """Return a picture as HTML: interactive, if it has such a form."""
    if shown.html:
        return Markup(shown.html)
    words, data = html.escape(shown.words, quote=True), base64.b64encode(shown.png).decode()
    return Markup(f'<img alt="{words}" src="data:image/png;base64,{data}">')


@cache
def reveal(name: str) -> Markup:
    """Return a file of reveal.js, such as ``dist/reveal.js``, to be put into a page.

    The package sphinx-revealjs brings reveal.js, so that making a deck needs no network.
    """
    file = resources.files("sphinx_revealjs") / "_static/revealjs" / name
    # In a script of a page, this end of a tag would end the page's script.
    return Markup(file.read_text(encoding="utf-8").replace("</script", r"<\/script"))
