"""What a question gives to each rank: as JSON text, which is all that travels there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def target_of(function: str | Callable[..., Any]) -> str:
    """Return "package.module:function", by which a rank finds a function; text as it is.

    Raises:
        ValueError: the ranks can't import the function by its name, or the text has another form.
    """
    if callable(function):
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or not name.isidentifier():
            raise ValueError(
                f"the ranks can't import {name} of {module}: give a function at the top level of "
                "a module that the ranks have, too"
            )
        return f"{module}:{name}"
    if not isinstance(function, str) or function.count(":") != 1:
        raise ValueError(f'target must look like "package.module:function", not {function!r}')
    return function


def texts(
    n: int, target: str, kwargs: Mapping[str, Any], each: Sequence[Mapping[str, Any]] | None
) -> list[str]:
    """The keyword arguments of each of n ranks, as JSON text: those of all, and its own.

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
