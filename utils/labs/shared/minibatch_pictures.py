"""Drawings of who gets which sample: of a minibatch, and of a sampler's epochs.

    from utils.labs.shared import minibatch_pictures
    minibatch_pictures.partition(24, 8, 2, highlight=1)     # places of the order, colored by rank
    minibatch_pictures.sampler_view({"epoch 0": [[0, 2], [1, 0]]}, n=3)     # what each rank got
    minibatch_pictures.explorer()                           # sliders, in JupyterLab

A rank is told by its colour and by the mark below the sample's number. Samples that a sampler
repeats stand in a dashed red box, samples that it leaves out are crossed out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.figures import CYCLE, GREY, INK, PAPER, RED, use_style

MARKS = ("o", "s", "^", "D", "v", "P")
MOST_RANKS = len(MARKS)

# In units of a sample's box, which is 1 wide.
_TALL, _LEFT, _WIDE = 1.5, 0.4, 30.5
_PER_LINE = 24
_MOST_PLACES = 25
_NAME = 2.6  # across, for "rank 0"
_BESIDE = 2.0  # between blocks

_INCHES = 10.0  # of every figure, across
_LISTED = 12  # samples of a legend entry


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
    """Draw n samples in the order of the sequential run, and which of p ranks has each.

    The sample at place j of the order is rank j mod p's, as PyTorch's `DistributedSampler` has it.
    Where p does not divide n, the sampler repeats the first samples of the order at the end
    (drawn as padding), or with `drop_last` leaves out the last ones (drawn crossed out).

    Args:
        n: samples; up to about 100 stay readable.
        m: samples of a minibatch.
        p: ranks, at most 6.
        order: n sample numbers; default 0, 1, …, n - 1.
        highlight: the number of a minibatch, from 0, that is framed while the others are pale.
        drop_last: as in `DistributedSampler`.
        title: above the drawing.

    Returns:
        The figure, closed for pyplot, so that a notebook shows it once.

    Raises:
        ValueError: a number is too small, p too large, or `order` has not n entries.

    The drawing is modelled on PyTorch's `DistributedSampler.__iter__`
    (torch/utils/data/distributed.py).
    """
    panel = {"n": n, "m": m, "p": p, "order": order, "drop_last": drop_last, "title": title}
    return partitions([panel], highlight=highlight)


def partitions(panels: Sequence[Mapping], *, highlight: int | None = None) -> Figure:
    """Draw several `partition`s below each other.

    Args:
        panels: for each drawing a dict with `n`, `m`, `p`, and maybe `order`, `drop_last`, `title`.
        highlight: as in `partition`, the same in all of them.

    Returns, raises: as `partition`.
    """
    made = [_panel(**panel) for panel in panels]
    spans = [_spans(panel) for panel in made]
    page = _Page(max(max(x for _, x, _ in places) + 1 for places in spans))
    for panel, places in zip(made, spans, strict=True):
        _draw_panel(page, panel, places, highlight)
    others = {}
    if any(panel.repeated for panel in made):
        others["repeated"] = "repeated (padding)"
    if any(panel.dropped for panel in made):
        others["dropped"] = "left out (drop_last)"
    alone = len(made) == 1 and highlight is not None
    page.legend(
        max(panel.p for panel in made),
        others,
        lists=_microbatches(made[0], highlight) if alone else (),
        note="" if any(_has_room(panel.m) for panel in made) else "above: number of the minibatch",
    )
    return page.finish(" ".join(_panel_in_words(panel, highlight) for panel in made))


@dataclass(frozen=True)
class _Panel:
    """Places of an order. The last `repeated` were added, the last `dropped` left out."""

    samples: tuple[int, ...]
    m: int
    p: int
    repeated: int
    dropped: int
    title: str

    def kind(self, place: int) -> str:
        if place >= len(self.samples) - self.repeated:
            return "repeated"
        return "dropped" if place >= len(self.samples) - self.dropped else "sample"


def _panel(n, m, p, order=None, drop_last=False, title="") -> _Panel:
    if min(n, m, p) < 1:
        raise ValueError(f"n, m and p must be at least 1, got n = {n}, m = {m}, p = {p}")
    _at_most_drawable(p)
    samples = list(range(n)) if order is None else [int(sample) for sample in order]
    if len(samples) != n:
        raise ValueError(f"order has {len(samples)} entries, expected n = {n}")
    rest = n % p
    repeated = (p - rest) % p if not drop_last else 0
    dropped = rest if drop_last else 0
    samples += (samples * math.ceil(repeated / n))[:repeated]
    return _Panel(tuple(samples), m, p, repeated, dropped, title)


def _at_most_drawable(p: int) -> None:
    if p > MOST_RANKS:
        raise ValueError(f"{MOST_RANKS} ranks can be told apart in a drawing, not {p}")


def _spans(panel: _Panel) -> list[tuple[int, float, int]]:
    """Of each place: its line, where it is on the line, and its minibatch."""
    m = panel.m
    gap = min(0.7, 0.15 + 0.15 * m)
    together = max(1, _PER_LINE // m)  # minibatches on a line
    lines_each = math.ceil(m / _PER_LINE)  # lines of a minibatch, more than one if m is large
    spans = []
    for place in range(len(panel.samples)):
        number, within = divmod(place, m)
        row, column = divmod(number, together)
        line = row * lines_each + within // _PER_LINE
        spans.append((line, column * (m + gap) + within % _PER_LINE, number))
    return spans


def _microbatches(panel: _Panel, highlight: int) -> list[list[int]]:
    """Of each rank: its samples of the highlighted minibatch."""
    places = range(panel.m * highlight, min(panel.m * (highlight + 1), len(panel.samples)))
    lists = [[] for _ in range(panel.p)]
    for place in places:
        if panel.kind(place) != "dropped":
            lists[place % panel.p].append(panel.samples[place])
    return lists


def _panel_in_words(panel: _Panel, highlight: int | None) -> str:
    n = len(panel.samples) - panel.repeated
    said = f"{n} sample{'s' * (n > 1)} in minibatches of {panel.m}, "
    said += f"{panel.p} rank{'s' * (panel.p > 1)}"
    if highlight is not None:
        said += f", minibatch {highlight} framed"
    # Of a drawing without a frame, all minibatches at once.
    parts = _microbatches(
        panel if highlight is not None else replace(panel, m=10**9), highlight or 0
    )
    said += "".join(f"; rank {r}{_microbatch_text(own)}" for r, own in enumerate(parts))
    for kind, name in (("repeated", "repeated"), ("dropped", "left out")):
        own = [x for place, x in enumerate(panel.samples) if panel.kind(place) == kind]
        said += f"; {name}: {_listed(own)}" if own else ""
    return f"{panel.title}: {said}." if panel.title else f"{said}."


def _draw_panel(page: _Page, panel: _Panel, places, highlight: int | None) -> None:
    if panel.title:
        page.heading(panel.title)
    for line in range(places[-1][0] + 1):
        on_line = [(j, x, k) for j, (row, x, k) in enumerate(places) if row == line]
        # A minibatch that goes on from the line above has its name there.
        page.down(1.0 if on_line[0][0] % panel.m == 0 else 0.1)
        for number in sorted({k for _, _, k in on_line}):
            own = [(j, x) for j, x, k in on_line if k == number]
            chosen = number == highlight
            if own[0][0] % panel.m == 0:
                _name_minibatch(page, own, panel.m, number, chosen)
            for j, x in own:
                pale = highlight is not None and not chosen
                page.sample(x, panel.samples[j], j % panel.p, panel.kind(j), pale)
            if chosen:
                page.frame(own[0][1], own[-1][1])
        page.down(_TALL + 0.25)
    page.down(0.35)


def _name_minibatch(page: _Page, own: list, m: int, number: int, chosen: bool) -> None:
    first, last = own[0][1], own[-1][1]
    wide = _has_room(m)
    x = first if wide else (first + last + 1) / 2
    page.words(
        x, 0.25, f"minibatch {number}" if wide else str(number),
        align="left" if wide else "center", bold=chosen, color=INK if chosen else GREY,
    )  # fmt: skip


def _has_room(m: int) -> bool:
    """Whether "minibatch 10" fits above a minibatch of m samples."""
    return m >= 4


# -- what a sampler gave to the ranks -------------------------------------------------------------


def sampler_view(
    epochs: Mapping[str, Sequence[Sequence[int]]], n: int, *, title: str = ""
) -> Figure:
    """Draw which sample each rank saw at which place, one block of rows per epoch.

    Args:
        epochs: for each name, "epoch 0" say, the sample numbers of each rank, in rank order.
        n: samples of the data set. Those that no rank saw are listed beside the name.
        title: above the drawing.

    A sample that was seen before in its block, at an earlier place or at the same place by a lower
    rank, is drawn as repeated.

    Returns:
        The figure, closed for pyplot, so that a notebook shows it once.

    Raises:
        ValueError: there is nothing to draw, or more ranks than can be told apart.
    """
    if not epochs or not all(len(ranks) for ranks in epochs.values()):
        raise ValueError("nothing to draw: epochs maps names to one list per rank")
    most = max(len(ranks) for ranks in epochs.values())
    _at_most_drawable(most)
    blocks = [_block(name, ranks, n) for name, ranks in epochs.items()]
    page = _Page(max(block.width for block in blocks))
    if title:
        page.heading(title)
    for row in _rows_of_blocks(blocks, page.width):
        _draw_blocks(page, row)
    others = {"repeated": "seen before"} if any(block.again for block in blocks) else {}
    page.legend(most, others, note="→ place in the epoch")
    return page.finish(" ".join([f"{title}." if title else "", *map(_block_in_words, blocks)]))


@dataclass(frozen=True)
class _Block:
    """What the ranks saw in an epoch: samples by rank, which of them (rank, place) again."""

    name: str
    ranks: Sequence[Sequence[int]]
    again: set[tuple[int, int]]
    facts: tuple[str, ...]
    width: float

    @property
    def places(self) -> int:
        return max(len(samples) for samples in self.ranks)


def _block(name: str, ranks: Sequence[Sequence[int]], n: int) -> _Block:
    again = _seen_before(ranks)
    lost = sorted(set(range(n)).difference(*ranks))
    repeated = sorted(ranks[rank][place] for rank, place in again)
    facts = (f"repeated: {_listed(repeated)}",) if repeated else ()
    facts += (f"seen by no rank: {_listed(lost)}",) if lost else ()
    places = min(max(map(len, ranks)), _MOST_PLACES)
    words = max([0.27 * len(name), *(0.24 * len(fact) for fact in facts)])
    return _Block(name, ranks, again, facts, max(_NAME + max(places, 4), words))


def _block_in_words(block: _Block) -> str:
    ranks = [f"rank {r}{_microbatch_text(own)}" for r, own in enumerate(block.ranks)]
    return f"{block.name}: {'; '.join([*ranks, *block.facts])}."


def _rows_of_blocks(blocks: list[_Block], width: float) -> list[list[_Block]]:
    """As many blocks beside each other as the width has room for."""
    rows, used = [], math.inf
    for block in blocks:
        if used + block.width > width:
            rows.append([])
            used = 0.0
        rows[-1].append(block)
        used += block.width + _BESIDE
    return rows


def _draw_blocks(page: _Page, row: list[_Block]) -> None:
    """Blocks beside each other; the page goes on below the longest."""
    top = page.y
    bottoms = []
    lines = max(max(len(block.facts), 1) for block in row)
    for block in row:
        page.y = top
        page.down(0.95)
        page.words(0, 0.2, block.name, bold=True)
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


def _seen_before(ranks: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """(rank, place) of every sample that was seen already, by place and then by rank."""
    seen, again = set(), set()
    for place in range(max(len(samples) for samples in ranks)):
        for rank, samples in enumerate(ranks):
            if place < len(samples):
                if samples[place] in seen:
                    again.add((rank, place))
                seen.add(samples[place])
    return again


def _listed(samples: list[int]) -> str:
    text = ", ".join(map(str, samples[:_LISTED]))
    more = len(samples) - _LISTED
    return f"{text}, and {more} more" if more > 0 else text


def _draw_rows(page: _Page, block: _Block, begin: int) -> None:
    for rank, samples in enumerate(block.ranks):
        page.words(0, -_TALL / 2, f"rank {rank}", color=GREY, center=True)
        if not samples:
            page.words(_NAME, -_TALL / 2, "no sample", color=GREY, center=True)
        for place in range(begin, min(begin + _MOST_PLACES, len(samples))):
            kind = "repeated" if (rank, place) in block.again else "sample"
            page.sample(_NAME + place - begin, samples[place], rank, kind, pale=False)
        page.down(_TALL + 0.05)
    page.down(0.1)


# -- the page: boxes, words and a legend, from the top down ----------------------------------------


class _Page:
    """Draws downwards from 0 in units of a sample's box; `finish` fits the figure around it."""

    def __init__(self, width: float):
        use_style()
        # Few samples are not blown up, and many still fit.
        self.width = max(width + 2 * _LEFT, _WIDE if width <= _WIDE else 0)
        self.unit = _INCHES / self.width  # inches
        self.size = min(10.0, 30 * self.unit)  # points, of a sample's number
        self.x, self.y = 0.0, -0.1
        self.figure, self.axes = plt.subplots(figsize=(_INCHES, 1))
        self.axes.set_axis_off()

    def down(self, by: float) -> None:
        self.y -= by

    def heading(self, text: str) -> None:
        self.down(0.9)
        self.words(0, 0.1, text, size=12)

    def words(
        self, x, up, text, *, size=10.0, align="left", bold=False, color=INK, center=False
    ) -> None:
        self.axes.text(
            self.x + x + _LEFT, self.y + up, text, fontsize=size, ha=align, color=color,
            va="center" if center else "baseline", weight="bold" if bold else "normal",
        )  # fmt: skip

    def sample(self, x: float, number: int, rank: int, kind: str, pale: bool) -> None:
        """A sample's box, hanging from the present height."""
        _draw_sample(self.axes, self.x + x + _LEFT, self.y, number, rank, kind, pale, self.size)

    def frame(self, first: float, last: float) -> None:
        """A thick frame around samples from one place to another."""
        self.axes.add_patch(
            Rectangle(
                (first + _LEFT - 0.1, self.y - _TALL - 0.1), last - first + 1.2, _TALL + 0.2,
                facecolor="none", edgecolor=INK, linewidth=2.2, zorder=4,
            )
        )  # fmt: skip

    def legend(self, ranks: int, others: Mapping[str, str], *, lists=(), note: str = "") -> None:
        """One entry per rank, with its list of samples if given, and one per other kind of box."""
        self.down(0.75)
        x = 0.0
        for rank in range(ranks):
            samples = _microbatch_text(lists[rank]) if rank < len(lists) else ""
            x = self._entry(x, f"rank {rank}{samples}", rank, "sample")
        for kind, text in others.items():
            x = self._entry(x, text, None, kind)
        if note:
            self.words(x + 0.3, 0, note, color=GREY, center=True)
        self.down(0.7)

    def _entry(self, x: float, text: str, rank: int | None, kind: str) -> float:
        """One entry; where the next one begins."""
        letter = 0.078 / self.unit  # inches of a generous letter
        length = 1.5 + letter * len(text) + 0.8
        if x > 0 and x + length > self.width:
            x = 0.0
            self.down(1.2)
        _draw_key(self.axes, x + _LEFT, self.y, rank, kind)
        self.words(x + 1.3, 0, text, center=True)
        return x + length

    def finish(self, words: str) -> Figure:
        height = -self.y
        self.figure.set_size_inches(_INCHES, height * self.unit)
        self.axes.set_position([0, 0, 1, 1])
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(-height, 0)
        plt.close(self.figure)
        self.figure.alt_text = words
        return self.figure


