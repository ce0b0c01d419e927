"""The world of ranks that this process belongs to, for tools that watch it, such as a notebook.

Importing this module loads no MPI. :func:`torch_mpi.protocol.world.create` sets :data:`world`, and
so does a tool that brings its own ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .protocol.status import Status


class World(Protocol):
    """What a tool may ask of the ranks.

    :class:`torch_mpi.protocol.world.World` documents each name.
    """

    rank: int
    one_machine: bool

    @property
    def groups(self) -> Iterable[Any]:
        """Return the groups in use."""

    @property
    def own(self) -> Status:
        """Return this rank's status."""

    def statuses(self) -> list[Status]:
        """Return each rank's status."""

    def begin_section(self, name: str) -> None:
        """Begin a part of the program."""

    def end_section(self) -> None:
        """Note that this rank has run its part of the section."""

    def raised(self, error: BaseException, where: str) -> None:
        """Begin an incident, because the user's code ended with an error on this rank."""

    def recover(self, timeout: float) -> None:
        """Meet the other ranks after an incident."""

    def refuse_if_not_whole(self) -> None:
        """Raise CommunicationError if the ranks can't communicate again."""

    def balance(self) -> int:
        """Return how many more messages this rank has sent than received."""

    def sweep(self) -> list[dict[str, object]]:
        """Discard the messages that no rank has received; return those that this rank sent."""

    def withdraw_receives(self, since: float) -> None:
        """Give up receives that began after ``since`` and are still pending."""


#: ``None`` before the first process group.
world: World | None = None
