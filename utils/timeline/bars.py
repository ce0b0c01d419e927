"""The figure of a comparison: a bar per run."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .. import figures
from . import phrases
from .picture import LOOK

_INCHES_PER_RUN, _AROUND = 0.5, 1.35
# Ranks that wait for nobody, as their part of the run is over.
_OVER = {"facecolor": "none", "edgecolor": figures.GREY, "linestyle": ":", "linewidth": 0.8}


def figure(times: list[dict], states: dict[str, str], width: float) -> Figure:
    """Draw bars below each other.

    Args:
        times: of each run its name under ``run``, ``seconds``, ``ideal``, and the mean of its ranks
            under the keys of states.
        states: key of a row by the name of the bar's part.
        width: inches.
    """
    figures.use_style()
    high = _AROUND + _INCHES_PER_RUN * len(times)
    made, axes = plt.subplots(figsize=(width, high), layout="constrained")
    plt.close(made)
    unit, one = phrases.time_unit(max(row["seconds"] for row in times))
    for place, row in enumerate(times):
        left = 0.0
        for state, key in states.items():
            face, edge, hatch = LOOK[state]
            length = row[key] / one
            axes.barh(
                place, length, left=left, height=0.55, facecolor=face, edgecolor=edge, hatch=hatch,
                linewidth=0.6 if edge != "none" else 0,
            )  # fmt: skip
            left += length
        rest = row["seconds"] / one - left
        axes.barh(place, rest, left=left, height=0.55, **_OVER)
        if row["ideal"] is not None:
            at = row["ideal"] / one
            axes.plot([at, at], [place - 0.38, place + 0.38], color=figures.INK, linewidth=2)
    axes.set_yticks(range(len(times)), [row["run"] for row in times])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"mean of the ranks [{unit}]")
    axes.set_title("Where the time went")
    made.legend(handles=_handles(states), loc="outside lower left", ncols=5, fontsize=8.5)
    return made


def _handles(states: dict[str, str]) -> list:
    boxes = []
    for state in states:
        face, edge, hatch = LOOK[state]
        edge = None if edge == "none" else edge
        boxes.append(Patch(facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.6, label=state))
    over = Patch(label="over already", **_OVER)
    ideal = Line2D([], [], color=figures.INK, linewidth=2, label="end on an ideal network")
    return [*boxes, over, ideal]
