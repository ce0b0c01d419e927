"""Collectives as messages between ranks, for the slow network.

MPI's own collectives move data inside the library, where no latency can be added. Here are the
algorithms that such libraries choose from, message by message (R. Thakur, R. Rabenseifner,
W. Gropp, "Optimization of collective communication operations in MPICH", 2005).

All are generators for :class:`~torch_mpi.steps.Steps`, on plain one-dimensional tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from . import buffers, messages
from .messages import Channels
from .record import Call
from .steps import Steps

# Up to here the number of messages decides, above it their size.
SMALL = 16 * 1024  # bytes

Combine = Callable[[torch.Tensor, torch.Tensor], None]

_NUMBERS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_TRUTHS = {
    "SUM": torch.logical_or,
    "MAX": torch.logical_or,
    "BOR": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
    "BAND": torch.logical_and,
    "BXOR": torch.logical_xor,
}
# torch has no arithmetic for these; their bits are those of the signed numbers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def combine(dtype: torch.dtype, name: str) -> Combine:
    """What reduces a tensor of ``dtype`` into another one, in place."""
    if dtype in _SIGNED:
        if name in ("MIN", "MAX"):
            return _unsigned_extreme(dtype, _NUMBERS[name])
        return _as(_SIGNED[dtype], _NUMBERS[name])
    arithmetic = (_TRUTHS if dtype is torch.bool else _NUMBERS)[name]
    return lambda mine, other: arithmetic(mine, other, out=mine)


def _as(signed: torch.dtype, arithmetic) -> Combine:
    def apply(mine: torch.Tensor, other: torch.Tensor) -> None:
        arithmetic(mine.view(signed), other.view(signed), out=mine.view(signed))

    return apply


def _unsigned_extreme(dtype: torch.dtype, arithmetic) -> Combine:
    """Flipping the highest bit makes the order of signed numbers that of unsigned ones."""
    signed = _SIGNED[dtype]
    flip = torch.iinfo(signed).min

    def apply(mine: torch.Tensor, other: torch.Tensor) -> None:
        best = arithmetic(mine.view(signed) ^ flip, other.view(signed) ^ flip)
        mine.view(signed).copy_(best ^ flip)

    return apply


class Team:
    """The ranks of one collective, and the tag that its messages have."""

    def __init__(self, channels: Channels, call: Call):
        self._channels = channels
        self._call = call
        self._tag = call.sequence % 2**20
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
    """All messages at once; ``(rank, memory)`` pairs, none with this rank itself."""
    yield [
        *(team.receive(peer, memory) for peer, memory in receives),
        *(team.send(peer, memory) for peer, memory in sends),
    ]
