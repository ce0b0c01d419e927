"""Run collectives as messages between ranks, for the slow network.

MPI libraries choose between these algorithms (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
of collective communication operations in MPICH", 2005). Here they are generators for
:class:`~.step_runner.Steps`, on plain one-dimensional tensors.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Generator

import torch

from ..errors import CommunicationMismatch
from ..mpi import MPI
from ..network import link
from ..record import Call
from . import tensors
from .arithmetic import Combine
from .messages import Channels
from .step_runner import Steps, now

_TIME = struct.Struct("<d")
# Up to this size, the number of messages determines the time; above it, the bytes do.
SMALL = 16 * 1024  # bytes


class Ranks:
    """The ranks of one collective, with the tag of its messages."""

    def __init__(self, channels: Channels, call: Call):
        self._channels = channels
        self._call = call
        self._tag = channels.tag_of_collective(call.sequence)
        self.rank = channels.rank
        self.size = len(channels.members)
        self.after = (self.rank + 1) % self.size
        self.before = (self.rank - 1) % self.size

    def send(self, peer: int, memory: torch.Tensor) -> Steps:
        """Start sending plain memory to a rank of the group."""
        return Steps(self._send(peer, memory))

    def receive(self, peer: int, memory: torch.Tensor) -> Steps:
        """Start receiving what :meth:`send` sends."""
        return Steps(self._receive(peer, memory))

    # The receiver knows the sizes. On the slow network it needs the time, which is sent before.

    def _send(self, peer: int, memory: torch.Tensor) -> Generator:
        data = self._channels.data
        nbytes = tensors.nbytes(memory)
        self._call.moved_out = (self._call.moved_out or 0) + nbytes
        if (wire := self._channels.wire(peer)) is None:
            yield [data.Isend(tensors.message(memory), peer, self._tag)]
            if link.network is not None:
                yield [time.perf_counter()]  # the next steps count from now
            return
        gone, arrives = wire.sends(nbytes, now())
        yield [
            data.Isend(_TIME.pack(arrives), peer, self._tag),
            data.Isend(tensors.message(memory), peer, self._tag),
        ]
        yield [gone]

    def _receive(self, peer: int, memory: torch.Tensor) -> Generator:
        channels = self._channels
        nbytes = tensors.nbytes(memory)
        self._call.moved_in = (self._call.moved_in or 0) + nbytes
        wire = channels.wire(peer)
        arrives = bytearray(_TIME.size)
        first = [] if wire is None else [channels.data.Irecv(arrives, peer, self._tag)]
        second = [channels.data.Irecv(tensors.message(memory), peer, self._tag)]
        arrival = None
        if wire is not None:
            yield first
            arrival = wire.receives(nbytes, *_TIME.unpack(arrives))
        (status,) = yield second
        arrived = status.Get_elements(MPI.BYTE)
        if arrived != nbytes:
            raise CommunicationMismatch(
                f"{self._call.describe()}: rank {channels.members[peer]} sent {arrived} bytes, "
                f"rank {channels.members[channels.rank]} expects {nbytes}",
                self._call,
            )
        if link.network is not None:
            yield [arrival or time.perf_counter()]


def barrier(ranks: Ranks) -> Generator:
    """Pass tokens between the ranks: in round k, each rank hears from the rank 2**k before it."""
    token = torch.zeros(1, dtype=torch.uint8)
    distance = 1
    while distance < ranks.size:
        ahead = (ranks.rank + distance) % ranks.size
        behind = (ranks.rank - distance) % ranks.size
        yield [ranks.receive(behind, torch.empty_like(token)), ranks.send(ahead, token)]
        distance *= 2


def broadcast(ranks: Ranks, memory: torch.Tensor, root: int) -> Generator:
    """Send the data down a binomial tree, so that twice as many ranks have it after each round."""
    place = (ranks.rank - root) % ranks.size
    reach = 1
    while reach <= place:
        reach *= 2
    if place:
        yield [ranks.receive((place - reach // 2 + root) % ranks.size, memory)]
    while place + reach < ranks.size:
        yield [ranks.send((place + reach + root) % ranks.size, memory)]
        reach *= 2


def reduce(ranks: Ranks, memory: torch.Tensor, add: Combine, root: int) -> Generator:
    """Reduce up a binomial tree, to the root; this overwrites ``memory`` on every rank."""
    place = (ranks.rank - root) % ranks.size
    reach = 1
    incoming = torch.empty_like(memory)
    while reach < ranks.size:
        if place & reach:
            yield [ranks.send((place - reach + root) % ranks.size, memory)]
            return
        if place + reach < ranks.size:
            yield [ranks.receive((place + reach + root) % ranks.size, incoming)]
            add(memory, incoming)
        reach *= 2


def all_reduce(ranks: Ranks, memory: torch.Tensor, add: Combine) -> Generator:
    """Use recursive doubling for small tensors, a ring for large ones."""
    if tensors.nbytes(memory) <= SMALL or memory.numel() < ranks.size:
        yield [Steps(_recursive_doubling(ranks, memory, add))]
        return
    chunks = list(memory.tensor_split(ranks.size))
    yield [Steps(reduce_scatter(ranks, chunks, add))]
    yield [Steps(all_gather(ranks, chunks))]


def _recursive_doubling(ranks: Ranks, memory: torch.Tensor, add: Combine) -> Generator:
    """Exchange everything with partners; ranks beyond a power of two send theirs to a helper."""
    power = 1 << (ranks.size.bit_length() - 1)
    extra = ranks.size - power
    incoming = torch.empty_like(memory)
    if ranks.rank >= power:
        yield [ranks.send(ranks.rank - power, memory)]
        yield [ranks.receive(ranks.rank - power, memory)]
        return
    if ranks.rank < extra:
        yield [ranks.receive(ranks.rank + power, incoming)]
        add(memory, incoming)
    distance = 1
    while distance < power:
        partner = ranks.rank ^ distance
        yield [ranks.receive(partner, incoming), ranks.send(partner, memory.clone())]
        # Both sides add in the same order, so that all ranks get the same floating-point sum.
        if partner < ranks.rank:
            add(incoming, memory)
            memory.copy_(incoming)
        else:
            add(memory, incoming)
        distance *= 2
    if ranks.rank < extra:
        yield [ranks.send(ranks.rank + power, memory)]


def reduce_scatter(ranks: Ranks, chunks: list[torch.Tensor], add: Combine) -> Generator:
    """Reduce on a ring, which overwrites ``chunks``; the result is in ``chunks[rank]``."""
    for step in range(ranks.size - 1):
        outgoing = chunks[(ranks.rank - step - 1) % ranks.size]
        mine = chunks[(ranks.rank - step - 2) % ranks.size]
        incoming = torch.empty_like(mine)
        yield [ranks.receive(ranks.before, incoming), ranks.send(ranks.after, outgoing)]
        add(mine, incoming)


def all_gather(ranks: Ranks, chunks: list[torch.Tensor]) -> Generator:
    """Pass the latest chunk to the next rank of a ring, beginning with ``chunks[rank]``."""
    for step in range(ranks.size - 1):
        outgoing = chunks[(ranks.rank - step) % ranks.size]
        incoming = chunks[(ranks.rank - step - 1) % ranks.size]
        yield [ranks.receive(ranks.before, incoming), ranks.send(ranks.after, outgoing)]


def exchange(
    ranks: Ranks, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
) -> Generator:
    """Begin all messages at once; they are ``(rank, memory)`` pairs without this rank itself.

    Each rank sends first to the rank after it, then to the next one, and so on. If all ranks sent
    in the same order, all of them would wait for rank 0's link first.
    """

    def ahead(pair: tuple[int, torch.Tensor]) -> int:
        return (pair[0] - ranks.rank) % ranks.size

    yield [
        *(ranks.receive(*pair) for pair in sorted(receives, key=lambda pair: -ahead(pair))),
        *(ranks.send(*pair) for pair in sorted(sends, key=ahead)),
    ]
