"""What all ranks of the world know of each other, and how they get together again.

An *incident* begins when a rank fails: an error in the user's code, a deadlock, a mismatch, a
Ctrl-C. It puts its status on the board and raises the incident's number there. Whoever waits sees
that within milliseconds and stops waiting, too. Before the next communication all ranks meet, and
throw away what was under way (:mod:`torch_mpi.recovery`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
import zlib
from dataclasses import asdict

from . import board, cores, diagnosis, failures, fence, library, script
from .errors import CommunicationError, CommunicationStopped, users_line
from .interrupts import guard
from .meeting import meet
from .messages import Letter
from .mpi import MPI
from .network import link
from .progress import progress
from .record import Call, log
from .recovery import BROKEN, Assembly, exchange, from_text, settle, to_text
from .threads import Threads
from .waiting import wait_for

# The words of each rank on the board; the last two are of torch_mpi.survivors.
_FAULT, _PROCESS, _BEAT, _HERE, _BEGUN, SHRINK_HERE, SHRINK_BEGUN = WORDS = range(7)
# How long a rank that follows looks for the cause that the first one is about to write.
_CAUSE_DEADLINE = 0.3  # seconds
# An error's text on the board, in characters.
_LONGEST = 1200
# Of how many messages of the cell a rank tells when it is stopped.
_MESSAGES = 300
# How long the ranks wait for each other after an incident.
RECOVERY_DEADLINE = 30.0  # seconds

# How many groups of the same members this rank has made: their names are the same on all ranks.
made: dict[tuple[int, ...], int] = {}

_world: World | None = None


def current() -> World | None:
    """The world, once a process group was made."""
    return _world


def enter(timeout: float) -> World:
    """The world; the first call is made by all ranks together.

    Raises:
        CommunicationTimeout: a rank did not come within ``timeout`` seconds.
    """
    global _world
    if _world is None:
        guard.install()
        meet(MPI.COMM_WORLD, range(MPI.COMM_WORLD.size), 0, "init_process_group", timeout)
        _world = World(MPI.COMM_WORLD, timeout)
        # MPI_Finalize waits for all ranks, and some may be dead by then.
        library.finalizes = not failures.are_survived()
        script.watch_over(current)
    return _world


def begin_anew(base: MPI.Intracomm, timeout: float) -> None:
    """Go on as the ranks of this communicator; all of them call this, and have no groups."""
    global _world
    made.clear()
    _world = World(base, timeout)


class World:
    """This rank among all ranks.

    Args:
        base: the communicator of all ranks; in it they have their numbers.
        timeout: of the first group, in seconds.

    Attributes:
        base, timeout: the same.
        rank, size: of MPI's world.
        one_machine: whether all ranks share memory, and a clock.
        cores: processors that the ranks may use together, on one machine.
        epoch: how many incidents are over.
        stopped: this rank has left a communication, or failed, in the present incident.
        cell: name of what is running, the same on all ranks: a notebook's cell.
        threads: which of this rank's threads may communicate.
    """

    def __init__(self, base: MPI.Intracomm, timeout: float):
        self.base, self.timeout = base, timeout
        self.rank, self.size = base.rank, base.size
        node = base.Split_type(MPI.COMM_TYPE_SHARED)
        self.one_machine = base.allreduce(node.size == self.size, MPI.LAND)
        node.Free()
        self.cores = cores.of_all(base)
        fence.use(base.allreduce(fence.register(), MPI.LAND))
        self.control = base.Dup()
        self.board = board.make(
            self.control, base.Dup, self.one_machine, words=len(WORDS), text=True
        )
        self.board.set(_PROCESS, _host_id() << 32 | os.getpid())
        link.shared_clock = self.one_machine
        self.epoch = 0
        self.stopped = False
        self.cell = ""
        self._mark = log.mark()
        self.threads = Threads()
        # An incident of a communication that nobody waits for, so that nobody was told of it.
        self.unheard = False
        # Of groups that were destroyed, see :meth:`balance`.
        self.balance_of_closed = 0
        self._groups: list[weakref.ref] = []
        self._closed: list = []
        # The main thread, the progress thread and the user's write of themselves.
        self._lock = threading.RLock()
        self._waits = 0
        self._status: dict = {}
        self._beats = 0
        self._write(state="running")

    # -- what this rank says of itself ------------------------------------------------------

    def _write(self, **status) -> dict:
        with self._lock:
            self._status = {"rank": self.rank, "cell": self.cell, "epoch": self.epoch, **status}
            self.board.write(json.dumps(self._status))
            return self._status

    def begin(self, cell: str) -> None:
        """A cell begins. An incident of the cell before is nothing to raise an error for."""
        guard.install()
        self.cell, self._mark = cell, log.mark()
        if self.incident():
            if not self._is_of(cell):
                self._join()
            elif self.stopped:
                # What this rank's progress thread met, when others had begun this cell already.
                self.unheard = True
                return
        self.unheard = False
        self._write(state="running")

    def _is_of(self, cell: str) -> bool:
        """Whether the incident is one of this cell, which other ranks have begun before."""
        self.cause()  # so that it is written
        return any(s.get("kind") and s.get("cell") == cell for s in self.statuses())

    def left(self) -> None:
        """This rank's cell is over."""
        if not self.stopped:
            self._write(
                state="left", **(_messages(log.since(self._mark)) if self.balance() else {})
            )

    def ended(self, **more) -> None:
        """This rank's program is over; ``more``: see :mod:`torch_mpi.leftovers`."""
        self._write(**{**self._status, **more, "state": "ended"})

    def raised(self, error: BaseException, where: str) -> None:
        """The user's code ended with an error on this rank."""
        if self.stopped and self._status.get("kind"):
            return  # what came first counts
        interrupted = isinstance(error, KeyboardInterrupt)
        text = f"{type(error).__name__}: {_text(error)}".rstrip(": ")
        self.stop("interrupted" if interrupted else "raised", text, where=where)

    def waiting(self, waitable, where: str) -> dict:
        """This rank waits, for longer than a moment. Returns its status."""
        self._waits += 1
        return self._write(state="waiting", wait=self._waits, **self._wait_record(waitable, where))

    def beat(self) -> None:
        """This rank still tests what it waits for, and has not found it."""
        self._beats += 1
        self.board.set(_BEAT, self._beats)

    def beats(self, rank: int) -> int:
        """How often a rank has done that."""
        return self.board.of_all(_BEAT)[rank]

    def running(self) -> None:
        """The wait is over."""
        self._write(state="running")

    def _wait_record(self, waitable, where: str) -> dict:
        missing, any_of_them, moving = waitable.missing()
        call = waitable.call
        return {
            "call": call.name(),
            "what": call.describe(),
            "op": call.op,
            "group": list(call.group),
            "partner": call.partner,
            "tag": call.tag,
            "dtype": call.dtype,
            "shape": list(call.shape)[:16],
            "nbytes": call.nbytes,
            "where": where,
            "for": missing,
            "any": any_of_them,
            "moving": moving,
            "alone": self.threads.alone({progress.thread}) and not progress.has_futures(),
            "patience": 1 + (call.nbytes / 1e7 if call.op == "send" else 0),
        }

    def _history(self, call: Call) -> dict:
        """What this rank has communicated in this cell, as far as it may explain a wait."""
        calls = log.since(self._mark)
        kind = call.op, call.group, call.dtype, call.shape, call.reduce_op
        alike = [c for c in calls if (c.op, c.group, c.dtype, c.shape, c.reduce_op) == kind]
        return {"times": len(alike)} | _messages(calls)

    def stop(
        self,
        kind: str,
        error: str,
        *,
        waitable=None,
        where: str = "",
        heard: bool = True,
        called: dict[str, dict] | None = None,
        **more,
    ) -> dict:
        """Begin an incident, or join it; returns the status that all ranks can read now.

        Args:
            kind: see :mod:`torch_mpi.diagnosis`.
            error: what happened.
            waitable: the communication this rank was in, if it was.
            where: the user's line.
            heard: somebody waits for the communication, and will get the error.
            called: a collective that fits no other rank's, by its name: ``what``, ``where``.
        """
        record = {"where": where}
        if waitable is not None:
            record = self._wait_record(waitable, where) | self._history(waitable.call)
        with self._lock:
            number, before = self.epoch + 1, self._status
            # Written again with more words, it is still the same moment.
            again = before.get("incident") == number
            at = before["at"] if again else time.perf_counter()
            called = (before["called"] if again else {}) | self._called() | (called or {})
            self.unheard = self.unheard or not heard
            status = self._write(
                **record, state="stopped", kind=kind, error=error[:_LONGEST], called=called,
                at=at, incident=number, **more,
            )  # fmt: skip
            self._join()
        return status

    def _called(self) -> dict[str, dict]:
        """The collectives that have not begun: what another rank may have to tell of a mismatch."""
        return {name: told for group in self.groups() for name, told in group.called().items()}

    def _join(self) -> None:
        self.stopped = True
        self.board.set(_FAULT, max(self.epoch + 1, self.board.of_all(_FAULT)[self.rank]))
        for group in self.groups():
            group.forget_plans()

    # -- what the others say ----------------------------------------------------------------

    def incident(self) -> bool:
        """Whether some rank has failed since the ranks last met."""
        if self.board.refresh:
            self.board.refresh()
        return max(self.board.of_all(_FAULT)) > self.epoch

    def statuses(self) -> list[dict]:
        """What each rank last wrote of itself; of this incident, while there is one."""
        if self.board.refresh:
            self.board.refresh()
        return [self._status_of(rank) for rank in range(self.size)]

    def _status_of(self, rank: int) -> dict:
        try:
            status = json.loads(self.board.read(rank))
        except ValueError:  # just being written, or cut
            status = {"rank": rank, "state": "running"}
        if status.get("kind") and status.get("incident") != self.epoch + 1:
            status = {"rank": rank, "state": "running"}  # of an incident that is over
        if not self.is_alive(rank) and status["state"] != "ended":
            error = f"its process {self._process(rank)} is gone"
            status = {"rank": rank, "state": "dead", "kind": "died", "error": error, "at": 0.0}
        return status

    def _process(self, rank: int) -> int:
        return self.board.of_all(_PROCESS)[rank] & 0xFFFFFFFF

    def is_alive(self, rank: int) -> bool:
        """Whether a rank's process exists, as far as this machine can tell."""
        word = self.board.of_all(_PROCESS)[rank]
        if word >> 32 != _host_id():
            return True
        return _exists(word & 0xFFFFFFFF)

    def alive(self) -> list[int]:
        """Ranks whose process exists."""
        return [rank for rank in range(self.size) if self.is_alive(rank)]

    def is_left_behind(self) -> bool:
        """Whether others go on with fewer ranks, and wait for this one's end."""
        return any(self.board.of_all(SHRINK_HERE))

    def dead(self) -> list[int]:
        """Ranks whose process is gone."""
        return [rank for rank in range(self.size) if not self.is_alive(rank)]

    def cause(self) -> dict | None:
        """The status of the rank that failed first."""
        deadline = time.perf_counter() + _CAUSE_DEADLINE
        while (found := diagnosis.first_cause(self.statuses())) is None:
            if time.perf_counter() > deadline:
                return None
            time.sleep(1e-3)
        return found

    def follow(self, call=None, waitable=None, waited: float = 0.0) -> CommunicationStopped:
        """The error for a rank that stops because another one failed."""
        where = users_line()
        self.unheard = False
        cause = self.cause()
        name = call if isinstance(call, str) else call.describe()
        doing = f"stopped waiting in {name}" if waitable else f"did not begin {name}"
        text = f"rank {self.rank} {doing} at {where}, because "
        text += _reason(cause) if cause else "another rank had stopped."
        record = self.stop("followed", text, waitable=waitable, where=where, waited=waited)
        return CommunicationStopped(text, call if waitable else None, record)

    # -- together again ---------------------------------------------------------------------

    def check(self, op: str) -> None:
        """Before a communication: take part in what the others do.

        Raises:
            CommunicationStopped: an incident is on, which this rank did not know of.
            CommunicationError: the ranks cannot get together again.
        """
        if self.unheard:
            raise self._now_heard()
        if self.stopped:
            self.recover()
        elif self.incident():
            self.refuse_if_broken()
            raise self.follow(op)

    def _now_heard(self) -> CommunicationStopped:
        deadline = time.perf_counter() + 2 * _CAUSE_DEADLINE
        while not self._status.get("error") and time.perf_counter() < deadline:
            time.sleep(1e-3)  # another thread finds the words
        self.unheard = False
        return CommunicationStopped(self._status.get("error", ""), None, self._status)

    def recover(self, timeout: float = RECOVERY_DEADLINE) -> bool:
        """Meet the other ranks after an incident, and have every group begin anew.

        Returns:
            Whether there was one.

        Raises:
            CommunicationError: a rank is dead, has ended, or did not come.
        """
        if not self.incident():
            return False
        self._check_all()
        ended = [s["rank"] for s in self.statuses() if s["state"] == "ended"]
        if ended:
            raise CommunicationError(
                f"{diagnosis.names(ended)} had ended, so the ranks cannot communicate any more"
            )
        self.give_up_all()
        everybody = range(self.size)
        call = Call("the ranks' meeting after an error", tuple(everybody))
        assembly = Assembly(
            call, self.board, _HERE, _BEGUN, lambda: everybody, self.epoch + 1, self._check_all
        )
        try:
            wait_for(assembly, timeout)
        except BaseException:
            if assembly.leave():
                raise
        with guard:
            self._regather()
        return True

    def give_up_all(self) -> None:
        """Join the incident, and end what is under way."""
        if not self.stopped:
            self._join()
        for group in self.groups():
            group.give_up_all()

    def _check_all(self) -> None:
        """Raise CommunicationError where the ranks cannot get together any more."""
        if dead := self.dead():
            verb = "is" if len(dead) == 1 else "are"
            raise CommunicationError(f"{diagnosis.names(dead)} {verb} dead. {failures.what_now()}")
        self.refuse_if_broken()

    def refuse_if_broken(self) -> None:
        """Raise CommunicationError where a rank could not get together with the others."""
        if self.board.refresh:
            self.board.refresh()
        if BROKEN in self.board.of_all(_FAULT):
            raise CommunicationError(
                "the ranks could not get together again after an error: call ranks.restart() for "
                "fresh ranks, or start the program again"
            )

    def _regather(self) -> None:
        """What all ranks do once they are here. It waits for nothing but messages on the way."""
        try:
            self._clean_up()
        except BaseException as error:
            self.board.set(_FAULT, BROKEN)
            if isinstance(error, CommunicationError | MPI.Exception):
                self._check_all()
            raise
        self.epoch += 1
        self.stopped = self.unheard = False
        self._write(state="running")

    def _exchange(self, text: str) -> dict[int, str]:
        """The text of each rank; all of them call this."""
        ranks = range(self.size)
        return exchange(self.control, ranks, self.epoch + 1, text, self._check_all)

    def _clean_up(self) -> None:
        """Bring the groups of all their members to one state; leave the others."""
        mine = {group.key: group for group in [*self.groups(), *self._closed]}
        settled = {key: settle(group.poll_all) for key, group in mine.items()}
        text = to_text((group.standing(settled[key]) for key, group in mine.items()), made)
        told = self._exchange(text)
        lists, counts = zip(*map(from_text, told.values()), strict=True)
        by_rank = dict(zip(told, lists, strict=True))
        for members in {members for count in counts for members in count}:
            if self.rank in members:
                made[members] = max(count.get(members, 0) for count in counts)
        for key, group in mine.items():
            theirs = [by_rank.get(member, {}).get(key) for member in group.members]
            if None in theirs:
                lost = [m for m, it in zip(group.members, theirs, strict=True) if it is None]
                group.abandon(f"{diagnosis.names(lost)} of it is gone")
            else:
                group.renew(theirs)
        self._closed.clear()

    def balance(self) -> int:
        """How many more messages this rank has sent than received."""
        return sum(group.channels.balance for group in self.groups())

    def sweep(self) -> list[dict]:
        """Throw away the messages that nobody has received. All ranks do so, and nothing else.

        Returns:
            A dict for each of them that this rank had sent: ``to``, ``what``, ``where``.

        Raises:
            CommunicationError: the ranks could not do it; they are of no use any more.
        """
        with guard:
            try:
                letters = self._sweep_all()
            except BaseException:
                self.board.set(_FAULT, BROKEN)
                raise
        mine = {letter.number: letter for letter in letters if letter.source == self.rank}
        calls = {call.message[1]: call for call in log.since(0) if _is_sent(call, self.rank)}
        return [_in_words(letter, calls.get(number)) for number, letter in sorted(mine.items())]

    def _sweep_all(self) -> list[Letter]:
        """What nobody had received, on any rank."""
        mine = {group.key: group for group in self.groups()}
        text = to_text((group.standing(group.poll_all()) for group in mine.values()), made)
        told = self._exchange(text)
        by_rank = {rank: from_text(told[rank])[0] for rank in range(self.size)}
        letters = []
        for key, group in mine.items():
            theirs = [by_rank[member].get(key) for member in group.members]
            if all(it is not None and it.open and it.settled for it in theirs):
                letters += group.sweep()
        text = json.dumps([asdict(letter) for letter in letters])
        told = self._exchange(text)
        return [Letter(**letter) for text in told.values() for letter in json.loads(text)]

    def close_later(self, group) -> None:
        """A group was destroyed during an incident: its communicators are freed at the end."""
        self._closed.append(group)

    def add(self, group) -> None:
        """Have a process group renewed after incidents."""
        self._groups.append(weakref.ref(group))

    def groups(self) -> list:
        """The process groups that are in use, in the order in which they were made."""
        groups = [ref() for ref in self._groups]
        self._groups = [r for r, g in zip(self._groups, groups, strict=True) if g is not None]
        return [g for g in groups if g is not None and not g.closed]


