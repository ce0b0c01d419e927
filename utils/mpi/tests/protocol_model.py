"""A model checker for the handshake: the real modules, in all orders of the ranks' steps.

The ranks are greenlets of one thread. Each access to the board is one step, word by word, and goes
through a store buffer as a processor has it (x86-TSO; Sewell and others, CACM 53(7), 2010): a rank
reads its own store at once, the others when it has left the buffer, which is a step of its own. A
rank inside MPI's blocking call takes no steps until all ranks are inside of theirs.

:func:`explore` tries every order, and :func:`wander` random ones. Two orders that have led to the
same memory, after each rank has read the same values, go on alike: they are followed once.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from unittest import mock

import greenlet

from torch_mpi import record
from torch_mpi.group.fast_path import FastPath, Known
from torch_mpi.protocol import handshake
from torch_mpi.protocol.handshake import WORDS, Entry, Handshake, State

# Steps of one run. A run that is longer is cut: ranks may disturb each other for ever.
LONGEST = 400


class Violation(AssertionError):
    """An order of steps in which a promise is broken; ``run`` tells it."""

    def __init__(self, message: str, run: Run):
        super().__init__(f"{message}\n{run.story()}")
        self.run = run


class SimulatedBoard:
    """A group's board as one simulated rank sees it."""

    immediate = True

    def __init__(self, run: Run, rank: int, size: int):
        self._run, self.rank, self.size = run, rank, size
        self.rows = [SimulatedRow(self, index) for index in range(WORDS)]

    def refresh(self) -> None:
        pass

    def fence(self) -> None:
        self._run.fence()

    def place(self, index: int, rank: int) -> int:
        return index * self.size + rank

    def set(self, index: int, value: int) -> None:
        self.rows[index][self.rank] = value

    def of_all(self, index: int) -> list[int]:
        return self.rows[index].tolist()

    def load(self, index: int, rank: int) -> int:
        return self._run.load(self.rank, self.place(index, rank))

    def store(self, index: int, rank: int, value: int) -> None:
        self._run.store(self.rank, self.place(index, rank), value)


@dataclass
class SimulatedRow:
    """The words of all ranks for one index, as one simulated rank sees them."""

    board: SimulatedBoard
    index: int

    def tolist(self) -> list[int]:
        return [self.board.load(self.index, rank) for rank in range(self.board.size)]

    def __setitem__(self, rank: int, value: int) -> None:
        assert rank == self.board.rank, "a rank writes its own words only"
        self.board.store(self.index, rank, value)


@dataclass
class Rank:
    """A simulated rank: its program, and what became of its calls, by number."""

    number: int
    handshake: Handshake
    player: greenlet.greenlet | None = None
    #: What it has read and chosen so far: with the memory, that is all its state.
    history: list = field(default_factory=list)
    #: Its stores that the others do not see yet.
    buffer: list[tuple[int, int]] = field(default_factory=list)
    #: Waits: the version of the memory at its last look, or None.
    seen: int | None = None
    #: What the world around may decide for it now.
    options: tuple[str, ...] = ()
    began: dict[int, str] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    inside: int | None = None
    #: Of its last call.
    code: int = 0


class Call:
    """A collective of a simulated rank: the owner of an entry."""

    def __init__(self, run: Run, rank: Rank, code: int):
        self._run, self.rank, rank.code = run, rank, code
        self.entry = Entry(code, SimpleNamespace(sequence=0), self, may_block=True)

    def begin(self, blocking: bool) -> None:
        self.rank.began[self.entry.number] = "blocking" if blocking else "asynchronous"
        if blocking:
            self._run.enter_mpi(self.rank, self.entry.number)

    def refuse(self, mismatched: list[int]) -> None:
        self.rank.ended[self.entry.number] = f"mismatch with {mismatched}"


