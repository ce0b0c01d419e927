"""``send`` and ``recv`` of a process group: non-blocking MPI operations that a work tests.

``TORCH_DISTRIBUTED_DEBUG=DETAIL``, PyTorch's own switch, turns on checks that take time, of faults
that run through by luck: :func:`torch_mpi.group.messages.synchronous_sends`, and :class:`Seal`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import compat
from ..errors import CommunicationError, CommunicationMismatch
from ..mpi import MPI
from ..network import link
from ..protocol.progress import guard
from ..protocol.wait_monitor import LATE
from ..record import Call
from . import messages, tensors
from .step_runner import Steps
from .tensors import Tensors
from .work import DONE, DoneWork, MPIWork

if TYPE_CHECKING:
    from .process_group import ProcessGroupMPI

# How often a blocking recv looks for its message before it hands over to a patient wait; how often
# it does so without giving up its core.
_LOOKS = 200
_BUSY_LOOKS = 10
# A message that is due within that time is waited for on the spot.
_MOMENT = 2e-3  # seconds
_profiling = torch.autograd._profiler_enabled


def all_checks_are_on() -> bool:
    """Return whether PyTorch was asked for all checks."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


class Seal:
    """A digest of what MPI sends from, to be compared at the wait.

    The sender must not change it before (MPI 4.1, section 3.7.2).
    """

    def __init__(self, memory: torch.Tensor):
        self._memory = memory
        self._digest = self._present_digest()

    def _present_digest(self) -> bytes:
        return hashlib.blake2b(tensors.address(self._memory), digest_size=16).digest()

    def check(self, call: Call) -> None:
        """Raise CommunicationError where it is something else now."""
        if self._present_digest() != self._digest:
            message = call.describe().replace("send", "isend", 1)
            raise CommunicationError(
                f"the tensor of {message} at {call.where} was changed before wait(), so the "
                "message may be a mixture of old and new. Call wait() first, or send a clone.",
                call,
            )


def send(group: ProcessGroupMPI, inputs: Tensors, dst: int, tag: int = 0) -> MPIWork | DoneWork:
    """Start sending one tensor to rank ``dst`` of the group."""
    start = time.perf_counter()
    tensor = tensors.single(inputs, "send")
    _check_peer(group, "send", "dst", dst, tag)
    memory = tensors.readable(tensor)
    blocking = compat.is_called_by("send")
    call = group.record("send", [tensor], peer=dst, tag=tag, blocking=blocking)
    call.start = start
    try:
        with guard:
            envelope, gone = messages.pack(group.channels, call, tensor, memory)
            steps = Steps(messages.send(group.channels, call, memory, envelope, gone))
            if call.blocking and not _profiling() and steps.poll():
                return _over(call)
            work = MPIWork(group, call, [tensor], keep=memory)
            if not call.blocking and all_checks_are_on():
                work.seal = Seal(memory)
            return work.take_over(steps)
    except MPI.Exception as error:
        raise group.error_in_words(error, call) from None


def receive(
    group: ProcessGroupMPI, outputs: Tensors, src: int | None, tag: int = 0
) -> MPIWork | DoneWork:
    """Start receiving one tensor from rank ``src`` of the group; ``None``: from any."""
    _check_peer(group, "recv", "src", src, tag)
    tensor = tensors.single(outputs, "recv")
    memory = tensors.writable(tensor, "recv")
    source = MPI.ANY_SOURCE if src is None else src
    blocking = compat.is_called_by("recv")
    call = group.record("recv", [tensor], peer=source, tag=tag, blocking=blocking, sent=0)
    call.any_source = src is None
    call.received = call.nbytes
    try:
        with guard:
            return _begin_receive(group, tensor, memory, call)
    except MPI.Exception as error:
        raise group.error_in_words(error, call) from None


def _begin_receive(
    group: ProcessGroupMPI, tensor: torch.Tensor, memory: torch.Tensor, call: Call
) -> MPIWork | DoneWork:
    pending = messages.PendingReceive(group.channels, call.peer, call.tag)
    generator = messages.receive(group.channels, call, tensor, memory, pending)
    if call.blocking and not call.any_source and not _profiling() and _soon(pending):
        steps = _opened(group, generator, call)
        if _at_once(steps):
            tensors.deliver(tensor, memory)
            return _over(call)
    else:
        steps = Steps(generator)
    work = MPIWork(group, call, [tensor], lambda: tensors.deliver(tensor, memory), memory)
    return work.take_over(steps)


def _opened(group: ProcessGroupMPI, generator: Generator, call: Call) -> Steps:
    """Begin the steps of a receive whose envelope is here."""
    try:
        return Steps(generator)
    except CommunicationMismatch as error:
        error.record = group.world.begin_incident("mismatch", str(error), where=call.where)
        raise


def _check_peer(group: ProcessGroupMPI, op: str, role: str, peer: int | None, tag: int) -> None:
    size = group.size()
    largest = group.channels.tags.largest
    if peer is not None and not 0 <= peer < size:
        raise ValueError(
            f"{op}({role}={peer}): the group has ranks 0 to {size - 1} (global {group.members})"
        )
    if not 0 <= tag <= largest:
        raise ValueError(
            f"{op}(tag={tag}): a tag is a number from 0 to {largest}, the largest that this MPI "
            f"library has (MPI_TAG_UB)"
        )


def _soon(pending: messages.PendingReceive) -> bool:
    """Look for a message for a moment; return whether it is there."""
    for look in range(_LOOKS):
        if pending.look():
            return True
        if look > _BUSY_LOOKS:
            os.sched_yield()
    return False


def _at_once(steps: Steps) -> bool:
    """Return whether the steps end within a moment; on the slow network, when they are due."""
    while not steps.poll():
        due = steps.due()
        if due is None or (left := due - time.perf_counter()) > _MOMENT:
            return False
        if left > 2 * LATE:
            time.sleep(left - LATE)
    if link.network is not None:
        link.ended(steps.time)
    return True


def _over(call: Call) -> DoneWork:
    """Record that a blocking call is over."""
    call.end = time.perf_counter()
    call.matched = call.matched or call.end
    call.waited = True
    call.waits.append([call.start, call.end])
    return DONE
