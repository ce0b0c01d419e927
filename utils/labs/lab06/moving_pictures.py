"""Shows which all-reduce of lab 06 is fastest, for any α, any bandwidth and up to 64 ranks."""

from __future__ import annotations

from utils.figures import SKY
from utils.figures.interactive import Interactive
from utils.labs.lab06.costs import ALGORITHMS, rounds_and_tensors
from utils.labs.lab06.pictures import LOOKS
from utils.labs.shared import fastest
from utils.labs.shared.fastest import Algorithm, Cost

ALL_PAIRS = {"crossbar", "direct"}


def crossover(ranks: int, alpha: float, bandwidth: float) -> Interactive:
    """Return a picture of times against bytes that begins with this network (s, bytes/s)."""
    algorithms = [
        Algorithm(name, LOOKS[name][0], cost_of(name), all_pairs=name in ALL_PAIRS)
        for name in ALGORITHMS
    ]
    algorithms.append(Algorithm("halving", SKY, halving_doubling))
    return fastest.moving(algorithms, ranks, alpha, bandwidth)


def cost_of(algorithm: str):
    """Return a function that gives the cost of an algorithm of the lab on p ranks."""

    def cost(p: int) -> Cost:
        rounds, tensors = rounds_and_tensors(algorithm, p)
        # We round, so that two algorithms with as many tensors compare as equal.
        return Cost(rounds, round(tensors, 6))

    return cost


def halving_doubling(p: int) -> Cost | None:
    """Return the cost of halving and doubling, which sends the ring's bytes in 2 log₂ p rounds."""
    if p & (p - 1):
        return None
    return Cost(2 * (p.bit_length() - 1), round(2 * (p - 1) / p, 6))
