"""The process groups of this rank, for those who look after all of them."""

from __future__ import annotations

from collections.abc import Iterator

from .contracts import Group


class Groups:
    """The groups in use, in the order in which they were made; iterate to get them.

    Kept until they are closed: a Ctrl-C inside of PyTorch may take a group from the user.

    Attributes:
        made: how many groups of the same members this rank has made, so that their names are the
            same on all ranks.
        closed: destroyed and not freed yet, because another member has not destroyed the group, or
            because an incident came between. Recovery frees the latter.
        kept: destroyed groups in which something never ends. MPI may still write to their memory.
        balance_of_closed: see :meth:`balance`.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], int] = {}
        self.closed: list[Group] = []
        self.kept: list[Group] = []
        self.balance_of_closed = 0
        self._known: list[Group] = []

    def add(self, group: Group) -> None:
        """Count a new group."""
        members, count = group.key
        self.made[members] = count
        self._known.append(group)

    def __iter__(self) -> Iterator[Group]:
        self._known = [group for group in self._known if not group.closed]
        return iter(list(self._known))

    def close(self, group: Group) -> None:
        """A group is destroyed."""
        self.balance_of_closed += group.balance
        self.closed.append(group)

    def free_flushed(self) -> None:
        """Free the destroyed groups that all their members have destroyed."""
        for group in list(self.closed):
            group.free_if_flushed()

    def keep_closed(self) -> None:
        """Give up freeing the destroyed groups that are left."""
        self.kept += self.closed
        self.closed.clear()

    def freed(self, group: Group) -> None:
        """Its communicators are given back."""
        self.closed = [one for one in self.closed if one is not group]

    def balance(self) -> int:
        """How many more messages this rank has sent than received in the groups in use."""
        return sum(group.balance for group in self)
