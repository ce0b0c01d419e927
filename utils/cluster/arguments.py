"""What a question gives to each rank: as JSON text, which is all that travels there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


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