def _microbatch_text(samples: Sequence[int]) -> str:
    if not samples:
        return ": none"
    if len(samples) > _LISTED:
        return f": {len(samples)} samples"
    return ": " + " ".join(map(str, samples))


def _tint(color: str, strength: float) -> tuple[float, ...]:
    """The colour on white paper: strength 1 is full, 0 is white."""
    return tuple(1 - strength * (1 - part) for part in to_rgb(color))


def _draw_sample(axes: Axes, x, top, number, rank, kind, pale, size) -> None:
    _draw_box(axes, x, top, _TALL, rank, kind, pale)
    colors = {"sample": INK, "repeated": RED, "dropped": GREY}
    axes.text(
        x + 0.5, top - 0.48, str(number), ha="center", va="center", fontsize=size,
        color=_tint(colors[kind], 0.5 if pale else 1.0), zorder=3,
    )  # fmt: skip
    if kind != "dropped":
        _draw_mark(axes, x + 0.5, top - 1.12, rank, 0.45 if pale else 1.0)


def _draw_box(axes: Axes, x, top, height, rank, kind, pale) -> None:
    look = {"facecolor": PAPER, "edgecolor": GREY, "linewidth": 0.8, "zorder": 2}
    if kind == "sample":
        look["facecolor"] = _tint(CYCLE[rank], 0.12 if pale else 0.38)
        look["edgecolor"] = _tint(INK, 0.3 if pale else 0.7)
    elif kind == "repeated":
        look |= {"edgecolor": RED, "linewidth": 1.6, "linestyle": (0, (3, 2))}
    axes.add_patch(Rectangle((x + 0.06, top - height), 0.88, height, **look))
    if kind == "dropped":
        line = {"color": GREY, "linewidth": 1.0, "zorder": 2.5}
        axes.plot([x + 0.06, x + 0.94], [top - height, top], **line)


