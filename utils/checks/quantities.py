"""What a wrong number is off by, in the quantities of its task, such as 72 = depth × width.

The words help only if they name one product. So a difference that several products explain equally
well stays a number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import cast

from .comparison import is_number, short

#: A product has at most FACTORS quantities, at most one of them squared. If none fits, we try
#: products of one of CONSTANTS and at most BESIDE quantities.
FACTORS, CONSTANTS, BESIDE = 4, (2, 3, 4, 8), 3
#: Of whole numbers up to this one, a quotient says nothing.
CHANCE = 16


def off_by(result: object, expected: object, quantities: Mapping[str, float]) -> str:
    """Return a sentence about a wrong number, or about the first wrong one of a list.

    Args:
        quantities: the numbers that a task gives, by name.

    Returns:
        "The difference is 72 = depth × width", or "It is 12 = depth times the expected number", or
        "" if no single product explains it.
    """
    numbers = _first_pair(result, expected)
    if numbers is None:
        return ""
    got, right = numbers
    if words := product(abs(got - right), quantities):
        return f"The difference is {_whole(abs(got - right))} = {words}"
    # Small whole numbers, such as ranks, often are multiples by chance.
    by_chance = got.is_integer() and right.is_integer() and max(abs(got), abs(right)) <= CHANCE
    if got * right <= 0 or by_chance:
        return ""
    if words := _times(got / right, quantities):
        return f"It is {words} times the expected number"
    if words := _times(right / got, quantities):
        return f"The expected number is {words} times yours"
    return ""


def _first_pair(result: object, expected: object) -> tuple[float, float] | None:
    """Return two finite numbers, of lists the first ones that differ; None if there are none."""
    if isinstance(result, list) and isinstance(expected, list) and len(result) == len(expected):
        pairs = zip(result, expected, strict=True)
        result, expected = next(((a, b) for a, b in pairs if a != b), (None, None))
    if not (is_number(result) and is_number(expected)):
        return None
    got, right = float(cast(float, result)), float(cast(float, expected))
    return (got, right) if math.isfinite(got) and math.isfinite(right) else None


def _times(quotient: float, quantities: Mapping[str, float]) -> str:
    """Return a quotient above 1 in words, as "12 = depth" or "2"; "" for any other one."""
    if quotient in CONSTANTS:
        return _whole(quotient)
    words = product(quotient, quantities) if quotient > 1 else ""
    return words and f"{_whole(quotient)} = {words}"


def _whole(number: float) -> str:
    """Return a number, as an integer if it is one."""
    return short(int(number) if number.is_integer() else number)


def product(number: float, quantities: Mapping[str, float]) -> str:
    """Return the one product of quantities that gives this number, as "2 × depth × width²".

    Products of quantities alone come first. If several fit, nobody knows which one is meant, and
    the result is "".
    """
    for constants, most in (((1,), FACTORS), (CONSTANTS, BESIDE)):
        found = {
            words
            for constant in constants
            for count in range(1, most + 1)
            for words in _products(number, quantities, constant, count)
        }
        if found:
            return found.pop() if len(found) == 1 else ""
    return ""


def _products(
    number: float, quantities: Mapping[str, float], constant: int, count: int
) -> Iterator[str]:
    """Yield the products of a whole number and so many quantities."""
    names = [name for name, size in quantities.items() if size > 1]
    for chosen in itertools.combinations_with_replacement(names, count):
        if len(set(chosen)) < count - 1:
            continue
        size = constant * math.prod(quantities[name] for name in chosen)
        if math.isclose(size, number, rel_tol=1e-9):
            yield " × ".join([*([str(constant)] if constant > 1 else []), *_powers(chosen)])


def _powers(names: tuple[str, ...]) -> list[str]:
    counts = {name: names.count(name) for name in names}
    return [name + "²" * (times - 1) for name, times in counts.items()]
