"""Point-to-point messages: an envelope that says what is inside, and the elements.

The envelope lets a receive notice a sender that means something else, and carries what the slow
network needs. A small message travels in its envelope. A large one follows it on a communicator
of its own, under a tag of its own, so that it cannot meet another receive.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from . import buffers
from .dtypes import dtype_name
from .errors import CommunicationMismatch
from .network import link
from .record import Call
from .steps import now

# Bytes of elements that travel in the envelope: below the size up to which MPI libraries send
# at once, whether or not the receive has been posted (4 KiB in Open MPI's shared memory).
INLINE = 2048
_HEAD = struct.Struct("<qqdHH")  # bytes of elements, number, arrival, dtype, dimensions
_MOST_DIMENSIONS = 64
_ROOM = _HEAD.size + 8 * _MOST_DIMENSIONS + INLINE
_TIME = struct.Struct("<d")

_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# Above the numbers of collectives, which are tags on the same communicator.
_FIRST_TAG, _TAGS = 2**20, 2**24


@dataclass
class Channels:
    """The communicators of a group.

    Attributes:
        envelopes: of the user's messages, with the user's tags.
        data: of large messages, and of collectives.
        members: global ranks.
        rank: this rank in the group.
        sent: how many messages this rank has sent.
    """

    envelopes: MPI.Intracomm
    data: MPI.Intracomm
    members: tuple[int, ...]
    rank: int
    sent: int = field(default=0)


@functools.cache
def _shape_struct(dimensions: int) -> struct.Struct:
    return struct.Struct(f"<{dimensions}q")


def pack(channels: Channels, call: Call, tensor: torch.Tensor, memory: torch.Tensor):
    """The envelope of a message, with the elements if they are few; when its last byte is gone."""
    channels.sent += 1
    call.message = (channels.members[channels.rank], channels.sent)
    gone = arrives = 0.0
    if link.network is not None:
        gone, arrives = link.sends(call.nbytes, link.called(call.start))
    shape = tensor.shape
    envelope = _HEAD.pack(call.nbytes, channels.sent, arrives, _CODES[tensor.dtype], len(shape))
    envelope += _shape_struct(len(shape)).pack(*shape)
    if call.nbytes <= INLINE:
        envelope += bytes(buffers.address(memory))
    return envelope, gone


def send(channels: Channels, call: Call, memory: torch.Tensor, envelope: bytes, gone: float):
    """Steps that send ``memory`` to ``call.peer``; see :func:`pack`."""
    if call.nbytes <= INLINE:
        yield [channels.envelopes.Isend(envelope, call.peer, call.tag)]
        return
    tag = _FIRST_TAG + call.message[1] % _TAGS
    yield [
        channels.envelopes.Isend(envelope, call.peer, call.tag),
        channels.data.Isend(buffers.message(memory), call.peer, tag),
    ]
    if gone:
        yield [gone]


class Mailbox:
    """An envelope that is awaited from rank ``source`` of the group, or any."""

    def __init__(self, channels: Channels, source: int, tag: int):
        self.room = bytearray(_ROOM)
        self.request = channels.envelopes.Irecv(self.room, source, tag)
        self.status = MPI.Status()
        self.full = False

    def look(self) -> bool:
        """Whether it is there."""
        self.full = self.full or self.request.Test(self.status)
        return self.full


def receive(
    channels: Channels, call: Call, tensor: torch.Tensor, memory: torch.Tensor, mailbox: Mailbox
) -> Generator:
    """Steps that receive into ``memory``, the elements of ``tensor``.

    Raises:
        CommunicationMismatch: another size or dtype was sent.
    """
    status, room = mailbox.status, mailbox.room
    if not mailbox.full:
        (status,) = yield [mailbox.request]
    call.matched = time.perf_counter()
    call.peer = status.source
    nbytes, number, arrives, code, dimensions = _HEAD.unpack_from(room)
    call.message = (channels.members[call.peer], number)
    if nbytes != call.nbytes or _DTYPES[code] is not tensor.dtype:
        shape = _shape_struct(dimensions).unpack_from(room, _HEAD.size)
        raise _mismatch(call, channels, _DTYPES[code], shape, nbytes)
    if nbytes > INLINE:
        tag = _FIRST_TAG + number % _TAGS
        yield [channels.data.Irecv(buffers.message(memory), call.peer, tag)]
    elif nbytes:
        start = _HEAD.size + 8 * dimensions
        buffers.address(memory)[:] = memoryview(room)[start : start + nbytes]
    if arrives:
        yield [link.receives(nbytes, arrives)]


def _mismatch(call: Call, channels: Channels, dtype, shape, nbytes: int) -> CommunicationMismatch:
    sender, receiver = channels.members[call.peer], channels.members[channels.rank]
    sent = f"{dtype_name(dtype)}{list(shape)}"
    return CommunicationMismatch(
        f"rank {sender} sent {sent} ({nbytes} bytes, tag={call.tag}), but rank {receiver} "
        f"receives {call.dtype}{list(call.shape)} ({call.nbytes} bytes). Sender and receiver "
        f"must agree on dtype and number of elements.",
        call,
    )


# -- messages inside of a collective: the sizes are known, the time may not be --------------------


def ship(channels: Channels, peer: int, memory: torch.Tensor, tag: int, call: Call) -> Generator:
    """Steps that send plain memory to a rank of the group."""
    nbytes = buffers.nbytes(memory)
    call.sent = (call.sent or 0) + nbytes
    if link.network is None:
        yield [channels.data.Isend(buffers.message(memory), peer, tag)]
        return
    gone, arrives = link.sends(nbytes, now())
    yield [
        channels.data.Isend(_TIME.pack(arrives), peer, tag),
        channels.data.Isend(buffers.message(memory), peer, tag),
    ]
    yield [gone]


def fetch(channels: Channels, peer: int, memory: torch.Tensor, tag: int, call: Call) -> Generator:
    """Steps that receive what :func:`ship` sent.

    Raises:
        CommunicationMismatch: another number of bytes came.
    """
    nbytes = buffers.nbytes(memory)
    call.received = (call.received or 0) + nbytes
    arrives = bytearray(_TIME.size)
    receives = []
    if link.network is not None:
        receives.append(channels.data.Irecv(arrives, peer, tag))
    receives.append(channels.data.Irecv(buffers.message(memory), peer, tag))
    statuses = yield receives
    arrived = statuses[-1].Get_elements(MPI.BYTE)
    if arrived != nbytes:
        raise CommunicationMismatch(
            f"{call.describe()}: rank {channels.members[peer]} sent {arrived} bytes, "
            f"rank {channels.members[channels.rank]} expects {nbytes}",
            call,
        )
    if len(statuses) > 1:
        yield [link.receives(nbytes, *_TIME.unpack(arrives))]
