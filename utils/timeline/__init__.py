"""A timeline of what each rank communicated in the last cell, from the ranks' records.

    shown = ranks.timeline()            # after any %%px cell; a notebook shows it
    shown.part(since=0.1, until=0.2)    # begins with a part, in seconds since the cell began
    shown.figure()                      # a still picture, to combine with others
    shown.totals                        # bytes, messages, seconds of each rank
    shown.save("trace.json")            # for https://ui.perfetto.dev or chrome://tracing
    shown.ideal                         # seconds, if the network were infinitely fast
    shown.on(machine, ranks=1024)       # on another machine, see utils.forecast
    shown.run().save("run.json")        # the cell as data, for `ddl-labs forecast`

Each cell begins a new timeline.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import activity, cell_log, ideal_network, phrases, trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    import utils.forecast
    from utils.cluster.questions import Ranks
    from utils.figures.interactive import Interactive

__all__ = ["Timeline", "of"]

TITLE = "What the ranks communicated"
_SCRIPTS = [
    Path(__file__).with_name("scripts") / f"{name}.js" for name in ("calls", "drawing", "timeline")
]


class Timeline:
    """What the ranks communicated in a cell, and what they did in between.

    Args:
        reports: the report of each rank, see :func:`utils.timeline.cell_log.report`; a rank that
            did not answer has ``{"rank": …, "error": …}``.
        offsets: seconds that each rank's clock is ahead of rank 0's; by default there is one clock.
        title: title of the figure.
        simple: show only bars and arrows; the page has legend, buttons and sums below "more".

    Attributes:
        records: one dict per operation, by rank and start. Times are seconds since the cell began
            on the first rank, or ``None`` for an event that never happened.
        lanes: the records by rank, with begin and end of the cell.
    """

    def __init__(
        self,
        reports: list[dict],
        offsets: list[float] | None = None,
        title: str | None = None,
        simple: bool = False,
    ):
        self.title = title or TITLE
        self._is_simple = simple
        self.lanes = activity.lanes(reports, offsets or [0.0] * len(reports))
        self.records = activity.all_records(self.lanes)
        self._cores = min((report.get("cores") or 0 for report in reports), default=0)
        self._part: tuple[float | None, float | None] = (None, None)
        self._sender: int | None = None

    def part(
        self, since: float | None = None, until: float | None = None, sender: int | None = None
    ) -> Timeline:
        """Return the same timeline, but one that first shows a part of the cell.

        Args:
            since: begin of the part, in seconds since the cell began. By default, it is the begin
                of the cell, or of the part with communication if this part is small.
            until: end of the part, in seconds since the cell began.
            sender: show arrows only for the messages that this rank sends; by default for all.
        """
        made = copy.copy(self)
        made._part, made._sender = (since, until), sender
        return made

    @functools.cached_property
    def totals(self) -> list[dict]:
        """Return one dict per rank, in bytes and seconds.

        In "computing", the thread was not blocked. In "waiting", it waited for a partner or for
        the rank's own background operations, whose share has a separate entry. "communicating" is
        the rest, and "hidden" is communication while computing.
        """
        return [activity.totals(lane) for lane in self.lanes]

    @functools.cached_property
    def ideal(self) -> float | None:
        """Return the seconds of the cell on an infinitely fast network.

        None means that a rank never stops waiting. See :mod:`utils.timeline.ideal_network`.
        """
        return ideal_network.seconds(self.lanes)

    def run(self, title: str = "", steps: int = 0) -> utils.forecast.Run:
        """Return the cell as a run that other machines can replay.

        Args:
            title: what the run is; by default, the timeline's title.
            steps: how many equal steps the cell has. By default, the calls that repeat tell.

        Raises:
            RunError: a rank did not answer, or a call never ended.
        """
        from . import recording

        return recording.run(self.lanes, self._cores, title or self.title, steps)

    def on(
        self,
        machine: utils.forecast.Machine,
        ranks: int | None = None,
        *,
        steps: int = 0,
        **options: Any,
    ) -> utils.forecast.Forecast:
        """Return what the cell would do on another machine, see :func:`utils.forecast.forecast`.

        Args:
            machine: such as ``utils.forecast.machine("cluster")``.
            ranks: by default, as many as ran the cell.
            steps: as in `run`.
            options: as in :func:`utils.forecast.forecast`.

        Raises:
            ForecastError: there is no answer; the message says why.
        """
        from utils.forecast import forecast

        return forecast(self.run(steps=steps), machine, ranks, **options)

    def figure(
        self, width: float = 9, since: float | None = None, until: float | None = None
    ) -> Figure:
        """Return the picture: a lane per rank, an arrow per message.

        Args:
            width: width in inches.
            since: as in `part`, whose values are the default.
            until: as in `part`.
        """
        from . import picture

        since = self._part[0] if since is None else since
        until = self._part[1] if until is None else until
        look = {"note": self._ideal_in_words(), "width": width, "simple": self._is_simple}
        made = picture.figure(self.lanes, self.title, since, until, sender=self._sender, **look)
        made.alt_text = self.alt_text
        return made

    @property
    def alt_text(self) -> str:
        """Return the picture in words, for readers who can't see it."""
        words = phrases.described(self.title, self.lanes, self.totals)
        ideal = self._ideal_in_words()
        return f"{words} {phrases.sentence(ideal)}" if ideal else words

    def _ideal_in_words(self) -> str:
        """Return the time on an ideal network; "" if the ranks communicated nothing."""
        if not self.records:
            return ""
        return phrases.ideal(self.ideal, ideal_network.measured(self.lanes))

    def save(self, path: str | os.PathLike) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open."""
        trace.save(self.lanes, path)

    def __repr__(self) -> str:
        from tabulate import tabulate  # here, because ranks import this package without tables

        rows = [phrases.in_words(row) for row in self.totals]
        table = tabulate(
            rows, headers="keys", tablefmt="simple", stralign="right", maxheadercolwidths=13
        )
        problems = [f"rank {lane.rank}: {lane.problem}" for lane in self.lanes if lane.problem]
        return "\n".join([table, *problems])

    def interactive(self) -> Interactive:
        """Return the timeline as a notebook shows it: you can zoom, and read about each call."""
        from ..figures.interactive import Interactive
        from . import page_data

        since, until = self._part
        ideal = self._ideal_in_words()
        data = page_data.page_data(
            self.title,
            self.lanes,
            self.totals,
            note=phrases.sentence(ideal) if ideal else "",
            since=since,
            until=until,
            simple=self._is_simple,
            sender=self._sender,
        )
        return Interactive(_SCRIPTS, data, self.figure(), self.alt_text, text=repr(self))

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict, dict]:
        """Return the interactive timeline, the still picture with its words, and the table."""
        return self.interactive()._repr_mimebundle_()


def of(ranks: Ranks, title: str | None = None, simple: bool = False) -> Timeline:
    """Return the timeline of the last cell that the ranks ran."""
    reports = [
        reply.value if reply.status == "ok" else {"rank": reply.rank, "error": reply.error}
        for reply in ranks.ask(cell_log.report)
    ]
    return Timeline(reports, _offsets(ranks, reports), title, simple)


def _offsets(ranks: Ranks, reports: list[dict]) -> list[float] | None:
    """Return how far the ranks' clocks are ahead; None if a rank can't compare its clock."""
    if len(reports) == 1 or any("error" in report for report in reports):
        return None
    replies = ranks.ask(cell_log.clock_offset)
    if any(reply.status != "ok" for reply in replies):
        return None
    return [reply.value for reply in replies]
