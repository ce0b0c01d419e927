"""A process group of ranks whose messages one process carries.

A collective does what its definition says, on tensors that all ranks can reach. Messages of up to
:data:`EAGER` bytes are sent before anybody receives them, larger ones are not, as in MPI.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work as TorchWork

from torch_mpi.errors import count_as_library
from torch_mpi.group import arguments, tensors
from torch_mpi.group.arguments import Tensors
from torch_mpi.group.operation import Operation
from torch_mpi.group.rank_group import Declaration, RankGroup
from torch_mpi.group.seals import sealed
from torch_mpi.record import Log

from .work import CollectiveWork, Message, MessageWork, Traffic, Work, complete, deliver, fits

if TYPE_CHECKING:
    from .shared_ranks import SharedRanks

# A line of this file is never shown as the student's.
count_as_library(__file__)
EAGER = 4096
# As in Open MPI and MPICH.
LARGEST_TAG = 2**31 - 1
# For so long a rank that destroys a group waits for its collectives, on its own clock.
PATIENCE = 5.0  # seconds


class Group(RankGroup):
    """A group of ranks.

    Args:
        ranks: all ranks; the caller is one of them.
        key: global ranks in the order of the group, and the number of their group.
        traffic: what they share.

    Attributes:
        me: this rank's global number.
        number: how many collectives this rank has called in the group.
    """

    def __init__(self, ranks: SharedRanks, key: tuple[tuple[int, ...], int], traffic: Traffic):
        self.ranks = ranks
        self.key = key
        self.traffic = traffic
        self.me = ranks.carrier.rank
        super().__init__(self.me, key[0])
        self.number = 0
        self._latest: Callable[[], CollectiveWork | None] = lambda: None

    def now(self) -> float:
        """Return the time on this rank's clock, in seconds."""
        return self.ranks.clocks.now(self.me)

    def place(self) -> tuple[str, int, str] | None:
        """Return file, line and function of the user's call."""
        return self.ranks.carrier.place()

    def log(self) -> Log:
        """Return where this rank's calls are recorded."""
        return self.ranks.carrier.log(self.me)

    def check_usable(self, op: str) -> None:
        """Raise CommunicationError if the group can't be used, or there is an incident."""
        super().check_usable(op)
        self.ranks.recover_or_raise(self.me, op)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: a wait ends, or a deadlock is reported at once."""

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def shutdown(self) -> None:
        """End the group on this rank, for ``destroy_process_group``.

        Collectives that have begun still end, if the other ranks come to them.
        """
        if self.lost:
            return
        self.lost = "it was destroyed"
        latest = self._latest()
        if latest is not None:  # all others end before
            if not latest.done:
                self.ranks.carrier.block(latest, self.now() + PATIENCE)
            if latest.done:
                self.ranks.clocks.reach(self.me, latest.settle())
        self.ranks.close(self)

    def child(self, members: tuple[int, ...], timeout: timedelta | None) -> Group:
        """Return a new group of some ranks of this group, to which this rank belongs."""
        return self.ranks.new_group(members)

    # -- messages -------------------------------------------------------------------------

    def send(self, inputs: Tensors, dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        tensor = arguments.single(inputs, "send")
        arguments.check_message(self, "send", "dst", dst, tag, LARGEST_TAG)
        memory = tensors.readable(tensor)
        blocking = self.ranks.carrier.is_called_by("send")
        call = self.record("send", [tensor], peer=dst, tag=tag, blocking=blocking)
        work = MessageWork(self, call, [tensor])
        work.seal = None if blocking else sealed(call, memory)
        eager = call.nbytes <= EAGER
        call.message = (self.me, self.ranks.count(self.me, "sent"))
        message = Message(memory.clone() if eager else memory, work, self._rank, dst, tag)
        to = self.members[dst]
        leaves = self.ranks.costs.leaves(self.me, to, call.nbytes, call.start)
        message.gone, message.arrives = leaves
        if eager:
            work.end(call.start)
        wanted = _taken(self.traffic.awaited, lambda wanted: fits(message, wanted))
        if wanted is None:
            self.traffic.sent.append(message)
        else:
            deliver(message, wanted)
        return work

    def recv(self, outputs: Tensors, src: int | None, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group; ``None`` accepts any rank."""
        arguments.check_message(self, "recv", "src", src, tag, LARGEST_TAG)
        tensor = arguments.single(outputs, "recv")
        arguments.check_writable(tensor, "recv")
        peer = -1 if src is None else src
        blocking = self.ranks.carrier.is_called_by("recv")
        call = self.record("recv", [tensor], peer=peer, tag=tag, blocking=blocking, sent=0)
        call.received = call.nbytes
        call.any_source = src is None
        work = MessageWork(self, call, [tensor])
        wanted = Message(tensor.detach(), work, src, self._rank, tag)
        message = _taken(self.traffic.sent, lambda message: fits(message, wanted))
        if message is None:
            self.traffic.awaited.append(wanted)
        else:
            deliver(message, wanted)
        return work

    def recv_anysource(self, outputs: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from any rank of the group."""
        return self.recv(outputs, None, tag)

    # -- collectives ----------------------------------------------------------------------

    def call(
        self, declare: Declaration, fast: str, given: Sequence[Any], options: dict[str, Any]
    ) -> Work:
        """Declare a collective with these arguments, and come to it."""
        return self.run(declare(self, *given, **options))

    def run(self, operation: Operation) -> Work:
        """Come to a collective; the rank that comes last does the work of all."""
        call = operation.call
        self.number += 1
        call.sequence = self.number
        call.waited = call.blocking
        with self.ranks.clocks.stopped(self.me):
            inputs = [tensor.detach().clone() for tensor in operation.inputs]
        work = CollectiveWork(self, operation, inputs)
        self._latest = weakref.ref(work)
        there = self.traffic.rounds.setdefault(self.number, {})
        there[self._rank] = work
        if len(there) == len(self.members):
            del self.traffic.rounds[self.number]
            complete([there[k] for k in range(len(self.members))])
        return work

    def join(self, works: Sequence[TorchWork], result: list[torch.Tensor]) -> Work:
        """Return a work that is over when all of these are."""
        *others, last = works
        last.others = others
        return last


def _taken(queue: list[Message], suits: Callable[[Message], bool]) -> Message | None:
    """Remove the first suitable message of a queue and return it; ``None`` if there is none."""
    found = next(filter(suits, queue), None)
    if found is not None:
        queue.remove(found)
    return found
