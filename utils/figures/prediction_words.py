"""The sentences about a prediction, before and after the run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

NOTHING_YET = "No prediction yet: write it instead of ... and run this cell again."
NOT_MADE = "You made no prediction."
ASKED = "Predict first. The result comes when you have answered."
UNASKED = "Show the result without a prediction"

# 1,000,000 has commas between its thousands, but the comma of 1,9 means a decimal point.
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")


def noted(values: Mapping[str, float | str | None], unit: str) -> str:
    """Return a line with the prediction so far; "" if there is none."""
    parts = [
        f"{name}: {shown(value, unit)}" if name else shown(value, unit)
        for name, value in values.items()
        if value is not None
    ]
    return f"You predict: {', '.join(parts)}" if parts else ""


def shown(value: float | str, unit: str) -> str:
    """Return a number with its unit, or a choice unchanged."""
    if isinstance(value, str):
        return value
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def number_in(text: str, unit: str) -> float | None:
    """Return the typed number, with or without its unit; ``None`` if it isn't a number."""
    text = text.strip().removesuffix(unit).strip().replace("_", "")
    text = text.replace(",", "" if _THOUSANDS.fullmatch(text) else ".")
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def outcome(
    name: str, guess: float | str | None, result: float | str, unit: str, source: str
) -> str:
    """Return a sentence with the prediction, and the result of the run or another source."""
    if isinstance(result, str):
        gave = "showed the same" if guess == result else f"showed “{result}”"
        expected = f"predicted “{guess}”"
    else:
        gave = f"gave {shown(result, unit)}"
        expected = f"predicted {shown(guess, unit)}" if guess is not None else ""
    if guess is None:
        expected = "made no prediction"
    if name:
        return f"{name}: you {expected}, {source} {gave}."
    return f"You {expected}. {source[0].upper()}{source[1:]} {gave}."
