"""What the ranks told, on one clock: who was blocked when, what met what, and the sums.

Nothing here draws or asks; times are seconds since the cell began on the first rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

COMPUTING, WAITING, COMMUNICATING, STUCK = "computing", "waiting", "communicating", "stuck"
# A thread that waits while its own background operation moves data.
AWAITING = "waiting for the background"
# What counts where several operations hold a thread: any one that moves data.
_PRECEDENCE = (COMMUNICATING, AWAITING, WAITING, STUCK, COMPUTING)
POINT_TO_POINT = ("send", "recv")

Part = tuple[float, float, str]


@dataclass
class Lane:
    """One rank's cell.

    Attributes:
        rank: global rank.
        begin, end: of the cell on this rank. A cell that still runs ends with the last event.
        records: its communications, by start.
        steps: when each ``optimizer.step()`` was over.
        problem: why nothing is known of the rank, else empty.
    """

    rank: int
    begin: float = 0.0
    end: float = 0.0
    records: list[dict] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    problem: str = ""


# -- one clock --------------------------------------------------------------------------------


def lanes(reports: list[dict], offsets: list[float]) -> list[Lane]:
    """Put the ranks' reports on rank 0's clock, which is set to 0 when the first cell began.

    Args:
        reports: of each rank.
        offsets: seconds that each rank's clock is ahead of rank 0's.
    """
    zeros = [_first(report) - off for report, off in zip(reports, offsets, strict=True)]
    zero = min((time for time in zeros if time < math.inf), default=0.0)
    made = [_lane(report, zero + offset) for report, offset in zip(reports, offsets, strict=True)]
    latest = max((time for lane in made for time in _times(lane)), default=0.0)
    for lane, report in zip(made, reports, strict=True):
        if report.get("end") is None and not lane.problem:
            lane.end = latest
    _meet([record for lane in made for record in lane.records])
    _find_eager(made)
    return made


def _first(report: dict) -> float:
    """When the report begins on its own clock; infinite where it tells nothing."""
    begin = [report["begin"]] if report.get("begin") is not None else []
    return min([*begin, *(r["start"] for r in report.get("records", []))], default=math.inf)


def _lane(report: dict, shift: float) -> Lane:
    if "error" in report:
        return Lane(report["rank"], problem=report["error"])
    records = [_shifted(record, report["rank"], shift) for record in report["records"]]
    records.sort(key=lambda record: record["start"])
    first = _first(report)
    begin = 0.0 if first == math.inf else first - shift
    end = begin if report["end"] is None else report["end"] - shift
    steps = [time - shift for time in report.get("steps", [])]
    return Lane(report["rank"], begin, end, records, steps)


def _shifted(record: dict, rank: int, shift: float) -> dict:
    """The record on the common clock; what never happened is None there, as 0 is a time."""

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
    """When a caller was blocked. A blocking call blocks from its begin, not from its wait."""
    waits = record["waits"]
    if not record["blocking"] or not (waits or record["end"]):
        return waits
    return [[record["start"], waits[-1][1] if waits else record["end"]]]


def _meet(records: list[dict]) -> None:
    """Partners are there when the last one has called; a rank alone notices it later.

    Some notice only at the end, such as the sender of a large message.
    """
    for met in [*messages(records), *collectives(records)]:
        last = max(record["start"] for record in met)
        for record in met:
            if record["matched"] is not None:
                record["matched"] = max(record["start"], min(record["matched"], last))


def _find_eager(made: list[Lane]) -> None:
    """Set ``eager`` of every record: a send that was over before its receiver came.

    Its data went into a buffer at once, so it has not waited for a partner.
    """
    records = [record for lane in made for record in lane.records]
    came = {
        tuple(record["message"]): record["start"]
        for record in records
        if record["op"] == "recv" and record["message"] is not None
    }
    silent = {lane.rank for lane in made if lane.problem}
    for record in records:
        sent = record["op"] == "send" and record["message"] is not None
        record["eager"] = (
            sent
            and record["end"] is not None
            and partner(record) not in silent
            and record["end"] <= came.get(tuple(record["message"]), math.inf)
        )
        if record["eager"]:
            record["matched"] = record["start"]


def _times(lane: Lane) -> Iterable[float]:
    yield lane.end
    for record in lane.records:
        yield record["start"]
        yield record["end"] or 0.0
        yield from (end or begin for begin, end in record["waits"])


# -- intervals --------------------------------------------------------------------------------


def phases(record: dict, since: float, until: float) -> list[Part]:
    """Cut an operation's interval where its partner came: waiting, then communicating."""
    matched = record["matched"]
    last = max(since, until)
    if matched is None:
        # It may have been over before anyone could look; only what never ended is stuck.
        return [(since, last, STUCK if record["end"] is None else WAITING)]
    cut = min(max(since, matched), last)
    parts = [(since, cut, WAITING), (cut, last, COMMUNICATING)]
    return [part for part in parts if part[1] > part[0]] or parts[-1:]


def held(record: dict, since: float, until: float) -> list[Part]:
    """Return the phases of a wait: background data communicates there, not in the thread."""
    moving = COMMUNICATING if record["blocking"] else AWAITING
    return [
        (begin, end, moving if state == COMMUNICATING else state)
        for begin, end, state in phases(record, since, until)
    ]


