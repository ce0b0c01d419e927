"""The figure of a timeline: a lane per rank, an arrow per message, a band per collective."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from .. import figures
from ..figures import charts, palette, shapes
from . import activity, phrases
from .activity import AWAITING, COMMUNICATING, COMPUTING, STUCK, WAITING, Lane
from .layout import (
    BOTTOM,
    DPI,
    LEFT,
    MOST_ROWS,
    RIGHT,
    TOP,
    WITHOUT_LEGEND,
    Page,
    pieces,
    view,
)

POSTED, MESSAGE, EAGER, COLLECTIVE = "posted", "message", "eager", "collective"
# Face, color of edge and hatch, hatch. States differ in brightness and texture, not only in color.
LOOK = {
    COMPUTING: (palette.COMPUTING, "none", None),
    WAITING: (figures.PAPER, palette.WAITING, palette.HATCH),
    AWAITING: (figures.PAPER, palette.EXPOSED, "-----"),
    COMMUNICATING: (palette.COMMUNICATING, "none", None),
    POSTED: ("#DCEBF5", palette.COMMUNICATING, None),
    STUCK: (figures.PAPER, figures.INK, "xxx"),
}
MEANING = {
    COMPUTING: "computing",
    WAITING: "waiting for a partner",
    AWAITING: "exposed: waiting for the background",
    COMMUNICATING: "communicating: data move",
    POSTED: "in the background, no partner yet",
    STUCK: "partner never came",
    MESSAGE: "message",
    EAGER: "eager send: over before its receiver came",
    COLLECTIVE: "collective: all are there",
}
# If there are more arrows, they become thin, and then lose their heads; with more collectives, the
# bands are left out.
FEW_ARROWS, MOST_HEADS, MOST_BANDS = 60, 400, 24
_HEAD, _SMALL_HEAD = 7.0, 5.0  # pixels
# Drawing order: bands of collectives, bars, lines between operations, arrows, and labels on top.
_BANDS, _BARS, _LINES, _ARROWS, _LABELS = 1, 2, 3, 4, 5
_DASHED = {MESSAGE: "solid", EAGER: (0, (4, 2))}
_RING = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 5,
    "color": figures.INK,
    "markerfacecolor": figures.PAPER,
}
_CARD = {"facecolor": figures.PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.9}


def figure(
    lanes: list[Lane],
    title: str,
    since: float | None,
    until: float | None,
    *,
    note: str,
    width: float,
    simple: bool = False,
    sender: int | None = None,
) -> Figure:
    """Return the picture of a run, see :meth:`.Timeline.figure`; a note is below the title.

    A simple picture has neither note nor legend. With a sender, only its messages have arrows.

    Raises:
        ValueError: `until` is not after `since`.
    """
    figures.use_style()
    first, last = view(lanes)
    since = first if since is None else since
    until = last if until is None else until
    if until <= since:
        raise ValueError(f"since={since:g} must be less than until={until:g} (seconds)")
    page = Page(width, since, until, tuple(bool(activity.background(lane)) for lane in lanes))
    height = round((WITHOUT_LEGEND if simple else BOTTOM) + TOP + page.high, 1)
    # Made by pyplot, so that notebooks show it, and closed, so that they show it only once, as the
    # value of the cell.
    made = plt.figure(figsize=(width, height), dpi=DPI)
    plt.close(made)
    below = height - (TOP + page.high)
    size = ((width - LEFT - RIGHT) / width, page.high / height)
    axes = made.add_axes((LEFT / width, below / height, *size))
    picture = _Picture(page, lanes, axes, sender)
    used = picture.draw()
    picture.frame(title, "" if simple else note)
    if not simple:
        _legend(made, used)
    return made


class _Picture:
    """The drawing of a run. Bars are collected first, because a few collections draw fast."""

    def __init__(self, page: Page, lanes: list[Lane], axes: Axes, sender: int | None):
        self.page = page
        self.sender = sender
        self.lanes = lanes
        self.axes = axes
        self.axes.set_xlim(*map(page.across, page.shown))
        self.axes.set_ylim(page.high, 0)
        # The corners of the rectangles of each state.
        self.boxes: dict[str, list] = {state: [] for state in LOOK}
        self.borders: list[list[tuple]] = []
        # Top and bottom of each record's bar, by identity, as the ends of arrows.
        self.bars: dict[int, tuple[float, float]] = {}
        self.met = activity.collectives(activity.all_records(lanes))
        # The rank that called a collective last, by identity of each of its records.
        self.last_called: dict[int, int] = {}
        for records in self.met:
            last = max(records, key=lambda record: record["start"])["rank"]
            self.last_called |= dict.fromkeys(map(id, records), last)
        self.shares_shown = False

    def draw(self) -> set[str]:
        """Draw everything from back to front; return the keys that the legend must explain."""
        for lane in self.lanes:
            if lane.problem:
                self._silent(lane)
            else:
                self._thread(lane)
                self._background(lane)
                self._nothing(lane)
        self._add_boxes()
        used = {state for state, boxes in self.boxes.items() if boxes}
        used |= {COLLECTIVE} if self._collectives() else set()
        return used | self._messages()

    # -- lanes ----------------------------------------------------------------------------

    def _silent(self, lane: Lane) -> None:
        middle = sum(self.page.thread(lane.rank)) / 2
        problem = lane.problem if len(lane.problem) <= 110 else f"{lane.problem[:109]}…"
        left = self.page.across(self.page.since)
        look = {"fontsize": 8, "color": figures.GREY, "clip_on": True}
        self.axes.text(left, middle, f"no answer: {problem}", va="center", **look)

    def _nothing(self, lane: Lane) -> None:
        """Write a remark into a lane that is empty because its rank communicated nothing."""
        spans = [activity.span(record, lane) for record in lane.records]
        spans += [(begin, end) for begin, end, _ in activity.waits(lane)]
        if any(self._visible(*span) for span in spans):
            return
        text = "no communication" + " in this part" * bool(lane.records)
        high = self.page.thread(lane.rank)
        if not self._write(lane.begin, lane.end, high, [text], color=figures.GREY):
            begin, end = (
                min(max(moment, self.page.since), self.page.until)
                for moment in (lane.begin, lane.end)
            )
            # To the right of the bar, or to its left if the page ends there.
            is_late = end > self.page.since + 0.7 * (self.page.until - self.page.since)
            place = (self.page.across(begin if is_late else end), sum(high) / 2)
            look = {"va": "center", "ha": "right" if is_late else "left", "color": figures.GREY}
            points = self.page.font(high[1] - high[0]) or 6.5
            offset = (-5 if is_late else 5, 0)
            shapes.write_beside(self.axes, text, place, offset, fontsize=points, **look)

    def _thread(self, lane: Lane) -> None:
        high = self.page.thread(lane.rank)
        self._box(lane.begin, lane.end, *high, COMPUTING)
        self.bars |= {id(record): high for record in lane.records}
        self._pieces((part for part in activity.states(lane) if part[2] != COMPUTING), *high)
        free_from = self.page.since
        for begin, end, record in activity.waits(lane):
            if self._roomy(begin, end):
                self._border(begin, *high)
                free_from = self._label_wait(record, begin, end, free_from, high)
        self._never(lane, [r for r in lane.records if r["end"] is None and r["waits"]], high)

    def _background(self, lane: Lane) -> None:
        # Only visible operations, because fewer rows are higher and have room for names.
        spans = [(record, activity.span(record, lane)) for record in activity.background(lane)]
        seen = [(record, span) for record, span in spans if self._visible(*span)]
        rows = activity.rows([span for _, span in seen])
        placed = np.minimum(rows, MOST_ROWS - 1).tolist()
        count = max(placed, default=0) + 1
        parts = defaultdict(list)
        stuck = defaultdict(list)
        for (record, span), row in zip(seen, placed, strict=True):
            high = self.page.row(lane.rank, row, count)
            self.bars[id(record)] = high
            if self._roomy(*span):
                self._border(span[0], *high)
                self._label_background(record, span, high)
            parts[row] += activity.phases(record, *span)
            if record["end"] is None and not record["waits"]:
                stuck[row].append(record)
        for row in range(count):
            high = self.page.row(lane.rank, row, count)
            self._pieces(activity.sweep(parts[row]), *high, waits=POSTED)
            self._never(lane, stuck[row], high)

    def _pieces(
        self, parts: Iterable[activity.Part], top: float, bottom: float, waits: str = WAITING
    ) -> None:
        """Collect the bars of one row; bars of fewer than a few pixels are merged."""
        shown = [part for part in parts if self._visible(*part[:2])]
        for piece in pieces(shown, self.page.pixel):
            state = waits if piece.state == WAITING else piece.state
            high, low = (bottom - share * (bottom - top) for share in (piece.high, piece.low))
            self.shares_shown |= piece.high - piece.low < 1
            self._box(piece.begin, piece.end, high, low, state)

    def _visible(self, begin: float, end: float) -> bool:
        return begin < self.page.shown[1] and end > self.page.shown[0]

    def _box(self, begin: float, end: float, top: float, bottom: float, state: str) -> None:
        if self._visible(begin, end):
            self.boxes[state].append(self._corners(begin, end, top, bottom))

    def _corners(self, begin: float, end: float, top: float, bottom: float) -> list[tuple]:
        left, right = self.page.across(begin), self.page.across(end)
        return [(left, top), (right, top), (right, bottom), (left, bottom)]

    def _roomy(self, begin: float, end: float) -> bool:
        """Return whether an operation is visible, and large enough for more than its color."""
        return self.page.pixels(end - begin) >= 5 and self._visible(begin, end)

    def _border(self, begin: float, top: float, bottom: float) -> None:
        """Collect a line at the begin of an operation, to separate it from the one before."""
        left = self.page.across(begin)
        self.borders.append([(left, top), (left, bottom)])

    def _add_boxes(self) -> None:
        for state, boxes in self.boxes.items():
            if not boxes:
                continue
            face, edge, hatch = LOOK[state]
            look = {"facecolor": face, "edgecolor": edge, "hatch": hatch, "zorder": _BARS}
            width = 0 if edge == "none" else 0.6
            self.axes.add_collection(PolyCollection(boxes, linewidth=width, label=state, **look))
        self.axes.add_collection(
            LineCollection(self.borders, color=figures.PAPER, linewidth=1, zorder=_LINES)
        )

    # -- words ----------------------------------------------------------------------------

    def _write(
        self, begin: float, end: float, high: tuple[float, float], texts: list[str], **look: Any
    ) -> bool:
        """Write the longest text that fits between two times; return whether one does."""
        points = self.page.font(high[1] - high[0])
        begin, end = max(begin, self.page.since), min(end, self.page.until)
        # Leave room beside a card, so that the bar behind it stays visible.
        room = self.page.pixels(end - begin) - (9 if "bbox" in look else 4)
        if not points or room <= 0:
            return False
        text = next((text for text in texts if _pixels_of(text, points) <= room), None)
        if text is None:
            return False
        place = (self.page.across((begin + end) / 2), sum(high) / 2)
        look |= {"fontsize": points, "zorder": _LABELS}
        self.axes.text(*place, text, ha="center", va="center", **look)
        return True

    def _label_wait(
        self, record: dict, begin: float, end: float, free_from: float, high: tuple[float, float]
    ) -> float:
        """Label one wait of the thread; return until which second the labels take the room."""
        written = False
        for from_, to, state in activity.held(record, begin, end):
            if state == STUCK or to <= free_from:
                continue
            texts = phrases.of_wait(record, state, self.last_called.get(id(record)))
            look = {"color": figures.PAPER} if state == COMMUNICATING else {"bbox": _CARD}
            written |= self._write(max(from_, free_from), to, high, texts, **look)
        return max(end, free_from) if written else free_from

    def _label_background(self, record: dict, span: tuple, high: tuple[float, float]) -> None:
        parts = {state: (begin, end) for begin, end, state in activity.phases(record, *span)}
        texts = phrases.labels(record)
        # The label belongs on the part that moves data, if it fits there.
        for state, color in ((COMMUNICATING, figures.PAPER), (WAITING, figures.INK)):
            if state in parts and self._write(*parts[state], high, texts, color=color):
                return

    def _never(self, lane: Lane, stuck: list[dict], high: tuple[float, float]) -> None:
        """Mark the open end of operations that never ended."""
        if not stuck:
            return
        last = max(activity.given_up(record, lane) for record in stuck)
        if not self._visible(stuck[0]["start"], last):
            return
        never = "never matched" if stuck[-1]["matched"] is None else "never finished"
        count = f" and {len(stuck) - 1} more" * (len(stuck) > 1)
        top, bottom = high
        place = (self.page.across(min(last, self.page.until)), (top + bottom) / 2)
        look = {"color": figures.INK, "zorder": _LABELS}
        size = min(10, 60 * (bottom - top))
        self.axes.plot(*place, marker=">", markersize=size, clip_on=False, **look)
        look |= {"fontweight": "bold", "fontsize": self.page.font(bottom - top) or 6.5}
        text = f"✗ {never}: {phrases.labels(stuck[-1])[0]}{count}"
        offset = (-9, 0)
        shapes.write_beside(
            self.axes, text, place, offset, ha="right", va="center_baseline", bbox=_CARD, **look
        )

    # -- between lanes --------------------------------------------------------------------

    def _collectives(self) -> bool:
        """Draw bands from the last rank's call to the last rank's end; return if there are any."""
        bands = self._bands()
        if len(bands) > MOST_BANDS:
            return False
        rectangles = []
        links = []
        for begin, end, group in bands:
            left = self.page.across(begin)
            for rank in group:
                rectangles.append(self._corners(begin, end, *self.page.band(rank)))
            top = self.page.band(min(group))[0]
            bottom = self.page.band(max(group))[1]
            links.append([(left, top), (left, bottom)])
        look = {"facecolor": palette.COMMUNICATING, "alpha": 0.15, "zorder": _BANDS}
        self.axes.add_collection(PolyCollection(rectangles, **look))
        look = {"color": palette.COMMUNICATING, "linestyle": _DASHED[EAGER], "zorder": _BANDS}
        self.axes.add_collection(LineCollection(links, linewidth=0.9, **look))
        return bool(bands)

    def _bands(self) -> list[tuple[float, float, list[int]]]:
        """Return the last call, the last end and the ranks of each collective to draw."""
        bands = []
        for records in self.met:
            begin = max(record["start"] for record in records)
            ends = [record["end"] for record in records]
            over = len(records) > 1 and None not in ends
            if over and self._visible(begin, max(ends)):
                bands.append((begin, max(ends), records[0]["group"]))
        return bands

    def _messages(self) -> set[str]:
        """Draw an arrow per message, from its send's begin to its recv's end; return the kinds."""
        lines: dict[str, dict] = {MESSAGE: {}, EAGER: {}}
        for send, recv in activity.messages(activity.all_records(self.lanes)):
            has_arrow = self.sender in (None, send["rank"])
            if has_arrow and self._visible(send["start"], recv["end"]):
                # Messages on the same pixels become one arrow.
                pixels = (round(self.page.pixels(time)) for time in (send["start"], recv["end"]))
                kind = lines[EAGER if send["eager"] else MESSAGE]
                kind.setdefault((send["rank"], recv["rank"], *pixels), self._line(send, recv))
        count = sum(map(len, lines.values()))
        kinds = {kind for kind, of_kind in lines.items() if of_kind}
        for kind in sorted(kinds, reverse=True):  # messages, then eager messages
            self._arrows(np.array(list(lines[kind].values())), count, _DASHED[kind])
        return kinds | ({EAGER} if self._feet() else set())

    def _arrows(self, lines: np.ndarray, count: int, style: str | tuple) -> None:
        """Draw lines of one kind with their heads; `count` is of all arrows in the picture."""
        few = count <= FEW_ARROWS
        many = count > MOST_HEADS
        width = 1.1 if few else 0.6
        alpha = 0.3 if many else 0.85
        look = {"color": figures.INK, "zorder": _ARROWS}
        self.axes.add_collection(
            LineCollection(lines, linewidth=width, alpha=alpha, linestyle=style, **look)
        )
        if not many:
            heads = self._heads(lines, _HEAD if few else _SMALL_HEAD)
            self.axes.add_collection(PolyCollection(heads, linewidth=0, **look))

    def _feet(self) -> int:
        """Draw a ring at the begin of each eager send, even if no rank received the message."""
        sends = [
            record
            for record in activity.all_records(self.lanes)
            if record["eager"] and self._visible(record["start"], record["end"])
        ]
        places = []
        for send in sends:
            top, bottom = self.bars[id(send)]
            down = activity.partner(send) > send["rank"]
            places.append((self.page.across(send["start"]), bottom if down else top))
        if places and len(places) <= MOST_HEADS:
            self.axes.plot(*zip(*places, strict=True), **_RING, zorder=_ARROWS)
        return len(places)

    def _line(self, send: dict, recv: dict) -> list[tuple[float, float]]:
        """Return the line from the sender's bar to the receiver's bar, between the near edges."""
        (top, bottom), (peer_top, peer_bottom) = self.bars[id(send)], self.bars[id(recv)]
        down = recv["rank"] > send["rank"]
        return [
            (self.page.across(send["start"]), bottom if down else top),
            (self.page.across(recv["end"]), peer_top if down else peer_bottom),
        ]

    def _heads(self, lines: np.ndarray, size: float) -> np.ndarray:
        """Return triangles at the ends of the lines, of one size in pixels."""
        per_unit = np.array([self.page.second / self.page.pixel, DPI])
        along = (lines[:, 1] - lines[:, 0]) * per_unit
        length = np.maximum(np.hypot(*along.T), 1e-9)
        along /= length[:, None]
        aside = along[:, ::-1] * (1, -1) * 0.4
        back = np.minimum(size, length)[:, None]
        tip = lines[:, 1] * per_unit
        corners = [tip, tip - back * (along + aside), tip - back * (along - aside)]
        return np.stack(corners, axis=1) / per_unit

    # -- the frame ------------------------------------------------------------------------

    def frame(self, title: str, note: str) -> None:
        """Label the lanes, the axis and the picture; the note is in a line below the title."""
        page = self.page
        axes = self.axes
        size = 10 if page.scale > 0.8 else 9 if page.scale > 0.6 else 8
        middles = [sum(page.thread(lane.rank)) / 2 for lane in self.lanes]
        charts.name_rows(axes, [f"rank {lane.rank}" for lane in self.lanes], middles, size)
        axes.tick_params(axis="x", labelsize=9)
        axes.spines["left"].set_visible(False)
        for edge in page.edges[1 : len(self.lanes)]:
            axes.axhline(edge, color=figures.PALE, linewidth=0.8, zorder=0)
        axes.set_title(title, pad=22 if note else 6)
        if note:
            place = (0, 1.0)
            look = {"va": "bottom", "fontsize": 9, "color": figures.GREY}
            shapes.write_beside(axes, note, place, (0, 6), xycoords="axes fraction", **look)
        remark = "very short operations: heights are shares of the time" * self.shares_shown
        if not activity.all_records(self.lanes):
            remark = "nothing was communicated"
        axes.set_xlabel(page.axis_label, fontsize=10, loc="left" if remark else "center")
        place = (1 - RIGHT / page.width, (BOTTOM - 0.39) / axes.figure.get_figheight())
        axes.figure.text(*place, remark, ha="right", fontsize=9, color=figures.GREY)


def _legend(made: Figure, used: set[str]) -> None:
    """Explain only the parts that are in the picture, in rows of three."""
    width, height = made.get_size_inches()
    handles = [handle for key, handle in _handles().items() if key in used]
    columns = len(handles) if len(handles) <= 4 else 3
    # Matplotlib fills a legend column by column, but people read row by row.
    ordered = itertools.chain(*(handles[k::columns] for k in range(columns)))
    look = {"fontsize": 8.5 * min(1, width / 9), "columnspacing": 1.4, "handlelength": 1.8}
    corner = (LEFT / width - 0.012, (BOTTOM - 0.5) / height)
    made.legend(
        handles=list(ordered), ncols=columns, loc="upper left", bbox_to_anchor=corner, **look
    )


def _handles() -> dict[str, Artist]:
    """Return the legend's handle for each state, kind of arrow, and band."""
    handles = {}
    for state, (face, edge, hatch) in LOOK.items():
        look = {"facecolor": face, "edgecolor": None if edge == "none" else edge, "hatch": hatch}
        handles[state] = Patch(linewidth=0.6, label=MEANING[state], **look)
    line = {"color": figures.INK, "linewidth": 1.1, "marker": ">", "markersize": 5}
    handles[MESSAGE] = Line2D([], [], label=MEANING[MESSAGE], **line)
    line = _RING | {"linestyle": _DASHED[EAGER], "linewidth": 1.1}
    handles[EAGER] = Line2D([], [], label=MEANING[EAGER], **line)
    blue = palette.COMMUNICATING
    band = {"facecolor": (blue, 0.15), "edgecolor": blue, "linestyle": "--"}
    handles[COLLECTIVE] = Patch(label=MEANING[COLLECTIVE], **band)
    return handles


@functools.lru_cache(maxsize=4096)
def _pixels_of(text: str, points: float) -> float:
    """Return the width of a text in pixels."""
    font = FontProperties(size=points)
    return text_to_path.get_text_width_height_descent(text, font, False)[0] * DPI / 72
