"""Numbers as people read them in tables and on pages."""

from __future__ import annotations


def number(value: float | None) -> str:
    """Return a number with at most two decimals, such as 2 or 1.5; nothing for None."""
    return "" if value is None else f"{round(value, 2):g}"
