"""The records in a rank's reply, of which the kernel has its own: the kernel's count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_mpi.record import Call, as_dict

#: A dict with these keys is a record, see :func:`torch_mpi.record.as_dict`.
KEYS = {"op", "group", "nbytes"}
#: What only the rank knows: whether its program has waited, and the times on its own clock.
OF_THE_RANK = ("waited", "start", "matched", "end")


class ForgedRecord(ValueError):
    """A reply has a record of a call that the rank did not make, or has one twice in a list."""


def confirmed(value: Any, calls: Mapping[int, Call]) -> tuple[Any, set[int]]:
    """Return a reply in which each record says what the kernel has noted, and the records' numbers.

    Args:
        value: JSON.
        calls: the rank's calls, by their numbers.

    Raises:
        ForgedRecord: the kernel has not noted such a call.
    """
    numbers: set[int] = set()
    return _confirmed(value, calls, numbers), numbers


def _confirmed(value: Any, calls: Mapping[int, Call], numbers: set[int]) -> Any:
    if isinstance(value, list):
        inside = [one.get("number") for one in value if _is_record(one)]
        if len(set(map(str, inside))) < len(inside):
            raise ForgedRecord("a list has the record of one call twice")
        return [_confirmed(one, calls, numbers) for one in value]
    if not isinstance(value, dict):
        return value
    if not _is_record(value):
        return {name: _confirmed(one, calls, numbers) for name, one in value.items()}
    number = value.get("number")
    if not isinstance(number, int) or number not in calls:
        raise ForgedRecord(f"a record is of a call {number}, which the rank did not make")
    numbers.add(number)
    own = {name: value[name] for name in OF_THE_RANK if name in value}
    return value | as_dict(calls[number]) | own | {"number": number}


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= KEYS
