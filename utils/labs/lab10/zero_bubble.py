"""The check of task 10.8: a schedule whose backward has two halves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from utils.checks.probe import probe_calls
from utils.checks.task import Report, Step, facts, task
from utils.cluster.questions import Ranks
from utils.labs.shared.schedules import held, needs_of_halves, planned

#: Stages and microbatches. With fewer microbatches than stages, any length is right.
SIZES = ((4, 8), (4, 4), (1, 3), (2, 5), (3, 3), (6, 13), (7, 7), (5, 2), (3, 1))


@task("10.8", "zero bubble", points=3)
def zero_bubble_schedule(ranks: Ranks, report: Report) -> None:
    """Judge whether schedules are complete and legal, how long they take, and what they hold."""
    calls = [["zero_bubble", list(sizes)] for sizes in SIZES]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        for (p, m), schedule in zip(SIZES, answer.value, strict=True):
            if not report.follow(answer.rank, _steps(p, m, schedule)):
                break


def _steps(p: int, m: int, schedule: Any) -> Iterator[Step]:
    call = f"zero_bubble({p}, {m})"
    yield facts({
        f"{call}: Return a list for each stage, with actions such as ('W', 0)": not _is_schedule(
            schedule
        ),
    })
    yield facts({f"{call}: Return {p} lists, not {len(schedule)}": len(schedule) != p})
    wanted = Counter((kind, k) for kind in "FIW" for k in range(m))
    for s, actions in enumerate(schedule):
        there = Counter((kind, k) for kind, k in actions)
        lacking, twice = wanted - there, there - wanted
        yield facts({
            f"{call}: Stage {s} lacks {_first(lacking)}": lacking,
            f"{call}: Stage {s} has {_first(twice)} more often than it should": twice,
        })
    spans, done = planned(schedule, 1, 1, needs_of_halves)
    yield facts({
        f"{call}: The schedule isn't legal: stage {s} never comes to {kind}{k}": True
        for s, (actions, count) in enumerate(zip(schedule, done, strict=True))
        for kind, k in actions[count : count + 1]
    })
    most = held([[one for one in actions if one[0] != "I"] for actions in schedule])
    length, best = max(span[4] for span in spans), 3 * m + p - 1
    yield facts({
        f"{call}: A stage holds {max(most)} microbatches from F to W, and {p} are allowed. Don't "
        "let all W wait until the end": max(most) > p,
        f"{call}: The schedule takes {length}, because each W comes right after its I, and delays "
        "the next I": m >= p > 1 and all(map(_is_at_once, schedule)),
        f"{call}: The schedule takes {length}, and {best} are enough. On which stage does an I "
        "wait for a W?": m >= p and length > best,
    })


def _is_at_once(actions: list) -> bool:
    """Return whether each W follows its I."""
    pairs = pairwise(actions)
    return all(after == ["W", one[1]] for one, after in pairs if one[0] == "I")


def _is_schedule(value: Any) -> bool:
    """Return whether this is a list of lists of pairs of a kind and a number."""
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and all(map(_is_action, row)) for row in rows)


def _is_action(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2
    return pair and isinstance(value[0], str) and type(value[1]) is int


def _first(actions: Counter) -> str:
    kind, k = min(actions, default=("", 0))
    return f"{kind}{k}"
