"""What a function on a rank returned, as JSON: numbers, texts, lists and dicts of them.

A student's result may be a tensor, an array, a NumPy number, a range: a check compares numbers,
and need not know of what kind they were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def plain(value: Any, name: str = "", other: Callable[[Any], str] | None = None) -> Any:
    """Return the value in the types of JSON.

    Tensors and arrays become lists of their elements (a number, where they have no dimension);
    tuples, ranges, sets and lists become lists; a NumPy number becomes one of Python.

    Args:
        name: what to call it in an error; by default it is "the result".
        other: makes a text of what has no such form, instead of the error.

    Raises:
        TypeError: there is no way; says which part of it is of which type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {_key(key, name): plain(one, _part(name, key), other) for key, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(one, _part(name, k), other) for k, one in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [plain(one, name, other) for one in sorted(value, key=repr)]
    if kind := _kind_of_array(value):
        # The class's own method: an answer may have given this very tensor another one.
        return plain(kind.tolist(value), name, other)
    if other is not None:
        return other(value)
    raise TypeError(f"{name or 'the result'} is {_what(value)}")


def _kind_of_array(value: Any) -> Any:
    """Return Tensor, ndarray, or what else the value is of these kinds; ``None`` for others.

    Not whatever has a `tolist`: a class with one of its own would choose what a check is shown.
    """
    known = (("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic"), ("array", "array"))
    there = [(sys.modules[name], kind) for name, kind in known if name in sys.modules]
    kinds = (getattr(module, kind) for module, kind in there)
    return next((kind for kind in kinds if isinstance(value, kind)), None)


def _part(name: str, key: object) -> str:
    if not name:
        return str(key) if isinstance(key, str) else f"entry {key} of the result"
    return f"{name}[{key!r}]"


def _key(key: object, name: str) -> str:
    if isinstance(key, str | int | float):
        return str(key)
    raise TypeError(f"{name or 'the result'} has the key {key!r}; expected a text or a number")


def _what(value: Any) -> str:
    """In words, with what to do."""
    kind = type(value).__name__
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, type):
        call = f"{value.__name__}()"
        return f"the function {value.__name__} itself: call it, {call}"
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return f"{article} {kind}; expected numbers, texts, or lists of them"
