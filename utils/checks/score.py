"""The score of this notebook: the points that its checks have given, and the next task.

Every check registers when its room is imported, so the points of a lab are only written there.
Verdicts count from the start of the kernel, and a later verdict of a task replaces an earlier
one. Grading doesn't use this score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

#: By room, such as "utils.labs.lab01": the points of each task, and the tasks that have passed.
_points: dict[str, dict[str, int]] = defaultdict(dict)
_passed: dict[str, set[str]] = defaultdict(set)


def room_of(module: str) -> str:
    """Return the room of a module with checks: its package, or the module if it has none."""
    return module.rpartition(".")[0] or module


def enter(room: str, number: str, points: int) -> None:
    """Add a task to the list of its room."""
    _points[room][number] = points


def note(room: str, number: str, passed: bool) -> None:
    """Record the latest verdict on a task."""
    if passed:
        _passed[room].add(number)
    else:
        _passed[room].discard(number)


def forget(room: str, numbers: Iterable[str]) -> None:
    """Forget that these tasks have passed."""
    _passed[room].difference_update(numbers)


def passed(room: str) -> frozenset[str]:
    """Return the numbers of a room's tasks that have passed."""
    return frozenset(_passed[room])


def in_words(room: str) -> str:
    """Return "6 of 17 points · next: Task 1.3"; "" if the room's tasks give no points."""
    tasks, passed = _points[room], _passed[room]
    if not (all_points := sum(tasks.values())):
        return ""
    so_far = f"{sum(tasks[number] for number in passed)} of {all_points} points"
    rest = sorted(tasks.keys() - passed, key=_place)
    return f"{so_far} · next: Task {rest[0]}" if rest else f"{so_far} · every task has passed"


def _place(number: str) -> list[str]:
    """Return a key that sorts 6.10 after 6.9."""
    return [part.zfill(4) for part in number.split(".")]
