"""How long a training step will take on ranks and networks that are not here.

A step is the computation of one rank plus its all_reduces. An all_reduce is a pattern of messages,
and a message of n bytes costs α + nβ. What is measured: the computation on one rank, how much
slower it is beside others, and a table of all_reduce times on a few ranks of this machine. What is
left out: overlap, and ranks that wait for each other. So each prediction comes with a band.

Patterns: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", International Journal of High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from utils.mpi.benchmark.alpha_beta import AlphaBeta, fit_alpha_beta

# MPI changes its protocol with the size, so one line fits badly: three regimes.
SMALL = 2**10
LARGE = 2**20

PATTERNS = ("ring", "recursive doubling")


@dataclass(frozen=True)
class Link:
    """A network link: latency α in seconds and bandwidth 1/β in bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Message:
    """One step of a pattern: how many bytes each rank sends, and how far away the receiver is."""

    nbytes: float
    distance: int


def messages(pattern: str, nbytes: float, ranks: int) -> list[Message]:
    """Return the messages that each rank sends, one after the other, in an all_reduce.

    ring: 2(p − 1) messages of n/p bytes to the next rank. recursive doubling: log₂ p messages of
    n bytes at distances 1, 2, 4, …; two more where p is no power of two, for the ranks left over.

    Raises:
        ValueError: another pattern, or less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least 1")
    if pattern == "ring":
        return [Message(nbytes / ranks, 1)] * (2 * (ranks - 1))
    if pattern == "recursive doubling":
        doublings = ranks.bit_length() - 1
        sent = [Message(nbytes, 2**k) for k in range(doublings)]
        return sent if ranks == 2**doublings else [sent[0], *sent, sent[0]]
    raise ValueError(f"pattern={pattern!r}: expected one of {', '.join(PATTERNS)}")


# --- what was measured ------------------------------------------------------------------------


@dataclass(frozen=True)
class Regimes:
    """The seconds of one message by its bytes: a line for each regime.

    Attributes:
        pattern: the messages that the measured all_reduce is taken to be made of.
        small, middle, large: up to 1 KiB, between, from 1 MiB.
    """

    pattern: str
    small: AlphaBeta
    middle: AlphaBeta
    large: AlphaBeta

    def message(self, nbytes: float) -> float:
        """Return the seconds of one message."""
        if nbytes <= SMALL:
            return float(self.small.predict(nbytes))
        return float((self.large if nbytes >= LARGE else self.middle).predict(nbytes))

    @property
    def error(self) -> float:
        """Return how far the lines are off the table, on average, as a share of the time."""
        return max(line.error for line in (self.small, self.middle, self.large))

    def all_reduce(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all_reduce on ranks of the machine that was measured."""
        return sum(self.message(sent.nbytes) for sent in messages(self.pattern, nbytes, ranks))


def fit_regimes(
    nbytes: Sequence[float], seconds: Sequence[float], ranks: int, pattern: str = "ring"
) -> Regimes:
    """Return what a message costs, from a table of all_reduce times on some ranks.

    A ring over p ranks makes 2(p − 1) messages of n/p bytes of it, so each takes that part of the
    time. Sizes at 1 KiB and 1 MiB count on both sides.

    Raises:
        ValueError: fewer than two sizes of messages in a regime, fewer than two ranks, another
            pattern, or times that can't be fitted.
    """
    if ranks < 2:
        raise ValueError(f"ranks={ranks}: one rank sends nothing, measure at least 2")
    table = []
    for size, time in zip(nbytes, seconds, strict=True):
        sent = messages(pattern, size, ranks)
        table.append((sent[0].nbytes, time / len(sent)))
    fits = []
    for name, least, most in (
        ("up to 1 KiB", 0, SMALL),
        ("from 1 KiB to 1 MiB", SMALL, LARGE),
        ("from 1 MiB", LARGE, np.inf),
    ):
        rows = [(size, time) for size, time in table if least <= size <= most]
        if len({size for size, _ in rows}) < 2:
            raise ValueError(f"the table needs at least 2 messages {name}, got {len(rows)}")
        fits.append(fit_alpha_beta(*zip(*rows, strict=True)))
    return Regimes(pattern, *fits)


# --- what it will be --------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Nodes with one rank for each NUMA domain, joined by a network.

    Attributes:
        nodes, domains: how many nodes; ranks on each of them. Powers of two for recursive
            doubling.
        network: between nodes, for each node and direction; None where there is one node.
    """

    nodes: int
    domains: int
    network: Link | None = None

    @property
    def ranks(self) -> int:
        """Return the world size."""
        return self.nodes * self.domains

    def all_reduce(self, nbytes: float, local: Regimes) -> float:
        """Return the seconds of an all_reduce; inside a node messages cost what `local` says.

        In a ring one rank of each node sends over the network, and the slowest link sets the
        pace. In recursive doubling all ranks of a node do at the same time, and share its link.

        Raises:
            ValueError: there are several nodes, and no network.
        """
        if self.nodes == 1:
            return local.all_reduce(nbytes, self.ranks)
        if self.network is None:
            raise ValueError(f"{self.nodes} nodes need a network: Machine(…, network=Link(…))")
        total = 0.0
        for sent in messages(local.pattern, nbytes, self.ranks):
            inside = local.message(sent.nbytes) if self.domains > 1 else 0.0
            if local.pattern == "ring":
                total += max(inside, self.network.seconds(sent.nbytes))
            elif sent.distance < self.domains:
                total += inside
            else:
                total += self.network.seconds(self.domains * sent.nbytes)
        return total

    def step(self, compute: float, sizes: Iterable[float], local: Regimes) -> float:
        """Return the seconds of a step: computation, then an all_reduce for each of the sizes."""
        return compute + sum(self.all_reduce(nbytes, local) for nbytes in sizes)

    def step_band(
        self, compute: Sequence[float], sizes: Iterable[float], local: Regimes, slowdown: float = 1
    ) -> tuple[float, float, float]:
        """Return the lowest, middle and highest seconds of a step.

        Args:
            compute: seconds of each round of a rank's computation, with the machine for itself.
            sizes: bytes of each all_reduce.
            local: what messages cost inside a node.
            slowdown: how many times as long it takes while the other ranks compute, too.

        The low end knows no slowdown. Ends take the quartiles of the rounds, and communication
        that is off by as much as the table's lines are.
        """
        quick, usual, slow = np.percentile(compute, [25, 50, 75])
        sent = self.step(0.0, sizes, local)
        low = min(quick, quick * slowdown) + sent * (1 - local.error)
        high = slow * max(1.0, slowdown) + sent * (1 + local.error)
        return float(low), float(usual * slowdown + sent), float(high)
