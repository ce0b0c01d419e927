"""Checks of lab 04: DistributedDataParallel, buckets, overlap, hooks, accumulation, norms.

Each answer runs on groups of 1, 2, 3 and 4 ranks (`utils.checks.trials`). The checks read bytes and
operations from the ranks' records, so no verdict depends on how long something took.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

from utils.checks.comparison import inside, only, same, some
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, facts, task, to_each
from utils.checks.trials import EVERYWHERE, WORLD, judge_each_group, on
from utils.cluster.questions import Ranks
from utils.labs.shared import small_models
from utils.labs.shared.replicas import GroupTraining, ReferenceModel

from .accumulation import accumulate as accumulate
from .accumulation import accumulate_tokens as accumulate_tokens
from .buckets import assign_buckets as assign_buckets
from .hooks import fp16_hook as fp16_hook
from .norms import synced_norm as synced_norm
from .overlap import hidden_share as hidden_share
from .probes import (
    MINIBATCHES,
    drawn_minibatch,
    probe_step,
    step_model,
)

# -- 4.1: DDP in a step -----------------------------------------------------------------------


STEP_MISTAKES = {
    "still": "The replica has not moved. Call optimizer.step()",
    "own": "Each replica took its own step. Call the DDP model, not model.module",
    "divided": "You divided the gradients by the number of ranks, but DDP already averages. Remove "
    "the division",
    "own, divided": "Each replica took its own step. Call the DDP model, not model.module",
    "summed": "You summed the gradients, but DDP averages them. Leave the gradients to DDP",
    "sum over the part": "Your loss is a sum over the part's samples. Use their mean",
    "kept": "The gradients of the step before were still there. Call optimizer.zero_grad()",
}
LOSS_MISTAKES = {
    "own": "You returned the loss of this rank's part. DDP averages gradients, not losses, so "
    "reduce the loss yourself",
    "summed": "You returned the sum of the ranks' means. Divide it by the number of ranks",
    "own, divided": "You divided this rank's loss. Call all_reduce first",
    "divided": "You divided by the number of ranks twice. Remove one division",
    "sum over samples": "You returned a sum over the samples. Divide it by their number",
    "own of the sum": "You returned the sum over this rank's part. Return the minibatch's mean",
    "afterwards": "You returned the loss after the step. Return the loss before it",
}


@task("4.1", "DDP in a training step", points=3)
def ddp_step(ranks: Ranks, report: Report) -> None:
    """Check that all ranks begin with the first rank's weights, and take the sequential steps."""
    each = to_each(data_seed=report.seeds(WORLD))
    draw = random.Random(report.seed)
    cases = [
        {"partition": partition, "awkward": False, "rate": draw.uniform(0.2, 0.8), "each": each}
        for partition in EVERYWHERE
    ]
    cases.append(cases[1] | {"awkward": True})
    right: list[bool] = []  # for each group

    def judge(case: dict[str, Any], members: list[int], values: list[dict]) -> None:
        model = step_model(each[members[0]]["data_seed"], case["awkward"])
        reference = ReferenceModel(model, case["rate"])
        start = small_models.weights_of(reference.model).tolist()
        replicated = [
            report.follow(rank, [facts(_wrong_replicas(of_rank, members, start))])
            for rank, of_rank in zip(members, values, strict=True)
        ]
        # If one group is wrong, the training of later groups isn't judged.
        goes_on = all(replicated) and all(right)
        right.append(goes_on and _trains_as(reference, report, case, members, values))

    judge_each_group(ranks, report, probe_step, cases, judge)


def _trains_as(
    reference: ReferenceModel,
    report: Report,
    case: dict[str, Any],
    members: list[int],
    values: list[dict[str, Any]],
) -> bool:
    """Judge a group's steps up to the first wrong one; return whether all are right."""
    seeds = [case["each"][rank]["data_seed"] for rank in members]
    training = GroupTraining(
        reference=reference,
        members=members,
        steps=list(zip(*(of_rank["steps"] for of_rank in values), strict=True)),
        minibatches=[
            [drawn_minibatch(seed, number, case["awkward"]) for seed in seeds]
            for number in range(len(MINIBATCHES))
        ],
        where=[
            f"step {number}, minibatch of {count} {on(members)}"
            for number, count in enumerate(MINIBATCHES)
        ],
    )
    mistakes = (STEP_MISTAKES, LOSS_MISTAKES)
    around = functools.partial(_around, members)
    right = list(training.right_steps(report, mistakes, around, equal=True))
    return len(right) == len(MINIBATCHES)


def _wrong_replicas(
    outcome: dict[str, Any], members: list[int], start: list[float]
) -> dict[str, bool]:
    """Return what is wrong with a replica before the first step."""
    kind = outcome["returned"]
    group = outcome.get("group")
    return {
        f"replicate returned {kind}. Return a DistributedDataParallel": kind != "DDP",
        "replicate: DDP wraps a copy, so only the copy trains. Wrap the given model": (
            kind == "DDP" and not outcome["wraps"]
        ),
        f"replicate: DDP works on the ranks {group}, but the argument group has the ranks "
        f"{members}. Pass process_group=group": group != members,
        f"{on(members)}: After replicate, the weights differ from rank {members[0]}'s, the "
        "group's first rank. Wrap the given model": not same(outcome.get("start"), start),
    }


def _around(members: list[int], step: dict[str, Any], compared: Iterator[Step]) -> Iterator[Step]:
    """Yield the steps that judge a rank, with the comparison of the training step among them."""
    yield communication(step["calls"], only("all_reduce"), inside(members))
    yield from compared
    yield facts({
        f"The ranks reduced the gradients {step['times']} times. Leave this to backward(), which "
        "averages them in a DDP model": step["times"] > 1,
        "DDP did not average the gradients. Call the DDP model, not model.module, and call it "
        "outside no_sync()": step["called"] != [True],
        f"You called optimizer.step() {step['taken']} times. Call it once": step["taken"] != 1,
        small_models.SWITCHED: step["switched"],
    })
    yield communication(step["calls"], some(members))
