"""A figure as a notebook stores it: PNG, words, and, where slides are to be made of it, SVG.

A PNG has at most 256 colors, which makes notebooks a third as large: most of a figure is paper,
and the thousands of colors at the edges of letters and lines look the same with fewer.

`make figures` sets :data:`VARIABLE`: then every figure comes as SVG as well, and its PNG with twice
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
#: As many as a PNG with a palette can have.
COLORS = 256
PNG, SVG = "image/png", "image/svg+xml"
#: The parts of an SVG get names made from this: the same figure gives the same bytes.
SALT = "ddl-labs"


def wanted() -> bool:
    """Return whether somebody asked for SVG."""
    return bool(os.environ.get(VARIABLE))


def bundle(figure: Figure) -> tuple[dict[str, str], dict[str, Any]]:
    """Return data by MIME type and metadata, for ``display(data, metadata=…, raw=True)``."""
    data, metadata = described(figure)
    return data | {PNG: base64.b64encode(png(figure)).decode()}, metadata


def described(figure: Figure, tight: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """Return all of a `bundle` but the PNG, which notebooks ask for separately.

    Args:
        figure: to describe.
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
    """Return the pixels per inch of what is shown now."""
    return SLIDE_DPI if wanted() else DPI


def png(figure: Figure, tight: bool = False) -> bytes:
    """Return the figure's pixels.

    Args:
        figure: to write.
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
    """Return the figure's lines; its words are outlines, which look the same everywhere.

    Args:
        figure: to write.
        tight: cut to what is drawn, as notebooks do with the figures of a cell.
    """
    file = io.StringIO()
    with rc_context({"svg.hashsalt": SALT, "svg.fonttype": "path"}):
        box = "tight" if tight else None
        figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches=box)
    return file.getvalue()
