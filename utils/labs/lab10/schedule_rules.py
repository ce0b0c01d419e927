"""Mistakes in functions of schedules: what they give, and what to say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from utils.checks.mistakes import Mistake, table
from utils.labs.shared.schedules import Schedule, faults, gpipe, held, idle, needs, planned


def as_lists(schedule: Schedule) -> list:
    """As JSON has it."""
    return [[list(action) for action in actions] for actions in schedule]


def malformed(p: int, m: int) -> list[Mistake]:
    """What is no schedule."""

    def is_list(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(one, list) for one in value)

    def actions(value: Any) -> list:
        return [action for one in value for action in one]

    def action(value: Any) -> bool:
        good = isinstance(value, list) and len(value) == 2
        return good and value[0] in ("F", "B") and type(value[1]) is int

    def flat(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(action(one) for one in value)

    return [
        Mistake(flat, "this is the list of one stage: a schedule has a list for each stage"),
        Mistake(lambda v: not is_list(v), "a schedule is a list with a list for each stage"),
        Mistake(lambda v: len(v) == m != p, f"{m} lists: a schedule has a list for each stage, "
                "not for each microbatch"),
        Mistake(lambda v: len(v) != p, f"expected {p} lists, one for each stage"),
        Mistake(lambda v: not all(map(action, actions(v))),
                'an action is a pair of a letter and a number: ("F", 0)'),
        Mistake(lambda v: any(not 0 <= k < m for _, k in actions(v)),
                f"microbatches are numbered 0 to {m - 1}"),
        Mistake(lambda v: faults(v) is not None and "nobody" not in faults(v),
                "every stage has every F and every B once"),
    ]  # fmt: skip


def not_legal(value: list) -> bool:
    """Whether stages wait for each other."""
    return faults(value) is not None


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


def _backward_alone(p: int, stage: int, kind: str, k: int):
    """A mistake: on the last stage a backward needs nothing."""
    return None if kind == "B" and stage == p - 1 else needs(p, stage, kind, k)


def _forwards_only(p: int, stage: int, kind: str, k: int):
    return needs(p, stage, kind, k) if kind == "F" else None


def _reversed_needs(p: int, stage: int, kind: str, k: int):
    if kind == "B":
        return (stage - 1, "B", k) if stage else None
    return needs(p, stage, kind, k)


def _nothing(*_: Any) -> None:
    return None


def wrong_plans(schedule: Schedule, times: Sequence[float], right: Any) -> Iterator[Mistake]:
    """What mistakes in `plan` lead to."""
    times = times or (1, 2)
    yield Mistake(lambda got: got is None,
                  "returned None: return a list of spans. This schedule is legal")  # fmt: skip
    if right is None:
        yield Mistake([], "an empty list. A schedule that is not legal gives None")
        yield Mistake(in_order(planned(schedule, *times)[0]),
                      "these are the actions before all were stuck: there are more in the lists, "
                      "so the schedule is not legal, and the answer is None")  # fmt: skip
    for said, rule in {
        "a backward on the last stage needs its own forward": _backward_alone,
        "a backward waits for nobody here; it needs the backward of the stage behind":
            _forwards_only,
        "a backward needs the gradient of the stage behind, s + 1, not of the one before":
            _reversed_needs,
        "stages wait for nobody here: an action also needs what comes from the stage beside":
            _nothing,
    }.items():  # fmt: skip
        yield Mistake(in_order(planned(schedule, *times, needs=rule)[0]), said)
    if right is None:
        said = "this schedule is not legal, it can never be completed: return None"
        yield Mistake(lambda got: isinstance(got, list), said)
        return
    for said, wrong in {
        "every action takes the time of a forward here": (times[0], times[0]),
        "every action takes the time of a backward here": (times[1], times[1]),
        "the times of forward and backward are swapped": times[::-1],
        "the arguments forward and backward are not used": (1, 2),
    }.items():
        if tuple(wrong) != tuple(times):
            yield Mistake(in_order(planned(schedule, *wrong)[0]), said)
    shape = [sorted(map(str, [s, kind, k])) for s, kind, k, *_ in right]

    def is_spans(got: Any) -> bool:
        return isinstance(got, list) and all(isinstance(s, list) and len(s) == 5 for s in got)

    yield Mistake(lambda got: not is_spans(got),
                  "expected a list of spans (stage, kind, k, start, end)")  # fmt: skip
    yield Mistake(lambda got: len(got) < len(shape), "actions are missing: one span for each")
    yield Mistake(lambda got: len(got) > len(shape), "there are more spans than actions")
    yield Mistake(lambda got: any(s[4] <= s[3] for s in got), "a span is (…, start, end)")

    def late(got: list) -> bool:
        by = {tuple(s[:3]): s[3] for s in right}
        return all(s[3] >= by.get(tuple(s[:3]), 0) for s in got)

    def two_at_once(got: list) -> bool:
        rows = sorted((s[0], s[3], s[4]) for s in got)
        return any(a[0] == b[0] and b[1] < a[2] - 1e-9
                   for a, b in itertools.pairwise(rows))  # fmt: skip

    def out_of_order(got: list) -> bool:
        order = [[[kind, k] for s, kind, k, *_ in sorted(got, key=lambda one: one[3]) if s == stage]
                 for stage in range(len(schedule))]  # fmt: skip
        return order != [list(map(list, actions)) for actions in schedule]

    yield Mistake(two_at_once, "a stage does two actions at the same time: an action begins when "
                  "its stage is free, and what it needs is there, whichever is later")  # fmt: skip
    yield Mistake(out_of_order, "a stage does not keep the order of its list")
    yield Mistake(late, "an action starts later than it could: as soon as its stage is free and "
                  "what it needs has ended")  # fmt: skip


def moved(spans: list[list], by: float) -> list[list]:
    """Spans at another time."""
    return [[s, kind, k, start + by, end + by] for s, kind, k, start, end in spans]


def wrong_bubbles(spans: list[list]) -> list[Mistake]:
    """What mistakes in `bubble` lead to."""
    p, right = len({s[0] for s in spans}), idle(spans)
    busy = [sum(e - a for s, *_, a, e in spans if s == stage) for stage in range(p)]
    starts, ends = [s[3] for s in spans], [s[4] for s in spans]
    length = max(ends) - min(starts)
    own = [max(s[4] for s in spans if s[0] == stage) - min(s[3] for s in spans if s[0] == stage)
           for stage in range(p)]  # fmt: skip
    wrong = table({
        "this is the share of the time in which stages are busy": 1 - right,
        "in percent; a share is between 0 and 1": 100 * right,
        "the spans do not begin at 0: the length is from the first start to the last end":
            1 - sum(busy) / (p * max(ends)),
        "the length goes to the last span of the list; the list has no order":
            1 - sum(busy) / (p * (spans[-1][4] - min(starts))),
        "the length goes from the first span of the list to the last; the list has no order":
            1 - sum(busy) / (p * (spans[-1][4] - spans[0][3] or length)),
        "all stages are busy together: their number is missing in the denominator":
            1 - sum(busy) / length,
        "each stage was counted from its own first start to its own last end; the time before "
        "and after is idle, too": 1 - sum(b / n for b, n in zip(busy, own, strict=True)) / p,
        "the same, with all stages' own lengths added up: the time before its first action and "
        "after its last is idle, too": 1 - sum(busy) / sum(own),
        "this is the bubble of the first stage only": 1 - busy[0] / length,
        "this is idle time divided by busy time; divide by all time": p * length / sum(busy) - 1,
        "this is the idle time, not its share": p * length - sum(busy),
        "this is a formula for equal times; count what is in the spans":
            (p - 1) / (len({s[2] for s in spans}) + p - 1),
    })  # fmt: skip
    shares = 1 - sum(busy) / (len(spans) * length)
    wrong.append(Mistake(shares, "divided by the number of actions; divide by that of stages"))
    return wrong


def wrong_held(schedule: Schedule) -> list[Mistake]:
    """What mistakes in `most_held` lead to."""
    m, most, p = len(schedule[0]) // 2, held(schedule), len(schedule)
    before = [max(sum(1 if kind == "F" else -1 for kind, _ in actions[:n])
                  for n, (kind, _) in enumerate(actions) if kind == "F")
              for actions in schedule]  # fmt: skip
    wrong = table({
        "these are the forwards in front of the first backward; later more may be held": [
            next(n for n, (kind, _) in enumerate(actions) if kind == "B") for actions in schedule],
        "this is the maximum over the stages; each has its own": max(most),
        "this is the sum over the stages; each has its own": sum(most),
        "all forwards were counted; a backward frees what its forward kept": [m] * p,
        "this is what is held at the end": [0] * p,
        "this counts all actions": [2 * m] * p,
        "one too few: a microbatch is held from its own forward on": before,
        "these are the numbers of the microbatches in flight by formula (p − s); count what is in "
        "the lists": [p - s for s in range(p)],
        "the stages are in reverse": most[::-1],
        "this is the longest row of forwards; a backward in between frees one microbatch, not all":
            [max(len(list(run)) for kind, run in itertools.groupby(one[0] for one in actions)
                 if kind == "F") for actions in schedule],
    })  # fmt: skip
    said = f"expected {p} numbers, one for each stage"
    return [*wrong, Mistake(lambda v: isinstance(v, list) and len(v) != p, said)]
