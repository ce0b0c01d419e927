"""The figure of a timeline: a lane per rank, an arrow per message, a band per collective."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass
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
from . import collect, phrases
from .collect import AWAITING, COMMUNICATING, COMPUTING, STUCK, WAITING, Lane
from .layout import BOTTOM, DPI, LEFT, MOST_ROWS, RIGHT, SUBTITLE, TOP, Page, pieces, view

POSTED, MESSAGE, EAGER, COLLECTIVE = "posted", "message", "eager", "collective"
# Told apart by brightness and texture as well as by colour: face, edge and hatch, hatch.
LOOK = {
    COMPUTING: ("#D3D3D3", "none", None),
    WAITING: ("#FFF6E3", figures.ORANGE, "//////"),
    AWAITING: ("#EBCFDF", "#A8477F", "---"),
    COMMUNICATING: (figures.BLUE, "none", None),
    POSTED: ("#DCEFFB", figures.SKY, None),
    STUCK: ("#FDEFE7", figures.RED, "xxx"),
}
MEANING = {
    COMPUTING: "computing",
    WAITING: "waiting for a partner",
    AWAITING: "waiting for the background",
    COMMUNICATING: "communicating: data move",
    POSTED: "in the background, no partner yet",
    STUCK: "partner never came",
    MESSAGE: "message",
    EAGER: "eager send: over before its receiver came",
    COLLECTIVE: "collective: all are there",
}
# With more of them in the picture, arrows become thin, then lose their heads; collectives lose
# their bands.
FEW_ARROWS, MOST_HEADS, MOST_BANDS = 60, 400, 24
_HEAD, _SMALL_HEAD = 7.0, 5.0  # pixels
# Above each other: bands of collectives, bars, lines between operations, arrows, labels, and what
# hides all of them after a run's end.
_BANDS, _BARS, _LINES, _ARROWS, _LABELS, _VEIL = 1, 2, 3, 4, 5, 6


@dataclass
class Panel:
    """A run to draw.

    Attributes:
        lanes: of each rank.
        title: of the panel.
        since: seconds; None: see :func:`layout.view`.
        until: the same for the end.
        subtitle: below the title.
        note: beside the title.
    """

    lanes: list[Lane]
    title: str
    since: float | None = None
    until: float | None = None
    subtitle: str = ""
    note: str = ""

    def __post_init__(self):
        first, last = view(self.lanes)
        self.since = first if self.since is None else self.since
        self.until = last if self.until is None else self.until
        if self.until <= self.since:
            raise ValueError(
                f"since={self.since:g} must be less than until={self.until:g} (seconds)"
            )


def figure(panels: list[Panel], width: float) -> Figure:
    """Return the picture of a run, or of several above each other with one time axis from 0."""
    figures.use_style()
    span = max(panel.until - panel.since for panel in panels)
    pages = [
        Page(
            width,
            panel.since,
            panel.since + span,
            tuple(bool(collect.background(lane)) for lane in panel.lanes),
            from_zero=len(panels) > 1,
        )
        for panel in panels
    ]
    tops = [TOP + SUBTITLE * bool(panel.subtitle) for panel in panels]
    height = round(BOTTOM + sum(tops) + sum(page.high for page in pages), 1)
    # By pyplot, which has notebooks show figures; closed, so that it is shown once, as the value
    # of the cell.
    made = plt.figure(figsize=(width, height), dpi=DPI)
    plt.close(made)
    used = set()
    below = height
    for panel, page, top in zip(panels, pages, tops, strict=True):
        below -= top + page.high
        size = ((width - LEFT - RIGHT) / width, page.high / height)
        axes = made.add_axes((LEFT / width, below / height, *size))
        used |= _Picture(page, panel, axes).draw(last=panel is panels[-1])
    _legend(made, used)
    return made


class _Picture:
    """A run being drawn. Bars are collected first, as few collections draw fast."""

    def __init__(self, page: Page, panel: Panel, axes: Axes):
        self.page, self.panel, self.axes, self.lanes = page, panel, axes, panel.lanes
        self.axes.set_xlim(*map(page.across, page.shown))
        self.axes.set_ylim(page.high, 0)
        # Of each state: rectangles as (left, right, top, bottom).
        self.boxes: dict[str, list[tuple]] = defaultdict(list)
        self.borders: list[list[tuple]] = []
        # Where each record's bar is, by identity: arrows begin and end there.
        self.bars: dict[int, tuple[float, float]] = {}
        self.met = collect.collectives(record for lane in self.lanes for record in lane.records)
        self.last_called = _last_called(self.met)
        self.shares_shown = False
        self.pad = 6 + 72 * SUBTITLE * bool(panel.subtitle)

    def draw(self, last: bool) -> set[str]:
        """Everything, from the back to the front; returns what the legend has to explain.

        last: the time axis belongs to this run.
        """
        for lane in self.lanes:
            if lane.problem:
                self._silent(lane)
            else:
                self._thread(lane)
                self._background(lane)
                self._nothing(lane)
        self._add_boxes()
        used = {state for state in LOOK if self.boxes[state]}
        used |= {COLLECTIVE} if self._collectives() else set()
        used |= self._messages()
        self._frame(last)
        if self.page.from_zero:
            self._end()
        return used

    # -- lanes ----------------------------------------------------------------------------

    def _silent(self, lane: Lane) -> None:
        middle = sum(self.page.thread(lane.rank)) / 2
        said = lane.problem if len(lane.problem) <= 110 else f"{lane.problem[:109]}…"
        self.axes.text(
            self.page.across(self.page.since), middle, f"no answer: {said}",
            va="center", fontsize=8, color=figures.GREY, clip_on=True,
        )  # fmt: skip

    def _nothing(self, lane: Lane) -> None:
        """Say so where a lane is empty for want of communication."""
        spans = [(record["start"], collect.end_of(record, lane)) for record in lane.records]
        waits = [(begin, end or lane.end) for r in lane.records for begin, end in r["waits"]]
        if any(self._visible(*span) for span in spans + waits):
            return
        said = "no communication" + " in this part" * bool(lane.records)
        high = self.page.thread(lane.rank)
        if not self._write(lane.begin, lane.end, high, [said], color=figures.GREY):
            after = min(max(lane.end, self.page.since), self.panel.until)
            self.axes.annotate(
                said, (self.page.across(after), sum(high) / 2), (5, 0),
                textcoords="offset points", va="center", color=figures.GREY,
                fontsize=self.page.font(high[1] - high[0]) or 6,
            )  # fmt: skip

    def _thread(self, lane: Lane) -> None:
        high = self.page.thread(lane.rank)
        self._box(lane.begin, lane.end, *high, COMPUTING)
        for record in lane.records:
            self.bars[id(record)] = high
        held = [part for part in collect.states(lane) if part[2] != COMPUTING]
        self._pieces(held, *high)
        free_from = self.page.since
        for record in lane.records:
            for begin, end in record["waits"]:
                until = lane.end if end is None else end
                if self._roomy(begin, until):
                    self._border(begin, *high)
                    free_from = self._label_wait(record, begin, until, free_from, high)
        stuck = [r for r in lane.records if r["end"] is None and r["waits"]]
        self._never(lane, stuck, high)

    def _background(self, lane: Lane) -> None:
        # Only those that are seen: fewer rows are higher, and have room for names.
        seen = [
            (record, (record["start"], end))
            for record in collect.background(lane)
            if self._visible(record["start"], end := collect.end_of(record, lane))
        ]
        records, spans = [record for record, _ in seen], [span for _, span in seen]
        placed = [min(row, MOST_ROWS - 1) for row in collect.rows(spans)]
        count = max(placed, default=0) + 1
        parts = defaultdict(list)
        for record, span, row in zip(records, spans, placed, strict=True):
            high = self.page.row(lane.rank, row, count)
            self.bars[id(record)] = high
            if self._roomy(*span):
                self._border(span[0], *high)
                self._label_background(record, span, high)
            for begin, end, state in collect.phases(record, *span):
                parts[row].append((begin, end, state))
        for row, found in parts.items():
            self._pieces(collect.sweep(found), *self.page.row(lane.rank, row, count), waits=POSTED)
        for row in range(count):
            stuck = [
                record
                for record, at in zip(records, placed, strict=True)
                if at == row and record["end"] is None and not record["waits"]
            ]
            self._never(lane, stuck, self.page.row(lane.rank, row, count))

    def _pieces(self, parts: list, top: float, bottom: float, waits: str = WAITING) -> None:
        """Bars of one row, those that are narrower than a few pixels together."""
        shown = [part for part in parts if self._visible(*part[:2])]
        for piece in pieces(shown, self.page.pixel):
            state = waits if piece.state == WAITING else piece.state
            high, low = (bottom - share * (bottom - top) for share in (piece.high, piece.low))
            self.shares_shown |= piece.high - piece.low < 1
            self._box(piece.begin, piece.end, high, low, state)

    def _visible(self, begin: float, end: float) -> bool:
        last = self.panel.until if self.page.from_zero else self.page.shown[1]
        return begin < last and end > self.page.shown[0]

    def _box(self, begin: float, end: float, top: float, bottom: float, state: str) -> None:
        if self._visible(begin, end):
            left, right = self.page.across(begin), self.page.across(end)
            self.boxes[state].append((left, right, top, bottom))

    def _roomy(self, begin: float, end: float) -> bool:
        """Whether an operation is seen, and large enough for more than its colour."""
        return self.page.pixels(end - begin) >= 5 and self._visible(begin, end)

    def _border(self, begin: float, top: float, bottom: float) -> None:
        """A line where an operation begins, so that it can be told from the one before."""
        left = self.page.across(begin)
        self.borders.append([(left, top), (left, bottom)])

    def _add_boxes(self) -> None:
        for state in LOOK:
            if not self.boxes[state]:
                continue
            face, edge, hatch = LOOK[state]
            left, right, top, bottom = np.array(self.boxes[state]).T
            corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
            boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
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
        """The longest text that fits between two times. False: none does."""
        points = self.page.font(high[1] - high[0])
        begin, end = max(begin, self.page.since), min(end, self.panel.until)
        # Beside a card, what is behind it has to be seen.
        room = self.page.pixels(end - begin) - (9 if "bbox" in look else 4)
        for text in texts if points and room > 0 else ():
            if _pixels_of(text, points) <= room:
                self.axes.text(
                    self.page.across((begin + end) / 2), sum(high) / 2, text, fontsize=points,
                    ha="center", va="center", zorder=_LABELS, **look,
                )  # fmt: skip
                return True
        return False

    def _label_wait(
        self, record: dict, begin: float, end: float, free_from: float, high: tuple[float, float]
    ) -> float:
        """Label one wait of the thread; returns until when (seconds) there is no room for more."""
        written = False
        for from_, to, state in collect.held(record, begin, end):
            if state == STUCK or to <= free_from:
                continue
            if state == COMMUNICATING:
                texts, look = phrases.labels(record), {"color": figures.PAPER}
            elif state == AWAITING:
                texts, look = phrases.awaits(record), {"bbox": _CARD}
            else:
                last = self.last_called.get(id(record))
                texts, look = phrases.partners(record, last), {"bbox": _CARD}
            written |= self._write(max(from_, free_from), to, high, texts, **look)
        return max(end, free_from) if written else free_from

    def _label_background(self, record: dict, span: tuple, high: tuple[float, float]) -> None:
        parts = {state: (begin, end) for begin, end, state in collect.phases(record, *span)}
        parts.pop(STUCK, None)
        # On the moving part where possible; else on the other.
        for state in (COMMUNICATING, WAITING):
            color = figures.PAPER if state == COMMUNICATING else figures.INK
            if state in parts and self._write(
                *parts[state], high, phrases.labels(record), color=color
            ):
                return

    def _never(self, lane: Lane, stuck: list[dict], high: tuple[float, float]) -> None:
        """Mark the open end of operations that were never over."""
        if not stuck:
            return
        waited = [lane.end if end is None else end for r in stuck for _, end in r["waits"]]
        last = max(waited or [collect.end_of(r, lane) for r in stuck])
        if not self._visible(stuck[0]["start"], last):
            return
        what = "never matched" if stuck[-1]["matched"] is None else "never finished"
        operation = phrases.labels(stuck[-1])[0]
        count = f" and {len(stuck) - 1} more" if len(stuck) > 1 else ""
        edge = min(last, self.panel.until)
        top, bottom = high
        self.axes.plot(
            [self.page.across(edge)], [(top + bottom) / 2], marker=">", color=figures.RED,
            markersize=min(10, 60 * (bottom - top)), zorder=_LABELS, clip_on=False,
        )  # fmt: skip
        self.axes.annotate(
            f"✗ {what}: {operation}{count}",
            (self.page.across(edge), (top + bottom) / 2), (-9, 0), textcoords="offset points",
            ha="right", va="center_baseline", fontsize=self.page.font(bottom - top) or 6,
            color=figures.RED, fontweight="bold", zorder=_LABELS, bbox=_CARD,
        )  # fmt: skip

    # -- between lanes --------------------------------------------------------------------

    def _collectives(self) -> int:
        """A band from the last rank's call to the last rank's end. Returns how many there are."""
        met = [
            (max(r["start"] for r in records), max(r["end"] for r in records), records[0]["group"])
            for records in self.met
            if len(records) > 1 and all(r["end"] is not None for r in records)
        ]
        met = [band for band in met if self._visible(*band[:2])]
        if len(met) > MOST_BANDS:
            return 0
        rectangles, links = [], []
        for begin, end, group in met:
            left, right = self.page.across(begin), self.page.across(end)
            for rank in group:
                top, bottom = self.page.band(rank)
                rectangles.append([(left, top), (right, top), (right, bottom), (left, bottom)])
            links.append([(left, self.page.band(min(group))[0]),
                          (left, self.page.band(max(group))[1])])  # fmt: skip
        self.axes.add_collection(
            PolyCollection(rectangles, facecolor=figures.GREEN, alpha=0.13, zorder=_BANDS)
        )
        self.axes.add_collection(
            LineCollection(
                links, color=figures.GREEN, linewidth=0.9, linestyle=(0, (4, 2)), zorder=_BANDS
            )
        )
        return len(met)

    def _messages(self) -> set[str]:
        """An arrow per message, from its send's begin to its recv's end. Returns the kinds."""
        lines: dict[str, dict] = {MESSAGE: {}, EAGER: {}}
        for send, recv in collect.messages(r for lane in self.lanes for r in lane.records):
            if self._visible(send["start"], recv["end"]):
                # Those that fall on the same pixels are one.
                pixels = (round(self.page.pixels(time)) for time in (send["start"], recv["end"]))
                kind = lines[EAGER if send["eager"] else MESSAGE]
                kind.setdefault((send["rank"], recv["rank"], *pixels), self._line(send, recv))
        count = sum(map(len, lines.values()))
        for kind, found in lines.items():
            if found:
                self._arrows(np.array(list(found.values())), count, _DASHED[kind])
        feet = self._feet()
        return {kind for kind, found in lines.items() if found} | ({EAGER} if feet else set())

    def _arrows(self, lines: np.ndarray, count: int, style: str | tuple) -> None:
        """Lines of one kind with their heads. count: of all arrows in the picture."""
        few, many = count <= FEW_ARROWS, count > MOST_HEADS
        width, alpha = 1.1 if few else 0.6, 0.3 if many else 0.85
        look = {"color": figures.INK, "zorder": _ARROWS}
        self.axes.add_collection(
            LineCollection(lines, linewidth=width, alpha=alpha, linestyle=style, **look)
        )
        if not many:
            heads = self._heads(lines, _HEAD if few else _SMALL_HEAD)
            self.axes.add_collection(PolyCollection(heads, linewidth=0, **look))

    def _feet(self) -> int:
        """A ring where an eager send began, also of a message that nobody received."""
        sends = [
            record
            for lane in self.lanes
            for record in lane.records
            if record["eager"] and self._visible(record["start"], record["end"])
        ]
        places = []
        for send in sends:
            top, bottom = self.bars[id(send)]
            down = collect.partner(send) > send["rank"]
            places.append((self.page.across(send["start"]), bottom if down else top))
        if places and len(places) <= MOST_HEADS:
            self.axes.plot(*zip(*places, strict=True), **_RING, zorder=_ARROWS)
        return len(places)

    def _line(self, send: dict, recv: dict) -> list[tuple[float, float]]:
        """From the sender's bar to the receiver's, between those of their edges that are close."""
        (top, bottom), (peer_top, peer_bottom) = self.bars[id(send)], self.bars[id(recv)]
        down = recv["rank"] > send["rank"]
        return [
            (self.page.across(send["start"]), bottom if down else top),
            (self.page.across(recv["end"]), peer_top if down else peer_bottom),
        ]

    def _heads(self, lines: np.ndarray, size: float) -> np.ndarray:
        """Triangles at the ends of the lines, of one size in pixels."""
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

    def _frame(self, last: bool) -> None:
        page, axes = self.page, self.axes
        size = 10 if page.scale > 0.8 else 9 if page.scale > 0.6 else 8
        middles = [sum(page.thread(lane.rank)) / 2 for lane in self.lanes]
        axes.set_yticks(middles, [f"rank {lane.rank}" for lane in self.lanes], fontsize=size)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=9, labelbottom=last)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
        for rank in range(1, len(self.lanes)):
            axes.axhline(page.edges[rank], color=figures.PALE, linewidth=0.8, zorder=0)
        axes.set_title(self.panel.title, pad=self.pad)
        if self.panel.note and not self.page.from_zero:
            self._note()
        if self.panel.subtitle:
            above = 1 + 0.06 / page.high
            axes.text(
                0, above, self.panel.subtitle, transform=axes.transAxes, va="bottom", fontsize=8.5,
                color=figures.GREY,
            )  # fmt: skip
        note = "very short operations: heights are shares of the time" * self.shares_shown
        if not any(lane.records for lane in self.lanes):
            note = "nothing was communicated"
        if last:
            axes.set_xlabel(page.axis_label, fontsize=10, loc="left" if note else "center")
            axes.figure.text(
                1 - RIGHT / page.width, (BOTTOM - 0.39) / (axes.figure.get_figheight()), note,
                ha="right", fontsize=9, color=figures.GREY,
            )  # fmt: skip

    def _end(self) -> None:
        """Where this run is over, on an axis that another one needs for longer."""
        until, last = self.page.across(self.panel.until), self.page.across(self.page.shown[1])
        self.axes.axvspan(until, last, facecolor=figures.PAPER, linewidth=0, zorder=_VEIL)
        self.axes.axvline(until, color=figures.INK, linewidth=1, zorder=_VEIL)
        said = [phrases.duration(self.panel.until - self.panel.since), self.panel.note]
        self.axes.set_title(", ".join(filter(None, said)), loc="right", pad=self.pad)

    def _note(self) -> None:
        """At the right of the title's line, as large as there is room."""
        title = plt.rcParams["axes.titlesize"]
        room = self.page.pixels(self.page.shown[1] - self.page.shown[0]) - 15
        room -= _pixels_of(self.panel.title, FontProperties(size=title).get_size_in_points())
        short = self.panel.note.removeprefix("on an ")
        fits = ((t, s) for t in (self.panel.note, short) for s in (8.5, 7.5, 6.5))
        said, points = next(((t, s) for t, s in fits if _pixels_of(t, s) <= room), (short, 6))
        look = {"fontsize": points, "fontweight": "normal", "color": figures.GREY}
        self.axes.set_title(said, loc="right", pad=self.pad, **look)


