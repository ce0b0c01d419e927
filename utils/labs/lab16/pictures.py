"""Pictures of lab 16: tokens between layers, rounds of a ring, masks, and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import COMMUNICATING, PALE, PAPER, rank_color
from utils.figures.charts import finish, panels
from utils.figures.shapes import arrow, canvas, cell, frame, rank_box

#: For each row of a table, the rank of each cell; None for an empty cell.
Table = Sequence[Sequence[int | None]]


def between_layers(p: int) -> Figure:
    """Draw the parts of a block on p ranks: own tokens between layers, all tokens inside."""
    _, axes = canvas(9.5, 0.75 * p + 0.7)
    names = ("norm", "attention", "add, norm", "MLP", "add")
    ways = ("", "all_gather", "reduce_scatter", "all_gather", "reduce_scatter")
    for k, (name, way) in enumerate(zip(names, ways, strict=True)):
        x = 4.5 * k
        inside = k % 2
        for r in range(p):
            text = f"{name}\n{'all' if inside else 'own'} tokens"
            rank_box(axes, x, -1.3 * r, r, text, width=2.7, height=1.1)
            for other in range(p if k else 0):
                start = (x - 3.1, -1.3 * other)
                end = (x - 1.4, -1.3 * r)
                arrow(axes, start, end, color=COMMUNICATING, style="--" if other == r else "-")
        axes.text(x - 2.25, 0.7, way, ha="center", fontsize=10, color=COMMUNICATING)
    words = (
        f"A block on {p} ranks. Norm and addition work on own tokens. An all_gather leads from own "
        "tokens into attention and MLP, in which a rank has all tokens for its heads or columns. A "
        "reduce_scatter leads back to own tokens. In both, each rank sends something to each other "
        "rank; a dashed arrow stays on its rank."
    )
    return frame(axes, (-1.5, 19.5), (-1.3 * p + 0.5, 1.1), words)


def _table(axes: Axes, rows: Table, title: str, texts: str = "") -> None:
    """Draw a table in the colors of ranks; `texts` has a `{}` for the rank of a cell."""
    for y, row in enumerate(rows):
        for x, rank in enumerate(row):
            color = PALE if rank is None else rank_color(rank)
            words = "" if rank is None else texts.format(rank)
            cell(axes, x, y, 1, color, words, height=1, fontsize=9, edgecolor=PAPER, linewidth=0.5)
    axes.set(xlim=(0, len(rows[0])), ylim=(len(rows) - 0.5, -0.5), xticks=[], yticks=[])
    axes.set_title(title, fontsize=11)
    axes.grid(False)


def rounds(p: int) -> Figure:
    """Draw whose block a rank has in each round of a ring."""
    figure, (axes,) = panels(7, 0.42 * p + 0.9)
    owners = [[(r - i) % p for i in range(p)] for r in range(p)]
    _table(axes, owners, "In each round, the blocks move to the next rank", "block {}")
    axes.set_yticks(range(p), [f"rank {r}" for r in range(p)])
    axes.set_xticks([i + 0.5 for i in range(p)], [f"round {i}" for i in range(p)])
    axes.tick_params(length=0)
    rows = [f"Rank {r}: {', '.join(map(str, row))}." for r, row in enumerate(owners)]
    return finish(figure, f"Whose keys and values a rank has in rounds 0, 1, … {' '.join(rows)}")


def exchange(p: int) -> Figure:
    """Draw who has which tokens of which heads, before and after Ulysses' exchange."""
    figure, (left, right) = panels(8, 2.6, columns=2)
    _table(left, [list(range(p))] * p, "before: some tokens of all heads", "rank {}")
    _table(right, [[r] * p for r in range(p)], "after: all tokens of some heads", "rank {}")
    for axes in (left, right):
        axes.set(xlabel="tokens →", ylabel="← heads")
    words = (
        f"Tokens from left to right, heads from top to bottom. Before the exchange, each of {p} "
        "ranks has a column: some tokens of all heads. After it, a rank has a row: all tokens of "
        "some heads."
    )
    return finish(figure, words)


def masks(layouts: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw a causal mask in colors: the rank that computes each score, for some layouts."""
    figure, all_axes = panels(4.2 * len(layouts) + 0.3, 4.2, columns=len(layouts))
    words = []
    for axes, (name, layout) in zip(all_axes, layouts.items(), strict=True):
        owners = dict(sorted((t, r) for r, mine in enumerate(layout) for t in mine))
        rows = [[r if key <= t else None for key in owners] for t, r in owners.items()]
        _table(axes, rows, f"{name}: whose query sees which key")
        axes.set_yticks(list(owners), [f"{t} · rank {r}" for t, r in owners.items()], fontsize=7)
        axes.set(xlabel="key →", ylabel="← query", aspect="equal")
        seen = [f"rank {r} {sum(t + 1 for t in mine)}" for r, mine in enumerate(layout)]
        words.append(f"{name}: visible scores of {', '.join(seen)}.")
    return finish(figure, f"A causal mask of {len(owners)} tokens. {' '.join(words)}")
