"""``send`` and ``recv`` of a process group: non-blocking MPI operations that a work tests."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from .. import compat
from ..errors import CommunicationMismatch
from ..mpi import MPI
from ..network import link
from ..protocol.interrupts import guard
from ..protocol.wait_monitor import LATE
from ..record import Call
from . import buffers, messages, strict
from .calls import in_words
from .done import DONE, DoneWork
from .steps import Steps
from .tensors import one
from .work import MPIWork

if TYPE_CHECKING:
    from .process_group import ProcessGroupMPI

# How often a blocking recv looks for its message before it hands over to a patient wait; how often
# it does so without giving up its core.
_LOOKS, _BUSY_LOOKS = 200, 10
# A message that is due within that time is waited for on the spot.
_MOMENT = 2e-3  # seconds
_profiling = torch.autograd._profiler_enabled


def send(
    group: ProcessGroupMPI, tensors: list[torch.Tensor], dst: int, tag: int
) -> MPIWork | DoneWork:
    """Start sending one tensor to rank ``dst`` of the group."""
    start = time.perf_counter()
    tensor = one(tensors, "send")
    _check_peer(group, "send", "dst", dst, tag)
    memory = buffers.readable(tensor)
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
            if not call.blocking and strict.is_on():
                work.seal = strict.Seal(memory)
            return work.take_over(steps)
    except MPI.Exception as error:
        raise in_words(error, call, group) from None


def receive(
    group: ProcessGroupMPI, tensors: list[torch.Tensor], src: int | None, tag: int
) -> MPIWork | DoneWork:
    """Start receiving one tensor from rank ``src`` of the group; ``None``: from any."""
    _check_peer(group, "recv", "src", src, tag)
    tensor = one(tensors, "recv")
    memory = buffers.writable(tensor, "recv")
    source = MPI.ANY_SOURCE if src is None else src
    blocking = compat.is_called_by("recv")
    call = group.record("recv", [tensor], peer=source, tag=tag, blocking=blocking, sent=0)
    call.any_source, call.received = src is None, call.nbytes
    try:
        with guard:
            return _begin_receive(group, tensor, memory, call)
    except MPI.Exception as error:
        raise in_words(error, call, group) from None


def _begin_receive(
    group: ProcessGroupMPI, tensor: torch.Tensor, memory: torch.Tensor, call: Call
) -> MPIWork | DoneWork:
    pending = messages.PendingReceive(group.channels, call.peer, call.tag)
    generator = messages.receive(group.channels, call, tensor, memory, pending)
    if call.blocking and not call.any_source and not _profiling() and _soon(pending):
        steps = _opened(group, generator, call)
        if _at_once(steps):
            buffers.deliver(tensor, memory)
            return _over(call)
    else:
        steps = Steps(generator)
    work = MPIWork(group, call, [tensor], lambda: buffers.deliver(tensor, memory), memory)
    return work.take_over(steps)


def _opened(group: ProcessGroupMPI, generator: Generator, call: Call) -> Steps:
    """Begin the steps of a receive whose envelope is here."""
    try:
        return Steps(generator)
    except CommunicationMismatch as error:
        error.record = group.world.begin_incident("mismatch", str(error), where=call.where)
        raise


def _check_peer(group: ProcessGroupMPI, op: str, role: str, peer: int | None, tag: int) -> None:
    size, largest = group.size(), group.channels.tags.largest
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
    """Look for a message for a moment."""
    for look in range(_LOOKS):
        if pending.look():
            return True
        if look > _BUSY_LOOKS:
            os.sched_yield()
    return False


def _at_once(steps: Steps) -> bool:
    """Whether the steps end within a moment, on the slow network in a point of time."""
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
