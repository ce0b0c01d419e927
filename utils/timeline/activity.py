"""The ranks' activity on one clock: when a rank was blocked, which calls met, and the sums.

This module only computes. Times are seconds since the cell began on the first rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

COMPUTING, WAITING, COMMUNICATING, STUCK = "computing", "waiting", "communicating", "stuck"
# A thread that waits while its own background operation moves data.
AWAITING = "waiting for the background"
# If several operations block a thread, the first of these states counts.
_PRECEDENCE = (COMMUNICATING, AWAITING, WAITING, STUCK, COMPUTING)
POINT_TO_POINT = ("send", "recv")

Part = tuple[float, float, str]


@dataclass
class Lane:
    """The cell of one rank.

    Attributes:
        rank: global rank.
        begin, end: begin and end of the cell on this rank. A cell that still runs ends with the
            last event.
        records: the rank's communications, by start.
        problem: why nothing is known about the rank; "" otherwise.
        cpu: seconds of CPU time of the rank's main thread; 0 if it is unknown.
    """

    rank: int
    begin: float = 0.0
    end: float = 0.0
    records: list[dict] = field(default_factory=list)
    problem: str = ""
    cpu: float = 0.0


# -- one clock --------------------------------------------------------------------------------


def lanes(reports: list[dict], offsets: list[float]) -> list[Lane]:
    """Return the ranks' lanes on rank 0's clock, with 0 when the first cell began.

    Args:
        reports: the report of each rank.
        offsets: seconds that each rank's clock is ahead of rank 0's.
    """
    by_rank = list(zip(reports, offsets, strict=True))
    zero = min((_first(report) - offset for report, offset in by_rank), default=math.inf)
    shift = zero if zero < math.inf else 0.0
    made = [_lane(report, shift + offset) for report, offset in by_rank]
    latest = max((time for lane in made for time in _times(lane)), default=0.0)
    for lane, report in zip(made, reports, strict=True):
        if report.get("end") is None and not lane.problem:
            lane.end = latest
    _meet(all_records(made))
    _find_eager(made)
    return made


def all_records(lanes: Iterable[Lane]) -> list[dict]:
    """Return the communications of all ranks."""
    return [record for lane in lanes for record in lane.records]


def _first(report: dict) -> float:
    """Return when the report begins on its own clock; infinity if it has no time."""
    times = [report.get("begin"), *(record["start"] for record in report.get("records", []))]
    return min((time for time in times if time is not None), default=math.inf)


def _lane(report: dict, shift: float) -> Lane:
    if "error" in report:
        return Lane(report["rank"], problem=report["error"])
    records = [_shifted(record, report["rank"], shift) for record in report["records"]]
    records.sort(key=lambda record: record["start"])
    first = _first(report)
    begin = 0.0 if first == math.inf else first - shift
    end = begin if report["end"] is None else report["end"] - shift
    return Lane(report["rank"], begin, end, records, cpu=report.get("cpu") or 0.0)


def _shifted(record: dict, rank: int, shift: float) -> dict:
    """Return a record on the common clock; an event that never happened is None, not 0."""

    def time(seconds: float) -> float | None:
        return seconds - shift if seconds else None

    return record | {
        "rank": rank,
        "start": record["start"] - shift,
        "matched": time(record["matched"]),
        "end": time(record["end"]),
        "waits": [[begin - shift, time(end)] for begin, end in _waits(record)],
    }


def _waits(record: dict) -> list[list[float]]:
    """Return when a caller was blocked; a blocking call blocks from its begin."""
    waits = record["waits"]
    if not record["blocking"] or not (waits or record["end"]):
        return waits
    return [[record["start"], waits[-1][1] if waits else record["end"]]]


def _meet(records: list[dict]) -> None:
    """Correct ``matched``, because the partners are complete when the last one has called.

    A single rank notices this later, and the sender of a large message only at the end.
    """
    for met in [*messages(records), *collectives(records)]:
        last = max(record["start"] for record in met)
        for record in met:
            if record["matched"] is not None:
                record["matched"] = max(record["start"], min(record["matched"], last))


def _find_eager(made: list[Lane]) -> None:
    """Set ``eager`` of every record: a send that was complete before the receiver called.

    The data of an eager send went into a buffer at once, so the send did not wait for a partner.
    """
    silent = {lane.rank for lane in made if lane.problem}  # they may have received a message
    records = all_records(made)
    for record in records:
        record["eager"] = False
    sends, receives = _halves(records)
    for message, send in sends.items():
        came = receives[message]["start"] if message in receives else math.inf
        if send["end"] is not None and send["end"] <= came and partner(send) not in silent:
            send["eager"] = True
            send["matched"] = send["start"]


def _times(lane: Lane) -> Iterable[float]:
    yield lane.end
    for record in lane.records:
        yield record["start"]
        yield record["end"] or 0.0
        yield from (end or begin for begin, end in record["waits"])


# -- intervals --------------------------------------------------------------------------------


def phases(record: dict, since: float, until: float) -> list[Part]:
    """Cut an operation's interval when its partner came: waiting, then communicating."""
    matched = record["matched"]
    last = max(since, until)
    if matched is None:
        # It may have ended before a match could be noticed. It is stuck only if it never ended.
        return [(since, last, STUCK if record["end"] is None else WAITING)]
    cut = min(max(since, matched), last)
    parts = [(since, cut, WAITING), (cut, last, COMMUNICATING)]
    return [part for part in parts if part[1] > part[0]] or parts[-1:]


