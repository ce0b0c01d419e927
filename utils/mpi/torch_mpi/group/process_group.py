"""``ProcessGroupMPI``: make, use and destroy a process group, and renew it after an incident."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import is_initialized
from torch.distributed.constants import default_pg_timeout

from .. import compat, settings
from ..errors import CommunicationError, CommunicationMismatch, users_line
from ..mpi import MPI, is_death
from ..network import link
from ..protocol import board, rendezvous, world
from ..protocol.handshake import WORDS, Handshake
from ..protocol.interfaces import Waitable
from ..protocol.interrupts import guard
from ..protocol.progress import progress
from ..protocol.recovery import Flush, Standing, Unreceived
from ..protocol.status import Side
from ..record import Call
from . import messages
from .collective_work import CollectiveWork, JoinedWork, enqueue
from .fast_path import FastPath
from .messages import Channels
from .operation import Operation
from .rank_group import Declaration, RankGroup
from .seals import all_checks_are_on
from .work import DONE, DoneWork, MPIWork

TIMEOUT_VARIABLE = "MPI_BACKEND_TIMEOUT"
_MAIN_THREAD = threading.main_thread().ident


def create(ranks: Sequence[int]) -> ProcessGroupMPI | None:
    """Make the process group of ``ranks`` (global ranks; empty: all); ``None`` on other ranks.

    ``init_process_group("mpi")`` and ``new_group`` call this function.

    Raises:
        ValueError: ``ranks`` has a rank that doesn't exist.
        CommunicationTimeout: a rank of the group did not come.
    """
    compat.adapt_pytorch()
    timeout = compat.timeout_of_the_caller()
    if timeout is None:
        timeout = float(os.environ.get(TIMEOUT_VARIABLE, default_pg_timeout.total_seconds()))
    here = world.enter(timeout)
    link.shared_clock = here.one_machine
    members = tuple(ranks) if ranks else tuple(range(here.size))
    bad = [r for r in members if not 0 <= r < here.size]
    if bad:
        raise ValueError(f"ranks {bad} do not exist: the world has ranks 0 to {here.size - 1}")
    if not is_initialized():
        # PyTorch has no group, so a Ctrl-C has taken these groups from it.
        for group in here.groups:
            group.shutdown()
    here.recover_or_raise("new_group")
    messages.every_send_waits = all_checks_are_on()
    return ProcessGroupMPI(members, timeout) if here.rank in members else None


class ProcessGroupMPI(RankGroup):
    """A group of MPI ranks.

    Args:
        members: global ranks, in the order of the group.
        timeout: the longest wait, in seconds.
    """

    def __init__(self, members: tuple[int, ...], timeout: float):
        here = world.current()
        assert here is not None, "create() has entered the world"
        super().__init__(here.rank, members)
        self.world: world.World = here
        self.key = members, here.groups.made.get(members, 0) + 1
        self._timeout = timeout
        self.channels: Channels | None = None
        self.closed = False
        self._freed = False
        self._abandoned = False
        self._flushes: list[Flush] = []
        try:
            with rendezvous.rendezvous(
                self.world.control, members, self.key[1], "new_group", self.timeout, self.world
            ):
                self.world.groups.free_flushed()
                self._open()
                self.world.groups.add(self)
        except MPI.Exception as error:
            raise self.error_in_words(error, Call("new_group", members)) from None
        except KeyboardInterrupt:  # the user never gets this group, and so can't destroy it
            if self.channels is not None:
                self.closed = True
                self.lost = "it was interrupted"
                self.world.groups.close(self)
            raise

    @property
    def balance(self) -> int:
        """Return how many more messages this rank has sent in this group than received."""
        return self.channels.balance

    def _open(self) -> None:
        """Make the communicators and the board; all members are here."""
        # The messages of a collective and the user's have different communicators.
        envelopes, data = rendezvous.two_communicators(self.world, self.members)
        self.channels = Channels(envelopes, data, self.members, self._rank)
        another = functools.partial(rendezvous.one_communicator, self.world, self.members)
        notes = board.make(data, another, self.world.one_machine, WORDS)
        self.handshake = Handshake(notes)
        self._fast_path = FastPath(self.handshake, data)

    @property
    def late_works(self) -> type[MPIWork] | None:  # type: ignore[override]
        """Return the class of works whose futures the progress thread completes."""
        return MPIWork if progress.available else None

    @property
    def timeout(self) -> float:
        """Return the longest wait in seconds; a tool may have set another limit."""
        return self._timeout if settings.time_limit is None else settings.time_limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait from now on."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.handshake.announcements.number

    def child(self, members: tuple[int, ...], timeout: timedelta | None) -> ProcessGroupMPI:
        """Return a new group of some ranks of this group, to which this rank belongs."""
        return ProcessGroupMPI(members, timeout.total_seconds() if timeout else self._timeout)

    # -- collectives --------------------------------------------------------------------------

    def call(
        self, declare: Declaration, fast: str, given: Sequence[Any], options: dict[str, Any]
    ) -> CollectiveWork | DoneWork:
        """Call a collective on the fast path, if it has one and it fits."""
        known = self._fast_path.find(fast, given, options) if fast else None
        if known is None:
            return self.run(declare(self, *given, **options))
        # A Ctrl-C must not come between the lock and its release. The interpreter looks for signals
        # after a call, so none comes between this line and the `try`.
        guard.on += 1
        try:
            # Another thread must not call a collective before this one is in the queue.
            if not self.handshake.lock.acquire(False):
                return self.run(declare(self, *given, **options))
            try:
                if self._fast_path.begin(known):
                    return DONE
                return self.run(declare(self, *given, **options))
            except MPI.Exception as error:
                raise self.error_in_words(error, known.call) from None
            finally:
                try:
                    self.handshake.end_fast_path()
                finally:
                    self.handshake.lock.release()
        finally:
            guard.on -= 1
            if guard.late:
                guard.release()

    def run(self, operation: Operation) -> CollectiveWork:
        """Call a collective; it begins when all ranks have announced it."""
        work = enqueue(self, operation)
        if work.call.blocking and work.may_block:
            self._fast_path.remember(operation, work.entry.code)
        return work

    def join(self, works: Sequence[MPIWork], result: list[torch.Tensor]) -> JoinedWork:
        """Return a work that is over when all of these are."""
        return JoinedWork(list(works), result)

    # -- calls on record ------------------------------------------------------------------------

    def thread_name(self) -> str:
        """Return the name of the calling thread; "" for the main thread."""
        is_main = threading.get_ident() == _MAIN_THREAD
        return "" if is_main else threading.current_thread().name

    def check_usable(self, op: str) -> None:
        """Raise CommunicationError if the group can't be used, or there is an incident."""
        if threading.current_thread() is not progress.thread:
            self.world.threads.communicates()
        super().check_usable(op)
        self.world.recover_or_raise(op)
        super().check_usable(op)  # some ranks may lack the group now

    def called(self) -> dict[str, Side]:
        """Return the calls of this rank that have not begun, by the collective's name."""
        return {self.name_of(call): call.side() for call in self.handshake.called().values()}

    def name_of(self, call: Call) -> str:
        """Return the name of a collective, which is the same on all ranks."""
        return f"{self.key} {call.sequence}"

    def forget_fast_path(self) -> None:
        """Have the next call take the long way, which checks everything."""
        self._fast_path.known.clear()

    def error_in_words(
        self, error: MPI.Exception, call: Call, waitable: Waitable | None = None
    ) -> CommunicationError:
        """Return the error for the user after an error of MPI; a death makes the group useless."""
        if is_death(error):
            # No other rank may go on waiting for the dead rank inside an MPI call.
            self.world.base.Revoke()
            if self.channels is not None:
                self.channels.envelopes.Revoke()
                self.channels.data.Revoke()
            waited = time.perf_counter() - call.start
            return self.world.stopped_by_another(call, waitable, waited)
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return CommunicationMismatch(
                f"{call.describe()} at {users_line()}: the message that arrived is larger than the "
                f"tensor to receive it. Sender and receiver must agree on shape and dtype.",
                call,
            )
        return CommunicationError(f"{call.describe()} at {users_line()} failed: {error}", call)

    # -- life -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group on this rank, for ``destroy_process_group``; keep what never ends."""
        if self.closed:
            return
        with guard:
            self.closed = True
            self.lost = "it was destroyed"
            self.forget_fast_path()
            # The world knows the group until it is freed, if need be by recovery after a Ctrl-C.
            self.world.groups.close(self)
        drained = not MPI.Is_finalized() and progress.finish(self)
        if drained and self._abandoned:
            self._free()
        elif drained and not self.world.stopped:
            self._begin_flush()
            self.world.groups.free_flushed()

    def _begin_flush(self) -> list[Flush]:
        """Send every member a last message, after which no more messages of this rank follow."""
        with guard:
            check = self.world.refuse_if_broken
            all_sent = functools.partial(progress.all_sent, self)
            self._flushes = self._flushes or [
                Flush(self.channels.envelopes, self.members, check),
                Flush(self.channels.data, self.members, check, all_sent),
            ]
            return self._flushes

    def free_if_flushed(self) -> None:
        """Free the communicators of a destroyed group if no message can still be on its way."""
        with guard, contextlib.suppress(CommunicationError, MPI.Exception):
            # MPI may need several calls to find a message that has already arrived.
            looks = (all([flush.poll() for flush in self._flushes]) for _ in range(10))
            if self._flushes and any(looks):
                self._free()

    def _free(self) -> None:
        with guard:
            self.world.groups.freed(self)
            # After an incident, a group that one rank had destroyed is freed on all ranks. The
            # other ranks may destroy it later, too.
            if self._freed:
                return
            self._freed = True
            self._flushes = []
            self.handshake.announcements.board.close()
            for communicator in (self.channels.envelopes, self.channels.data):
                communicator.Free()

    def abort(self) -> None:
        """Refuse further use, because MPI can't cancel a collective that has begun."""
        self.forget_fast_path()
        self.lost = "it was aborted"

    # -- after an incident: see torch_mpi.protocol.interfaces.Group -----------------------------

    def standing(self, settled: bool) -> Standing:
        """Return how far this rank is in the group, so that all members can begin anew."""
        return Standing(*self.key, self.handshake.announcements.number, not self.closed, settled)

    def renew(self, standings: Sequence[Standing]) -> None:
        """Begin anew after an incident; all members are here, with these standings in order."""
        self.handshake.start_anew()
        settled = all(standing.settled for standing in standings)
        if settled:
            self.sweep()
            progress.free_leaked(self)
        if not all(standing.open for standing in standings):
            if settled:
                self._free()
            self.refuse_further_use(self.lost or "a rank has destroyed it")
        elif settled:
            last = max(standing.number for standing in standings)
            self.handshake.announcements.go_on_after(last)
        else:
            # Something never ends, so MPI keeps these communicators, and the group gets new ones.
            self._open()

    def sweep(self) -> list[Unreceived]:
        """Discard the messages that no rank has received; all members do so together."""
        # A rank that has destroyed the group has begun its flushes before.
        flushes = self._begin_flush()
        for flush in flushes:
            flush.finish()
        self._flushes = []
        self.channels.balance = 0
        return [
            messages.read_envelope(self.channels, t.source, t.tag, bytes(t.data))
            for t in flushes[0].taken
        ]

    def free_alone(self, settled: bool, freed: bool) -> None:
        """Free a destroyed group that other members do not have.

        Args:
            settled: whether nothing that has begun is pending on this rank.
            freed: whether the others have freed the group, so that every member had begun a flush.
                Otherwise they have never made the group, and have sent nothing in it.
        """
        if settled:
            if freed:
                self.sweep()
            progress.free_leaked(self)
            self._free()

    def refuse_further_use(self, reason: str) -> None:
        """Refuse further use, because some members have no such group."""
        self.lost = reason
        self._abandoned = True

    # -- communication ----------------------------------------------------------------------

    send = messages.send
    recv = messages.receive

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> MPIWork | DoneWork:
        """Start receiving one tensor from any rank."""
        return messages.receive(self, tensors, None, tag)


compat.never_compile(RankGroup, ProcessGroupMPI, DoneWork, MPIWork, CollectiveWork, JoinedWork)
