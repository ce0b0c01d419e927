"""A picture with sliders: what saves and failures cost, and which interval is the best."""

from __future__ import annotations

import math
from pathlib import Path

from utils.figures.interactive import Interactive
from utils.labs.lab13 import faults, pictures

SCRIPT = Path(__file__).with_name("interval.js")
#: The shortest and the longest value of each slider, in seconds.
INTERVALS = (1.0, 30 * 86_400.0)
SAVES, RESTARTS, MTBFS = (1e-3, 3600.0), (1.0, 3600.0), (600.0, 100 * 86_400.0)


def interval(save: float, mtbf: float, restart: float = 600.0) -> Interactive:
    """Return the overhead against the interval, with sliders for everything that it depends on.

    Args:
        save, mtbf, restart: the seconds at which the sliders begin.
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