def blocked(record: dict, horizon: float) -> list[Part]:
    """Return when the operation held the computing thread. An open wait lasts until the horizon."""
    parts = []
    for begin, end in record["waits"]:
        parts += held(record, begin, horizon if end is None else end)
    return parts


def sweep(parts: Iterable[Part]) -> list[Part]:
    """Parts that may overlap, as parts in order that don't: the strongest state counts."""
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
        strongest = next((s for s in _PRECEDENCE if open_now[s]), None)
        if strongest is None or until <= time:
            continue
        if swept and swept[-1][1] == time and swept[-1][2] == strongest:
            swept[-1] = (swept[-1][0], until, strongest)
        else:
            swept.append((time, until, strongest))
    return swept


def states(lane: Lane) -> list[Part]:
    """Return what the computing thread did from the cell's begin to its end, without gaps."""
    if lane.problem:
        return []
    waits = [part for record in lane.records for part in blocked(record, lane.end)]
    return sweep([(lane.begin, lane.end, COMPUTING), *waits])


def background(lane: Lane) -> list[dict]:
    """Return the operations that ran beside the computing thread."""
    return [record for record in lane.records if not record["blocking"]]


def end_of(record: dict, lane: Lane) -> float:
    """Return when an operation was over; one that never was lasts as long as the cell."""
    return max(record["start"], lane.end) if record["end"] is None else record["end"]


def rows(spans: list[tuple[float, float]]) -> list[int]:
    """Return a row for each span, so that no two in a row overlap: as few rows as possible."""
    placed = [0] * len(spans)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    count = 0
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        begin, end = spans[index]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, count = [count], count + 1
        placed[index] = heapq.heappop(free)
        heapq.heappush(busy, (end, placed[index]))
    return placed


# -- what met what ----------------------------------------------------------------------------


def messages(records: Iterable[dict]) -> list[tuple[dict, dict]]:
    """Return the pairs of send and recv that were one message and arrived, by time of sending."""
    halves: dict[str, dict[tuple, dict]] = {"send": {}, "recv": {}}
    for record in records:
        if record["op"] in halves and record["message"] is not None:
            halves[record["op"]][tuple(record["message"])] = record
    pairs = [
        (send, halves["recv"][message])
        for message, send in halves["send"].items()
        if message in halves["recv"] and halves["recv"][message]["end"] is not None
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
        # Two process groups of the same ranks count alike: then the first meets the first.
        if set(by_rank) == set(group):
            complete += [list(met) for met in zip(*by_rank.values(), strict=False)]
    return complete


def partner(record: dict) -> int | None:
    """Return the other rank (global) of a send or recv, or the root; None if there is none."""
    peer = record["peer"]
    return None if peer is None or peer < 0 else record["group"][peer]


# -- sums -------------------------------------------------------------------------------------


def totals(lane: Lane, since: float = -math.inf, until: float = math.inf) -> dict:
    """Return what a rank communicated between two times (seconds), and how its time went.

    Bytes and messages are those of operations that began then and are over. A record that knows
    what was ``moved_out`` and ``moved_in`` counts there; any other collective by its tensors.
    """
    over = [record for record in lane.records if record["end"] is not None]
    timed = _between(states(lane), since, until)
    spent = dict.fromkeys(_PRECEDENCE, 0.0)
    for begin, end, state in timed:
        spent[state] += end - begin
    moving = [(r["matched"], r["end"], COMMUNICATING) for r in over if r["matched"] is not None]
    computing = [part for part in timed if part[2] == COMPUTING]
    return {
        "rank": lane.rank,
        **_traffic([record for record in over if since <= record["start"] < until]),
        "seconds computing": spent[COMPUTING],
        "seconds waiting": spent[WAITING] + spent[AWAITING] + spent[STUCK],
        "seconds waiting for background": spent[AWAITING],
        "seconds communicating": spent[COMMUNICATING],
        "seconds hidden": _overlap(moving, computing),
    }


def _between(parts: list[Part], since: float, until: float) -> list[Part]:
    """What of the parts lies between two times."""
    cut = [(max(begin, since), min(end, until), state) for begin, end, state in parts]
    return [part for part in cut if part[1] > part[0]]


def _traffic(records: list[dict]) -> dict[str, int]:
    sums = dict.fromkeys(
        ("bytes sent", "bytes received", "bytes in collectives",
         "messages sent", "messages received", "collectives"), 0
    )  # fmt: skip
    for record in records:
        to_sum, count = {
            "send": ("bytes sent", "messages sent"),
            "recv": ("bytes received", "messages received"),
        }.get(record["op"], ("bytes in collectives", "collectives"))
        sums[count] += 1
        if record.get("moved_out") is None and record.get("moved_in") is None:
            sums[to_sum] += record["nbytes"]
        else:
            sums["bytes sent"] += record.get("moved_out") or 0
            sums["bytes received"] += record.get("moved_in") or 0
    return sums


def _overlap(some: list[Part], others: list[Part]) -> float:
    """Seconds that are in both."""
    return _length(some) + _length(others) - _length([*some, *others])


def _length(parts: list[Part]) -> float:
    return sum(end - begin for begin, end, _ in sweep(parts))
