"""Schedules that lab 10 asks for, and mistakes in functions of them: what they give."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from utils.checks.comparison import Mistake, table
from utils.labs.shared.reference_pipeline import IMAGES
from utils.labs.shared.schedules import (
    Schedule,
    faults,
    gpipe,
    held,
    idle,
    needs,
    one_f_one_b,
    planned,
    warmed,
)


def as_lists(schedule: Schedule) -> list:
    """Return a schedule as JSON has it."""
    return [[list(action) for action in actions] for actions in schedule]


def is_action(value: Any) -> bool:
    """Return whether a value is a forward or a backward of some microbatch."""
    pair = isinstance(value, list) and len(value) == 2
    return pair and value[0] in ("F", "B") and type(value[1]) is int


def is_lists(value: Any) -> bool:
    """Return whether a value is a list of lists."""
    return isinstance(value, list) and all(isinstance(row, list) for row in value)


#: What to say of stages that wait for each other, and how it is recognized.
_NOT_LEGAL = {"this schedule is not legal: stages wait for each other": faults}


def malformed(p: int, m: int) -> dict[str, Any]:
    """Return what is no schedule of p stages and m microbatches, by what to say of it."""

    def is_flat(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(map(is_action, value))

    def odd_actions(value: list) -> bool:
        return not all(map(is_action, itertools.chain(*value)))

    def odd_numbers(value: list) -> bool:
        return any(not 0 <= k < m for _, k in itertools.chain(*value))

    def has_faults(value: list) -> bool:
        text = faults(value)
        return text is not None and "nobody" not in text

    by_stages = f"{m} lists: a schedule has a list for each stage, not for each microbatch"
    return {
        "this is the list of one stage: a schedule has a list for each stage": is_flat,
        "a schedule is a list with a list for each stage": lambda value: not is_lists(value),
        by_stages: lambda value: len(value) == m != p,
        f"expected {p} lists, one for each stage": lambda value: len(value) != p,
        'an action is a pair of a letter and a number: ("F", 0)': odd_actions,
        f"microbatches are numbered 0 to {m - 1}": odd_numbers,
        "every stage has every F and every B once": has_faults,
    }


def wrong_gpipes(p: int, m: int) -> list[Mistake]:
    """Return what mistakes in `gpipe` lead to."""
    forwards, backwards = ([[kind, k] for k in range(m)] for kind in "FB")
    alternating = [pair for two in zip(forwards, backwards, strict=True) for pair in two]
    of_stage = {
        "the backwards are in the order of the forwards; GPipe takes the last microbatch "
        "first": forwards + backwards,
        "each microbatch is done backward before the next begins: that fills no pipeline. All "
        "forwards come first": alternating,
        "the forwards have to be in order, microbatch 0 first": forwards[::-1] + backwards,
        "the forwards are reversed; the backwards should be": forwards[::-1] + backwards[::-1],
    }
    schedules: dict[str, Any] = {text: [actions] * p for text, actions in of_stage.items()}
    schedules["this is 1F1B: in GPipe all forwards come first"] = as_lists(one_f_one_b(p, m))
    return table(malformed(p, m) | schedules | _NOT_LEGAL)


def wrong_one_f_one_bs(p: int, m: int) -> list[Mistake]:
    """Return what mistakes in `one_f_one_b` lead to."""
    right = one_f_one_b(p, m)
    most = held(right)
    bubble = idle(planned(right)[0])

    def backwards_turned(value: list) -> bool:
        orders = ([k for kind, k in actions if kind == "B"] for actions in value)
        return any(order != sorted(order) for order in orders)

    def holds_more(value: list) -> bool:
        return any(a > b for a, b in zip(held(value), most, strict=True))

    def waits_more(value: list) -> bool:
        return idle(planned(value)[0]) > bubble + 1e-9

    cold = warmed(m, [0] * p)
    turned = warmed(m, range(p))
    schedules = {
        "this is GPipe: the first backward has to come as early as it can": gpipe(p, m),
        "one forward too many in the warm-up: with the first of the pairs, stage s has p − s "
        "forwards in front, so the warm-up is p − 1 − s": warmed(m, [p - s for s in range(p)]),
        "one forward too few in the warm-up, p − 1 − s are needed: the pipeline does not "
        "fill": warmed(m, [p - 2 - s for s in range(p)]),
        "there is no warm-up: the last stage has none, stage s has p − 1 − s forwards": cold,
        "all stages warm up alike: the further behind a stage is, the sooner its first "
        "gradient comes. Stage s needs p − 1 − s forwards": warmed(m, [p - 1] * p),
        "the stages are the wrong way round: the first one warms up longest, p − 1 − s": turned,
    }
    odd = _NOT_LEGAL | {
        "the backwards go in the order 0, 1, 2, …; the oldest microbatch first": backwards_turned,
        "a stage holds more than min(m, p − s) microbatches: too many forwards before a "
        "backward": holds_more,
        "the bubble is larger than that of 1F1B: too few forwards in front": waits_more,
    }
    lists = {text: as_lists(schedule) for text, schedule in schedules.items()}
    return table(malformed(p, m) | lists | odd)


#: Schedules with numbers of samples, by the name that a student is told.
Runs = dict[str, tuple[Schedule, int]]
#: Samples of a minibatch whose messages are too large to be sent before somebody receives them.
LARGE = 1500


def usual_runs(p: int) -> Runs:
    """Return schedules of p stages that an executor first has to get right."""
    schedules = {
        "GPipe": gpipe(p, 4),
        "1F1B": one_f_one_b(p, 8),
        "stages with different orders": _with_backwards(gpipe(p, 3), range(3)),
        "one after the other": warmed(6, [0] * p),
        "naive": gpipe(p, 1),
    }
    return {name: (schedule, IMAGES) for name, schedule in schedules.items()}


def odd_runs(p: int) -> Runs:
    """Return schedules where mistakes lead to errors, which would hide what is wrong in others."""
    turned = gpipe(p, 5)
    turned[-1][:5] = turned[-1][:5][::-1]
    return {
        "unequal microbatches, the last one first on the last stage": (turned, IMAGES),
        "1F1B with large messages": (one_f_one_b(p, 5), LARGE),
    }


def _with_backwards(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return GPipe's schedule with the backwards of its last stage in this order; it is legal."""
    *others, last = schedule
    return [*others, last[: len(order)] + [("B", k) for k in order]]


