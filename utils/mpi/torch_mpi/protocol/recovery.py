"""After an incident: all ranks get together, throw away what was under way, and count on alike.

Four steps, see PROTOCOL.md: *assembly*, *settle*, *exchange*, *flush*. MPI delivers the messages of
a pair in their order, so that after the flush nothing of before can reach a receive of after, and
the communicators are as good as new.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING

from ..errors import CommunicationError
from ..mpi import MPI
from ..record import Call, recorder
from . import diagnosis
from .gathering import Assembly, assemble, exchange
from .interfaces import Group
from .progress import guard, progress
from .status import ACKNOWLEDGED, HERE

if TYPE_CHECKING:
    from .world import World

# Seconds for what has begun to come to its end.
SETTLING = 2.0

_Members = tuple[int, ...]
_Key = tuple[_Members, int]


@dataclass(frozen=True)
class Standing:
    """How a rank stands in a group.

    Attributes:
        members, count: the group's key: its ranks; 1 for the first group of theirs, 2, …
        number: of the last collective that the rank came to.
        open: it was not destroyed on the rank.
        settled: nothing that has begun is under way on the rank.
    """

    members: _Members
    count: int
    number: int
    open: bool
    settled: bool


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others: its standings by the groups' keys; its groups' ``made``."""

    standings: dict[_Key, Standing]
    made: dict[_Members, int]


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
        """Return it in words for its sender, whose record of it is ``call``."""
        what = f"{self.dtype}{list(self.shape)} ({self.nbytes} bytes, tag={self.tag})"
        return {"to": self.destination, "what": what, "where": call.where if call else ""}


def settle(group: Group) -> bool:
    """Have what has begun come to its end, which takes all of its ranks; return whether it did."""
    deadline = time.monotonic() + SETTLING
    while not progress.settled(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def recover(world: World, timeout: float) -> bool:
    """Meet the other ranks of ``world``, and have every group begin anew.

    Raises:
        CommunicationError: a rank is dead, has ended, or did not come within ``timeout`` seconds.
    """

    def refuse_without_all() -> None:
        world.refuse_if_not_whole()
        if ended := [s["rank"] for s in world.statuses() if s["state"] == "ended"]:
            raise CommunicationError(
                f"{diagnosis.names(ended)} had ended, so the ranks cannot communicate any more"
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
    with guard:
        _finish(world)
    if late is not None:
        raise late
    return True


def _finish(world: World) -> None:
    """Do what all ranks do once they are here. It waits for nothing but messages on the way."""
    try:
        _renew_groups(world)
    except BaseException as error:
        world.is_broken()
        if isinstance(error, CommunicationError | MPI.Exception):
            world.refuse_if_not_whole()
        raise
    world.incident_is_over()


def _exchange_standings(world: World, standings: Iterable[Standing]) -> list[_Told]:
    """Return what each rank tells of its groups; all of them call this."""
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
    """Bring the groups of all their members to one state; leave the others."""
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
    # What is destroyed and could not be freed.
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
    group.refuse_further_use(f"{diagnosis.names(lost)} of it is gone")


def sweep(world: World) -> list[dict[str, object]]:
    """Throw away the messages that nobody has received. All ranks do so, and nothing else.

    Returns:
        A dict for each of them that this rank had sent: ``to``, ``what``, ``where``.

    Raises:
        CommunicationError: the ranks could not do it; they are of no use any more.
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
    """Return what nobody had received, on any rank."""
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