def _legend(made: Figure, used: set[str]) -> None:
    """Only what is in the picture, in rows of three."""
    width, height = made.get_size_inches()
    handles = [_handle(key) for key in MEANING if key in used]
    columns = len(handles) if len(handles) <= 4 else 3
    made.legend(
        # Matplotlib fills column by column; read, it is row by row.
        handles=[*itertools.chain(*(handles[k::columns] for k in range(columns)))],
        loc="upper left", fontsize=8.5 * min(1, width / 9), ncols=columns,
        columnspacing=1.4, handlelength=1.8,
        bbox_to_anchor=(LEFT / width - 0.012, (BOTTOM - 0.5) / height),
    )  # fmt: skip


def _handle(key: str) -> Artist:
    """How the legend shows a state, a kind of arrow, or a band."""
    label = MEANING[key]
    if key in LOOK:
        face, edge, hatch = LOOK[key]
        edge = None if edge == "none" else edge
        return Patch(facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.6, label=label)
    if key == MESSAGE:
        return Line2D([], [], color=figures.INK, linewidth=1.1, marker=">", markersize=5,
                      label=label)  # fmt: skip
    if key == EAGER:
        look = _RING | {"linestyle": _DASHED[EAGER], "linewidth": 1.1}
        return Line2D([], [], **look, label=label)
    return Patch(facecolor=(figures.GREEN, 0.15), edgecolor=figures.GREEN, linestyle="--",
                 label=label)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _pixels_of(text: str, points: float) -> float:
    """How wide a text is drawn."""
    font = FontProperties(size=points)
    return text_to_path.get_text_width_height_descent(text, font, False)[0] * DPI / 72


_DASHED = {MESSAGE: "solid", EAGER: (0, (4, 2))}
_RING = {
    "linestyle": "none", "marker": "o", "markersize": 5, "color": figures.INK,
    "markerfacecolor": figures.PAPER,
}  # fmt: skip
_CARD = {"facecolor": figures.PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.9}


def _last_called(met: list[list[dict]]) -> dict[int, int]:
    """For each record of a collective, by identity: the rank that was the last to call it."""
    found = {}
    for records in met:
        last = max(records, key=lambda record: record["start"])["rank"]
        found.update((id(record), last) for record in records)
    return found
