"""Drawings of scaling measurements: speedup, efficiency, parts of a step, ranks × threads.

Each function draws on given axes, so that a notebook decides how to arrange them. Arguments have
times in seconds, and drawings show milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from utils.figures import (
    BLUE,
    COMPUTING,
    EXPOSED,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PAPER,
    PINK,
    RED,
    rank_color,
)
from utils.figures.charts import chart, finish, legend_below
from utils.figures.shapes import cell

from .many_ranks import LINKS, RANKS, Survey

# Each series has its own color and its own marker.
LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PINK, "D"))

#: The color and the line of each machine of `many_ranks`.
MACHINES = dict(zip(LINKS, ((RED, "-"), (BLUE, "--"), (GREEN, "-.")), strict=True))

# Lowest, middle and highest value by rank count.
Bands = Mapping[int, Sequence[float]]
#: Speedup as a function of rank counts, or three functions: best, lowest and highest.
Law = Callable | tuple[Callable, ...]

_QUICK_TO_SLOW = LinearSegmentedColormap.from_list("quick to slow", ["#FFFFFF", "#F2C14E", RED])


def speedup(
    axes: Axes,
    series: Mapping[str, Bands],
    *,
    laws: Mapping[str, Law] | None = None,
    limit: Bands | None = None,
    cores: int | None = None,
) -> None:
    """Draw measured speedups with error bars, the ideal line, and curves of laws.

    Args:
        series: (low, middle, high) by rank count, for each name.
        laws: for some names, a law; of three functions, a band is filled between the last two.
        limit: the speedup of independent processes, which communicate nothing.
        cores: with more ranks than this, the background says that ranks share cores.
    """
    counts = sorted({p for bands in series.values() for p in bands})
    most = max(counts)
    ideal = np.linspace(1, most, 100)
    axes.plot(ideal, ideal, color=GREY, linestyle="--", linewidth=1.5, label="ideal: p")
    if limit:
        reached = [limit[p][1] for p in sorted(limit)]
        look = {"color": INK, "markersize": 8, "markeredgewidth": 2, "linewidth": 1.5}
        axes.plot(sorted(limit), reached, ":x", **look, label="limit: nothing sent")
    top = max(most, max(band[2] for bands in series.values() for band in bands.values()))
    for k, (name, bands) in enumerate(series.items()):
        color, marker = LOOKS[k % len(LOOKS)]
        _points(axes, bands, color, marker, name, shift=0.03 * k)
        if laws and name in laws:
            _curve(axes, laws[name], ideal, color)
    _rank_axis(axes, counts, cores, "bottom")
    axes.set_ylim(0, 1.3 * top)  # room for the legend
    axes.set_ylabel("speedup T(1) / T(p)")
    axes.legend(loc="upper left", fontsize=10, ncols=2)


def efficiency(axes: Axes, series: Mapping[str, Bands], *, cores: int | None = None) -> None:
    """Draw speedup divided by the rank count, which is ideally 1; arguments as in `speedup`."""
    counts = sorted({p for bands in series.values() for p in bands})
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1.5, label="ideal: 1")
    top = 1.0
    for k, (name, bands) in enumerate(series.items()):
        color, marker = LOOKS[k % len(LOOKS)]
        shares = {p: [value / p for value in band] for p, band in bands.items()}
        top = max(top, *(band[2] for band in shares.values()))
        _points(axes, shares, color, marker, name, shift=0.03 * k, joined=True)
    _rank_axis(axes, counts, cores, "top")
    axes.set(ylim=(0, 1.18 * top), ylabel="efficiency: speedup / p")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=9, ncols=3)


def _points(
    axes: Axes,
    bands: Bands,
    color: str,
    marker: str,
    name: str,
    shift: float,
    joined: bool = False,
) -> None:
    counts = np.array(sorted(bands))
    low, middle, high = np.array([bands[p] for p in counts], dtype=float).T
    line = {"color": color, "linestyle": "-" if joined else "none", "linewidth": 1.5}
    marks = {"marker": marker, "markersize": 7, "capsize": 4, "zorder": 3}
    places = counts + shift  # so that no error bar hides another
    axes.errorbar(places, middle, [middle - low, high - middle], label=name, **line, **marks)


def _curve(axes: Axes, law: Law, counts: np.ndarray, color: str) -> None:
    best, *edges = law if isinstance(law, tuple) else (law,)
    axes.plot(counts, best(counts), color=color, linewidth=1.5)
    if edges:
        lower, upper = (edge(counts) for edge in edges)
        axes.fill_between(counts, lower, upper, color=color, alpha=0.18, linewidth=0)


def _rank_axis(axes: Axes, counts: Sequence[int], cores: int | None, place: str) -> None:
    axes.set_xlabel("ranks p")
    axes.set_xticks(counts)
    right = max(counts) + 0.3
    if cores is not None and max(counts) > cores:
        axes.axvspan(cores + 0.3, right, color=PALE, zorder=0)
        x = (cores + 0.3 + right) / 2
        y = 0.03 if place == "bottom" else 0.97
        words = f"more ranks\nthan {cores} core{'s' * (cores > 1)}"
        look = {"ha": "center", "va": place, "color": GREY, "fontsize": 10}
        axes.text(x, y, words, transform=axes.get_xaxis_transform(), **look)
    axes.set_xlim(min(counts) - 0.3, right)


def parts(axes: Axes, step: Mapping[str, float], compute: Mapping[str, float]) -> None:
    """Draw stacked bars of a step's computation and the time that communication adds to it.

    Both arguments have seconds by name. The numbers above the bars come from `step`. If noise makes
    a step shorter than its computation alone, the bar has no communication.
    """
    names = list(step)
    whole = 1e3 * np.array([step[name] for name in names])
    below = np.minimum(whole, 1e3 * np.array([compute[name] for name in names]))
    places = np.arange(len(names))
    axes.bar(places, below, 0.6, color=COMPUTING, label="compute")
    axes.bar(places, whole - below, 0.6, below, color=EXPOSED, label="exposed communication")
    for place, total in zip(places, whole, strict=True):
        axes.text(place, total, f"{total:.1f}", ha="center", va="bottom")
    axes.set_xticks(places, names)
    axes.set(ylabel="time of a step [ms]", ylim=(0, 1.35 * whole.max()))
    axes.grid(False, axis="x")
    axes.legend(loc="upper left", fontsize=10)


def forecast(
    axes: Axes, predicted: Bands, measured: Mapping[int, Sequence[float]], cores: int | None = None
) -> None:
    """Draw a predicted band of step times over the rank counts, and measured times.

    Args:
        predicted: (low, middle, high) seconds by rank count.
        measured: seconds of each round by rank count.
        cores: as in :func:`speedup`.
    """
    counts = np.array(sorted(predicted))
    low, middle, high = 1e3 * np.array([predicted[p] for p in counts]).T
    axes.fill_between(counts, low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(counts, middle, "--", marker="s", color=BLUE, markersize=6, label="predicted")
    axes.plot(counts, middle[0] / counts, ":", color=GREY, label="ideal: T(1) / p")
    rounds = [np.percentile(measured[p], [25, 50, 75]) for p in sorted(measured)]
    quick, usual, slow = 1e3 * np.array(rounds).T
    look = {"fmt": "o", "color": INK, "capsize": 5, "markersize": 7, "label": "measured"}
    axes.errorbar(sorted(measured), usual, [usual - quick, slow - usual], **look)
    _rank_axis(axes, list(counts), cores, "top")
    axes.set(ylim=(0, 1.25 * max(high.max(), slow.max())), ylabel="time of a step [ms]")
    axes.legend(loc="center right", fontsize=10)


def matrix(
    axes: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], tuple[float, str]],
) -> None:
    """Draw a table of step times, from quick (white) to slow (red); empty cells are gray.

    Args:
        rows, columns: names of the rows and columns.
        cells: (seconds, a line of words) by (row, column).
    """
    slowest = max(seconds for seconds, _ in cells.values())
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            seconds, words = cells.get((row, column), (None, ""))
            middle = x + 0.5
            look = {"ha": "center", "va": "center"}
            if seconds is None:
                cell(axes, x, y + 0.5, 1, PALE, height=1)
                axes.text(middle, y + 0.5, "not run", color=GREY, **look)
                continue
            cell(axes, x, y + 0.5, 1, _QUICK_TO_SLOW(0.75 * seconds / slowest), height=1)
            bold = {"fontsize": 13, "fontweight": "bold"} | look
            axes.text(middle, y + 0.36, f"{seconds * 1e3:.1f} ms", **bold)
            axes.text(middle, y + 0.68, words, fontsize=10, **look)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    axes.grid(False)
    axes.spines[:].set_visible(False)


def domains(axes: Axes, cores: Sequence[int], owners: Mapping[tuple[int, int], int]) -> None:
    """Draw a node's NUMA domains and cores, with the number of the rank bound to each core.

    Args:
        cores: the number of cores of each domain.
        owners: rank by (domain, core of the domain).
    """
    left = 0.0
    for domain, count in enumerate(cores):
        cell(axes, left - 0.15, 0.675, count + 0.3, PALE, height=1.85)
        axes.text(left + count / 2, 1.28, f"NUMA domain {domain}", ha="center", va="center")
        for core in range(count):
            rank = owners.get((domain, core))
            color = PAPER if rank is None else rank_color(rank)
            words = f"core {core}" if rank is None else f"core {core}\nrank {rank}"
            look = {"height": 0.95, "fontsize": 9}
            cell(axes, left + core + 0.06, 0.475, 0.88, color, words, **look)
        left += count + 0.7
    axes.set(xlim=(-0.4, left - 0.3), ylim=(-0.4, 1.75))


def many_ranks(survey: Survey, size: int) -> Figure:
    """Draw efficiencies against the ranks, a line and the expected error for each machine."""
    figure, axes = chart(8.5, 4.4)
    errors = 1 + np.array(survey.errors)
    for name, (usual, _) in LINKS.items():
        color, line = MACHINES[name]
        middle = np.array(survey.efficiencies(name, size))
        band = middle / errors, (middle * errors).clip(max=1)
        axes.fill_between(RANKS, *band, color=color, alpha=0.15)
        label = f"{name}, spine {usual}:1" if usual > 1 else name
        axes.plot(RANKS, middle, line, color=color, label=label)
        if (p := survey.bend(name, size)) is not None:
            axes.plot(p, middle[RANKS.index(p)], "o", color=color, markersize=8)
    slow = survey.step[0] / np.add(survey.step, survey.straggling)
    axes.plot(RANKS, slow, ":", color=GREY, label="slow steps counted, no network")
    axes.axhline(0.5, color=INK, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [f"{p:,}" for p in RANKS], fontsize=9)
    axes.set(xlabel="ranks", ylabel="efficiency", ylim=(0, 1.05))
    axes.set_title(f"Your step: {size} times the weights, on devices {size} times as fast")
    legend_below(figure, axes, columns=2)
    return finish(figure, below=0.14)
