"""Pictures of lab 15: what a block keeps, memory over time, the roofline, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from utils.figures import BLUE, GREY, INK, ORANGE, PALE, SERIES
from utils.figures.charts import chart, finish, panels

from .formulas import kept_parts


def kept_of_block(samples: int, tokens: int, width: int, heads: int, hidden: int) -> Figure:
    """Draw the megabytes that each operation of a block keeps, in float32."""
    parts = {
        name: 4e-6 * numbers
        for name, numbers in kept_parts(samples, tokens, width, heads, hidden).items()
    }
    figure, axes = chart(8, 3.6)
    bars = axes.barh(list(parts), list(parts.values()), 0.6, color=BLUE)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("kept for backward (MB)")
    return finish(figure)


def memory_over_time(
    history: Sequence[tuple[float, int]], phases: Mapping[str, float], line: str, weights: int
) -> Figure:
    """Draw the bytes in use during a training step.

    Args:
        history: (seconds, bytes) as in `utils.labs.shared.memory.Meter.history`.
        phases: when each phase of the step began, in seconds.
        line: the line of code that made the peak.
        weights: bytes of the parameters.
    """
    phases = dict(sorted(phases.items(), key=lambda phase: phase[1]))
    start = history[0][0]
    times = [1e3 * (t - start) for t, _ in history]
    sizes = [n / 1e6 for _, n in history]
    figure, axes = chart(8.5, 3.6)
    axes.step(times, sizes, where="post", color=BLUE, linewidth=1.6)
    axes.axhline(weights / 1e6, color=GREY, linestyle="--")
    axes.text(times[-1], weights / 1e6, "weights", ha="right", va="bottom", fontsize=9)
    edges = [*(1e3 * (t - start) for t in phases.values()), times[-1]]
    for k, (name, left, right) in enumerate(zip(phases, edges, edges[1:], strict=False)):
        axes.axvspan(left, right, color=PALE if k % 2 else "white", zorder=0)
        axes.text(left, 1.02 * max(sizes), f" {name}", fontsize=9, va="bottom")
    peak = max(range(len(sizes)), key=sizes.__getitem__)
    axes.plot(times[peak], sizes[peak], "o", color=ORANGE)
    axes.set_xlabel("time (ms)")
    axes.set_ylabel("bytes in use (MB)")
    axes.set_ylim(0, 1.15 * max(sizes))
    axes.set_title(f"peak {sizes[peak]:.1f} MB at  {line[:60]}", fontsize=10, loc="left")
    words = (
        f"Bytes in use during a step, whose phases are {', '.join(phases)}. The memory grows from "
        f"{sizes[0]:.1f} MB to {sizes[peak]:.1f} MB, at the line {line!r}, and falls again."
    )
    return finish(figure, words)


def roofline(peak: float, bandwidth: float, points: Mapping[str, tuple[float, float]]) -> Figure:
    """Draw a machine's roofline, and operations below it.

    Args:
        peak, bandwidth: FLOP/s, and bytes per second.
        points: name → (FLOPs per byte, measured FLOP/s).
    """
    figure, axes = chart(7.5, 3.8)
    ridge = peak / bandwidth
    far = max(10 * ridge, *(2 * x for x, _ in points.values()))
    near = min(0.1, *(0.5 * x for x, _ in points.values()))
    roof = [near * bandwidth / 1e9, peak / 1e9, peak / 1e9]
    axes.loglog([near, ridge, far], roof, color=INK, linewidth=2)
    for (name, (x, y)), color in zip(points.items(), SERIES, strict=False):
        axes.plot(x, y / 1e9, "o", color=color, markersize=9, label=name)
    axes.legend(fontsize=9, loc="lower right")
    axes.set_xlabel("intensity (FLOPs per byte)")
    axes.set_ylabel("GFLOP/s")
    words = f"The roofline of this machine over FLOPs per byte, with its ridge at {ridge:.2g}. "
    words += " ".join(f"{n}: {y / 1e9:.2g} GFLOP/s at {x:.2g}." for n, (x, y) in points.items())
    return finish(figure, words)


def curves(
    panels_of: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    x: str,
    y: str,
    log: str = "",
) -> Figure:
    """Draw panels of lines: title → name → (xs, ys); `log` names the logarithmic axes, "xy"."""
    figure, grid = panels(4.2 * len(panels_of) + 0.6, 3.4, columns=len(panels_of))
    for axes, (title, lines) in zip(grid, panels_of.items(), strict=True):
        looks = zip(lines.items(), SERIES, ("-", "--", ":", "-."), strict=False)
        for (name, (xs, ys)), color, style in looks:
            axes.plot(xs, ys, style, color=color, label=name, marker=".", linewidth=2)
        if "x" in log:
            axes.set_xscale("log")
        if "y" in log:
            axes.set_yscale("log")
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(x)
        axes.legend(fontsize=9)
    grid[0].set_ylabel(y)
    return finish(figure)
