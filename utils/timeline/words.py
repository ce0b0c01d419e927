"""Operations, bytes and times in words."""

from __future__ import annotations

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
    """The unit that suits a time, and its seconds."""
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 or seconds == 0 else ("µs", 1e-6)


def in_words(row: dict) -> dict[str, str]:
    """A row of the totals for a table."""
    said = {}
    for key, value in row.items():
        what, _, of = key.partition(" ")
        if what == "seconds":
            said[of] = duration(value)
        else:
            said[key] = size(value) if what == "bytes" else str(value)
    return said


def labels(record: dict) -> list[str]:
    """What to write on an operation's bar, longest first."""
    op, amount = record["op"], size(record["nbytes"])
    peer = collect.partner(record)
    if op in collect.POINT_TO_POINT:
        other = "any rank" if peer is None else f"rank {peer}"
        return [f"{amount} {'to' if op == 'send' else 'from'} {other}", amount]
    return [f"{amount} {op}", op, amount] if record["nbytes"] else [op]


def partners(record: dict, last: int | None = None) -> list[str]:
    """Whom an operation waits for, longest first. last: the rank that was last to call."""
    if record["op"] in collect.POINT_TO_POINT:
        peer = collect.partner(record)
        who = "any rank" if peer is None else f"rank {peer}"
    else:
        who = "the others" if last is None else f"rank {last}"
    return [f"waits for {who}", "waits"]
