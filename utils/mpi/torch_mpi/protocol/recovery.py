"""Recover from an incident: all ranks meet, discard what is pending, and agree on their counters.

PROTOCOL.md has the steps. MPI delivers the messages between two ranks in order. So after the flush,
no older message can reach a new receive, and the communicators are as good as new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING

from .. import settings
from ..errors import CommunicationError
from ..mpi import MPI, largest_tag
from ..record import Call, recorder
from . import diagnosis
from .board import Board
from .interfaces import Group, Waitable
from .interrupts import guard
from .progress import progress
from .status import ACKNOWLEDGED, HERE
from .wait_monitor import is_true_within, wait_for

if TYPE_CHECKING:
    from .world import World

# Calls that have begun get so many seconds to end.
SETTLING = 2.0
# An exchange or a flush gets so many seconds.
DEADLINE = 30.0

_Members = tuple[int, ...]
_Key = tuple[_Members, int]


@dataclass(frozen=True)
class Standing:
    """How far a rank is in a group.

    Attributes:
        members, count: the group's key: its ranks; 1 for the first group of these ranks, 2, …
        number: the number of the last collective that the rank called.
        open: whether the rank has not destroyed the group.
        settled: whether nothing that has begun is pending on the rank.
    """

    members: _Members
    count: int
    number: int
    open: bool
    settled: bool


@dataclass(frozen=True)
class _Told:
    """A rank's data for the others: its standings by group key, and how many groups it made."""

    standings: dict[_Key, Standing]
    made: dict[_Members, int]


@dataclass(frozen=True)
class Unreceived:
    """A message that no rank received; its ranks are global."""

    source: int
    destination: int
    number: int
    tag: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def told(self, call: Call | None) -> dict[str, object]:
        """Return a description of the message for its sender, whose record of it is ``call``."""
        what = f"{self.dtype}{list(self.shape)} ({self.nbytes} bytes, tag={self.tag})"
        return {"to": self.destination, "what": what, "where": call.where if call else ""}


def settle(group: Group) -> bool:
    """Let collectives that have begun end, which needs all ranks; return whether they did."""
    return is_true_within(SETTLING, lambda: progress.settled(group), 1e-4)


def recover(world: World, timeout: float) -> None:
    """Meet the other ranks of ``world``, and start every group anew.

    Raises:
        CommunicationError: a rank is dead, has ended, or did not come within ``timeout`` seconds.
    """

    def refuse_without_all() -> None:
        world.refuse_if_not_whole()
        if ended := [s["rank"] for s in world.statuses() if s["state"] == "ended"]:
            raise CommunicationError(
                f"{diagnosis.names(ended)} had ended, so the ranks cannot communicate any more: "
                f"{settings.fresh_ranks}"
            )

    refuse_without_all()
    world.give_up_all()
    everybody = range(world.size)
    assembly = Assembly(
        Call("the ranks' meeting after an error", tuple(everybody)),
        world.board,
        HERE,
        ACKNOWLEDGED,
        ranks=lambda: everybody,
        number=world.epoch + 1,
        check=refuse_without_all,
    )
    late = assemble(assembly, timeout)
    with guard:  # all ranks are here, so only messages on the way are awaited
        try:
            _renew_groups(world)
        except BaseException as error:
            world.is_broken()
            if isinstance(error, CommunicationError | MPI.Exception):
                world.refuse_if_not_whole()
            raise
        world.incident_is_over()
    if late is not None:
        raise late


def _exchange_standings(world: World, standings: Iterable[Standing]) -> list[_Told]:
    """Return each rank's data about its groups; all ranks call this function."""
    told = [[astuple(standing) for standing in standings], list(world.groups.made.items())]
    return [_told(text) for text in exchange(world, json.dumps(told))]


def _told(text: str) -> _Told:
    groups, made = json.loads(text)
    standings = [Standing(tuple(members), *rest) for members, *rest in groups]
    return _Told(
        {(standing.members, standing.count): standing for standing in standings},
        {tuple(members): count for members, count in made},
    )


def _renew_groups(world: World) -> None:
    """Bring each group to one state if all its members still have it; refuse the other groups."""
    groups = world.groups
    mine = {group.key: group for group in [*groups, *groups.closed]}
    settled = {key: settle(group) for key, group in mine.items()}
    standings = (group.standing(settled[key]) for key, group in mine.items())
    by_rank = _exchange_standings(world, standings)
    for told in by_rank:
        for members, count in told.made.items():
            if world.rank in members:
                groups.made[members] = max(count, groups.made.get(members, 0))
    for key, group in mine.items():
        _renew_or_leave(group, settled[key], by_rank)
    # The groups that are left were destroyed, but could not be freed.
    groups.kept += groups.closed
    groups.closed.clear()


def _renew_or_leave(group: Group, settled: bool, by_rank: list[_Told]) -> None:
    lost = [member for member in group.members if group.key not in by_rank[member].standings]
    if not lost:
        group.renew([by_rank[member].standings[group.key] for member in group.members])
        return
    if group.closed:
        members, count = group.key
        freed = all(by_rank[member].made.get(members, 0) >= count for member in lost)
        group.free_alone(settled, freed)
    group.refuse_further_use(f"it is missing on {diagnosis.names(lost)}")


def sweep(world: World) -> list[dict[str, object]]:
    """Discard the messages that no rank has received; all ranks call this, and nothing else.

    Returns:
        A dict for each discarded message that this rank had sent: ``to``, ``what``, ``where``.

    Raises:
        CommunicationError: the ranks could not discard them, and can no longer communicate.
    """
    with guard:
        try:
            messages = _sweep_all(world)
        except BaseException:
            world.is_broken()
            raise
    mine = {message.number: message for message in messages if message.source == world.rank}
    sent = [(call, call.message) for call in recorder.since(0) if call.op == "send"]
    calls = {message[1]: call for call, message in sent if message and message[0] == world.rank}
    return [message.told(calls.get(number)) for number, message in sorted(mine.items())]


