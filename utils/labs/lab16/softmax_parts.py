"""Checks of lab 16: the parts of an online softmax, and how two of them are combined."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import only
from utils.checks.task import Report, Step, communication, task
from utils.cluster.questions import Ranks, Reply

from .probes import Part, drawn_blocks, part_of, probe_softmax, unit_of
from .replies import all_alike

NAMES = ("output", "maximum", "total")
NO_MAXIMUM = "You didn't subtract the maximum of each query before exp"
#: Factors of the scores, what is added to them, and how much lower the second block's scores are.
SCORES = (
    *((1.0, 0.0, 0.0), (1.0, 0.0, 17.0), (250.0, 0.0, 0.0), (1.0, -900.0, 0.0)),
    *((1.0, 900.0, 0.0), (1.0, -30_000.0, 0.0), (1.0, -math.inf, 0.0)),
)


@task("16.3", "an online softmax", points=2)
def online_softmax(ranks: Ranks, report: Report) -> None:
    """Judge parts of two blocks, and their combination, with hidden keys and large scores."""
    listed = [
        {"seed": report.seed + 20 * i, "factor": factor, "level": level, "apart": apart}
        for i, (factor, level, apart) in enumerate(SCORES)
    ]
    report.judge_cases(ranks, probe_softmax, listed, _softmax)


def _softmax(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    yield communication(answer.value["calls"], only())
    blocks = drawn_blocks(**case)
    parts = [part_of(block) for block in blocks]
    rights = [*parts, part_of(*blocks)]
    wrongs = [*(_wrong_parts(*block) for block in blocks), _wrong_sums(*parts, rights[-1])]
    triples = zip(rights, wrongs, answer.value["results"], strict=True)
    for called, (right, wrong, result) in zip(("part", "part", "combine"), triples, strict=True):
        where = f"{called} with scores of about {case['level'] or case['factor']:g}"
        yield from all_alike(result, NAMES, right, wrong, where)


def _wrong_parts(scores: Tensor, v: Tensor) -> dict[str, Part]:
    output, maximum, total = part_of((scores, v))
    raw = scores.exp()
    shifted = (scores - scores.amax()).exp()
    largest = scores.amax().expand_as(maximum)
    normal = output / total.clamp(min=1e-300)
    zero = maximum.masked_fill(maximum == -math.inf, 0)
    one_for_all = shifted @ v, largest, shifted.sum(-1, keepdim=True)
    # If exp underflows, other mistakes give zeros, too; an earlier case has found this one.
    no_maximum = {NO_MAXIMUM: (raw @ v, maximum, raw.sum(-1, keepdim=True))} if raw.any() else {}
    return no_maximum | {
        "You divided by the total. A part isn't normalized": (normal, maximum, total),
        "You took one maximum for all queries. Take the maximum of each query": one_for_all,
        "A query that sees no key has the maximum -inf, not 0": (output, zero, total),
        "You swapped maximum and total": (output, total, maximum),
        "Your total is a logarithm. Return the sum": (output, maximum, total.log() + maximum),
    }


def _wrong_sums(one: Part, other: Part, right: Part) -> dict[str, Part]:
    o1, m1, t1 = one
    o2, m2, t2 = other
    output, maximum, total = right
    a, b = ((m - unit_of(maximum)).exp() for m in (m1, m2))
    c = (m2 - m1).exp()
    added = (o1 + o2, m1 + m2, t1 + t2)
    swapped = b * o1 + a * o2, torch.minimum(m1, m2), b * t1 + a * t2
    normal = output / total.clamp(min=1e-300), maximum, total
    return {
        "You added two parts with different maxima. First change both to the larger maximum": added,
        "You changed only the first part. Both may need it": (a * o1 + o2, maximum, a * t1 + t2),
        "You gave each part the factor of the other part": swapped,
        "You changed only the second part. Both may need it": (o1 + c * o2, m1, t1 + c * t2),
        "You divided by the total. Divide once, after the last block": normal,
    }
