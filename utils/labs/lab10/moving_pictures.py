"""A pipeline chart that moves: you choose stages, microbatches and schedule in the notebook.

A stage's row is a text with a character for each unit of time: the kind of action, or a dot if the
stage is idle. A unit that repeats is written once: ``F4.9(BB.)3`` means four forwards, nine idle
units, and three backwards of two units with a pause after each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from utils.figures import ink_on
from utils.figures.interactive import Interactive
from utils.labs.lab10 import pictures
from utils.labs.lab10.pictures import KINDS, Span
from utils.labs.shared import schedules

SCRIPT = Path(__file__).with_name("pipeline.js")
STAGES, MICROBATCHES = range(2, 9), range(1, 17)
IDLE = "."
# A unit of at most four characters that repeats at least three times.
_REPEATED = re.compile(r"(.{1,4}?)\1{2,}")


class Plan(NamedTuple):
    """A schedule that can be drawn for any number of stages and microbatches.

    Attributes:
        spans: returns the spans of p stages and m microbatches.
        last_first: whether the backwards go from the last microbatch to the first.
    """

    spans: Callable[[int, int], Sequence[Span]]
    last_first: bool = False


PLANS = {
    "GPipe": Plan(lambda p, m: schedules.planned(schedules.gpipe(p, m))[0], last_first=True),
    "1F1B": Plan(lambda p, m: schedules.planned(schedules.one_f_one_b(p, m))[0]),
    "zero bubble": Plan(schedules.zero_bubble),
}


def pipeline(
    names: Sequence[str] = tuple(PLANS), stages: int = 4, microbatches: int = 4
) -> Interactive:
    """Return the chart of a pipeline, with sliders for its stages and its microbatches.

    Args:
        names: the schedules in :data:`PLANS` that can be chosen.
        stages, microbatches: the values at the start.
    """
    data = {
        "stages": [STAGES[0], STAGES[-1], stages],
        "microbatches": [MICROBATCHES[0], MICROBATCHES[-1], microbatches],
        "schedules": {name: _of_schedule(PLANS[name]) for name in names},
        "kinds": {kind: [color, words, ink_on(color)] for kind, (color, words) in KINDS.items()},
    }
    begin = {name: PLANS[name].spans(stages, microbatches) for name in names}
    still = pictures.gantt(begin, "time of a forward")
    words = f"A pipeline of {stages} stages and {microbatches} microbatches. {still.alt_text}"
    return Interactive(SCRIPT, data, still, words)


def _of_schedule(plan: Plan) -> Mapping[str, Any]:
    """Return a chart for each number of stages and each number of microbatches."""
    charts = [[_chart(plan.spans(p, m)) for m in MICROBATCHES] for p in STAGES]
    return {"lastFirst": plan.last_first, "charts": charts}


def _chart(spans: Sequence[Span]) -> str:
    """Return the rows, the bubble, and the most microbatches that each stage holds."""
    rows = " ".join(map(shortened, rows_of(spans)))
    held = " ".join(map(str, held_in(spans)))
    return f"{rows}|{schedules.idle(spans):.3f}|{held}"


def rows_of(spans: Sequence[Span]) -> list[str]:
    """Return a row for each stage, with a character per unit of time up to its last action."""
    rows = [""] * (1 + max(span[0] for span in spans))
    for stage, kind, _, start, end in sorted(spans, key=lambda span: span[3]):
        rows[stage] = rows[stage].ljust(int(start), IDLE) + kind * int(end - start)
    return rows


def shortened(row: str) -> str:
    """Return a row in which each unit that repeats is written once, with its count."""

    def once(found: re.Match) -> str:
        unit = found[1]
        count = len(found[0]) // len(unit)
        return f"{unit if len(unit) == 1 else f'({unit})'}{count}"

    return _REPEATED.sub(once, row)


def held_in(spans: Sequence[Span]) -> list[int]:
    """Return the most microbatches that each stage holds, from their forward to their last action.

    The gradient of the weights needs the activations too, so a backward in two halves holds them
    until W is done.
    """
    held = []
    for stage in range(1 + max(span[0] for span in spans)):
        own = [span for span in spans if span[0] == stage]
        begins = [(start, 1) for _, kind, _, start, _ in own if kind == "F"]
        last = {k: end for _, _, k, _, end in sorted(own, key=lambda span: span[4])}
        changes = sorted([*begins, *((end, -1) for end in last.values())])
        held.append(max(accumulate(change for _, change in changes)))
    return held
