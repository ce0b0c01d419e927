"""An interactive picture: a script, its data and a still picture, in one piece of HTML.

    Interactive(HERE / "clicks.js", {"clicks": 3}, still, "A counter at 3.")

The script is the body of a JavaScript function of `root` (an empty element of the page), `data`
(the mapping) and `ddl` (the tools of `scripts/base.js`). The piece needs neither network nor
kernel: it works in JupyterLab, in nbconvert's pages, on the course's site and in its own file. If
scripts don't run, for example in a notebook that JupyterLab doesn't trust, readers see the still
picture.
"""

from __future__ import annotations

import functools
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from . import alt, forms, palette

HTML = "text/html"
_SCRIPTS = Path(__file__).with_name("scripts")
_COMMENTS = ("//", "/*")
# The picture shows its title itself, but screen readers look for a heading.
_PAGE_STYLE = """:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
h1 { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }"""


class Interactive:
    """A picture that reacts to mouse, fingers and keyboard.

    Args:
        script: path of the JavaScript file, or of several files that make one function. Each
            comment must have its own line, and no string may continue on the next line, because
            notebooks get the script without its indentation. A style sheet with the same name is
            added.
        data: data for the script, as JSON values without NaN and infinity.
        still: the picture that is shown if scripts don't run.
        words: description; by default, :func:`utils.figures.alt.describe` makes it.
        text: text for a terminal; by default the words.
    """

    def __init__(
        self,
        script: str | os.PathLike | Sequence[str | os.PathLike],
        data: Mapping[str, Any],
        still: Figure,
        words: str = "",
        *,
        text: str = "",
    ):
        if words:
            still.alt_text = words
        # Otherwise pyplot would show it once more below the cell.
        plt.close(still)
        self.still = still
        self.words = alt.describe(still)
        self._text = text or self.words
        files = [script] if isinstance(script, (str, os.PathLike)) else script
        styles = [Path(file).with_suffix(".css") for file in files]
        self._script = "\n".join(_compact(Path(file)) for file in files)
        self._style = "\n".join(_compact(file) for file in styles if file.exists())
        self._data = _json(data)

    def __repr__(self) -> str:
        return self._text

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict, dict]:
        """Return the piece as HTML, the still picture with its words, and the text."""
        data, metadata = self._still_bundle
        return {**data, HTML: self.piece(), "text/plain": self._text}, metadata

    @functools.cached_property
    def _still_bundle(self) -> tuple[dict[str, str], dict[str, Any]]:
        return forms.bundle(self.still)

    def piece(self) -> str:
        """Return the picture as a part of a page."""
        words = html.escape(self.words)
        name = "ddl-" + hashlib.sha256((self._script + self._data).encode()).hexdigest()[:12]
        image = forms.in_html(self._still_bundle[0], words)
        base, style = (_compact(_SCRIPTS / file) for file in ("base.js", "base.css"))
        return (
            f'<div class="ddl-interactive" id="{name}" role="group" aria-label="{words}">\n'
            f"{image}\n"
            f"<style>\n{style}\n{self._style}\n</style>\n<script>\n(() => {{\n"
            f"const colors = {_json(_colors())};\n{base}\n"
            f"start(document.currentScript.parentElement, {self._data}, (root, data, ddl) => {{\n"
            f"{self._script}\n}});\n}})();\n</script>\n</div>"
        )

    def html(self) -> str:
        """Return a page that contains only the picture."""
        title = html.escape(self.words.partition(". ")[0])
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>\n{_PAGE_STYLE}\n</style>\n</head>\n<body>\n<main>\n"
            f"<h1>{title}</h1>\n{self.piece()}\n</main>\n</body>\n</html>\n"
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write the page to a file that any browser can open."""
        Path(path).write_text(self.html(), encoding="utf-8")


def _colors() -> dict[str, Any]:
    """Return the colors for scripts, with the names of `ddl.colors`."""
    return {
        "computing": palette.COMPUTING,
        "communicating": palette.COMMUNICATING,
        "waiting": palette.WAITING,
        "exposed": palette.EXPOSED,
        "ranks": palette.RANKS,
    }


def _json(data: object) -> str:
    """Return JSON without ``<``, because a script element ends at the first ``</script>``."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def _compact(file: Path) -> str:
    """Return a script or a style sheet without indentation and without lines of comments."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(_COMMENTS))
