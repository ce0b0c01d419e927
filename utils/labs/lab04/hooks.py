"""Task 4.4: the hook that compresses gradients. Its probe is in :mod:`.hook_probes`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import inside, only, table
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import PARTITIONS, WORLD, GroupAnswer, judge_groups, on
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas, small_models
from utils.labs.shared.replicas import ReferenceModel

from .hook_probes import HOOK_NET, LATER, WAITS, probe_hook
from .probes import reduced_bytes

FLOAT16 = 6e-3  # tolerance for a gradient that was reduced in half precision
VALUES = {
    "The value of the future is a list, as all_reduce leaves it. Return "
    "work.get_future().then(decompress)": "list",
    "The function that you pass to then() returns nothing. Return the averaged bucket": "NoneType",
    "The value of the future is float16. Copy it into bucket.buffer(), and return that "
    "float32 buffer": "float16",
}


@task("4.4", "a hook that compresses", points=4)
def fp16_hook(ranks: Ranks, report: Report) -> None:
    """Check mean gradients in half precision, with half of the bytes and no wait in the hook."""
    reference = ReferenceModel(small_models.net(report.seed, HOOK_NET), 1.0)
    # With a loss so many times as large, the mean gradient fits into float16, but no sum does.
    large = 40_000 / reference.gradient(*small_models.samples(report.seed, 8)).abs().max().item()
    seeds = report.seeds(WORLD)
    gradients = [
        [reference.gradient(*small_models.samples(seed + step, 8)) for seed in seeds]
        for step in (LATER, LATER + 1)
    ]
    given = {"seed": report.seed, "large": large, "each": to_each(data_seed=seeds)}
    cases = [{"partition": partition} | given for partition in PARTITIONS]
    judge_groups(ranks, report, probe_hook, cases, functools.partial(_hook_steps, gradients))


def _hook_steps(gradients: list[list[torch.Tensor]], answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge the communication of a rank's hook, and the gradients after it.

    Args:
        gradients: each rank's gradient from its samples, in the compared step and with late ranks.
    """
    members = answer.members
    outcome = answer.value
    where = on(members)
    yield communication(outcome["calls"], only("all_reduce"), inside(members))
    yield facts(_not_halved(outcome, where))
    yield value(outcome["value"], "float32", table(VALUES))

    def is_mean(row: list[float], own: list[torch.Tensor], words: str) -> Step:
        mean = sum(own[r] for r in members) / len(members)
        in_units = functools.partial(replicas.scaled, like=mean)
        wrong = _wrong_gradients(own, members, answer.rank)
        mistakes = table({text: in_units(one) for text, one in wrong.items()})
        got = in_units(torch.tensor(row))
        return value(got, in_units(mean), mistakes, what=words, tolerance=FLOAT16)

    units = "gradients in units of the largest"
    yield is_mean(outcome["gradient"], gradients[0], f"{where}: {units}")
    yield facts(_wrong_hook(outcome, where, len(members)))
    late = outcome.get("gradient where others are late")
    if late is not None:
        words = (
            f"{where}, when the other ranks are late: {units}. Don't use the sum before its "
            "future is complete"
        )
        yield is_mean(late, gradients[1], words)


def _wrong_gradients(
    gradients: list[torch.Tensor], members: list[int], rank: int
) -> dict[str, torch.Tensor]:
    p = len(members)
    summed = sum(gradients[r] for r in members)
    mine = gradients[rank]
    world = summed / WORLD
    late = mine / p
    return {
        "The gradients are sums. Divide by the size of the group": summed,
        f"You divided the sum by {WORLD}, the size of the world. "
        "Use dist.get_world_size(group)": world,
        "You divided the gradients by the number of ranks twice. Remove one division": (
            summed / p**2
        ),
        "The gradients are this rank's own. Return the reduced ones": mine,
        "The gradients are this rank's own, divided: the sum is missing, or it comes too late. "
        "Divide in then()": late,
    }


def _not_halved(outcome: dict[str, Any], where: str) -> dict[str, object]:
    """Return what is wrong if something else was reduced than half-precision gradients."""
    calls = outcome["calls"]
    nbytes = outcome["nbytes"]
    reduced = reduced_bytes(calls)
    half = nbytes // 2
    kinds = {call["dtype"] for call in calls} - {"float16"}
    return {
        "You don't call all_reduce for the bucket. Call it with async_op=True": not calls,
        f"{where}: You reduce {reduced} bytes for {nbytes} bytes of gradients. Reduce half "
        f"of them, {half}, as a float16 tensor": reduced != half,
        f"{where}: You reduce {', '.join(sorted(kinds))}. Reduce float16": kinds,
    }


def _wrong_hook(outcome: dict[str, Any], where: str, p: int) -> dict[str, object]:
    """Return what is wrong with a hook whose gradients are right."""
    calls = outcome["calls"]
    buckets = outcome["buckets"]
    blocks = any(call["blocking"] for call in calls)
    return {
        f"{where}: You call all_reduce {len(calls)} times for {buckets} buckets. Call it "
        "once for each bucket": len(calls) != buckets,
        f"{where}: With large gradients you get inf, because the sum of {p} of them passes "
        "65,504, the largest float16. Divide before the sum": outcome["overflows"],
        f"{where}: all_reduce blocks inside the hook, so backward waits. Use async_op=True": blocks,
        f"{where}: {WAITS}": outcome["waits"],
    }
