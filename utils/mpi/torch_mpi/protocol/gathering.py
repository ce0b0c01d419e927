"""Waits of all ranks for each other: they are here, they have told, nothing is under way any more.

Used after an incident, see :mod:`torch_mpi.protocol.recovery`, and by ranks that go on without a
dead one. The first is the only wait that a rank can leave; the others are for messages that are
sent for certain.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..mpi import MPI, largest_tag
from ..record import Call
from .board import Board
from .interfaces import Waitable
from .progress import guard
from .wait_monitor import wait_for

if TYPE_CHECKING:
    from .world import World

# Seconds for an exchange, and for a flush.
DEADLINE = 30.0


class Assembly(Waitable):
    """All ranks are here, and none of them leaves any more: something to wait for.

    Args:
        call: for messages.
        board: of the world.
        here, acknowledged: indices of two words on it.
        ranks: returns who has to come, this rank among them. It is asked again and again, and so a
            rank that dies can be left out.
        number: of the meeting; larger than that of the last one.
        check: raises an error when the ranks will not come.
    """

    def __init__(
        self,
        call: Call,
        board: Board,
        here: int,
        acknowledged: int,
        ranks: Callable[[], Sequence[int]],
        number: int,
        check: Callable[[], None],
    ):
        self.call = call
        self._board = board
        self._here = here
        self._acknowledged = acknowledged
        self._ranks = ranks
        self._number = number
        self._check = check
        board.set(here, number)

    def poll(self) -> bool:
        """Return whether everybody is here for good."""
        self._check()
        if self._behind(self._here):
            # A rank that comes late may still be in a blocking call, and wait for what this one
            # has sent: that may leave only while this rank calls MPI.
            MPI.COMM_SELF.Iprobe()
            return False
        self._board.set(self._acknowledged, self._number)
        if self._behind(self._here):  # one has left just now
            self._board.set(self._acknowledged, self._number - 1)
            return False
        return True

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return who is not here."""
        return self._behind(self._here), False, False

    def _behind(self, index: int) -> list[int]:
        """Return the ranks whose word has not reached the meeting's number."""
        return [rank for rank in self._ranks() if not self._has_reached(index, rank)]

    def _has_reached(self, index: int, rank: int) -> bool:
        self._board.refresh()
        return self._board.of(index, rank) >= self._number

    def withdraw(self) -> bool:
        """Leave; return False if all have come, and one relies on this rank."""
        self._board.set(self._here, self._number - 1)
        self._board.fence()
        if not any(self._has_reached(self._acknowledged, rank) for rank in self._ranks()):
            return True
        self._board.set(self._here, self._number)
        return False


def assemble(assembly: Assembly, timeout: float) -> KeyboardInterrupt | None:
    """Wait until all ranks are here for good.

    Returns:
        A Ctrl-C that came too late, when another rank relied on this one: the caller raises it
        when what follows is over.

    Raises:
        CommunicationTimeout: one did not come; this rank has left, as after any other error.
    """
    try:
        wait_for(assembly, timeout)
    except BaseException as error:
        with guard:
            while not assembly.withdraw():
                if assembly.poll():
                    return error if isinstance(error, KeyboardInterrupt) else None
        raise
    return None


@dataclass
class Taken:
    """A message that was in a communicator: who sent it, under which tag.

    Its data are there when the request is complete.
    """

    source: int
    tag: int
    data: bytearray = field(repr=False)
    request: MPI.Request = field(repr=False)


