"""Task 18.5: digests that see every bit, and a bisection over steps with replicas that differ."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from utils.checks.comparison import Mistake
from utils.checks.probe import answer_named, reading_answer, told
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

#: The most characters of a digest; SHA-256 has 64 hexadecimal digits.
LONGEST = 64
#: Tensors that differ in one number and must have as many digests; 16 bits are too few for them.
MANY = 1000
#: A replica's digests by the name of a tensor.
Digests = dict[str, str]


# -- digests ----------------------------------------------------------------------------------


def _bits(tensor: Tensor, row: int, change: int) -> Tensor:
    """Return a copy, in which the bits of one entry are combined with `change` by exclusive or."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    copy = tensor.clone()
    copy.reshape(-1).view(whole)[row] ^= change
    return copy


def _moved(x: Tensor) -> Tensor:
    """Return a copy with the same sum: one entry is a half larger, another a half smaller."""
    copy = x.clone()
    copy[0] += 0.5
    copy[1] -= 0.5
    return copy


def pairs(seed: int) -> list[tuple[str, Tensor, Tensor]]:
    """Return triples: what differs ("" if the digests must be equal), and the two tensors."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 500, (40_000,), generator=draw) / 8
    small = x[:24].reshape(4, 6)
    row = int(x[0].item()) * 40
    zero, nan = torch.zeros(5), torch.tensor([1.0, math.nan, 2.0])
    double, half = x[:9].double(), x[:9].bfloat16()
    whole = torch.randint(1 << 60, 1 << 61, (9,), generator=draw)
    order = torch.randperm(len(x), generator=draw)
    return [
        ("", x, x.clone()),
        ("", small.t(), small.t().contiguous()),
        ("", torch.nn.Parameter(small), small.clone()),
        ("", nan, nan.clone()),
        ("", half, half.clone()),
        ("", torch.tensor(2.5), torch.tensor(2.5)),
        ("one bit of a long tensor", x, _bits(x, row, 1)),
        ("the last entry", x, _bits(x, -1, 1 << 20)),
        ("the lowest bit of a double", double, _bits(double, 4, 1)),
        ("one bit of a bfloat16", half, _bits(half, 3, 1)),
        ("the lowest bit of a large integer", whole, _bits(whole, 4, 1)),
        ("the order of the entries", x, x[order]),
        ("the order of the entries", double, double.flip(0)),
        ("two entries, with the same sum", x, _moved(x)),
        ("the sign of a zero", zero, _bits(zero, 2, -(1 << 31))),
        ("a number, where the other has NaN", nan, torch.tensor([1.0, 3.0, 2.0])),
        ("the bits of a NaN", nan, _bits(nan, 1, 1)),
        ("the shape", small, small.reshape(6, 4)),
        ("the dtype", zero, zero.int()),
    ]


def probe_digests(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return the digests of each pair, and how many digests many different tensors have."""
    digest = reading_answer(user_ns, "digest")
    found: list = [[told(digest(one)), told(digest(other))] for _, one, other in pairs(seed)]
    rows = torch.zeros(MANY, 4)
    # They differ in 32 bits beside each other, for which a CRC32 never has equal values.
    rows.view(torch.int32)[:, 1] = torch.tensor(random.Random(seed).sample(range(1 << 30), MANY))
    return [found, len({str(digest(row)) for row in rows})]


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
    for (what, one, _), (left, right) in zip(pairs(seed), values, strict=True):
        about = f"{str(one.dtype).removeprefix('torch.')} tensors of shape {list(one.shape)}"
        yield facts({
            f"Two {about} have equal bits but different digests. Use their values only, and not "
            "how or where they are stored": not what and left != right,
            f"Two {about} differ in {what}, but their digests are equal. Compute the digest from "
            "all bytes in their order, the shape and the dtype": bool(what) and left == right,
        })
    yield facts({
        "The digest of the same tensor differs from rank to rank. Python's hash() has a new key "
        "in each process: use zlib.crc32 or hashlib": values != firsts,
        f"{MANY:,} different tensors have only {different:,} digests. Use at least 32 bits of a "
        "checksum": different < MANY,
    })


def cosmic_ray(model: nn.Module, rank: int, step: int) -> None:
    """Flip one bit of one number in one step on one rank, as a broken memory chip may do."""
    if (rank, step) == (2, 37):
        weight = dict(model.named_parameters())["2.weight"].data
        weight.copy_(_bits(weight, 5, 1 << 8))


# -- the bisection ----------------------------------------------------------------------------


class Replays:
    """A training with replicas that differ from one step on; each look at a step is a replay.

    Attributes:
        asked: the steps that were looked at.
    """

    def __init__(self, ranks: int, names: list[str], steps: int, flip: tuple[int, int, int]):
        self.ranks, self.names, self.steps = ranks, names, steps
        self.flip = flip
        self.asked: list[int] = []

    def __call__(self, step: int) -> list[Digests]:
        """Return, for each rank, the digest of each tensor after `step` steps."""
        if not 0 <= step <= self.steps:
            raise ValueError(f"digests_at({step}): ask for a step from 0 to {self.steps}")
        self.asked.append(int(step))
        first, culprit, row = self.flip
        draw = random.Random(f"{self.flip} {step}")
        common = {name: f"{draw.getrandbits(64):016x}" for name in self.names}
        found = [dict(common) for _ in range(self.ranks)]
        bad = self.names if step > first else self.names[row : row + 1] if step == first else []
        found[culprit] |= {name: f"{draw.getrandbits(64):016x}" for name in bad}
        return found


def most_looks(steps: int) -> int:
    """Return how many looks a bisection needs at most, with one more to see the first bad step."""
    return math.ceil(math.log2(steps)) + 1


def probe_flips(user_ns: dict, *, rank: int, cases: list) -> list:
    """Return what the student finds in each training, and how many steps it looked at."""
    found = []
    for ranks, names, steps, flip in cases:
        replays = Replays(ranks, names, steps, tuple(flip))
        result = told(answer_named(user_ns, "find_flip")(replays, steps))
        found.append([result, len(replays.asked)])
    return found


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
