"""Replies that leave something out: no check passes on them, in any lab.

A student's code shares its process with the probe of its check, and can reply in the probe's place.
The checks run here on replies of the solutions, from which one list after the other is removed.
The records of calls stay whole, since those of a graded rank are the kernel's
(``test_forged_answers.py`` forges them in boxes). So do the replies of ranks apart, on which a
check runs its reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from answer_tools import Lab, ranks_of, tasks_of_ranks_here
from lab_tools import verdict
from local_ranks import LocalRanks

from utils.labs.lab17.probes import probe_policy

# Lists that are empty if all is well, or that only explain a mistake: they prove nothing.
SIGNS_OF_MISTAKES = {
    *("used", "changed", "kept", "lacking", "said", "bare", "others", "asked", "made inside"),
    *("at", "seen", "kinds", "events", "missing", "odd", "dx"),
}
# Probes that return decisions of an answer: with one decision less, it is another right answer.
DECISIONS = {probe_policy}
# What tells the record of a call from other dicts.
RECORD = {"op", "group", "nbytes"}
Path = tuple[str, ...]


def is_record(value: Any) -> bool:
    """Is this the record of a call?"""
    return isinstance(value, dict) and value.keys() >= RECORD


def lists_in(value: Any, at: Path = ()) -> Iterator[Path]:
    """Yield where the lists and dicts of a reply are; ``*`` stands for every entry of a list."""
    if is_record(value) or (isinstance(value, list) and any(map(is_record, value))):
        return
    if isinstance(value, list | dict):
        yield at
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        yield from lists_in(value[0], (*at, "*"))
    for name, part in value.items() if isinstance(value, dict) else ():
        if name not in SIGNS_OF_MISTAKES:
            yield from lists_in(part, (*at, name))


def changed(value: Any, at: Path, change: Callable) -> Any:
    """Return a reply in which the lists at a place are changed."""
    if not at:
        return change(value)
    first, *rest = at
    if first == "*" and isinstance(value, list):
        return [changed(part, tuple(rest), change) for part in value]
    if isinstance(value, dict) and first in value:
        return value | {first: changed(value[first], tuple(rest), change)}
    return value


CHANGES = {
    "emptied": lambda value: type(value)(),
    "without its last entry": lambda value: value[:-1] if isinstance(value, list) else {},
}


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of this name, with its solutions."""
    with LocalRanks(ranks_of(request.param)) as ranks:
        yield Lab(request.param, ranks)


class Forger:
    """Asks ranks, and changes what they reply to one probe."""

    def __init__(self, ask: Callable, target: str, at: Path, change: Callable):
        self._ask, self._target, self._at, self._change = ask, target, at, change
        self.has_changed = False

    def ask(self, target: str, **arguments) -> list:
        """Like :meth:`utils.cluster.Ranks.ask`."""
        replies = self._ask(target, **arguments)
        if target != self._target:
            return replies
        values = [changed(reply.value, self._at, self._change) for reply in replies]
        self.has_changed |= values != [reply.value for reply in replies]
        both = zip(replies, values, strict=True)
        return [dataclasses.replace(reply, value=value) for reply, value in both]


@pytest.mark.parametrize(("lab", "task"), tasks_of_ranks_here(), indirect=["lab"], scope="module")
def test_a_reply_that_leaves_something_out_wins_no_points(lab, task, monkeypatch):
    check, ask, asked = lab.checks[task], lab.ranks.ask, {}

    def watching(target, **arguments):
        replies = ask(target, **arguments)
        for reply in replies:
            asked.update(dict.fromkeys((target, at) for at in lists_in(reply.value)))
        return replies

    monkeypatch.setattr(lab.ranks, "ask", watching)
    assert verdict(check, lab.ranks)[0]
    for target, at in asked:
        for what, change in CHANGES.items():
            # Of a list deep inside, the last entry may be one that explains; without all it fails.
            if change is CHANGES["without its last entry"] and (at or target in DECISIONS):
                continue

            forger = Forger(ask, target, at, change)
            monkeypatch.setattr(lab.ranks, "ask", forger.ask)
            try:
                passed, printed = verdict(check, lab.ranks)
            except RuntimeError:  # PyTorch's, of tensors that do not fit each other
                continue
            where = f"{target} {what} at {'/'.join(at) or 'the top'}"
            assert not (passed and forger.has_changed), f"{where}: {printed}"
