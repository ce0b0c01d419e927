"""The world of all ranks, with their groups and the incidents that stop them: see PROTOCOL.md."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import cast

from .. import flight_recorder, library, mpi, present, settings
from ..errors import CommunicationError, CommunicationStopped, error_of, users_line
from ..lines import text_of
from ..mpi import MPI
from ..record import Call, recorder
from . import board, diagnosis, program_end, recovery, words
from .interfaces import Group, Waitable, Work
from .interrupts import guard
from .progress import Threads, progress
from .rendezvous import rendezvous
from .status import (
    INCIDENT,
    WORDS,
    Side,
    Status,
    Statuses,
    of_history,
    of_messages,
    of_wait,
)
from .wait_monitor import is_true_within

# A rank that follows waits this long for the cause, which the first rank is about to write.
_CAUSE_DEADLINE = 0.3  # seconds
# The longest text of an error on the board, in characters.
_LONGEST = 1200
# This word of a rank means that the ranks can no longer communicate.
_BROKEN = 1 << 62
# The ranks wait this long for each other after an incident.
RECOVERY_DEADLINE = 30.0  # seconds

_world: World | None = None


def current() -> World | None:
    """Return the world; ``None`` before the first process group."""
    return _world


def enter(timeout: float) -> World:
    """Return the world; all ranks make the first call together.

    Raises:
        CommunicationTimeout: a rank did not come within ``timeout`` seconds.
    """
    world = _world
    if world is None:
        guard.install()
        everybody = range(MPI.COMM_WORLD.size)
        with rendezvous(MPI.COMM_WORLD, everybody, 0, "init_process_group", timeout):
            world = create(MPI.COMM_WORLD, timeout)
        # MPI_Finalize waits for all ranks, and some may be dead by then.
        library.finalizes = not mpi.deaths_are_survived()
        program_end.watch_over(current)
    return world


def create(base: MPI.Intracomm, timeout: float) -> World:
    """Make the world from the ranks of this communicator; all call this, and have no groups."""
    global _world
    present.world = _world = World(base, timeout)
    return _world


class Groups:
    """The groups in use, in the order in which they were made; iterate to get them.

    Each group is kept until it is closed, because a Ctrl-C in PyTorch may take it from the user.

    Attributes:
        made: how many groups of the same members this rank has made; the number is in their names.
        closed: groups that this rank has destroyed but not freed, because another member still uses
            the group, or because an incident came between. Recovery frees the latter.
        kept: destroyed groups in which something never ends. MPI may still write to their memory.
        balance_of_closed: the balance of destroyed groups, see :meth:`World.balance`.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], int] = {}
        self.closed: list[Group] = []
        self.kept: list[Group] = []
        self.balance_of_closed = 0
        self._known: list[Group] = []

    def add(self, group: Group) -> None:
        """Count a new group."""
        members, count = group.key
        self.made[members] = count
        self._known.append(group)

    def __iter__(self) -> Iterator[Group]:
        self._known = [group for group in self._known if not group.closed]
        return iter(list(self._known))

    def close(self, group: Group) -> None:
        """Note that a group is destroyed."""
        self.balance_of_closed += group.balance
        self.closed.append(group)

    def free_flushed(self) -> None:
        """Free the destroyed groups that all their members have destroyed."""
        for group in list(self.closed):
            group.free_if_flushed()

    def freed(self, group: Group) -> None:
        """Note that a group's communicators have been freed."""
        self.closed = [other for other in self.closed if other is not group]


