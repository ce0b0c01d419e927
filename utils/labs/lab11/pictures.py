"""Meshes of ranks, what sharding leaves on each of them, offload, and which mix when."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from utils.figures import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PINK,
    SKY,
    YELLOW,
    arrow,
    box,
    canvas,
    fit_limits,
    use_style,
)
from utils.labs.lab11 import mixes as formulas

#: Kinds of bytes on a rank, and their colours.
KINDS = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN}
#: One colour for each mix.
MIXES = dict(zip(formulas.NAMES, (SKY, GREEN, BLUE, YELLOW, ORANGE, PINK), strict=True))


def mesh(shape: tuple[int, int], names: tuple[str, str]) -> Figure:
    """Draw a mesh of ranks: replicas from top to bottom, a pipeline from left to right."""
    rows, columns = shape
    figure, axes = canvas(8, 1.2 * rows + 0.8)
    across, down = 3.2, 1.9
    both_ways = {"arrowstyle": "<|-|>", "color": GREEN, "lw": 1.6}
    for i, j in itertools.product(range(rows), range(columns)):
        x = across * j
        y = -down * i
        color = CYCLE[j % len(CYCLE)]
        box(axes, x, y, f"rank {i * columns + j}\n({i}, {j})", width=1.5, height=1, color=color)
        if j:
            left, right = x - across + 0.85, x - 0.85
            arrow(axes, (left, y + 0.15), (right, y + 0.15), color=BLUE)
            arrow(axes, (right, y - 0.2), (left, y - 0.2), color=ORANGE)
        if i:
            axes.annotate("", (x, y + 0.6), (x, y + down - 0.6), arrowprops=both_ways)
    end = across * (columns - 1)
    look = {"fontsize": 10, "ha": "center", "va": "bottom", "color": BLUE}
    axes.text(end / 2, 0.85, f"{names[1]}: activations →, ← their gradients", **look)
    text = f"{names[0]}:\ngradients of\nthe weights,\naveraged"
    axes.text(end + 1.1, -down * (rows - 1) / 2, text, va="center", color=GREEN, fontsize=10)
    axes.set_xlim(-1, end + 3.2)
    axes.set_ylim(-down * (rows - 1) - 0.7, 1.35)
    axes.set_aspect("equal")
    members = [range(i * columns, (i + 1) * columns) for i in range(rows)]
    words = [f"Row {i}: ranks {', '.join(map(str, row))}." for i, row in enumerate(members)]
    figure.alt_text = (
        f"A mesh of {rows} rows and {columns} columns of ranks. {' '.join(words)} Along a row, "
        f"{names[1]}: activations and their gradients. Along a column, {names[0]}: gradients of "
        "the weights are averaged."
    )
    return figure


def placements(nbytes: Mapping[str, float], seconds: Mapping[str, float]) -> Figure:
    """Draw the bytes that a step communicates on each axis, and the time of both placements."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), width_ratios=(2, 3))
    bars = left.bar(list(nbytes), [n / 1e6 for n in nbytes.values()], 0.55, color=[BLUE, GREEN])
    left.bar_label(bars, fmt="%.2f", padding=2)
    left.set_ylabel("all-reduced per step (MB)")
    left.set_title("A rank's tensors, by axis", fontsize=11)
    left.grid(axis="x", visible=False)
    bars = right.barh(list(seconds), [1e3 * s for s in seconds.values()], 0.55, color=SKY)
    right.bar_label(bars, fmt="%.0f", padding=3)
    right.invert_yaxis()
    right.set_xlabel("communication of a step (ms)")
    right.set_title("Which axis crosses the nodes", fontsize=11)
    right.grid(axis="y", visible=False)
    for axes in (left, right):
        axes.margins(x=0.15, y=0.15)
    figure.tight_layout()
    return figure


def memory(
    reports: Mapping[str, Mapping[str, float]], theory: Mapping[str, float], model: float
) -> Figure:
    """Draw bytes on a rank by kind, with the peak and the theory; and what it sends in a step.

    Args:
        reports: by name, bytes of each of :data:`KINDS`, "peak" and "sent".
        theory: by name, the sum of the kinds that it should be.
        model: bytes of the model.

    Raises:
        ValueError: nothing was measured.
    """
    if not reports:
        raise ValueError("nothing to draw: has a cell above measured anything?")
    use_style()
    size = (10, 0.62 * len(reports) + 1.6)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, width_ratios=(5, 2), sharey=True)
    names = list(reports)
    rows = range(len(reports))
    start = np.zeros(len(names))
    for kind, color in KINDS.items():
        sizes = np.array([reports[name][kind] / 1e6 for name in names])
        left.barh(names, sizes, 0.55, left=start, color=color, label=kind)
        start += sizes
    hollow = {"markersize": 9, "markerfacecolor": "none", "label": "by the table"}
    left.plot([theory[name] / 1e6 for name in names], rows, "o", color=INK, **hollow)
    peaks = [report["peak"] / 1e6 for report in reports.values()]
    left.plot(peaks, rows, "D", color=INK, markersize=7, label="peak")
    left.set_xlabel("bytes on a rank (MB)")
    left.invert_yaxis()
    left.grid(axis="y", visible=False)
    sent = right.barh(names, [reports[name]["sent"] / model for name in names], 0.55, color=SKY)
    right.bar_label(sent, fmt="%.2f", padding=3)
    right.set_xlabel("sent per step\n(times the model)")
    right.margins(x=0.25)
    right.grid(axis="y", visible=False)
    figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncols=5, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    words = []
    for name, report in reports.items():
        kinds = ", ".join(f"{report[kind] / 1e6:.1f} MB {kind}" for kind in KINDS)
        words.append(
            f"{name}: {kinds}; by the table {theory[name] / 1e6:.1f} MB; peak "
            f"{report['peak'] / 1e6:.1f} MB; sends {report['sent'] / model:.2f} times the model."
        )
    figure.alt_text = f"Bytes on a rank. {' '.join(words)}"
    return figure


