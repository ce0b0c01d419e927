"""Pictures of which rank gets which sample, in a minibatch and in a sampler's epochs.

    from utils.labs.shared import minibatch_pictures
    minibatch_pictures.partition(24, 8, 2, highlight=1)     # the samples in order, colored by rank
    minibatch_pictures.sampler_view({"epoch 0": [[0, 2], [1, 0]]}, n=3)     # what each rank got
    minibatch_pictures.explorer()                           # sliders, in JupyterLab

A rank has a color, and a mark below the sample's number. Samples that a sampler repeats are in a
dashed red box, and samples that it leaves out are crossed out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.figure import Figure

from utils.figures import GREY, INK, RED
from utils.labs.shared.sample_page import (
    MOST_RANKS,
    TALL,
    SamplePage,
    listed,
    ranks_in_words,
    require_drawable,
)

# The unit is the width of a sample's box.
_PER_LINE = 24
_MOST_PLACES = 25
_NAME = 2.6  # the width of "rank 0"
_BESIDE = 2.0  # the space between blocks


# -- one order, shared among ranks ----------------------------------------------------------------


def partition(
    n: int,
    m: int,
    p: int,
    order: Sequence[int] | None = None,
    *,
    highlight: int | None = None,
    drop_last: bool = False,
    title: str = "",
) -> Figure:
    """Draw n samples in the order of the sequential run, and which of p ranks has each sample.

    Rank j mod p has the sample at position j of the order, as in PyTorch's `DistributedSampler`.
    If p doesn't divide n, the sampler repeats the first samples at the end (drawn as padding), or
    leaves out the last ones with `drop_last` (drawn crossed out).

    Args:
        n: how many samples there are; up to about 100 stay readable.
        m: samples of a minibatch.
        p: ranks, at most 6.
        order: n sample numbers; default 0, 1, …, n - 1.
        highlight: the number of the minibatch, from 0, that is framed while the others are pale.
        drop_last: as in `DistributedSampler`.
        title: a title above the drawing.

    Returns:
        The figure, closed for pyplot, so that a notebook shows it once.

    Raises:
        ValueError: a number is too small, p is too large, or `order` doesn't have n entries.

    The drawing follows PyTorch's `DistributedSampler.__iter__` (torch/utils/data/distributed.py).
    """
    panel = {"n": n, "m": m, "p": p, "order": order, "drop_last": drop_last, "title": title}
    return partitions([panel], highlight=highlight)


def partitions(panels: Sequence[Mapping], *, highlight: int | None = None) -> Figure:
    """Draw several `partition`s below each other, with the same result and exceptions.

    Args:
        panels: for each drawing a dict with `n`, `m`, `p`, and maybe `order`, `drop_last`, `title`.
        highlight: as in `partition`, for all drawings.
    """
    made = [_Panel(**panel) for panel in panels]
    page = SamplePage(max(spot.x + 1 for panel in made for spot in panel.spots()))
    for panel in made:
        _draw_panel(page, panel, highlight)
    _draw_legend(page, made, highlight)
    return page.finish(" ".join(panel.in_words(highlight) for panel in made))


def _draw_legend(page: SamplePage, panels: list[_Panel], highlight: int | None) -> None:
    names = [f"rank {rank}" for rank in range(max(panel.p for panel in panels))]
    if len(panels) == 1 and highlight is not None:
        names = ranks_in_words(panels[0].microbatches(highlight))
    kinds = set().union(*(panel.kinds for panel in panels))
    others = {kind: text for kind, text in _KINDS.items() if kind in kinds}
    numbers_only = not any(panel.has_room for panel in panels)
    page.legend(names, others, "above: minibatch number" * numbers_only)


_KINDS = {"repeated": "repeated (padding)", "dropped": "left out (drop_last)"}


class _Spot(NamedTuple):
    """The spot of a position of the order: line, x on the line, and number of the minibatch."""

    place: int
    line: int
    x: float
    number: int


@dataclass
class _Panel:
    """An order of samples that p ranks share; see `partition`.

    Attributes:
        samples: the sample at each position of the order, with `repeated` samples added at the end.
        dropped: how many samples at the end are left out.
    """

    n: int
    m: int
    p: int
    order: Sequence[int] | None = None
    drop_last: bool = False
    title: str = ""

    def __post_init__(self):
        n, m, p = self.n, self.m, self.p
        if min(n, m, p) < 1:
            raise ValueError(f"n, m and p must be at least 1, not n = {n}, m = {m}, p = {p}")
        require_drawable(p)
        order = [int(sample) for sample in (range(n) if self.order is None else self.order)]
        if len(order) != n:
            raise ValueError(f"order has {len(order)} entries instead of n = {n}")
        self.repeated = 0 if self.drop_last else -n % p
        self.dropped = n % p if self.drop_last else 0
        self.samples = order + (order * math.ceil(self.repeated / n))[: self.repeated]

    @property
    def has_room(self) -> bool:
        """Return whether the words "minibatch 10" fit above a minibatch."""
        return self.m >= 4

    @property
    def kinds(self) -> list[str]:
        """Return "sample", "repeated" or "dropped" for each position."""
        kept = self.n - self.dropped
        return ["sample"] * kept + ["dropped"] * self.dropped + ["repeated"] * self.repeated

    def spots(self) -> list[_Spot]:
        """Return where each position is drawn."""
        gap = min(0.7, 0.15 + 0.15 * self.m)
        together = max(1, _PER_LINE // self.m)  # minibatches on a line
        lines_each = math.ceil(self.m / _PER_LINE)  # lines of a minibatch, several if m is large
        spots = []
        for place in range(len(self.samples)):
            number, within = divmod(place, self.m)
            row, column = divmod(number, together)
            line = row * lines_each + within // _PER_LINE
            x = column * (self.m + gap) + within % _PER_LINE
            spots.append(_Spot(place, line, x, number))
        return spots

    def microbatches(self, number: int | None) -> list[list[int]]:
        """Return the samples of each rank in a minibatch, or in all minibatches for None."""
        places = range(len(self.samples))
        if number is not None:
            places = places[self.m * number : self.m * (number + 1)]
        lists: list[list[int]] = [[] for _ in range(self.p)]
        for place in places:
            if self.kinds[place] != "dropped":
                lists[place % self.p].append(self.samples[place])
        return lists

    def in_words(self, highlight: int | None) -> str:
        """Return the drawing in words."""
        start = f"{self.n} sample{'s' * (self.n > 1)} in minibatches of {self.m}, "
        start += f"{self.p} rank{'s' * (self.p > 1)}"
        if highlight is not None:
            start += f", minibatch {highlight} framed"
        parts = [start, *ranks_in_words(self.microbatches(highlight))]
        for kind, name in (("repeated", "repeated"), ("dropped", "left out")):
            samples = [x for x, of in zip(self.samples, self.kinds, strict=True) if of == kind]
            if samples:
                parts.append(f"{name}: {listed(samples)}")
        words = "; ".join(parts)
        return f"{self.title}: {words}." if self.title else f"{words}."


def _draw_panel(page: SamplePage, panel: _Panel, highlight: int | None) -> None:
    if panel.title:
        page.heading(panel.title)
    spots = panel.spots()
    for line in range(spots[-1].line + 1):
        on_line = [spot for spot in spots if spot.line == line]
        # A minibatch that continues from the line above has its name there.
        page.down(1.0 if on_line[0].place % panel.m == 0 else 0.1)
        for number in sorted({spot.number for spot in on_line}):
            minibatch = [spot for spot in on_line if spot.number == number]
            _draw_minibatch(page, panel, minibatch, highlight)
        page.down(TALL + 0.25)
    page.down(0.35)


def _draw_minibatch(
    page: SamplePage, panel: _Panel, spots: list[_Spot], highlight: int | None
) -> None:
    """Draw the part of a minibatch that is on a line, with the number at its beginning."""
    first = spots[0].x
    last = spots[-1].x
    number = spots[0].number
    chosen = number == highlight
    look = {"weight": "bold", "color": INK} if chosen else {"color": GREY}
    if spots[0].place % panel.m == 0:
        if panel.has_room:
            page.words(first, 0.25, f"minibatch {number}", **look)
        else:
            page.words((first + last + 1) / 2, 0.25, str(number), ha="center", **look)
    pale = highlight is not None and not chosen
    for spot in spots:
        j = spot.place
        page.sample(spot.x, panel.samples[j], j % panel.p, panel.kinds[j], pale)
    if chosen:
        page.frame(first, last)


# -- what a sampler gave to the ranks -------------------------------------------------------------


def sampler_view(
    epochs: Mapping[str, Sequence[Sequence[int]]], n: int, *, title: str = ""
) -> Figure:
    """Draw which sample each rank saw at which position, with a block of rows for each epoch.

    Args:
        epochs: maps a name, such as "epoch 0", to the sample numbers of each rank, in rank order.
        n: samples of the data set. Samples that no rank saw are listed below the name.
        title: a title above the drawing.

    A sample is drawn as repeated if it was seen before in its block, at an earlier position, or at
    the same position by a lower rank.

    Returns:
        The figure, closed for pyplot, so that a notebook shows it once.

    Raises:
        ValueError: there is nothing to draw, or there are too many ranks to distinguish.
    """
    counts = [len(ranks) for ranks in epochs.values()]
    if not min(counts, default=0):
        raise ValueError("There is nothing to draw. Let epochs map names to one list per rank")
    most = max(counts)
    require_drawable(most)
    blocks = [_Block(name, ranks, n) for name, ranks in epochs.items()]
    page = SamplePage(max(block.width for block in blocks))
    if title:
        page.heading(title)
    for row in _rows_of_blocks(blocks, page.width):
        _draw_blocks(page, row)
    others = {"repeated": "seen before"} if any(block.again for block in blocks) else {}
    page.legend([f"rank {rank}" for rank in range(most)], others, "→ position in the epoch")
    return page.finish(" ".join([f"{title}." * bool(title), *map(_Block.in_words, blocks)]))


class _Block:
    """An epoch of n samples, as the ranks saw it.

    Attributes:
        again: (rank, position) of every sample that was seen before, in order of position and rank.
        facts: which samples were repeated or lost, in words.
    """

    def __init__(self, name: str, ranks: Sequence[Sequence[int]], n: int):
        self.name = name
        self.ranks = ranks
        self.places = max(map(len, ranks))
        self.again = set()
        seen = set()
        for place in range(self.places):
            for rank, samples in enumerate(ranks):
                if place < len(samples):
                    if samples[place] in seen:
                        self.again.add((rank, place))
                    seen.add(samples[place])
        lost = sorted(set(range(n)) - seen)
        repeated = sorted(ranks[rank][place] for rank, place in self.again)
        facts = {"repeated": repeated, "seen by no rank": lost}
        self.facts = [f"{fact}: {listed(samples)}" for fact, samples in facts.items() if samples]

    @property
    def width(self) -> float:
        """Return the block's width."""
        places = min(max(self.places, 4), _MOST_PLACES)
        words = max([0.27 * len(self.name), *(0.24 * len(fact) for fact in self.facts)])
        return max(_NAME + places, words)

    def in_words(self) -> str:
        """Return the block in words."""
        return f"{self.name}: {'; '.join([*ranks_in_words(self.ranks), *self.facts])}."


