"""Send and receive messages in a process group, and keep its communicators.

PROTOCOL.md says how envelope and elements travel. The envelope also has the arrival time on the
slow network. PyTorch's switch ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` turns on slow checks for mistakes
that otherwise go unnoticed by luck: :func:`synchronous_sends`, and those of :mod:`.seals`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .. import compat
from ..errors import CommunicationMismatch
from ..mpi import MPI, largest_tag
from ..network import Arrival, Wire, link
from ..protocol import words
from ..protocol.interrupts import guard
from ..protocol.recovery import Unreceived
from ..protocol.wait_monitor import LATE
from ..record import Call
from . import arguments, datatypes, tensors
from .arguments import Tensors
from .seals import sealed
from .step_runner import Steps
from .work import DONE, DoneWork, MPIWork

if TYPE_CHECKING:
    from .process_group import ProcessGroupMPI

# Up to so many bytes of elements travel in the envelope. MPI libraries send messages of this size
# at once, even without a posted receive (up to 4 KiB in Open MPI's shared memory).
INLINE = 2048
_HEAD = struct.Struct("<qqdHH")  # bytes of elements, number, arrival, dtype, dimensions
_MOST_DIMENSIONS = 64
_ROOM = _HEAD.size + 8 * _MOST_DIMENSIONS + INLINE

_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

# A blocking recv looks so often for its message before a patient wait takes over, and so often
# before it starts to yield its core.
_LOOKS = 200
_BUSY_LOOKS = 10
# A blocking recv waits on the spot for a message that is due within this time.
_MOMENT = 2e-3  # seconds
_profiling = torch.autograd._profiler_enabled

# True during a block of synchronous_sends, and always if all checks are on.
every_send_waits = False


@contextlib.contextmanager
def synchronous_sends() -> Iterator[None]:
    """Have every send of this rank, even a small one, wait until its receive has matched.

    MPI's ``Issend`` does the same (MPI 4.1, section 3.4). A usual send may end earlier, and a small
    one does. A program that relies on this works until its messages grow. Messages within
    collectives don't change.
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
        envelopes: the communicator of the user's messages, with the user's tags.
        data: the communicator of large messages, and of collectives.
        sent: how many messages this rank has sent.
        balance: how many more messages it has sent than received.
        largest_tag: the tag of a flush. In :attr:`data`, collectives use the lower half of the
            smaller tags, and messages the upper half. Tags repeat after many messages, which is
            safe because MPI keeps the order of messages with the same tag.
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
        """Return the tag for the messages of a collective."""
        return sequence % (self.largest_tag // 2)

    def tag_of_message(self, number: int) -> int:
        """Return the tag for the elements of a rank's ``number``-th message."""
        half = self.largest_tag // 2
        return half + number % half

    def wire(self, peer: int) -> Wire | None:
        """Return the slow network to a rank of the group; ``None`` if there is none."""
        if link.network is None:
            return None
        return link.wire(self.members[self.rank], self.members[peer])


@functools.cache
def _shape_struct(dimensions: int) -> struct.Struct:
    return struct.Struct(f"<{dimensions}q")


def _send_steps(
    channels: Channels, call: Call, tensor: torch.Tensor, memory: torch.Tensor
) -> Generator:
    """Yield the steps that send ``memory``, the elements of ``tensor``, to ``call.peer``."""
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
        envelope += bytes(datatypes.address(memory))
        yield [begin(envelope, call.peer, call.tag)]
        return
    tag = channels.tag_of_message(channels.sent)
    yield [
        begin(envelope, call.peer, call.tag),
        channels.data.Isend(datatypes.message(memory), call.peer, tag),
    ]
    if gone or link.network is not None:
        yield [gone or time.perf_counter()]


def _receive_steps(
    channels: Channels, call: Call, tensor: torch.Tensor, memory: torch.Tensor
) -> Generator:
    """Yield the steps that receive into ``memory``, the elements of ``tensor``."""
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
        # The sender may still have used a slow network that this rank has already left.
        arrival = Arrival(arrives, 0.0) if wire is None else wire.receives(nbytes, arrives)
    if nbytes > INLINE:
        tag = channels.tag_of_message(number)
        yield [channels.data.Irecv(datatypes.message(memory), call.peer, tag)]
    elif nbytes:
        start = _HEAD.size + 8 * dimensions
        datatypes.address(memory)[:] = memoryview(room)[start : start + nbytes]
    if link.network is not None or arrives:
        yield [arrival or time.perf_counter()]


def read_envelope(channels: Channels, source: int, tag: int, envelope: bytes) -> Unreceived:
    """Return the content of an envelope from rank ``source`` of the group."""
    nbytes, number, _, code, dimensions = _HEAD.unpack_from(envelope)
    shape = _shape_struct(dimensions).unpack_from(envelope, _HEAD.size)
    sender = channels.members[source]
    receiver = channels.members[channels.rank]
    dtype = arguments.dtype_name(_DTYPES[code])
    return Unreceived(sender, receiver, number, tag, nbytes, dtype, shape)


def _mismatch(
    call: Call, channels: Channels, dtype: torch.dtype, shape: Sequence[int], nbytes: int
) -> CommunicationMismatch:
    sender = channels.members[call.peer]
    receiver = channels.members[channels.rank]
    text = words.of_message(sender, arguments.dtype_name(dtype), shape, nbytes, receiver, call)
    return CommunicationMismatch(text, call)


# -- what a process group sends and receives ---------------------------------------------------


def send(group: ProcessGroupMPI, inputs: Tensors, dst: int, tag: int = 0) -> MPIWork | DoneWork:
    """Start sending one tensor to rank ``dst`` of the group."""
    start = time.perf_counter()
    tensor = arguments.single(inputs, "send")
    arguments.check_message(group, "send", "dst", dst, tag, group.channels.largest_tag)
    memory = tensors.readable(tensor)
    blocking = compat.is_called_by("send")
    call = group.record("send", [tensor], peer=dst, tag=tag, blocking=blocking)
    call.start = start
    seal = None if blocking else sealed(call, memory)
    try:
        with guard:
            steps = Steps(_send_steps(group.channels, call, tensor, memory))
            if call.blocking and not _profiling() and steps.poll():
                return _over(call)
            work = MPIWork(group, call, [tensor], keep=memory)
            work.seal = seal
            return work.take_over(steps)
    except MPI.Exception as error:
        raise group.error_in_words(error, call) from None


def receive(
    group: ProcessGroupMPI, outputs: Tensors, src: int | None, tag: int = 0
) -> MPIWork | DoneWork:
    """Start receiving one tensor from rank ``src`` of the group, or from any rank if ``None``."""
    arguments.check_message(group, "recv", "src", src, tag, group.channels.largest_tag)
    tensor = arguments.single(outputs, "recv")
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


def _at_once(steps: Steps) -> bool:
    """Return whether the steps end within a moment, in which they may wait for the slow network."""
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
    """Record that a blocking call is over, and return its work."""
    call.end = time.perf_counter()
    call.matched = call.matched or call.end
    call.waited = True
    call.waits.append([call.start, call.end])
    return DONE
