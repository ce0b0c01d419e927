"""The interfaces that ``torch_mpi.protocol`` needs: a group, its works, and anything awaited.

This module doesn't need torch.
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
    """An operation that a rank can wait for."""

    call: Call

    def poll(self) -> bool:
        """Advance the operation; return whether it is over."""

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the global ranks still missing, whether one suffices, and whether data move."""

    def due(self) -> float | None:
        """Return when it will be over (``time.perf_counter``); ``None`` if this is unknown."""
        return None

    def moved(self) -> object:
        """Return a value that changes whenever data have moved."""
        return None

    def withdraw(self) -> bool:
        """Withdraw the operation; return False if it is about to complete, so it is too late."""
        return True


class Work(Waitable, Protocol):
    """A communication of a group, which the progress thread advances: see ``MPIWork``.

    Attributes:
        is_collective: whether all ranks of the group have to call it.
        is_watched: whether the progress thread tests it.
        has_future: whether the program has asked for its future, which may run callbacks.
        not_before: the earliest time (``time.perf_counter``) for the progress thread to test it.
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
        """Make the MPI calls, because all ranks are there."""

    def refuse(self, mismatched: list[int]) -> None:
        """Note that the call will never begin, because these ranks made another call."""


class Group(Protocol):
    """A process group on this rank: see ``ProcessGroupMPI``.

    Attributes:
        key: its members, and its number among the groups of these members; equal on all members.
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
    # These are called after an incident.
    standing: Callable[[bool], Standing]
    renew: Callable[[Sequence[Standing]], None]
    sweep: Callable[[], list[Unreceived]]
    refuse_further_use: Callable[[str], None]
    free_alone: Callable[[bool, bool], None]