def _sweep_all(world: World) -> list[Unreceived]:
    """Discard the unreceived messages of all groups; return them for all ranks."""
    mine = {group.key: group for group in world.groups}
    standings = (group.standing(progress.settled(group)) for group in mine.values())
    by_rank = _exchange_standings(world, standings)
    swept: list[Unreceived] = []
    for key, group in mine.items():
        theirs = [by_rank[member].standings.get(key) for member in group.members]
        if all(standing and standing.open and standing.settled for standing in theirs):
            swept += group.sweep()
    texts = exchange(world, json.dumps([asdict(message) for message in swept]))
    return [Unreceived(**message) for text in texts for message in json.loads(text)]


# -- all ranks wait for each other; a rank can leave only an assembly ----------------------------


@dataclass
class Assembly(Waitable):
    """A meeting of all ranks, which is over when all are here and none of them may leave.

    Args:
        here, acknowledged: indices of two words on the world's board.
        ranks: returns the ranks that have to come, with this one; it is asked again each time, so
            it can leave out a rank that has died.
        number: the number of this meeting, larger than the last meeting's.
        check: raises an error if the ranks will not come.
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
        """Return whether all ranks are here for good."""
        self.check()
        if self.missing()[0]:
            # A late rank may still be in a blocking call, and wait for data from this rank. They
            # may leave only while this rank calls MPI.
            MPI.COMM_SELF.Iprobe()
            return False
        self.board.set(self.acknowledged, self.number)
        if self.missing()[0]:  # a rank has left just now
            self.board.set(self.acknowledged, self.number - 1)
            return False
        return True

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the ranks that are not here."""
        return (
            [rank for rank in self.ranks() if not self._has_reached(self.here, rank)],
            False,
            False,
        )

    def _has_reached(self, index: int, rank: int) -> bool:
        self.board.refresh()
        return self.board.of(index, rank) >= self.number

    def withdraw(self) -> bool:
        """Leave; return False if all ranks have come and one relies on this rank."""
        self.board.set(self.here, self.number - 1)
        self.board.fence()
        if not any(self._has_reached(self.acknowledged, rank) for rank in self.ranks()):
            return True
        self.board.set(self.here, self.number)
        return False


def assemble(assembly: Assembly, timeout: float) -> KeyboardInterrupt | None:
    """Wait until all ranks are here for good.

    Returns:
        A Ctrl-C that came too late, because another rank already relied on this one. The caller
        raises it at the end of what follows.

    Raises:
        CommunicationTimeout: a rank did not come. This rank has left, as after any other error.
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
    """A message taken out of a communicator; its data are complete when the exchange is over."""

    source: int
    tag: int
    data: bytearray


class Exchange(Waitable):
    """An exchange of one message between all ranks of a communicator, including the rank itself.

    Args:
        members: the communicator's ranks as ranks of the world.
        tag, data: tag and content of this rank's messages.
        check: raises an error if another rank has given up.

    Attributes:
        taken: the received messages; a :class:`Flush` keeps the messages no rank had received.
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
        """Return whether all messages are here, and MPI has sent all of this rank's."""
        self._check()
        self._awaited = [rank for rank in self._awaited if not self._has_come(rank)]
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._awaited and not self._requests

    def _has_come(self, rank: int) -> bool:
        """Look once; return whether everything from a rank is here."""
        taken = self._take(rank, self._tag)
        if taken is not None:
            self.taken.append(taken)
        return taken is not None

    def _take(self, source: int, tag: int) -> Taken | None:
        """Take the next message of a rank; ``None`` if there is none."""
        status = MPI.Status()
        message = self._communicator.Improbe(source, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        self._requests.append(message.Irecv([data, len(data), MPI.BYTE]))
        return Taken(source, status.tag, data)

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the ranks whose message is missing."""
        return [self.call.group[rank] for rank in self._awaited], False, False


def exchange(world: World, text: str) -> list[str]:
    """Return the text of each rank, in order; all ranks call this.

    Raises:
        CommunicationTimeout: a rank did not come.
        CommunicationError: a rank is dead, or has given up.
    """
    tag = (world.epoch + 1) % largest_tag(world.control)
    everybody = range(world.size)
    texts = Exchange(world.control, everybody, tag, text.encode(), world.refuse_if_not_whole)
    wait_for(texts, DEADLINE)
    return [taken.data.decode() for taken in sorted(texts.taken, key=lambda taken: taken.source)]


class Flush(Exchange):
    """A flush of a communicator, which is over when all older messages are out of it.

    Args:
        all_sent: returns whether MPI has sent all messages of this rank.
    """

    purpose = "the flush of pending communications"

    def __init__(
        self,
        communicator: MPI.Intracomm,
        members: Sequence[int],
        check: Callable[[], None],
        all_sent: Callable[[], bool] = lambda: True,
    ):
        # Only a flush sends an empty message under the largest tag.
        super().__init__(communicator, members, largest_tag(communicator), b"", check)
        self._all_sent = all_sent

    def poll(self) -> bool:
        """Return whether no older message is left."""
        return super().poll() & self._all_sent()

    def _has_come(self, rank: int) -> bool:
        while (taken := self._take(rank, MPI.ANY_TAG)) is not None:
            if taken.tag == self._tag and not taken.data:
                return True
            self.taken.append(taken)
        return False

    def finish(self) -> None:
        """Wait for all members.

        Raises:
            CommunicationTimeout: a member did not come within :data:`DEADLINE` seconds.
        """
        wait_for(self, DEADLINE)
