"""Pictures with sliders: the faster of two all-reduces, and a step on up to 4,096 ranks."""

from __future__ import annotations

from pathlib import Path

from utils.figures import BLUE, ORANGE
from utils.figures.interactive import Interactive
from utils.labs.lab05 import pictures
from utils.labs.lab05.forecast import PATTERNS, Regimes, messages
from utils.labs.lab05.many_ranks import LINKS, RANKS, SIZES, SPINES, Survey
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


def many_ranks(survey: Survey, size: int = 100) -> Interactive:
    """Return efficiencies against the ranks, and the parts of a step, on three machines."""
    every = [point for points in survey.points.values() for point in points]
    reasons, algorithms = (sorted({point[k] for point in every}) for k in (1, 2))
    costs = {
        "/".join(map(str, key)): [
            (float(f"{cost:.4g}"), reasons.index(reason), algorithms.index(algorithm))
            for cost, reason, algorithm in points
        ]
        for key, points in survey.points.items()
    }
    looks = [(name, pictures.MACHINES[name][0], usual) for name, (usual, _) in LINKS.items()]
    axes = {"ranks": RANKS, "spines": SPINES, "sizes": SIZES, "size": size, "machines": looks}
    words = {"reasons": reasons, "algorithms": algorithms}
    data = vars(survey) | axes | words | {"points": costs}
    script = Path(__file__).with_name("many_ranks.js")
    return Interactive(script, data, pictures.many_ranks(survey, size))
