"""The records in a rank's reply: the kernel replaces each by its own, and notes which are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch_mpi.record import Call, as_dict

#: A dict with this key is a record, see :func:`torch_mpi.record.as_dict`.
KEY = "op"
#: A check may make so many barriers in a question without a record, because they bring no data. But
#: each barrier that comes late would tell the other ranks a bit.
MOST_BARRIERS = 60
#: What only the rank knows: whether its program has waited, and the times on its own clock.
OF_THE_RANK = ("waited", "start", "matched", "end")


class ForgedRecord(ValueError):
    """A reply has a record of a call that the rank did not make, or has one twice."""


class Records(list[Any]):
    """A list with records.

    Attributes:
        was_read: whether somebody has looked into it.
    """

    was_read = False

    def __iter__(self) -> Iterator[Any]:
        self.was_read = True
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.was_read = True
        return super().__getitem__(index)

    def __len__(self) -> int:
        self.was_read = True
        return super().__len__()

    def __add__(self, other: Any) -> list[Any]:
        return list(self) + list(other)

    def __radd__(self, other: Any) -> list[Any]:
        return list(other) + list(self)


class Confirmation:
    """The kernel's look at a reply.

    Args:
        calls: what the rank has called since it was asked, by numbers.

    Attributes:
        lists: the lists with records.
        numbers: of the calls that the reply has records of.
    """

    def __init__(self, calls: Mapping[int, Call]):
        self._calls = calls
        self.lists: list[Records] = []
        self.numbers: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return a part of the reply in which each record says what the kernel has noted.

        Raises:
            ForgedRecord: the kernel has not noted such a call, or there are two records of it.
        """
        if isinstance(value, list):
            inside = [self._record(one) if _is_record(one) else self.of(one) for one in value]
            if not any(map(_is_record, value)):
                return inside
            self.lists.append(Records(inside))
            return self.lists[-1]
        if _is_record(value):
            raise ForgedRecord("a record is not in a list")
        if isinstance(value, dict):
            return {name: self.of(one) for name, one in value.items()}
        return value

    def left_out(self) -> tuple[str, ...]:
        """Return the operations of the calls that the reply has no records of.

        A few barriers need no record if the rank waited for each one, and for nothing else then.
        """
        left = [call for number, call in self._calls.items() if number not in self.numbers]
        silent = [call for call in left if call.op == "barrier" and self._is_alone(call)]
        if len(silent) <= MOST_BARRIERS:
            left = [call for call in left if call not in silent]
        return tuple(call.op for call in left)

    def _is_alone(self, call: Call) -> bool:
        """Return whether the rank waited for a call, and for no other one at the same time."""
        others = (one for one in self._calls.values() if one is not call and one.blocking)
        return call.blocking and not any(_overlap(call, one) for one in others)

    def _record(self, value: dict[str, Any]) -> dict[str, Any]:
        number = value.get("number")
        if not isinstance(number, int) or number not in self._calls:
            raise ForgedRecord(f"a record is of a call {number}, which the rank did not make")
        if number in self.numbers:
            raise ForgedRecord(f"two records are of call {number}")
        self.numbers.add(number)
        own = {name: value[name] for name in OF_THE_RANK if name in value}
        return as_dict(self._calls[number]) | own


def _overlap(one: Call, other: Call) -> bool:
    """Return whether one call began before the other one was over, for both."""
    return one.start < (other.end or math.inf) and other.start < (one.end or math.inf)


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and KEY in value
