"""Predicts how long a training step will take on ranks and networks that you don't have.

A step is the computation of one rank plus its all_reduces. An all_reduce is a pattern of messages,
and a message of n bytes costs α + nβ. We measure the computation on one rank, how much slower it is
next to other ranks, and a table of all_reduce times on a few ranks of this machine. The model
leaves out overlap and ranks that wait for each other, so each prediction comes with a band.

Patterns: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", International Journal of High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from utils.mpi.benchmark.alpha_beta import AlphaBeta, fit_alpha_beta

# MPI changes its protocol with the size, so three lines fit better than one.
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
    """One step of a pattern: the bytes that each rank sends, and the distance to the receiver."""

    nbytes: float
    distance: int


def messages(pattern: str, nbytes: float, ranks: int) -> list[Message]:
    """Return the messages that each rank sends, one after the other, in an all_reduce.

    A ring has 2(p − 1) messages of n/p bytes to the next rank. Recursive doubling has log₂ p
    messages of n bytes at distances 1, 2, 4, …, and two more if p isn't a power of two.

    Raises:
        ValueError: the pattern is unknown, or there is less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: expected at least 1")
    if pattern == "ring":
        return [Message(nbytes / ranks, 1)] * (2 * (ranks - 1))
    if pattern == "recursive doubling":
        doublings = ranks.bit_length() - 1
        sent = [Message(nbytes, 2**k) for k in range(doublings)]
        return sent if ranks == 2**doublings else [sent[0], *sent, sent[0]]
    raise ValueError(f"pattern={pattern!r}: expected one of {', '.join(PATTERNS)}")


# --- the measurement --------------------------------------------------------------------------


@dataclass(frozen=True)
class Regimes:
    """The seconds of one message by its bytes, as a line for each of three regimes.

    Attributes:
        pattern: the pattern of messages that we assume for the measured all_reduce.
        small, middle, large: the lines up to 1 KiB, between, and from 1 MiB on.
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
        """Return the mean relative error of the worst of the three lines."""
        return max(line.error for line in (self.small, self.middle, self.large))

    def all_reduce(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all_reduce on ranks of the measured machine."""
        return sum(self.message(sent.nbytes) for sent in messages(self.pattern, nbytes, ranks))


def fit_regimes(
    nbytes: Sequence[float], seconds: Sequence[float], ranks: int, pattern: str = "ring"
) -> Regimes:
    """Return what a message costs, from a table of all_reduce times on some ranks.

    For example, a ring over p ranks sends 2(p − 1) messages of n/p bytes, which take equal parts of
    the time. Sizes at 1 KiB and 1 MiB count on both sides.

    Raises:
        ValueError: there are fewer than two ranks, or fewer than two sizes of messages in a regime,
            the pattern is unknown, or the times can't be fitted.
    """
    if ranks < 2:
        raise ValueError(f"ranks={ranks}: one rank sends nothing, so measure at least 2")
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
            raise ValueError(f"the table needs at least 2 messages {name}, but has {len(rows)}")
        fits.append(fit_alpha_beta(*zip(*rows, strict=True)))
    return Regimes(pattern, *fits)


# --- the prediction ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Nodes with one rank for each NUMA domain, joined by a network.

    Attributes:
        nodes, domains: the number of nodes, and of ranks on each node. Recursive doubling needs
            powers of two.
        network: each node's link to the other nodes, in each direction. One node needs no link.
    """

    nodes: int
    domains: int
    network: Link | None = None

    @property
    def ranks(self) -> int:
        """Return the world size."""
        return self.nodes * self.domains

    def all_reduce(self, nbytes: float, local: Regimes) -> float:
        """Return the seconds of an all_reduce; `local` gives the cost of messages inside a node.

        In a ring, one rank of each node sends over the network, and the slowest link sets the
        pace. In recursive doubling, all ranks of a node send at the same time and share its link.

        Raises:
            ValueError: there are several nodes but no network.
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
            compute: seconds of each round of a rank's computation, alone on the machine.
            sizes: bytes of each all_reduce.
            local: the cost of messages inside a node.
            slowdown: the factor by which computing takes longer while other ranks compute.

        The low end assumes no slowdown. Both ends use quartiles of the rounds, and the mean error
        of the table's lines for communication.
        """
        quick, usual, slow = np.percentile(compute, [25, 50, 75])
        sent = self.step(0.0, sizes, local)
        low = min(quick, quick * slowdown) + sent * (1 - local.error)
        high = slow * max(1.0, slowdown) + sent * (1 + local.error)
        return float(low), float(usual * slowdown + sent), float(high)
