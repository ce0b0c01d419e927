"""Schedules that lab 10 asks for, and the wrong results of likely mistakes."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from utils.checks.comparison import Mistake, table
from utils.labs.shared.pipeline_stages import IMAGES
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
    """Return a schedule in its JSON form."""
    return [[list(action) for action in actions] for actions in schedule]


def is_action(value: Any) -> bool:
    """Return whether a value is a forward or a backward of some microbatch."""
    pair = isinstance(value, list) and len(value) == 2
    return pair and value[0] in ("F", "B") and type(value[1]) is int


def is_lists(value: Any) -> bool:
    """Return whether a value is a list of lists."""
    return isinstance(value, list) and all(isinstance(row, list) for row in value)


#: The message for stages that wait for each other, and the function that recognizes them.
_NOT_LEGAL = {"Your schedule is not legal, because stages wait for each other": faults}


def malformed(p: int, m: int) -> dict[str, Any]:
    """Return values that aren't schedules of p stages and m microbatches, by their messages."""

    def is_flat(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(map(is_action, value))

    def odd_actions(value: list) -> bool:
        return not all(map(is_action, itertools.chain(*value)))

    def odd_numbers(value: list) -> bool:
        return any(not 0 <= k < m for _, k in itertools.chain(*value))

    def has_faults(value: list) -> bool:
        text = faults(value)
        return text is not None and "nobody" not in text

    by_stages = f"You returned {m} lists, one per microbatch. Return one per stage"
    return {
        "You returned the list of one stage. Return a list for each stage": is_flat,
        "Return a list with a list for each stage": lambda value: not is_lists(value),
        by_stages: lambda value: len(value) == m != p,
        f"Return {p} lists, one for each stage": lambda value: len(value) != p,
        'Make each action a pair of a letter and a number: ("F", 0)': odd_actions,
        f"Number microbatches from 0 to {m - 1}": odd_numbers,
        "Give every stage every F and every B exactly once": has_faults,
    }


def wrong_gpipes(p: int, m: int) -> list[Mistake]:
    """Return the wrong results of likely mistakes in `gpipe`."""
    forwards, backwards = ([[kind, k] for k in range(m)] for kind in "FB")
    alternating = [pair for two in zip(forwards, backwards, strict=True) for pair in two]
    of_stage = {
        "You put the backwards in the order of the forwards. Put the last microbatch "
        "first": forwards + backwards,
        "You ran each backward before the next forward, so the pipeline never fills. Put all "
        "forwards first": alternating,
        "You reversed the forwards. Put microbatch 0 first": forwards[::-1] + backwards,
        "You reversed the forwards. Reverse the backwards": forwards[::-1] + backwards[::-1],
    }
    schedules: dict[str, Any] = {text: [actions] * p for text, actions in of_stage.items()}
    schedules["You returned 1F1B. Put all forwards first"] = as_lists(one_f_one_b(p, m))
    return table(malformed(p, m) | schedules | _NOT_LEGAL)


def wrong_one_f_one_bs(p: int, m: int) -> list[Mistake]:
    """Return the wrong results of likely mistakes in `one_f_one_b`."""
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
        "You returned GPipe. Put the first backward as early as possible": gpipe(p, m),
        "You put one forward too many into the warm-up. Stage s needs p − 1 − s there, because "
        "the first pair adds one": warmed(m, [p - s for s in range(p)]),
        "You put one forward too few into the warm-up, so the pipeline does not fill. Stage s "
        "needs p − 1 − s": warmed(m, [p - 2 - s for s in range(p)]),
        "You left out the warm-up. Begin stage s with p − 1 − s forwards": cold,
        "You gave all stages the same warm-up. Later stages get their first gradient sooner, so "
        "stage s needs p − 1 − s forwards": warmed(m, [p - 1] * p),
        "You reversed the stages. The first one needs the longest warm-up": turned,
    }
    odd = _NOT_LEGAL | {
        "You changed the order of the backwards. Put the oldest microbatch first": backwards_turned,
        "A stage holds more than min(m, p − s) microbatches. Put fewer forwards before a "
        "backward": holds_more,
        "Your bubble is larger than 1F1B's. Put more forwards in front": waits_more,
    }
    lists = {text: as_lists(schedule) for text, schedule in schedules.items()}
    return table(malformed(p, m) | lists | odd)


