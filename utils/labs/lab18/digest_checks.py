"""Task 18.5: digests that see every bit, and a bisection over steps with replicas that differ."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from utils.checks.comparison import Mistake
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

from .digests import MANY, pairs, probe_digests, probe_flips

#: The most characters of a digest; SHA-256 has 64 hexadecimal digits.
LONGEST = 64


# -- digests ----------------------------------------------------------------------------------


def _digests(told_of: list, firsts: list, seed: int) -> Iterator[Step]:
    values, different = told_of
    flat = [one for pair in values for one in pair]
    odd = next((one for one in flat if type(one) not in (str, int) or str(one)[:1] == "<"), "")
    long = max(len(str(one)) for one in flat)
    yield facts({
        f"digest returned {str(odd)[:40]}. Return a text or an integer": odd != "",
        f"A digest has {long:,} characters, so it is as good as the tensor itself. Return at most "
        f"{LONGEST}": long > LONGEST,
    })
    *values, changed = values
    for (what, one, _), (left, right) in zip(pairs(seed), values, strict=True):
        about = f"{str(one.dtype).removeprefix('torch.')} tensors of shape {list(one.shape)}"
        yield facts({
            f"Two {about} have equal bits but different digests. Use their values only, and not "
            "how or where they are stored": not what and left != right,
            f"Two {about} differ in {what}, but their digests are equal. Compute the digest from "
            "all bytes in their order, the shape and the dtype": bool(what) and left == right,
        })
    yield facts({
        "A tensor was changed in place, and its digest stayed the same. Compute the digest anew in "
        "each call": changed[0] == changed[1],
        "The digest of the same tensor differs from rank to rank. Python's hash() has a new key "
        "in each process: use zlib.crc32 or hashlib": told_of[0] != firsts,
        f"{MANY:,} different tensors have only {different:,} digests. Use at least 32 bits of a "
        "checksum": different < MANY,
    })


# -- the bisection ----------------------------------------------------------------------------


def most_looks(steps: int) -> int:
    """Return how many looks a bisection needs at most, with one more to see the first bad step."""
    return math.ceil(math.log2(steps)) + 1


def cases_of(seed: int) -> list[list]:
    """Return trainings: ranks, names, steps, and the flip as (step, rank, number of the tensor)."""
    draw = random.Random(seed)
    fixed = [
        (3, 1, 1, 0),
        (4, 2, 1, 2),
        (4, 2, 2, 1),
        (4, 64, 1, 0),
        (3, 64, 64, 2),
        (5, 100, 99, 4),
    ]
    drawn = [
        (ranks, n, draw.randint(2, n - 1), draw.randrange(ranks))
        for ranks in (3, 4, 4, 5)
        for n in (draw.randint(20, 3000),)
    ]
    cases = []
    for ranks, steps, first, culprit in fixed + drawn:
        names = [f"{k}.{kind}" for k in range(draw.randint(1, 4)) for kind in ("weight", "bias")]
        cases.append([ranks, names, steps, [first, culprit, draw.randrange(len(names))]])
    return cases


def _flip(case: list, result: Any, looks: int) -> Iterator[Step]:
    ranks, names, steps, (first, culprit, row) = case
    right = [first, culprit, names[row]]
    call = f"find_flip with {ranks} ranks and {steps} step{'s' * (steps > 1)}"
    others = [r for r in range(ranks) if r != culprit]
    mistakes = [
        Mistake(_starts(first - 1), "This is the last good step. Return the first bad one"),
        Mistake(
            _starts(first + 1), "This is one step too late. Look at the step in the middle again"
        ),
        Mistake(
            lambda got: _starts(first)(got) and got[1] in others,
            "You named a rank that agrees with the others. The culprit is alone, and can be rank 0",
        ),
        Mistake(
            lambda got: _starts(first)(got) and got[1] == culprit and got[2:] != right[2:],
            "You named a tensor that all replicas share. Look at the first bad step again",
        ),
    ]
    yield value(result, right, mistakes, what=call, form="(step, rank, name)")
    most = most_looks(steps)
    yield facts({
        f"{call}: You looked at {looks} steps, expected at most {most}. Each look replays the "
        "training, so halve the steps that are left": looks > most
    })


def _starts(step: int) -> Callable[[Any], bool]:
    return lambda got: isinstance(got, list) and len(got) == 3 and got[0] == step


@task("18.5", "bisect with digests", points=3)
def flip_found(ranks: Ranks, report: Report) -> None:
    """Judge digests of pairs of tensors, then the step, rank and tensor of hidden flips."""
    firsts: list = []
    for answer in report.answers(ranks, probe_digests, seed=report.seed):
        firsts = firsts or answer.value[0]
        report.follow(answer.rank, _digests(answer.value, firsts, report.seed))
    if report.found:
        return
    cases = cases_of(report.seed)
    for answer in report.answers(ranks, probe_flips, cases=cases):
        for case, found in zip(cases, answer.value, strict=True):
            if not report.follow(answer.rank, _flip(case, *found)):
                break
