"""Pictures of lab 11: meshes of ranks, shards and their memory, offload, and the best mix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from utils.figures import (
    BLUE,
    COMMUNICATING,
    COMPUTING,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PINK,
    SERIES,
    SKY,
    YELLOW,
    tint,
)
from utils.figures.charts import add_lanes, chart, finish, keys, legend_beside, panels
from utils.figures.shapes import arrow, canvas, cell, frame, link, rank_box
from utils.forecast.machines import Machine

from . import mix_search
from .mix_chart import BATCH, best_kind
from .step_costs import axes_of, groups, levels
from .transformer import Mix

#: Kinds of bytes on a rank, and their colors.
KINDS = dict(zip(("parameters", "gradients", "optimizer state"), SERIES, strict=False))
#: One color for each kind of mix.
COLORS = (SKY, tint(GREEN, 0.35), tint(GREEN, 0.65), GREEN, YELLOW, BLUE, ORANGE, PINK)
MIXES = dict(zip(mix_search.KINDS, COLORS, strict=True))


def mesh(shape: tuple[int, int], names: tuple[str, str]) -> Figure:
    """Draw a mesh of ranks: replicas from top to bottom, a pipeline from left to right."""
    rows, columns = shape
    _, axes = canvas(8, 1.2 * rows + 0.8)
    across, down = 3.2, 1.9
    for i, j in itertools.product(range(rows), range(columns)):
        x = across * j
        y = -down * i
        rank = i * columns + j
        rank_box(axes, x, y, rank, f"rank {rank}\n({i}, {j})", width=1.5, height=1)
        if j:
            left, right = x - across + 0.85, x - 0.85
            arrow(axes, (left, y + 0.15), (right, y + 0.15), color=COMMUNICATING)
            arrow(axes, (right, y - 0.2), (left, y - 0.2), color=COMMUNICATING, style=":")
        if i:
            link(
                axes, (x, y + down - 0.6), (x, y + 0.6), "<|-|>", color=COMMUNICATING, linewidth=2.6
            )
    end = across * (columns - 1)
    look = {"fontsize": 10, "ha": "center", "va": "bottom", "color": COMMUNICATING}
    axes.text(end / 2, 0.85, f"{names[1]}: activations →, ← their gradients", **look)
    text = f"{names[0]}:\ngradients of\nthe weights,\naveraged"
    axes.text(
        end + 1.1, -down * (rows - 1) / 2, text, va="center", color=COMMUNICATING, fontsize=10
    )
    members = [range(i * columns, (i + 1) * columns) for i in range(rows)]
    of_rows = [f"Row {i}: ranks {', '.join(map(str, row))}." for i, row in enumerate(members)]
    words = (
        f"A mesh of {rows} rows and {columns} columns of ranks. {' '.join(of_rows)} Along a row, "
        f"{names[1]}: activations and their gradients. Along a column, {names[0]}: gradients of "
        "the weights are averaged."
    )
    bottom = -down * (rows - 1) - 0.7
    return frame(axes, (-1, end + 3.2), (bottom, 1.35), words, equal=True)


def placements(nbytes: Mapping[str, float], seconds: Mapping[str, float]) -> Figure:
    """Draw the bytes that a step communicates on each axis, and the time of both placements."""
    figure, (left, right) = panels(9, 3, columns=2, width_ratios=(2, 3))
    bars = left.bar(list(nbytes), [n / 1e6 for n in nbytes.values()], 0.55, color=COMMUNICATING)
    left.bar_label(bars, fmt="%.2f", padding=2)
    left.set_ylabel("all-reduced per step (MB)")
    left.set_title("A rank's tensors, by axis", fontsize=11)
    left.grid(axis="x", visible=False)
    bars = right.barh(list(seconds), [1e3 * s for s in seconds.values()], 0.55, color=COMMUNICATING)
    right.bar_label(bars, fmt="%.0f", padding=3)
    right.invert_yaxis()
    right.set_xlabel("communication of a step (ms)")
    right.set_title("Which axis crosses the nodes", fontsize=11)
    right.grid(axis="y", visible=False)
    for axes in (left, right):
        axes.margins(x=0.15, y=0.15)
    return finish(figure)


def memory(
    reports: Mapping[str, Mapping[str, float]], theory: Mapping[str, float], model: float
) -> Figure:
    """Draw a rank's bytes by kind, with their peak and the theory, and what it sends in a step.

    Args:
        reports: name → bytes of each of :data:`KINDS`, "peak" and "sent".
        theory: name → the expected sum of the kinds.
        model: bytes of the model.

    Raises:
        ValueError: nothing was measured.
    """
    if not reports:
        raise ValueError("There is nothing to draw. First run the cell above that measures.")
    look = {"width_ratios": (5, 2), "sharey": True}
    figure, (left, right) = panels(9, 0.62 * len(reports) + 1.6, columns=2, **look)
    names = list(reports)
    rows = range(len(reports))
    start = np.zeros(len(names))
    for kind, color in KINDS.items():
        sizes = np.array([reports[name][kind] / 1e6 for name in names])
        left.barh(names, sizes, 0.55, left=start, color=color, label=kind)
        start += sizes
    hollow = {"markersize": 9, "markerfacecolor": "none", "label": "from the table"}
    left.plot([theory[name] / 1e6 for name in names], rows, "o", color=INK, **hollow)
    peaks = [report["peak"] / 1e6 for report in reports.values()]
    left.plot(peaks, rows, "D", color=INK, markersize=7, label="peak")
    left.set_xlabel("bytes on a rank (MB)")
    left.invert_yaxis()
    left.grid(axis="y", visible=False)
    shares = [reports[name]["sent"] / model for name in names]
    sent = right.barh(names, shares, 0.55, color=COMMUNICATING)
    right.bar_label(sent, fmt="%.2f", padding=3)
    right.set_xlabel("sent per step\n(times the model)")
    right.margins(x=0.25)
    right.grid(axis="y", visible=False)
    figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncols=5, fontsize=10)
    words = []
    for name, report in reports.items():
        kinds = ", ".join(f"{report[kind] / 1e6:.1f} MB {kind}" for kind in KINDS)
        words.append(
            f"{name}: {kinds}; from the table {theory[name] / 1e6:.1f} MB; peak "
            f"{report['peak'] / 1e6:.1f} MB; sends {report['sent'] / model:.2f} times the "
            "model."
        )
    above = 0.35 / figure.get_figheight()
    return finish(figure, f"Bytes on a rank. {' '.join(words)}", above=above)


def offload() -> Figure:
    """Draw what is on the host, what is on the device, and what crosses the bus."""
    _, axes = canvas(9, 2.6)
    host = "host: all weights,\nAdam's state;\nupdates"
    device = "device: one layer's weights\nand the next one's;\nforward, backward"
    rank_box(axes, 0, 0, 1, host, width=3, height=1.9)
    rank_box(axes, 8, 0, 0, device, width=4, height=1.9)
    arrow(axes, (1.65, 0.4), (5.85, 0.4), "weights, layer by layer", color=COMMUNICATING)
    arrow(axes, (5.85, -0.4), (1.65, -0.4), color=COMMUNICATING, style=":")
    look = {"ha": "center", "va": "top", "color": COMMUNICATING, "fontsize": 10}
    axes.text(3.75, -0.52, "gradients, one by one", **look)
    axes.text(3.75, 1.05, "bus", ha="center", weight="bold")
    words = (
        "The host holds all weights and Adam's state, and does the updates. The device holds the "
        "weights of one layer and of the next one, and does forward and backward. The bus between "
        "them carries weights to the device layer by layer, and gradients back one by one."
    )
    return frame(axes, (-2.0, 10.5), (-1.4, 1.5), words, equal=True)


def offload_replicas(traffic: Mapping[str, float], model: float) -> Figure:
    """Draw two devices, each with its host, and what travels between them in a step.

    Args:
        traffic: recorded bytes of "weights", "gradients" (over a bus) and "averaged" (by a host).
        model: bytes of the model.
    """
    _, axes = canvas(9, 3.3)
    times = {what: f"{nbytes / model:.2f} Ψ" for what, nbytes in traffic.items()}
    for replica, x in enumerate((0, 6.9)):
        device, host = 2 * replica, 2 * replica + 1
        half = f"device of replica {replica}:\nforward, backward on its half"
        whole = f"host of replica {replica}:\nall weights, Adam's state"
        rank_box(axes, x, 0, device, half, width=4.9, height=1.0)
        rank_box(axes, x, 3, host, whole, width=4.9, height=1.0)
        arrow(axes, (x - 0.3, 2.4), (x - 0.3, 0.6), color=COMMUNICATING)
        arrow(axes, (x + 0.3, 0.6), (x + 0.3, 2.4), color=COMMUNICATING, style=":")
        look = {"va": "center", "color": COMMUNICATING, "fontsize": 10}
        axes.text(x - 0.45, 1.5, f"weights\n{times['weights']}", ha="right", **look)
        axes.text(x + 0.45, 1.5, f"gradients\n{times['gradients']}", ha="left", **look)
    link(axes, (2.55, 3), (4.35, 3), "<|-|>", color=COMMUNICATING, linewidth=2.6)
    averaged = f"all_reduce\n{times['averaged']}"
    axes.text(3.45, 3.2, averaged, ha="center", va="bottom", color=COMMUNICATING, fontsize=10)
    words = (
        "Two replicas, each a device below its host. In a step, a host sends "
        f"{times['weights']} of weights to its device and receives {times['gradients']} of "
        f"gradients from it. The hosts average {times['averaged']} of gradients by all_reduce. The "
        "devices exchange nothing with each other. Ψ is the size of the model."
    )
    return frame(axes, (-2.7, 9.6), (-0.7, 4.2), words, equal=True)


def work(charts: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> Figure:
    """Draw who works when: title → lane → spans (start, end) in seconds of one clock.

    Lanes whose names begin with "weights" or "gradients" communicate.

    Raises:
        ValueError: a chart has no spans.
    """
    limits = {title: _limits(title, lanes) for title, lanes in charts.items()}
    longest = max(last - first for first, last in limits.values())
    figure, rows = panels(9, 1.75 * len(charts) + 0.6, rows=len(charts), sharex=True)
    totals = [f"{title}: {1e3 * (last - first):.0f} ms" for title, (first, last) in limits.items()]
    of_lanes = []
    for axes, total, (title, lanes) in zip(rows, totals, charts.items(), strict=True):
        first, last = limits[title]
        add_lanes(axes, list(lanes), 1010 * longest)
        axes.set_title(total, fontsize=11)
        for row, (name, spans) in enumerate(lanes.items()):
            color = COMMUNICATING if name.startswith(("weights", "gradients")) else COMPUTING
            cell(axes, 0, row, 1e3 * (last - first), PALE, linewidth=0)
            for start, end in spans:
                left = 1e3 * (start - first)
                cell(axes, left, row, 1e3 * (end - start), color, linewidth=0.5)
            busy = 1e3 * sum(end - start for start, end in spans)
            of_lanes.append(f"{title}, {name}: {len(spans)} times, {busy:.0f} ms in all.")
    rows[-1].set_xlabel("time (ms)")
    return finish(figure, " ".join([*(f"{total}." for total in totals), *of_lanes]))


def _limits(title: str, lanes: Mapping[str, Sequence[Sequence[float]]]) -> tuple[float, float]:
    """Return when the first span of a chart begins, and when the last one ends."""
    spans = [span for lane in lanes.values() for span in lane]
    if not spans:
        raise ValueError(f"{title}: There is nothing to draw. First run the cell above.")
    return min(start for start, _ in spans), max(end for _, end in spans)


def mixes(machine: Machine, batch: int = BATCH, sequence: int = 2048) -> Figure:
    """Draw a chart over model size and number of devices: the fastest mix that fits."""
    sizes = np.logspace(8, 13, 21)
    devices = [2**k for k in range(machine.devices.bit_length())]
    names = [*MIXES, mix_search.DOES_NOT_FIT]
    best = [
        [names.index(best_kind(float(p), n, machine, batch, sequence)) for p in sizes]
        for n in devices
    ]
    figure, axes = chart(9, 4.6)
    colors = ListedColormap([*MIXES.values(), PALE])
    edges = [2 ** (k - 0.5) for k in range(len(devices) + 1)]
    across = np.logspace(8 - 0.125, 13 + 0.125, 22)
    axes.pcolormesh(across, edges, best, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_yticks(devices[::2], [str(n) for n in devices[::2]])
    axes.set(xlabel="parameters of the model", ylabel="devices")
    axes.set_title(f"The fastest mix that fits · {machine.device.name}, machine {machine.name!r}")
    axes.grid(visible=False)
    used = sorted({k for row in best for k in row})
    legend_beside(axes, handles=keys({names[k]: colors(k) for k in used}, edgecolor=GREY))
    words = []
    for n, row in list(zip(devices, best, strict=True))[::3]:
        largest = dict(zip(row, sizes, strict=True))  # the last size of each mix
        ranges = ", ".join(f"{names[mix]} up to {size:.0e}" for mix, size in largest.items())
        words.append(f"{n} devices: {ranges} parameters.")
    return finish(figure, f"The fastest mix that fits. {' '.join(words)}")


def mapping(mixes: Mapping[str, Mix], machine: Machine) -> Figure:
    """Draw which devices are the group of rank 0 on each axis: a row is a unit below the top."""
    columns = ("tensor", "data", "pipeline")
    figure, all_axes = panels(9, 2.5 * len(mixes) + 0.3, rows=len(mixes), columns=3)
    node, row = machine.sizes[0], [1, *machine.sizes][-2]
    unit, words = machine.levels[-2].name if len(machine.levels) > 1 else "device", []
    for (name, mix), line in zip(mixes.items(), np.reshape(all_axes, (-1, 3)), strict=True):
        crossed = levels(mix, machine)
        for axis, axes in zip(columns, line, strict=True):
            members = groups(mix.ranks, axes_of(mix, (axis,)))[0].tolist()
            grid = np.zeros(machine.devices)
            grid[members] = 1
            axes.pcolormesh(grid.reshape(-1, row), cmap=ListedColormap([PALE, COMMUNICATING]))
            axes.vlines(range(node, row, node), 0, machine.devices // row, color=GREY, linewidth=1)
            axes.set(xticks=[], yticks=[], xlabel=f"devices of a {unit}")
            axes.set_ylabel(f"{name}\none row: a {unit}" if axis == "tensor" else "")
            axes.invert_yaxis()
            axes.grid(visible=False)
            level = f"{len(members)} ranks: {crossed[axis]}" if axis in crossed else "1 rank"
            axes.set_title(f"{axis}, {level}", fontsize=11)
            first = ", ".join(map(str, members[:3])) + (" and so on" if len(members) > 3 else "")
            words.append(f"{name}: {axis}, {level}, numbers {first}.")
    return finish(figure, f"The group of rank 0 on each axis. {' '.join(words)}")
