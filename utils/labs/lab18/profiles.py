"""Task 18.4: how often an operator runs in one step, and in which part of it, by torch.profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from utils.checks.comparison import Mistake
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks, Reply

from .probes import Part, labels_of, plan_of, probe_calls, works

#: Labels around some calls, the outermost first, and the number of these calls.
Around = tuple[list[str], int]


def all_calls(parts: Sequence[Part], labels: Sequence[str], outer: Sequence = ()) -> list[Around]:
    """Return the calls of a plan's work with those of the labels that are around them."""
    found: list[Around] = []
    for label, times, inside in parts:
        around = [*outer, *([label] if label in labels else [])]
        found += [(around, times), *all_calls(inside, labels, around)]
    return found


def counted(calls: Sequence[Around], labels: Sequence[str], which: slice) -> dict[str, int]:
    """Return the calls of each label, and under "" those outside all labels.

    Args:
        which: picks, from the labels around a call, those for which it counts.
    """
    counts = Counter(dict.fromkeys(["", *labels], 0))
    for around, times in calls:
        for label in around[which] or [""]:
            counts[label] += times
    return dict(counts)


def _counts(case: dict, answer: Reply) -> Iterator[Step]:
    op = case["op"]
    labels = case["labels"]
    calls = all_calls(plan_of(case["seed"]), labels)
    innermost = slice(-1, None)
    outermost = slice(1)
    each = slice(None)
    right = counted(calls, labels, innermost)
    what = f"calls of {op}"
    total = sum(right.values())
    got = answer.value["counts"]
    empty = dict.fromkeys(right, 0)
    labeled = {name: n for name, n in right.items() if name}
    times = answer.value["ran"]
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
            empty | {"": 1},
            f"You counted a mark that is called {op.rpartition(':')[2]}. Compare event.name "
            f"with {op}",
        ),
        Mistake(
            counted(calls, labels, outermost),
            "You took the outermost label. Stop at the first one on the way up",
        ),
        Mistake(
            counted(calls, labels, each),
            "You counted a call for each label around it. Stop at the first one",
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
    cases = [
        {"op": op, "seed": seed, "labels": labels_of(seed)}
        for seed, op in enumerate(works(torch.ones(3, 3)), report.seed)
    ]
    report.judge_cases(ranks, probe_calls, cases, _counts)
