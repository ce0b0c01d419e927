"""A picture of the ranks that wait for each other, with its words."""

from __future__ import annotations

import math

from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from torch_mpi.protocol.diagnosis import Diagnosis, arrows

from . import forms
from .palette import GREY, INK, PALE, PAPER, RED, WAITING_LOOK, use_style
from .shapes import arrow, fit_limits

Point = tuple[float, float]

_RADIUS = 0.3
# Up to this many ranks, the picture has one size.
_FEW = 8


def show(diagnosis: Diagnosis, size: int) -> None:
    """Show the picture in the notebook, with its words."""
    data, metadata = forms.bundle(picture(diagnosis, size))
    display(data, metadata=metadata, raw=True)


def picture(diagnosis: Diagnosis, size: int) -> Figure:
    """Return the picture: a circle per rank, and an arrow from each rank that waits.

    Args:
        size: number of ranks.
    """
    use_style()
    figure = Figure(figsize=_inches(size), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    places = _places(size)
    _draw_waits(axes, diagnosis, places)
    waiting = {rank for rank, _ in diagnosis.edges}
    for rank, place in enumerate(places):
        look = WAITING_LOOK if rank in waiting else {"facecolor": PALE}
        axes.add_patch(Circle(place, _RADIUS, zorder=3, **{"edgecolor": INK} | look))
        axes.add_patch(Circle(place, _RADIUS, zorder=3, facecolor="none", edgecolor=INK))
        card = {"boxstyle": "circle,pad=0.2", "facecolor": look["facecolor"], "edgecolor": "none"}
        words = {"ha": "center", "va": "center", "zorder": 4, "bbox": card}
        axes.text(*place, f"{rank}", fontsize=12 if size <= _FEW else 8, **words)
    xs, ys = zip(*places, strict=True)
    loops = any(rank == other for rank, other in diagnosis.edges)
    fit_limits(axes, xs, ys, margin=1.1 if loops else 0.55)
    look = {"transform": axes.transAxes, "fontsize": 9, "color": GREY}
    axes.text(0.98, 0.03, "arrow: waits for", ha="right", **look)
    figure.alt_text = _in_words(diagnosis, size)
    return figure


def _draw_waits(axes: Axes, diagnosis: Diagnosis, places: list[Point]) -> None:
    in_cycle = set(zip(diagnosis.cycle, diagnosis.cycle[1:], strict=False))
    for rank, other in diagnosis.edges:
        color = RED if (rank, other) in in_cycle or rank == other else INK
        if rank == other:
            _loop(axes, places[rank], color)
            continue
        start, end = _shortened(places[rank], places[other])
        both_ways = (other, rank) in diagnosis.edges
        arrow(axes, start, end, color=color, bend=0.25 if both_ways else 0.0)


def _in_words(diagnosis: Diagnosis, size: int) -> str:
    waits = "; ".join(
        f"rank {rank} waits for {'itself' if rank == other else f'rank {other}'}"
        for rank, other in diagnosis.edges
    )
    cycle = f" {arrows(diagnosis.cycle)} is a cycle." if diagnosis.cycle else ""
    return f"A circle for each of {size} ranks, an arrow for each wait: {waits}.{cycle}"


def _inches(size: int) -> tuple[float, float]:
    """Return width and height; many ranks need a larger ring, or their circles would be dots."""
    if size <= _FEW:
        return 4.2, 0.9 + 2.1 * min(1.0, size / 4)
    width = min(9.0, 4.2 + 0.2 * (size - _FEW))
    return width, 0.5 + width / 1.6


def _places(size: int) -> list[Point]:
    if size == 2:
        return [(0.0, 0.0), (2.0, 0.0)]
    radius = max(1.0, size * (0.32 if size <= _FEW else 0.22))
    turns = [math.tau * k / size for k in range(size)]
    return [(1.6 * radius * math.sin(t), radius * math.cos(t)) for t in turns]


def _shortened(start: Point, end: Point) -> tuple[Point, Point]:
    """Return the part of a line that is outside the circles at its ends."""
    across, up = end[0] - start[0], end[1] - start[1]
    length = math.hypot(across, up)
    dx, dy = across / length * (_RADIUS + 0.05), up / length * (_RADIUS + 0.05)
    return (start[0] + dx, start[1] + dy), (end[0] - dx, end[1] - dy)


def _loop(axes: Axes, place: Point, color: str) -> None:
    """Draw an arrow from a circle to itself, away from the middle of the ring."""
    across, up = place
    outward = math.atan2(up, across) if (across, up) != (0.0, 0.0) else math.pi / 2
    ends = [
        (place[0] + reach * math.cos(outward + turn), place[1] + reach * math.sin(outward + turn))
        for turn, reach in ((0.6, _RADIUS + 0.02), (-0.6, _RADIUS + 0.05))
    ]
    arrow(axes, *ends, color=color, bend=-1.9)
