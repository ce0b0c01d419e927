"""A timeline as data for `timeline.js`, which draws it on a page and answers.

Times are whole microseconds since the cell began, because a notebook keeps them as text. Calls,
messages and collectives name each other by their places in the list of calls.
"""

from __future__ import annotations

from typing import Any

from . import activity, phrases
from .activity import AWAITING, COMMUNICATING, COMPUTING, STUCK, WAITING, Lane
from .layout import MOST_ROWS, view

#: So many calls go into a notebook, the longest ones. The others are drawn together.
MOST_CALLS = 500
#: What is drawn together has so many columns per rank.
COLUMNS = 100
#: How the script numbers what a thread does.
STATES = (COMPUTING, WAITING, AWAITING, COMMUNICATING, STUCK)
#: The sums that the page shows, with their names there.
_SUMS = {
    "rank": "rank",
    "seconds computing": "computing",
    "seconds waiting": "waiting",
    "seconds waiting for background": "of it for the background",
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
) -> dict[str, Any]:
    """Return what `timeline.js` draws.

    Args:
        title: of the picture.
        lanes: one for each rank.
        totals: their sums.
        note: a sentence below the title.
        since, until: seconds of the part that the page shows first; by default as in the figure.
    """
    kept, others = _longest(lanes)
    first, last = view(lanes)
    shown = (first if since is None else since, last if until is None else until)
    places = {id(record): place for place, record in enumerate(kept)}
    names = _Names()
    rows = _rows(lanes, places)
    return {
        "title": title,
        "note": note,
        "lanes": [
            [lane.rank, _micro(lane.begin), _micro(lane.end), lane.problem] for lane in lanes
        ],
        "calls": [_call(record, names, rows) for record in kept],
        "names": names.all,
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
    }


class _Names:
    """Texts that many calls share, by their numbers."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def number(self, text: str) -> int:
        """Return the number of a text."""
        if text not in self.all:
            self.all.append(text)
        return self.all.index(text)


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _longest(lanes: list[Lane]) -> tuple[list[dict], set[int]]:
    """Return the longest records by rank and start, and the identities of the others."""
    lasting = [
        (end - begin, record)
        for lane in lanes
        for record in lane.records
        for begin, end in [activity.span(record, lane)]
    ]
    lasting.sort(key=lambda pair: -pair[0])
    others = {id(record) for _, record in lasting[MOST_CALLS:]}
    return [r for r in activity.all_records(lanes) if id(r) not in others], others


def _rows(lanes: list[Lane], places: dict[int, int]) -> dict[int, int]:
    """Return the row of each background operation that is kept, by identity."""
    rows: dict[int, int] = {}
    for lane in lanes:
        records = [r for r in activity.background(lane) if id(r) in places]
        placed = activity.rows([activity.span(record, lane) for record in records])
        rows |= {
            id(record): min(row, MOST_ROWS - 1) for record, row in zip(records, placed, strict=True)
        }
    return rows


def _call(record: dict, names: _Names, rows: dict[int, int]) -> list:
    """Return a call: rank, texts, bytes, partner, row, and its times after its start.

    Its waits are left out if it blocked from its begin to its end, as most calls do.
    """
    start = _micro(record["start"])

    def after(seconds: float | None) -> int:
        """Return microseconds after the start; -1 for what never happened."""
        return -1 if seconds is None else max(_micro(seconds) - start, 0)

    partner = activity.partner(record)
    waits = [after(time) for wait in record["waits"] for time in wait]
    call = [
        record["rank"],
        names.number(phrases.operation(record)),
        record["nbytes"],
        -1 if partner is None else partner,
        names.number(record["where"]),
        rows.get(id(record), -1),
        start,
        after(record["matched"]),
        after(record["end"]),
    ]
    return call if waits == [0, call[-1]] else [*call, waits]


def _together(lanes: list[Lane], others: set[int]) -> list[list[int]]:
    """Return what the calls that are left out did to each thread: rank, begin, end, state."""
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
            edges = (lane.begin + place * step, lane.begin + (place + 1) * step)
            state = max(column, key=column.__getitem__)
            made.append([lane.rank, *map(_micro, edges), STATES.index(state)])
    return made


def _sums(totals: list[dict]) -> list[list[str]]:
    """Return the table of the sums, its heads first, without columns of zeros."""
    keys = [key for key in _SUMS if key == "rank" or any(row[key] for row in totals)]
    rows = [phrases.in_words({key: row[key] for key in keys}) for row in totals]
    return [[_SUMS[key] for key in keys], *(list(row.values()) for row in rows)]
