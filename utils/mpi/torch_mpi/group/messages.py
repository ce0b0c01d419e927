"""``send`` and ``recv`` of a process group, and its communicators.

PROTOCOL.md says how envelope and elements travel. The envelope also carries what the slow network
needs. ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, PyTorch's own switch, turns on checks that take time, of
faults that run through by luck: :func:`synchronous_sends`, and :class:`Seal`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import compat
from ..errors import CommunicationError, CommunicationMismatch
from ..mpi import MPI, largest_tag
from ..network import Arrival, Wire, link
from ..protocol.progress import guard
from ..protocol.recovery import Unreceived
from ..protocol.wait_monitor import LATE
from ..record import Call
from . import tensors
from .step_runner import Steps
from .tensors import Tensors
from .work import DONE, DoneWork, MPIWork

if TYPE_CHECKING:
    from .process_group import ProcessGroupMPI

# Bytes of elements that travel in the envelope: below the size up to which MPI libraries send
# at once, whether or not the receive has been posted (4 KiB in Open MPI's shared memory).
INLINE = 2048
_HEAD = struct.Struct("<qqdHH")  # bytes of elements, number, arrival, dtype, dimensions
_MOST_DIMENSIONS = 64
_ROOM = _HEAD.size + 8 * _MOST_DIMENSIONS + INLINE

_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

# How often a blocking recv looks for its message before it hands over to a patient wait; how often
# it does so without giving up its core.
_LOOKS = 200
_BUSY_LOOKS = 10
# A message that is due within that time is waited for on the spot.
_MOMENT = 2e-3  # seconds
_profiling = torch.autograd._profiler_enabled

# Set for as long as a block of synchronous_sends lasts, or for good if all checks are on.
every_send_waits = False


@contextlib.contextmanager
def synchronous_sends() -> Iterator[None]:
    """Have every send of this rank, also a small one, wait until its receive has matched.

    As with MPI's ``Issend`` (MPI 4.1, section 3.4). MPI lets a send be over before, and libraries
    do that for small messages: a program that relies on it works until its messages grow. Messages
    inside of collectives are as ever.
    """
    global every_send_waits
    before = every_send_waits
    every_send_waits = True
    try:
        yield
    finally:
        every_send_waits = before


@dataclass
class Channels:
    """The communicators of a group.

    Attributes:
        envelopes: of the user's messages, with the user's tags.
        data: of large messages, and of collectives.
        sent: how many messages this rank has sent.
        balance: how many more it has sent than received.
        largest_tag: which a flush uses. Of the smaller ones of :attr:`data` collectives have the
            lower half. Tags come again after some thousand messages: MPI keeps the order of
            messages with the same tag.
    """

    envelopes: MPI.Intracomm
    data: MPI.Intracomm
    members: tuple[int, ...]
    rank: int
    sent: int = 0
    balance: int = 0
    largest_tag: int = field(init=False)

    def __post_init__(self):
        self.largest_tag = largest_tag(self.data)

    def tag_of_collective(self, sequence: int) -> int:
        """Return the tag of the messages that a collective is made of."""
        return sequence % (self.largest_tag // 2)

    def tag_of_message(self, number: int) -> int:
        """Return the tag of the elements of a rank's ``number``-th message."""
        half = self.largest_tag // 2
        return half + number % half

    def wire(self, peer: int) -> Wire | None:
        """Return the slow network to a rank of the group; ``None`` where there is none."""
        if link.network is None:
            return None
        return link.wire(self.members[self.rank], self.members[peer])


@functools.cache
def _shape_struct(dimensions: int) -> struct.Struct:
    return struct.Struct(f"<{dimensions}q")


def _send_steps(
    channels: Channels, call: Call, tensor: torch.Tensor, memory: torch.Tensor
) -> Generator:
    """Send ``memory``, the elements of ``tensor``, to ``call.peer``, as steps."""
    channels.sent += 1
    channels.balance += 1
    call.message = (channels.members[channels.rank], channels.sent)
    gone = arrives = 0.0
    if (wire := channels.wire(call.peer)) is not None:
        gone, arrives = wire.sends(call.nbytes, link.called(call.start))
    shape = tensor.shape
    envelope = _HEAD.pack(call.nbytes, channels.sent, arrives, _CODES[tensor.dtype], len(shape))
    envelope += _shape_struct(len(shape)).pack(*shape)
    begin = channels.envelopes.Issend if every_send_waits else channels.envelopes.Isend
    if call.nbytes <= INLINE:
        envelope += bytes(tensors.address(memory))
        yield [begin(envelope, call.peer, call.tag)]
        return
    tag = channels.tag_of_message(channels.sent)
    yield [
        begin(envelope, call.peer, call.tag),
        channels.data.Isend(tensors.message(memory), call.peer, tag),
    ]
    if gone or link.network is not None:
        yield [gone or time.perf_counter()]


