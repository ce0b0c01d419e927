"""The look of every figure, and the shapes that notebooks draw with."""

from .charts import chart, name_rows
from .palette import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PAPER,
    PINK,
    RED,
    SKY,
    YELLOW,
    use_style,
)
from .shapes import arrow, box, canvas, fit_limits, write_beside

__all__ = [
    "BLUE",
    "CYCLE",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PALE",
    "PAPER",
    "PINK",
    "RED",
    "SKY",
    "YELLOW",
    "arrow",
    "box",
    "canvas",
    "chart",
    "fit_limits",
    "name_rows",
    "use_style",
    "write_beside",
]
