"""Drawings of replicas in sync: who copies what to whom, and which bucket leaves when.

Sizes are bytes, times are seconds; the axes show MB (10⁶ bytes) and milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.figures import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PAPER,
    PINK,
    RED,
    SKY,
    YELLOW,
    arrow,
    box,
    canvas,
    chart,
    fit_limits,
    name_rows,
    use_style,
    write_beside,
)

RANK_COLORS = (BLUE, ORANGE, GREEN, PINK)
COMPUTING = "#D3D3D3"


def initial_broadcast(n: int) -> Figure:
    """Draw `n` replicas that start from different seeds, and what a broadcast makes of them."""
    figure, axes = canvas(10, 0.55 + 0.62 * n)
    for r in range(n):
        y = -1.1 * r
        own = RANK_COLORS[r % len(RANK_COLORS)]
        first = RANK_COLORS[0]
        axes.text(-2.2, y, f"rank {r}", ha="right", va="center")
        box(axes, 0, y, f"weights of seed {r}", width=3.8, height=0.8, color=own)
        box(axes, 10, y, "weights of seed 0", width=3.8, height=0.8, color=first)
        arrow(axes, (2.0, 0), (7.9, y), "broadcast" if r == 0 else "", color=BLUE)
    axes.text(0, 0.75, "before", ha="center")
    axes.text(10, 0.75, "after", ha="center")
    fit_limits(axes, [-4, 12], [-1.1 * (n - 1) - 0.4, 1.0], margin=0.2)
    figure.alt_text = (
        f"Before: each of {n} ranks has weights of a seed of its own. A broadcast goes from rank 0 "
        "to all. After: every rank has the weights of seed 0."
    )
    return figure


def gradient_flow(layers: int = 4) -> Figure:
    """Draw a step with all_reduces after backward, and one with all_reduces during backward.

    A drawing, not a measurement: each layer takes one unit in backward, and one on the network.
    """
    figure, axes = canvas(11, 4.0)
    _flow_row(axes, 0, "by hand", layers, [layers + k for k in range(layers)])
    _flow_row(axes, -3.4, "DDP", layers, [1 + k for k in range(layers)])
    axes.annotate("", (12.6, -5.35), (2.4, -5.35), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.text(7.5, -5.75, "time", ha="center", va="center", color=GREY)
    fit_limits(axes, [-2.6, 13.4], [-5.8, 0.5], margin=0.2)
    figure.alt_text = (
        f"Two steps over time, forward, then the gradients of {layers} layers from the last to the "
        "first, and the network below. By hand the network begins when backward is over. With DDP "
        "each gradient leaves as soon as it is there, so all but the last are hidden, and the "
        "optimizer's step comes earlier."
    )
    return figure


def _flow_row(axes: Axes, y: float, name: str, layers: int, leaves: Sequence[int]) -> None:
    """Draw backward, and the network below.

    Args:
        leaves: when each layer's gradient goes out, in units.
    """
    axes.text(-1.4, y, name, ha="right", va="center", fontweight="bold")
    axes.text(-1.4, y - 1.2, "network", ha="right", va="center", color=GREY)
    box(axes, 0.4, y, "forward", width=3.0, height=0.8, color=PALE, alpha=1)
    for k, leave in enumerate(leaves):
        layer = layers - k
        color = CYCLE[k % len(CYCLE)]
        box(axes, 2.6 + k, y, f"$g_{layer}$", width=0.9, height=0.8, color=color)
        box(axes, 2.6 + leave, y - 1.2, f"$g_{layer}$", width=0.9, height=0.8, color=color)
        if leave == k + 1:  # it leaves at once; arrows of those that wait would cross
            arrow(axes, (2.75 + k, y - 0.42), (2.5 + leave, y - 0.78), color=GREY)
    box(axes, 2.6 + leaves[-1] + 1.3, y, "step", width=1.5, height=0.8, color=YELLOW)


def bucket_map(
    names: Sequence[str], nbytes: Sequence[int], buckets: Sequence[Sequence[int]], title: str = ""
) -> Figure:
    """Draw to scale which gradient travels in which bucket.

    Args:
        names, nbytes: of the gradients, in the order in which backward makes them.
        buckets: of each bucket, indices into these; in the order in which they leave.
        title: of the figure.
    """
    figure, axes = chart(10, 2.5)
    starts = list(accumulate((size / 1e6 for size in nbytes), initial=0.0))
    for number, bucket in enumerate(buckets):
        color = CYCLE[number % len(CYCLE)]
        for k in bucket:
            left = starts[k]
            width = starts[k + 1] - starts[k]
            axes.barh(0, width, 0.6, left, color=color, alpha=0.35, edgecolor=INK, linewidth=0.8)
            if width > 0.0105 * len(names[k]) * starts[-1]:
                axes.text(left + width / 2, 0, names[k], ha="center", va="center", fontsize=10)
        left, right = starts[bucket[0]], starts[bucket[-1] + 1]
        named = len(buckets) <= 4 and right - left > 0.1 * starts[-1]
        name = f"bucket {number}: {right - left:.2f} MB" if named else str(number)
        axes.plot([left, left, right, right], [0.36, 0.44, 0.44, 0.36], color=color, clip_on=False)
        axes.text((left + right) / 2, 0.52, name, ha="center", va="bottom", fontsize=10)
    axes.set_ylim(-0.45, 0.95)
    axes.set_xlim(0, starts[-1])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    axes.set_xlabel("gradients in the order in which backward makes them [MB]")
    axes.set_title(title)
    figure.tight_layout()
    words = "; ".join(
        f"bucket {number} of {sum(nbytes[k] for k in bucket) / 1e6:.3g} MB: "
        + ", ".join(names[k] for k in bucket)
        for number, bucket in enumerate(buckets)
    )
    figure.alt_text = f"{title}. {words}."
    return figure


def bucket_lanes(steps: Sequence[dict], titles: Sequence[str]) -> Figure:
    """Draw measured backward passes: when each bucket left, and which part of its way was hidden.

    Args:
        steps: dicts with ``"begin"``, ``"computed"`` (the last gradient is there), ``"end"`` and
            ``"buckets"``, a list of ``(start, matched, end, nbytes)``. Times in seconds, on one
            clock; ``matched`` is when all ranks had come with this bucket.
        titles: one for each step.
    """
    use_style()
    longest = max(step["end"] - step["begin"] for step in steps) * 1e3
    heights = [1.5 + 0.42 * len(step["buckets"]) for step in steps]
    size = (10, sum(heights) * 0.55 + 0.9)
    figure, grid = plt.subplots(
        len(steps), figsize=size, sharex=True, squeeze=False, height_ratios=heights
    )
    panels = grid[:, 0]
    for axes, step, title in zip(panels, steps, titles, strict=True):
        _lanes(axes, step)
        axes.set_title(title)
        axes.set_xlim(0, 1.12 * longest)
    panels[-1].set_xlabel("time since backward began [ms]")
    panels[0].legend(
        handles=[
            Patch(facecolor=COMPUTING, label="backward computes"),
            Patch(facecolor=PAPER, edgecolor=GREY, hatch="////", label="bucket waits"),
            Patch(facecolor=GREEN, label="moves, hidden"),
            Patch(facecolor=RED, label="moves, in the open"),
        ],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=4,
        fontsize=9,
        columnspacing=1.0,
        handlelength=1.4,
    )
    figure.tight_layout()
    figure.alt_text = " ".join(map(_in_words, steps, titles))
    return figure


def _in_words(step: dict, title: str) -> str:
    """Return a step in words: its buckets, and when backward and the last of them end."""
    computed, end = (1e3 * (step[key] - step["begin"]) for key in ("computed", "end"))
    late = sum(bucket[2] > step["computed"] for bucket in step["buckets"])
    return (
        f"{title}: backward computes for {computed:.3g} ms, {len(step['buckets'])} buckets move, "
        f"{late} of them beyond its end; all is over after {end:.3g} ms."
    )


def _lanes(axes: Axes, step: dict) -> None:
    """Draw one backward pass: a bar for the computation, and one for each bucket below it."""

    def ms(time: float) -> float:
        return (time - step["begin"]) * 1e3

    computed = ms(step["computed"])
    axes.barh(0, computed, 0.8, color=COMPUTING)
    axes.text(computed / 2, 0, "backward", ha="center", va="center")
    axes.axvline(computed, color=INK, linestyle=":", linewidth=1)
    waiting = {"facecolor": PAPER, "edgecolor": GREY, "hatch": "////", "linewidth": 0.5}
    card = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
    for number, (start, matched, end, nbytes) in enumerate(step["buckets"]):
        row = -1 - number
        left, right = ms(max(start, matched)), ms(end)
        axes.barh(row, left - ms(start), 0.7, ms(start), **waiting)
        parts = ((left, min(right, computed), GREEN), (max(left, computed), right, RED))
        for since, until, color in parts:
            if until > since:
                axes.barh(row, until - since, 0.7, since, color=color)
        look = {"ha": "left", "va": "center", "fontsize": 9, "bbox": card}
        write_beside(axes, f"{nbytes / 1e6:.3g} MB", (right, row), (5, 0), **look)
    count = len(step["buckets"])
    axes.set_ylim(-count - 0.6, 0.6)
    names = ["rank 0", *(f"b{k}" for k in range(count))]
    name_rows(axes, names, range(0, -count - 1, -1), 9)


def accumulation(k: int = 3) -> Figure:
    """Draw `k` microbatches with an all_reduce each, and with a single one."""
    figure, axes = canvas(10.5, 2.6)
    for row, (name, synced) in enumerate((("DDP as it is", range(k)), ("with no_sync", [k - 1]))):
        y = -1.8 * row
        x = 0.0
        axes.text(-0.4, y, name, ha="right", va="center")
        for j in range(k):
            word = f"microbatch {j}"
            box(axes, x + 1.4, y, word, width=2.7, height=0.8, color=SKY)
            x += 2.9
            if j in synced:
                box(axes, x + 0.8, y, "all_\nreduce", width=1.5, height=0.8, color=GREEN)
                x += 1.7
        box(axes, x + 0.7, y, "step", width=1.3, height=0.8, color=YELLOW)
    fit_limits(axes, [-3.6, 4.6 * k + 1.5], [-2.3, 0.5], margin=0.2)
    figure.alt_text = (
        f"{k} microbatches, then a step. DDP as it is: an all_reduce after each. With no_sync: "
        "a single all_reduce after the last."
    )
    return figure


def hook_path() -> Figure:
    """Draw what a bucket goes through in a communication hook that compresses."""
    figure, axes = canvas(10.5, 1.7)
    stations = [
        ("bucket.buffer()\nfloat32", 4, BLUE),
        ("cast, ÷ p\nfloat16", 2, ORANGE),
        ("all_reduce\nin float16", 2, GREEN),
        ("cast back\ninto the buffer", 4, BLUE),
    ]
    places = [0.0, 5.0, 10.0, 15.0]
    for x, (text, width, color) in zip(places, stations, strict=True):
        box(axes, x, 0, text, width=3.6, height=1.3, color=color)
        axes.text(x, -1.05, f"{width} bytes a number", ha="center", va="center", color=GREY)
    for (a, b), word in zip(pairwise(places), ("", "async", "then"), strict=True):
        arrow(axes, (a + 1.85, 0), (b - 1.85, 0), word)
    fit_limits(axes, [-1.9, 16.9], [-1.2, 0.7], margin=0.2)
    figure.alt_text = (
        "The way of a bucket: its buffer in float32, 4 bytes a number; cast and divided by p to "
        "float16, 2 bytes; an asynchronous all_reduce in float16; then cast back into the buffer."
    )
    return figure
