"""Which of the forecast's two all-reduces is the faster, for any network and up to 64 ranks."""

from __future__ import annotations

from utils.figures import BLUE, ORANGE
from utils.figures.interactive import Interactive
from utils.labs.lab05.forecast import PATTERNS, Regimes, messages
from utils.labs.shared import fastest
from utils.labs.shared.fastest import Algorithm, Cost


def crossover(measured: Regimes, ranks: int = 8) -> Interactive:
    """Return times against bytes, which begin with what messages cost on this machine.

    Args:
        measured: α of short messages and β of long ones are taken from it.
        ranks: what the picture begins with.
    """
    algorithms = [
        Algorithm(pattern, color, cost_of(pattern))
        for pattern, color in zip(PATTERNS, (BLUE, ORANGE), strict=True)
    ]
    network = measured.small.alpha, measured.large.bandwidth
    return fastest.moving(algorithms, ranks, *network, nbytes=1024)


def cost_of(pattern: str):
    """Return the function that says what a pattern of messages costs on p ranks."""

    def cost(p: int) -> Cost:
        sent = messages(pattern, 1.0, p)
        return Cost(len(sent), round(sum(message.nbytes for message in sent), 6))

    return cost
