"""Collectives as messages between ranks, for the slow network.

MPI's own collectives move data inside the library, where no latency can be added. Here are the
algorithms that such libraries choose from, message by message (R. Thakur, R. Rabenseifner,
W. Gropp, "Optimization of collective communication operations in MPICH", 2005).

All are generators for :class:`~torch_mpi.steps.Steps`, on plain one-dimensional tensors.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from . import buffers, messages
from .arithmetic import Combine
from .messages import Channels
from .record import Call
from .steps import Steps

# Up to here the number of messages decides, above it their size.
SMALL = 16 * 1024  # bytes


class Team:
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


def barrier(team: Team) -> Generator:
    """Dissemination: in round k each rank hears from the one 2**k before it."""
    token, distance = torch.zeros(1, dtype=torch.uint8), 1
    while distance < team.size:
        ahead, behind = (team.rank + distance) % team.size, (team.rank - distance) % team.size
        yield [team.receive(behind, torch.empty_like(token)), team.send(ahead, token)]
        distance *= 2


def broadcast(team: Team, memory: torch.Tensor, root: int) -> Generator:
    """Binomial tree: who has it passes it on, twice as many in each round."""
    place = (team.rank - root) % team.size
    reach = 1
    while reach <= place:
        reach *= 2
    if place:
        yield [team.receive((place - reach // 2 + root) % team.size, memory)]
    while place + reach < team.size:
        yield [team.send((place + reach + root) % team.size, memory)]
        reach *= 2


def reduce(team: Team, memory: torch.Tensor, add: Combine, root: int) -> Generator:
    """Binomial tree, from the leaves to the root. ``memory`` is overwritten on every rank."""
    place, reach = (team.rank - root) % team.size, 1
    incoming = torch.empty_like(memory)
    while reach < team.size:
        if place & reach:
            yield [team.send((place - reach + root) % team.size, memory)]
            return
        if place + reach < team.size:
            yield [team.receive((place + reach + root) % team.size, incoming)]
            add(memory, incoming)
        reach *= 2


def all_reduce(team: Team, memory: torch.Tensor, add: Combine) -> Generator:
    """Recursive doubling for small tensors, a ring for large ones."""
    if buffers.nbytes(memory) <= SMALL or memory.numel() < team.size:
        yield [Steps(_recursive_doubling(team, memory, add))]
        return
    chunks = list(memory.tensor_split(team.size))
    yield [Steps(_ring_reduce(team, chunks, add, last=team.rank))]
    yield [Steps(all_gather(team, chunks))]


def _recursive_doubling(team: Team, memory: torch.Tensor, add: Combine) -> Generator:
    """Partners exchange all they have; ranks beyond a power of two hand theirs to a helper."""
    power = 1 << (team.size.bit_length() - 1)
    extra, incoming = team.size - power, torch.empty_like(memory)
    if team.rank >= power:
        yield [team.send(team.rank - power, memory)]
        yield [team.receive(team.rank - power, memory)]
        return
    if team.rank < extra:
        yield [team.receive(team.rank + power, incoming)]
        add(memory, incoming)
    distance = 1
    while distance < power:
        partner = team.rank ^ distance
        yield [team.receive(partner, incoming), team.send(partner, memory.clone())]
        # The same order on both sides: floating-point sums are then the same on all ranks.
        if partner < team.rank:
            add(incoming, memory)
            memory.copy_(incoming)
        else:
            add(memory, incoming)
        distance *= 2
    if team.rank < extra:
        yield [team.send(team.rank + power, memory)]


def _ring_reduce(team: Team, chunks: list[torch.Tensor], add: Combine, last: int) -> Generator:
    """Reduce-scatter on a ring: afterwards chunk ``last`` (this rank's) is complete."""
    after, before = (team.rank + 1) % team.size, (team.rank - 1) % team.size
    for step in range(team.size - 1):
        outgoing = chunks[(last - step - 1) % team.size]
        mine = chunks[(last - step - 2) % team.size]
        incoming = torch.empty_like(mine)
        yield [team.receive(before, incoming), team.send(after, outgoing)]
        add(mine, incoming)


def all_gather(team: Team, chunks: list[torch.Tensor]) -> Generator:
    """On a ring: pass on what came last. ``chunks[rank]`` is this rank's own."""
    after, before = (team.rank + 1) % team.size, (team.rank - 1) % team.size
    for step in range(team.size - 1):
        outgoing = chunks[(team.rank - step) % team.size]
        incoming = chunks[(team.rank - step - 1) % team.size]
        yield [team.receive(before, incoming), team.send(after, outgoing)]


def reduce_scatter(team: Team, chunks: list[torch.Tensor], add: Combine) -> Generator:
    """On a ring; ``chunks`` are overwritten, ``chunks[rank]`` is the result."""
    yield [Steps(_ring_reduce(team, chunks, add, last=team.rank))]


def exchange(
    team: Team, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
) -> Generator:
    """All messages at once; ``(rank, memory)`` pairs, none with this rank itself.

    Each rank sends to the one after it first, then to the next: with the same order on all ranks,
    everybody would send to rank 0 at the same time and wait for its link.
    """

    def ahead(pair: tuple[int, torch.Tensor]) -> int:
        return (pair[0] - team.rank) % team.size

    yield [
        *(team.receive(*pair) for pair in sorted(receives, key=lambda pair: -ahead(pair))),
        *(team.send(*pair) for pair in sorted(sends, key=ahead)),
    ]
