"""Tasks 3.1 and 3.2: gradients that are averaged over the ranks of a group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.checks.comparison import (
    EXACT,
    TOLERANCE,
    Mistake,
    Rule,
    inside,
    made,
    only,
    table,
    waited,
)
from utils.checks.groups import Partition
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import EVERYWHERE, PARTITIONS, WORLD, GroupAnswer, judge_groups, on
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas

from .probes import averaged_net, drawn_gradient, probe_average, widths

CALLS = 2  # calls of an answer in a row, because what it keeps must not change the second one


def rules(members: list[int]) -> tuple[Rule, ...]:
    """Return the rules of all tasks except the last two."""
    return only("all_reduce"), inside(members), waited


def _gradient_length(sizes: Sequence[int], call: int) -> int:
    """Return how many numbers the gradients have in a call, without the biases that have none."""
    model = averaged_net(0, sizes)
    without = model[1].bias.numel() + model[3].bias.numel() * (call == 0)
    return sum(parameter.numel() for parameter in model.parameters()) - without


@dataclass(frozen=True)
class GradientCall:
    """One call of the answer on a rank, with the gradients and samples of all ranks.

    Attributes:
        gradients, samples: one for each rank of the world.
        earlier: samples of each rank in the first call.
        members: the ranks of the group.
        rank: this rank.
    """

    gradients: list[torch.Tensor]
    samples: tuple[int, ...]
    earlier: tuple[int, ...]
    members: list[int]
    rank: int

    @property
    def weighted(self) -> torch.Tensor:
        """Return the sum of the group's gradients, each weighted by its samples."""
        return sum(self.samples[r] * self.gradients[r] for r in self.members)

    @property
    def total(self) -> int:
        """Return the number of the group's samples."""
        return sum(self.samples[r] for r in self.members)


def _judge_gradients(
    ranks: Ranks,
    report: Report,
    counts: Iterable[tuple[Partition, list[list[int]]]],
    weighted: bool,
) -> None:
    """Judge an answer that averages gradients, call by call, on each rank of each group.

    Args:
        counts: partitions, each with the samples of all ranks in each call.
    """
    alike = {"weighted": weighted, "sizes": widths(report.seed)}
    cases = []
    for partition, samples in counts:
        each = to_each(seed=report.seeds(WORLD), counts=list(zip(*samples, strict=True)))
        cases.append({"partition": partition, "each": each} | alike)

    def hint(case: dict[str, Any]) -> str:
        return _samples(of_calls(case, "counts")[-1])

    judge_groups(ranks, report, probe_average, cases, _gradient_steps, hint)


def _gradient_calls(answer: GroupAnswer) -> Iterator[GradientCall]:
    """Yield the calls of the answer on a rank."""
    counts = of_calls(answer.case, "counts")
    for k, samples in enumerate(counts):
        length = _gradient_length(answer.case["sizes"], k)
        dtype = torch.float64 if answer.case["partition"] is None else torch.float32
        gradients = [
            drawn_gradient(given["seed"] + 10 * k, count)[:length].to(dtype)
            for given, count in zip(answer.case["each"], samples, strict=True)
        ]
        yield GradientCall(gradients, samples, counts[0], answer.members, answer.rank)


def _gradient_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's communication and its gradients after each call."""
    members = answer.members
    weighted = answer.case["weighted"]
    wrong = _wrong_weighted if weighted else _wrong_averages
    why = ": one for each parameter that has a gradient" + weighted * ", and one for the samples"
    for call, outcome in zip(_gradient_calls(answer), answer.value, strict=True):
        calls = outcome["calls"]
        count = outcome["count"]
        yield communication(calls, *rules(members))
        yield facts({
            "You gave a gradient to a parameter that had none. Skip such a parameter": (
                outcome["others"]
            ),
            "You changed the parameters. Average parameter.grad, not the values": outcome["moved"],
            "Some all_reduces have fewer bytes than the gradients. Reduce each whole "
            "gradient, in its own dtype": _reduces_less(outcome),
        })
        expected = (call.weighted / call.total).tolist()
        multiple = replicas.multiple(outcome["gradient"], expected)
        mistakes = itertools.chain(wrong(call), multiple)
        where = on(members) + weighted * f", {_samples(call.samples)}"
        double = answer.case["partition"] is None and not weighted
        near = EXACT if double else TOLERANCE
        yield value(outcome["gradient"], expected, mistakes, what=where, tolerance=near)
        yield communication(calls, made("all_reduce", range(count, count + weighted + 1), why))


def _reduces_less(outcome: dict[str, Any]) -> bool:
    """Return whether there are enough all_reduces, but one has fewer bytes than its gradient."""
    count = outcome["count"]
    reduced = sorted((call["nbytes"] for call in outcome["calls"]), reverse=True)[:count]
    if len(reduced) < count:
        return False
    pairs = zip(reduced, outcome["nbytes"], strict=True)
    return any(nbytes < needed for nbytes, needed in pairs)