#: Schedules with numbers of samples, by the name in the messages.
Runs = dict[str, tuple[Schedule, int]]
#: So many samples give messages too large to be sent before the receiver asks for them.
LARGE = 1500


def usual_runs(p: int) -> Runs:
    """Return schedules of p stages that an executor must get right first."""
    schedules = {
        "GPipe": gpipe(p, 4),
        "1F1B": one_f_one_b(p, 8),
        "stages with different orders": _with_backwards(gpipe(p, 3), range(3)),
        "one after the other": warmed(6, [0] * p),
        "naive": gpipe(p, 1),
    }
    return {name: (schedule, IMAGES) for name, schedule in schedules.items()}


def odd_runs(p: int) -> Runs:
    """Return schedules in which a mistake raises an error that would hide other mistakes."""
    turned = gpipe(p, 5)
    turned[-1][:5] = turned[-1][:5][::-1]
    return {
        "unequal microbatches, the last one first on the last stage": (turned, IMAGES),
        "1F1B with large messages": (one_f_one_b(p, 5), LARGE),
    }


def _with_backwards(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return GPipe's schedule with the last stage's backwards in this order, which is legal."""
    *others, last = schedule
    return [*others, last[: len(order)] + [("B", k) for k in order]]


def shuffled(seed: int) -> Schedule:
    """Return a legal schedule that has no name."""
    return _with_backwards(gpipe(3, 4), random.Random(seed).sample(range(4), 4))


def is_spans(value: Any) -> bool:
    """Return whether a value is a list of lists (stage, kind, k, start, end)."""
    return is_lists(value) and all(len(span) == 5 for span in value)


def in_order(spans: Any) -> Any:
    """Return spans sorted; anything else as it is."""
    return sorted(spans, key=str) if is_spans(spans) else spans


#: What an action needs: the stage, kind and microbatch of another action, or nothing.
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


#: Messages for plans in which actions wait for the wrong actions.
_OTHER_NEEDS = {
    "On the last stage, let a backward wait for its own forward": "backward alone",
    "Your backward waits for nobody. Let it wait for the next stage's backward": "forwards only",
    "Your backward waits for stage s − 1. Let it wait for stage s + 1": "reversed",
    "Your stages don't wait for each other. Let actions wait for their input": "nothing",
}


def wrong_plans(schedule: Schedule, times: Sequence[float], right: Any) -> Iterator[Mistake]:
    """Yield wrong results of `plan`; right is `None` for a schedule that can never complete."""
    times = times or (1, 2)
    text = "You returned None, but the schedule is legal. Return a list of spans"
    yield Mistake(lambda spans: spans is None, text)
    if right is None:
        yield from table({
            "You returned an empty list. Return None, because the schedule is not legal": [],
            "You returned the actions before the schedule got stuck. Return None, because it is "
            "not legal": in_order(planned(schedule, *times)[0]),
        })
    for text, mistake in _OTHER_NEEDS.items():
        needed = functools.partial(_mistaken, mistake)
        yield Mistake(in_order(planned(schedule, *times, needs=needed)[0]), text)
    if right is None:
        text = "You returned a list, but the schedule can never complete. Return None"
        yield Mistake(lambda spans: isinstance(spans, list), text)
    else:
        yield from _wrong_times(schedule, times)
        yield from table(_wrong_spans(schedule, right))


def _wrong_times(schedule: Schedule, times: Sequence[float]) -> Iterator[Mistake]:
    forward, backward = times
    for text, other in {
        "You gave every action the time of a forward. Use backward, too": (forward, forward),
        "You gave every action the time of a backward. Use forward, too": (backward, backward),
        "You swapped the times of forward and backward": (backward, forward),
        "You didn't use the arguments forward and backward": (1, 2),
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
        "Return a list of spans (stage, kind, k, start, end)": lambda spans: not is_spans(spans),
        "You left out actions. Return one span for each": lambda spans: len(spans) < len(right),
        "You returned too many spans. Return one per action": lambda spans: len(spans) > len(right),
        "End a span after its start": lambda spans: any(s[4] <= s[3] for s in spans),
        "Your stage does two actions at the same time. Start an action when its stage is free and "
        "its input is there": two_at_once,
        "You changed the order of a stage's list. Keep the order": out_of_order,
        "You started an action later than possible. Start it as soon as its stage is free and its "
        "input is there": late,
    }


def moved(spans: list[list], by: float) -> list[list]:
    """Return spans, moved to another time."""
    return [[s, kind, k, start + by, end + by] for s, kind, k, start, end in spans]


def wrong_bubbles(spans: list[list]) -> list[Mistake]:
    """Return the wrong results of likely mistakes in `bubble`."""
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
        "You returned the busy share. Return the idle share": 1 - idle(spans),
        "You returned percent. Return a share between 0 and 1": 100 * idle(spans),
        "You counted from 0. Count from the first start to the last end": to_last,
        "You stopped at the last span of the list. Find the latest end": to_last_of_list,
        "You took the first and last span of the list, which has no order. Take the earliest "
        "start and the latest end": idle_in(p * (last_of_list - spans[0][3] or length)),
        "You left out the number of stages. Multiply the length by it": idle_in(length),
        "You measured each stage from its own first start to its own last end. Count the time "
        "before and after as idle, too": 1 - sum(busy[s] / lengths[s] for s in stages) / p,
        "You added up the stages' own lengths. Count the time before the first action and after "
        "the last as idle, too": idle_in(sum(lengths.values())),
        "You used the first stage only. Use all stages": 1 - busy[0] / length,
        "You divided idle time by busy time. Divide by all time": p * length / total - 1,
        "You returned the idle time. Divide by all time": p * length - total,
        "You used a formula for equal times. Add up the spans": (p - 1) / (m + p - 1),
        "You divided by the number of actions. Divide by the stages": idle_in(len(spans) * length),
    })


def _begin_and_end(spans: list[list]) -> tuple[float, float]:
    return min(span[3] for span in spans), max(span[4] for span in spans)


def wrong_held(schedule: Schedule) -> list[Mistake]:
    """Return the wrong results of likely mistakes in `most_held`."""
    m = len(schedule[0]) // 2
    p = len(schedule)
    most = held(schedule)
    rows = ["".join(kind for kind, _ in actions) for actions in schedule]
    in_front = [row.index("B") for row in rows]
    return table({
        "You stopped at the first backward. More can be in flight later": in_front,
        "You returned the maximum over the stages. Return one per stage": max(most),
        "You returned the sum over the stages. Return one per stage": sum(most),
        "You counted all forwards. Subtract one at each backward": [m] * p,
        "You returned the numbers at the end. Return the peaks": [0] * p,
        "You counted all actions. Count microbatches in flight": [2 * m] * p,
        "You counted one too few. Count from a microbatch's forward on": [n - 1 for n in most],
        "You used p − s, which holds for some schedules. Count in the lists": [
            p - s for s in range(p)
        ],
        "You reversed the stages. Put stage 0 first": most[::-1],
        "You counted the longest row of forwards, but a backward frees one microbatch only. Count "
        "all": [max(map(len, row.split("B"))) for row in rows],
        f"Return {p} numbers, one for each stage": lambda value: (
            isinstance(value, list) and len(value) != p
        ),
    })