class World(Statuses):
    """All ranks with their statuses, as this rank sees them.

    Attributes:
        base: the communicator of all ranks, which gives them their numbers.
        timeout: the timeout of the first group, in seconds.
        one_machine: whether all ranks share memory, and a clock.
        cores: number of processors that the ranks of this machine may use together.
        control: the communicator of the protocol's own messages.
        stopped: whether this rank has failed or left a communication in the present incident.
        unheard: whether the incident is in a communication that no caller waits for, so the next
            call has to raise it.
    """

    def __init__(self, base: MPI.Intracomm, timeout: float):
        self.base = base
        self.timeout = timeout
        node = base.Split_type(MPI.COMM_TYPE_SHARED)
        self.one_machine = base.allreduce(node.size == base.size, MPI.LAND)
        node.Free()
        self.cores = cores_of_all(base)
        board.use_fences(base)
        self.control = base.Dup()
        notes = board.make(self.control, base.Dup, self.one_machine, len(WORDS), text=True)
        super().__init__(notes)
        self.groups = Groups()
        self.threads = Threads()
        self.stopped = False
        self.unheard = False
        self._mark = recorder.mark()
        self._waits = 0
        self.write(state="running")

    # -- what this rank writes about itself -------------------------------------------------

    def begin_section(self, name: str) -> None:
        """Begin a part of the program, in which an incident of the part before is not an error."""
        guard.install()
        guard.heard()  # forget a Ctrl-C of the section before
        self.section = name
        self._mark = recorder.mark()
        self.groups.free_flushed()
        if self.incident():
            if not self._is_of(name):
                self.join_incident()
            elif self.stopped:
                # This rank's progress thread found it, when others had begun this section already.
                self.unheard = True
                return
        self.unheard = False
        self.write(state="running")

    def _is_of(self, section: str) -> bool:
        """Return whether the incident is in this section, which other ranks have begun before."""
        self.cause()  # wait until the cause is written
        return any(s.get("kind") and s.get("section") == section for s in self.statuses())

    def end_section(self) -> None:
        """Note that this rank has run its part of the section."""
        if not self.stopped:
            messages = of_messages(recorder.since(self._mark)) if self.balance() else {}
            self.write(state="left", **messages)

    def ended(self, **more: object) -> None:
        """Note that this rank's program is over; :mod:`~.protocol.program_end` gives ``more``."""
        self.write(**{**self.own, **more, "state": "ended"})
        flight_recorder.write_if_asked(self.rank)

    def raised(self, error: BaseException, where: str) -> None:
        """Begin an incident, because the user's code ended with an error on this rank."""
        try:
            if not (self.stopped and self.own.get("kind")):  # the first error counts
                interrupted = isinstance(error, KeyboardInterrupt)
                text = f"{type(error).__name__}: {text_of(error)}".rstrip(": ")
                self.begin_incident("interrupted" if interrupted else "raised", text, where=where)
        finally:
            # An interrupt may come after a call was announced and before the wait for it. Other
            # ranks may then rely on the call, inside MPI.
            for work in self._works():
                if work.is_collective and work.call.blocking:
                    work.withdraw_or_take_part()

    def _works(self) -> list[Work]:
        """Return the pending communications of the groups in use."""
        return [work for group in self.groups for work in progress.works_of(group)]

    def waiting(self, waitable: Waitable, where: str) -> Status:
        """Note that this rank has waited for longer than a moment; return its status.

        The status of a rank that an incident has stopped stays on the board, because another thread
        of the rank may have found the cause, which all ranks report.
        """
        self._waits += 1
        wait = of_wait(waitable, where, self._is_alone())
        with self.lock:
            if self.stopped:
                return cast(Status, {"state": "waiting", "wait": self._waits, **wait})
            return self.write(state="waiting", wait=self._waits, **wait)

    def running(self) -> None:
        """Note that the wait is over."""
        self.write(state="running")

    def _is_alone(self) -> bool:
        return self.threads.alone({progress.thread}) and not progress.has_futures()

    # -- incidents --------------------------------------------------------------------------

    def begin_incident(
        self,
        kind: str,
        error: str,
        *,
        waitable: Waitable | None = None,
        where: str = "",
        heard: bool = True,
        called: dict[str, Side] | None = None,
        **more: object,
    ) -> Status:
        """Begin an incident, or join it; return the status that all ranks can read now.

        Args:
            kind: see :class:`~torch_mpi.protocol.status.Status`.
            waitable: the communication that this rank was in, if there was one.
            heard: whether a caller waits for the communication, and will get the error.
            called: a collective that matches no other rank's, by its name: ``what``, ``where``.
        """
        record: Status = {"where": where}
        if waitable is not None:
            record = of_wait(waitable, where, self._is_alone())
            record |= of_history(waitable.call, recorder.since(self._mark))
        with self.lock:
            number = self.epoch + 1
            before = self.own
            # A status that is written again with more words keeps its time.
            again = before.get("incident") == number
            # A mismatch may have to name collectives that have not begun.
            waiting = {name: side for group in self.groups for name, side in group.called().items()}
            record |= {
                "state": "stopped",
                "kind": kind,
                "error": error[:_LONGEST],
                "called": (before["called"] if again else {}) | waiting | (called or {}),
                "at": before["at"] if again else time.time(),  # comparable between machines
                "incident": number,
            }
            # What this rank has heard once isn't raised again, whatever finds it once more.
            self.unheard = self.unheard or not (heard or self.stopped)
            if again and kind == "followed" and before["kind"] != "followed":
                return before  # another thread of this rank has found the cause
            status = self.write(**record, **more)
            self.join_incident()
        flight_recorder.write_if_asked(self.rank)
        return status

    def join_incident(self) -> None:
        """Stop this rank until all ranks have met."""
        self.stopped = True
        self.board.set(INCIDENT, max(self.epoch + 1, self.board.of(INCIDENT, self.rank)))
        for group in self.groups:
            group.forget_fast_path()

    def give_up_all(self) -> None:
        """Join the incident, and withdraw all pending communications."""
        if not self.stopped:
            self.join_incident()
        for work in self._works():
            work.withdraw()

    def incident(self) -> bool:
        """Return whether some rank has failed since the ranks last met."""
        self.board.refresh()
        return max(self.board.of_all(INCIDENT)) > self.epoch

    def incident_is_over(self) -> None:
        """Count the incident as over, after all ranks have met."""
        self.epoch += 1
        self.stopped = False
        self.unheard = False
        self.write(state="running")

    def cause(self) -> Status | None:
        """Return the status of the rank that failed first."""
        is_true_within(_CAUSE_DEADLINE, self._is_explained)
        return diagnosis.first_cause(self.statuses())

    def _is_explained(self) -> bool:
        """Return whether the rank that failed first has said why."""
        cause = diagnosis.first_cause(self.statuses())
        return cause is not None and bool(cause.get("error"))

    def stopped_by_another(
        self, call: Call | str, waitable: Waitable | None = None, waited: float = 0.0
    ) -> CommunicationStopped:
        """Join the incident of another rank, and return the error for the caller that waits."""
        where = users_line()
        cause = self.cause()
        name = call if isinstance(call, str) else call.describe()
        advice = mpi.advice_after_death()
        text = words.of_stop(self.rank, name, where, waitable is not None, cause, advice)
        record = self.begin_incident(
            "followed", text, waitable=waitable, where=where, waited=waited
        )
        record["because"] = words.reason(cause, advice)
        self.unheard = False  # only now, as another thread may have found it in the meantime
        about = call if waitable and isinstance(call, Call) else None
        return CommunicationStopped(text, about, record)

    # -- recovery ---------------------------------------------------------------------------

    def recover_or_raise(self, op: str) -> None:
        """Recover with all ranks, before a communication, if this one has joined an incident.

        Raises:
            CommunicationError: there is an incident that this rank did not know, or the ranks
                cannot resynchronize.
        """
        if self.unheard:
            raise self._now_heard()
        if self.stopped:
            self.recover()
        elif self.incident():
            self.refuse_if_broken()
            raise self.stopped_by_another(op)

    def _now_heard(self) -> CommunicationError:
        # Another thread writes the message.
        is_true_within(2 * _CAUSE_DEADLINE, lambda: self.own.get("error"))
        self.unheard = False
        return error_of(self.own)

    def recover(self, timeout: float = RECOVERY_DEADLINE) -> None:
        """Meet the other ranks after an incident; see :func:`~.recovery.recover`."""
        if self.incident():
            recovery.recover(self, timeout)

    def refuse_if_not_whole(self) -> None:
        """Raise CommunicationError if the ranks can't resynchronize."""
        if dead := self.dead():
            verb = "is" if len(dead) == 1 else "are"
            text = f"{diagnosis.names(dead)} {verb} dead. {mpi.advice_after_death()}"
            raise CommunicationError(text)
        self.refuse_if_broken()

    def refuse_if_broken(self) -> None:
        """Raise CommunicationError if a rank could not resynchronize with the others."""
        self.board.refresh()
        if _BROKEN in self.board.of_all(INCIDENT):
            raise CommunicationError(
                f"the ranks could not resynchronize after an error: {settings.fresh_ranks}"
            )

    def is_broken(self) -> None:
        """Mark on the board that this rank could not resynchronize with the others."""
        self.board.set(INCIDENT, _BROKEN)

    def sweep(self) -> list[dict[str, object]]:
        """Discard the messages that no rank has received; see :func:`~.recovery.sweep`."""
        return recovery.sweep(self)

    def withdraw_receives(self, since: float) -> None:
        """Give up receives that began after ``since`` (``perf_counter``) and are still pending."""
        progress.withdraw_receives(since)

    def balance(self) -> int:
        """Return how many more messages this rank has sent than received in the groups in use."""
        return sum(group.balance for group in self.groups)


def cores_of_all(base: MPI.Intracomm) -> int:
    """Return how many processors the ranks of one machine may use; all ranks call this."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(set().union(*base.allgather(os.sched_getaffinity(0))))
