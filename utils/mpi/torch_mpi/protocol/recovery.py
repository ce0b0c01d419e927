"""After an incident: all ranks get together, throw away what was under way, and count on alike.

Four steps. The first is the only one that a rank can leave, and takes as long as the slowest rank:

1. *Assembly*: everybody has come. A rank that sees so acknowledges it, and from then on nobody
   leaves (the same handshake as in :mod:`torch_mpi.protocol.handshake`).
2. *Settle*: the collectives that have begun get :data:`SETTLING` seconds to come to their end, in
   each group. No rank waits for another one here.
3. *Exchange*: each rank tells the others which groups it has, how far it is in each, and whether
   the group is settled.
4. *Flush*, in each group: every rank sends an empty message to every other one and takes in all
   that comes before it. MPI delivers the messages of a pair in their order, so that nothing of
   before can reach a receive of after, and the communicators are as good as new.

When the last two are not over by a deadline all the same, the rank tells all ranks to restart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..errors import CommunicationError
from ..mpi import MPI
from ..record import Call, recorder
from . import diagnosis
from .gathering import Assembly, assemble, exchange
from .interrupts import guard
from .status import ACKNOWLEDGED, HERE

if TYPE_CHECKING:
    from .world import World

# Seconds for what has begun to come to its end.
SETTLING = 2.0


@dataclass(frozen=True)
class Standing:
    """How a rank stands in a group.

    Attributes:
        members, count: the group's key: its ranks; 1 for the first group of theirs, 2, …
        number: of the last collective that the rank came to.
        open: it was not destroyed on the rank.
        settled: nothing that has begun is under way on the rank.
    """

    members: tuple[int, ...]
    count: int
    number: int
    open: bool
    settled: bool

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """The group's, equal on all its members."""
        return self.members, self.count


def to_text(standings: Iterable[Standing], made: dict[tuple[int, ...], int]) -> str:
    """For the exchange: a rank's groups; how many groups it has made of which ranks."""
    groups = [[s.members, s.count, s.number, s.open, s.settled] for s in standings]
    return json.dumps([groups, list(made.items())])


def from_text(
    text: str,
) -> tuple[dict[tuple[tuple[int, ...], int], Standing], dict[tuple[int, ...], int]]:
    """What :func:`to_text` was given; the standings by key."""
    groups, made = json.loads(text)
    standings = [Standing(tuple(members), *rest) for members, *rest in groups]
    counts = {tuple(members): count for members, count in made}
    return {standing.key: standing for standing in standings}, counts


def settle(poll_all: Callable[[], bool]) -> bool:
    """Have what has begun come to its end, which takes all of its ranks; whether it did."""
    deadline = time.monotonic() + SETTLING
    while not poll_all():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def recover(world: World, timeout: float) -> bool:
    """Meet the other ranks of ``world``, and have every group begin anew.

    Raises:
        CommunicationError: a rank is dead, has ended, or did not come within ``timeout`` seconds.
    """
    _refuse_without_all(world)
    world.give_up_all()
    everybody = range(world.size)
    call = Call("the ranks' meeting after an error", tuple(everybody))
    assembly = Assembly(
        call, world.board, HERE, ACKNOWLEDGED, lambda: everybody, world.epoch + 1,
        lambda: _refuse_without_all(world),
    )  # fmt: skip
    late = assemble(assembly, timeout)
    with guard:
        _finish(world)
    if late is not None:
        raise late
    return True


def _refuse_without_all(world: World) -> None:
    """Raise CommunicationError where a rank cannot come any more."""
    world.refuse_if_not_whole()
    if ended := [s["rank"] for s in world.statuses() if s["state"] == "ended"]:
        raise CommunicationError(
            f"{diagnosis.names(ended)} had ended, so the ranks cannot communicate any more"
        )


def _finish(world: World) -> None:
    """What all ranks do once they are here. It waits for nothing but messages on the way."""
    try:
        _renew_groups(world)
    except BaseException as error:
        world.is_broken()
        if isinstance(error, CommunicationError | MPI.Exception):
            world.refuse_if_not_whole()
        raise
    world.incident_is_over()


def _exchange(world: World, text: str) -> dict[int, str]:
    """The text of each rank; all of them call this."""
    ranks = range(world.size)
    return exchange(world.control, ranks, world.epoch + 1, text, world.refuse_if_not_whole)


def _renew_groups(world: World) -> None:
    """Bring the groups of all their members to one state; leave the others."""
    groups = world.groups
    mine = {group.key: group for group in [*groups, *groups.closed]}
    settled = {key: settle(group.poll_all) for key, group in mine.items()}
    standings = (group.standing(settled[key]) for key, group in mine.items())
    told = _exchange(world, to_text(standings, groups.made))
    lists, counts = zip(*map(from_text, told.values()), strict=True)
    by_rank, made = (dict(zip(told, of_ranks, strict=True)) for of_ranks in (lists, counts))
    for members in {members for count in counts for members in count}:
        if world.rank in members:
            groups.made[members] = max(count.get(members, 0) for count in counts)
    for key, group in mine.items():
        theirs = [by_rank.get(member, {}).get(key) for member in group.members]
        if None in theirs:
            lost = [m for m, it in zip(group.members, theirs, strict=True) if it is None]
            if group.closed:
                members, count = key
                freed = all(made[m].get(members, 0) >= count for m in lost)
                group.free_alone(settled[key], freed)
            group.refuse_further_use(f"{diagnosis.names(lost)} of it is gone")
        else:
            group.renew(theirs)
    groups.keep_closed()


@dataclass(frozen=True)
class Unreceived:
    """A message that nobody received; ranks are global."""

    source: int
    destination: int
    number: int
    tag: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def told(self, call: Call | None) -> dict[str, object]:
        """In words, for its sender; ``call``: its record."""
        what = f"{self.dtype}{list(self.shape)} ({self.nbytes} bytes, tag={self.tag})"
        return {"to": self.destination, "what": what, "where": call.where if call else ""}


def sweep(world: World) -> list[dict[str, object]]:
    """Throw away the messages that nobody has received. All ranks do so, and nothing else.

    Returns:
        A dict for each of them that this rank had sent: ``to``, ``what``, ``where``.

    Raises:
        CommunicationError: the ranks could not do it; they are of no use any more.
    """
    with guard:
        try:
            found = _sweep_all(world)
        except BaseException:
            world.is_broken()
            raise
    mine = {message.number: message for message in found if message.source == world.rank}
    sent = [(call, call.message) for call in recorder.since(0) if call.op == "send"]
    calls = {message[1]: call for call, message in sent if message and message[0] == world.rank}
    return [message.told(calls.get(number)) for number, message in sorted(mine.items())]


def _sweep_all(world: World) -> list[Unreceived]:
    """What nobody had received, on any rank."""
    mine = {group.key: group for group in world.groups}
    standings = (group.standing(group.poll_all()) for group in mine.values())
    told = _exchange(world, to_text(standings, world.groups.made))
    by_rank = {rank: from_text(told[rank])[0] for rank in range(world.size)}
    found = []
    for key, group in mine.items():
        theirs = [by_rank[member].get(key) for member in group.members]
        if all(it is not None and it.open and it.settled for it in theirs):
            found += group.sweep()
    told = _exchange(world, json.dumps([asdict(message) for message in found]))
    return [Unreceived(**message) for text in told.values() for message in json.loads(text)]
