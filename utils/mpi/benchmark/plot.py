"""Time and bandwidth against the size of the message, a panel per operation."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .options import KI, MI, TRANSPORTS
from .report import heading, size

# Color, marker and line differ, each of them enough to tell the transports apart. The colors are
# from Okabe and Ito (2008).
LOOK = {
    "mpi": {"color": "#0072B2", "marker": "o", "linestyle": "-", "zorder": 4},
    "mpi4py": {"color": "#E69F00", "marker": "s", "linestyle": "--", "zorder": 3},
    "gloo": {"color": "#009E73", "marker": "^", "linestyle": ":", "zorder": 2},
}
STYLE = {
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#EDEDED",
    "legend.frameon": False,
    "lines.linewidth": 2,
}
TICKS = (4, 64, KI, 16 * KI, 256 * KI, 4 * MI, 64 * MI)


@plt.rc_context(STYLE)
def draw(found: dict) -> Figure:
    """Time above, bandwidth below, one column per operation. Shades: from round to round."""
    names = list(dict.fromkeys(row["name"] for row in found["operations"]))
    figure, axes = plt.subplots(
        2, len(names), figsize=(1.2 + 3.7 * len(names), 7), sharex=True, sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    axes[0, 0].set_yscale("log")
    for name, (above, below) in zip(names, axes.T, strict=True):
        rows = [row for row in found["operations"] if row["name"] == name]
        _panel(above, rows, lambda nbytes, seconds: seconds)
        _panel(below, rows, lambda nbytes, seconds: nbytes / seconds / 1e9)
        above.set_title(name)
        below.set_xlabel("size of each rank's tensor")
    axes[0, 0].yaxis.set_major_formatter(EngFormatter("s"))
    axes[0, 0].set_ylabel("time")
    axes[1, 0].set_ylim(bottom=0)
    axes[1, 0].set_ylabel("size / time [GB/s]")
    axes[0, 0].legend(loc="upper left")
    figure.suptitle(heading(found), x=0.01, ha="left", fontsize=11)
    plt.close(figure)
    return figure


def _panel(axes: Axes, rows: list[dict], value: Callable[[int, float], float]) -> None:
    sizes = [row["bytes"] for row in rows]
    for transport in TRANSPORTS:
        values = [value(row["bytes"], row["seconds"][transport]) for row in rows]
        axes.plot(sizes, values, label=transport, markersize=5, **LOOK[transport])
        rounds = [
            sorted(value(row["bytes"], seconds) for seconds in row["rounds"][transport])
            for row in rows
        ]
        least, most = [one[0] for one in rounds], [one[-1] for one in rounds]
        axes.fill_between(sizes, least, most, color=LOOK[transport]["color"], alpha=0.12, lw=0)
    axes.set_xscale("log")
    ticks = [tick for tick in TICKS if min(sizes) <= tick <= max(sizes)] or sizes
    axes.set_xticks(ticks, [size(tick).replace(" ", "\n") for tick in ticks])
    axes.minorticks_off()
