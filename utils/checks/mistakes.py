"""A wrong result is recognised, and its author is told what went wrong.

A task lists the mistakes that students make: what each of them gives, and what to say then::

    explain(
        result,
        total,
        [
            Mistake(total / n, "this is the mean: the task asks for the sum"),
            Mistake(is_nested, "this is a list of lists: make one flat list of it"),
        ],
    )

The first one that fits is told; without one, what was expected and what came. What to say is what
is wrong, why, and what to try, in that order, and begins in small letters, as it may follow on
something else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: How far two numbers may be apart, as a share of the expected one.
TOLERANCE = 1e-5
#: The same for double precision: what has passed through float32 is further off.
EXACT = 1e-10
#: Letters of a list that is shown whole.
_WHOLE = 60


@dataclass(frozen=True)
class Mistake:
    """One that students make.

    Attributes:
        gives: the result that it leads to; or a function that recognises it.
        said: what its author is told.
    """

    gives: Any | Callable[[Any], bool]
    said: str

    def fits(self, result: Any, tolerance: float = TOLERANCE) -> bool:
        """Return whether this mistake gives the result."""
        if callable(self.gives):
            return bool(self.gives(result))
        return same(result, self.gives, tolerance)


#: What a task that asks for a number gets told of :func:`utils.checks.probe.number`.
NO_NUMBER = Mistake(
    lambda v: isinstance(v, str), "return one number, not a tensor or a list: .item()"
)


def table(wrong: Mapping[str, Any]) -> list[Mistake]:
    """Return mistakes from a mapping of words to results; a result may be a tensor."""
    return [
        Mistake(gives.tolist() if hasattr(gives, "tolist") else gives, said)
        for said, gives in wrong.items()
    ]


def one_of(*results: Any) -> Callable[[Any], bool]:
    """Return a function that recognizes several results of the same mistake."""
    return lambda got: any(same(got, result) for result in results)


def explain(
    result: Any,
    expected: Any,
    mistakes: Iterable[Mistake] = (),
    *,
    form: str = "",
    tolerance: float = TOLERANCE,
) -> str | None:
    """Return what is wrong with a result; `None` for a right one. See :func:`recognise`."""
    wrong = recognise(result, expected, mistakes, form=form, tolerance=tolerance)
    return wrong and wrong[0]


def recognise(
    result: Any,
    expected: Any,
    mistakes: Iterable[Mistake] = (),
    *,
    form: str = "",
    tolerance: float = TOLERANCE,
) -> tuple[str, str] | None:
    """Return what is wrong with a result, and of which kind it is; `None` for a right one.

    Args:
        result, expected: values of JSON.
        mistakes: the first that fits is told. They are made only if something is wrong.
        form: what has to be returned, in words; told where nothing was.

    Returns:
        The words, and "mistake" for a known one, or "value".
    """
    if same(result, expected, tolerance):
        return None
    if result is None and form:
        return f"returned None: return {form}", "mistake"
    for mistake in mistakes:
        if mistake.fits(result, tolerance):
            stop = "" if mistake.said.endswith(("?", ".")) else "."
            return f"{mistake.said}{stop} {difference(result, expected, tolerance)}", "mistake"
    if same(result, expected):
        said = "right to six digits only: was something computed in float32? Keep the type of what "
        return said + "was given", "mistake"
    text = difference(result, expected, tolerance)
    return text[0].lower() + text[1:], "value"


def difference(result: Any, expected: Any, tolerance: float = TOLERANCE) -> str:
    """Return both values in words; of long lists, the first entry that differs."""
    long = len(str(expected)) > _WHOLE or len(str(result)) > _WHOLE
    if not (long and isinstance(expected, list) and isinstance(result, list)):
        return "Expected {}, got {}".format(*_apart(expected, result))
    pairs = itertools.zip_longest(expected, result, fillvalue="nothing")
    k, (e, g) = next((k, pair) for k, pair in enumerate(pairs) if not same(*pair[::-1], tolerance))
    return "Entry {}: expected {}, got {}".format(k, *_apart(e, g, _WHOLE))


def _apart(expected: Any, result: Any, most: int = 160) -> tuple[str, str]:
    """Return texts of two values that show their difference.

    If six digits don't tell them apart, all digits do; if their beginnings are equal, they begin
    where they differ.
    """
    for digits in (6, 17):
        texts = [str(_rounded(value, digits)) for value in (expected, result)]
        if texts[0] != texts[1]:
            break
    pairs = enumerate(zip(*texts, strict=False))
    differ = next((k for k, (one, other) in pairs if one != other), 0)
    begin = differ - 20 if differ > most - 20 else 0
    cut = [f"…{text[begin:]}" if begin else text for text in texts]
    first, second = (text if len(text) <= most else f"{text[: most - 1]}…" for text in cut)
    return first, second


def same(result: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    """Return whether values are equal: numbers within a relative tolerance; nan equals nothing."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(result, list | tuple)
            and len(result) == len(expected)
            and all(same(g, e, tolerance) for g, e in zip(result, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(result, dict)
            and result.keys() == expected.keys()
            and all(same(result[key], expected[key], tolerance) for key in expected)
        )
    if isinstance(expected, bool) or isinstance(result, bool) or expected is None:
        return result is expected
    if is_number(result) and is_number(expected):
        return bool(result == expected) or _near(result, expected, tolerance)
    return bool(result == expected)


def _near(result: float, expected: float, tolerance: float) -> bool:
    """Return whether two finite numbers are near; every number is within a share of infinity."""
    try:
        apart = abs(result - expected)
    except OverflowError:  # an integer that no float holds
        return False
    return math.isfinite(expected) and apart <= tolerance * max(1.0, abs(expected))


def is_number(value: Any) -> bool:
    """Return whether a value is a number; a truth value is not, and nan is not."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any, most: int = 160, digits: int = 6) -> str:
    """Return a value for a message, with rounded numbers; a long text is cut."""
    text = str(_rounded(value, digits))
    return text if len(text) <= most else text[: most - 1] + "…"


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        if value.is_integer() and 1e6 <= abs(value) < 1e15:
            return int(value)  # a count of bytes, such as 2097152, has no digit to lose
        return float(f"{value:.{digits}g}")
    if isinstance(value, list | tuple):
        return [_rounded(v, digits) for v in value]
    return value