class Run:
    """One order of steps.

    Args:
        programs: of each rank: a function of ``(run, rank)``.
        choose: picks one of several possible steps, given their names and the state.
    """

    def __init__(self, programs: list[Callable], choose: Callable[[list[str], Callable], int]):
        self.memory = [0] * (WORDS * len(programs))
        self.version, self.told = 0, []
        self._choose = choose
        size = len(programs)
        self.ranks = [Rank(r, Handshake(SimulatedBoard(self, r, size))) for r in range(size)]
        for rank, program in zip(self.ranks, programs, strict=True):
            rank.player = greenlet.greenlet(program)

    # -- what the ranks do -----------------------------------------------------------------

    def load(self, rank: int, place: int) -> int:
        if mine := [value for at, value in self.ranks[rank].buffer if at == place]:
            return mine[-1]  # nobody else has to do with that: no step
        self._step()
        self.ranks[rank].history.append(self.memory[place])
        return self.memory[place]

    def store(self, rank: int, place: int, value: int) -> None:
        self._step()  # another rank's fence may come before or after it
        self.ranks[rank].buffer.append((place, value))

    def fence(self) -> None:
        """All stores of all ranks leave their buffers."""
        self._step()
        for rank in self.ranks:
            while rank.buffer:
                self._flush(rank)

    def pick(self, rank: Rank, *options: str) -> str:
        """What the world around decides: an error, a deadline, Ctrl-C."""
        rank.options = options
        picked = self._step()
        rank.options = ()
        rank.history.append(picked)
        return picked

    def wait(self, rank: Rank, since: int, may_leave: bool) -> bool:
        """Nothing to do before the memory is another one than that of version ``since``.

        Or until something ends the wait, where that may be; then ``True``.
        """
        rank.seen, rank.options = since, ("leaves",) if may_leave else ()
        left = self._step() == "leaves"
        rank.seen, rank.options = None, ()
        rank.history.append(left)
        return left

    def enter_mpi(self, rank: Rank, number: int) -> None:
        """MPI's blocking call of a collective."""
        rank.inside = number
        self.told.append(f"rank {rank.number}: inside the MPI call of {number}")
        self._step()
        rank.inside = None

    def _step(self) -> str | None:
        return greenlet.getcurrent().parent.switch()

    def _flush(self, rank: Rank) -> None:
        place, value = rank.buffer.pop(0)
        self.memory[place] = value
        self.version += 1

    # -- the order -------------------------------------------------------------------------

    def play(self) -> bool:
        """Go on until no rank can; ``False``: cut, or known from another run."""
        for rank in self.ranks:
            rank.player.switch(self, rank)
        for _ in range(LONGEST):
            steps = [*self._steps()]
            if not steps:
                return True
            at = self._choose([name for name, _ in steps], self.state)
            if at < 0:
                return False
            name, step = steps[at]
            self.told.append(name)
            step()
        return False

    def _steps(self) -> Iterator[tuple[str, Callable]]:
        for rank in self.ranks:
            if rank.buffer:
                yield f"rank {rank.number}: its store is seen", partial(self._flush, rank)
            for option in rank.options:
                yield f"rank {rank.number} {option}", partial(rank.player.switch, option)
            picks = rank.options and rank.seen is None
            if not picks and not rank.player.dead and not self._waits(rank):
                yield f"rank {rank.number}", rank.player.switch

    def _waits(self, rank: Rank) -> bool:
        """For others inside of MPI; or for another memory."""
        if (number := rank.inside) is not None:
            return any(other.began.get(number) != "blocking" for other in self.ranks)
        return rank.seen == self.version

    def state(self) -> int:
        """Equal for runs that go on alike."""
        ranks = [
            (tuple(r.history), tuple(r.buffer), r.seen == self.version, r.inside)
            for r in self.ranks
        ]
        return hash((tuple(self.memory), tuple(ranks)))

    def story(self) -> str:
        """The steps so far."""
        return "\n".join(self.told)

    def close(self) -> None:
        """End the greenlets of ranks that are stuck."""
        for rank in self.ranks:
            with contextlib.suppress(BaseException):
                rank.player.throw(greenlet.GreenletExit)


# -- programs of a rank ------------------------------------------------------------------------

SUM = handshake.signature(("all_reduce", "SUM"))
MAX = handshake.signature(("all_reduce", "MAX"))


def blocking(code: int = SUM, may_leave: bool = True) -> Callable:
    """A collective that the rank waits for, until something ends the wait."""

    def program(run: Run, rank: Rank) -> None:
        call = Call(run, rank, code)
        rank.handshake.call(call.entry)
        rank.handshake.hasten()
        _wait(run, rank, call.entry, may_leave)

    return program


def asynchronous(code: int = SUM) -> Callable:
    """``async_op=True``: announced by nobody's wait, and waited for later."""

    def program(run: Run, rank: Rank) -> None:
        call = Call(run, rank, code)
        rank.handshake.call(call.entry)
        rank.handshake.pump()
        _wait(run, rank, call.entry, may_leave=True)

    return program


def two_asynchronous(last_first: bool = False, may_leave: bool = True) -> Callable:
    """Two collectives under way at once; who leaves one leaves both, or takes part."""

    def program(run: Run, rank: Rank) -> None:
        calls = [Call(run, rank, SUM) for _ in range(2)]
        for call in calls:
            rank.handshake.call(call.entry)
            rank.handshake.pump()
        for call in reversed(calls) if last_first else calls:
            if rank.ended and rank.handshake.withdraw(call.entry):
                rank.ended[call.entry.number] = "left"
            _wait(run, rank, call.entry, may_leave=may_leave and not rank.ended)

    return program


