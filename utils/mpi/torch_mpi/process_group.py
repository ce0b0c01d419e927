"""``ProcessGroupMPI``: PyTorch's process group on the communicators of mpi4py.

The methods are those that :mod:`torch.distributed` and PyTorch's C++ call, with their
names. Each makes a record of the call and returns a work. Messages are non-blocking MPI
operations which the work tests. A collective begins when all ranks of the group have come with
the same call: with MPI's blocking one where all of them wait, else with non-blocking ones. That
way a wait has a deadline and can be interrupted, and what was started moves on while the rank
computes.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch._C._dynamo import eval_frame
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d
from torch.distributed.constants import default_pg_timeout

from . import algorithms, arrivals, board, buffers, cores, failures, limits, messages, strict, world
from .arithmetic import combine
from .arrivals import Arrivals
from .dtypes import check_ops, dtype_name, factor_of, multiplied, op_name, reduction
from .errors import CommunicationError, CommunicationMismatch, users_place
from .interrupts import guard
from .meeting import meet
from .messages import Channels, Letter, read_envelope
from .mpi import MPI
from .network import link
from .progress import progress
from .record import Call, log
from .recovery import Standing, flush
from .steps import Steps
from .waiting import LATE
from .work import OTHER_SIDE, CollectiveWork, DoneWork, JoinedWork, MPIWork, in_words

TIMEOUT_VARIABLE = "MPI_BACKEND_TIMEOUT"
_C10D = distributed_c10d.__file__
_DONE = DoneWork()
# Open MPI's Iallreduce takes two to four times as long as Allreduce from here on; a ring of
# messages that are added up by PyTorch does not.
RING_FROM = 512 * 1024  # bytes
# A collective that does not block is begun by a wait for it, by MPI's blocking call; or after that
# long by the progress thread. On one machine both move the data with the rank's own processor, and
# the thread takes longer: too short a time to hide anything is best not begun. Where all processors
# compute, nothing can be hidden (see torch_mpi.cores), and only a rank that waits gains by it.
START_AFTER, START_AFTER_WITHOUT_CORE = 2e-3, 20e-3  # seconds
# How often the fast path looks for the other ranks before it hands over to a patient wait.
_LOOKS = 1000
_LOOKS_FOR_MESSAGE = 200
# A message that is due within that time is waited for on the spot.
_MOMENT = 2e-3  # seconds
_SUM = ReduceOp.SUM
_now, _thread = time.perf_counter, threading.get_ident
_profiling, _address = torch.autograd._profiler_enabled, MPI.buffer.fromaddress
_MAIN_THREAD = threading.main_thread().ident


@dataclass(slots=True)
class Plan:
    """What is known beforehand of a blocking all_reduce of tensors of one dtype and shape."""

    code: int
    call: Call
    count: int
    nbytes: int
    datatype: MPI.Datatype
    size: int
    words: memoryview
    started: int
    all_reduce: Callable


def create(ranks: Sequence[int]) -> ProcessGroupMPI | None:
    """The process group of ``ranks`` (global ranks; empty: all), ``None`` on other ranks.

    Raises:
        ValueError: a rank that does not exist.
        CommunicationTimeout: a rank of the group did not come.
    """
    timeout = _timeout_of_the_caller()
    _without_flight_recorder()
    here = world.enter(timeout)
    members = tuple(ranks) if ranks else tuple(range(here.size))
    bad = [r for r in members if not 0 <= r < here.size]
    if bad:
        raise ValueError(f"ranks {bad} do not exist: the world has ranks 0 to {here.size - 1}")
    here.check("new_group")
    messages.every_send_waits = strict.is_on()
    return ProcessGroupMPI(members, timeout) if here.rank in members else None


def _without_flight_recorder() -> None:
    """Have PyTorch 2.15 not attach its flight recorder to this backend's groups.

    It hooks into the C++ methods of ``ProcessGroup``, which a group that replaces them in Python
    never calls; PyTorch leaves such groups out, and takes ours for another kind as it names its
    device, which ``split_group`` asks for. The set holds the backends that it leaves out by name.
    """
    names = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(names, set):
        names.add("mpi")


def _timeout_of_the_caller() -> float:
    """Seconds given to ``init_process_group`` or ``new_group``.

    PyTorch hands its MPI backend no timeout, so it is read from the frame that asks for the
    group. :data:`TIMEOUT_VARIABLE` stands in for PyTorch's default of 30 minutes.
    """
    frame, asked = sys._getframe(1), None
    for _ in range(4):
        frame = frame.f_back
        if frame is None:
            break
        if frame.f_code.co_name == "_new_process_group_helper":
            asked = frame.f_locals.get("timeout")
            break
    if asked is None or asked == default_pg_timeout:
        return float(os.environ.get(TIMEOUT_VARIABLE, default_pg_timeout.total_seconds()))
    return asked.total_seconds()


class ProcessGroupMPI(ProcessGroup):
    """A group of MPI ranks.

    Args:
        members: global ranks, in the order of the group.
        timeout: seconds that a wait lasts at most.
    """

    def __init__(self, members: tuple[int, ...], timeout: float):
        self.members = members
        self.world = world.current()
        self._rank = members.index(self.world.rank)
        super().__init__(self._rank, len(members))
        self._timeout = timeout
        self._name = self._description = ""
        self._lost = ""
        self.closed = False
        self.lock = threading.RLock()
        # Collectives that were called and have not begun, oldest first.
        self._queue: deque[CollectiveWork] = deque()
        self._plans: dict[tuple, Plan] = {}
        self.channels: Channels | None = None
        # The word of the collective that this rank has come to, but not begun; 0 without one.
        self._come_to, self._come_for = 0, None
        self.key = _key_of(members)
        try:
            meet(self.world.control, members, self.key[1], "new_group", self.timeout, self.world)
            with guard:
                self._open()
        except MPI.Exception as error:
            raise in_words(error, Call("new_group", members), self) from None
        world.made[members] = self.key[1]
        self.world.add(self)

    def _open(self) -> None:
        """Make the communicators and the board. All members are here."""
        # A collective's own messages never meet the user's.
        envelopes, data = self._communicators()
        self.channels = Channels(envelopes, data, self.members, self._rank)
        self.arrivals = Arrivals(
            board.make(data, self._communicator, self.world.one_machine, arrivals.WORDS)
        )

    def _communicators(self) -> list[MPI.Intracomm]:
        """Two new ones. Where a rank dies meanwhile, every rank has an error, or none."""
        if not failures.are_survived() or not self._is_of_all():
            return [self._communicator() for _ in range(2)]
        base, made = self.world.base, []
        try:
            made = [base.Dup() for _ in range(2)]
        except MPI.Exception:
            base.Revoke()  # no other rank must wait for this one
        if not failures.agree(base, len(made) == 2):
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        return made

    def _is_of_all(self) -> bool:
        return self.members == tuple(range(self.world.size))

    def _communicator(self) -> MPI.Intracomm:
        """A new one of the members."""
        base = self.world.base
        if self._is_of_all():
            # Unlike the other call it ends with an error when a rank dies meanwhile.
            return base.Dup()
        group = base.group.Incl(self.members)
        made = base.Create_group(group)
        group.Free()
        return made

    def standing(self, settled: bool) -> Standing:
        """What the other members have to know to begin anew together."""
        return Standing(*self.key, self.arrivals.number, not self.closed, settled)

    def poll_all(self) -> bool:
        """Move on the collectives; whether none is left."""
        return progress.settled(self)

    def renew(self, standings: list[Standing]) -> None:
        """Begin anew, after an incident; all members are here, and stand as told, in order."""
        self._queue.clear()
        self._come_to = 0
        settled = all(standing.settled for standing in standings)
        if settled:
            self.sweep()
            progress.release(self)
        if not all(standing.open for standing in standings):
            if settled:
                self._free()
            self.abandon(self._lost or "a rank has destroyed it")
        elif settled:
            self.arrivals.go_on_after(max(standing.number for standing in standings))
        else:
            # Something will never end: MPI keeps these communicators, and the group gets others.
            self._open()

    def sweep(self) -> list[Letter]:
        """Throw away the messages that nobody has received; all members do so together."""
        check = self.world.refuse_if_broken
        channels, members = self.channels, self.members
        taken = flush(channels.envelopes, members, check, lambda: True)
        flush(channels.data, members, check, lambda: progress.all_sent(self))
        channels.balance = 0
        return [read_envelope(channels, one.source, one.tag, bytes(one.data)) for one in taken]

    def revoke(self) -> None:
        """A rank has died: have no other rank wait for it inside of a call of MPI."""
        self.world.base.Revoke()
        if self.channels is not None:
            self.channels.envelopes.Revoke()
            self.channels.data.Revoke()

    def abandon(self, reason: str) -> None:
        """The group cannot be used any more."""
        self._lost = reason

    def give_up_all(self) -> None:
        """End what is under way, so that the group can begin anew."""
        for work in progress.works_of(self):
            work.leave()

    def forget_plans(self) -> None:
        """Have the next call look whether all is well."""
        self._plans.clear()

    # -- who am I -------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: D102  (PyTorch's name)
        return "mpi"

    name = getBackendName

    def getRank(self) -> int:  # noqa: D102
        return self._rank

    def getSize(self) -> int:  # noqa: D102
        return len(self.members)

    def getGroupName(self) -> str:  # noqa: D102
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: D102
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: D102
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def timeout(self) -> float:
        """Seconds that a wait lasts at most; the present cell may have a limit of its own."""
        return self._timeout if limits.cell is None else limits.cell

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a wait lasts at most, from now on."""
        self._timeout = timeout.total_seconds()

    # PyTorch asks a group for the backend of a device; this group is its own.
    supports_splitting, supports_coalescing = True, False
    _set_default_timeout = set_timeout

    def eager_connect_single_device(self, device: torch.device) -> None:
        """PyTorch asks that of backends that split: the ranks are connected from the start."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """A rank outside of a new group has nothing to do: only its members make it."""

    def _get_backend(self, device: torch.device) -> ProcessGroupMPI:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.arrivals.number

    # -- life -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give the communicators back. Called by ``destroy_process_group`` on every member.

        Receives under way are taken back, the rest is waited for. A communicator on which a
        collective never ends is kept: freeing it would bring the process down.
        """
        if self.closed:
            return
        self.closed, self._lost = True, "it was destroyed"
        self.world.balance_of_closed += self.channels.balance
        self._plans.clear()
        if MPI.Is_finalized():
            return
        drained = progress.drain(self)
        if self.world.stopped:
            self.world.close_later(self)
        elif drained:
            self._free()

    def _free(self) -> None:
        self.arrivals.board.close()
        for communicator in (self.channels.envelopes, self.channels.data):
            communicator.Free()

    def abort(self) -> None:
        """Refuse further use. MPI has no way to cancel a collective that has begun."""
        self._plans.clear()
        self._lost = "it was aborted"

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroupMPI | None:
        """The process group of some ranks (of this group); ``None`` on the others.

        There are no options, and the only device is the CPU: ``opts`` and ``device_types`` are
        PyTorch's.
        """
        members = tuple(self.members[r] for r in ranks)
        if self.world.rank not in members:
            return None
        child = ProcessGroupMPI(members, timeout.total_seconds() if timeout else self._timeout)
        child.setGroupName(group_name or f"{self._name}:split:{','.join(map(str, ranks))}")
        child.setGroupDesc(group_desc or f"{self._description}:split")
        return child

    splitGroup = split_group

    # -- point to point -------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> MPIWork:
        """Start sending one tensor to rank ``dst`` of the group."""
        start = _now()
        tensor = _one(tensors, "send")
        self._check_peer("send", "dst", dst, tag)
        memory = buffers.readable(tensor)
        call = self._call("send", [tensor], peer=dst, tag=tag, blocking=_called_by("send"))
        call.start = start
        try:
            with guard:
                envelope, gone = messages.pack(self.channels, call, tensor, memory)
                steps = Steps(messages.send(self.channels, call, memory, envelope, gone))
                if call.blocking and not _profiling() and steps.poll():
                    return _over(call)
                work = MPIWork(self, call, [tensor], keep=memory)
                if not call.blocking and strict.is_on():
                    work.seal = strict.Seal(memory)
                return self._message(work, steps)
        except MPI.Exception as error:
            raise in_words(error, call, self) from None

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> MPIWork:
        """Start receiving one tensor from rank ``src`` of the group."""
        self._check_peer("recv", "src", src, tag)
        return self._receive(_one(tensors, "recv"), src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> MPIWork:
        """Start receiving one tensor from whichever rank sends first."""
        self._check_peer("recv", "src", None, tag)
        return self._receive(_one(tensors, "recv"), MPI.ANY_SOURCE, tag)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int) -> MPIWork:
        memory = buffers.writable(tensor, "recv")
        blocking = _called_by("recv")
        call = self._call("recv", [tensor], peer=src, tag=tag, blocking=blocking, sent=0)
        call.any_source, call.received = src == MPI.ANY_SOURCE, call.nbytes
        try:
            return self._begin_receive(tensor, memory, call, src, tag)
        except MPI.Exception as error:
            raise in_words(error, call, self) from None

    def _begin_receive(self, tensor, memory, call: Call, src: int, tag: int) -> MPIWork:
        with guard:
            mailbox = messages.Mailbox(self.channels, src, tag)
            steps = messages.receive(self.channels, call, tensor, memory, mailbox)
            if call.blocking and src != MPI.ANY_SOURCE and not _profiling() and _soon(mailbox):
                steps = self._opened(steps, call)
                if _at_once(steps):
                    buffers.deliver(tensor, memory)
                    return _over(call)
            else:
                steps = Steps(steps)
            work = MPIWork(self, call, [tensor], lambda: buffers.deliver(tensor, memory), memory)
            return self._message(work, steps)

    def _opened(self, steps: Generator, call: Call) -> Steps:
        """Begin the steps of a receive whose envelope is here."""
        try:
            return Steps(steps)
        except CommunicationMismatch as error:
            error.record = self.world.stop("mismatch", str(error), where=call.where)
            raise

    def _message(self, work: MPIWork, steps: Steps) -> MPIWork:
        work.follow(steps)
        if not work.call.blocking:
            work.progress()
        return work

    def _check_peer(self, op: str, role: str, peer: int | None, tag: int) -> None:
        size = len(self.members)
        if peer is not None and not 0 <= peer < size:
            raise ValueError(
                f"{op}({role}={peer}): the group has ranks 0 to {size - 1} (global {self.members})"
            )
        if not 0 <= tag <= self.channels.tags.largest:
            raise ValueError(
                f"{op}(tag={tag}): a tag is a number from 0 to {self.channels.tags.largest}, the "
                f"largest that this MPI library has (MPI_TAG_UB)"
            )

    # -- one to all, all to one -----------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts=None) -> MPIWork:
        """The tensor of the root, on every rank."""
        tensor = _one(tensors, "broadcast")
        root = self._root("broadcast", opts)
        is_root = root == self._rank
        memory = buffers.readable(tensor) if is_root else buffers.writable(tensor, "broadcast")
        call = self._call("broadcast", [tensor], opts, peer=root)
        if not is_root:
            call.sent, call.received = 0, call.nbytes

        def finish() -> None:
            if not is_root:
                buffers.deliver(tensor, memory)

        return self._collective(
            call,
            (tuple(tensor.shape),),
            [tensor],
            finish,
            native=lambda: [("Bcast", (buffers.message(memory), root))],
            shaped=lambda team: algorithms.broadcast(team, memory.view(-1), root),
        )

    def reduce(self, tensors: list[torch.Tensor], opts=None) -> MPIWork:
        """The reduction of all tensors, on the root; the others keep theirs."""
        tensor = _one(tensors, "reduce")
        root = self._root("reduce", opts)
        is_root = root == self._rank
        name = op_name(opts)
        datatype, op = reduction(tensor.dtype, name)
        if is_root:
            buffers.check_writable(tensor, "reduce")
        factor = factor_of(opts, name, tensor.dtype)
        memory = multiplied(buffers.readable(tensor), factor)
        call = self._call("reduce", [tensor], opts, peer=root, reduce_op=name)
        call.received = call.nbytes if is_root else 0

        def native() -> list[tuple]:
            blocks = _blocks(memory, datatype)
            if is_root:
                return [("Reduce", (MPI.IN_PLACE, block, op, root)) for block in blocks]
            return [("Reduce", (block, None, op, root)) for block in blocks]

        def shaped(team: algorithms.Team) -> Generator:
            flat = memory.view(-1) if is_root else memory.view(-1).clone()
            return algorithms.reduce(team, flat, combine(tensor.dtype, name), root)

        def finish() -> None:
            check_ops()
            if is_root:
                _divide(memory, name, len(self.members))
                buffers.deliver(tensor, memory)

        return self._collective(
            call, (tuple(tensor.shape),), [tensor], finish, memory, native=native, shaped=shaped
        )

    def gather(self, outputs: list[list[torch.Tensor]], inputs, opts=None) -> MPIWork:
        """The tensors of all ranks, in a list on the root."""
        tensor = _one(inputs, "gather")
        root = self._root("gather", opts)
        call = self._call("gather", [tensor], opts, peer=root)
        receives = []
        if root == self._rank:
            call.received = len(self.members) * call.nbytes
            receives = self._per_rank(outputs[0], tensor, "gather")
        return self._exchange(call, (tensor.numel(),), [(root, tensor)], receives)

    def scatter(self, outputs: list[torch.Tensor], inputs, opts=None) -> MPIWork:
        """One tensor for each rank, from a list on the root."""
        tensor = _one(outputs, "scatter")
        root = self._root("scatter", opts)
        call = self._call("scatter", [tensor], opts, peer=root, sent=0)
        call.received, sends = call.nbytes, []
        if root == self._rank:
            call.sent = len(self.members) * call.nbytes
            sends = self._per_rank(inputs[0], tensor, "scatter")
        return self._exchange(call, (tensor.numel(),), sends, [(root, tensor)])

    # -- all to all: reductions -----------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor] | torch.Tensor, opts=None) -> MPIWork:
        """The reduction of the tensors of all ranks, on every rank, in place.

        ``opts`` may be a ``ReduceOp``; without one it is SUM.
        """
        if type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is torch.Tensor:
            # A tensor like one before, and nothing else going on: the short way.
            tensor = tensors[0]
            try:
                plan = self._plans.get((tensor.dtype, tensor.shape))
            except RuntimeError:  # a nested tensor has no shape: refused below
                plan = None
            if (
                plan is not None
                and tensor.grad_fn is None  # else a backward pass will have to warn
                and not self._queue
                and self.lock.acquire(False)
            ):
                # Another thread must not come to a collective before this one is in the queue.
                try:
                    if self._all_reduce_now(tensor, opts, plan):
                        return _DONE
                    return self._all_reduce("all_reduce", tensors, opts)
                finally:
                    if self._come_to:  # an error on the way: this collective is nobody else's
                        self.arrivals.withdraw(self.arrivals.number, self._come_to)
                        self._come_to, self._come_for = 0, None
                    self.lock.release()
        return self._all_reduce("all_reduce", [_one(tensors, "all_reduce")], opts)

    def _all_reduce_now(self, tensor: torch.Tensor, opts, plan: Plan) -> bool:
        """A blocking SUM of a plain CPU tensor; ``False`` when it has to go the long way.

        The long way of :meth:`_collective` without all that such a call does not need: each
        microsecond counts here, so it is written in one piece.
        """
        start = _now()
        if not (
            link.network is None
            and opts is not None
            and not opts.asyncOp
            and opts.reduceOp == _SUM
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not _profiling()
            and _thread() == _MAIN_THREAD
        ):
            return False
        there = self.arrivals
        number = there.number + 1
        if number > there.limit and not there.may_come(number):
            return False
        block = [_address(tensor.data_ptr(), plan.nbytes), plan.count, plan.datatype]
        mine = plan.code | (number & arrivals.NUMBER) << arrivals.NUMBER_AT
        first = number % arrivals.DEPTH * plan.size
        words, end, everybody = plan.words, first + plan.size, [mine] * plan.size
        matched = 0.0
        guard.on += 1
        try:
            words[first + self._rank] = mine
            if words[first:end].tolist() == everybody or self._all_come(number, mine):
                # Arrivals.enter, in short.
                words[plan.started] = number
                if words[first:end].tolist() == everybody or self._may_enter(number, mine):
                    there.number = number
                    matched = _now()
                    plan.all_reduce(MPI.IN_PLACE, block)
                    log.add_like(plan.call, start, matched, _now(), number)
        except MPI.Exception as error:
            raise in_words(error, plan.call, self) from None
        finally:
            guard.on -= 1
        if self._come_to:  # this rank may have to tell another one what it has come for
            place = users_place()
            self._come_for = replace(plan.call, sequence=number, place=place, blocking=True)
        if guard.late:
            guard.release()
        return matched > 0

    def _all_come(self, number: int, mine: int) -> bool:
        """Look for the other ranks for a moment; without success, take back having come."""
        there = self.arrivals
        first = number % arrivals.DEPTH * len(self.members)
        end, everybody = first + len(self.members), [mine] * len(self.members)
        words = there.board.words
        for look in range(_LOOKS):
            if words[first:end].tolist() == everybody:
                return True
            if look > 30:
                os.sched_yield()
        while not there.withdraw(number, mine):
            sight = there.look(number, mine)
            if sight.direct and sight.complete:
                return True
            if not sight.missing:
                # Some are in calls that do not block: this one has to be made like theirs.
                there.number, self._come_to = number, mine
                return False
        return False

    def _may_enter(self, number: int, mine: int) -> bool:
        """Somebody is missing again: until all are there, or this rank is not there either."""
        there = self.arrivals
        while True:
            there.board.set(arrivals.STARTED, number - 1)
            if not self._all_come(number, mine):
                return False
            if there.enter(number, mine).complete:
                return True

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts=None) -> MPIWork:
        """:meth:`allreduce` of several tensors in one call."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, what: str, tensors: list[torch.Tensor], opts) -> MPIWork:
        name = op_name(opts)
        tensors = [buffers.check(tensor, what) for tensor in tensors]
        for tensor in tensors:
            buffers.check_writable(tensor, what)
        kinds = [reduction(tensor.dtype, name) for tensor in tensors]
        factors = [factor_of(opts, name, tensor.dtype) for tensor in tensors]
        memories = [
            multiplied(buffers.readable(tensor), factor)
            for tensor, factor in zip(tensors, factors, strict=True)
        ]
        call = self._call(what, tensors, opts, reduce_op=name)
        call.received = call.nbytes

        def native() -> list[tuple]:
            return [
                ("Allreduce", (MPI.IN_PLACE, block, op))
                for memory, (datatype, op) in zip(memories, kinds, strict=True)
                for block in _blocks(memory, datatype)
            ]

        def shaped(team: algorithms.Team) -> Generator:
            for memory in memories:
                add = combine(memory.dtype, name)
                yield from algorithms.all_reduce(team, memory.view(-1), add)

        def finish() -> None:
            check_ops()
            for tensor, memory in zip(tensors, memories, strict=True):
                _divide(memory, name, len(self.members))
                buffers.deliver(tensor, memory)

        key = tuple((dtype_name(t.dtype), tuple(t.shape)) for t in tensors)
        return self._collective(
            call,
            key,
            tensors,
            finish,
            memories,
            native=native,
            shaped=shaped,
            messages_from=RING_FROM,
        )

    def reduce_scatter(self, outputs, inputs, opts=None) -> MPIWork:
        """Rank r gets the reduction of everybody's r-th tensor. Sizes may differ between r."""
        output = _one(outputs, "reduce_scatter")
        parts = self._check_count(inputs[0], "reduce_scatter")
        if parts[self._rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: the output holds {output.numel()} elements, input "
                f"{self._rank} (this rank's) {parts[self._rank].numel()}"
            )
        return self._reduce_scatter("reduce_scatter", output, parts, opts)

    def reduce_scatter_single(self, output, tensor, opts=None) -> MPIWork:
        """Rank r gets the reduction of everybody's r-th equal part of one tensor."""
        what = "reduce_scatter_tensor"
        output = buffers.check(output, what)
        parts = self._equal_parts(buffers.check(tensor, what), output, what)
        return self._reduce_scatter(what, output, parts, opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> MPIWork:
        """:meth:`reduce_scatter_single` of several tensors."""
        works = [
            self.reduce_scatter_single(output, tensor, opts)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return JoinedWork(works, list(outputs))

    def _reduce_scatter(self, what: str, output, parts, opts) -> MPIWork:
        name = op_name(opts)
        _check_alike([output, *parts], what)
        datatype, op = reduction(output.dtype, name)
        call = self._call(what, list(parts), opts, reduce_op=name)
        call.received = buffers.nbytes(output)
        stage = multiplied(_flat(parts), factor_of(opts, name, output.dtype))
        memory = buffers.writable(output, what)
        if buffers.overlap(memory, stage):
            memory = torch.empty_like(memory)
        counts = [part.numel() for part in parts]

        def native() -> list[tuple]:
            if stage.numel() > buffers.MAX_COUNT:
                return self._reduce_each(stage.split(counts), memory, datatype, op)
            send = [buffers.address(stage), stage.numel(), datatype]
            receive = [buffers.address(memory), memory.numel(), datatype]
            return [("Reduce_scatter", (send, receive, counts, op))]

        def shaped(team: algorithms.Team) -> Generator:
            chunks = list(stage.clone().split(counts))
            add = combine(stage.dtype, name)
            yield from algorithms.reduce_scatter(team, chunks, add)
            memory.view(-1).copy_(chunks[team.rank])

        def finish() -> None:
            check_ops()
            _divide(memory, name, len(self.members))
            buffers.deliver(output, memory)

        return self._collective(
            call,
            tuple(counts),
            [output],
            finish,
            stage,
            inputs=parts,
            native=native,
            shaped=shaped,
        )

    def _reduce_each(self, parts, memory, datatype, op) -> list[tuple]:
        """Reduce part r to rank r, for counts that are too large for one MPI call."""
        calls = []
        for root, part in enumerate(parts):
            targets = _blocks(memory, datatype) if root == self._rank else None
            for k, block in enumerate(_blocks(part, datatype)):
                calls.append(("Reduce", (block, targets[k] if targets else None, op, root)))
        return calls

    # -- all to all: data -----------------------------------------------------------------

    def allgather(self, outputs, inputs, opts=None) -> MPIWork:
        """The tensors of all ranks, in a list on every rank. Shapes may differ between ranks."""
        tensor = _one(inputs, "all_gather")
        parts = self._check_count(outputs[0], "all_gather")
        if parts[self._rank].numel() != tensor.numel():
            raise ValueError(
                f"all_gather: the input has shape {list(tensor.shape)}, place {self._rank} "
                f"(this rank's) of the output list {list(parts[self._rank].shape)}"
            )
        return self._all_gather("all_gather", parts, tensor, opts)

    def all_gather_single(self, output, tensor, opts=None) -> MPIWork:
        """The tensors of all ranks, one after the other in one tensor."""
        what = "all_gather_into_tensor"
        output, tensor = buffers.check(output, what), buffers.check(tensor, what)
        parts = self._equal_parts(output, tensor, what)
        return self._all_gather(what, parts, tensor, opts, whole=output)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> MPIWork:
        """:meth:`all_gather_single` of several tensors."""
        works = [
            self.all_gather_single(output, tensor, opts)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return JoinedWork(works, list(outputs))

    def allgather_coalesced(self, outputs, inputs, opts=None) -> MPIWork:
        """:meth:`allgather` of several tensors: ``outputs[rank][i]`` is rank's i-th."""
        size = len(self.members)
        if len(outputs) != size or any(len(row) != len(inputs) for row in outputs):
            raise ValueError(
                f"all_gather_coalesced: the outputs must be {size} lists (world size) of "
                f"{len(inputs)} tensors, as there are inputs"
            )
        what = "all_gather_coalesced"
        inputs = [buffers.check(tensor, what) for tensor in inputs]
        outputs = [[buffers.check(tensor, what) for tensor in row] for row in outputs]
        call = self._call(what, inputs, opts)
        call.received = len(outputs) * call.nbytes
        sends = [(rank, tensor) for rank in range(size) for tensor in inputs]
        receives = [(rank, tensor) for rank, row in enumerate(outputs) for tensor in row]
        key = tuple((dtype_name(tensor.dtype), tensor.numel()) for tensor in inputs)
        return self._exchange(call, key, sends, receives, inputs=inputs)

    def _all_gather(self, what: str, parts, tensor, opts, whole=None) -> MPIWork:
        _check_alike([tensor, *parts], what)
        outputs = list(parts) if whole is None else [whole]
        for output in outputs:
            buffers.check_writable(output, what)
        call = self._call(what, [tensor], opts)
        call.received = buffers.nbytes(*parts)
        counts = [part.numel() for part in parts]
        if whole is not None:
            stage = buffers.writable(whole, what).view(-1)
        else:
            stage = torch.empty(sum(counts), dtype=tensor.dtype, device="cpu")

        def deliver() -> None:
            if whole is not None:
                buffers.deliver(whole, stage)
                return
            for part, piece in zip(parts, stage.split(counts), strict=True):
                part.detach().copy_(piece.view(part.shape))

        if stage.numel() > buffers.MAX_COUNT:
            sends = [(rank, tensor) for rank in range(len(parts))]
            receives = list(enumerate(stage.split(counts)))
            return self._exchange(call, tuple(counts), sends, receives, deliver)
        memory = buffers.readable(tensor)
        if buffers.overlap(memory, stage):
            memory = memory.clone()

        def native() -> list[tuple]:
            carrier = buffers.CARRIERS[tensor.element_size()]
            if len(set(counts)) == 1:
                receive = [buffers.address(stage), counts[0], carrier]
                return [("Allgather", (buffers.message(memory), receive))]
            receive = [buffers.address(stage), (counts, _offsets(counts)), carrier]
            return [("Allgatherv", (buffers.message(memory), receive))]

        def shaped(team: algorithms.Team) -> Generator:
            chunks = list(stage.split(counts))
            chunks[team.rank].copy_(memory.view(-1))
            yield from algorithms.all_gather(team, chunks)

        return self._collective(
            call,
            tuple(counts),
            outputs,
            deliver,
            memory,
            inputs=[tensor],
            native=native,
            shaped=shaped,
        )

    def alltoall(self, outputs: list, inputs: list, opts=None) -> MPIWork:
        """Input r goes to rank r, output r comes from rank r."""
        outputs = self._check_count(outputs, "all_to_all")
        inputs = self._check_count(inputs, "all_to_all")
        _check_alike([*inputs, *outputs], "all_to_all")
        call = self._call("all_to_all", inputs, opts)
        call.received = buffers.nbytes(*outputs)
        return self._exchange(call, (), list(enumerate(inputs)), list(enumerate(outputs)))

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None) -> MPIWork:
        """Rows of one tensor, split between the ranks; splits are numbers of rows."""
        what = "all_to_all_single"
        output, tensor = buffers.check(output, what), buffers.check(tensor, what)
        sends = self._split(tensor, input_splits, "input")
        receives = self._split(output, output_splits, "output")
        call = self._call(what, [tensor], opts)
        call.received = buffers.nbytes(output)
        _check_alike([tensor, output], what)
        memory, stage = buffers.readable(tensor), buffers.writable(output, what)
        if buffers.overlap(memory, stage):
            stage = torch.empty_like(stage)
        return self._exchange(
            call,
            (),
            list(enumerate(memory.view(-1).split(sends))),
            list(enumerate(stage.view(-1).split(receives))),
            lambda: buffers.deliver(output, stage),
            inputs=[tensor],
        )

    def barrier(self, opts=None) -> MPIWork:
        """Over when every rank of the group has called it."""
        call = self._call("barrier", [], opts)
        return self._collective(
            call, (), [], native=lambda: [("Barrier", ())], shaped=algorithms.barrier
        )

    # The names that PyTorch used before, and that its C++ still asks for.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- the machinery --------------------------------------------------------------------

    def _call(
        self,
        op: str,
        tensors,
        opts=None,
        *,
        peer=None,
        tag=None,
        blocking=None,
        reduce_op="",
        sent=None,
    ) -> Call:
        """Check the tensors and put the call on record; ``sent`` are all of them, if not given."""
        self._check_alive(op)
        for tensor in tensors:
            buffers.check(tensor, op)
        first = tensors[0] if tensors else None
        call = Call(
            op,
            self.members,
            buffers.nbytes(*tensors),
            () if first is None else tuple(first.shape),
            "" if first is None else dtype_name(first.dtype),
            peer,
            tag,
            reduce_op,
            not getattr(opts, "asyncOp", True) if blocking is None else blocking,
            place=users_place(),
        )
        if _thread() != _MAIN_THREAD:
            call.thread = threading.current_thread().name
        call.sent = call.nbytes if sent is None else sent
        log.add(call)
        return call

    def _check_alive(self, op: str) -> None:
        if threading.current_thread() is not progress.thread:
            self.world.threads.communicates()
        self.world.check(op)
        if self._lost:
            raise CommunicationError(
                f"{op} on a process group that cannot be used any more: {self._lost}"
            )

    def _collective(
        self,
        call: Call,
        key: tuple,
        result: Sequence[torch.Tensor],
        finish: Callable[[], None] | None = None,
        keep: object = None,
        *,
        inputs: Sequence[torch.Tensor] | None = None,
        native: Callable[[], list[tuple]] | None = None,
        shaped: Callable[[algorithms.Team], Generator],
        messages_from: float = math.inf,
    ) -> CollectiveWork:
        """Come to a collective; it begins when all ranks have come.

        Args:
            key: what has to be equal on all ranks, besides what ``call`` says.
            result, finish, keep, inputs: see :class:`MPIWork`.
            native: see :class:`CollectiveWork`; without it, ``shaped`` is used always.
            shaped: the collective as messages, for the slow network.
            messages_from: bytes from which they are faster than MPI's non-blocking call, too.
        """
        slow = native is None or link.network is not None
        # Blocking calls need a board on which having come can be taken back at once.
        may_block = not slow and self.arrivals.board.refresh is None
        by_messages = slow or call.nbytes >= messages_from
        steps = (lambda: shaped(algorithms.Team(self.channels, call))) if by_messages else None
        work = CollectiveWork(
            self, call, list(result), finish, keep, inputs, native, steps, may_block
        )
        same = (call.op, call.dtype, key, call.reduce_op, call.peer, str(link.network))
        code = arrivals.signature(same)
        with guard, self.lock:
            work.come = self._come_to > 0
            self.arrivals.number += not work.come
            call.sequence = self.arrivals.number
            work.word = self._come_to or arrivals.word(call.sequence, code, direct=False)
            self._come_to, self._come_for = 0, None
            self._queue.append(work)
            if may_block and not call.blocking:
                work.not_before = call.start + self._start_after()
            else:
                if call.blocking:
                    self.hasten()
                self.pump()
        if not call.blocking:
            work.progress()
        elif may_block and self._is_simple(call, result):
            self._plan(call, result[0], code)
        return work

    def _start_after(self) -> float:
        idle = cores.one_is_idle(self.world.cores, self.world.size)
        return START_AFTER if idle else START_AFTER_WITHOUT_CORE

    def _is_simple(self, call: Call, result) -> bool:
        if (call.op, call.reduce_op) != ("all_reduce", "SUM") or len(self._plans) > 4096:
            return False
        return type(result[0]) is torch.Tensor and 0 < result[0].numel() <= buffers.MAX_COUNT

    def _plan(self, call: Call, tensor: torch.Tensor, code: int) -> None:
        """Remember what :meth:`_all_reduce_now` needs for tensors like this one."""
        datatype, op = reduction(tensor.dtype, "SUM")
        if op != MPI.SUM or tensor.layout is not torch.strided or tensor.is_complex():
            return
        notes = self.arrivals.board
        self._plans[tensor.dtype, tensor.shape] = Plan(
            arrivals.word(0, code, direct=True),
            call,
            tensor.numel(),
            call.nbytes,
            datatype,
            len(self.members),
            notes.words,
            notes.place(arrivals.STARTED),
            self.channels.data.Allreduce,
        )

    # -- who has come -----------------------------------------------------------------------

    def pump(self) -> None:
        """Begin the collectives to which all ranks have come, in the order of their calls."""
        with guard:
            if not self.lock.acquire(blocking=False):
                return  # another thread does
            try:
                self._begin_all()
            finally:
                self.lock.release()

    def _begin_all(self) -> None:
        for work in self._queue:
            if not work.come and not self._come(work):
                break
        while self._queue and self._queue[0].come:
            work = self._queue[0]
            sight = work.look()
            if sight.complete:
                sight = self.arrivals.enter(*work.arrival)
            if sight.odd:
                if not self.arrivals.refuse(*work.arrival):
                    continue
                self._queue.popleft()
                work.refuse(self._mismatch(work, sight.odd))
            elif sight.missing:
                return
            else:
                work.begin(sight.direct)
                self._queue.popleft()  # last: the short way must not overtake it

    def hasten(self) -> None:
        """This rank waits now: what it has called before can begin, by blocking calls."""
        with self.lock:
            for work in self._queue:
                if not work.come:
                    work.not_before = 0.0
                    work.word |= arrivals.DIRECT * work.may_block

    def _come(self, work: CollectiveWork) -> bool:
        if work.not_before > _now():
            return False
        if self.arrivals.may_come(work.call.sequence):
            self.arrivals.come(*work.arrival)
            work.come = True
        return work.come

    def withdraw(self, work: CollectiveWork) -> bool:
        """Take back that this rank has come; ``False`` when all the others have, too."""
        with self.lock:
            self.pump()
            if work.begun or work not in self._queue:
                return not work.begun
            if work.come and not self.arrivals.withdraw(*work.arrival):
                return False
            self._queue.remove(work)
            return True

    def called(self) -> dict[str, dict]:
        """What this rank has called that has not begun: name of the collective, what and where."""
        # Without the lock, which another thread may hold that wants to tell, too.
        calls = [work.call for work in list(self._queue)]
        if (come_for := self._come_for) is not None:
            calls.append(come_for)
        return {self._name_of(call): call.side() for call in calls}

    def _name_of(self, call: Call) -> str:
        return f"{self.key} {call.sequence}"

    def _mismatch(self, work: CollectiveWork, odd: list[int]) -> CommunicationMismatch:
        """The error for ranks that came with different calls: both sides, in rank order."""
        call = work.call
        mine = call.side()
        more = {"waitable": work, "where": call.where, "waited": time.perf_counter() - call.start}
        more["heard"] = work.is_heard()
        name, other = self._name_of(call), self.members[odd[0]]
        sides = {self.world.rank: mine, other: {}}
        more["called"] = {name: mine}
        record = self.world.stop("mismatch", "", **more)
        deadline = time.perf_counter() + OTHER_SIDE
        while not sides[other] and time.perf_counter() < deadline:
            sides[other] = self.world.statuses()[other].get("called", {}).get(name, {})
            if not sides[other]:
                time.sleep(1e-3)
        if sides[other].get("what") == mine["what"]:
            sides[other] = {}  # what did not fit was another thread's, which has left since
        text = ", but ".join(_side(rank, sides[rank]) for rank in sorted(sides))
        text += ". All ranks of a group have to make the same collective calls in the same order."
        if any(side.get("thread") for side in sides.values()):
            text += (
                " The calls of two threads have no certain order: give each thread a group of its "
                "own, by dist.new_group()."
            )
        record = self.world.stop("mismatch", text, **more)
        return CommunicationMismatch(text, call, record)

    def _exchange(
        self, call: Call, key: tuple, sends, receives, then=None, inputs=None
    ) -> CollectiveWork:
        """A collective of messages, for which MPI has no fitting call: ``(rank, tensor)`` pairs."""
        homes = {tensor.untyped_storage().data_ptr() for _, tensor in receives}
        outgoing = [(peer, _apart(tensor, homes)) for peer, tensor in sends]
        mine = [memory for peer, memory in outgoing if peer == self._rank]
        incoming = [
            (peer, tensor, buffers.writable(tensor, call.op))
            for peer, tensor in receives
            if peer != self._rank
        ]
        deliveries = [(tensor, memory) for _, tensor, memory in incoming]
        own = [tensor for peer, tensor in receives if peer == self._rank]
        deliveries += zip(own, mine, strict=True)

        def steps(team: algorithms.Team) -> Generator:
            return algorithms.exchange(
                team,
                [(peer, memory) for peer, memory in outgoing if peer != self._rank],
                [(peer, memory) for peer, _, memory in incoming],
            )

        def finish() -> None:
            for tensor, memory in deliveries:
                buffers.deliver(tensor, memory)
            if then is not None:
                then()

        results = [tensor for _, tensor in receives]
        inputs = inputs or [tensor for _, tensor in sends]
        return self._collective(call, key, results, finish, outgoing, inputs=inputs, shaped=steps)

    def _root(self, op: str, opts) -> int:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        if not 0 <= root < len(self.members):
            raise ValueError(f"{op}(root {root}): the group has ranks 0 to {len(self.members) - 1}")
        return root

    def _check_count(self, tensors, op: str) -> list[torch.Tensor]:
        if len(tensors) != len(self.members):
            raise ValueError(
                f"{op}: {len(tensors)} tensors in the list, expected one per rank: "
                f"{len(self.members)}"
            )
        return [buffers.check(tensor, op) for tensor in tensors]

    def _per_rank(self, tensors, like: torch.Tensor, op: str) -> list[tuple[int, torch.Tensor]]:
        tensors = self._check_count(tensors, op)
        for rank, tensor in enumerate(tensors):
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise ValueError(
                    f"{op}: the tensors must be alike: place {rank} of the list is "
                    f"{tensor.dtype}{list(tensor.shape)}, the single tensor "
                    f"{like.dtype}{list(like.shape)}"
                )
        return list(enumerate(tensors))

    def _equal_parts(self, whole: torch.Tensor, part: torch.Tensor, op: str) -> list[torch.Tensor]:
        """Views of ``whole``, one per rank, each with the number of elements of ``part``."""
        size = len(self.members)
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{op}: the large tensor must be {size} times the small one (world size {size}) "
                f"and of its dtype, got {whole.dtype}{list(whole.shape)} and "
                f"{part.dtype}{list(part.shape)}"
            )
        if whole.dim() and whole.shape[0] % size == 0:
            return list(whole.detach().chunk(size)) if whole.numel() else [whole.detach()] * size
        return list(whole.detach().reshape(-1).split(part.numel())) or [whole.detach()] * size

    def _split(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """Numbers of elements per rank, from numbers of rows per rank."""
        size = len(self.members)
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise ValueError(
                    f"all_to_all_single: the {what} has {rows} rows, which {size} ranks cannot "
                    f"share equally; give {what}_split_sizes"
                )
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all_single: {what}_split_sizes {list(splits)} must be {size} numbers "
                f"that add up to the {rows} rows of the {what}"
            )
        per_row = tensor.numel() // rows if rows else 0
        return [rows_of_rank * per_row for rows_of_rank in splits]


def _key_of(members: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """A group's name that is the same on all its members: they make their groups in one order."""
    return members, world.made.get(members, 0) + 1


def _side(rank: int, status: dict) -> str:
    if not status:
        return f"rank {rank} makes another call"
    where = f" at {status['where']}" if status["where"] else ""
    thread = f" on its thread {status['thread']}" if status.get("thread") else ""
    return f"rank {rank} calls {status['what']}{where}{thread}"


def _soon(mailbox: messages.Mailbox) -> bool:
    """Look for a message for a moment."""
    for look in range(_LOOKS_FOR_MESSAGE):
        if mailbox.look():
            return True
        if look > 10:
            os.sched_yield()
    return False


def _at_once(steps: Steps) -> bool:
    """Whether the steps end within a moment, on the slow network in a point of time."""
    while not steps.poll():
        due = steps.due()
        if due is None or (left := due - _now()) > _MOMENT:
            return False
        if left > 2 * LATE:
            time.sleep(left - LATE)
    if link.network is not None:
        link.ended(steps.time)
    return True


def _over(call: Call) -> DoneWork:
    """Record that a blocking call is over."""
    call.end = _now()
    call.matched = call.matched or call.end
    call.waited = True
    call.waits.append([call.start, call.end])
    return _DONE


def _apart(tensor: torch.Tensor, homes: set[int]) -> torch.Tensor:
    """Plain memory to send from, outside of the storages that are received into."""
    if tensor.untyped_storage().data_ptr() in homes:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return buffers.readable(tensor)


def _check_alike(tensors: Sequence[torch.Tensor], op: str) -> None:
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise TypeError(f"{op}: all tensors must have the same dtype, got {' and '.join(dtypes)}")


def _one(tensors: list[torch.Tensor] | torch.Tensor, op: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if len(tensors) != 1:
        raise ValueError(f"{op}: one tensor per rank, got a list of {len(tensors)}")
    return buffers.check(tensors[0], op)


def _called_by(name: str) -> bool:
    """Whether PyTorch's blocking ``name`` is among the callers (it calls ``isend``, ``irecv``)."""
    frame = sys._getframe(2)
    for _ in range(6):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code.co_name == name and frame.f_code.co_filename == _C10D:
            return True
    return False


def _blocks(memory: torch.Tensor, datatype: MPI.Datatype) -> list[list]:
    return [[buffers.address(p), p.numel(), datatype] for p in buffers.pieces(memory)]


def _divide(memory: torch.Tensor, name: str, size: int) -> None:
    if name == "AVG":
        memory.div_(size)


def _offsets(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:k]) for k in range(len(counts))]


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements one after the other; not copied where they already lie like that."""
    first = parts[0]
    consecutive = all(buffers.is_plain(p) for p in parts) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in itertools.pairwise(parts)
    )
    if consecutive:
        total = sum(part.numel() for part in parts)
        return first.detach().as_strided((total,), (1,))
    return torch.cat([buffers.readable(part).reshape(-1) for part in parts])


def _never_compiled(*classes: type) -> None:
    """Have torch.compile call these methods as they are: it cannot look into a process group.

    The strategy is for calls that come from C++, the attribute for those that it would inline.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for method in (m for c in classes for m in vars(c).values() if inspect.isfunction(m)):
        eval_frame.set_code_exec_strategy(method.__code__, skip)
        method._torchdynamo_disable = True
        method._torchdynamo_disable_msg = "the mpi backend runs as it is"


_never_compiled(ProcessGroupMPI, DoneWork, MPIWork, CollectiveWork, JoinedWork)
