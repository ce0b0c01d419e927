"""Shows how a bound and a slow rank decide when workers compute and wait, and how late they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from utils.figures.interactive import Interactive
from utils.labs.lab07 import pictures

SCRIPT = Path(__file__).with_name("bound.js")
#: The values of the bound's slider. The last one means no bound.
BOUNDS = range(10)
FACTORS = range(1, 9)


def bound(
    steps: Sequence[int] = (20, 22, 25, 23),
    slow: int = 2,
    factor: int = 6,
    until: int = 600,
    start: int = 2,
) -> Interactive:
    """Return the lanes of the workers, with sliders for the bound and for the slow worker.

    Args:
        steps: milliseconds of a gradient on each worker, for ranks 1, 2, …
        slow: index of the slow worker, from 0 on.
        factor: how many times as long the slow worker takes at first.
        until: milliseconds that are drawn.
        start: the first value of the bound.
    """
    data = {
        "steps": list(steps),
        "slow": slow,
        "until": until,
        "bound": [BOUNDS[0], BOUNDS[-1], start],
        "factor": [FACTORS[0], FACTORS[-1], factor],
    }
    taken = [step * (factor if k == slow else 1) for k, step in enumerate(steps)]
    return Interactive(SCRIPT, data, pictures.plan([0, start, None], taken, until))
