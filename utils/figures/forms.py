"""The forms in which a notebook stores a figure: PNG, words, and for slides also SVG.

A PNG has at most 256 colors, which makes notebooks a third as large. Most of a figure is paper, and
the thousands of colors at the edges of letters and lines look the same with fewer colors.

`make figures` sets :data:`VARIABLE`. Then every figure is also stored as SVG, and its PNG has twice
the pixels.
"""

from __future__ import annotations

import base64
import io
import os
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from . import alt

VARIABLE = "DDL_LABS_SVG"
#: Pixels per inch: on a page, and on a slide.
DPI, SLIDE_DPI = 100, 200
#: A wider picture is scaled down by JupyterLab, and its words with it.
MOST_PIXELS = 900
#: Most colors of a PNG with a palette.
COLORS = 256
PNG, SVG = "image/png", "image/svg+xml"
#: A fixed salt for the names of an SVG's parts, so that the same figure gives the same bytes.
SALT = "ddl-labs"


def wanted() -> bool:
    """Return whether SVG is wanted."""
    return bool(os.environ.get(VARIABLE))


def bundle(figure: Figure) -> tuple[dict[str, str], dict[str, Any]]:
    """Return data by MIME type and metadata, for ``display(data, metadata=…, raw=True)``."""
    data, metadata = described(figure)
    return data | {PNG: base64.b64encode(png(figure)).decode()}, metadata


def in_html(data: dict[str, str], words: str) -> str:
    """Return the picture of a :func:`bundle` as an element of a page, with its words in HTML."""
    image = data[PNG].replace("\n", "")
    return f'<img alt="{words}" src="data:image/png;base64,{image}">'


def described(figure: Figure, tight: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """Return all of a `bundle` except the PNG, which notebooks request separately.

    Args:
        figure: the figure to describe.
        tight: as in `svg`.
    """
    words = alt.describe(figure)
    data = {"text/plain": words}
    metadata = {PNG: {"alt": words}}
    if wanted():
        data[SVG] = svg(figure, tight)
        metadata[SVG] = {"alt": words}
    return data, metadata


def dpi() -> int:
    """Return the pixels per inch of the present output."""
    return SLIDE_DPI if wanted() else DPI


def png(figure: Figure, tight: bool = False) -> bytes:
    """Return the figure as PNG.

    Args:
        figure: the figure to write.
        tight: as in `svg`.
    """
    drawn, written = io.BytesIO(), io.BytesIO()
    box = "tight" if tight else None
    look = {"bbox_inches": box, "facecolor": figure.get_facecolor()}
    figure.savefig(drawn, format="png", dpi=dpi(), pil_kwargs={"compress_level": 0}, **look)
    pixels = Image.open(drawn).convert("RGB")
    pixels.quantize(COLORS, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


def svg(figure: Figure, tight: bool = False) -> str:
    """Return the figure as SVG, with words as outlines, which look the same everywhere.

    Args:
        figure: the figure to write.
        tight: cut off blank margins, as notebooks do with the figures of a cell.
    """
    file = io.StringIO()
    with rc_context({"svg.hashsalt": SALT, "svg.fonttype": "path"}):
        box = "tight" if tight else None
        figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches=box)
    return file.getvalue()
