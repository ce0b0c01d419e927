"""Point-to-point messages: an envelope that says what is inside, and the elements.

PROTOCOL.md says how the two travel. The envelope also carries what the slow network needs.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import CommunicationMismatch
from ..mpi import MPI, largest_tag
from ..network import Arrival, Wire, link
from ..protocol.recovery import Unreceived
from ..record import Call
from . import tensors
from .step_runner import now

# Bytes of elements that travel in the envelope: below the size up to which MPI libraries send
# at once, whether or not the receive has been posted (4 KiB in Open MPI's shared memory).
INLINE = 2048
_HEAD = struct.Struct("<qqdHH")  # bytes of elements, number, arrival, dtype, dimensions
_MOST_DIMENSIONS = 64
_ROOM = _HEAD.size + 8 * _MOST_DIMENSIONS + INLINE
_TIME = struct.Struct("<d")

_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

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


class Tags:
    """The tags on the communicator of a group's data: the lower half for collectives.

    All are smaller than the largest tag, which :mod:`torch_mpi.protocol.gathering` uses. Tags come
    again after some thousand messages: MPI keeps the order of messages with the same tag.

    Args:
        largest: ``MPI_TAG_UB`` of the communicator; 32,767 at least (MPI 4.1, section 9.1.2).
    """

    def __init__(self, largest: int):
        self.largest = largest
        self._half = largest // 2

    def of_collective(self, sequence: int) -> int:
        """Return the tag of the messages inside of a collective."""
        return sequence % self._half

    def of_message(self, number: int) -> int:
        """Return the tag of the elements of a rank's ``number``-th message."""
        return self._half + number % self._half


@dataclass
class Channels:
    """The communicators of a group.

    Attributes:
        envelopes: of the user's messages, with the user's tags.
        data: of large messages, and of collectives.
        members: global ranks.
        rank: this rank in the group.
        sent: how many messages this rank has sent.
        balance: how many more it has sent than received.
    """

    envelopes: MPI.Intracomm
    data: MPI.Intracomm
    members: tuple[int, ...]
    rank: int
    sent: int = 0
    balance: int = 0
    tags: Tags = field(init=False)

    def __post_init__(self):
        self.tags = Tags(largest_tag(self.data))

    def wire(self, peer: int) -> Wire | None:
        """Return the slow network to a rank of the group; ``None`` where there is none."""
        if link.network is None:
            return None
        return link.wire(self.members[self.rank], self.members[peer])


@functools.cache
def _shape_struct(dimensions: int) -> struct.Struct:
    return struct.Struct(f"<{dimensions}q")


def pack(
    channels: Channels, call: Call, tensor: torch.Tensor, memory: torch.Tensor
) -> tuple[bytes, float]:
    """Return a message's envelope, with few elements in it, and when its last byte is gone."""
    channels.sent += 1
    channels.balance += 1
    call.message = (channels.members[channels.rank], channels.sent)
    gone = arrives = 0.0
    if (wire := channels.wire(call.peer)) is not None:
        gone, arrives = wire.sends(call.nbytes, link.called(call.start))
    shape = tensor.shape
    envelope = _HEAD.pack(call.nbytes, channels.sent, arrives, _CODES[tensor.dtype], len(shape))
    envelope += _shape_struct(len(shape)).pack(*shape)
    if call.nbytes <= INLINE:
        envelope += bytes(tensors.address(memory))
    return envelope, gone


def send(
    channels: Channels, call: Call, memory: torch.Tensor, envelope: bytes, gone: float
) -> Generator:
    """Send ``memory`` to ``call.peer``, as steps; see :func:`pack`."""
    begin = channels.envelopes.Issend if every_send_waits else channels.envelopes.Isend
    if call.nbytes <= INLINE:
        yield [begin(envelope, call.peer, call.tag)]
        return
    tag = channels.tags.of_message(call.message[1])
    yield [
        begin(envelope, call.peer, call.tag),
        channels.data.Isend(tensors.message(memory), call.peer, tag),
    ]
    if gone or link.network is not None:
        yield [gone or time.perf_counter()]