def fast(code: int = SUM, may_leave: bool = True) -> Callable:
    """A call on the fast path, and the long way where it gives up."""

    def program(run: Run, rank: Rank) -> None:
        path, rank.code = FastPath(rank.handshake, None), code

        def in_mpi() -> None:
            number = rank.handshake.announcements.number
            rank.began[number] = "blocking"
            run.enter_mpi(rank, number)

        call = record.Call("all_reduce", (0,))
        known = Known(handshake.unnumbered(code), call, mpi=None, nbytes=[], method=in_mpi)
        if path.begin(known):
            return
        if may_leave and run.pick(rank, "goes on", "has an error") == "has an error":
            rank.handshake.end_fast_path()
            rank.ended[rank.handshake.announcements.number] = "error"
            return
        call = Call(run, rank, code)
        rank.handshake.call(call.entry)
        rank.handshake.hasten()
        rank.handshake.end_fast_path()
        _wait(run, rank, call.entry, may_leave)

    return program


def then(*programs: Callable) -> Callable:
    """One after the other; after one that was left or refused the rest is not begun."""

    def program(run: Run, rank: Rank) -> None:
        for part in programs:
            part(run, rank)
            if rank.ended:
                return

    return program


def _wait(run: Run, rank: Rank, entry: Entry, may_leave: bool) -> None:
    """Until the collective begins; who is not let go tries again when something has changed."""
    since, refused_at = run.version, -1
    rank.handshake.pump()
    while entry.state in (State.CALLED, State.ANNOUNCED):
        if run.wait(rank, since, may_leave and refused_at != run.version):
            if rank.handshake.withdraw(entry):
                rank.ended[entry.number] = "left"
                return
            refused_at = run.version
        since = run.version
        rank.handshake.pump()


# -- promises ----------------------------------------------------------------------------------


def check(run: Run) -> None:
    """Raise Violation where the end of a run breaks a promise of ``PROTOCOL.md``."""
    for rank in run.ranks:
        if rank.inside is not None:
            raise Violation(f"P1: rank {rank.number} is stuck inside MPI for good", run)
        # Once one has left, the incident ends the waits of the others.
        if not rank.player.dead and not any(other.ended for other in run.ranks):
            raise Violation(f"P2: rank {rank.number} waits for good", run)
    for number in {n for rank in run.ranks for n in (*rank.began, *rank.ended)}:
        # Who ended with an error between fast path and long way is missed by the others, who find
        # out as of a dead rank: nothing asynchronous is ever stuck inside of MPI.
        ways = {r.began.get(number) for r in run.ranks if r.ended.get(number) != "error"}
        if len(ways) > 1:
            raise Violation(f"P3: {number} began on some ranks only, or differently: {ways}", run)
    codes = {rank.code for rank in run.ranks}
    alarms = [r for r in run.ranks if any("mismatch" in end for end in r.ended.values())]
    if alarms and len(codes) == 1:
        raise Violation(f"P4: rank {alarms[0].number} reports a mismatch, and there is none", run)
    if len(codes) > 1 and any(rank.began for rank in run.ranks):
        raise Violation("P5: different calls were taken for one collective", run)


# -- ways through the orders ---------------------------------------------------------------------


@contextlib.contextmanager
def simulated(run: Run) -> Iterator[None]:
    """Nothing of the real time and the real machine; fences are those of the run."""
    with (
        mock.patch.object(handshake, "_LOOKS", 1),
        mock.patch.object(handshake.os, "sched_yield"),
    ):
        yield


def explore(programs: list[Callable], most: int = 10**9, checks: Callable = check) -> int:
    """Try all orders, depth first, at most so many runs; how many there were.

    Raises:
        Violation: an order that breaks a promise.
    """
    known: set[int] = set()
    path: list[list[int]] = []  # at each choice: which was taken, how many there are
    runs = 0
    while runs < most:
        depth = 0

        def choose(names: list[str], state: Callable) -> int:
            nonlocal depth
            depth += 1
            if depth <= len(path):
                return path[depth - 1][0]
            here = hash((state(), tuple(names)))
            if here in known:
                return -1
            known.add(here)
            path.append([0, len(names)])
            return 0

        run = Run(programs, choose)
        with simulated(run):
            try:
                if run.play():
                    checks(run)
            finally:
                run.close()
        runs += 1
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return runs
        path[-1][0] += 1
    return runs


def wander(programs: list[Callable], seed: int, runs: int, checks: Callable = check) -> None:
    """Try random orders; ``seed`` plays the same ones again."""
    for number in range(runs):
        draw = random.Random(f"{seed} {number}").randrange
        run = Run(programs, lambda names, _, draw=draw: draw(len(names)))
        with simulated(run):
            try:
                if run.play():
                    checks(run)
            finally:
                run.close()
