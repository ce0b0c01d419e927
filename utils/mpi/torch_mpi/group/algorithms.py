"""Collectives as messages between ranks, for the slow network.

MPI's own collectives move data inside the library, where no latency can be added. Here are the
algorithms that such libraries choose from, message by message (R. Thakur, R. Rabenseifner,
W. Gropp, "Optimization of collective communication operations in MPICH", 2005).

All are generators for :class:`~torch_mpi.group.steps.Steps`, on plain one-dimensional tensors.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from ..record import Call
from . import buffers, messages
from .arithmetic import Combine
from .messages import Channels
from .steps import Steps

# Up to here the number of messages decides, above it their size.
SMALL = 16 * 1024  # bytes


class Group:
    """The ranks of one collective, and the tag that its messages have."""

    def __init__(self, channels: Channels, call: Call):
        self._channels = channels
        self._call = call
        self._tag = channels.tags.of_collective(call.sequence)
        self.rank, self.size = channels.rank, len(channels.members)

    def send(self, peer: int, memory: torch.Tensor) -> Steps:
        """Start sending."""
        return Steps(messages.ship(self._channels, peer, memory, self._tag, self._call))

    def receive(self, peer: int, memory: torch.Tensor) -> Steps:
        """Start receiving."""
        return Steps(messages.fetch(self._channels, peer, memory, self._tag, self._call))


def barrier(group: Group) -> Generator:
    """Dissemination: in round k each rank hears from the one 2**k before it."""
    token, distance = torch.zeros(1, dtype=torch.uint8), 1
    while distance < group.size:
        ahead, behind = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        yield [group.receive(behind, torch.empty_like(token)), group.send(ahead, token)]
        distance *= 2


def broadcast(group: Group, memory: torch.Tensor, root: int) -> Generator:
    """Binomial tree: who has it passes it on, twice as many in each round."""
    place = (group.rank - root) % group.size
    reach = 1
    while reach <= place:
        reach *= 2
    if place:
        yield [group.receive((place - reach // 2 + root) % group.size, memory)]
    while place + reach < group.size:
        yield [group.send((place + reach + root) % group.size, memory)]
        reach *= 2


def reduce(group: Group, memory: torch.Tensor, add: Combine, root: int) -> Generator:
    """Binomial tree, from the leaves to the root. ``memory`` is overwritten on every rank."""
    place, reach = (group.rank - root) % group.size, 1
    incoming = torch.empty_like(memory)
    while reach < group.size:
        if place & reach:
            yield [group.send((place - reach + root) % group.size, memory)]
            return
        if place + reach < group.size:
            yield [group.receive((place + reach + root) % group.size, incoming)]
            add(memory, incoming)
        reach *= 2


def all_reduce(group: Group, memory: torch.Tensor, add: Combine) -> Generator:
    """Recursive doubling for small tensors, a ring for large ones."""
    if buffers.nbytes(memory) <= SMALL or memory.numel() < group.size:
        yield [Steps(_recursive_doubling(group, memory, add))]
        return
    chunks = list(memory.tensor_split(group.size))
    yield [Steps(_ring_reduce(group, chunks, add, last=group.rank))]
    yield [Steps(all_gather(group, chunks))]


def _recursive_doubling(group: Group, memory: torch.Tensor, add: Combine) -> Generator:
    """Partners exchange all they have; ranks beyond a power of two hand theirs to a helper."""
    power = 1 << (group.size.bit_length() - 1)
    extra, incoming = group.size - power, torch.empty_like(memory)
    if group.rank >= power:
        yield [group.send(group.rank - power, memory)]
        yield [group.receive(group.rank - power, memory)]
        return
    if group.rank < extra:
        yield [group.receive(group.rank + power, incoming)]
        add(memory, incoming)
    distance = 1
    while distance < power:
        partner = group.rank ^ distance
        yield [group.receive(partner, incoming), group.send(partner, memory.clone())]
        # The same order on both sides: floating-point sums are then the same on all ranks.
        if partner < group.rank:
            add(incoming, memory)
            memory.copy_(incoming)
        else:
            add(memory, incoming)
        distance *= 2
    if group.rank < extra:
        yield [group.send(group.rank + power, memory)]


def _ring_reduce(group: Group, chunks: list[torch.Tensor], add: Combine, last: int) -> Generator:
    """Reduce-scatter on a ring: afterwards chunk ``last`` (this rank's) is complete."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for step in range(group.size - 1):
        outgoing = chunks[(last - step - 1) % group.size]
        mine = chunks[(last - step - 2) % group.size]
        incoming = torch.empty_like(mine)
        yield [group.receive(before, incoming), group.send(after, outgoing)]
        add(mine, incoming)


def all_gather(group: Group, chunks: list[torch.Tensor]) -> Generator:
    """On a ring: pass on what came last. ``chunks[rank]`` is this rank's own."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for step in range(group.size - 1):
        outgoing = chunks[(group.rank - step) % group.size]
        incoming = chunks[(group.rank - step - 1) % group.size]
        yield [group.receive(before, incoming), group.send(after, outgoing)]


def reduce_scatter(group: Group, chunks: list[torch.Tensor], add: Combine) -> Generator:
    """On a ring; ``chunks`` are overwritten, ``chunks[rank]`` is the result."""
    yield [Steps(_ring_reduce(group, chunks, add, last=group.rank))]


def exchange(
    group: Group, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
) -> Generator:
    """All messages at once; ``(rank, memory)`` pairs, none with this rank itself.

    Each rank sends to the one after it first, then to the next: with the same order on all ranks,
    everybody would send to rank 0 at the same time and wait for its link.
    """

    def ahead(pair: tuple[int, torch.Tensor]) -> int:
        return (pair[0] - group.rank) % group.size

    yield [
        *(group.receive(*pair) for pair in sorted(receives, key=lambda pair: -ahead(pair))),
        *(group.send(*pair) for pair in sorted(sends, key=ahead)),
    ]
