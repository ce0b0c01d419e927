"""The process groups of this rank, for those who look after all of them."""

from __future__ import annotations

from collections.abc import Iterator


class Groups:
    """The groups in use, in the order in which they were made; iterate to get them.

    Kept until they are closed: a Ctrl-C inside of PyTorch may take a group from the user.

    Attributes:
        made: how many groups of the same members this rank has made, so that their names are the
            same on all ranks.
        closed: destroyed and not freed: an incident came between, which frees them when it is over,
            or something in them never ends.
        balance_of_closed: see :meth:`balance`.
    """

    def __init__(self):
        self.made: dict[tuple[int, ...], int] = {}
        self.closed: list = []
        self.balance_of_closed = 0
        self._known: list = []

    def add(self, group) -> None:
        """Count a new group."""
        members, count = group.key
        self.made[members] = count
        self._known.append(group)

    def __iter__(self) -> Iterator:
        self._known = [group for group in self._known if not group.closed]
        return iter(list(self._known))

    def close(self, group) -> None:
        """A group is destroyed."""
        self.balance_of_closed += group.channels.balance
        self.closed.append(group)

    def freed(self, group) -> None:
        """Its communicators are given back."""
        self.closed = [one for one in self.closed if one is not group]

    def balance(self) -> int:
        """How many more messages this rank has sent than received in the groups in use."""
        return sum(group.channels.balance for group in self)