def _rows_of_blocks(blocks: list[_Block], width: float) -> list[list[_Block]]:
    """Return rows of blocks, with as many blocks side by side as fit into the width."""
    rows: list[list[_Block]] = []
    used = math.inf
    for block in blocks:
        if used + block.width > width:
            rows.append([])
            used = 0.0
        rows[-1].append(block)
        used += block.width + _BESIDE
    return rows


def _draw_blocks(page: SamplePage, row: list[_Block]) -> None:
    """Draw blocks side by side; the page continues below the longest block."""
    top = page.y
    bottoms = []
    lines = max(max(len(block.facts), 1) for block in row)
    for block in row:
        page.y = top
        page.down(0.95)
        page.words(0, 0.2, block.name, weight="bold")
        for fact in block.facts or ("every sample once",):
            page.down(0.85)
            page.words(0, 0.2, fact, color=RED if block.facts else GREY)
        page.down(0.85 * (lines - max(len(block.facts), 1)))
        for begin in range(0, max(block.places, 1), _MOST_PLACES):
            _draw_rows(page, block, begin)
        bottoms.append(page.y)
        page.x += block.width + _BESIDE
    page.x, page.y = 0.0, min(bottoms)
    page.down(0.4)


def _draw_rows(page: SamplePage, block: _Block, begin: int) -> None:
    """Draw a row for each rank, from position `begin` on."""
    look = {"color": GREY, "va": "center"}
    for rank, samples in enumerate(block.ranks):
        page.words(0, -TALL / 2, f"rank {rank}", **look)
        if not samples:
            page.words(_NAME, -TALL / 2, "no sample", **look)
        for place in range(begin, min(begin + _MOST_PLACES, len(samples))):
            kind = "repeated" if (rank, place) in block.again else "sample"
            page.sample(_NAME + place - begin, samples[place], rank, kind, pale=False)
        page.down(TALL + 0.05)
    page.down(0.1)


