"""Task 18.4: how often an operator runs in one step, and in which part of it, by torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from utils.checks.comparison import Mistake
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

from .probes import LABELS, Part, plan_of, probe_calls, works


def innermost(parts: Sequence[Part]) -> dict[str, int]:
    """Return how often the work runs by the innermost label around it, "" outside all labels."""
    counts = dict.fromkeys(["", *LABELS], 0)
    for label, times, inside in parts:
        counts[label] += times
        for name, more in innermost(inside).items():
            counts[name] += more
    return counts


def outermost(parts: Sequence[Part]) -> dict[str, int]:
    """Return the counts of a student who takes the outermost label."""
    counts = dict.fromkeys(["", *LABELS], 0)
    for label, times, inside in parts:
        counts[label] += times + sum(innermost(inside).values())
    return counts


def around(parts: Sequence[Part]) -> dict[str, int]:
    """Return the counts of a student who counts a call for each label around it."""
    counts = innermost(parts)
    for label, _, inside in parts:
        counts[label] += sum(innermost(inside).values())
    return counts


def _counts(parts: Sequence[Part], op: str, answer: dict) -> Iterator[Step]:
    right, what = innermost(parts), f"calls of {op}"
    total, got = sum(right.values()), answer["counts"]
    empty = dict.fromkeys(right, 0)
    labeled = {name: n for name, n in right.items() if name}
    times = answer["ran"]
    yield facts({
        f"Your function ran the step {times} times. Run it once, inside the profiler": times != 1
    })
    mistakes = [
        Mistake(labeled, 'You left out the calls outside all labels. Count them under ""'),
        Mistake(
            empty | {"": total},
            "You found no label. Go up by cpu_parent until you meet one: "
            "other operators and marks are between",
        ),
        Mistake(empty, f"You found no call. Compare event.name with {op}"),
        Mistake(
            outermost(parts), "You took the outermost label. Stop at the first one on the way up"
        ),
        Mistake(
            around(parts), "You counted a call for each label around it. Stop at the first one"
        ),
        Mistake(
            labeled | {"": total},
            'You counted all calls under "". Count there only calls outside all labels',
        ),
        Mistake(
            {name: n for name, n in right.items() if n},
            "You left out labels without a call. Give them 0",
        ),
        Mistake(
            lambda got: isinstance(got, int | float),
            "You returned one number. Return a dict with a count for each label",
        ),
        Mistake(
            lambda got: (
                isinstance(got, dict) and got.keys() == right.keys() and sum(got.values()) > total
            ),
            "You counted too much. Count events of this name only, and each of them once",
        ),
    ]
    yield value(got, right, mistakes, what=what, form="a dict of counts")


@task("18.4", "count operators in the parts of a step", points=2)
def calls_counted(ranks: Ranks, report: Report) -> None:
    """Compare counts with a plan of a step that is new in each run; no seconds are judged."""
    cases = [{"op": op, "seed": report.seed + k} for k, op in enumerate(works(torch.ones(3, 3)))]
    report.judge_cases(
        ranks,
        probe_calls,
        cases,
        lambda case, answer: _counts(plan_of(case["seed"]), case["op"], answer.value),
    )
