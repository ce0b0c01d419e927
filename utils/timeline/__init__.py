"""Who communicated what and when in the last cell, from the ranks' own records.

    shown = ranks.timeline()            # after any %%px cell; shows itself in a notebook
    ranks.timeline(zoom=3)              # the third step of a training loop
    ranks.timeline(zoom=(0.1, 0.2))     # seconds since the cell began
    shown.totals                        # bytes, messages, seconds of each rank
    shown.save("trace.json")            # for https://ui.perfetto.dev or chrome://tracing
    shown.ideal                         # seconds, if the network were infinitely fast
    timeline.side_by_side({"by hand": shown, "DDP": other})     # one time axis
    timeline.compare({"by hand": shown, "DDP": other})          # calls, bytes, seconds; .save()

Each cell begins a new timeline once :func:`watch` was called.
"""

from __future__ import annotations

import functools
import math
import os
from typing import TYPE_CHECKING

from . import collect, ideal_network, on_rank, phrases, trace
from .comparison import Comparison
from .zoom import around, spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.cluster.questions import Ranks

__all__ = ["Comparison", "Timeline", "calls", "compare", "draw", "of", "side_by_side", "watch"]

TITLE = "What the ranks communicated"
_ALWAYS = (-math.inf, math.inf)


class Timeline:
    """What the ranks communicated in a cell, and what they did meanwhile.

    Args:
        reports: of each rank, see :func:`utils.timeline.on_rank.report`; of a rank that did not
            answer ``{"rank": …, "error": …}``.
        offsets: seconds that each rank's clock is ahead of rank 0's; default: one clock.
        title: of the figure.
        zoom: what the figure shows and the totals count, see :func:`of`.

    Attributes:
        records: one dict per operation, by rank and start; times in seconds since the cell began
            on the first rank; ``None`` for what never happened.
        lanes: the same by rank, with begin and end of the cell.
        window: from when to when (seconds) the zoom is; None without.
        spans: the same of each rank; without a zoom from ever to ever.
    """

    def __init__(
        self,
        reports: list[dict],
        offsets: list[float] | None = None,
        title: str | None = None,
        zoom: int | tuple[float, float] | None = None,
    ):
        self.title = title or TITLE
        self.lanes = collect.lanes(reports, offsets or [0.0] * len(reports))
        self.records = [record for lane in self.lanes for record in lane.records]
        asked = spans(self.lanes, zoom)
        self.window = around(asked) if asked else None
        self.spans = asked or [_ALWAYS] * len(self.lanes)

    @functools.cached_property
    def totals(self) -> list[dict]:
        """Return one dict per rank, in bytes and seconds.

        "computing" is all time in which the thread was not blocked; "waiting" that before the
        partner was there, and that for the rank's own background operations, which is also told
        by itself; "communicating" the rest; "hidden" is communication while computing. Zoomed to a
        step, they are those of each rank's own step.
        """
        return [
            collect.totals(lane, *span) for lane, span in zip(self.lanes, self.spans, strict=True)
        ]

    @functools.cached_property
    def ideal(self) -> float | None:
        """Return the seconds of the zoom, or of the cell, on an infinitely fast network.

        None means that a rank waits for what never comes. See :mod:`utils.timeline.ideal_network`.
        """
        return ideal_network.seconds(self.lanes, self.spans)

    def figure(
        self, width: float = 9, since: float | None = None, until: float | None = None
    ) -> Figure:
        """Return the picture: a lane per rank, an arrow per message.

        Args:
            width: inches.
            since: seconds since the cell began; by default the zoom's, otherwise the beginning of
                the cell, or of the part in which the ranks communicated if that part is small.
            until: the same for the end.
        """
        from . import picture

        first, last = self.window or (None, None)
        since = first if since is None else since
        until = last if until is None else until
        panel = picture.Panel(self.lanes, self.title, since, until, note=self._ideal_in_words())
        made = picture.figure([panel], width)
        made.alt_text = self.alt_text
        return made

    @property
    def alt_text(self) -> str:
        """Return the picture in words, for readers who do not see it."""
        said = phrases.described(self.title, self.lanes, self.totals)
        free = self._ideal_in_words()
        return f"{said} {phrases.sentence(free)}" if free else said

    def _ideal_in_words(self) -> str:
        """Nothing, where the ranks communicated nothing."""
        if not self.records:
            return ""
        return phrases.ideal(self.ideal, ideal_network.measured(self.lanes, self.spans))

    def save(self, path: str | os.PathLike) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open."""
        trace.save(self.lanes, path)

    def __repr__(self) -> str:
        from tabulate import tabulate  # the ranks import this package, too, and need no tables

        rows = [phrases.in_words(row) for row in self.totals]
        table = tabulate(
            rows, headers="keys", tablefmt="simple", stralign="right", maxheadercolwidths=13
        )
        problems = [f"rank {lane.rank}: {lane.problem}" for lane in self.lanes if lane.problem]
        part = [f"from {phrases.span(*self.window)} after the cell began"] if self.window else []
        return "\n".join([table, *part, *problems])

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict, dict]:
        """The image and its alternative text; as plain text the table."""
        from ..figures import forms

        data, metadata = forms.bundle(self.figure())
        return {**data, "text/plain": repr(self)}, metadata


def side_by_side(runs: dict[str, Timeline], width: float = 9) -> Figure:
    """Timelines above each other, by what they are called: one time axis, all begin at 0.

    With each name stand how long the run took and where the time went, as the mean of its ranks.
    Zoom to a step of each (``ranks.timeline(zoom=3)``) to compare steps.
    """
    from . import picture

    panels, said = [], []
    for name, run in runs.items():
        panel = picture.Panel(run.lanes, name, *(run.window or (None, None)))
        shown = (panel.since, panel.until)
        totals = run.totals if run.window else [collect.totals(one, *shown) for one in run.lanes]
        spans = run.spans if run.window else [shown] * len(run.lanes)
        free = phrases.ideal(ideal_network.seconds(run.lanes, spans))
        panel.subtitle, panel.note = phrases.means(totals), free
        panels.append(panel)
        said.append(
            f"{phrases.described(name, run.lanes, totals, brief=True)} {phrases.sentence(free)}"
        )
    made = picture.figure(panels, width)
    made.alt_text = " ".join(said)
    return made


def compare(runs: dict[str, Timeline]) -> Comparison:
    """Return what distinguishes runs, by the names of the runs: see :class:`Comparison`."""
    return Comparison(runs)


def of(
    ranks: Ranks, title: str | None = None, zoom: int | tuple[float, float] | None = None
) -> Timeline:
    """Return the timeline of the last cell that the ranks ran (see :func:`watch`).

    Args:
        ranks: to ask.
        title: of the figure.
        zoom: ``(since, until)`` in seconds since the cell began, or the number of a training step:
            1 is the first, -1 the last. A step ends with ``optimizer.step()``; the next begins
            there.
    """
    reports = [
        reply.value if reply.status == "ok" else {"rank": reply.rank, "error": reply.error}
        for reply in ranks.ask(on_rank.report)
    ]
    return Timeline(reports, _offsets(ranks, reports), title, zoom)


def _offsets(ranks: Ranks, reports: list[dict]) -> list[float]:
    """Of the ranks' clocks. They are taken for one where a rank can't take part in comparing."""
    none = [0.0] * len(reports)
    if len(reports) == 1 or any("error" in report for report in reports):
        return none
    replies = ranks.ask(on_rank.clock_offset)
    if any(reply.status != "ok" for reply in replies):
        return none
    return [reply.value for reply in replies]


def watch(ranks: Ranks) -> None:
    """Have the ranks keep a timeline for each cell; once, after they are up."""
    ranks.ask(on_rank.start_watching)


def calls(ranks: Ranks) -> list[list[dict]]:
    """Return the communications of the last cell: one list of records per rank."""
    return [lane.records for lane in of(ranks).lanes]


def draw(ranks: Ranks, title: str | None = None) -> Figure | None:
    """Return the figure of the last cell; None if the ranks communicated nothing."""
    timeline = of(ranks, title)
    if not timeline.records:
        print("The ranks communicated nothing in the last cell.")
        return None
    return timeline.figure()
