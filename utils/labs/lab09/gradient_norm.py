"""Check of the gradient norm in lab 09: count each shard, and each replica only once."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from utils.checks.comparison import NO_NUMBER, Calls, Mistake, inside, made, only, table, waited
from utils.checks.draws import drawn
from utils.checks.groups import Partition
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.checks.trials import GroupAnswer, judge_groups, on, places
from utils.cluster.questions import Ranks

from .probes import probe_clip
from .sharded_layers import BYTES, PARTITIONS

#: The shape of each whole parameter, and whether its rows are split (unevenly).
PARAMETERS = {"a": ((9, 4), True), "b": ((5,), False), "c": ((7,), True), "d": ((3, 3), False)}


class Gradients:
    """Gradients of a model on p ranks, drawn from a seed; the seed 0 makes all of them 0.

    Attributes:
        shards: squared norms of the split parameters, for each rank.
        rest: squared norms of the replicated parameters.
        norm: the norm of the whole model's gradient.
    """

    def __init__(self, seed: int, p: int):
        self.p = p
        self.whole = {
            name: (seed > 0) * drawn(seed + k, *shape)
            for k, (name, (shape, _)) in enumerate(PARAMETERS.items())
        }
        squares = [
            {name: part.square().sum().item() for name, part in self.of_rank(place).items()}
            for place in range(p)
        ]
        self.shards = [[row[name] for name in row if PARAMETERS[name][1]] for row in squares]
        self.rest = [x for name, x in squares[0].items() if not PARAMETERS[name][1]]
        self.norm = math.sqrt(sum(map(sum, self.shards)) + sum(self.rest))

    def of_rank(self, place: int) -> dict[str, Tensor]:
        """Return a rank's gradients: its rows of split parameters, and all replicated ones."""
        return {
            name: self.whole[name].tensor_split(self.p)[place] if is_cut else self.whole[name]
            for name, (_, is_cut) in PARAMETERS.items()
        }

    def scaled(self, place: int, cut: float, rest: float) -> list[list[float]]:
        """Return a rank's numbers, scaled by one factor for shards and one for replicas."""
        return [
            values_of(tensor * (cut if PARAMETERS[name][1] else rest))
            for name, tensor in self.of_rank(place).items()
        ]

    def norm_of_rank(self, place: int) -> float:
        """Return the norm of the gradients that one rank holds."""
        return math.sqrt(sum(self.shards[place]) + sum(self.rest))


def _clip_case(seed: int, partition: Partition, share: float) -> dict[str, Any]:
    """Return a case with this seed's gradients, and a bound that is a share of their norm."""
    each = []
    for place, p in places(partition):
        gradients = Gradients(seed, p)
        rows = {name: tensor.tolist() for name, tensor in gradients.of_rank(place).items()}
        each.append({"gradients": rows, "most": share * (gradients.norm or 1)})
    return {"partition": partition, "each": each}


def _hint_zeros(case: dict[str, Any]) -> str:
    zeros = not any(map(any, case["each"][0]["gradients"]["a"]))
    return "All gradients are 0, and so is their norm. Don't divide by it" if zeros else ""


@task("9.5", "the norm of all gradients", points=2)
def clip_gradients(ranks: Ranks, report: Report) -> None:
    """Compare the whole model's norm on each rank, and all gradients scaled by it."""
    # The bound differs each time, so an answer can't derive the norm from it or from an earlier run
    # alone. In the first half, the bound is below a rank's own norm, too.
    draw = random.Random(report.seed)
    seeds = report.seeds(2 * len(PARTITIONS))
    shares = [draw.uniform(low, 2 * low) for low in (0.2, 1.2) for _ in PARTITIONS]
    # Here the norm is above the bound, and a rank's own norm is not. Then all gradients are 0.
    seeds += [report.seed, 0]
    shares += [draw.uniform(0.9, 0.97), 1.5]
    among = (*PARTITIONS * 2, PARTITIONS[0], None)
    for seed, partition, share in zip(seeds, among, shares, strict=True):
        judge = functools.partial(_clipped, seed=seed, share=share)
        case = _clip_case(seed, partition, share)
        if not judge_groups(ranks, report, probe_clip, [case], judge, _hint_zeros):
            break


