"""What ``torch_mpi.protocol`` asks of those who use it: a group, its works, and what it waits for.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..record import Call

if TYPE_CHECKING:
    from .recovery import Standing, Unreceived
    from .status import Side
    from .world import World


class Waitable(Protocol):
    """What can be waited for."""

    call: Call

    def poll(self) -> bool:
        """Move it on; return whether it is over."""

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the global ranks that have to come, if one is enough, and if data are moving."""

    def due(self) -> float | None:
        """Return when it will be over (``time.perf_counter``), where that is known."""
        return None

    def moved(self) -> object:
        """Return something that is another one whenever data have moved."""
        return None

    def withdraw(self) -> bool:
        """Take it back; return False if it is too late: it is about to complete."""
        return True


class Work(Waitable, Protocol):
    """A communication of a group, which the progress thread moves on.

    Attributes:
        is_collective: whether all ranks of the group have to call it.
        is_watched: whether the progress thread tests it.
        has_future: whether somebody has asked for its future, which may call back.
        not_before: when the progress thread tests it at the earliest (``time.perf_counter``).
    """

    is_collective: bool
    is_watched: bool
    has_future: bool
    not_before: float

    @property
    def group(self) -> Group:
        """Return the group it is a communication of."""

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, as far as is known without a look."""

    def give_up_if_overdue(self) -> bool:
        """End a future that nobody would end otherwise; return whether the work is over."""

    def withdraw_receive(self) -> None:
        """Cancel it, where that leaves nothing behind: a receive that nobody has sent to."""

    def withdraw_or_take_part(self) -> None:
        """Leave; or, where another rank relies on this one, take part: all have come already."""

    def is_free(self) -> bool:
        """Return whether MPI has let go of the memory of one that was given up."""

    def expected_until(self) -> float:
        """Return until when it is worth to move it on without a pause; 0 where it is not."""


class Owner(Protocol):
    """The owner of an entry in the handshake's queue, see :class:`~.handshake.Entry`."""

    def begin(self, blocking: bool) -> None:
        """Make the MPI calls: all ranks are there."""

    def refuse(self, mismatched: list[int]) -> None:
        """Note that it will never begin, as these ranks made another call."""


class Group(Protocol):
    """A process group on this rank.

    Attributes:
        key: its members, and how many groups of theirs there were with it: equal on all members.
        members: global ranks, in the order of the group.
        closed: whether this rank has destroyed it.
    """

    key: tuple[tuple[int, ...], int]
    members: tuple[int, ...]
    closed: bool

    @property
    def world(self) -> World:
        """Return all ranks, among which the group's are some."""

    @property
    def balance(self) -> int:
        """Return how many more messages this rank has sent in it than received."""

    def called(self) -> dict[str, Side]:
        """Return what this rank has called that has not begun, by the name of the collective."""

    def forget_fast_path(self) -> None:
        """Have the next call look whether all is well."""

    def free_if_flushed(self) -> None:
        """Free the communicators of a destroyed group if no message can still be on its way."""

    # -- after an incident ------------------------------------------------------------------

    def standing(self, settled: bool) -> Standing:
        """Return what the other members have to know to begin anew together."""

    def renew(self, standings: Sequence[Standing]) -> None:
        """Begin anew; all members are here, and stand as told, in order."""

    def sweep(self) -> list[Unreceived]:
        """Throw away the messages that nobody has received; all members do so together."""

    def refuse_further_use(self, reason: str) -> None:
        """Refuse further use: some members do not have this group any more, or never had it."""

    def free_alone(self, settled: bool, freed: bool) -> None:
        """Free a destroyed group that other members do not have."""
