"""The look of every figure, and the shapes that notebooks draw with."""

from .charts import chart
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
from .shapes import arrow, box, canvas, fit_limits

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
    "use_style",
]
