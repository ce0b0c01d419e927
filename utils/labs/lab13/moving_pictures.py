"""The interval between checkpoints that moves: what saving and failures cost, and the best one."""

from __future__ import annotations

import math
from pathlib import Path

from utils.figures.interactive import Interactive
from utils.labs.lab13 import faults, pictures

SCRIPT = Path(__file__).with_name("interval.js")
#: Shortest and longest, in seconds.
INTERVALS = (1.0, 30 * 86_400.0)
SAVES, RESTARTS, MTBFS = (1e-3, 3600.0), (1.0, 3600.0), (600.0, 100 * 86_400.0)


def interval(save: float, mtbf: float, restart: float = 600.0) -> Interactive:
    """Return the overhead against the interval, with sliders for all that it depends on.

    Args:
        save, mtbf, restart: seconds that the picture begins with.
    """
    save = min(max(save, SAVES[0]), SAVES[1])
    best = math.sqrt(2 * save * mtbf)
    data = {
        "interval": [*INTERVALS, min(max(4 * best, INTERVALS[0]), INTERVALS[1])],
        "save": [*SAVES, save],
        "restart": [*RESTARTS, restart],
        "mtbf": [*MTBFS, mtbf],
    }
    grid = [best * 1.2**k for k in range(-12, 13)]
    curve = {tau: faults.overhead(tau, save, restart, mtbf) for tau in grid}
    marks = {"Young": best, "Daly": faults.daly(save, mtbf)}
    return Interactive(SCRIPT, data, pictures.intervals(curve, {}, marks, "s"))
