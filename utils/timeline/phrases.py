"""Operations, bytes and times in words."""

from __future__ import annotations

from collections import Counter

from . import activity


def size(nbytes: float) -> str:
    """Return a size such as ``1.6 MB``: at most three digits, decimal units."""
    for unit, one_unit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # A size that would round to 1000 kB is 1 MB.
        if nbytes >= 0.9995 * one_unit:
            return f"{_three_digits(nbytes / one_unit)} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Return a time such as ``12.3 ms``: three digits, in s, ms or µs."""
    unit, one_unit = time_unit(seconds)
    return f"{_three_digits(seconds / one_unit)} {unit}"


def _three_digits(number: float) -> str:
    return f"{float(f'{number:.3g}'):g}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that suits a time, and the unit's seconds."""
    # A time that would round to 1000 ms is 1 s.
    if seconds >= 0.9995:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 0.9995e-3 or seconds == 0 else ("µs", 1e-6)


def in_words(row: dict) -> dict[str, str]:
    """Return a row of the totals for a table."""
    words = {}
    for key, value in row.items():
        kind, _, rest = key.partition(" ")
        if kind == "seconds":
            words[rest] = duration(value)
        else:
            words[key] = size(value) if kind == "bytes" else str(value)
    return words


def ideal(seconds: float | None, measured: float) -> str:
    """Return ``on an ideal network 0.82 s of 1.31 s``: the time if communication were free."""
    if seconds is None:
        return "does not end on an ideal network either"
    return f"on an ideal network {duration(seconds)} of {duration(measured)}"


def means(totals: list[dict]) -> str:
    """Return ``mean of the ranks: computing 31 ms, …``, for the ranks that communicate."""
    there = [row for row in totals if any(map(row.get, _COUNTS))] or totals
    keys = (key for key in there[0] if key.startswith("seconds "))
    mean = {key: sum(row[key] for row in there) / len(there) for key in keys}
    which = "the ranks" if len(there) == len(totals) else f"the {len(there)} that communicate"
    return f"mean of {which}: {_spent(mean)}"


_COUNTS = ("messages sent", "messages received", "collectives")


def _spent(row: dict) -> str:
    """Return how a rank spent its time, without times of zero."""
    states = []
    for state in ("computing", "waiting", "communicating", "hidden"):
        if seconds := row.get(f"seconds {state}"):
            states.append(f"{state} {duration(seconds)}")
            background = row["seconds waiting for background"]
            if state == "waiting" and background:
                states[-1] += f" ({duration(background)} for the background)"
    return ", ".join(states) or "nothing"


def described(title: str, lanes: list[activity.Lane], totals: list[dict]) -> str:
    """Return a timeline in words: a sentence for each of a few ranks, or one for all ranks."""
    parts = [f"{title.rstrip('.:')}. Timeline of {_count(len(lanes), 'rank')}."]
    if len(lanes) > _FEW_RANKS:
        parts.append(sentence(means(totals)))
    else:
        parts += [sentence(f"rank {row['rank']}: {_spent(row)}") for row in totals]
    parts += [sentence(f"rank {lane.rank}: no answer") for lane in lanes if lane.problem]
    parts.append(sentence(f"in the cell: {_operations(lanes)}"))
    return " ".join(parts + [sentence(text) for text in _odd(lanes)])


# Up to this many ranks, each rank gets a sentence.
_FEW_RANKS = 4


def _operations(lanes: list[activity.Lane]) -> str:
    """Return ``13 all_reduce, 2 broadcast on each rank``; by rank if ranks differ."""
    ranks: dict[str, list[str]] = {}
    for lane in lanes:
        if not lane.problem:
            counts = Counter(operation(record) for record in lane.records)
            counted = ", ".join(f"{count} {op}" for op, count in counts.items())
            ranks.setdefault(counted or "no communication", []).append(str(lane.rank))
    if len(ranks) == 1:
        return f"{next(iter(ranks))} on each rank"
    return "; ".join(
        f"{counted} on {'rank' if len(group) == 1 else 'ranks'} {', '.join(group)}"
        for counted, group in ranks.items()
    )


def _odd(lanes: list[activity.Lane]) -> list[str]:
    """Return texts about operations that never ended, and about eager sends."""
    records = activity.all_records(lanes)
    texts = []
    for record in records:
        if record["end"] is None:
            never = "matched" if record["matched"] is None else "finished"
            texts.append(f"rank {record['rank']}: {labels(record)[0]} never {never}")
    eager = sum(record["eager"] for record in records)
    if eager:
        texts.append(f"{_count(eager, 'send')} over before the receiver came")
    return texts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def operation(record: dict) -> str:
    """Return the operation as it was called: ``isend`` for a send in the background."""
    op = record["op"]
    return f"i{op}" if op in activity.POINT_TO_POINT and not record["blocking"] else op


def labels(record: dict) -> list[str]:
    """Return texts for an operation's bar, longest first; all of them name the operation."""
    op = operation(record)
    amount = size(record["nbytes"])
    if record["op"] in activity.POINT_TO_POINT:
        to = "to" if record["op"] == "send" else "from"
        return [f"{op} {amount} {to} {_partner(record)}", f"{op} {amount}", op]
    return [f"{op} {amount}", op] if record["nbytes"] else [op]


def of_wait(record: dict, state: str, last: int | None) -> list[str]:
    """Return texts for a thread that an operation blocks, longest first.

    Args:
        state: state of the thread.
        last: the rank that called the collective last.
    """
    if state == activity.COMMUNICATING:
        return labels(record)
    if state == activity.AWAITING:
        return awaits(record)
    if record["op"] in activity.POINT_TO_POINT:
        who = _partner(record)
    else:
        who = "the others" if last is None else f"rank {last}"
    return [f"{operation(record)} waits for {who}", f"waits for {who}"]


def awaits(record: dict) -> list[str]:
    """Return texts for a thread that waits for its own background operation, longest first."""
    return [f"waits for {label}" for label in labels(record)[-2:]]


def _partner(record: dict) -> str:
    peer = activity.partner(record)
    return "any rank" if peer is None else f"rank {peer}"