def _receive_steps(
    channels: Channels, call: Call, tensor: torch.Tensor, memory: torch.Tensor
) -> Generator:
    """Receive into ``memory``, the elements of ``tensor``, as steps."""
    room = bytearray(_ROOM)
    (status,) = yield [channels.envelopes.Irecv(room, call.peer, call.tag)]
    channels.balance -= 1
    call.matched = time.perf_counter()
    call.peer = status.source
    nbytes, number, arrives, code, dimensions = _HEAD.unpack_from(room)
    call.message = (channels.members[call.peer], number)
    if nbytes != call.nbytes or _DTYPES[code] is not tensor.dtype:
        shape = _shape_struct(dimensions).unpack_from(room, _HEAD.size)
        raise _mismatch(call, channels, _DTYPES[code], shape, nbytes)
    arrival = None
    if arrives:
        wire = channels.wire(call.peer)
        # The sender may have been on a slow network that has ended here.
        arrival = Arrival(arrives, 0.0) if wire is None else wire.receives(nbytes, arrives)
    if nbytes > INLINE:
        tag = channels.tag_of_message(number)
        yield [channels.data.Irecv(tensors.message(memory), call.peer, tag)]
    elif nbytes:
        start = _HEAD.size + 8 * dimensions
        tensors.address(memory)[:] = memoryview(room)[start : start + nbytes]
    if link.network is not None or arrives:
        yield [arrival or time.perf_counter()]


def read_envelope(channels: Channels, source: int, tag: int, envelope: bytes) -> Unreceived:
    """Return what is in a message from rank ``source`` of the group."""
    nbytes, number, _, code, dimensions = _HEAD.unpack_from(envelope)
    shape = _shape_struct(dimensions).unpack_from(envelope, _HEAD.size)
    sender = channels.members[source]
    receiver = channels.members[channels.rank]
    dtype = tensors.dtype_name(_DTYPES[code])
    return Unreceived(sender, receiver, number, tag, nbytes, dtype, shape)


def _mismatch(
    call: Call, channels: Channels, dtype: torch.dtype, shape: Sequence[int], nbytes: int
) -> CommunicationMismatch:
    sender = channels.members[call.peer]
    receiver = channels.members[channels.rank]
    sent = f"{tensors.dtype_name(dtype)}{list(shape)}"
    where = f" at {call.where}" if call.where else ""
    return CommunicationMismatch(
        f"rank {sender} sent {sent} ({nbytes} bytes, tag={call.tag}), but rank {receiver} "
        f"receives {call.dtype}{list(call.shape)} ({call.nbytes} bytes){where}. Sender and "
        f"receiver must agree on dtype and number of elements.",
        call,
    )


# -- what a process group sends and receives ---------------------------------------------------


def all_checks_are_on() -> bool:
    """Return whether PyTorch was asked for all checks."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


class Seal:
    """A digest of what MPI sends from, which must not change before the wait (MPI 4.1, 3.7.2)."""

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
            steps = Steps(_send_steps(group.channels, call, tensor, memory))
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
    steps = Steps(_receive_steps(group.channels, call, tensor, memory))
    if call.blocking and not call.any_source and not _profiling():
        try:
            if _at_once(steps):
                tensors.deliver(tensor, memory)
                return _over(call)
        except CommunicationMismatch as error:
            error.record = group.world.begin_incident("mismatch", str(error), where=call.where)
            raise
    work = MPIWork(group, call, [tensor], lambda: tensors.deliver(tensor, memory), memory)
    return work.take_over(steps)


def _check_peer(group: ProcessGroupMPI, op: str, role: str, peer: int | None, tag: int) -> None:
    size = group.size()
    largest = group.channels.largest_tag
    if peer is not None and not 0 <= peer < size:
        raise ValueError(
            f"{op}({role}={peer}): the group has ranks 0 to {size - 1} (global {group.members})"
        )
    if not 0 <= tag <= largest:
        raise ValueError(
            f"{op}(tag={tag}): a tag is a number from 0 to {largest}, the largest that this MPI "
            f"library has (MPI_TAG_UB)"
        )


def _at_once(steps: Steps) -> bool:
    """Return whether the steps end within a moment; on the slow network, when they are due."""
    looks = 0
    while not steps.poll():
        due = steps.due()
        left = 0.0 if due is None else due - time.perf_counter()
        if looks > _LOOKS or left > _MOMENT:
            return False
        if left > 2 * LATE:
            time.sleep(left - LATE)
        elif due is None:
            looks += 1
            if looks > _BUSY_LOOKS:
                os.sched_yield()
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