class PendingReceive:
    """An envelope that is awaited from rank ``source`` of the group, or any."""

    def __init__(self, channels: Channels, source: int, tag: int):
        self.room = bytearray(_ROOM)
        self.request = channels.envelopes.Irecv(self.room, source, tag)
        self.status = MPI.Status()
        self.full = False

    def look(self) -> bool:
        """Return whether it is there."""
        self.full = self.full or self.request.Test(self.status)
        return self.full


def receive(
    channels: Channels,
    call: Call,
    tensor: torch.Tensor,
    memory: torch.Tensor,
    pending: PendingReceive,
) -> Generator:
    """Receive into ``memory``, the elements of ``tensor``, as steps.

    Raises:
        CommunicationMismatch: another size or dtype was sent.
    """
    status = pending.status
    room = pending.room
    if not pending.full:
        (status,) = yield [pending.request]
    channels.balance -= 1
    call.matched = time.perf_counter()
    call.peer = status.source
    nbytes, number, arrives, code, dimensions = _HEAD.unpack_from(room)
    call.message = (channels.members[call.peer], number)
    if nbytes != call.nbytes or _DTYPES[code] is not tensor.dtype:
        shape = _shape_struct(dimensions).unpack_from(room, _HEAD.size)
        raise _mismatch(call, channels, _DTYPES[code], shape, nbytes)
    arrival = _arrival(channels, call.peer, nbytes, arrives)
    if nbytes > INLINE:
        tag = channels.tags.of_message(number)
        yield [channels.data.Irecv(tensors.message(memory), call.peer, tag)]
    elif nbytes:
        start = _HEAD.size + 8 * dimensions
        tensors.address(memory)[:] = memoryview(room)[start : start + nbytes]
    if link.network is not None or arrives:
        yield [arrival or time.perf_counter()]


def _arrival(channels: Channels, peer: int, nbytes: int, arrives: float) -> Arrival | None:
    """Return when an envelope's message arrives; ``None`` on the machine's own network."""
    if not arrives:
        return None
    wire = channels.wire(peer)
    # The sender may have been on a slow network that has ended here.
    return Arrival(arrives, 0.0) if wire is None else wire.receives(nbytes, arrives)


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


# -- messages inside of a collective: the sizes are known, the time may not be --------------------


def ship(channels: Channels, peer: int, memory: torch.Tensor, tag: int, call: Call) -> Generator:
    """Send plain memory to a rank of the group, as steps."""
    nbytes = tensors.nbytes(memory)
    call.moved_out = (call.moved_out or 0) + nbytes
    if (wire := channels.wire(peer)) is None:
        yield [channels.data.Isend(tensors.message(memory), peer, tag)]
        if link.network is not None:
            yield [time.perf_counter()]  # what follows counts from now
        return
    gone, arrives = wire.sends(nbytes, now())
    yield [
        channels.data.Isend(_TIME.pack(arrives), peer, tag),
        channels.data.Isend(tensors.message(memory), peer, tag),
    ]
    yield [gone]


def fetch(channels: Channels, peer: int, memory: torch.Tensor, tag: int, call: Call) -> Generator:
    """Receive what :func:`ship` sent, as steps.

    Raises:
        CommunicationMismatch: another number of bytes came.
    """
    nbytes = tensors.nbytes(memory)
    call.moved_in = (call.moved_in or 0) + nbytes
    wire = channels.wire(peer)
    arrives = bytearray(_TIME.size)
    first = [] if wire is None else [channels.data.Irecv(arrives, peer, tag)]
    second = [channels.data.Irecv(tensors.message(memory), peer, tag)]
    arrival = None
    if wire is not None:
        yield first
        arrival = wire.receives(nbytes, *_TIME.unpack(arrives))
    (status,) = yield second
    arrived = status.Get_elements(MPI.BYTE)
    if arrived != nbytes:
        raise CommunicationMismatch(
            f"{call.describe()}: rank {channels.members[peer]} sent {arrived} bytes, "
            f"rank {channels.members[channels.rank]} expects {nbytes}",
            call,
        )
    if link.network is not None:
        yield [arrival or time.perf_counter()]