def _clipped(answer: GroupAnswer, seed: int, share: float) -> Iterator[Step]:
    members = answer.members
    place = answer.place
    result = answer.value
    gradients = Gradients(seed, len(members))
    where = f"{on(members)}, bound {'below' if share < 1 else 'above'}"
    yield communication(result["calls"], only("all_reduce"), inside(members), waited)
    mistakes = [NO_NUMBER, *_wrong_norms(gradients, place, share)]
    what = f"the norm {where}"
    yield value(result["norm"], gradients.norm, mistakes, what=what, form="the norm, a number")
    factor = min(share, 1)
    scaled = gradients.scaled(place, factor, factor)
    mistakes = _wrong_scales(gradients, place, share)
    yield value(result["gradients"], scaled, mistakes, what=f"gradients {where}")
    text = "You changed or filled a parameter without a gradient. Leave it out if its grad is "
    yield facts({f"{where}: {text}None": not result["unused"]})
    yield communication(result["calls"], made("all_reduce", 1), _one_number)


def _wrong_norms(gradients: Gradients, place: int, share: float) -> list[Mistake]:
    p = gradients.p
    every = sum(map(sum, gradients.shards))
    replicated = sum(gradients.rest)
    of_ranks = [gradients.norm_of_rank(k) for k in range(p)]
    of_shards = [sum(map(math.sqrt, squares)) for squares in gradients.shards]
    of_rest = sum(map(math.sqrt, gradients.rest))
    of_all = sum(of_shards) + of_rest
    mean = math.sqrt(every / p + replicated)
    norms = {
        "You used only what this rank has. Sum the squares of all ranks' shards with an "
        "all_reduce": of_ranks[place],
        f"You counted replicated parameters {p} times, once for each rank. Add their squares "
        "after the all_reduce": math.sqrt(every + p * replicated),
        "You left out the replicated parameters. Add their squares": math.sqrt(every),
        "You left out the shards. Add their squares over all ranks": math.sqrt(replicated),
        "You returned the square of the norm. Take the root": every + replicated,
        "You added norms of ranks. Add squares, and take the root last": sum(of_ranks),
        "You added norms of parameters. Add squares, and take the root last": of_all,
        "You added norms of this rank's parameters. Add squares over all ranks, and take the root "
        "last": of_shards[place] + of_rest,
        "You took the mean over the ranks. Add the squares of the shards": mean,
        "You returned the norm after clipping. Return the norm before it": share * gradients.norm,
    }
    return table({text: norm for text, norm in norms.items() if abs(norm - gradients.norm) > 1e-9})


def _wrong_scales(gradients: Gradients, place: int, share: float) -> list[Mistake]:
    norm = gradients.norm
    right = min(share, 1)
    by_rank = min(share * norm / (gradients.norm_of_rank(place) or 1), 1)
    factors = {
        "You scaled nothing, but the norm is above the bound. Multiply by bound / norm": 1.0,
        "You scaled, but the norm is not above the bound. Leave the gradients": share,
        "You divided by the norm only. Multiply by the bound, too": 1 / (norm or 1),
        "You multiplied by the bound only. Divide by the norm, too": share * norm,
        "You scaled twice. Scale once": right**2,
        "You scaled by this rank's own norm, so replicas differ. Use the global norm": by_rank,
        "Your gradients are all 0. Scale them by bound / norm": 0.0,
    }
    pairs = {text: (factor, factor) for text, factor in factors.items()}
    pairs |= {  # for shards, and for replicas
        "You scaled only the shards. Multiply the replicated gradients, too": (right, 1),
        "You scaled only the replicated gradients. Multiply the shards, too": (1, right),
    }
    return [
        Mistake(gradients.scaled(place, *pair), text)
        for text, pair in pairs.items()
        if max(abs(factor - right) for factor in pair) > 1e-9
    ]


def _one_number(calls: Calls) -> str | None:
    for call in calls:
        if call["nbytes"] > BYTES:
            size = call["nbytes"]
            return (
                f"You reduced {size} bytes in an all_reduce. Reduce one number, the sum of squares"
            )
    return None
