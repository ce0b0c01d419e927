"""A timeline as data for `timeline.js`, which draws it on a page and reacts to the reader.

Times are whole microseconds since the cell began, because a notebook stores them as text. Messages
and collectives name their calls by the position in the list of calls.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from . import activity, phrases
from .activity import AWAITING, COMMUNICATING, COMPUTING, STUCK, WAITING, Lane
from .layout import MOST_ROWS, view

#: Most calls that a notebook stores: the longest of each rank. The others are drawn together.
MOST_CALLS = 800
#: Number of columns per rank for the calls that are drawn together.
COLUMNS = 80
#: The states of a thread, in the order of their numbers in the script.
STATES = (COMPUTING, WAITING, AWAITING, COMMUNICATING, STUCK)
#: The sums that the page shows, with their names on the page.
_SUMS = {
    "rank": "rank",
    "seconds computing": "computing",
    "seconds waiting": "waiting",
    "seconds waiting for background": "for the background",
    "seconds communicating": "communicating",
    "seconds hidden": "hidden",
    "bytes sent": "sent",
    "bytes received": "received",
    "bytes in collectives": "in collectives",
}


def page_data(
    title: str,
    lanes: list[Lane],
    totals: list[dict],
    *,
    note: str = "",
    since: float | None = None,
    until: float | None = None,
    simple: bool = False,
    sender: int | None = None,
) -> dict[str, Any]:
    """Return the data that `timeline.js` draws.

    Args:
        title: title of the picture.
        lanes: one lane for each rank.
        totals: the sums of the lanes.
        note: a sentence below the title.
        since, until: seconds of the part that the page shows first; by default as in the figure.
        simple: whether legend, buttons and sums are below "more".
        sender: the rank whose messages have arrows; None: all ranks.
    """
    kept, others = _longest(lanes)
    first, last = view(lanes)
    shown = (first if since is None else since, last if until is None else until)
    places = {id(record): place for place, record in enumerate(kept)}
    kinds = _Kinds()
    rows = _rows(lanes, places)
    return {
        "title": title,
        "note": note,
        "lanes": [
            [lane.rank, _micro(lane.begin), _micro(lane.end), lane.problem] for lane in lanes
        ],
        "calls": [_call(record, kinds, rows) for record in kept],
        "kinds": [list(about) for about in kinds.numbers],
        "messages": [
            [places[id(send)], places[id(recv)], int(send["eager"])]
            for send, recv in activity.messages(kept)
        ],
        "collectives": [
            [places[id(record)] for record in met]
            for met in activity.collectives(activity.all_records(lanes))
            if all(id(record) in places for record in met)
        ],
        "together": _together(lanes, others),
        "left": len(others),
        "view": [_micro(shown[0]), max(_micro(shown[1]), _micro(shown[0]) + 1)],
        "sums": _sums(totals),
        "simple": simple,
        "sender": sender,
    }


class _Kinds:
    """The kinds of calls: the number of each combination of operation, bytes, partner and line."""

    def __init__(self) -> None:
        self.numbers: dict[tuple, int] = {}

    def number(self, record: dict) -> int:
        """Return the number of a record's kind."""
        partner = activity.partner(record)
        about = (phrases.operation(record), record["nbytes"], partner, record["where"])
        return self.numbers.setdefault(about, len(self.numbers))


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _longest(lanes: list[Lane]) -> tuple[list[dict], set[int]]:
    """Return the longest records by rank and start, and the identities of the other records."""

    by_rank = [sorted(lane.records, key=functools.partial(_lasting, lane)) for lane in lanes]
    # The ranks take turns, so that a slow rank doesn't take all places.
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_rank))
    others = {id(record) for record in [r for r in turns if r is not None][MOST_CALLS:]}
    return [r for r in activity.all_records(lanes) if id(r) not in others], others


def _lasting(lane: Lane, record: dict) -> float:
    """Return the negative seconds of an operation, to sort the longest first."""
    begin, end = activity.span(record, lane)
    return begin - end


def _rows(lanes: list[Lane], places: dict[int, int]) -> dict[int, int]:
    """Return the row of each stored background operation, by identity."""
    rows: dict[int, int] = {}
    for lane in lanes:
        records = [r for r in activity.background(lane) if id(r) in places]
        placed = activity.rows([activity.span(record, lane) for record in records])
        rows |= {
            id(record): min(row, MOST_ROWS - 1) for record, row in zip(records, placed, strict=True)
        }
    return rows


def _call(record: dict, kinds: _Kinds, rows: dict[int, int]) -> list:
    """Return a call: rank, kind, row, start, and its other times relative to the start.

    The waits are left out if the call blocked from its begin to its end, as most calls do.
    """
    start = _micro(record["start"])

    def after(seconds: float | None) -> int:
        """Return microseconds after the start; -1 for an event that never happened."""
        return -1 if seconds is None else max(_micro(seconds) - start, 0)

    waits = [after(time) for wait in record["waits"] for time in wait]
    times = [start, after(record["matched"]), after(record["end"])]
    call = [record["rank"], kinds.number(record), rows.get(id(record), -1), *times]
    return call if waits == [0, call[-1]] else [*call, waits]


def _together(lanes: list[Lane], others: set[int]) -> list[list[int]]:
    """Return how the left-out calls blocked each thread: rank, begin, end, state.

    Each column has one part, which is as long as these calls blocked the thread there.
    """
    made = []
    for lane in lanes if others else []:
        held = [
            part
            for begin, end, record in activity.waits(lane)
            if id(record) in others
            for part in activity.held(record, begin, end)
        ]
        step = max(lane.end - lane.begin, 1e-6) / COLUMNS
        shares: dict[int, dict[str, float]] = {}
        for begin, end, state in activity.sweep(held):
            place = min(int(((begin + end) / 2 - lane.begin) / step), COLUMNS - 1)
            column = shares.setdefault(place, {})
            column[state] = column.get(state, 0.0) + end - begin
        for place, column in sorted(shares.items()):
            begin = lane.begin + place * step
            state = max(column, key=column.__getitem__)
            end = begin + sum(column.values())
            made.append([lane.rank, _micro(begin), _micro(end), STATES.index(state)])
    return made


def _sums(totals: list[dict]) -> list[list[str]]:
    """Return the table of the sums, with the heads first and without columns of zeros."""
    keys = [key for key in _SUMS if key == "rank" or any(row[key] for row in totals)]
    rows = [phrases.in_words({key: row[key] for key in keys}) for row in totals]
    return [[_SUMS[key] for key in keys], *(list(row.values()) for row in rows)]
