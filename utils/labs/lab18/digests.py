"""Digests of tensors, a bit that flips, and the probes of task 18.5."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn

from utils.checks.probe import answer_named, reading_answer, told

#: Tensors that differ in one number and must have as many digests; 16 bits are too few for them.
MANY = 1000
#: A replica's digests by the name of a tensor.
Digests = dict[str, str]


def with_bits(tensor: Tensor, row: int, change: int) -> Tensor:
    """Return a copy, in which the bits of one entry are combined with `change` by exclusive or."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
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
    zero = torch.zeros(5)
    nan = torch.tensor([1.0, math.nan, 2.0])
    double = x[:9].double()
    half = x[:9].bfloat16()
    whole = torch.randint(1 << 60, 1 << 61, (9,), generator=draw)
    order = torch.randperm(len(x), generator=draw)
    byte = x[:9].to(torch.uint8)
    flags = x[:9] > 30
    return [
        ("", x, x.clone()),
        ("", small.t(), small.t().contiguous()),
        ("", torch.nn.Parameter(small), small.clone()),
        ("", nan, nan.clone()),
        ("", half, half.clone()),
        ("", torch.tensor(2.5), torch.tensor(2.5)),
        ("one bit of a long tensor", x, with_bits(x, row, 1)),
        ("the last entry", x, with_bits(x, -1, 1 << 20)),
        ("the lowest bit of a double", double, with_bits(double, 4, 1)),
        ("one bit of a bfloat16", half, with_bits(half, 3, 1)),
        ("the lowest bit of a large integer", whole, with_bits(whole, 4, 1)),
        ("the lowest bit of a byte", byte, with_bits(byte, 4, 1)),
        ("one flag", flags, with_bits(flags, 4, 1)),
        ("the order of the entries", x, x[order]),
        ("the order of the entries", double, double.flip(0)),
        ("two entries, with the same sum", x, _moved(x)),
        ("the sign of a zero", zero, with_bits(zero, 2, -(1 << 31))),
        ("a number, where the other has NaN", nan, torch.tensor([1.0, 3.0, 2.0])),
        ("the bits of a NaN", nan, with_bits(nan, 1, 1)),
        ("the shape", small, small.reshape(6, 4)),
        ("the shape", x[:11].reshape(1, 11), x[:11].reshape(11, 1)),
        ("the dtype", zero, zero.int()),
        ("the dtype", half, half.view(torch.float16)),
        ("the dtype", byte, byte.view(torch.int8)),
        ("", x.reshape(100, 100, 2, 2), x.reshape(100, 100, 2, 2).clone()),
    ]


def probe_digests(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return the digests of each pair, and how many digests many different tensors have."""
    digest = reading_answer(user_ns, "digest")
    tensors = pairs(seed)
    found: list = [[told(digest(one)), told(digest(other))] for _, one, other in tensors]
    changing = tensors[0][1].clone()
    before = told(digest(changing))
    changing.copy_(with_bits(changing, 3, 1))
    found.append([before, told(digest(changing))])
    rows = torch.zeros(MANY, 4)
    # They differ in 32 bits beside each other, for which a CRC32 never has equal values.
    rows.view(torch.int32)[:, 1] = torch.tensor(random.Random(seed).sample(range(1 << 30), MANY))
    return [found, len({str(digest(row)) for row in rows})]


class Replays:
    """A training with replicas that differ from one step on; each look at a step is a replay.

    Attributes:
        asked: the steps that were looked at.
    """

    def __init__(self, ranks: int, names: list[str], steps: int, flip: tuple[int, int, int]):
        self.ranks = ranks
        self.names = names
        self.steps = steps
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
        return [dict(draw.sample(sorted(of.items()), len(of))) for of in found]


def probe_flips(user_ns: dict, *, rank: int, cases: list) -> list:
    """Return what the student finds in each training, and how many steps it looked at."""
    found = []
    for ranks, names, steps, flip in cases:
        replays = Replays(ranks, names, steps, tuple(flip))
        result = told(answer_named(user_ns, "find_flip")(replays, steps))
        found.append([result, len(replays.asked)])
    return found


def cosmic_ray(model: nn.Module, rank: int, step: int) -> None:
    """Flip one bit of one number in one step on one rank, as a broken memory chip may do."""
    if (rank, step) == (2, 37):
        weight = dict(model.named_parameters())["2.weight"].data
        weight.copy_(with_bits(weight, 5, 1 << 8))
