"""Checks of lab 16: the parts of an online softmax, and how two of them are combined."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import only
from utils.checks.probe import reading_answer, recorded
from utils.checks.task import Report, Step, communication, task
from utils.cluster.questions import Ranks, Reply

from .replies import all_alike, drawn, several

#: The output, the maximum, and the total of each query.
Part = tuple[Tensor, Tensor, Tensor]
NAMES = ("output", "maximum", "total")
HEADS, QUERIES, SIZE = 2, 6, 4
NO_MAXIMUM = "You didn't subtract the maximum of each query before exp"
#: Factors of the scores, and what is added to them.
SCORES = ((1.0, 0.0), (250.0, 0.0), (1.0, -900.0), (1.0, 900.0), (1.0, -math.inf))


def part_of(*blocks: tuple[Tensor, Tensor]) -> Part:
    """Return the part of blocks of scores and values: output, maximum and total of each query."""
    scores = torch.cat([scores for scores, _ in blocks], -1)
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - _unit(maximum)).exp()
    return weights @ torch.cat([v for _, v in blocks], 1), maximum, weights.sum(-1, keepdim=True)


def _unit(maximum: Tensor) -> Tensor:
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)


def _blocks(seed: int, factor: float, level: float) -> list[tuple[Tensor, Tensor]]:
    """Return scores and values of two blocks; queries 0 to 3 don't see all keys."""
    blocks = []
    for i, keys in enumerate((5, 3)):
        scores = factor * drawn(seed + i, HEADS, QUERIES, keys) + level
        scores[:, [i, 2]] = -torch.inf  # query 0 sees nothing of block 0, query 2 nothing at all
        scores[:, 3, 1:] = -torch.inf
        blocks.append((scores, drawn(seed + 10 + i, HEADS, keys, SIZE)))
    return blocks


def probe_softmax(user_ns: dict, *, rank: int, seed: int, factor: float, level: float) -> dict:
    """Return the student's parts of two blocks, and combination of our parts."""
    blocks = _blocks(seed, factor, level)
    part, combine = (reading_answer(user_ns, name) for name in ("part", "combine"))

    def all_results() -> list[list[dict[str, Any]]]:
        results = [several("part", part(*block), 3) for block in blocks]
        ours = [part_of(block) for block in blocks]
        return [*results, several("combine", combine(*ours), 3)]

    results, calls = recorded(all_results)
    return {"results": results, "calls": calls}


@task("16.3", "an online softmax", points=2)
def online_softmax(ranks: Ranks, report: Report) -> None:
    """Judge parts of two blocks, and their combination, with hidden keys and large scores."""
    sizes = [{"factor": factor, "level": level} for factor, level in SCORES]
    listed = [{"seed": report.seed + 20 * i} | size for i, size in enumerate(sizes)]
    report.judge_cases(ranks, probe_softmax, listed, _softmax)


def _softmax(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    yield communication(answer.value["calls"], only())
    blocks = _blocks(case["seed"], case["factor"], case["level"])
    parts = [part_of(block) for block in blocks]
    rights = [*parts, part_of(*blocks)]
    wrongs = [*(_wrong_parts(*block) for block in blocks), _wrong_sums(*parts, rights[-1])]
    triples = zip(rights, wrongs, answer.value["results"], strict=True)
    for called, (right, wrong, result) in zip(("part", "part", "combine"), triples, strict=True):
        where = f"{called} with scores of about {case['level'] or case['factor']:g}"
        yield from all_alike(result, NAMES, right, wrong, where)


def _wrong_parts(scores: Tensor, v: Tensor) -> dict[str, Part]:
    output, maximum, total = part_of((scores, v))
    raw, shifted = scores.exp(), (scores - scores.amax()).exp()
    largest = scores.amax().expand_as(maximum)
    normal, zero = output / total.clamp(min=1e-300), maximum.masked_fill(maximum == -math.inf, 0)
    one_for_all = shifted @ v, largest, shifted.sum(-1, keepdim=True)
    return {
        "You divided by the total. A part isn't normalized": (normal, maximum, total),
        NO_MAXIMUM: (raw @ v, maximum, raw.sum(-1, keepdim=True)),
        "You took one maximum for all queries. Take the maximum of each query": one_for_all,
        "A query that sees no key has the maximum -inf, not 0": (output, zero, total),
        "You swapped maximum and total": (output, total, maximum),
        "Your total is a logarithm. Return the sum": (output, maximum, total.log() + maximum),
    }


def _wrong_sums(one: Part, other: Part, right: Part) -> dict[str, Part]:
    (o1, m1, t1), (o2, m2, t2) = one, other
    output, maximum, total = right
    a, b = ((m - _unit(maximum)).exp() for m in (m1, m2))
    c, added = (m2 - m1).exp(), (o1 + o2, m1 + m2, t1 + t2)
    swapped = b * o1 + a * o2, torch.minimum(m1, m2), b * t1 + a * t2
    normal = output / total.clamp(min=1e-300), maximum, total
    return {
        "You added two parts with different maxima. First change both to the larger maximum": added,
        "You changed only the first part. Both may need it": (a * o1 + o2, maximum, a * t1 + t2),
        "You gave each part the factor of the other part": swapped,
        "You changed only the second part. Both may need it": (o1 + c * o2, m1, t1 + c * t2),
        "You divided by the total. Divide once, after the last block": normal,
    }