def of_calls(case: dict[str, Any], name: str) -> list[tuple]:
    """Return for each call of the answer the arguments of this name on all ranks."""
    return list(zip(*(one[name] for one in case["each"]), strict=True))


def _samples(counts: Sequence[int]) -> str:
    """Return in words how many samples each rank had."""
    return f"ranks 0 to 3 had {', '.join(map(str, counts))} samples"


@task("3.1", "average the gradients", points=3)
def average_gradients(ranks: Ranks, report: Report) -> None:
    """Check the mean of the group's gradients, by one all_reduce per parameter that has one."""
    counts = [(partition, [[1] * WORLD] * CALLS) for partition in EVERYWHERE]
    _judge_gradients(ranks, report, counts, weighted=False)


def _wrong_averages(call: GradientCall) -> Iterator[Mistake]:
    p = len(call.members)
    mine = call.gradients[call.rank]
    total = sum(call.gradients[r] for r in call.members)
    largest = torch.stack([call.gradients[r] for r in call.members]).amax(0)
    yield from table({
        "The gradients are still this rank's own. Call all_reduce for each parameter.grad, "
        "and store the result there": mine,
        f"The gradients are the sum over {p} ranks. Divide by the number of ranks, and "
        "store the result in parameter.grad": total,
        f"You divided the sum by {WORLD}, the size of the world, but this group has {p} "
        "ranks. Use dist.get_world_size(group)": total / WORLD,
        f"You divided the gradients by {p} twice. Remove one division": total / p**2,
        "You divided the gradients, but you never summed them over the ranks. Call all_reduce "
        "first": mine / p,
        "You cut the gradients to whole numbers. Keep their dtype": (total / p).trunc(),
        "You used the largest gradient of all ranks. Use op=dist.ReduceOp.SUM": largest,
    })


@task("3.2", "average over unequal parts", points=3)
def average_gradients_weighted(ranks: Ranks, report: Report) -> None:
    """Check the gradient of the mean over all samples of the group."""
    counts = [
        (partition, [sample_counts(seed, empty) for seed in seeds])
        for partition, seeds, empty in unequal_calls(report.seed)
    ]
    _judge_gradients(ranks, report, counts, weighted=True)


def unequal_calls(seed: int) -> Iterator[tuple[Partition, list[int], bool]]:
    """Yield partitions, the seeds of the calls, and whether a rank has no samples.

    The first call has many samples (an odd seed), and the second has few. Empty parts come last,
    because they could hide another mistake.
    """
    for step, partition in enumerate([*EVERYWHERE, *PARTITIONS[1::-1]]):
        yield partition, [2 * (seed + step) - k for k in (1, 0)], step >= len(EVERYWHERE)


def sample_counts(seed: int, empty: bool) -> list[int]:
    """Return each rank's samples, up to 350,000 for odd seeds; none on rank 1 if `empty`."""
    order = torch.randperm(WORLD, generator=torch.Generator().manual_seed(seed)).tolist()
    scale = 9_000 + 37 * (seed % 700) if seed % 2 else 1
    counts = [scale * (1, 3, 5, 11)[k] + 10 * (seed % 3) for k in order]  # the mean is the third
    return [0 if empty and rank == 1 else count for rank, count in enumerate(counts)]


def _wrong_weighted(call: GradientCall) -> Iterator[Mistake]:
    p = len(call.members)
    n = call.samples[call.rank]
    mine = call.gradients[call.rank]
    plain = sum(call.gradients[r] for r in call.members)
    weighted = call.weighted
    total = call.total
    mean = weighted / total
    by_world = weighted / sum(call.samples)
    by_earlier = weighted / sum(call.earlier[r] for r in call.members)
    yield from table({
        "You used the mean of the ranks' means, so a rank with few samples counts as much "
        "as one with many. Weight each gradient by samples / all samples": plain / p,
        "You weighted by samples, but you never divided. Divide "
        "by the number of all samples": weighted,
        f"You weighted by samples, and then divided by the {p} ranks. Divide by the samples "
        "of all ranks": weighted / p,
        f"You weighted by samples / all samples, and then you divided by the {p} ranks as well. "
        "Remove this division": mean / p,
        "You divided by the samples of the whole world. Count them with group=group": by_world,
        "You divided by the samples of an earlier call. Count them in each call": by_earlier,
        "You used the plain sum over the ranks. Weight each gradient by samples / total, and "
        "all_reduce the total": plain,
        "You divided by the samples of all ranks, but you didn't weight first. Multiply by this "
        "rank's samples": plain / total,
        "You weighted after the sum, so every gradient in it has this rank's weight. Scale "
        "this rank's gradient first, and then call all_reduce": plain * n / total,
        "You weighted the gradients, but you never summed them "
        "over the ranks. Call all_reduce": mine * n / total,
        "The gradients are still this rank's own. Store the result in parameter.grad": mine,
        "You cut the gradients to whole numbers. Keep their dtype": mean.trunc(),
    })
