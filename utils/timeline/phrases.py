"""Operations, bytes and times in words."""

from __future__ import annotations

from collections import Counter

from . import collect


def size(nbytes: float) -> str:
    """``1.6 MB``: at most three digits, decimal units."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # What rounds to 1000 of the smaller unit is one of the larger.
        if nbytes >= 0.9995 * one:
            return f"{float(f'{nbytes / one:.3g}'):g} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """``12.3 ms``: three digits, in s, ms or µs."""
    unit, one = time_unit(seconds)
    return f"{float(f'{seconds / one:.3g}'):g} {unit}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that suits a time, and its seconds."""
    # What rounds to 1000 of the smaller unit is one of the larger.
    if seconds >= 0.9995:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 0.9995e-3 or seconds == 0 else ("µs", 1e-6)


def in_words(row: dict) -> dict[str, str]:
    """Return a row of the totals for a table."""
    said = {}
    for key, value in row.items():
        what, _, of = key.partition(" ")
        if what == "seconds":
            said[of] = duration(value)
        else:
            said[key] = size(value) if what == "bytes" else str(value)
    return said


def plain(key: str) -> str:
    """``computing`` of ``seconds computing``."""
    return key.removeprefix("seconds ")


def ideal(seconds: float | None, measured: float | None = None) -> str:
    """``on an ideal network 0.82 s of 1.31 s``: what would be left where communication is free."""
    if seconds is None:
        return "does not end on an ideal network either"
    of = "" if measured is None else f" of {duration(measured)}"
    return f"on an ideal network {duration(seconds)}{of}"


def span(since: float, until: float) -> str:
    """``640 to 880 ms``."""
    unit, one = time_unit(until)
    return f"{since / one:.4g} to {until / one:.4g} {unit}"


def means(totals: list[dict]) -> str:
    """``mean of the ranks: computing 31 ms, waiting 4 ms, …``, of those that communicate."""
    there = [row for row in totals if any(row[count] for count in _COUNTS)] or totals
    keys = [key for key in (there[0] if there else {}) if key.startswith("seconds ")]
    mean = {key: sum(row[key] for row in there) / len(there) for key in keys}
    which = "the ranks" if len(there) == len(totals) else f"the {len(there)} that communicate"
    return f"mean of {which}: {_spent(mean)}"


_COUNTS = ("messages sent", "messages received", "collectives")


def _spent(row: dict) -> str:
    """How the time went, without what is zero."""
    said = []
    for state in ("computing", "waiting", "communicating", "hidden"):
        if seconds := row.get(f"seconds {state}"):
            said.append(f"{state} {duration(seconds)}")
            background = row["seconds waiting for background"]
            if state == "waiting" and background:
                said[-1] += f" ({duration(background)} for the background)"
    return ", ".join(said) or "nothing"


def described(
    title: str, lanes: list[collect.Lane], totals: list[dict], brief: bool = False
) -> str:
    """Return a timeline in words.

    Args:
        title: of the figure.
        lanes: of each rank.
        totals: of each rank.
        brief: one sentence for all ranks; otherwise one for each, if the ranks are few.
    """
    parts = [f"{title.rstrip('.:')}. Timeline of {_count(len(lanes), 'rank')}."]
    if brief or len(lanes) > _FEW_RANKS:
        parts.append(sentence(means(totals)))
    else:
        parts += [sentence(f"rank {row['rank']}: {_spent(row)}") for row in totals]
    parts += [sentence(f"rank {lane.rank}: no answer") for lane in lanes if lane.problem]
    parts.append(sentence(_operations(lanes)))
    return " ".join(parts + [sentence(text) for text in _odd(lanes)])


# Of which each gets a sentence.
_FEW_RANKS = 4


def _operations(lanes: list[collect.Lane]) -> str:
    """``13 all_reduce, 2 broadcast on each rank``; by rank where they differ."""
    told: dict[str, list[str]] = {}
    for lane in lanes:
        if not lane.problem:
            counts = Counter(operation(record) for record in lane.records)
            said = ", ".join(f"{count} {op}" for op, count in counts.items())
            told.setdefault(said or "no communication", []).append(str(lane.rank))
    if len(told) == 1:
        return f"in the cell: {next(iter(told))} on each rank"
    return "in the cell: " + "; ".join(
        f"{said} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"
        for said, ranks in told.items()
    )


def _odd(lanes: list[collect.Lane]) -> list[str]:
    """What went unlike the rest: operations that never ended, sends without their receiver."""
    records = [record for lane in lanes for record in lane.records]
    said = []
    for record in records:
        if record["end"] is None:
            never = "matched" if record["matched"] is None else "finished"
            said.append(f"rank {record['rank']}: {labels(record)[0]} never {never}")
    eager = sum(record["eager"] for record in records)
    if eager:
        said.append(f"{_count(eager, 'send')} over before the receiver came")
    return said


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def operation(record: dict) -> str:
    """Return the operation as it was called: ``isend`` for a send in the background."""
    op = record["op"]
    return f"i{op}" if op in collect.POINT_TO_POINT and not record["blocking"] else op


def labels(record: dict) -> list[str]:
    """Return texts for an operation's bar, longest first; the operation is in all of them."""
    op = operation(record)
    amount = size(record["nbytes"])
    if record["op"] in collect.POINT_TO_POINT:
        to = "to" if record["op"] == "send" else "from"
        return [f"{op} {amount} {to} {_partner(record)}", f"{op} {amount}", op]
    return [f"{op} {amount}", op] if record["nbytes"] else [op]


def partners(record: dict, last: int | None = None) -> list[str]:
    """Return texts that name whom an operation waits for, longest first.

    Args:
        record: of the operation.
        last: the rank that was last to call.
    """
    if record["op"] in collect.POINT_TO_POINT:
        who = _partner(record)
    else:
        who = "the others" if last is None else f"rank {last}"
    return [f"{operation(record)} waits for {who}", f"waits for {who}", "waits"]


def awaits(record: dict) -> list[str]:
    """Return texts for a thread that waits for its own background operation, longest first."""
    return [f"waits for {label}" for label in labels(record)[-2:]] + ["waits"]


def _partner(record: dict) -> str:
    peer = collect.partner(record)
    return "any rank" if peer is None else f"rank {peer}"
