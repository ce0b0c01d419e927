"""Waits of all ranks for each other: they are here, they have told, nothing is under way any more.

Used after an incident, see :mod:`torch_mpi.protocol.recovery`, and by ranks that go on without a
dead one. The first is the only wait that a rank can leave; the others are for messages that are
sent for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass
class Assembly(Waitable):
    """All ranks are here, and none of them leaves any more: something to wait for.

    Args:
        board: of the world.
        here, acknowledged: indices of two words on it.
        ranks: returns who has to come, this rank among them. It is asked again and again, and so a
            rank that dies can be left out.
        number: of the meeting; larger than that of the last one.
        check: raises an error when the ranks will not come.
    """

    call: Call
    board: Board
    here: int
    acknowledged: int
    ranks: Callable[[], Sequence[int]]
    number: int
    check: Callable[[], None]

    def __post_init__(self) -> None:
        self.board.set(self.here, self.number)

    def poll(self) -> bool:
        """Return whether everybody is here for good."""
        self.check()
        if self.missing()[0]:
            # A rank that comes late may still be in a blocking call, and wait for what this one
            # has sent: that may leave only while this rank calls MPI.
            MPI.COMM_SELF.Iprobe()
            return False
        self.board.set(self.acknowledged, self.number)
        if self.missing()[0]:  # one has left just now
            self.board.set(self.acknowledged, self.number - 1)
            return False
        return True

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return who is not here."""
        return (
            [rank for rank in self.ranks() if not self._has_reached(self.here, rank)],
            False,
            False,
        )

    def _has_reached(self, index: int, rank: int) -> bool:
        self.board.refresh()
        return self.board.of(index, rank) >= self.number

    def withdraw(self) -> bool:
        """Leave; return False if all have come, and one relies on this rank."""
        self.board.set(self.here, self.number - 1)
        self.board.fence()
        if not any(self._has_reached(self.acknowledged, rank) for rank in self.ranks()):
            return True
        self.board.set(self.here, self.number)
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

    Its data are there when :meth:`Exchange.poll` returns True.
    """

    source: int
    tag: int
    data: bytearray


class Exchange(Waitable):
    """A message from and to each rank of a communicator, also to oneself: something to wait for.

    Args:
        members: the communicator's ranks as ranks of the world.
        tag, data: of this rank's messages.
        check: raises an error when another rank has given up.

    Attributes:
        taken: the messages of the others; of a :class:`Flush`, those that nobody had received.
    """

    purpose = "the ranks' exchange after an error"

    def __init__(
        self,
        communicator: MPI.Intracomm,
        members: Sequence[int],
        tag: int,
        data: bytes,
        check: Callable[[], None],
    ):
        self.call = Call(self.purpose, tuple(members))
        self.taken: list[Taken] = []
        self._communicator = communicator
        self._tag = tag
        self._check = check
        self._awaited = list(range(communicator.size))
        self._requests: list[MPI.Request] = [
            communicator.Isend([data, len(data), MPI.BYTE], rank, tag) for rank in self._awaited
        ]

    def poll(self) -> bool:
        """Return whether everything is here, and what this rank has sent was taken."""
        self._check()
        self._awaited = [rank for rank in self._awaited if not self._has_come(rank)]
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._awaited and not self._requests

    def _has_come(self, rank: int) -> bool:
        """Look once; return whether everything of a rank is here."""
        taken = self._take(rank, self._tag)
        if taken is not None:
            self.taken.append(taken)
        return taken is not None

    def _take(self, source: int, tag: int) -> Taken | None:
        """Take the next message of a rank, if there is one."""
        status = MPI.Status()
        message = self._communicator.Improbe(source, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        self._requests.append(message.Irecv([data, len(data), MPI.BYTE]))
        return Taken(source, status.tag, data)

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return from whom something is missing."""
        return [self.call.group[rank] for rank in self._awaited], False, False


def exchange(world: World, text: str) -> list[str]:
    """Return the text of each rank, in order; all of them call this.

    Raises:
        CommunicationTimeout: one did not come.
        CommunicationError: one is dead, or has given up.
    """
    tag = (world.epoch + 1) % largest_tag(world.control)
    everybody = range(world.size)
    texts = Exchange(world.control, everybody, tag, text.encode(), world.refuse_if_not_whole)
    wait_for(texts, DEADLINE)
    return [taken.data.decode() for taken in sorted(texts.taken, key=lambda taken: taken.source)]


class Flush(Exchange):
    """Everything that was sent before is out of a communicator: something to wait for.

    Args:
        communicator, members, check: see :class:`Exchange`.
        all_sent: returns whether everything that this rank has sent was taken; a large message
            moves only while its sender calls MPI.
    """

    purpose = "the end of what was under way"

    def __init__(
        self,
        communicator: MPI.Intracomm,
        members: Sequence[int],
        check: Callable[[], None],
        all_sent: Callable[[], bool] = lambda: True,
    ):
        # Under the largest tag nobody else sends an empty message.
        super().__init__(communicator, members, largest_tag(communicator), b"", check)
        self._all_sent = all_sent

    def poll(self) -> bool:
        """Return whether nothing of before is left."""
        return super().poll() & self._all_sent()

    def _has_come(self, rank: int) -> bool:
        while (taken := self._take(rank, MPI.ANY_TAG)) is not None:
            if taken.tag == self._tag and not taken.data:
                return True
            self.taken.append(taken)
        return False


class GroupFlush:
    """The flushes of a group's two communicators, which all members do together.

    Args:
        communicators: of the user's messages, and of data.
        members, check: see :class:`Exchange`.
        all_sent: of the second, see :class:`Flush`.
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
        self._flushes = [Flush(envelopes, members, check), Flush(data, members, check, all_sent)]

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