class _Messages(Waitable):
    """Messages from and to some ranks of a communicator, as in both of the last steps.

    Args:
        ranks: of the communicator.
        check: raises an error when another rank has given up.
        names: the same as ranks of the world, for messages.
    """

    def __init__(
        self,
        purpose: str,
        communicator: MPI.Intracomm,
        ranks: Sequence[int],
        check: Callable[[], None],
        names: Sequence[int] = (),
    ):
        self._check = check
        self.call = Call(purpose, tuple(names or ranks))
        self._communicator = communicator
        self._names = dict(zip(ranks, names or ranks, strict=True))
        self._awaited = list(ranks)
        self._requests: list[MPI.Request] = []

    def _send(self, data: bytes, tag: int) -> None:
        self._requests += [
            self._communicator.Isend([data, len(data), MPI.BYTE], rank, tag)
            for rank in self._awaited
        ]

    def _take(self, source: int, tag: int = MPI.ANY_TAG) -> Taken | None:
        """Take the next message of a rank, if there is one."""
        status = MPI.Status()
        message = self._communicator.Improbe(source, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        request = message.Irecv([data, len(data), MPI.BYTE])
        self._requests.append(request)
        return Taken(source, status.tag, data, request)

    def poll(self) -> bool:
        """Return whether everything is here, and what this rank has sent was taken."""
        self._check()
        self._awaited = [rank for rank in self._awaited if not self._has_come(rank)]
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._awaited and not self._requests

    @abc.abstractmethod
    def _has_come(self, rank: int) -> bool:
        """Look once; return whether everything of a rank is here."""

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return from whom something is missing."""
        return [self._names[rank] for rank in self._awaited], False, False


class Exchange(_Messages):
    """A text from and to every other rank: something to wait for."""

    def __init__(
        self,
        communicator: MPI.Intracomm,
        ranks: Sequence[int],
        tag: int,
        text: str,
        check: Callable[[], None],
    ):
        others = [rank for rank in ranks if rank != communicator.rank]
        super().__init__("the ranks' exchange after an error", communicator, others, check)
        self._tag = tag
        data = text.encode()
        self._data: dict[int, bytes | bytearray] = {communicator.rank: data}
        self._send(data, tag)

    def _has_come(self, rank: int) -> bool:
        taken = self._take(rank, self._tag)
        if taken is not None:
            self._data[rank] = taken.data
        return taken is not None

    def texts(self) -> dict[int, str]:
        """Return the text of each rank, this rank's among them."""
        return {rank: data.decode() for rank, data in self._data.items()}


def exchange(world: World, text: str) -> dict[int, str]:
    """Return the text of each rank; all of them call this.

    Raises:
        CommunicationTimeout: one did not come.
        CommunicationError: one is dead, or has given up.
    """
    tag = (world.epoch + 1) % largest_tag(world.control)
    texts = Exchange(world.control, range(world.size), tag, text, world.refuse_if_not_whole)
    wait_for(texts, DEADLINE)
    return texts.texts()


class Flush(_Messages):
    """Everything that was sent before is out of a communicator: something to wait for.

    All its ranks do this together. Each tells itself, too: a rank may have sent to itself.

    Args:
        all_sent: returns whether everything that this rank has sent was taken; a large message
            moves only while its sender calls MPI.

    Attributes:
        taken: the messages that nobody had received.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        members: Sequence[int],
        check: Callable[[], None],
        all_sent: Callable[[], bool],
    ):
        purpose = "the end of what was under way"
        super().__init__(purpose, communicator, range(communicator.size), check, members)
        self.taken: list[Taken] = []
        # Under the largest tag nobody else sends an empty message.
        self._tag = largest_tag(communicator)
        self._all_sent = all_sent
        self._send(b"", self._tag)

    def poll(self) -> bool:
        """Return whether nothing of before is left."""
        return super().poll() & self._all_sent()

    def _has_come(self, rank: int) -> bool:
        while (taken := self._take(rank)) is not None:
            if taken.tag == self._tag and not taken.data:
                return True
            self.taken.append(taken)
        return False


class GroupFlush:
    """The flushes of a group's two communicators, which all members do together.

    Args:
        communicators: of the user's messages, and of data.
        members, check: see :class:`Flush`.
        all_sent: of the second.
    """

    # MPI may need several calls to find a message that is here already.
    _LOOKS = 10

    def __init__(
        self,
        communicators: Sequence[MPI.Intracomm],
        members: Sequence[int],
        check: Callable[[], None],
        all_sent: Callable[[], bool],
    ):
        envelopes, data = communicators
        self._flushes = [
            Flush(envelopes, members, check, lambda: True),
            Flush(data, members, check, all_sent),
        ]

    def is_over(self) -> bool:
        """Look, without waiting, whether every member has flushed both."""
        # A list, so that both are moved on.
        return any(all([flush.poll() for flush in self._flushes]) for _ in range(self._LOOKS))

    def finish(self) -> list[Taken]:
        """Wait for all members, and return the user's messages that nobody had received.

        Raises:
            CommunicationTimeout: a member did not come within :data:`DEADLINE` seconds; or what
                ``check`` raises.
        """
        for flush in self._flushes:
            wait_for(flush, DEADLINE)
        return self._flushes[0].taken
