"""Collectives as messages between ranks, for the slow network.

MPI libraries choose from them (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
communication operations in MPICH", 2005). Here they are generators for
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
# Up to here the number of messages decides, above it their size.
SMALL = 16 * 1024  # bytes


class Ranks:
    """The ranks of one collective, and the tag that its messages have."""

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

    # The sizes are known; on the slow network the time is not, and goes before.

    def _send(self, peer: int, memory: torch.Tensor) -> Generator:
        data = self._channels.data
        nbytes = tensors.nbytes(memory)
        self._call.moved_out = (self._call.moved_out or 0) + nbytes
        if (wire := self._channels.wire(peer)) is None:
            yield [data.Isend(tensors.message(memory), peer, self._tag)]
            if link.network is not None:
                yield [time.perf_counter()]  # what follows counts from now
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
    """Pass a token on: in round k each rank hears from the one 2**k before it."""
    token = torch.zeros(1, dtype=torch.uint8)
    distance = 1
    while distance < ranks.size:
        ahead = (ranks.rank + distance) % ranks.size
        behind = (ranks.rank - distance) % ranks.size
        yield [ranks.receive(behind, torch.empty_like(token)), ranks.send(ahead, token)]
        distance *= 2


def broadcast(ranks: Ranks, memory: torch.Tensor, root: int) -> Generator:
    """Go down a binomial tree: who has it passes it on, twice as many in each round."""
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
    """Go up a binomial tree, to the root. ``memory`` is overwritten on every rank."""
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
    """Exchange all with partners; ranks beyond a power of two hand theirs to a helper."""
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
        # The same order on both sides: floating-point sums are then the same on all ranks.
        if partner < ranks.rank:
            add(incoming, memory)
            memory.copy_(incoming)
        else:
            add(memory, incoming)
        distance *= 2
    if ranks.rank < extra:
        yield [ranks.send(ranks.rank + power, memory)]


def reduce_scatter(ranks: Ranks, chunks: list[torch.Tensor], add: Combine) -> Generator:
    """Reduce on a ring; ``chunks`` are overwritten, ``chunks[rank]`` is the result."""
    for step in range(ranks.size - 1):
        outgoing = chunks[(ranks.rank - step - 1) % ranks.size]
        mine = chunks[(ranks.rank - step - 2) % ranks.size]
        incoming = torch.empty_like(mine)
        yield [ranks.receive(ranks.before, incoming), ranks.send(ranks.after, outgoing)]
        add(mine, incoming)


def all_gather(ranks: Ranks, chunks: list[torch.Tensor]) -> Generator:
    """Pass on, on a ring, what came last. ``chunks[rank]`` is this rank's own."""
    for step in range(ranks.size - 1):
        outgoing = chunks[(ranks.rank - step) % ranks.size]
        incoming = chunks[(ranks.rank - step - 1) % ranks.size]
        yield [ranks.receive(ranks.before, incoming), ranks.send(ranks.after, outgoing)]


def exchange(
    ranks: Ranks, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
) -> Generator:
    """Begin all messages at once; ``(rank, memory)`` pairs, none with this rank itself.

    Each rank sends to the one after it first, then to the next: with the same order on all ranks,
    everybody would send to rank 0 at the same time and wait for its link.
    """

    def ahead(pair: tuple[int, torch.Tensor]) -> int:
        return (pair[0] - ranks.rank) % ranks.size

    yield [
        *(ranks.receive(*pair) for pair in sorted(receives, key=lambda pair: -ahead(pair))),
        *(ranks.send(*pair) for pair in sorted(sends, key=ahead)),
    ]
