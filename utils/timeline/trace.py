"""A trace in the format that Perfetto and Chrome read.

"Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU:
complete events (X) in µs, a process per rank, flow events (s, f) for messages. Events of a track
must be separate or nested.
"""

from __future__ import annotations

import json
import os
from typing import Any

from . import activity
from .activity import COMMUNICATING, COMPUTING, STUCK, Lane

_PHASES = {
    COMMUNICATING: "data moves",
    activity.WAITING: "waits for its partner",
    activity.AWAITING: "waits for the background",
    STUCK: "never matched",
}
# The tracks for waits of other threads come after the tracks for background operations.
_BEYOND = 1000


def save(lanes: list[Lane], path: str | os.PathLike) -> None:
    """Write the trace as JSON."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events(lanes), "displayTimeUnit": "ms"}, file)


def events(lanes: list[Lane]) -> list[dict]:
    """Return the trace's events: tracks and their names, operations, messages."""
    made: list[dict] = []
    # Track, begin and end of each record's event, by identity, as the ends of messages.
    places: dict[int, tuple[int, float, float]] = {}
    for lane in lanes:
        made += _thread(lane, places) + _background(lane, places)
    return made + _flows(lanes, places)


def _thread(lane: Lane, places: dict) -> list[dict]:
    """Return the events of the computing thread: its computing, and its waits."""
    waits = activity.waits(lane)
    # A thread waits for one operation at a time, so an overlapping wait gets a separate track.
    tracks = activity.rows([(begin, end) for begin, end, _ in waits])
    others = [_BEYOND + track for track in range(1, max(tracks, default=0) + 1)]
    names = {0: "computing thread"} | dict.fromkeys(others, "another waiting thread")
    made = _metadata(lane, names)
    made += [
        _complete("computing", COMPUTING, lane.rank, 0, begin, end)
        for begin, end, state in activity.states(lane)
        if state == COMPUTING
    ]
    for (begin, end, record), track in zip(waits, tracks, strict=True):
        track = _BEYOND + track if track else 0
        name = record["op"] if record["blocking"] else f"wait for {record['op']}"
        parts = activity.held(record, begin, end)
        made += _operation(name, record, lane, track, (begin, end), parts)
        if record["blocking"]:
            places[id(record)] = (track, begin, end)
    return made


def _background(lane: Lane, places: dict) -> list[dict]:
    """Return the background operations, on as few tracks as they need."""
    records = activity.background(lane)
    spans = [activity.span(record, lane) for record in records]
    tracks = [row + 1 for row in activity.rows(spans)]
    made = _metadata(lane, {track: f"in the background {track}" for track in sorted(set(tracks))})
    for record, span, track in zip(records, spans, tracks, strict=True):
        parts = activity.phases(record, *span)
        made += _operation(record["op"], record, lane, track, span, parts)
        places[id(record)] = (track, *span)
    return made


def _operation(
    name: str, record: dict, lane: Lane, track: int, span: tuple[float, float], parts: list
) -> list[dict]:
    """Return an operation, with its phases as events inside it."""
    args = {
        "bytes": record["nbytes"],
        "shape": record["shape"],
        "dtype": record["dtype"],
        "group": record["group"],
        "peer": activity.partner(record),
        "tag": record["tag"],
        "line": record["where"],
        "finished": record["end"] is not None,
    }
    inside = [
        _complete(_PHASES[state], state, lane.rank, track, begin, end)
        for begin, end, state in parts
    ]
    return [_complete(name, "communication", lane.rank, track, *span, args), *inside]


def _flows(lanes: list[Lane], places: dict) -> list[dict]:
    """Return an arrow per message; it ends inside the recv's event, so that it binds to it."""
    made = []
    records = activity.all_records(lanes)
    for number, (send, recv) in enumerate(activity.messages(records)):
        if id(send) not in places or id(recv) not in places:
            continue
        about = {"name": "message", "cat": "message", "id": number}
        from_track, start, _ = places[id(send)]
        to_track, begin, end = places[id(recv)]
        inside = max(begin, end - 1e-6)
        made.append({**about, "ph": "s", **_at(send["rank"], from_track, start)})
        made.append({**about, "ph": "f", "bp": "e", **_at(recv["rank"], to_track, inside)})
    return made


def _complete(
    name: str,
    category: str,
    rank: int,
    track: int,
    begin: float,
    end: float,
    args: dict[str, Any] | None = None,
) -> dict:
    at = _at(rank, track, begin)
    # The length comes from rounded times, so that nested events stay nested.
    length = round(max(_nanoseconds(end) - _nanoseconds(begin), 0) / 1e3, 3)
    event = {"name": name, "cat": category, "ph": "X", **at, "dur": length}
    return event | ({"args": args} if args else {})


def _at(rank: int, track: int, time: float) -> dict:
    return {"pid": rank, "tid": track, "ts": _nanoseconds(time) / 1e3}


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)


def _metadata(lane: Lane, names: dict[int, str]) -> list[dict]:
    """Return names and order of the rank's tracks; with track 0, also the rank's name."""
    about = []
    if 0 in names:
        about.append(("process_name", 0, {"name": f"rank {lane.rank}"}))
        about.append(("process_sort_index", 0, {"sort_index": lane.rank}))
    for track, name in names.items():
        about.append(("thread_name", track, {"name": name}))
        about.append(("thread_sort_index", track, {"sort_index": track}))
    return [
        {"name": name, "ph": "M", "ts": 0, "pid": lane.rank, "tid": track, "args": args}
        for name, track, args in about
    ]
