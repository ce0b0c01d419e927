"""Drawings for tensor parallelism: which rank has which element, and how a layer is split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from utils.figures import COMMUNICATING, INK, PAPER, SHARED, rank_color, tint
from utils.figures.charts import finish, keys, panels
from utils.figures.shapes import arrow, box, canvas, cell, frame, rank_box

#: Color of elements that all ranks have.
EVERYBODY = tint(SHARED, 0.5)


def holders(whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return which rank has which element, found by its value: bool [ranks, rows, columns].

    Args:
        whole: a matrix whose numbers all differ.
        parts: what each rank holds of the matrix.
    """
    return torch.stack([torch.isin(whole.contiguous(), part.contiguous()) for part in parts])


def draw_matrix(
    axes: Axes, corner: tuple[float, float], whole: Tensor, parts: Sequence[Tensor], name: str
) -> str:
    """Draw a matrix, each element in the color of its rank; yellow if all ranks have it.

    Full-size parts with other numbers are partial sums, and are hatched.

    Returns:
        A description of the drawing in words.
    """
    x0, y0 = corner
    rows, columns = whole.shape
    addends = all(part.shape == whole.shape and not torch.equal(part, whole) for part in parts)
    held = holders(whole, parts)
    for i, j in itertools.product(range(rows), range(columns)):
        color = EVERYBODY if addends else _color(held[:, i, j])
        cell(axes, x0 + j, y0 - i - 0.5, 1, color, height=1, edgecolor=PAPER, linewidth=1)
    cell(axes, x0, y0 - rows / 2, columns, "none", height=rows, hatch="///" if addends else None)
    axes.text(x0 + columns / 2, y0 + 0.5, name, ha="center", va="bottom", fontsize=10)
    if addends:
        return f"{name}: each rank has a partial sum of the whole matrix"
    shares = [f"rank {r} has {int(has.sum())} of {rows * columns}" for r, has in enumerate(held)]
    return f"{name}: {', '.join(shares)} elements"


def _color(held: Tensor) -> str:
    """Return the color of an element that these ranks have."""
    if held.all():
        return EVERYBODY
    return rank_color(int(held.int().argmax())) if held.any() else PAPER


def products(pictures: Mapping[str, Sequence[tuple[str, Tensor, Sequence[Tensor]]]]) -> Figure:
    """Draw matrix products in rows: title → (name, whole matrix, parts by rank) of x, Wᵀ and y.

    The picture comes from the tensors alone: an element's value shows which rank has it.
    """
    wide = max(sum(whole.shape[1] + 4 for _, whole, _ in row) for row in pictures.values())
    most = [max(whole.shape[0] for _, whole, _ in row) for row in pictures.values()]
    tall = sum(rows + 4.5 for rows in most)
    _, axes = canvas(min(9.5, 0.23 * wide + 1), 0.23 * tall + 0.6)
    top = 0.0
    words = []
    for (title, row), rows in zip(pictures.items(), most, strict=True):
        words += [f"{title}: {text}" for text in _product(axes, title, row, top, rows)]
        top -= rows + 4.5
    _legend(axes, max(len(parts) for row in pictures.values() for *_, parts in row))
    return frame(axes, (-0.5, wide), (top + 2, 4.5), ". ".join(words) + ".", equal=True)


def _legend(axes: Axes, ranks: int) -> None:
    colors = {f"rank {r}": rank_color(r) for r in range(ranks)} | {"every rank": EVERYBODY}
    marks = keys(colors, edgecolor="none")
    marks += keys({"partial sums": EVERYBODY}, edgecolor=INK, linewidth=0, hatch="///")
    style = {"ncols": 6, "fontsize": 9, "columnspacing": 1, "handlelength": 1.3}
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(0, 0), **style)


def _product(axes: Axes, title: str, row: Sequence[tuple], top: float, rows: int) -> Iterator[str]:
    """Draw the matrices of a product, at most `rows` high; yield what is drawn, in words."""
    axes.text(0, top + 2.6, title, fontsize=11, weight="bold", va="bottom")
    x = 0.0
    signs = ["·", "=", ""] if len(row) == 3 else ["="] * (len(row) - 1) + [""]
    for (name, whole, parts), sign in zip(row, signs, strict=True):
        yield draw_matrix(axes, (x, top - (rows - whole.shape[0]) / 2), whole, parts, name)
        x += whole.shape[1] + 4
        if sign:
            axes.text(x - 2, top - rows / 2, sign, ha="center", va="center", fontsize=16)


