"""The texts that a question sends to each rank: the function's name and its arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any


def target_of(target: str | Callable[..., Any]) -> str:
    """Return "package.module:function", the text by which every rank finds the function.

    Args:
        target: a function that a module defines at its top level, or such a text already.

    Raises:
        ValueError: the ranks could not find the function, or the text has another form.
    """
    if isinstance(target, str):
        if target.count(":") != 1:
            raise ValueError(f'target must look like "package.module:function", not {target!r}')
        return target
    if reason := _unreachable(target):
        raise ValueError(
            f"{reason}, which ranks cannot import; ask expects a function that a module defines at "
            "its top level. Move it to such a module, and pass the function or its name as "
            '"package.module:function".'
        )
    return f"{target.__module__}:{target.__qualname__}"


def _unreachable(target: object) -> str:
    """Return what was given instead of a module's function; "" for a module's function."""
    if isinstance(target, MethodType):
        return f"{target.__qualname__} is a method"
    if not isinstance(target, FunctionType):
        return f"{target!r} is a {type(target).__name__}"
    name = target.__qualname__
    if target.__name__ == "<lambda>":
        return f"{name} is a lambda of {target.__module__}"
    if "<locals>" in name:
        return f"{name} is a function inside another function"
    if "." in name:
        return f"{name} is a method"
    if target.__module__ == "__main__":
        return f"{name} is a function of the notebook or program (__main__)"
    return ""


def texts(
    n: int, target: str, kwargs: Mapping[str, Any], each: Sequence[Mapping[str, Any]] | None
) -> list[str]:
    """Return the keyword arguments of each of n ranks as JSON text: everybody's, and its own.

    Raises:
        ValueError: they can't be sent, `each` is not one dict per rank, or a name is in both.
    """
    own = [{}] * n if each is None else list(each)
    if len(own) != n or not all(isinstance(one, Mapping) for one in own):
        raise ValueError(f"each must be {n} dicts, one of arguments for each rank; it has {own}")
    if twice := sorted({name for one in own for name in one} & set(kwargs)):
        raise ValueError(f"{', '.join(twice)} is given to all ranks, and in each: name it once")
    try:
        return [json.dumps({**kwargs, **one}) for one in own]
    except TypeError as error:
        raise ValueError(f"the arguments of {target} must be JSON values: {error}") from None
