"""Checks of lab 10: schedules as data, and weight stashing; imports the checks of pipelines.

A check compares schedules with our own planner, as data. It runs everything that communicates in
pipelines of 1 to 4 stages, in double precision, and compares it with the unsplit model. The order
of work comes from the calls of the stages, never from times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any

from utils.checks.clock import NotEnded
from utils.checks.comparison import Mistake, only, short, table
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.checks.trials import Case, judge_calls
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared.pipeline_stages import number_of
from utils.labs.shared.reference_pipeline import order_of, weights_by
from utils.labs.shared.schedules import (
    Schedule,
    gpipe,
    held,
    idle,
    one_f_one_b,
    parse,
    planned,
    written,
)
from utils.labs.shared.schedules import look_at as look_at

from .graphs import graph_placement as graph_placement
from .pipelines import execute as execute
from .pipelines import explained
from .pipelines import train_naively as train_naively
from .probes import probe_counts, probe_plans, probe_stash
from .schedule_rules import (
    as_lists,
    in_order,
    moved,
    shuffled,
    wrong_bubbles,
    wrong_gpipes,
    wrong_held,
    wrong_one_f_one_bs,
    wrong_plans,
)
from .zero_bubble import zero_bubble_schedule as zero_bubble_schedule

# -- 10.2 to 10.5: functions of data ----------------------------------------------------------


def _judge_schedules(
    ranks: Ranks,
    report: Report,
    sizes: Sequence[tuple[int, int]],
    right: Callable[[int, int], Schedule],
    wrong: Callable[[int, int], list[Mistake]],
) -> None:
    """Compare the student's function with ours of that name, for p stages and m microbatches."""
    form = "a list for each stage"
    cases = [
        Case(right.__name__, [p, m], as_lists(right(p, m)), wrong(p, m), form) for p, m in sizes
    ]
    judge_calls(ranks, report, cases)


@task("10.2", "the schedule of GPipe", points=1)
def gpipe_schedule(ranks: Ranks, report: Report) -> None:
    """Compare with all forwards, followed by all backwards in reverse."""
    sizes = ((4, 4), (1, 3), (4, 1), (2, 5), (3, 2), (7, 12))
    _judge_schedules(ranks, report, sizes, gpipe, wrong_gpipes)


ILLEGAL = (
    "B0 F0",
    "F0 B0 F1 B1\nF1 F0 B1 B0",
    "F0 F1 B1 B0\nF0 B0 B1 F1",
    # one stage has more actions than the other
    "F0 F1 B1 B0\nF0 B0",
    "F0 B0\nF0 F1 B1 B0",
)


#: An action is ready, but it isn't the next one of its list: B0 on stage 0, F0 on the last one.
IN_ORDER = ("F0 F1 B1 B0\nF0 B0 F1 B1\nF0 B0 F1 B1", "F0 F2 B2 F1 B1 B0\nF2 B2 F1 F0 B1 B0")


#: Legal, although backwards are missing.
UNFINISHED = ("F0 F1 B0\nF0 F1 B0 B1", "F0 F1\nF0 F1")


@task("10.3", "plan a schedule", points=3)
def plan_schedule(ranks: Ranks, report: Report) -> None:
    """Judge times by the two rules, and None for schedules that can never complete."""
    legal = [
        (gpipe(3, 2), ()),
        (one_f_one_b(4, 5), (3, 4)),
        (shuffled(report.seed), (2, 1)),
        (gpipe(1, 2), ()),
        (gpipe(2, 2), (0.5, 1.5)),
        (one_f_one_b(6, 20), (0.37, 1.9)),
        (gpipe(2, 3), (0, 1)),
        (one_f_one_b(2, 150), (1, 2)),
        *((parse(text), (1, 3)) for text in (*IN_ORDER, *UNFINISHED)),
    ]
    if not _plans_are_right(ranks, report, [[as_lists(s), times] for s, times in legal]):
        return
    _plans_are_right(ranks, report, [[as_lists(parse(text)), ()] for text in ILLEGAL])
    if report.kinds - {NotEnded.__name__}:
        report.problem("(Return None for a schedule that is not legal. It is not an error here)")


