"""What a run says at its end."""

from __future__ import annotations

from tabulate import tabulate

from .census import Census
from .record import Record


def summary(record: Record) -> str:
    """Cells and errors by kind, restarts, the slowest recovery, the first and the last census."""
    kinds: dict[str, int] = {}
    for (kind, _), n in record.cells.items():
        kinds[kind] = kinds.get(kind, 0) + n
    seconds, number, name = record.slowest
    parts = [
        f"{sum(kinds.values())} cells: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
        _table(("kind", "cell", "times"), [(*key, n) for key, n in sorted(record.cells.items())]),
        _table(("error", "times"), record.errors.most_common()),
        f"{record.restarts} restarts of the ranks, {record.notebooks} notebook(s)",
        f"slowest from an error to the end of the next cell: {seconds:.1f} s "
        f"(cell {number}, {name})",
        _censuses(record.censuses),
        f"{len(record.findings)} findings",
    ]
    return "\n\n".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple]) -> str:
    return tabulate(rows, headers=head, tablefmt="github")


def _censuses(taken: list[Census]) -> str:
    """First and last of all, and of the ranks that lived longest."""
    if not taken:
        return "no census"
    lives: dict[int, list[Census]] = {}
    for one in taken:
        lives.setdefault(one.generation, []).append(one)
    longest = max(lives.values(), key=lambda life: life[-1].cell - life[0].cell)
    parts = [
        f"Census, {len(taken)} times. First of all (after cell {taken[0].cell}) → last of all "
        f"(after cell {taken[-1].cell}):",
        _two(taken[0], taken[-1]),
        f"The ranks that lived longest, from cell {longest[0].cell} to {longest[-1].cell}:",
        _two(longest[0], longest[-1]),
    ]
    return "\n\n".join(parts)


def _two(first: Census, last: Census) -> str:
    names = list(dict.fromkeys(name for row in last.rows.values() for name in row))
    rows = [
        (who, *(f"{first.rows[who][n]} → {row[n]}" if n in row else "" for n in names))
        for who, row in last.rows.items()
    ]
    return _table(("", *names), rows)