def two_ways() -> Figure:
    """Draw inter- and intra-operator parallelism: whole layers on ranks, parts of each layer."""
    layers = 4
    ranks = 2
    _, axes = canvas(9, 3.4)
    sides = [
        (0.0, "inter-operator: between the layers", False),
        (7.2, "intra-operator: through each layer", True),
    ]
    for left, title, cut in sides:
        axes.text(left - 0.6, 3.2, title, fontsize=11, weight="bold")
        for layer in range(layers):
            x = left + 1.5 * layer
            for r in range(ranks):
                if not cut and layer * ranks // layers != r:
                    continue
                height = 2.0 / ranks if cut else 2.0
                y = 2.4 - height * (r + 0.5) if cut else 1.4
                text = f"layer {layer}\nrank {r}"
                rank_box(axes, x, y, r, text, width=1.1, height=height - 0.12)
            if layer:
                arrow(axes, (x - 0.92, 1.4), (x - 0.58, 1.4))
    words = (
        f"Left: each of {layers} layers is whole, on one of {ranks} ranks. Right: each layer is "
        "split, and every rank has a part of every layer."
    )
    return frame(axes, (-0.8, 12.8), (-0.5, 4.1), words)


def megatron(ranks: int = 2) -> Figure:
    """Draw an MLP split by columns and then by rows, with f and g and what they do."""
    _, axes = canvas(9, 1.3 + 1.1 * ranks)
    middle = -(ranks - 1) / 2
    for x, name in ((0.0, "x"), (1.5, "f"), (8.5, "g"), (10.0, "y")):
        color = SHARED if name in "xy" else COMMUNICATING
        box(axes, x, middle, name, width=0.7, height=0.6, color=color, alpha=1.0)
    for r in range(ranks):
        shards = (3.4, f"up: columns {r}", 2.1), (5.3, "GELU", 0.9), (6.9, f"down: rows {r}", 1.7)
        for x, text, width in shards:
            rank_box(axes, x, -r, r, text, width=width, height=0.62)
        arrow(axes, (1.9, middle), (2.3, -r))
        arrow(axes, (4.5, -r), (4.8, -r))
        arrow(axes, (5.8, -r), (6.0, -r))
        arrow(axes, (7.8, -r), (8.1, middle))
    arrow(axes, (0.4, middle), (1.1, middle))
    arrow(axes, (8.9, middle), (9.6, middle))
    low = -ranks + 0.2
    for x, text in (
        (1.5, "forward: nothing\nbackward: all_reduce"),
        (8.5, "forward: all_reduce\nbackward: nothing"),
    ):
        axes.text(x, low, text, ha="center", va="top", color=COMMUNICATING, fontsize=10)
    words = (
        "x goes through f to the ranks. Each rank has some columns of the first layer, GELU, and "
        "the same rows of the second layer. g adds up the results of the ranks. f does nothing in "
        "forward and an all_reduce in backward, and g does the reverse."
    )
    return frame(axes, (-0.7, 10.7), (low - 0.9, 0.6), words)


def expert_load(loads: Mapping[str, Sequence[Sequence[int]]], room: int) -> Figure:
    """Draw the tokens of each expert by the rank that sends them, and the capacity as a line.

    Args:
        loads: title → how many tokens of each rank chose each expert.
        room: the tokens that an expert accepts.
    """
    figure, each = panels(9, 3.2, columns=len(loads), sharey=True)
    words = []
    for axes, (title, counts) in zip(each, loads.items(), strict=True):
        experts = range(len(counts[0]))
        below = [0] * len(experts)
        for r, row in enumerate(counts):
            axes.bar(experts, row, bottom=below, color=rank_color(r), label=f"from rank {r}")
            below = [b + n for b, n in zip(below, row, strict=True)]
        axes.axhline(room, color=INK, linestyle="--", label="room")
        axes.set_xticks(list(experts), [f"expert {e}" for e in experts])
        axes.set_title(title)
        words.append(f"{title}: {below} tokens for the experts, room for {room}")
    each[0].set_ylabel("tokens")
    each[-1].legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return finish(figure, ". ".join(words) + ".")
