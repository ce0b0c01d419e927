"""Mistakes in functions of schedules: what they give, and what to say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from utils.checks.mistakes import Mistake, table
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
    """As JSON has it."""
    return [[list(action) for action in actions] for actions in schedule]


def malformed(p: int, m: int) -> list[Mistake]:
    """Return what is no schedule of p stages and m microbatches."""

    def is_list(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(one, list) for one in value)

    def actions(value: Any) -> list:
        return [action for one in value for action in one]

    def is_action(value: Any) -> bool:
        pair = isinstance(value, list) and len(value) == 2
        return pair and value[0] in ("F", "B") and type(value[1]) is int

    def is_flat(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(map(is_action, value))

    def has_faults(value: Any) -> bool:
        text = faults(value)
        return text is not None and "nobody" not in text

    return [
        Mistake(is_flat, "this is the list of one stage: a schedule has a list for each stage"),
        Mistake(lambda v: not is_list(v), "a schedule is a list with a list for each stage"),
        Mistake(lambda v: len(v) == m != p, f"{m} lists: a schedule has a list for each stage, "
                "not for each microbatch"),
        Mistake(lambda v: len(v) != p, f"expected {p} lists, one for each stage"),
        Mistake(lambda v: not all(map(is_action, actions(v))),
                'an action is a pair of a letter and a number: ("F", 0)'),
        Mistake(lambda v: any(not 0 <= k < m for _, k in actions(v)),
                f"microbatches are numbered 0 to {m - 1}"),
        Mistake(has_faults, "every stage has every F and every B once"),
    ]  # fmt: skip


def not_legal(value: list) -> bool:
    """Return whether stages wait for each other."""
    return faults(value) is not None


_NOT_LEGAL = Mistake(not_legal, "this schedule is not legal: stages wait for each other")


def wrong_gpipes(p: int, m: int) -> list[Mistake]:
    """Return what mistakes in `gpipe` lead to."""
    forwards, backwards = ([[kind, k] for k in range(m)] for kind in "FB")
    alternating = [pair for two in zip(forwards, backwards, strict=True) for pair in two]
    return [
        *malformed(p, m),
        *table({
            "the backwards are in the order of the forwards; GPipe takes the last microbatch "
            "first": [forwards + backwards] * p,
            "each microbatch is done backward before the next begins: that fills no pipeline. All "
            "forwards come first": [alternating] * p,
            "this is 1F1B: in GPipe all forwards come first": as_lists(one_f_one_b(p, m)),
            "the forwards have to be in order, microbatch 0 first":
                [forwards[::-1] + backwards] * p,
            "the forwards are reversed; the backwards should be":
                [forwards[::-1] + backwards[::-1]] * p,
        }),
        _NOT_LEGAL,
    ]  # fmt: skip


def wrong_one_f_one_bs(p: int, m: int) -> list[Mistake]:
    """Return what mistakes in `one_f_one_b` lead to."""
    right = one_f_one_b(p, m)
    most, bubble = held(right), idle(planned(right)[0])

    def backwards_turned(value: list) -> bool:
        orders = ([k for kind, k in actions if kind == "B"] for actions in value)
        return any(order != sorted(order) for order in orders)

    def holds_more(value: list) -> bool:
        return any(a > b for a, b in zip(held(value), most, strict=True))

    return [
        *malformed(p, m),
        *table({
            "this is GPipe: the first backward has to come as early as it can":
                as_lists(gpipe(p, m)),
            "one forward too many in the warm-up: with the first of the pairs, stage s has p − s "
            "forwards in front, so the warm-up is p − 1 − s":
                as_lists(warmed(m, [p - s for s in range(p)])),
            "one forward too few in the warm-up, p − 1 − s are needed: the pipeline does not fill":
                as_lists(warmed(m, [p - 2 - s for s in range(p)])),
            "there is no warm-up: the last stage has none, stage s has p − 1 − s forwards":
                as_lists(warmed(m, [0] * p)),
            "all stages warm up alike: the further behind a stage is, the sooner its first "
            "gradient comes. Stage s needs p − 1 − s forwards": as_lists(warmed(m, [p - 1] * p)),
            "the stages are the wrong way round: the first one warms up longest, p − 1 − s":
                as_lists(warmed(m, range(p))),
        }),
        _NOT_LEGAL,
        Mistake(backwards_turned,
                "the backwards go in the order 0, 1, 2, …; the oldest microbatch first"),
        Mistake(holds_more, "a stage holds more than min(m, p − s) microbatches: too many forwards "
                "before a backward"),
        Mistake(lambda v: idle(planned(v)[0]) > bubble + 1e-9,
                "the bubble is larger than that of 1F1B: too few forwards in front"),
    ]  # fmt: skip


def shuffled(seed: int) -> Schedule:
    """A legal schedule that is none of those with a name."""
    draw = random.Random(seed)
    order = draw.sample(range(4), 4)
    schedule = gpipe(3, 4)
    schedule[2] = schedule[2][:4] + [("B", k) for k in order]
    return schedule


def in_order(spans: Any) -> Any:
    """Spans sorted; anything else as it is."""
    if not isinstance(spans, list) or not all(isinstance(s, list) and len(s) == 5 for s in spans):
        return spans
    return sorted(spans, key=str)


#: What an action needs: the stage, kind and microbatch of another one, or nothing.
Need = tuple[int, str, int] | None


def _backward_alone(p: int, stage: int, kind: str, k: int) -> Need:
    """Make a mistake: on the last stage a backward needs nothing."""
    return None if kind == "B" and stage == p - 1 else needs(p, stage, kind, k)


def _forwards_only(p: int, stage: int, kind: str, k: int) -> Need:
    """Make a mistake: no backward needs anything."""
    return needs(p, stage, kind, k) if kind == "F" else None


def _reversed_needs(p: int, stage: int, kind: str, k: int) -> Need:
    """Make a mistake: a backward needs that of the stage before."""
    if kind == "B":
        return (stage - 1, "B", k) if stage else None
    return needs(p, stage, kind, k)


def _nothing(*_: Any) -> None:
    """Make a mistake: no action needs anything."""
    return None


def wrong_plans(schedule: Schedule, times: Sequence[float], right: Any) -> Iterator[Mistake]:
    """Yield what mistakes in `plan` lead to; right is `None` for what can never be completed."""
    times = times or (1, 2)
    yield Mistake(
        lambda got: got is None, "returned None: return a list of spans. This schedule is legal"
    )
    if right is None:
        yield Mistake([], "an empty list. A schedule that is not legal gives None")
        yield Mistake(
            in_order(planned(schedule, *times)[0]),
            "these are the actions before all were stuck: there are more in the lists, so the "
            "schedule is not legal, and the answer is None",
        )
    for text, needed in {
        "a backward on the last stage needs its own forward": _backward_alone,
        "a backward waits for nobody here; it needs the backward of the stage behind":
            _forwards_only,
        "a backward needs the gradient of the stage behind, s + 1, not of the one before":
            _reversed_needs,
        "stages wait for nobody here: an action also needs what comes from the stage beside":
            _nothing,
    }.items():  # fmt: skip
        yield Mistake(in_order(planned(schedule, *times, needs=needed)[0]), text)
    if right is None:
        text = "this schedule is not legal, it can never be completed: return None"
        yield Mistake(lambda got: isinstance(got, list), text)
    else:
        yield from _wrong_times(schedule, times)
        yield from _wrong_spans(schedule, right)


def _wrong_times(schedule: Schedule, times: Sequence[float]) -> Iterator[Mistake]:
    """Yield what plans are with other times than those of a forward and a backward."""
    forward, backward = times
    for text, other in {
        "every action takes the time of a forward here": (forward, forward),
        "every action takes the time of a backward here": (backward, backward),
        "the times of forward and backward are swapped": (backward, forward),
        "the arguments forward and backward are not used": (1, 2),
    }.items():
        if other != (forward, backward):
            yield Mistake(in_order(planned(schedule, *other)[0]), text)


def _wrong_spans(schedule: Schedule, right: list[list]) -> Iterator[Mistake]:
    """Yield what no plan of a legal schedule is, from its form to actions that start late."""
    starts = {tuple(span[:3]): span[3] for span in right}

    def is_spans(got: Any) -> bool:
        return isinstance(got, list) and all(isinstance(s, list) and len(s) == 5 for s in got)

    def late(got: list) -> bool:
        return all(span[3] >= starts.get(tuple(span[:3]), 0) for span in got)

    def two_at_once(got: list) -> bool:
        rows = sorted((s[0], s[3], s[4]) for s in got)
        return any(a[0] == b[0] and b[1] < a[2] - 1e-9 for a, b in itertools.pairwise(rows))

    def out_of_order(got: list) -> bool:
        by_start = sorted(got, key=lambda span: span[3])
        orders = [
            [[kind, k] for s, kind, k, *_ in by_start if s == stage]
            for stage in range(len(schedule))
        ]
        return orders != as_lists(schedule)

    yield Mistake(
        lambda got: not is_spans(got), "expected a list of spans (stage, kind, k, start, end)"
    )
    yield Mistake(lambda got: len(got) < len(right), "actions are missing: one span for each")
    yield Mistake(lambda got: len(got) > len(right), "there are more spans than actions")
    yield Mistake(lambda got: any(s[4] <= s[3] for s in got), "a span is (…, start, end)")
    yield Mistake(
        two_at_once,
        "a stage does two actions at the same time: an action begins when its stage is free, and "
        "what it needs is there, whichever is later",
    )
    yield Mistake(out_of_order, "a stage does not keep the order of its list")
    yield Mistake(
        late,
        "an action starts later than it could: as soon as its stage is free and what it needs has "
        "ended",
    )


def moved(spans: list[list], by: float) -> list[list]:
    """Return spans at another time."""
    return [[s, kind, k, start + by, end + by] for s, kind, k, start, end in spans]


def wrong_bubbles(spans: list[list]) -> list[Mistake]:
    """Return what mistakes in `bubble` lead to."""
    p, right = len({s[0] for s in spans}), idle(spans)
    by_stage = [[(span[3], span[4]) for span in spans if span[0] == stage] for stage in range(p)]
    busy = [sum(end - start for start, end in times) for times in by_stage]
    lengths = [max(e for _, e in times) - min(s for s, _ in times) for times in by_stage]
    first, last = min(span[3] for span in spans), max(span[4] for span in spans)
    length, total = last - first, sum(busy)
    return table({
        "this is the share of the time in which stages are busy": 1 - right,
        "in percent; a share is between 0 and 1": 100 * right,
        "the spans do not begin at 0: the length is from the first start to the last end":
            1 - total / (p * last),
        "the length goes to the last span of the list; the list has no order":
            1 - total / (p * (spans[-1][4] - first)),
        "the length goes from the first span of the list to the last; the list has no order":
            1 - total / (p * (spans[-1][4] - spans[0][3] or length)),
        "all stages are busy together: their number is missing in the denominator":
            1 - total / length,
        "each stage was counted from its own first start to its own last end; the time before "
        "and after is idle, too": 1 - sum(b / n for b, n in zip(busy, lengths, strict=True)) / p,
        "the same, with all stages' own lengths added up: the time before its first action and "
        "after its last is idle, too": 1 - total / sum(lengths),
        "this is the bubble of the first stage only": 1 - busy[0] / length,
        "this is idle time divided by busy time; divide by all time": p * length / total - 1,
        "this is the idle time, not its share": p * length - total,
        "this is a formula for equal times; count what is in the spans":
            (p - 1) / (len({s[2] for s in spans}) + p - 1),
        "divided by the number of actions; divide by that of stages":
            1 - total / (len(spans) * length),
    })  # fmt: skip


def wrong_held(schedule: Schedule) -> list[Mistake]:
    """Return what mistakes in `most_held` lead to."""
    m, most, p = len(schedule[0]) // 2, held(schedule), len(schedule)
    kinds = [[kind for kind, _ in actions] for actions in schedule]
    before = [
        max(row[:n].count("F") - row[:n].count("B") for n, kind in enumerate(row) if kind == "F")
        for row in kinds
    ]
    runs = [
        max(len(list(run)) for kind, run in itertools.groupby(row) if kind == "F") for row in kinds
    ]
    return [
        *table({
            "these are the forwards in front of the first backward; later more may be held":
                [row.index("B") for row in kinds],
            "this is the maximum over the stages; each has its own": max(most),
            "this is the sum over the stages; each has its own": sum(most),
            "all forwards were counted; a backward frees what its forward kept": [m] * p,
            "this is what is held at the end": [0] * p,
            "this counts all actions": [2 * m] * p,
            "one too few: a microbatch is held from its own forward on": before,
            "these are the numbers of the microbatches in flight by formula (p − s); count what is "
            "in the lists": [p - s for s in range(p)],
            "the stages are in reverse": most[::-1],
            "this is the longest row of forwards; a backward in between frees one microbatch, not "
            "all": runs,
        }),
        Mistake(lambda got: isinstance(got, list) and len(got) != p,
                f"expected {p} numbers, one for each stage"),
    ]  # fmt: skip
