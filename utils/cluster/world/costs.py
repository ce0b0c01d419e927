"""What communication costs between ranks whose messages one process carries.

A communication moves the ranks' clocks on by Hockney's model (R. Hockney, Parallel Computing 20,
1994): a message of n bytes takes ``latency + n / bandwidth``. A collective takes what the usual
algorithms need in this model (R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19, 2005), and begins
when its last rank has called it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch_mpi.network import Arrival, Network, Wire, link

#: The network of ranks in one process, unless `ranks.network` sets another one: about what MPI
#: reaches through the memory of a laptop.
OWN_NETWORK = Network(latency=10e-6, bandwidth=4e9)

#: Up to this size, an all_reduce uses recursive doubling; see ``torch_mpi.group.algorithms``.
SMALL = 16 * 1024  # bytes


class Costs:
    """When messages and collectives of n ranks end, on the ranks' clocks.

    Args:
        n: number of ranks.
    """

    def __init__(self, n: int):
        self._wires: dict[tuple[int, Network], Wire] = {}
        self._busy = [0.0] * n

    def forget_messages(self) -> None:
        """Let the next messages find free links, as after a change of the network."""
        self._wires.clear()
        self._busy = [0.0] * len(self._busy)

    def leaves(self, rank: int, to: int, nbytes: int, at: float) -> tuple[float, float]:
        """Return when a message's last byte leaves its sender, and when it arrives."""
        return self._wire(rank, rank, to).sends(nbytes, at)

    @staticmethod
    def leaves_late(rank: int, to: int, nbytes: int, gone: float, matched: float) -> float:
        """Return when a long message leaves that was announced, and is received at `matched`.

        In a slow network it moves before, as between ranks that are processes.
        """
        own = _between(rank, to) is OWN_NETWORK
        return max(gone, matched + nbytes / OWN_NETWORK.bandwidth) if own else gone

    def arrives(self, rank: int, source: int, nbytes: int, told: float) -> Arrival:
        """Return the arrival of a message that its sender says arrives at `told`."""
        return self._wire(rank, source, rank).receives(nbytes, told)

    def _wire(self, owner: int, source: int, to: int) -> Wire:
        network = _between(source, to)
        key = (owner, network)
        if key not in self._wires:
            self._wires[key] = Wire(network, shared_clock=True)
        return self._wires[key]

    def collective(self, op: str, members: Sequence[int], nbytes: int, called: float) -> float:
        """Return when a collective ends that its last rank called at `called`.

        Args:
            op: its name.
            members: global ranks.
            nbytes: bytes of a rank's whole tensor, or of one part if each rank has a part.
        """
        pairs = itertools.combinations(members, 2)
        networks = {_between(a, b) for a, b in pairs}
        spent = max((seconds(op, len(members), nbytes, net) for net in networks), default=0.0)
        # The collectives of a rank use its link one after the other.
        end = max(called, *(self._busy[rank] for rank in members)) + spent
        for rank in members:
            self._busy[rank] = end
        return end


def seconds(op: str, ranks: int, nbytes: int, network: Network) -> float:
    """Return the seconds of a collective in Hockney's model.

    Args:
        op: its name.
        ranks: size of the group.
        nbytes: see :meth:`Costs.collective`.
        network: the slowest between two of the ranks.
    """
    latency = network.latency
    transfer = nbytes / network.bandwidth
    levels = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    steps = ranks - 1
    if op == "barrier":
        return levels * latency
    if op.startswith("all_reduce"):
        if nbytes > SMALL:
            return 2 * steps * (latency + transfer / ranks)
        return levels * latency + _tensors_sent(ranks) * transfer
    if op in ("broadcast", "reduce"):
        pipelined = levels * latency + 2 * transfer * steps / ranks
        return min(levels * (latency + transfer), pipelined + steps * latency)
    if op in ("gather", "scatter"):
        return levels * latency + steps * transfer
    return steps * (latency + transfer)


def bytes_sent(op: str, ranks: int, nbytes: int) -> int | None:
    """Return the bytes that a rank sends in a collective on a slow network; None if unknown."""
    if not op.startswith("all_reduce") or link.network is None:
        return None
    if nbytes > SMALL:
        return 2 * (ranks - 1) * nbytes // ranks
    return _tensors_sent(ranks) * nbytes


def _tensors_sent(ranks: int) -> int:
    """Return how many tensors a rank sends in a short all_reduce.

    For a power of two of ranks it is one in each round, otherwise all that the rank has.
    """
    return ranks.bit_length() - 1 if ranks & (ranks - 1) == 0 else ranks - 1


def _between(rank: int, other: int) -> Network:
    network = link.network and link.network.between(rank, other)
    return network or OWN_NETWORK
