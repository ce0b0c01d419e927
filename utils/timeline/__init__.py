"""Who communicated what and when in the last cell, from the ranks' own records.

    shown = ranks.timeline()            # after any %%px cell; shows itself in a notebook
    shown.figure(since=0.1, until=0.2)  # seconds since the cell began: a closer look
    shown.totals                        # bytes, messages, seconds of each rank
    shown.save("trace.json")            # for https://ui.perfetto.dev or chrome://tracing

Each cell begins a new timeline once :func:`watch` was called.
"""

from __future__ import annotations

import functools
import io
import os
from typing import TYPE_CHECKING

from . import collect, trace, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Timeline", "calls", "draw", "of", "watch"]

TITLE = "What the ranks communicated"


class Timeline:
    """What the ranks communicated in a cell, and what they did meanwhile.

    Args:
        reports: of each rank, see :func:`utils.timeline.on_rank.report`; of a rank that did not
            answer ``{"rank": …, "error": …}``.
        offsets: seconds that each rank's clock is ahead of rank 0's; default: one clock.
        title: of the figure.

    Attributes:
        records: one dict per operation, by rank and start; times in seconds since the cell began
            on the first rank; ``None`` for what never happened.
        lanes: the same by rank, with begin and end of the cell.
    """

    def __init__(
        self, reports: list[dict], offsets: list[float] | None = None, title: str | None = None
    ):
        self.title = title or TITLE
        self.lanes = collect.lanes(reports, offsets or [0.0] * len(reports))
        self.records = [record for lane in self.lanes for record in lane.records]

    @functools.cached_property
    def totals(self) -> list[dict]:
        """One dict per rank, in bytes and seconds.

        "computing" is all time in which the thread was not blocked, "waiting" that before the
        partner was there, "communicating" the rest; "hidden" is communication while computing.
        """
        return [collect.totals(lane) for lane in self.lanes]

    def figure(
        self, width: float = 9, since: float | None = None, until: float | None = None
    ) -> Figure:
        """The picture: a lane per rank, an arrow per message.

        width: inches. since, until: seconds since the cell began; by default all of it, or, where
        the ranks communicated only in a small part, that part.
        """
        from . import picture

        return picture.figure(self.lanes, self.title, width, since, until)

    def save(self, path: str | os.PathLike) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open."""
        trace.save(self.lanes, path)

    def __repr__(self) -> str:
        from tabulate import tabulate  # the ranks import this package, too, and need no tables

        rows = [words.in_words(row) for row in self.totals]
        table = tabulate(
            rows, headers="keys", tablefmt="simple", stralign="right", maxheadercolwidths=13
        )
        problems = [f"rank {lane.rank}: {lane.problem}" for lane in self.lanes if lane.problem]
        return "\n".join([table, *problems])

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure().savefig(file, format="png", dpi=100)
        return file.getvalue()


def of(ranks, title: str | None = None) -> Timeline:
    """The timeline of the last cell that the ranks ran (see :func:`watch`)."""
    reports = [
        reply.value if reply.status == "ok" else {"rank": reply.rank, "error": reply.error}
        for reply in ranks.ask(f"{__name__}.on_rank:report")
    ]
    return Timeline(reports, _offsets(ranks, reports), title)


def _offsets(ranks, reports: list[dict]) -> list[float]:
    """Of the ranks' clocks. They are taken for one where a rank can't take part in comparing."""
    none = [0.0] * len(reports)
    if len(reports) == 1 or any("error" in report for report in reports):
        return none
    replies = ranks.ask(f"{__name__}.on_rank:clock_offset")
    if any(reply.status != "ok" for reply in replies):
        return none
    return [reply.value for reply in replies]


def watch(ranks) -> None:
    """Have the ranks keep a timeline for each cell; once, after they are up."""
    ranks.ask(f"{__name__}.on_rank:start_watching")


def calls(ranks) -> list[list[dict]]:
    """The communications of the last cell: one list of records per rank."""
    return [lane.records for lane in of(ranks).lanes]


def draw(ranks, title: str | None = None) -> Figure | None:
    """The figure of the last cell; None where the ranks communicated nothing."""
    timeline = of(ranks, title)
    if not timeline.records:
        print("The ranks communicated nothing in the last cell.")
        return None
    return timeline.figure()