def held(record: dict, since: float, until: float) -> list[Part]:
    """Return the phases of a wait; a background operation moves data outside the thread."""
    moving = COMMUNICATING if record["blocking"] else AWAITING
    return [
        (begin, end, moving if state == COMMUNICATING else state)
        for begin, end, state in phases(record, since, until)
    ]


def sweep(parts: Iterable[Part]) -> list[Part]:
    """Return overlapping parts as parts in order without overlap; the strongest state counts."""
    edges = sorted(
        (time, change, state)
        for begin, end, state in parts
        if end > begin
        for time, change in ((begin, 1), (end, -1))
    )
    open_now = dict.fromkeys(_PRECEDENCE, 0)
    swept: list[Part] = []
    for (time, change, state), (until, *_) in pairwise(edges):
        open_now[state] += change
        strongest = next(filter(open_now.get, _PRECEDENCE), None)
        if strongest is None or until <= time:
            continue
        if swept and swept[-1][1:] == (time, strongest):
            swept[-1] = (swept[-1][0], until, strongest)
        else:
            swept.append((time, until, strongest))
    return swept


def waits(lane: Lane) -> list[tuple[float, float, dict]]:
    """Return begin, end and record of each wait; an open wait lasts until the cell's end."""
    return [
        (begin, lane.end if end is None else end, record)
        for record in lane.records
        for begin, end in record["waits"]
    ]


def states(lane: Lane) -> list[Part]:
    """Return what the computing thread did from the cell's begin to its end, without gaps."""
    if lane.problem:
        return []
    blocked = [part for begin, end, record in waits(lane) for part in held(record, begin, end)]
    return sweep([(lane.begin, lane.end, COMPUTING), *blocked])


def background(lane: Lane) -> list[dict]:
    """Return the operations that ran beside the computing thread."""
    return [record for record in lane.records if not record["blocking"]]


def span(record: dict, lane: Lane) -> tuple[float, float]:
    """Return begin and end of an operation; without an end, it lasts as long as the cell."""
    start, end = record["start"], record["end"]
    return start, max(start, lane.end) if end is None else end


def given_up(record: dict, lane: Lane) -> float:
    """Return until when a rank waited for an operation that never ended."""
    ends = [lane.end if end is None else end for _, end in record["waits"]]
    return max(ends, default=span(record, lane)[1])


def rows(spans: list[tuple[float, float]]) -> list[int]:
    """Return a row for each span, so that no spans overlap, with as few rows as possible."""
    placed = [0] * len(spans)
    ends: list[float] = []  # the end of the last span in each row
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        begin, end = spans[index]
        row = next((row for row, until in enumerate(ends) if until <= begin), len(ends))
        ends[row : row + 1] = [end]
        placed[index] = row
    return placed


