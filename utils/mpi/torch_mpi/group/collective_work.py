"""Pending collectives: one that begins when all ranks have announced it, or several as one work.

The *fast path* is for a blocking ``all_reduce`` with SUM of a plain tensor like an earlier one.
Each microsecond counts there, so this module repeats the usual case of the handshake in short. All
unusual cases go through the handshake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from ..errors import CommunicationMismatch, users_place
from ..mpi import MPI
from ..network import link
from ..protocol.handshake import (
    ACKNOWLEDGED,
    DEPTH,
    Entry,
    Handshake,
    alike,
    fingerprint,
    numbered,
    signature,
)
from ..protocol.progress import guard, progress
from ..protocol.status import Side
from ..protocol.wait_monitor import is_true_within
from ..record import Call, recorder
from . import algorithms, tensors
from .step_runner import Steps
from .work import MPIWork, WorkState

if TYPE_CHECKING:
    from .collectives import Operation
    from .messages import Channels
    from .process_group import ProcessGroupMPI

# The first wait begins a collective that doesn't block, or else the progress thread does after this
# time. Starting earlier gains little, because on one machine the rank's own core moves the data.
START_AFTER = 2e-3  # seconds
START_AFTER_WITHOUT_CORE = 20e-3  # seconds

# A rank that finds a mismatch waits this long for the other side's description.
OTHER_SIDE = 0.5  # seconds
_ORDER = " All ranks of a group have to make the same collective calls in the same order."
_THREADS = (
    " Two threads make their calls in no fixed order, so give each thread its own group with "
    "dist.new_group()."
)

# A group remembers at most so many kinds of tensors for its fast path.
_MOST = 4096
_SUM = ReduceOp.SUM
_now = time.perf_counter
_thread = threading.get_ident
_profiling = torch.autograd._profiler_enabled
_address = MPI.buffer.fromaddress
_MAIN_THREAD = threading.main_thread().ident


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
            operation.finish,
            operation.keep,
            operation.inputs,
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
                for name, arguments in self._operation.mpi():
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
    calls = operation.mpi()
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
    text = ", but ".join(_side(rank, sides[rank]) for rank in sorted(sides)) + "." + _ORDER
    if any(side and side["thread"] for side in sides.values()):
        text += _THREADS
    record = work.begin_mismatch(text, call.where, called=called)
    return CommunicationMismatch(text, call, record)


def _side(rank: int, side: Side | None) -> str:
    if not side:
        return f"rank {rank} makes another call"
    where = f" at {side['where']}" if side["where"] else ""
    thread = f" on its thread {side['thread']}" if side["thread"] else ""
    return f"rank {rank} calls {side['what']}{where}{thread}"


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


# -- the fast path ------------------------------------------------------------------------------


@dataclass(slots=True)
class Known:
    """A prepared blocking all_reduce for tensors of one dtype and shape.

    Attributes:
        unnumbered: its fingerprint as collective 0.
        call: the record of the earlier call.
        all_reduce: MPI's call.
    """

    unnumbered: int
    call: Call
    count: int
    nbytes: int
    datatype: MPI.Datatype
    all_reduce: Callable


class FastPath:
    """The memory of one group's calls of ``all_reduce``, which makes the next ones fast.

    Args:
        data: the communicator of the group's collectives.

    Attributes:
        known: prepared calls by dtype and shape. Without one, a call checks everything again.
    """

    def __init__(self, handshake: Handshake, data: MPI.Intracomm):
        self._handshake = handshake
        self._board = handshake.announcements.board
        self._acknowledged = self._board.place(ACKNOWLEDGED)
        self._data = data
        self.known: dict[tuple, Known] = {}

    def find(self, inputs: object) -> Known | None:
        """Return the prepared call for these tensors; ``None`` if the fast path can't take them."""
        if type(inputs) is not list or len(inputs) != 1 or type(inputs[0]) is not torch.Tensor:
            return None
        tensor = inputs[0]
        try:
            known = self.known.get((tensor.dtype, tensor.shape))
        except RuntimeError:  # a nested tensor has no shape, and is refused later
            return None
        # A tensor with a grad_fn may need a warning, which only the long way gives.
        return known if tensor.grad_fn is None and self._handshake.idle else None

    def remember(self, operation: Operation, code: int) -> None:
        """Have the next call like this blocking one take the fast path, if possible."""
        call = operation.call
        if (call.op, call.reduce_op) != ("all_reduce", "SUM") or len(self.known) >= _MOST:
            return
        tensor = operation.result[0]
        if type(tensor) is not torch.Tensor or tensor.is_complex():
            return
        if tensor.layout is not torch.strided or not 0 < tensor.numel() <= tensors.MAX_COUNT:
            return
        datatype, op = tensors.reduction(tensor.dtype, "SUM")
        if op != MPI.SUM:
            return
        self.known[tensor.dtype, tensor.shape] = Known(
            fingerprint(0, code, blocking=True),
            call,
            tensor.numel(),
            call.nbytes,
            datatype,
            self._data.Allreduce,
        )

    def all_reduce(self, tensor: torch.Tensor, opts: Any, known: Known) -> bool:
        """Reduce under the handshake's lock; return False if the call has to take the long way.

        Raises:
            MPI.Exception: MPI reported an error.
        """
        start = _now()
        if not (
            link.network is None
            and not getattr(opts, "asyncOp", True)
            and opts.reduceOp == _SUM
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not _profiling()
            and _thread() == _MAIN_THREAD
        ):
            return False
        handshake = self._handshake
        announcements = handshake.announcements
        number = announcements.number + 1
        if number > announcements.limit and not announcements.may_announce(number):
            return False
        block = [_address(tensor.data_ptr(), known.nbytes), known.count, known.datatype]
        mine = numbered(known.unnumbered, number)
        board = self._board
        first = number % DEPTH * board.size
        end = first + board.size
        words = board.words
        everybody = alike(mine, board.size)
        matched = 0.0
        guard.on += 1
        try:
            words[first + board.rank] = mine
            if words[first:end].tolist() == everybody or handshake.find_all(number, mine):
                # This is Announcements.acknowledge in short.
                words[self._acknowledged] = number
                if words[first:end].tolist() == everybody or handshake.find_all_again(number, mine):
                    announcements.number = number
                    matched = _now()
                    known.all_reduce(MPI.IN_PLACE, block)
                    recorder.add_like(known.call, start, matched, _now(), number)
        finally:
            guard.on -= 1
        if not matched:
            place = users_place()
            call = replace(known.call, sequence=number, place=place, blocking=True)
            handshake.fast_call = call
        if guard.late:
            guard.release()
        return matched > 0
