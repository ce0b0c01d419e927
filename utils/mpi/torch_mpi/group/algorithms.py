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
from ..network import Wire, link
from ..protocol import words
from ..record import Call
from . import datatypes, tensors
from .arithmetic import Combine
from .messages import Channels
from .step_runner import Incoming, Steps, now

_TIME = struct.Struct("<d")
#: The slow network from a rank, the receive of a time, and the room for it.
_Told = tuple[Wire, MPI.Request, bytearray]
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
        """Start receiving what :meth:`send` sends, if the key has made sure of its size."""
        return Steps(self._receive(peer, memory))

    def receive_unsure(self, peer: int, memory: torch.Tensor) -> Steps:
        """Start receiving a message that may have another size than ``memory``.

        Raises:
            CommunicationMismatch: it has; raised by the steps, after they have received it.
        """
        return Steps(self._receive_unsure(peer, memory))

    # On the slow network, the receiver needs the time of a message, which is sent before it.

    def _send(self, peer: int, memory: torch.Tensor) -> Generator:
        data = self._channels.data
        nbytes = tensors.nbytes(memory)
        self._call.moved_out = (self._call.moved_out or 0) + nbytes
        if (wire := self._channels.wire(peer)) is None:
            yield [data.Isend(datatypes.message(memory), peer, self._tag)]
            if link.network is not None:
                yield [time.perf_counter()]  # the next steps count from now
            return
        gone, arrives = wire.sends(nbytes, now())
        yield [
            data.Isend(_TIME.pack(arrives), peer, self._tag),
            data.Isend(datatypes.message(memory), peer, self._tag),
        ]
        yield [gone]

    def _receive(self, peer: int, memory: torch.Tensor) -> Generator:
        # Both receives begin now, because a rank may send several messages with this tag.
        told = self._time_to_come(peer)
        data = self._channels.data.Irecv(datatypes.message(memory), peer, self._tag)
        arrival = yield from self._arrival(tensors.nbytes(memory), told)
        yield [data]
        if link.network is not None:
            yield [arrival or time.perf_counter()]

    def _receive_unsure(self, peer: int, memory: torch.Tensor) -> Generator:
        expected = tensors.nbytes(memory)
        arrival = yield from self._arrival(expected, self._time_to_come(peer))
        incoming = Incoming(self._channels.data, peer, self._tag)
        yield [incoming]
        if incoming.nbytes != expected:
            rest = torch.empty(incoming.nbytes, dtype=torch.uint8)
            yield [incoming.message.Irecv(datatypes.message(rest))]
            members = self._channels.members
            text = words.of_part(
                self._call, members[peer], incoming.nbytes, members[self.rank], expected
            )
            raise CommunicationMismatch(text, self._call)
        yield [incoming.message.Irecv(datatypes.message(memory))]
        if link.network is not None:
            yield [arrival or time.perf_counter()]

    def _time_to_come(self, peer: int) -> _Told | None:
        """Start receiving when a message arrives, on the slow network; else return None."""
        if (wire := self._channels.wire(peer)) is None:
            return None
        room = bytearray(_TIME.size)
        return wire, self._channels.data.Irecv(room, peer, self._tag), room

    def _arrival(self, nbytes: int, told: _Told | None) -> Generator:
        """Yield the steps that tell when a message arrives; return that time, or None."""
        self._call.moved_in = (self._call.moved_in or 0) + nbytes
        if told is None:
            return None
        wire, request, room = told
        yield [request]
        return wire.receives(nbytes, *_TIME.unpack(room))


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
    """Use the fewest rounds, ⌈log₂ p⌉, for small tensors, and a ring for large ones."""
    if tensors.nbytes(memory) > SMALL and memory.numel() >= ranks.size:
        chunks = list(memory.tensor_split(ranks.size))
        yield [Steps(reduce_scatter(ranks, chunks, add))]
        yield [Steps(all_gather(ranks, chunks))]
    elif ranks.size & (ranks.size - 1):
        yield [Steps(_gather_and_add(ranks, memory, add))]
    else:
        yield [Steps(_recursive_doubling(ranks, memory, add))]


def _recursive_doubling(ranks: Ranks, memory: torch.Tensor, add: Combine) -> Generator:
    """Exchange everything with partners, for a power of two of ranks."""
    incoming = torch.empty_like(memory)
    distance = 1
    while distance < ranks.size:
        partner = ranks.rank ^ distance
        yield [ranks.receive(partner, incoming), ranks.send(partner, memory.clone())]
        # Both sides add in the same order, so that all ranks get the same floating-point sum.
        if partner < ranks.rank:
            add(incoming, memory)
            memory.copy_(incoming)
        else:
            add(memory, incoming)
        distance *= 2


def _gather_and_add(ranks: Ranks, memory: torch.Tensor, add: Combine) -> Generator:
    """Gather the tensors of all ranks on every rank, which then adds them in the ranks' order.

    This is J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
    message-passing systems" (IEEE TPDS 1997): in each round, a rank passes on all that it has. It
    takes ⌈log₂ p⌉ rounds for every p, and p - 1 tensors leave each rank.
    """
    # Row k is of the rank k places after this one.
    rows = memory.new_empty((ranks.size, memory.numel()))
    rows[0] = memory
    have = 1
    while have < ranks.size:
        more = min(have, ranks.size - have)
        ahead, behind = (ranks.rank + have) % ranks.size, (ranks.rank - have) % ranks.size
        yield [
            ranks.receive(ahead, rows[have : have + more].view(-1)),
            ranks.send(behind, rows[:more].view(-1)),
        ]
        have += more
    memory.copy_(rows[-ranks.rank % ranks.size])
    for rank in range(1, ranks.size):
        add(memory, rows[(rank - ranks.rank) % ranks.size])


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
    ranks: Ranks,
    sends: list[tuple[int, torch.Tensor]],
    receives: list[tuple[int, torch.Tensor]],
    sizes_agree: bool,
) -> Generator:
    """Begin all messages at once; they are ``(rank, memory)`` pairs without this rank itself.

    If sizes may not agree, each rank sends at most one message to another rank.

    Each rank sends first to the rank after it, then to the next one, and so on. If all ranks sent
    in the same order, all of them would wait for rank 0's link first.
    """

    def ahead(pair: tuple[int, torch.Tensor]) -> int:
        return (pair[0] - ranks.rank) % ranks.size

    receive = ranks.receive if sizes_agree else ranks.receive_unsure
    yield [
        *(receive(*pair) for pair in sorted(receives, key=lambda pair: -ahead(pair))),
        *(ranks.send(*pair) for pair in sorted(sends, key=ahead)),
    ]
