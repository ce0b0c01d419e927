"""All pictures of a lab as files for slides: SVG, PNG, and their words."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode
from PIL import Image, PngImagePlugin

from utils.figures.forms import PNG, SVG

from ..notebook import NotebookError


@dataclass(frozen=True)
class Picture:
    """A picture of an executed notebook.

    Attributes:
        name: of its files, without an ending: the id of its cell, with ``-2`` for a second one.
        section: the heading that it stands under.
        words: its alternative text.
        svg, png: the files' contents.
    """

    name: str
    section: str
    words: str
    svg: str
    png: bytes


def pictures(nb: NotebookNode) -> Iterator[Picture]:
    """The pictures of a notebook that :func:`.runs.executed` gave, in order.

    Raises:
        NotebookError: one that has no words, or no SVG.
    """
    section = ""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            section = next(iter(re.findall(r"^##? (.+)$", cell.source, re.MULTILINE)), section)
        shown = [one for one in cell.get("outputs", []) if PNG in one.get("data", {})]
        for place, output in enumerate(shown, start=1):
            name = cell.id if place == 1 else f"{cell.id}-{place}"
            words = output.metadata.get(PNG, {}).get("alt", "")
            if not words or SVG not in output.data:
                lacking = "SVG" if words else "alternative text"
                raise NotebookError(f"cell '{cell.id}': a picture without {lacking}")
            png = base64.b64decode(output.data[PNG])
            yield Picture(name, section, words, output.data[SVG], png)


def save(found: list[Picture], folder: Path) -> None:
    """Write ``NAME.svg``, ``NAME.png`` and ``NAME.txt``, the words, of each into a folder.

    The words are also inside: a title of the SVG, which browsers and office programs read, and the
    description of the PNG.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for one in found:
        (folder / f"{one.name}.svg").write_text(titled(one.svg, one.words), encoding="utf-8")
        (folder / f"{one.name}.png").write_bytes(described(one.png, one.words))
        (folder / f"{one.name}.txt").write_text(one.words + "\n", encoding="utf-8")


def titled(svg: str, words: str) -> str:
    """An SVG that says what it shows."""
    label = html.escape(words, quote=True)
    start = f'<svg role="img" aria-label="{label}"'
    with_role = svg.replace("<svg", start, 1)
    end = with_role.index(">", with_role.index(start) + len(start)) + 1
    return f"{with_role[:end]}\n <title>{html.escape(words)}</title>{with_role[end:]}"


def described(png: bytes, words: str) -> bytes:
    """A PNG with the words in its text field "Description"."""
    file, text = io.BytesIO(), PngImagePlugin.PngInfo()
    text.add_itxt("Description", words)
    with Image.open(io.BytesIO(png)) as image:
        image.save(file, "png", pnginfo=text, dpi=image.info.get("dpi"))
    return file.getvalue()