def _plans_are_right(ranks: Ranks, report: Report, asked: list[list]) -> bool:
    """Judge plans of schedules with times; return whether all ranks answered correctly."""
    answers = report.answers(ranks, probe_plans, cases=asked)
    right = [report.follow(answer.rank, _plans(asked, answer.value)) for answer in answers]
    return bool(answers) and all(right)


def _plans(asked: list[list], plans: list[list]) -> Iterator[Step]:
    for (schedule, times), (spans, same) in zip(asked, plans, strict=True):
        call = f"plan of [{'; '.join(written(schedule).splitlines())}]"
        call += f" with times {times}" if times else ""
        all_spans, done = planned(schedule, *(times or (1, 2)))
        complete = sum(done) == sum(map(len, schedule))
        right = in_order(all_spans) if complete else None
        yield value(in_order(spans), right, wrong_plans(schedule, times, right), what=call)
        yield facts({
            f"{call}: You changed the schedule, which runs later. Copy the lists before you take "
            "actions out": not same
        })


#: At its peak, stage 0 holds more microbatches than it runs forwards in a row.
WAVES = "F0 F1 B0 F2 F3 F4 B1 B2 B3 B4\nF0 B0 F1 F2 F3 B1 B2 F4 B3 B4"
#: Numbers that say nothing about the order; and forwards after the last backward.
OTHER_ORDERS = ("F3 F1 B1 F0 F2 B0 B3 B2\nF3 F1 F0 F2 B1 B0 B3 B2", "F0 B0 F1 F2\nF0 B0")


@task("10.4", "the bubble and the in-flight microbatches", points=2)
def count(ranks: Ranks, report: Report) -> None:
    """Compare shares and counts for schedules, planned and measured."""
    cases = _count_cases(report.seed)
    calls = [[case.name, *case.arguments] for case in cases]
    for answer in report.answers(ranks, probe_counts, calls=calls):
        report.follow(answer.rank, starmap(_counted, zip(cases, answer.value, strict=True)))


def _counted(case: Case, result: Any) -> Step:
    call = f"{case.name}({short(case.arguments[0], 60)})"
    return value(result, case.right, case.mistakes, what=call, form=case.form)


def _count_cases(seed: int) -> list[Case]:
    """Return calls of `bubble` with many kinds of spans, and of `most_held` with schedules."""
    draw = random.Random(seed)
    waves = parse(WAVES)
    schedules = [one_f_one_b(4, 6), gpipe(2, 3), gpipe(1, 2), shuffled(seed), waves, gpipe(5, 16)]
    plans = [planned(schedule)[0] for schedule in schedules]
    first = plans[0]
    noisy = [
        [s, kind, k, a + draw.random() / 9, e + draw.random() / 9 + 0.2]
        for s, kind, k, a, e in planned(one_f_one_b(3, 4), 4, 8)[0]
    ]
    backwards = sorted(first, key=lambda span: -span[4])  # the first one ends last
    # Stage 0 slept before it started, so another stage is the first.
    late = [moved([span], 50 * (span[0] == 0))[0] for span in first]
    other_kinds = [[s, {"F": "F", "B": "I"}[kind], k, a, e] for s, kind, k, a, e in first]
    hours = [[s, kind, k, 1e5 + a / 1e3, 1e5 + e / 1e3] for s, kind, k, a, e in first]
    of_spans = [*plans, backwards, moved(first, 1000), noisy, late, other_kinds, hours]
    form = "a list with a number for each stage"
    return [
        Case("bubble", [spans], idle(spans), wrong_bubbles(spans), "a number") for spans in of_spans
    ] + [
        Case("most_held", [as_lists(s)], held(s), wrong_held(s), form)
        for s in (*schedules, *map(parse, OTHER_ORDERS))
    ]


@task("10.5", "the schedule of 1F1B", points=2)
def one_f_one_b_schedule(ranks: Ranks, report: Report) -> None:
    """Compare with warm-up, one forward and one backward in turn, and drain."""
    sizes = ((4, 8), (4, 2), (3, 3), (1, 3), (2, 5), (7, 12))
    _judge_schedules(ranks, report, sizes, one_f_one_b, wrong_one_f_one_bs)


# -- 10.7: weight stashing --------------------------------------------------------------------