def shuffled(seed: int) -> Schedule:
    """Return a legal schedule that is none of those with a name."""
    return _with_backwards(gpipe(3, 4), random.Random(seed).sample(range(4), 4))


def is_spans(value: Any) -> bool:
    """Return whether a value is a list of lists (stage, kind, k, start, end)."""
    return is_lists(value) and all(len(span) == 5 for span in value)


def in_order(spans: Any) -> Any:
    """Return spans sorted; anything else as it is."""
    return sorted(spans, key=str) if is_spans(spans) else spans


#: What an action needs: the stage, kind and microbatch of another one, or nothing.
Need = tuple[int, str, int] | None


def _mistaken(mistake: str, p: int, stage: int, kind: str, k: int) -> Need:
    """Return what an action waits for by mistake."""
    right = needs(p, stage, kind, k)
    if kind == "F":
        return None if mistake == "nothing" else right
    backwards = {
        "backward alone": right if stage < p - 1 else None,
        "reversed": (stage - 1, "B", k) if stage else None,
    }
    return backwards.get(mistake)


#: What to say of plans by other needs.
_OTHER_NEEDS = {
    "a backward on the last stage needs its own forward": "backward alone",
    "a backward waits for nobody here; it needs the backward of the stage behind": "forwards only",
    "a backward needs the gradient of the stage behind, s + 1, not of the one before": "reversed",
    "stages wait for nobody here: an action also needs what comes from the stage beside": "nothing",
}


def wrong_plans(schedule: Schedule, times: Sequence[float], right: Any) -> Iterator[Mistake]:
    """Yield what mistakes in `plan` lead to; right is `None` for what can never be completed."""
    times = times or (1, 2)
    text = "returned None: return a list of spans. This schedule is legal"
    yield Mistake(lambda spans: spans is None, text)
    if right is None:
        yield from table({
            "an empty list. A schedule that is not legal gives None": [],
            "these are the actions before all were stuck: there are more in the lists, so the "
            "schedule is not legal, and the answer is None": in_order(planned(schedule, *times)[0]),
        })
    for text, mistake in _OTHER_NEEDS.items():
        needed = functools.partial(_mistaken, mistake)
        yield Mistake(in_order(planned(schedule, *times, needs=needed)[0]), text)
    if right is None:
        text = "this schedule is not legal, it can never be completed: return None"
        yield Mistake(lambda spans: isinstance(spans, list), text)
    else:
        yield from _wrong_times(schedule, times)
        yield from table(_wrong_spans(schedule, right))


def _wrong_times(schedule: Schedule, times: Sequence[float]) -> Iterator[Mistake]:
    forward, backward = times
    for text, other in {
        "every action takes the time of a forward here": (forward, forward),
        "every action takes the time of a backward here": (backward, backward),
        "the times of forward and backward are swapped": (backward, forward),
        "the arguments forward and backward are not used": (1, 2),
    }.items():
        if other != (forward, backward):
            yield Mistake(in_order(planned(schedule, *other)[0]), text)


