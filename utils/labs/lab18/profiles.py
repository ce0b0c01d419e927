"""Task 18.4: how often an operator runs in one step, and in which part of it, by torch.profiler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from utils.checks.comparison import Mistake
from utils.checks.probe import answer_named, told
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

LABELS = ["forward", "loss", "backward", "clip", "log", "update"]  # no plan has an update
ITEM, COPY, PRODUCT = "aten::_local_scalar_dense", "aten::_to_copy", "aten::mm"
#: aten::expand_as calls it, so names that begin alike count twice.
EXPAND = "aten::expand"
#: A part of a step: its label ("" for none), how often its work runs, and the parts inside it.
Part = tuple[str, int, Sequence[Any]]


def plan_of(seed: int) -> list[Part]:
    """Return the parts of a step; a label may come twice, and inside another one."""
    draw = random.Random(seed)
    count = lambda: draw.randint(1, 5)  # noqa: E731
    inner: list[Part] = [("log", count(), []), ("loss", count(), [])]
    parts: list[Part] = [
        ("forward", count(), inner[: draw.randint(1, 2)]),
        ("backward", count(), []),
        ("", count(), []),
        ("clip", count(), [("log", count(), [])]),
        ("forward", count(), []),
    ]
    draw.shuffle(parts)
    return parts


def marked(work: Callable[[], object]) -> None:
    """Do work inside two marks that are not among the labels."""
    with record_function("epoch"), record_function("batch"):
        work()


def run(parts: Sequence[Part], work: Callable[[], object]) -> None:
    """Run the work in each part as often as the plan says."""
    for label, times, inside in parts:
        if not label:
            for _ in range(times):
                work()
            continue
        with record_function(label):
            for _ in range(times):
                marked(work)
            run(inside, work)


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


def works(x: Tensor) -> dict[str, Callable[[], object]]:
    """Return work that calls an operator once, and never directly, by the operator's name."""
    return {
        ITEM: lambda: x[0, 0].item(),  # aten::item calls it
        COPY: lambda: x.double(),  # aten::to calls it
        EXPAND: lambda: x[:1].expand_as(x),
        PRODUCT: lambda: torch.nn.functional.linear(x, x.t()),  # aten::linear calls it
    }


def probe_calls(user_ns: dict, *, rank: int, seed: int, op: str) -> dict:
    """Return the student's counts for one step, and how often the step ran."""
    parts, x = plan_of(seed), torch.ones(3, 3)
    work, others, ran = works(x)[op], [w for name, w in works(x).items() if name != op], []

    def step() -> None:
        ran.append(rank)
        run(parts, work)
        for other in others:
            other()

    counts = answer_named(user_ns, "calls_in")(step, op, list(LABELS))
    return {"counts": told(counts), "ran": len(ran)}


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
