"""The figure of a timeline: a lane per rank, an arrow per message, a band per collective."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from .. import figures
from . import collect, words
from .collect import COMMUNICATING, COMPUTING, STUCK, WAITING, Lane
from .layout import BOTTOM, DPI, LEFT, MOST_ROWS, RIGHT, TOP, Page, pieces, view

POSTED = "posted"
# Told apart by brightness and texture as well as by colour: face, edge and hatch, hatch.
LOOK = {
    COMPUTING: ("#D3D3D3", "none", None),
    WAITING: ("#FFF6E3", figures.ORANGE, "//////"),
    COMMUNICATING: (figures.BLUE, "none", None),
    POSTED: ("#DCEFFB", figures.SKY, None),
    STUCK: ("#FDEFE7", figures.RED, "xxx"),
}
MEANING = {
    COMPUTING: "computing",
    WAITING: "waiting for a partner",
    COMMUNICATING: "communicating: data move",
    POSTED: "in the background, not matched yet",
    STUCK: "partner never came",
}
# With more of them in the picture, arrows become thin, then lose their heads; collectives lose
# their bands.
FEW_ARROWS, MOST_HEADS, MOST_BANDS = 60, 400, 24
_HEAD, _SMALL_HEAD = 7.0, 5.0  # pixels
# Above each other: bands of collectives, bars, lines between operations, arrows, labels.
_BANDS, _BARS, _LINES, _ARROWS, _LABELS = 1, 2, 3, 4, 5


def figure(
    lanes: list[Lane], title: str, width: float, since: float | None, until: float | None
) -> Figure:
    """The picture of what is between ``since`` and ``until`` (seconds; None: see ``view``).

    Raises ValueError when nothing is between them.
    """
    figures.use_style()
    first, last = view(lanes)
    since = first if since is None else since
    until = last if until is None else until
    if until <= since:
        raise ValueError(f"since={since:g} must be less than until={until:g} (seconds)")
    has_background = any(collect.background(lane) for lane in lanes)
    page = Page(width, since, until, max(len(lanes), 1), has_background)
    return _Picture(page, lanes).draw(title)


class _Picture:
    """A figure being drawn. Bars are collected first, as few collections draw fast."""

    def __init__(self, page: Page, lanes: list[Lane]):
        self.page, self.lanes = page, lanes
        # By pyplot, which has notebooks show figures; closed, so that it is shown once, as the
        # value of the cell.
        self.figure = plt.figure(figsize=(page.width, page.height), dpi=DPI)
        plt.close(self.figure)
        high = page.height - TOP - BOTTOM
        place = (LEFT / page.width, BOTTOM / page.height)
        size = ((page.width - LEFT - RIGHT) / page.width, high / page.height)
        self.axes = self.figure.add_axes((*place, *size))
        self.axes.set_xlim(*map(page.across, page.shown))
        self.axes.set_ylim(high, 0)
        # Of each state: rectangles as (left, right, top, bottom).
        self.boxes: dict[str, list[tuple]] = defaultdict(list)
        self.borders: list[list[tuple]] = []
        # Where each record's bar is, by identity: arrows begin and end there.
        self.bars: dict[int, tuple[float, float]] = {}
        self.met = collect.collectives(record for lane in lanes for record in lane.records)
        self.last_called = _last_called(self.met)
        self.shares_shown = False

    def draw(self, title: str) -> Figure:
        """Everything, from the back to the front."""
        for lane in self.lanes:
            if lane.problem:
                self._silent(lane)
            else:
                self._thread(lane)
                self._background(lane)
        self._add_boxes()
        bands = self._collectives()
        arrows = self._messages()
        self._frame(title)
        self._legend(arrows, bands)
        return self.figure

    # -- lanes ----------------------------------------------------------------------------

    def _silent(self, lane: Lane) -> None:
        middle = sum(self.page.thread(lane.rank)) / 2
        said = lane.problem if len(lane.problem) <= 110 else f"{lane.problem[:109]}…"
        self.axes.text(
            self.page.across(self.page.since), middle, f"no answer: {said}",
            va="center", fontsize=8, color=figures.GREY, clip_on=True,
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
        records = collect.background(lane)
        spans = [(record["start"], collect.end_of(record, lane)) for record in records]
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
        return begin < self.page.shown[1] and end > self.page.shown[0]

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
        self, begin: float, end: float, high: tuple[float, float], texts: list[str], **look
    ) -> bool:
        """The longest text that fits between two times. False: none does."""
        points = self.page.font(high[1] - high[0])
        begin, end = max(begin, self.page.since), min(end, self.page.until)
        room = self.page.pixels(end - begin) - 6
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
        for from_, to, state in collect.phases(record, begin, end):
            if state == STUCK or to <= free_from:
                continue
            if state == COMMUNICATING:
                texts, look = words.labels(record), {"color": figures.PAPER}
            else:
                last = self.last_called.get(id(record))
                texts, look = words.partners(record, last), {"bbox": _CARD}
            written |= self._write(max(from_, free_from), to, high, texts, **look)
        return max(end, free_from) if written else free_from

    def _label_background(self, record: dict, span: tuple, high: tuple[float, float]) -> None:
        parts = {state: (begin, end) for begin, end, state in collect.phases(record, *span)}
        parts.pop(STUCK, None)
        # On the moving part where possible; else on the other.
        for state in (COMMUNICATING, WAITING):
            color = figures.PAPER if state == COMMUNICATING else figures.INK
            if state in parts and self._write(
                *parts[state], high, words.labels(record), color=color
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
        operation = words.labels(stuck[-1])[0]
        count = f" and {len(stuck) - 1} more" if len(stuck) > 1 else ""
        edge = min(last, self.page.until)
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

    def _messages(self) -> int:
        """An arrow per message, from its send's begin to its recv's end. Returns how many."""
        lines = {}
        for send, recv in collect.messages(r for lane in self.lanes for r in lane.records):
            if self._visible(send["start"], recv["end"]):
                line = self._line(send, recv)
                # Those that fall on the same pixels are one.
                pixels = (round(self.page.pixels(time)) for time in (send["start"], recv["end"]))
                lines.setdefault((send["rank"], recv["rank"], *pixels), line)
        if not lines:
            return 0
        lines = np.array(list(lines.values()))
        few, many = len(lines) <= FEW_ARROWS, len(lines) > MOST_HEADS
        width, alpha = 1.1 if few else 0.6, 0.3 if many else 0.85
        look = {"color": figures.INK, "zorder": _ARROWS}
        self.axes.add_collection(LineCollection(lines, linewidth=width, alpha=alpha, **look))
        if not many:
            heads = self._heads(lines, _HEAD if few else _SMALL_HEAD)
            self.axes.add_collection(PolyCollection(heads, linewidth=0, **look))
        return len(lines)

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

    def _frame(self, title: str) -> None:
        page, axes = self.page, self.axes
        size = 10 if page.scale > 0.8 else 9 if page.scale > 0.6 else 8
        middles = [sum(page.thread(lane.rank)) / 2 for lane in self.lanes]
        axes.set_yticks(middles, [f"rank {lane.rank}" for lane in self.lanes], fontsize=size)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=9)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
        for rank in range(1, len(self.lanes)):
            axes.axhline(rank * page.lane, color=figures.PALE, linewidth=0.8, zorder=0)
        axes.set_title(title)
        note = "very short operations: heights are shares of the time" * self.shares_shown
        if not any(lane.records for lane in self.lanes):
            note = "nothing was communicated"
        axes.set_xlabel(page.axis_label, fontsize=10, loc="left" if note else "center")
        place = (1 - RIGHT / page.width, 0.63 / page.height)
        self.figure.text(*place, note, ha="right", fontsize=9, color=figures.GREY)

    def _legend(self, arrows: int, bands: int) -> None:
        handles = []
        for state, (face, edge, hatch) in LOOK.items():
            if self.boxes[state]:
                edge = None if edge == "none" else edge
                handles.append(Patch(facecolor=face, edgecolor=edge, hatch=hatch,
                                     linewidth=0.6, label=MEANING[state]))  # fmt: skip
        if arrows:
            handles.append(Line2D([], [], color=figures.INK, linewidth=1.1, marker=">",
                                  markersize=5, label="message"))  # fmt: skip
        if bands:
            handles.append(Patch(facecolor=(figures.GREEN, 0.15), edgecolor=figures.GREEN,
                                 linestyle="--", label="collective: all are there"))  # fmt: skip
        columns = len(handles) if len(handles) <= 4 else (len(handles) + 1) // 2
        self.figure.legend(
            # Matplotlib fills column by column; read, it is row by row.
            handles=[*itertools.chain(*(handles[k::columns] for k in range(columns)))],
            loc="upper left", fontsize=8.5 * min(1, self.page.width / 9), ncols=columns,
            columnspacing=1.4, handlelength=1.8,
            bbox_to_anchor=(LEFT / self.page.width - 0.012, 0.52 / self.page.height),
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _pixels_of(text: str, points: float) -> float:
    """How wide a text is drawn."""
    font = FontProperties(size=points)
    return text_to_path.get_text_width_height_descent(text, font, False)[0] * DPI / 72


_CARD = {"facecolor": figures.PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.9}


def _last_called(met: list[list[dict]]) -> dict[int, int]:
    """For each record of a collective, by identity: the rank that was the last to call it."""
    found = {}
    for records in met:
        last = max(records, key=lambda record: record["start"])["rank"]
        found.update((id(record), last) for record in records)
    return found
