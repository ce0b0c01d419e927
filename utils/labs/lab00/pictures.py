"""The picture of lab 00's training: how the loss falls, and what the ranks exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils import figures
from utils.figures.shapes import rank_box

#: Steps over which a loss is averaged for the curve, because single minibatches differ a lot.
SMOOTH = 20


def training(losses: Sequence[Sequence[float]], totals: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the picture of a training: left the loss on each rank, right what it exchanged.

    Args:
        losses: for each rank, the loss of each step.
        totals: for each rank, what it communicated, see :attr:`utils.timeline.Timeline.totals`.
    """
    figures.use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), width_ratios=(3, 2))
    plt.close(figure)
    for rank, of_rank in enumerate(losses):
        smooth = [sum(of_rank[k : k + SMOOTH]) / SMOOTH for k in range(len(of_rank) - SMOOTH + 1)]
        color = figures.rank_color(rank)
        left.plot(range(SMOOTH, len(of_rank) + 1), smooth, color=color, label=f"rank {rank}")
    left.set_xlabel("step")
    left.set_ylabel(f"loss, mean of {SMOOTH} steps")
    left.set_ylim(bottom=0)
    left.set_title("Every rank's loss falls")
    left.legend()
    words = _exchange(right, len(losses), len(losses[0]), totals[0])
    begin, end = (sum(of_rank[part] for of_rank in losses) for part in (0, -1))
    figure.alt_text = (
        f"Left: the loss of {len(losses)} ranks, {begin / len(losses):.2f} in the first step and "
        f"{end / len(losses):.2f} in the last, in the mean over the ranks. Right: {words}"
    )
    return figure


def _exchange(axes: Axes, ranks: int, steps: int, total: Mapping[str, Any]) -> str:
    """Draw the ranks around their sum of gradients; return the drawing in words."""
    calls = total["collectives"]
    million = total["bytes in collectives"] / steps / 1e6
    axes.set_axis_off()
    axes.set_title("In each step they exchange gradients")
    for rank in range(ranks):
        y = -1.5 * rank
        rank_box(axes, 0, y, rank, width=1.3)
        for begin, end in ((0.75, 2.0), (2.0, 0.75)):
            figures.arrow(axes, (begin, y), (end, y))
    text = f"{calls // steps} all_reduces\n{million:.1f} MB\nof gradients"
    height = 1.5 * (ranks - 1) + 1.0
    look = {"width": 2.2, "height": height, "color": figures.COMMUNICATING, "alpha": 1.0}
    figures.box(axes, 3.2, -0.75 * (ranks - 1), text, **look)
    figures.fit_limits(axes, [-0.8, 4.4], [-1.5 * (ranks - 1) - 0.6, 0.6], margin=0.2)
    return (
        f"in each of {steps} steps, all ranks sum {million:.1f} MB of gradients with "
        f"{calls // steps} all_reduces."
    )