def _messages(calls: list[Call]) -> dict:
    """The messages among them, for a status; nothing where they are too many to be told."""
    calls = [call for call in calls if call.message is not None]
    if len(calls) > _MESSAGES:
        return {}
    sent = [(c.partner, c.tag, c.message[1]) for c in calls if c.op == "send"]
    return {"sent": sent, "received": [c.message for c in calls if c.op == "recv"]}


def _is_sent(call: Call, rank: int) -> bool:
    return call.op == "send" and call.message is not None and call.message[0] == rank


def _in_words(letter: Letter, call: Call | None) -> dict:
    what = f"{letter.dtype}{list(letter.shape)} ({letter.nbytes} bytes, tag={letter.tag})"
    return {"to": letter.destination, "what": what, "where": call.where if call else ""}


def _reason(cause: dict) -> str:
    if cause["kind"] in ("raised", "interrupted"):
        return f"{diagnosis.line(cause)}."
    if cause["kind"] == "died":
        return f"{diagnosis.line(cause)}. {failures.what_now()}"
    # Of a mismatch the two sides are still being put together.
    return cause["error"] or f"the call of rank {cause['rank']} does not fit those of the others."


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # the user's own __str__
        return f"(its text can't be shown: {type(worse).__name__})"


def _host_id() -> int:
    return zlib.crc32(socket.gethostname().encode()) & 0x7FFFFFFF


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or no /proc: it exists
        return True
