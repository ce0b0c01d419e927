"""What each rank of a world does, and the incidents that stop all of them.

:class:`SharedRanks` is what all ranks share, and :class:`World` is one rank's view of it, which
keeps the contract of :class:`torch_mpi.present.World`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch_mpi.errors import (
    CommunicationError,
    CommunicationStopped,
    CommunicationTimeout,
    count_as_library,
    error_of,
    place_text,
)
from torch_mpi.lines import text_of
from torch_mpi.protocol import words
from torch_mpi.protocol.diagnosis import diagnose, first_cause
from torch_mpi.protocol.interfaces import Waitable
from torch_mpi.protocol.status import Status, of_history, of_messages, of_wait

from .carrier import Carrier
from .costs import Costs
from .group import Group
from .work import Message, Traffic, Work

if TYPE_CHECKING:
    from torch_mpi.record import Call


# A line of this file is never shown as the student's.
count_as_library(__file__)
#: The place of a rank that is interrupted while another rank has its turn.
BEFORE_TURN = "the start of the cell, before its turn"


class Meeting:
    """A meeting of all ranks after an incident."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.done = False
        self.failed = False


class SharedRanks:
    """The ranks of a world.

    Args:
        carrier: runs them, and takes their calls.

    Attributes:
        n: number of ranks.
        clocks: their clocks.
        costs: what their communication costs.
        incident: the explanation of the present incident; "" if there is none.
        failed: the status of each rank that the incident has stopped.
        heard: the ranks whose program has got an error of the incident.
    """

    def __init__(self, carrier: Carrier):
        self.n = carrier.n
        self.carrier = carrier
        self.clocks = carrier.clocks
        self.costs = Costs(carrier.n)
        self.incident = ""
        self.failed: dict[int, Status] = {}
        self.heard: set[int] = set()
        self.worlds = [World(self, rank) for rank in range(self.n)]
        self._traffic: dict[tuple[tuple[int, ...], int], Traffic] = {}
        self._counts: list[dict[Any, int]] = [{} for _ in range(self.n)]
        self._meeting = Meeting()
        self._failed_in = 0
        carrier.stuck = self._stuck

    # -- groups -----------------------------------------------------------------------------

    def new_group(self, members: tuple[int, ...]) -> Group:
        """Make a group of these global ranks, on the rank whose call this is: one of them."""
        rank = self.carrier.rank
        key = members, self.count(rank, members)
        group = Group(self, key, self._traffic.setdefault(key, Traffic()))
        self.worlds[rank].groups.append(group)
        self.worlds[rank].has_joined = True
        return group

    def close(self, group: Group) -> None:
        """Forget a group that a rank has destroyed, and what it shares if all have destroyed it."""
        traffic = group.traffic
        traffic.awaited[:] = [
            wanted for wanted in traffic.awaited if wanted.work.group is not group
        ]
        traffic.closed.add(group.me)
        if group in self.worlds[group.me].groups:
            self.worlds[group.me].groups.remove(group)
        if traffic.closed.issuperset(group.members) and not traffic.sent:
            self._traffic.pop(group.key, None)

    def count(self, rank: int, what: object) -> int:
        """Return how many of these a rank has had, with this one."""
        counts = self._counts[rank]
        counts[what] = counts.get(what, 0) + 1
        return counts[what]

    def unreceived(self, rank: int) -> list[tuple[Traffic, Any, int]]:
        """Return this rank's messages that no rank has received: traffic, message, receiver."""
        return [
            (traffic, message, members[message.to])
            for (members, _), traffic in self._traffic.items()
            for message in traffic.sent
            if members[message.source or 0] == rank
        ]

    # -- incidents --------------------------------------------------------------------------

    def wait_for(self, work: Work, rank: int, limit: float = 0.0) -> None:
        """Let other ranks run until the rank's communication is over.

        Args:
            work: the communication.
            rank: the rank.
            limit: seconds on the rank's clock after which a receive is given up; 0 for none.
        """
        if self.end_after_incident(work, rank):
            return
        self.carrier.block(work, self.clocks.now(rank) + limit if limit else None)
        if not work.done:
            self.drop(work, rank, limit)

    def end_after_incident(self, work: Work, rank: int) -> bool:
        """End a communication with an error if there is an incident; return whether there is."""
        if self.incident:
            self._end(work, rank)
        return bool(self.incident)

    def drop(self, work: Work, rank: int, limit: float) -> None:
        """End a receive of this rank alone, so that a later one gets the message."""
        awaited = work.group.traffic.awaited
        awaited[:] = [message for message in awaited if message.work is not work]
        missing, any_of_them, _ = work.missing()
        late = words.is_late(work.call, missing, any_of_them, limit)
        text = words.of_wait(rank, work.call, _where(work), late)
        work.end(self.clocks.now(rank), CommunicationTimeout(text, work.call, {}))

    def _stuck(self) -> None:
        """Begin an incident, because no rank can go on."""
        if any(waited is self._meeting for waited in self.carrier.waiting().values()):
            self._meeting.failed = self._meeting.done = True
            self._meeting = Meeting()
        self.stop_all("followed" if self.failed else "deadlock")

    def stop_all(self, kind: str) -> None:
        """Stop all ranks that wait for a communication."""
        works = self._waiting()
        for rank, work in works.items():
            self._stop(work, rank, kind)
        self.incident = self.incident or str(diagnose(self.statuses()))
        for rank, work in works.items():
            self._end(work, rank)

    def _stop(self, work: Work, rank: int, kind: str, missing: str = "") -> None:
        """Note why a rank's communication ends without success, unless that is known."""
        if rank in self.failed:
            return
        where = _where(work)
        status = of_wait(cast(Waitable, work), where, True) | of_history(
            work.call, self._calls(rank)
        )
        if kind == "followed":
            cause = first_cause(self.failed.values())
            error = words.of_stop(rank, work.call.describe(), where, True, cause)
            status["because"] = words.reason(cause)
        else:
            ranks, any_of_them, _ = work.missing()
            missing = missing or words.never_comes(work.call, ranks, any_of_them)
            error = words.of_wait(rank, work.call, where, missing)
        self._fail(rank, status | {"kind": kind, "error": error})

    def _fail(self, rank: int, status: Status) -> None:
        self._failed_in = self.carrier.batch
        always: Status = {"rank": rank, "state": "stopped", "at": time.monotonic(), "section": ""}
        self.failed.setdefault(rank, always | status)

    def _end(self, work: Work, rank: int) -> None:
        self._stop(work, rank, "followed")
        status = self.failed[rank]
        error: CommunicationError
        if status["kind"] in ("deadlock", "timeout"):
            text = f"{status['error']}\n{self.incident}"
            error = CommunicationTimeout(text, work.call, status)
        else:
            text = status["error"]
            if status["kind"] != "followed":  # of another call of this rank
                text = words.of_stop(rank, work.call.describe(), _where(work), True, status)
                status = status | {"because": words.reason(status)}
            error = CommunicationStopped(text, work.call, status)
        work.end(self.clocks.now(rank), error)

    def give_up(self, computing: int, place: str, timeout: float) -> None:
        """Stop the ranks that wait, because this rank computes on and on; then interrupt it.

        Args:
            computing: the rank that has its turn.
            place: where it is, in words.
            timeout: seconds for which it has computed.
        """
        self._fail(computing, {"state": "running", "where": place})
        for rank, work in self._waiting().items():
            missing, any_of_them, _ = work.missing()
            late = words.is_late(work.call, missing, any_of_them, timeout)
            self._stop(work, rank, "timeout", late)
        self.stop_all("followed")
        self.carrier.interrupt([computing])

    def _waiting(self) -> dict[int, Work]:
        waiting = self.carrier.waiting().items()
        return {rank: work for rank, work in waiting if isinstance(work, Work)}

    def mismatch(self, wrong: Mapping[Work, CommunicationError], at: float) -> None:
        """Begin an incident, because calls do not match; their works end with these errors."""
        for work, error in wrong.items():
            status = of_history(work.call, self._calls(work.group.me))
            about: Status = {"kind": "mismatch", "error": str(error), "where": work.call.where}
            self._fail(work.group.me, status | about)
            work.end(at, error)
        self.stop_all("followed")

    def raised(self, rank: int, error: BaseException, where: str, work: Work | None = None) -> None:
        """Begin an incident, because the code of a rank has ended with an error.

        Args:
            work: the communication in which the rank was interrupted, if it was.
        """
        if rank not in self.failed:
            kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "raised"
            said = text_of(error)
            where = said if kind == "interrupted" and said == BEFORE_TURN else where
            text = f"{type(error).__name__}: {said}".rstrip(": ")
            wait = of_wait(cast(Waitable, work), where, True) if work is not None else {}
            self._fail(rank, wait | {"kind": kind, "error": text, "where": where})
        self.stop_all("followed")

    def died(self, rank: int, why: str) -> None:
        """Begin an incident, because a rank's process is gone."""
        self._fail(rank, {"state": "dead", "kind": "died", "error": why})
        self.stop_all("followed")

    def statuses(self) -> list[Status]:
        """Return each rank's status."""
        return [self.status(rank) for rank in range(self.n)]

    def status(self, rank: int) -> Status:
        """Return a rank's status: stopped, waiting, running, or left."""
        if rank in self.failed:
            return self.failed[rank]
        always: Status = {"rank": rank, "section": "", "epoch": 0}
        work = self.carrier.waiting().get(rank)
        if isinstance(work, Work):
            wait = of_wait(cast(Waitable, work), _where(work), True)
            return always | {"state": "waiting"} | wait
        has_left = self.worlds[rank].has_left or rank not in self.carrier.busy()
        if not has_left:
            return always | {"state": "running"}
        messages = of_messages(self._calls(rank)) if self.unreceived(rank) else {}
        return always | {"state": "left"} | messages

    def _calls(self, rank: int) -> list[Call]:
        return self.carrier.log(rank).since(self.worlds[rank].mark)

    def recover_or_raise(self, rank: int, op: str) -> None:
        """Meet the other ranks before a communication, if this one has heard of an incident.

        Raises:
            CommunicationError: there is an incident of which this rank had not heard, or a rank
                did not come to the meeting.
        """
        if not self.failed:
            return
        if rank in self.heard:
            try:
                self.meet(rank)
            except RuntimeError as error:
                raise CommunicationError(f"You called {op} after an error, but {error}.") from None
            return
        cause = first_cause(self.failed.values())
        place = self.carrier.place()
        where = place_text(*place) if place else "an unknown line"
        text = words.of_stop(rank, op, where, False, cause)
        because = words.reason(cause)
        self._fail(rank, {"kind": "followed", "error": text, "because": because, "where": where})
        self.heard.add(rank)
        raise error_of(self.failed[rank])

    def meet(self, rank: int) -> None:
        """Wait for all ranks; then nothing is pending, and there is no incident.

        Raises:
            RuntimeError: a rank did not come.
        """
        meeting = self._meeting
        meeting.here.add(rank)
        if len(meeting.here) == self.n:
            self._forget_incident()
            self._meeting = Meeting()
            meeting.done = True
        self.carrier.block(meeting)
        if meeting.failed:
            raise RuntimeError("not all ranks came to begin anew")

    def forget_earlier_incident(self) -> None:
        """Forget an incident of cells that are over on all ranks."""
        if self.failed and self._failed_in < self.carrier.batch:
            self._forget_incident()

    def _forget_incident(self) -> None:
        self.failed = {}
        self.incident = ""
        self.heard = set()
        self.costs.forget_messages()
        for traffic in self._traffic.values():
            traffic.clear()
        for world in self.worlds:
            for group in world.groups:
                group.number = 0