def _draw_mark(axes: Axes, x, y, rank: int, strength: float) -> None:
    axes.plot(
        [x], [y], marker=MARKS[rank], markersize=5.5, linestyle="none",
        color=_tint(CYCLE[rank], strength), markeredgecolor=_tint(INK, strength),
        markeredgewidth=0.6, zorder=3,
    )  # fmt: skip


def _draw_key(axes: Axes, x, y, rank: int | None, kind: str) -> None:
    _draw_box(axes, x + 0.1, y + 0.45, 0.9, rank, kind, pale=False)
    if rank is not None:
        _draw_mark(axes, x + 0.6, y, rank, 1.0)


# -- sliders --------------------------------------------------------------------------------------


def explorer(n: int = 24, m: int = 8, p: int = 2) -> None:
    """Show sliders for n, p, the microbatch m/p and others above a `partition`.

    The order is that of `DistributedSampler(…, shuffle=…, seed=0)` after `set_epoch(epoch)`. The
    sliders choose m/p, since all ranks take equally many samples: p always divides m.
    Where nobody can move a slider (`IPP_NONINTERACTIVE` is set: tests, grading), one line is
    printed in its place: a slider's identity would differ in every run.

    Raises ValueError if p does not divide m.
    """
    if m % p:
        raise ValueError(f"minibatches of {m} cannot be shared evenly by {p} ranks")
    if os.environ.get("IPP_NONINTERACTIVE"):
        print("Here are sliders when you run this cell in JupyterLab.")
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
        title = f"{n} samples, {p} × {own}: minibatches of {m}"
        number = min(number, math.ceil(n / m) - 1)
        display(partition(n, m, p, order, highlight=number, drop_last=drop_last, title=title))

    half = (
        ipywidgets.VBox(list(controls.values())[:4]),
        ipywidgets.VBox(list(controls.values())[4:]),
    )
    display(ipywidgets.HBox(half), ipywidgets.interactive_output(draw, controls))


def _sampler_order(n: int, epoch: int) -> list[int]:
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(range(n), num_replicas=1, rank=0, shuffle=True)
    sampler.set_epoch(epoch)
    return list(sampler)