# -- sliders --------------------------------------------------------------------------------------


def explorer(n: int = 24, m: int = 8, p: int = 2) -> None:
    """Show sliders for n, p, the microbatch m/p and others above a `partition`.

    `DistributedSampler(…, shuffle=…, seed=0)` gives the order after `set_epoch(epoch)`. The sliders
    choose m/p, so p always divides m, because all ranks take equally many samples.
    If nobody can move a slider (tests and grading set `IPP_NONINTERACTIVE`), one line is printed
    instead, because the identity of a slider would differ in every run.

    Raises:
        ValueError: p doesn't divide m.
    """
    if m % p:
        raise ValueError(f"{p} ranks can't share minibatches of {m} samples evenly")
    if os.environ.get("IPP_NONINTERACTIVE"):
        print("Run this cell in JupyterLab to see sliders.")
        return
    import ipywidgets
    from IPython.display import display

    look = {"style": {"description_width": "14em"}, "layout": {"width": "30em"}}

    def slider(value: int, low: int, high: int, name: str) -> ipywidgets.IntSlider:
        return ipywidgets.IntSlider(
            value=value, min=low, max=high, description=name, continuous_update=False, **look
        )

    controls = {
        "n": slider(n, 1, 100, "n, samples"),
        "p": slider(p, 1, MOST_RANKS, "p, ranks"),
        "own": slider(m // p, 1, 8, "m/p, microbatch of a rank"),
        "number": slider(1, 0, 20, "framed minibatch"),
        "epoch": slider(0, 0, 9, "epoch (if shuffled)"),
        "shuffle": ipywidgets.Checkbox(value=False, description="shuffle", **look),
        "drop_last": ipywidgets.Checkbox(value=False, description="drop_last", **look),
    }

    def draw(n, p, own, number, epoch, shuffle, drop_last) -> None:
        m = own * p
        order = _sampler_order(n, epoch) if shuffle else None
        title = f"{n} samples in minibatches of {m} = {p} × {own}"
        number = min(number, math.ceil(n / m) - 1)
        display(partition(n, m, p, order, highlight=number, drop_last=drop_last, title=title))

    columns = (list(controls.values())[:4], list(controls.values())[4:])
    box = ipywidgets.HBox([ipywidgets.VBox(column) for column in columns])
    display(box, ipywidgets.interactive_output(draw, controls))


def _sampler_order(n: int, epoch: int) -> list[int]:
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(range(n), num_replicas=1, rank=0, shuffle=True)
    sampler.set_epoch(epoch)
    return list(sampler)