class World:
    """One rank's view of the ranks, see :class:`torch_mpi.present.World`.

    Attributes:
        groups: the groups of this rank that it has not destroyed.
        has_joined: whether it has made a group.
        mark: position of the first call of the present section in the rank's record.
        has_left: whether the rank has run its part of the section.
    """

    one_machine = True

    def __init__(self, ranks: SharedRanks, rank: int):
        self.rank = rank
        self._ranks = ranks
        self.groups: list[Group] = []
        self.has_joined = False
        self.mark = 0
        self.has_left = False
        self._withdrawn: list[tuple[Traffic, Message]] = []

    @property
    def own(self) -> Status:
        """Return this rank's status."""
        return self._ranks.status(self.rank)

    def statuses(self) -> list[Status]:
        """Return each rank's status."""
        return self._ranks.statuses()

    def begin_section(self, name: str) -> None:
        """Begin a part of the program."""
        self._ranks.forget_earlier_incident()
        self._drop_withdrawn()
        self.mark = self._ranks.carrier.log(self.rank).mark()
        self.has_left = False

    def end_section(self) -> None:
        """Note that this rank has run its part of the section."""
        self.has_left = True

    def raised(self, error: BaseException, where: str) -> None:
        """Begin an incident, because the user's code ended with an error on this rank."""
        if not (isinstance(error, CommunicationError) and self._ranks.incident):
            self._ranks.raised(self.rank, error, where)

    def recover(self, timeout: float) -> None:
        """Meet the other ranks after an incident."""
        self._ranks.meet(self.rank)

    def refuse_if_not_whole(self) -> None:
        """Do nothing: these ranks can always communicate again."""

    def balance(self) -> int:
        """Return how many messages of this rank no rank has received."""
        return len(self._ranks.unreceived(self.rank))

    def sweep(self) -> list[dict[str, object]]:
        """Discard this rank's messages that no rank has received, and return them."""
        self._drop_withdrawn()
        told = []
        for traffic, message, to in self._ranks.unreceived(self.rank):
            call = message.work.call
            what = f"{call.dtype}{list(call.shape)} ({call.nbytes} bytes, tag={call.tag})"
            told.append({"to": to, "what": what, "where": call.where})
            traffic.sent.remove(message)
        return told

    def withdraw_receives(self, since: float) -> None:
        """Give up this rank's pending receives, unless a rank that still runs sends to them."""
        self._withdrawn = [
            (group.traffic, message)
            for group in self.groups
            for message in group.traffic.awaited
            if message.work.group is group and message.work.call.start >= since
        ]

    def _drop_withdrawn(self) -> None:
        for traffic, message in self._withdrawn:
            if message in traffic.awaited:
                traffic.awaited.remove(message)
        self._withdrawn = []


def _where(work: Work) -> str:
    return place_text(*work.place) if work.place else work.call.where