def offload() -> Figure:
    """Draw what is on the host, what is on the device, and what crosses the bus."""
    figure, axes = canvas(9, 2.6)
    host = "host: all weights,\nAdam's state;\nupdates"
    device = "device: one layer's weights\nand the next one's;\nforward, backward"
    box(axes, 0, 0, host, width=3, height=1.9, color=GREEN)
    box(axes, 8, 0, device, width=4, height=1.9, color=BLUE)
    arrow(axes, (1.65, 0.4), (5.85, 0.4), "weights, layer by layer", color=BLUE)
    arrow(axes, (5.85, -0.4), (1.65, -0.4), color=ORANGE)
    look = {"ha": "center", "va": "top", "color": ORANGE, "fontsize": 10}
    axes.text(3.75, -0.52, "gradients, one by one", **look)
    axes.text(3.75, 1.05, "bus", ha="center", weight="bold")
    fit_limits(axes, [-1.2, 9.7], [-0.6, 0.7])
    figure.alt_text = (
        "The host holds all weights and Adam's state, and updates. The device holds the weights "
        "of one layer and the next, and does forward and backward. Over the bus between them "
        "weights go to the device layer by layer, and gradients back one by one."
    )
    return figure


def work(charts: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> Figure:
    """Draw who works when: title → lane → spans (start, end) in seconds of one clock.

    Raises:
        ValueError: a chart has no spans.
    """
    use_style()
    limits = {title: _limits(title, lanes) for title, lanes in charts.items()}
    longest = max(last - first for first, last in limits.values())
    size = (9, 1.75 * len(charts) + 0.6)
    figure, rows = plt.subplots(len(charts), 1, squeeze=False, sharex=True, figsize=size)
    totals = [f"{title}: {1e3 * (last - first):.0f} ms." for title, (first, last) in limits.items()]
    of_lanes = []
    for axes, (title, lanes) in zip(rows[:, 0], charts.items(), strict=True):
        first, last = limits[title]
        for row, (name, spans) in enumerate(lanes.items()):
            axes.add_patch(Rectangle((0, row - 0.4), 1e3 * (last - first), 0.8, color=PALE, lw=0))
            look = {"facecolor": CYCLE[row], "edgecolor": INK, "linewidth": 0.5}
            for start, end in spans:
                corner = (1e3 * (start - first), row - 0.4)
                axes.add_patch(Rectangle(corner, 1e3 * (end - start), 0.8, **look))
            busy = 1e3 * sum(end - start for start, end in spans)
            of_lanes.append(f"{title}, {name}: {len(spans)} times, {busy:.0f} ms in all.")
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_title(f"{title}: {1e3 * (last - first):.0f} ms", fontsize=11)
        axes.set_xlim(0, 1010 * longest)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
    rows[-1, 0].set_xlabel("time (ms)")
    figure.tight_layout()
    figure.alt_text = " ".join([*totals, *of_lanes])
    return figure


def _limits(title: str, lanes: Mapping[str, Sequence[Sequence[float]]]) -> tuple[float, float]:
    """Return when the first span of a chart begins, and when the last one ends."""
    spans = [span for lane in lanes.values() for span in lane]
    if not spans:
        raise ValueError(f"{title}: nothing to draw. Has the cell above measured anything?")
    return min(start for start, _ in spans), max(end for _, end in spans)


def mixes(machine: formulas.Machine) -> Figure:
    """Draw a chart over model size and number of devices: the fastest mix that fits."""
    use_style()
    sizes = np.logspace(8, 12.5, 91)
    devices = [2**k for k in range(13)]
    names = [*MIXES, formulas.DOES_NOT_FIT]
    best = [[names.index(formulas.fastest(p, n, machine)) for p in sizes] for n in devices]
    figure, axes = plt.subplots(figsize=(9, 4.6))
    colors = ListedColormap([*MIXES.values(), PALE])
    edges = [2 ** (k - 0.5) for k in range(14)]
    across = np.logspace(8 - 0.025, 12.5 + 0.025, 92)
    axes.pcolormesh(across, edges, best, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_yticks(devices[::2], [str(n) for n in devices[::2]])
    axes.set_xlabel("parameters of the model")
    axes.set_ylabel("devices")
    axes.set_title(f"The fastest mix that fits · devices of {machine.memory / 1e9:.0f} GB")
    axes.grid(visible=False)
    used = sorted({k for row in best for k in row})
    patches = [Patch(facecolor=colors(k), edgecolor=GREY, label=names[k]) for k in used]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    words = []
    for k in (0, 3, 6, 10):
        largest = dict(zip(best[k], sizes, strict=True))  # the last size of each mix
        ranges = ", ".join(f"{names[mix]} up to {size:.0e}" for mix, size in largest.items())
        words.append(f"{devices[k]} devices: {ranges} parameters.")
    figure.alt_text = f"The fastest mix that fits. {' '.join(words)}"
    return figure
