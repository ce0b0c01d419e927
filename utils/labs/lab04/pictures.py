"""Drawings of replicas in sync: the initial broadcast, and which bucket leaves when.

Sizes are bytes, times are seconds; the axes show MB (10⁶ bytes) and milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, pstdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.figures import (
    BACKWARD,
    COMMUNICATING,
    COMPUTING,
    EXPOSED,
    FORWARD,
    GREY,
    INK,
    PAPER,
    UPDATE,
    WAITING_LOOK,
    rank_color,
    tint,
)
from utils.figures.charts import chart, finish, keys, name_rows, panels
from utils.figures.shapes import (
    arrow,
    box,
    canvas,
    cell,
    frame,
    link,
    rank_box,
    write_beside,
)


def initial_broadcast(n: int) -> Figure:
    """Draw `n` replicas that start from different seeds, before and after a broadcast."""
    _, axes = canvas(10, 0.55 + 0.62 * n)
    for r in range(n):
        y = -1.1 * r
        axes.text(-2.2, y, f"rank {r}", ha="right", va="center")
        rank_box(axes, 0, y, r, f"weights of seed {r}", width=3.8, height=0.8)
        rank_box(axes, 10, y, 0, "weights of seed 0", width=3.8, height=0.8)
        arrow(axes, (2.0, 0), (7.9, y), "broadcast" if r == 0 else "", color=COMMUNICATING)
    axes.text(0, 0.75, "before", ha="center")
    axes.text(10, 0.75, "after", ha="center")
    words = (
        f"Before: each of {n} ranks has weights from a different seed. Rank 0 broadcasts its "
        "weights to all ranks. After: every rank has the weights of seed 0."
    )
    return frame(axes, (-4.2, 12.2), (-1.1 * (n - 1) - 0.6, 1.2), words, equal=True)


def gradient_flow(layers: int = 4) -> Figure:
    """Draw a step with all_reduces after backward, and a step with all_reduces during backward.

    This is a drawing, not a measurement. Each layer takes one unit in backward, and one unit on the
    network.
    """
    _, axes = canvas(11, 4.0)
    _flow_row(axes, 0, "by hand", layers, [layers + k for k in range(layers)])
    _flow_row(axes, -3.4, "DDP", layers, [1 + k for k in range(layers)])
    link(axes, (2.4, -5.35), (12.6, -5.35), color=GREY)
    axes.text(7.5, -5.75, "time", ha="center", va="center", color=GREY)
    words = (
        "Two steps over time. Forward comes first, then backward makes the gradients of "
        f"{layers} layers, from the last to the first. The network is below. By hand, the network "
        "begins when backward is over. With DDP, each gradient leaves as soon as it is ready, so "
        "all except the last are hidden, and the optimizer's step comes earlier."
    )
    return frame(axes, (-2.8, 13.6), (-6.0, 0.7), words, equal=True)


def _flow_row(axes: Axes, y: float, name: str, layers: int, leaves: Sequence[int]) -> None:
    """Draw backward, and the network below it.

    Args:
        leaves: when each layer's gradient is sent, in units.
    """
    axes.text(-1.4, y, name, ha="right", va="center", fontweight="bold")
    axes.text(-1.4, y - 1.2, "network", ha="right", va="center", color=GREY)
    size = {"height": 0.8, "alpha": 1.0}
    box(axes, 0.4, y, "forward", width=3.0, color=FORWARD, **size)
    for k, leave in enumerate(leaves):
        name = f"$g_{layers - k}$"
        box(axes, 2.6 + k, y, name, width=0.9, color=BACKWARD, **size)
        box(axes, 2.6 + leave, y - 1.2, name, width=0.9, color=COMMUNICATING, **size)
        if leave == k + 1:  # only without a wait, because the other arrows would cross
            arrow(axes, (2.75 + k, y - 0.42), (2.5 + leave, y - 0.78), color=GREY)
    box(axes, 2.6 + leaves[-1] + 1.3, y, "step", width=1.5, color=UPDATE, **size)


def bucket_map(
    names: Sequence[str], nbytes: Sequence[int], buckets: Sequence[Sequence[int]], title: str = ""
) -> Figure:
    """Draw to scale which gradient travels in which bucket.

    Args:
        names, nbytes: the gradients' names and sizes, in the order in which backward makes them.
        buckets: the indices of each bucket's gradients, in the order in which buckets leave.
        title: the figure's title.
    """
    figure, axes = chart(9, 2.5)
    starts = list(accumulate((size / 1e6 for size in nbytes), initial=0.0))
    for number, bucket in enumerate(buckets):
        color = tint(COMMUNICATING, (0.55, 0.25)[number % 2])
        for k in bucket:
            left = starts[k]
            width = starts[k + 1] - starts[k]
            name = names[k] if width > 0.0105 * len(names[k]) * starts[-1] else ""
            look = {"height": 0.6, "fontsize": 10, "linewidth": 0.8}
            cell(axes, left, 0, width, color, name, **look)
        left, right = starts[bucket[0]], starts[bucket[-1] + 1]
        named = len(buckets) <= 4 and right - left > 0.1 * starts[-1]
        name = f"bucket {number}: {right - left:.2f} MB" if named else str(number)
        axes.plot([left, left, right, right], [0.36, 0.44, 0.44, 0.36], color=INK, linewidth=1)
        axes.text((left + right) / 2, 0.52, name, ha="center", va="bottom", fontsize=10)
    label = "gradients in the order in which backward makes them [MB]"
    axes.set(xlim=(0, starts[-1]), ylim=(-0.45, 0.95), yticks=[], xlabel=label, title=title)
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    words = "; ".join(
        f"bucket {number} of {sum(nbytes[k] for k in bucket) / 1e6:.3g} MB: "
        + ", ".join(names[k] for k in bucket)
        for number, bucket in enumerate(buckets)
    )
    return finish(figure, f"{title}. {words}.")


def bucket_lanes(steps: Sequence[dict], titles: Sequence[str]) -> Figure:
    """Draw measured backward passes: when each bucket left, and which part was hidden.

    Args:
        steps: dicts with ``"begin"``, ``"computed"`` (the last gradient is ready), ``"end"`` and
            ``"buckets"``, a list of ``(start, matched, end, nbytes)``. Times are seconds on one
            clock; ``matched`` is when all ranks had this bucket ready.
        titles: one for each step.
    """
    longest = max(step["end"] - step["begin"] for step in steps) * 1e3
    heights = [1.5 + 0.42 * len(step["buckets"]) for step in steps]
    look = {"sharex": True, "height_ratios": heights}
    figure, each = panels(9, sum(heights) * 0.55 + 0.9, rows=len(steps), **look)
    for axes, step, title in zip(each, steps, titles, strict=True):
        _lanes(axes, step, longest)
        axes.set(title=title, xlim=(0, 1.12 * longest))
    each[-1].set_xlabel("time since backward began [ms]")
    moves = {"moves, hidden": COMMUNICATING, "moves, exposed": EXPOSED}
    handles = [
        *keys({"backward computes": COMPUTING}, edgecolor=None),
        Patch(label="bucket waits", **WAITING_LOOK),
        *keys(moves, edgecolor=None),
    ]
    look = {"ncols": 4, "fontsize": 9, "columnspacing": 1.0, "handlelength": 1.4}
    each[0].legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), **look)
    return finish(figure, " ".join(map(_in_words, steps, titles)))


def _in_words(step: dict, title: str) -> str:
    """Return a step in words: its buckets, and when backward and the last bucket end."""
    computed, end = (1e3 * (step[key] - step["begin"]) for key in ("computed", "end"))
    late = sum(bucket[2] > step["computed"] for bucket in step["buckets"])
    return (
        f"{title}: backward computes for {computed:.3g} ms. {late} of {len(step['buckets'])} "
        f"buckets still move after it, and the last one is complete after {end:.3g} ms."
    )


def _lanes(axes: Axes, step: dict, longest: float) -> None:
    """Draw one backward pass: a bar for the computation, and a bar for each bucket below it."""

    def ms(time: float) -> float:
        return (time - step["begin"]) * 1e3

    computed = ms(step["computed"])
    axes.barh(0, computed, 0.8, color=COMPUTING)
    if computed > 0.12 * longest:  # the word fits into the bar
        axes.text(computed / 2, 0, "backward", ha="center", va="center")
    axes.axvline(computed, color=INK, linestyle=":", linewidth=1)
    card = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
    for number, (start, matched, end, nbytes) in enumerate(step["buckets"]):
        row = -1 - number
        left, right = ms(max(start, matched)), ms(end)
        axes.barh(row, left - ms(start), 0.7, ms(start), **WAITING_LOOK)
        hidden = (left, min(right, computed), COMMUNICATING)
        for since, until, color in (hidden, (max(left, computed), right, EXPOSED)):
            if until > since:
                axes.barh(row, until - since, 0.7, since, color=color)
        look = {"ha": "left", "va": "center", "fontsize": 9, "bbox": card}
        write_beside(axes, f"{nbytes / 1e6:.3g} MB", (right, row), (5, 0), **look)
    count = len(step["buckets"])
    axes.set_ylim(-count - 0.6, 0.6)
    names = ["rank 0", *(f"b{k}" for k in range(count))]
    name_rows(axes, names, range(0, -count - 1, -1), 9)


def accumulation(k: int = 3) -> Figure:
    """Draw `k` microbatches with an all_reduce after each, and with a single all_reduce."""
    _, axes = canvas(10.5, 2.6)
    size = {"height": 0.8, "alpha": 1.0}
    for row, (name, synced) in enumerate((("DDP alone", range(k)), ("with no_sync", [k - 1]))):
        y = -1.8 * row
        x = 0.0
        axes.text(-0.4, y, name, ha="right", va="center")
        for j in range(k):
            word = f"microbatch {j}"
            box(axes, x + 1.4, y, word, width=2.7, color=COMPUTING, **size)
            x += 2.9
            if j in synced:
                box(axes, x + 0.8, y, "all_\nreduce", width=1.5, color=COMMUNICATING, **size)
                x += 1.7
        box(axes, x + 0.7, y, "step", width=1.3, color=UPDATE, **size)
    words = (
        f"Two rows of {k} microbatches and a step. DDP alone makes an all_reduce after each "
        "microbatch. With no_sync, it makes a single all_reduce, after the last microbatch."
    )
    return frame(axes, (-3.8, 4.6 * k + 1.7), (-2.5, 0.7), words, equal=True)


def token_weights(lengths: Sequence[Sequence[int]], padded: int) -> Figure:
    """Draw what a token of each microbatch counts for in the mean of means.

    Args:
        lengths: for each rank the number of tokens in each of its microbatches, one sentence each.
        padded: to how many positions a sentence is padded.
    """
    rows = [(r, j, n) for r, of_rank in enumerate(lengths) for j, n in enumerate(of_rank)]
    total = sum(n for _, _, n in rows)
    _, axes = canvas(10, 0.5 + 0.55 * len(rows))
    words = []
    for row, (r, j, n) in enumerate(rows):
        y = -1.3 * row
        axes.text(-0.8, y, f"rank {r}, microbatch {j}", ha="right", va="center")
        for k in range(padded):
            look = {"height": 0.8, "linewidth": 0.8}
            cell(axes, k - 0.45, y, 0.9, tint(rank_color(r), 0.5) if k < n else PAPER, "", **look)
        times = total / len(rows) / n
        axes.text(padded, y, f"each token counts {times:.2f} times", va="center")
        words.append(f"rank {r}, microbatch {j}: {n} tokens, each counts {times:.2f} times")
    said = f"Sentences padded to {padded} positions. In the mean of means, " + "; ".join(words)
    bottom = -1.3 * (len(rows) - 1) - 0.6
    return frame(axes, (-6.2, padded + 6.2), (bottom, 0.7), f"{said}.")


def normalized(values: Sequence[float], parts: int) -> Figure:
    """Draw where a batch norm puts the values of a batch: as a whole, and in equal parts.

    Args:
        values: a batch with one channel.
        parts: how many ranks share it, in equal parts of neighbors.
    """
    share = len(values) // parts
    whole = _normal(values)
    alone = [z for k in range(parts) for z in _normal(values[k * share : (k + 1) * share])]
    figure, axes = chart(9, 2.4)
    said = []
    for y, (name, places) in enumerate((("each rank alone", alone), ("one process", whole))):
        axes.axhline(y, color=GREY, linewidth=1)
        met: dict[float, list[str]] = {}
        for k, (value, z) in enumerate(zip(values, places, strict=True)):
            met.setdefault(round(z, 6), []).append(f"{value:g}")
            size = 15 - 5 * (len(met[round(z, 6)]) - 1)  # a mark on another one is smaller
            axes.plot(z, y, "o", markersize=size, color=rank_color(k // share))
        for z, names in met.items():
            axes.text(z, y + 0.24, " and ".join(names), ha="center", va="bottom")
            said.append(f"{name}: {' and '.join(names)} at {z:.2f}")
    keyed = {f"rank {k}": rank_color(k) for k in range(parts)}
    axes.legend(handles=keys(keyed), loc="center left", bbox_to_anchor=(1.0, 0.5))
    name_rows(axes, ["each rank alone", "one process"])
    axes.margins(x=0.12)
    axes.set(ylim=(-0.4, 1.7), xlabel="normalized value")
    axes.set_title(f"{len(values)} samples after a batch norm")
    return finish(figure, "; ".join(said) + ".")


def _normal(values: Sequence[float]) -> list[float]:
    """Return the values with the mean 0 and the variance 1."""
    mean, deviation = fmean(values), pstdev(values)
    return [(value - mean) / deviation for value in values]


def hook_path() -> Figure:
    """Draw the steps of a bucket in a communication hook that compresses."""
    _, axes = canvas(10.5, 1.7)
    stations = [
        ("bucket.buffer()\nfloat32", 4, PAPER),
        ("cast, ÷ p\nfloat16", 2, COMPUTING),
        ("all_reduce\nin float16", 2, COMMUNICATING),
        ("cast back\ninto the buffer", 4, COMPUTING),
    ]
    places = [0.0, 5.0, 10.0, 15.0]
    for x, (text, width, color) in zip(places, stations, strict=True):
        box(axes, x, 0, text, width=3.6, height=1.3, color=color, alpha=1.0)
        axes.text(x, -1.05, f"{width} bytes per number", ha="center", va="center", color=GREY)
    for (a, b), word in zip(pairwise(places), ("", "async", "then"), strict=True):
        arrow(axes, (a + 1.85, 0), (b - 1.85, 0), word)
    words = (
        "A bucket's buffer is in float32, with 4 bytes per number. The hook casts it to float16, "
        "with 2 bytes, and divides it by p. An asynchronous all_reduce in float16 follows, and the "
        "result is cast back into the buffer."
    )
    return frame(axes, (-2.1, 17.1), (-1.4, 0.9), words, equal=True)