# -- which calls met --------------------------------------------------------------------------


def _halves(records: Iterable[dict]) -> tuple[dict[tuple, dict], dict[tuple, dict]]:
    """Return the sends and the receives, by the number of their message."""
    halves: dict[str, dict[tuple, dict]] = {"send": {}, "recv": {}}
    for record in records:
        if record["op"] in halves and record["message"] is not None:
            halves[record["op"]][tuple(record["message"])] = record
    return halves["send"], halves["recv"]


def messages(records: Iterable[dict]) -> list[tuple[dict, dict]]:
    """Return the pairs of send and recv whose message arrived, by time of sending."""
    sends, receives = _halves(records)
    pairs = [
        (send, receives[message])
        for message, send in sends.items()
        if message in receives and receives[message]["end"] is not None
    ]
    return sorted(pairs, key=lambda pair: pair[0]["start"])


def collectives(records: Iterable[dict]) -> list[list[dict]]:
    """Return the records of each collective that every rank of its group has called."""
    called: dict[tuple, dict[int, list[dict]]] = {}
    for record in records:
        if record["sequence"] is not None and record["op"] not in POINT_TO_POINT:
            key = (tuple(record["group"]), record["sequence"], record["op"])
            called.setdefault(key, {}).setdefault(record["rank"], []).append(record)
    complete = []
    for (group, *_), by_rank in called.items():
        # Two process groups of the same ranks use the same numbers, so calls are paired in order.
        if set(by_rank) == set(group):
            complete += [list(met) for met in zip(*by_rank.values(), strict=False)]
    return complete


def partner(record: dict) -> int | None:
    """Return the other rank (global) of a send or recv, or the root; None if there is none."""
    peer = record["peer"]
    return None if peer is None or peer < 0 else record["group"][peer]


# -- sums -------------------------------------------------------------------------------------


def totals(lane: Lane) -> dict:
    """Return what a rank communicated, in bytes and messages, and how it spent its time, in s.

    Bytes and messages belong to operations that have ended. A record with ``moved_out`` and
    ``moved_in`` counts by these bytes, and any other collective by its tensors.
    """
    over = [record for record in lane.records if record["end"] is not None]
    timed = states(lane)
    spent = dict.fromkeys(_PRECEDENCE, 0.0)
    for begin, end, state in timed:
        spent[state] += end - begin
    moving = [(r["matched"], r["end"], COMMUNICATING) for r in over if r["matched"] is not None]
    computing = [part for part in timed if part[2] == COMPUTING]
    return {
        "rank": lane.rank,
        **_traffic(over),
        "seconds computing": spent[COMPUTING],
        "seconds waiting": spent[WAITING] + spent[AWAITING] + spent[STUCK],
        "seconds waiting for background": spent[AWAITING],
        "seconds communicating": spent[COMMUNICATING],
        # The length of the overlap of communication and computing.
        "seconds hidden": _length(moving) + _length(computing) - _length([*moving, *computing]),
    }


# The names of the sums of bytes and of operations, by kind of operation.
_POINT_TO_POINT_SUMS = {
    "send": ("bytes sent", "messages sent"),
    "recv": ("bytes received", "messages received"),
}
_COLLECTIVE_SUMS = ("bytes in collectives", "collectives")


def _traffic(records: list[dict]) -> dict[str, int]:
    sizes, counts = zip(*_POINT_TO_POINT_SUMS.values(), _COLLECTIVE_SUMS, strict=True)
    sums = dict.fromkeys([*sizes, *counts], 0)
    for record in records:
        size, count = _POINT_TO_POINT_SUMS.get(record["op"], _COLLECTIVE_SUMS)
        sums[count] += 1
        moved_out = record.get("moved_out")
        moved_in = record.get("moved_in")
        if moved_out is None and moved_in is None:
            sums[size] += record["nbytes"]
        else:
            sums["bytes sent"] += moved_out or 0
            sums["bytes received"] += moved_in or 0
    return sums


def _length(parts: list[Part]) -> float:
    return sum(end - begin for begin, end, _ in sweep(parts))