#: Messages for wrong weights, each with the mode of `weights_by` that gives them.
WRONG_STASHES = {
    "You never changed the weights. Let done(k) change the stage's parameters in place": "still",
    "You ran backward with other weights than forward. Keep a clone, and run forward on the clone "
    "with functional_call(self.stage, self.stash[k], (x,))": "newest",
    "You started each update from the old copy, so the updates of other microbatches are lost. "
    "Apply the copy's gradient to the newest weights": "from old",
    "You gave two microbatches the same copy, so their gradients add up. Make a copy for each "
    "microbatch": "shared",
    "You added gradients of earlier microbatches. Use only this copy's gradient": "momentum",
    "You moved the weights up the slope. Use w ← w − rate · g": "up",
    "You left out the rate. Use w ← w − rate · g": "no rate",
}


@task("10.7", "weight stashing", points=4)
def stashing(ranks: Ranks, report: Report) -> None:
    """Judge the weights, the versions, and the memory of PipeDream."""
    for p, n, reverse in ((4, 7, False), (1, 3, False), (3, 5, False), (2, 1, False), (2, 4, True)):
        case = {"seed": report.seed, "p": p, "n": n, "reverse": reverse}
        asked = {"seed": report.seed, "p": p, "n": n, "order": order_of(p, n, reverse)}
        answers = report.answers(ranks, probe_stash, **asked)
        if not answers or not _stashes_are_right(report, case, answers):
            break
    explained(report)


def _stashes_are_right(report: Report, case: dict[str, Any], answers: list[Reply]) -> bool:
    """Judge all ranks' stashes; return whether they are right.

    If one rank communicates, the others do, too, so only one rank reports it.
    """
    right = True
    for answer in answers:
        if not report.follow(answer.rank, [communication(answer.value["calls"], only())]):
            return False
        right &= report.follow(answer.rank, _stashes(case, answer.value))
    return right


def _stashes(case: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    p, n, reverse = (case[name] for name in ("p", "n", "reverse"))
    order = ", the last one's backward first" if reverse else ""
    for s, stage in zip(range(p), result["stages"], strict=True):
        where = f"stage {s} of {p} after {n} microbatches{order}"
        used = [0 if reverse else max(0, k - (p - 1 - s)) for k in range(n)]
        mistakes = (
            Mistake(weights_by(mode, **case)[s], text) for text, mode in WRONG_STASHES.items()
        )
        right = weights_by("stash", **case)[s]
        yield value(stage["weights"], right, mistakes, what=f"weights of {where}", tolerance=1e-12)
        yield value(stage["used"], used, _wrong_versions(p, n), what=f"self.used of {where}")
        yield value(stage["version"], n, what=f"self.version of {where}")
        yield facts(_wasted(where, stage, n if reverse else min(n, p - s)))


def _wrong_versions(p: int, n: int) -> list[Mistake]:
    return table({
        "You noted no version. Set self.used[k] = self.version in forward": [None] * n,
        "You noted version 0 for all. Count self.version up in done": [0] * n,
        "You noted the microbatch's number. Note the version of the weights": [
            number_of(k) for k in range(n)
        ],
        "You noted backward's version. Note it in forward": [k + (p == 1) for k in range(n)],
        "You noted the version after the update. Note it in forward": list(range(1, n + 1)),
    })


def _wasted(where: str, stash: dict[str, Any], enough: int) -> dict[str, bool]:
    wrong = {
        "You stashed the stage's own tensors, which change in place. Stash copies with "
        "detach().clone()": not stash["copies"],
        f"The stash still holds {stash['left']} weight copies. Remove microbatch k's copy in "
        "done(k), or memory keeps growing": stash["left"],
        "You stashed only some of the parameters. Copy each of them": not (
            stash["whole"] or stash["missing"]
        ),
        "The stage's own parameters have gradients. Make the copies leaves, with "
        "detach().clone().requires_grad_()": stash["graded"],
        f"You kept {stash['most']} versions at once. Keep at most {enough}": stash["most"] > enough,
        "You put nothing into self.stash[k]. Do so in forward(k, x)": stash["missing"],
        f"You kept copies of {stash['alive']} microbatches in memory, and {enough} are enough. "
        "Look for a list or dict that is never emptied outside "
        "self.stash": stash["alive"] > enough + 1,
    }
    return {f"{where}: {text}": is_so for text, is_so in wrong.items()}