def _wrong_spans(schedule: Schedule, right: list[list]) -> dict[str, Callable]:
    starts = {tuple(span[:3]): span[3] for span in right}

    def late(spans: list) -> bool:
        return all(span[3] >= starts.get(tuple(span[:3]), 0) for span in spans)

    def two_at_once(spans: list) -> bool:
        rows = sorted((s[0], s[3], s[4]) for s in spans)
        return any(a[0] == b[0] and b[1] < a[2] - 1e-9 for a, b in itertools.pairwise(rows))

    def out_of_order(spans: list) -> bool:
        by_start = sorted(spans, key=lambda span: span[3])
        orders = [[span[1:3] for span in by_start if span[0] == s] for s in range(len(schedule))]
        return orders != as_lists(schedule)

    return {
        "expected a list of spans (stage, kind, k, start, end)": lambda spans: not is_spans(spans),
        "actions are missing: one span for each": lambda spans: len(spans) < len(right),
        "there are more spans than actions": lambda spans: len(spans) > len(right),
        "a span is (…, start, end)": lambda spans: any(s[4] <= s[3] for s in spans),
        "a stage does two actions at the same time: an action begins when its stage is free, and "
        "what it needs is there, whichever is later": two_at_once,
        "a stage does not keep the order of its list": out_of_order,
        "an action starts later than it could: as soon as its stage is free and what it needs has "
        "ended": late,
    }


def moved(spans: list[list], by: float) -> list[list]:
    """Return spans at another time."""
    return [[s, kind, k, start + by, end + by] for s, kind, k, start, end in spans]


def wrong_bubbles(spans: list[list]) -> list[Mistake]:
    """Return what mistakes in `bubble` lead to."""
    stages = {stage: [s for s in spans if s[0] == stage] for stage, *_ in spans}
    p = len(stages)
    m = len({span[2] for span in spans})
    busy = {stage: sum(s[4] - s[3] for s in actions) for stage, actions in stages.items()}
    lengths = {}
    for stage, actions in stages.items():
        begin, end = _begin_and_end(actions)
        lengths[stage] = end - begin
    total = sum(busy.values())
    *_, last_of_list = spans[-1]
    first, last = _begin_and_end(spans)
    length = last - first

    def idle_in(time: float) -> float:
        return 1 - total / time

    to_last = idle_in(p * last)
    to_last_of_list = idle_in(p * (last_of_list - first))
    return table({
        "this is the share of the time in which stages are busy": 1 - idle(spans),
        "in percent; a share is between 0 and 1": 100 * idle(spans),
        "the spans do not begin at 0: the length is from the first start to the last end": to_last,
        "the length goes to the last span of the list; the list has no order": to_last_of_list,
        "the length goes from the first span of the list to the last; the list has no "
        "order": idle_in(p * (last_of_list - spans[0][3] or length)),
        "all stages are busy together: their number is missing in the denominator": idle_in(length),
        "each stage was counted from its own first start to its own last end; the time before "
        "and after is idle, too": 1 - sum(busy[s] / lengths[s] for s in stages) / p,
        "the same, with all stages' own lengths added up: the time before its first action and "
        "after its last is idle, too": idle_in(sum(lengths.values())),
        "this is the bubble of the first stage only": 1 - busy[0] / length,
        "this is idle time divided by busy time; divide by all time": p * length / total - 1,
        "this is the idle time, not its share": p * length - total,
        "this is a formula for equal times; count what is in the spans": (p - 1) / (m + p - 1),
        "divided by the number of actions; divide by that of stages": idle_in(len(spans) * length),
    })


def _begin_and_end(spans: list[list]) -> tuple[float, float]:
    return min(span[3] for span in spans), max(span[4] for span in spans)


def wrong_held(schedule: Schedule) -> list[Mistake]:
    """Return what mistakes in `most_held` lead to."""
    m = len(schedule[0]) // 2
    p = len(schedule)
    most = held(schedule)
    rows = ["".join(kind for kind, _ in actions) for actions in schedule]
    in_front = [row.index("B") for row in rows]
    return table({
        "these are the forwards in front of the first backward; later more may be held": in_front,
        "this is the maximum over the stages; each has its own": max(most),
        "this is the sum over the stages; each has its own": sum(most),
        "all forwards were counted; a backward frees what its forward kept": [m] * p,
        "this is what is held at the end": [0] * p,
        "this counts all actions": [2 * m] * p,
        "one too few: a microbatch is held from its own forward on": [n - 1 for n in most],
        "these are the numbers of the microbatches in flight by formula (p − s); count what is "
        "in the lists": [p - s for s in range(p)],
        "the stages are in reverse": most[::-1],
        "this is the longest row of forwards; a backward in between frees one microbatch, not "
        "all": [max(map(len, row.split("B"))) for row in rows],
        f"expected {p} numbers, one for each stage": lambda value: (
            isinstance(value, list) and len(value) != p
        ),
    })
