"""Pending collectives: one that begins when all ranks have announced it, or several as one work."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from ..errors import CommunicationMismatch
from ..mpi import MPI
from ..network import link
from ..protocol import words
from ..protocol.handshake import Entry, signature
from ..protocol.interrupts import guard
from ..protocol.progress import progress
from ..protocol.status import Side
from ..protocol.wait_monitor import is_true_within
from . import algorithms
from .step_runner import Steps
from .work import MPIWork, WorkState

if TYPE_CHECKING:
    from .messages import Channels
    from .operation import Operation
    from .process_group import ProcessGroupMPI

# The first wait begins a collective that doesn't block, or else the progress thread does after this
# time. Starting earlier gains little, because on one machine the rank's own core moves the data.
START_AFTER = 2e-3  # seconds
START_AFTER_WITHOUT_CORE = 20e-3  # seconds

# A rank that finds a mismatch waits this long for the other side's description.
OTHER_SIDE = 0.5  # seconds


def enqueue(group: ProcessGroupMPI, operation: Operation) -> CollectiveWork:
    """Put a collective into the queue; it begins when all ranks have announced it."""
    call = operation.call
    same = (call.op, call.dtype, operation.key, call.reduce_op, call.peer, str(link.network))
    # Blocking calls need a board on which a rank can remove an announcement at once.
    immediate = group.handshake.announcements.board.immediate
    may_block = operation.mpi is not None and link.network is None and immediate
    work = CollectiveWork(group, operation, may_block)
    entry = work.entry = Entry(signature(same), call, work, may_block)
    try:
        with guard, group.handshake.lock:
            group.handshake.call(entry)
            call.sequence = entry.number
            if may_block and not call.blocking:
                entry.not_before = call.start + start_after(group.world.cores, group.world.size)
            else:
                if call.blocking:
                    group.handshake.hasten()
                group.handshake.pump()
    except KeyboardInterrupt:  # other ranks may rely on the announced word, inside MPI
        if call.blocking:
            work.leave_interrupted()
        raise
    if not call.blocking:
        work.progress()
    return work


def start_after(cores: int, ranks: int) -> float:
    """Return the seconds after which the progress thread begins a collective."""
    one_is_idle = cores >= ranks * (torch.get_num_threads() + 1)
    return START_AFTER if one_is_idle else START_AFTER_WITHOUT_CORE


class CollectiveWork(MPIWork):
    """A collective, which begins when all ranks of the group have announced the same call.

    Args:
        may_block: whether MPI's blocking calls are used when all ranks are in blocking calls.
    """

    is_collective = True
    entry: Entry

    def __init__(self, group: ProcessGroupMPI, operation: Operation, may_block: bool):
        super().__init__(
            group,
            operation.call,
            list(operation.result),
            operation.end,
            operation.memory,
            operation.shown,
        )
        self._operation = operation
        self.may_block = may_block

    @property
    def not_before(self) -> float:
        """Return the earliest time to announce it, unless a caller waits for it."""
        return self.entry.not_before

    @not_before.setter
    def not_before(self, value: float) -> None:
        self.entry.not_before = value

    def _test(self) -> bool:
        if not self.entry.begun:
            self.group.handshake.pump()
        if self._error is not None:
            return True
        return self.entry.begun and (self._steps is None or super()._test())

    def begin(self, blocking: bool) -> None:
        """Make the MPI calls, because all ranks are there; ``blocking`` selects blocking calls."""
        self.call.matched = time.perf_counter()
        try:
            if blocking and self.may_block:
                for name, arguments in self._operation.mpi_calls():
                    getattr(self.group.channels.data, name)(*arguments)
            else:
                # A small message leaves before its receiver is there.
                small = self.call.nbytes <= algorithms.SMALL
                since = link.called(self.call.start) if small else self.call.matched
                self._steps = Steps(_steps(self._operation, self.group.channels), since)
        except MPI.Exception as error:
            self._error = self.group.error_in_words(error, self.call, self)
        except Exception as error:  # kept, because the caller that waits has to get it
            self._error = error

    def _end(self, state: WorkState) -> None:
        if state is not WorkState.LEAKED:
            self._operation = None  # frees all tensors in it
        super()._end(state)

    def refuse(self, mismatched: list[int]) -> None:
        """Note that it will never begin, because these ranks (of the group) made another call."""
        self._error = _mismatch(self, self.group.members[mismatched[0]])

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the ranks that have not announced it."""
        absent = [self.call.group[rank] for rank in self.entry.missing]
        return absent, False, self.entry.begun

    def _give_up(self) -> None:
        handshake = self.group.handshake
        with handshake.lock, self._lock:
            if not self.is_over and not self.entry.begun and not handshake.withdraw(self.entry):
                return  # all ranks are there, so it goes on even if no caller waits
            super()._give_up()

    def _cancel(self) -> bool:
        if self.entry.begun and self._steps is not None and not self._steps.done:
            # The other ranks need this rank's part in the collective.
            progress.detach(self.group, self._steps.poll)
            return False
        return True


def _steps(operation: Operation, channels: Channels) -> Generator:
    """Yield the operation's steps: messages if MPI has no call or is slower; else MPI's call."""
    own_network = operation.mpi is not None and link.network is None
    if not own_network or operation.call.nbytes >= operation.messages_from:
        yield from operation.algorithm(algorithms.Ranks(channels, operation.call))
        return
    calls = operation.mpi_calls()
    yield [getattr(channels.data, f"I{name[0].lower()}{name[1:]}")(*args) for name, args in calls]


def _mismatch(work: CollectiveWork, other: int) -> CommunicationMismatch:
    """Return the error for a rank that made another call; it names both sides in rank order."""
    call = work.call
    mine = call.side()
    name = work.group.name_of(call)
    world = work.group.world
    called = {name: mine}
    work.begin_mismatch("", call.where, called=called)

    def told() -> Side | None:
        return world.statuses()[other].get("called", {}).get(name)

    is_true_within(OTHER_SIDE, told)
    theirs = told()
    if theirs is not None and theirs["what"] == mine["what"]:
        theirs = None  # the call that didn't match came from a thread that has left since
    sides = {world.rank: mine, other: theirs}
    text = words.of_collectives(sides)
    record = work.begin_mismatch(text, call.where, called=called)
    return CommunicationMismatch(text, call, record)


class JoinedWork(MPIWork):
    """A work that combines several works."""

    is_collective = True

    def __init__(self, works: list[MPIWork], result: list[torch.Tensor]):
        self._works = works
        super().__init__(works[0].group, works[0].call, result)
        self.progress()

    def _test(self) -> bool:
        over = all([work.poll() for work in self._works])
        if over:
            self._error = next((w._error for w in self._works if w._error is not None), None)
        return over

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the ranks that are missing for the first work that isn't over."""
        return next((w for w in self._works if not w.is_over), self._works[0]).missing()

    def _give_up(self) -> None:
        with self._lock:
            if self.is_over or self.poll():
                return
            left = [work.withdraw() for work in self._works]
            self.poll()
            if any(left) and self.is_over:
                self.state = WorkState.CANCELLED
