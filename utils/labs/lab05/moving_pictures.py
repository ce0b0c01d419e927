"""Shows which of the forecast's two all-reduces is faster, for any network and up to 64 ranks."""

from __future__ import annotations

from utils.figures import BLUE, ORANGE
from utils.figures.interactive import Interactive
from utils.labs.lab05.forecast import PATTERNS, Regimes, messages
from utils.labs.shared import fastest
from utils.labs.shared.fastest import Algorithm, Cost


def crossover(measured: Regimes, ranks: int = 8) -> Interactive:
    """Return a picture of times against bytes that begins with the costs on this machine.

    Args:
        measured: gives α of short messages and β of long ones.
        ranks: the first number of ranks in the picture.
    """
    algorithms = [
        Algorithm(pattern, color, cost_of(pattern))
        for pattern, color in zip(PATTERNS, (BLUE, ORANGE), strict=True)
    ]
    network = measured.small.alpha, measured.large.bandwidth
    return fastest.moving(algorithms, ranks, *network, nbytes=1024)


def cost_of(pattern: str):
    """Return a function that gives the cost of a pattern of messages on p ranks."""

    def cost(p: int) -> Cost:
        sent = messages(pattern, 1.0, p)
        return Cost(len(sent), round(sum(message.nbytes for message in sent), 6))

    return cost
