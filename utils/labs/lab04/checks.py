"""Checks of lab 04: DistributedDataParallel, buckets, overlap, hooks, accumulation.

Each answer runs on groups of 1, 2, 3 and 4 ranks (`utils.checks.trials`). The checks read bytes and
operations from the ranks' records, so no verdict depends on how long something took.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import Mistake, inside, only, same, some, table
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import EVERYWHERE, WORLD, GroupAnswer, judge_each_group, judge_groups, on
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas, small_models
from utils.labs.shared.replicas import GroupTraining, ReferenceModel

from .buckets import assign_buckets as assign_buckets
from .hooks import fp16_hook as fp16_hook
from .overlap import hidden_share as hidden_share
from .probes import (
    MINIBATCHES,
    drawn_microbatches,
    drawn_minibatch,
    probe_accumulate,
    probe_step,
    reduced_bytes,
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


# -- 4.5: accumulation ------------------------------------------------------------------------


@task("4.5", "k microbatches, one communication", points=3)
def accumulate(ranks: Ranks, report: Report) -> None:
    """Check that the gradient equals a large batch's, with all_reduces for one backward."""
    ks = ([3, 2], [4, 3], [2, 5], [5, 4], [3, 1])  # 1 comes last, because it accumulates nothing
    given = {"seed": report.seed, "each": to_each(data_seed=report.seeds(WORLD))}
    cases = [
        {"partition": partition, "ks": of_case} | given
        for partition, of_case in zip(EVERYWHERE, ks, strict=True)
    ]
    judge_groups(ranks, report, probe_accumulate, cases, _accumulation_steps)


@functools.lru_cache(64)
def _gradients(model_seed: int, seed: int, k: int) -> list[torch.Tensor]:
    """Return the gradients of a rank's k microbatches."""
    reference = ReferenceModel(small_models.net(model_seed), 1.0)
    return [reference.gradient(*part) for part in drawn_microbatches(seed, k)]


def _accumulation_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's gradients after k microbatches, and how it got them."""
    case = answer.case
    members = answer.members
    for k, outcome in zip(case["ks"], answer.value, strict=True):
        where = f"{k} microbatch{'es' * (k != 1)} {on(members)}"
        changed = "You changed the weights. Let accumulate make gradients, and take no step"
        yield facts({changed: outcome["changed"]})
        yield communication(outcome["calls"], inside(members))
        gradients = {r: _gradients(case["seed"], case["each"][r]["data_seed"], k) for r in members}
        expected = (sum(map(sum, gradients.values())) / k / len(members)).tolist()
        likely = _wrong_accumulations(gradients, answer.rank, k)
        mistakes = itertools.chain(likely, replicas.multiple(outcome["gradient"], expected))
        yield value(outcome["gradient"], expected, mistakes, what=where)
        wrong = _wrong_communication(outcome) | _wrong_passes(outcome, k)
        yield facts({f"{where}: {text}": is_so for text, is_so in wrong.items()})


def _wrong_accumulations(
    gradients: dict[int, list[torch.Tensor]], rank: int, k: int
) -> Iterator[Mistake]:
    p = len(gradients)

    def mean_of(part: slice) -> torch.Tensor:
        return sum(sum(of_rank[part]) for of_rank in gradients.values()) / p

    expected = mean_of(slice(None)) / k
    mine = sum(gradients[rank])
    last = mean_of(slice(-1, None))
    last_two = mean_of(slice(-2, None))
    all_but_last = mean_of(slice(0, -1)) if k > 1 else 0 * mine
    first_and_own = mean_of(slice(0, 1)) + sum(gradients[rank][1:])
    zero_grad = "counts. Call zero_grad() before the first one only"
    yield from table({
        f"The gradients are {k} times too large. Divide each microbatch's loss by {k}": (
            expected * k
        ),
        "The gradients are this rank's own mean. Let the last backward communicate": mine / k,
        "The gradients are this rank's own sum. Let the last backward communicate, and divide "
        f"each loss by {k}": mine,
        f"You divided the gradients by {k} twice. Remove one division": expected / k,
        f"You divided by the {p} ranks, but DDP already averages. Remove the division": (
            expected / p
        ),
        f"Only the last microbatch {zero_grad}": last,
        f"Only the last microbatch, with 1/{k}, {zero_grad}": last / k,
        f"Only the last two microbatches {zero_grad.replace('counts', 'count')}": last_two / k,
        "The last microbatch is missing. Run it after no_sync()": all_but_last / k,
        "You communicated the first microbatch. Communicate the last one": first_and_own / k,
        "There are no gradients. Call backward() for each microbatch": 0 * mine,
    })


def _wrong_communication(outcome: dict[str, Any]) -> dict[str, object]:
    """Return what is wrong with the communication if the gradients are right."""
    calls = outcome["calls"]
    times = reduced_bytes(outcome["calls"]) / outcome["nbytes"]
    by_hand = [call["op"] for call in calls if call["blocking"] or call["op"] != "all_reduce"]
    return {
        f"You call {' and '.join(sorted(set(by_hand)))} yourself. Leave communication to DDP, "
        "which averages the gradients in the last backward, after no_sync()": by_hand,
        f"The ranks communicated the gradients' bytes {times:g} times. Run forward and backward "
        "of all but the last microbatch in model.no_sync()": times > 1,
        "The ranks did not communicate the gradients. Run the last backward after no_sync()": (
            times < 1
        ),
        "After the call, the model still doesn't communicate. Use `with model.no_sync():`, which "
        "ends with its block": outcome["quiet"],
    }


def _wrong_passes(outcome: dict[str, Any], k: int) -> dict[str, object]:
    """Return what is wrong with the forwards and backwards of k microbatches."""
    forwards, backwards = (outcome["passes"].count(kind) for kind in ("forward", "backward"))
    counts = (forwards, backwards) != (k, k)
    return {
        "You sent all microbatches through the model as one large batch, which needs the memory "
        "that you want to save. Call forward once for each microbatch": forwards < k,
        f"You called backward {backwards} times for {k} forwards, so the forwards keep memory "
        "that you want to save. Call backward() after each forward": backwards < k,
        f"You called forward {forwards} times and backward {backwards} times for {k} "
        "microbatches. Call each of them once per microbatch": counts,
        "You called forward before the backward of the previous microbatch, which needs the "
        "memory that you want to save. Call backward() after each forward": (
            outcome["passes"] != ["forward", "backward"] * k
        ),
        "DDP didn't communicate in the last backward only. Call the DDP model, not model.module, "
        "and make the last call after no_sync()": outcome["called"] != [False] * (k - 1) + [True],
    }
