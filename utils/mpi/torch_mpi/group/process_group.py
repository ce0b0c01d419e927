"""``ProcessGroupMPI``: how a process group is made, ends, and begins anew after an incident."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import is_initialized
from torch.distributed.constants import default_pg_timeout

from .. import compat
from ..errors import CommunicationError
from ..mpi import MPI
from ..network import link
from ..protocol import rendezvous, world
from ..protocol.progress import guard, progress
from ..protocol.recovery import GroupFlush, Standing, Unreceived
from ..record import Call
from . import messages
from .collective_group import CollectiveGroup
from .collective_work import CollectiveWork, JoinedWork
from .work import DoneWork, MPIWork

TIMEOUT_VARIABLE = "MPI_BACKEND_TIMEOUT"


def create(ranks: Sequence[int]) -> ProcessGroupMPI | None:
    """Make the process group of ``ranks`` (global ranks; empty: all), ``None`` on other ranks.

    ``init_process_group("mpi")`` and ``new_group`` call this.

    Raises:
        ValueError: a rank that does not exist.
        CommunicationTimeout: a rank of the group did not come.
    """
    compat.leave_out_flight_recorder()
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
        # PyTorch has no group: what is left here was taken from it by a Ctrl-C.
        for group in here.groups:
            group.shutdown()
    here.recover_or_raise("new_group")
    messages.every_send_waits = messages.all_checks_are_on()
    return ProcessGroupMPI(members, timeout) if here.rank in members else None


class ProcessGroupMPI(CollectiveGroup):
    """A group of MPI ranks; see :class:`CollectiveGroup` for its arguments."""

    def __init__(self, members: tuple[int, ...], timeout: float):
        super().__init__(members, timeout)
        self.closed = False
        self._freed = False
        self._abandoned = False
        self._flush: GroupFlush | None = None
        try:
            with rendezvous.rendezvous(
                self.world.control, members, self.key[1], "new_group", self.timeout, self.world
            ):
                self.world.groups.free_flushed()
                self._open()
                self.world.groups.add(self)
        except MPI.Exception as error:
            raise self.error_in_words(error, Call("new_group", members)) from None
        except KeyboardInterrupt:  # nobody gets this group, so nobody will destroy it
            if self._has_channels:
                self.closed = True
                self._lost = "it was interrupted"
                self.world.groups.close(self)
            raise

    # -- life -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group on this rank. Called by ``destroy_process_group`` on every member.

        Pending receives are cancelled, everything else is waited for. A communicator on which a
        collective never ends is kept, because freeing it would bring the process down.
        """
        if self.closed:
            return
        with guard:
            self.closed = True
            self._lost = "it was destroyed"
            self.forget_fast_path()
            # On record until it is freed: after a Ctrl-C, or in an incident, recovery does that.
            self.world.groups.close(self)
        drained = not MPI.Is_finalized() and progress.finish(self)
        if drained and self._abandoned:
            self._free()
        elif drained and not self.world.stopped:
            self._begin_flush()
            self.world.groups.free_flushed()

    def _begin_flush(self) -> GroupFlush:
        """Tell every member, behind all that this rank has sent, that nothing more follows."""
        with guard:
            self._flush = self._flush or GroupFlush(
                (self.channels.envelopes, self.channels.data),
                self.members,
                self.world.refuse_if_broken,
                functools.partial(progress.all_sent, self),
            )
            return self._flush

    def free_if_flushed(self) -> None:
        """Free the communicators of a destroyed group if no message can still be on its way."""
        with guard, contextlib.suppress(CommunicationError, MPI.Exception):
            if self._flush and self._flush.is_over():
                self._free()

    def _free(self) -> None:
        with guard:
            self.world.groups.freed(self)
            # After an incident, a group that one rank had destroyed is freed on all of them; the
            # others may destroy it, too.
            if self._freed:
                return
            self._freed = True
            self._flush = None
            self.handshake.announcements.board.close()
            for communicator in (self.channels.envelopes, self.channels.data):
                communicator.Free()

    def abort(self) -> None:
        """Refuse further use. MPI has no way to cancel a collective that has begun."""
        self.forget_fast_path()
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
        """Make the process group of some ranks (of this group); ``None`` on the others.

        ``opts`` and ``device_types`` are PyTorch's; there are no options, and the device is the CPU.
        """
        members = tuple(self.members[r] for r in ranks)
        if self.world.rank not in members:
            return None
        child = ProcessGroupMPI(members, timeout.total_seconds() if timeout else self._timeout)
        child.setGroupName(group_name or f"{self._name}:split:{','.join(map(str, ranks))}")
        child.setGroupDesc(group_desc or f"{self._description}:split")
        return child

    splitGroup = split_group

    # -- what torch_mpi.protocol.interfaces.Group asks of a group, after an incident ------------

    def standing(self, settled: bool) -> Standing:
        """Return what the other members have to know to begin anew together."""
        return Standing(*self.key, self.handshake.announcements.number, not self.closed, settled)

    def renew(self, standings: Sequence[Standing]) -> None:
        """Begin anew, after an incident; all members are here, and stand as told, in order."""
        self.handshake.start_anew()
        settled = all(standing.settled for standing in standings)
        if settled:
            self.sweep()
            progress.free_leaked(self)
        if not all(standing.open for standing in standings):
            if settled:
                self._free()
            self.refuse_further_use(self._lost or "a rank has destroyed it")
        elif settled:
            last = max(standing.number for standing in standings)
            self.handshake.announcements.go_on_after(last)
        else:
            # Something will never end: MPI keeps these communicators, and the group gets others.
            self._open()

    def sweep(self) -> list[Unreceived]:
        """Throw away the messages that nobody has received; all members do so together."""
        flush = self._begin_flush()  # a rank that has destroyed the group has begun it before
        taken = flush.finish()
        self._flush = None
        self.channels.balance = 0
        return [
            messages.read_envelope(self.channels, t.source, t.tag, bytes(t.data)) for t in taken
        ]

    def free_alone(self, settled: bool, freed: bool) -> None:
        """Free a destroyed group that other members do not have.

        Args:
            settled: nothing that has begun is pending on this rank.
            freed: the others had the group and have freed it, so every member had begun the flush.
                Otherwise they have never made the group, and have sent nothing in it.
        """
        if settled:
            if freed:
                self.sweep()
            progress.free_leaked(self)
            self._free()

    def refuse_further_use(self, reason: str) -> None:
        """Refuse further use: some members do not have this group any more, or never had it."""
        self._lost = reason
        self._abandoned = True

    # -- communication ----------------------------------------------------------------------

    send = messages.send
    recv = messages.receive

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> MPIWork | DoneWork:
        """Start receiving one tensor from whichever rank sends first."""
        return messages.receive(self, tensors, None, tag)


compat.never_compile(
    CollectiveGroup, ProcessGroupMPI, DoneWork, MPIWork, CollectiveWork, JoinedWork
)
