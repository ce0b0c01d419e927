"""What the world asks of whoever runs its ranks and takes their calls to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch_mpi.record import Log

#: File, line and function.
Place = tuple[str, int, str]


class Waited(Protocol):
    """Something that a rank waits for."""

    done: bool


class Clocks(Protocol):
    """The ranks' clocks, in seconds from a common moment."""

    def now(self, rank: int) -> float:
        """Return the time on a rank's clock."""

    def reach(self, rank: int, moment: float) -> None:
        """Move a rank's clock on to this moment, unless it is later already."""

    def stopped(self, rank: int) -> AbstractContextManager[None]:
        """Let no time pass for a rank, while the world moves data of other ranks in its name."""


class Carrier(Protocol):
    """Runs n ranks, and takes one call at a time from them to the world.

    Attributes:
        n: number of ranks.
        rank: the rank whose call the world works on.
        batch: how often all ranks were idle, and then got something to do.
        clocks: the ranks' clocks.
        stuck: the world's answer when each rank waits or has nothing to do. The carrier calls it;
            afterwards, nobody waits for a communication any more.
    """

    stuck: Callable[[], None]

    @property
    def n(self) -> int: ...  # noqa: D102

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def batch(self) -> int: ...  # noqa: D102

    @property
    def clocks(self) -> Clocks: ...  # noqa: D102

    def block(self, waited: Waited, until: float | None = None) -> None:
        """Let the other ranks go on until this is done, or until a moment on this rank's clock.

        Raises:
            KeyboardInterrupt: this rank has been interrupted.
        """

    def ended(self, waited: Waited) -> None:
        """Take note that this is done; a rank that waits for it may go on."""

    def let_others_run(self) -> bool:
        """Let another rank go on for a while; return False if none can."""

    def waiting(self) -> Mapping[int, Waited]:
        """Return by rank what ranks wait for."""

    def busy(self) -> list[int]:
        """Return the ranks that have something to do."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raise KeyboardInterrupt on these ranks."""

    def log(self, rank: int) -> Log:
        """Return the record of a rank's calls."""

    def place(self) -> Place | None:
        """Return file, line and function of the user's code that made this call."""

    def is_called_by(self, name: str) -> bool:
        """Return whether PyTorch's blocking ``name`` made this call of ``isend`` or ``irecv``."""
