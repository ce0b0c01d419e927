"""A figure as a notebook stores it: PNG, words, and, where slides are to be made of it, SVG.

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

from . import alt

VARIABLE = "DDL_LABS_SVG"
#: Pixels per inch: on a page, and on a slide.
DPI, SLIDE_DPI = 100, 200
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
    """Return all of a `bundle` but the PNG, which IPython makes itself of a cell's figures.

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


def png(figure: Figure) -> bytes:
    """Return the figure's pixels."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi())
    return file.getvalue()


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
