"""Pictures of lab 16: tokens between layers, rounds of a ring, masks, work, and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import COMMUNICATING, PALE, PAPER, rank_color
from utils.figures.charts import add_lanes, chart, finish, panels
from utils.figures.shapes import arrow, box, canvas, cell, frame, rank_box

Layout = Sequence[Sequence[int]]


def between_layers(p: int) -> Figure:
    """Draw the parts of a block on p ranks: own tokens between layers, all tokens inside."""
    _, axes = canvas(9, 0.8 * p + 0.9)
    steps = {0.0: "norm", 3.4: "own heads", 6.8: "add, norm", 10.2: "own columns", 13.6: "add"}
    for r in range(p):
        for k, (x, text) in enumerate(steps.items()):
            height = 0.95 if k % 2 else 0.5
            rank_box(axes, x, -1.3 * r, r, text, width=1.9, height=height)
            if k:
                arrow(axes, (x - 2.4, -1.3 * r), (x - 1.0, -1.3 * r), color=COMMUNICATING)
    for x, text in zip((1.7, 5.1, 8.5, 11.9), ("all_gather", "reduce_scatter") * 2, strict=True):
        axes.text(x, 0.75, text, ha="center", fontsize=10, color=COMMUNICATING)
        box(axes, x, -0.65 * (p - 1), "", width=0.16, height=1.3 * p - 0.3, color=COMMUNICATING)
    words = (
        f"A block on {p} ranks. Norm and addition work on a rank's own tokens. An all_gather leads "
        "from own tokens into attention and MLP, in which a rank has all tokens for its heads or "
        "columns. A reduce_scatter leads from there back to own tokens."
    )
    return frame(axes, (-1.2, 14.8), (-1.3 * p + 0.5, 1.2), words)


def rounds(p: int) -> Figure:
    """Draw a table: whose block a rank has in each round of a ring."""
    figure, axes = chart(7, 0.45 * p + 0.8)
    rows = []
    for r in range(p):
        owners = [(r - i) % p for i in range(p)]
        rows.append(f"Rank {r}: {', '.join(map(str, owners))}.")
        for i, s in enumerate(owners):
            cell(axes, i + 0.1, r, 0.8, rank_color(s), f"block {s}")
            if i + 1 < p:
                arrow(axes, (i + 0.92, r), (i + 1.08, r + (1 if r + 1 < p else -0.3)))
    _name_rounds(axes, p)
    return finish(figure, f"Whose keys and values a rank has in rounds 0, 1, … {' '.join(rows)}")


def _name_rounds(axes: Axes, p: int) -> None:
    add_lanes(axes, [f"rank {r}" for r in range(p)], p)
    axes.set_xticks([i + 0.5 for i in range(p)], [f"round {i}" for i in range(p)])
    axes.tick_params(axis="x", length=0)


def masks(layouts: Mapping[str, Layout]) -> Figure:
    """Draw the causal mask in colors: the rank that computes each score, for some layouts."""
    figure, all_axes = panels(4.2 * len(layouts) + 0.3, 4.2, columns=len(layouts))
    words = []
    for axes, (name, layout) in zip(all_axes, layouts.items(), strict=True):
        owners = {t: r for r, mine in enumerate(layout) for t in mine}
        for query, r in owners.items():
            cell(axes, 0, query, query + 1, rank_color(r), height=1, linewidth=0)
            cell(axes, query + 1, query, len(owners) - query - 1, PALE, height=1, linewidth=0)
        n = len(owners)
        axes.set(xlim=(0, n), ylim=(n - 0.5, -0.5), xlabel="key", ylabel="query", aspect="equal")
        axes.set_title(f"{name}: each query is in its rank's color")
        axes.title.set_fontsize(10)
        axes.grid(False)
        axes.set_yticks(range(n), [f"{t} · rank {owners[t]}" for t in range(n)], fontsize=7)
        axes.set_xticks([])
        seen = [f"rank {r} {sum(t + 1 for t in mine)}" for r, mine in enumerate(layout)]
        words.append(f"{name}: visible scores of {', '.join(seen)}.")
    return finish(figure, f"A causal mask of {n} tokens. {' '.join(words)}")


def work(tables: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw how many score entries each rank computes in each round, for some layouts."""
    figure, all_axes = panels(9, 2.6, columns=len(tables))
    words = []
    for axes, (name, rows) in zip(all_axes, tables.items(), strict=True):
        totals = [sum(row) for row in rows]
        most = max(max(row) for row in rows)
        busiest = max(totals) * len(rows) / sum(totals)
        for r, row in enumerate(rows):
            for i, entries in enumerate(row):
                cell(axes, i, r, entries / most, rank_color(r), linewidth=0)
                axes.text(i + 0.05, r + 0.38, f"{entries:,}", fontsize=8, va="top")
        _name_rounds(axes, len(rows))
        axes.set_ylim(len(rows) - 0.2, -0.6)
        axes.set_title(f"{name}: busiest rank {busiest:.2f} × the mean", fontsize=10)
        words.append(f"{name}: ranks compute {totals} entries, the busiest {busiest:.2f} times the "
                     f"mean; by rounds {[list(row) for row in rows]}.")  # fmt: skip
    return finish(figure, f"Score entries of each rank. {' '.join(words)}")


def lanes(charts: Mapping[str, Sequence[tuple[float, float, Sequence]]]) -> Figure:
    """Draw when each rank works on a block: for each layout, (seconds, start, spans) by rank."""
    longest = 1e3 * max(took for of_ranks in charts.values() for took, _, _ in of_ranks)
    figure, all_axes = panels(9, 3.6, rows=len(charts), sharex=True)
    words = []
    for axes, (name, of_ranks) in zip(all_axes, charts.items(), strict=True):
        first = min(start for _, start, _ in of_ranks)
        took = 1e3 * max(seconds for seconds, _, _ in of_ranks)
        add_lanes(axes, [f"rank {r}" for r in range(len(of_ranks))], 1.01 * longest)
        for r, (_, _, spans) in enumerate(of_ranks):
            for i, (start, end) in enumerate(spans):
                left, width = 1e3 * (start - first), 1e3 * (end - start)
                cell(axes, left, r, width, rank_color((r - i) % len(of_ranks)), linewidth=0.5)
        axes.set_title(f"{name}: {took:.0f} ms", fontsize=11)
        words.append(f"{name}: {took:.0f} ms.")
    all_axes[-1].set_xlabel("time (ms); the color says whose block it is")
    return finish(figure, f"When each rank works on a block. {' '.join(words)}")


def exchange(p: int) -> Figure:
    """Draw who has which tokens of which heads, before and after Ulysses' exchange."""
    figure, all_axes = panels(8, 2.6, columns=2)
    titles = ("outside: some tokens, all heads", "inside: all tokens, some heads")
    for axes, title in zip(all_axes, titles, strict=True):
        for head in range(p):
            for token in range(p):
                r = token if title.startswith("outside") else head
                cell(axes, token, head, 1, rank_color(r), f"rank {r}", height=1, edgecolor=PAPER)
        axes.set(xlim=(0, p), ylim=(p - 0.5, -0.5), xlabel="tokens →", ylabel="← heads")
        axes.set_title(title, fontsize=11)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(False)
    words = (
        f"Tokens from left to right, heads from top to bottom. Outside, each of {p} ranks has a "
        "column: some tokens of all heads. Inside, it has a row: all tokens of some heads."
    )
    return finish(figure, words)
