"""What ``torch_mpi.protocol`` asks of those who use it: a group, its works, and what it waits for.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A communication of a group, which the progress thread moves on: see ``MPIWork``.

    Attributes:
        is_collective: whether all ranks of the group have to call it.
        is_watched: whether the progress thread tests it.
        has_future: whether somebody has asked for its future, which may call back.
        not_before: when the progress thread tests it at the earliest (``time.perf_counter``).
    """

    group: Group
    is_collective: bool
    is_watched: bool
    has_future: bool
    not_before: float
    is_over: bool
    give_up_if_overdue: Callable[[], bool]
    withdraw_receive: Callable[[], None]
    withdraw_or_take_part: Callable[[], None]
    is_free: Callable[[], bool]
    expected_until: Callable[[], float]


class Owner(Protocol):
    """The owner of an entry in the handshake's queue, see :class:`~.handshake.Entry`."""

    def begin(self, blocking: bool) -> None:
        """Make the MPI calls: all ranks are there."""

    def refuse(self, mismatched: list[int]) -> None:
        """Note that it will never begin, as these ranks made another call."""


class Group(Protocol):
    """A process group on this rank: see ``ProcessGroupMPI``.

    Attributes:
        key: its members, and how many groups of theirs there were with it: equal on all members.
        members: global ranks, in the order of the group.
        closed: whether this rank has destroyed it.
    """

    key: tuple[tuple[int, ...], int]
    members: tuple[int, ...]
    closed: bool
    world: World
    balance: int
    called: Callable[[], dict[str, Side]]
    forget_fast_path: Callable[[], None]
    free_if_flushed: Callable[[], None]
    # After an incident.
    standing: Callable[[bool], Standing]
    renew: Callable[[Sequence[Standing]], None]
    sweep: Callable[[], list[Unreceived]]
    refuse_further_use: Callable[[str], None]
    free_alone: Callable[[bool, bool], None]
