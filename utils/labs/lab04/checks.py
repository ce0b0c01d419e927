"""Checks of lab 04: DistributedDataParallel, buckets, overlap, hooks, accumulation.

The answers are tried on groups of 1, 2, 3 and 4 ranks (`utils.checks.trials`).
What was communicated is read from the records of the ranks, in bytes and operations: no verdict
depends on how long something took.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.checks.comparison import Mistake, inside, only, same, some, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, reading_answer, recorded
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import EVERYWHERE, WORLD, GroupAnswer, in_group, judge_groups, on, tried
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas
from utils.labs.shared.replicas import GroupTraining, Twin

from .buckets import assign_buckets as assign_buckets
from .hooks import fp16_hook as fp16_hook
from .hooks import noted_calls, of_gradients, reduced_bytes
from .overlap import hidden_share as hidden_share

# -- 4.1: DDP in a step -----------------------------------------------------------------------

# Samples of each minibatch; 1, 2, 3 and 4 ranks share them evenly.
MINIBATCHES = (12, 24, 12)


def _step_model(seed: int, awkward: bool) -> nn.Sequential:
    """Return the model to train; awkward: in double precision, and a parameter is frozen."""
    model = replicas.net(seed)
    model[3].bias.requires_grad_(not awkward)
    return model.double() if awkward else model


def _minibatch(seed: int, number: int, awkward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a minibatch of a rank's own samples."""
    dtype = torch.float64 if awkward else torch.float32
    return replicas.samples(seed + number, MINIBATCHES[number], dtype)


@in_group
def probe_step(
    user_ns: dict, *, rank: int, named: dict, data_seed: int, awkward: bool, rate: float
) -> dict:
    """Have a model of this rank's own seed wrapped, then take steps on samples of that seed."""
    module = _step_model(data_seed, awkward)
    model = answer_named(user_ns, "replicate")(module, **named)
    if not isinstance(model, DistributedDataParallel):
        return {"returned": type(model).__name__}
    wraps = model.module is module
    start = replicas.weights_of(model)
    members = dist.get_process_group_ranks(model.process_group)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate)
    called = noted_calls(model)
    steps = []
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    step_with = answer_named(user_ns, "ddp_step"), model, replicas.watched(model.module), optimizer
    nbytes = sum(p.nbytes for p in trained)
    with replicas.network():
        for number in range(len(MINIBATCHES)):
            taken.clear()
            called.clear()
            batch = _minibatch(data_seed, number, awkward)
            step = replicas.taken(*step_with, batch, **named)
            calls = of_gradients(step["calls"])
            step |= {"calls": calls, "times": reduced_bytes(calls) // nbytes}
            steps.append(step | {"taken": len(taken), "called": list(called)})
    return {"returned": "DDP", "wraps": wraps, "group": members, "start": start, "steps": steps}


STEP_MISTAKES = {
    "still": "the replica has not moved: optimizer.step()",
    "own": "each replica went its own way: call the DDP model, not model.module",
    "divided": "the gradients were divided by the number of ranks again: DDP has done so",
    "own, divided": "each replica went its own way: call the DDP model, not model.module",
    "summed": "the gradients were summed, DDP takes the mean",
    "sum over the part": "the loss is a sum over the part's samples; DDP wants the mean",
    "kept": "the gradients of the step before were still there: optimizer.zero_grad()",
}
LOSS_MISTAKES = {
    "own": "that of this rank's part. DDP averages gradients, not losses: reduce the loss yourself",
    "summed": "the sum of the ranks' means: divide by the number of ranks",
    "own, divided": "this rank's own, divided: all_reduce it",
    "divided": "divided by the number of ranks twice",
    "sum over samples": "a sum over the samples: divide by their number",
    "own of the sum": "the sum over this rank's part",
    "afterwards": "that after the step; expected the one before it",
}


@task("4.1", "DDP in a training step", points=3)
def ddp_step(ranks: Ranks, report: Report) -> None:
    """Check the first rank's weights at the start, then the sequential twin's steps."""
    each = to_each(data_seed=report.seeds(WORLD))
    draw = random.Random(report.seed)
    cases = [
        {"partition": partition, "awkward": False, "rate": draw.uniform(0.2, 0.8), "each": each}
        for partition in EVERYWHERE
    ]
    cases.append(cases[1] | {"awkward": True})
    right: list[bool] = []  # of each group
    for case, members, values in tried(ranks, report, probe_step, cases):
        twin = Twin(_step_model(each[members[0]]["data_seed"], case["awkward"]), case["rate"])
        start = replicas.weights_of(twin.model).tolist()
        replicated = [
            report.facts(rank, _wrong_replicas(of_rank, members, start))
            for rank, of_rank in zip(members, values, strict=True)
        ]
        # After a group that goes wrong, no other one is told how it trains.
        goes_on = all(replicated) and all(right)
        right.append(goes_on and _trains_as(twin, report, case, members, values))


def _trains_as(
    twin: Twin,
    report: Report,
    case: dict[str, Any],
    members: list[int],
    values: list[dict[str, Any]],
) -> bool:
    """Judge the steps of a group until one differs from the twin's; return whether none does."""
    seeds = [case["each"][rank]["data_seed"] for rank in members]
    training = GroupTraining(
        twin=twin,
        members=members,
        steps=list(zip(*(of_rank["steps"] for of_rank in values), strict=True)),
        minibatches=[
            [_minibatch(seed, number, case["awkward"]) for seed in seeds]
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
        f"replicate returned {kind}, expected a DistributedDataParallel": kind != "DDP",
        "replicate: DDP wraps a copy, which is all that is trained: wrap the model that was "
        "given": kind == "DDP" and not outcome["wraps"],
        f"replicate: DDP works on the ranks {group}, but the argument group was that of ranks "
        f"{members}: process_group=group": group != members,
        f"{on(members)}: the weights after replicate are not those of rank {members[0]}, the "
        "group's first: wrap the model that was given": not same(outcome.get("start"), start),
    }


def _around(members: list[int], step: dict[str, Any], compared: Iterator[Step]) -> Iterator[Step]:
    """Yield what a rank has to do beside the right step."""
    yield communication(step["calls"], only("all_reduce"), inside(members))
    yield from compared
    yield facts({
        f"the gradients were reduced {step['times']} times. backward() of a DDP model has averaged "
        "them already": step["times"] > 1,
        "DDP did not average the gradients: call the DDP model, not model.module, and outside of "
        "no_sync(). Its backward() communicates while it computes": step["called"] != [True],
        f"{step['taken']} calls of optimizer.step(), expected one: the optimizer moves the "
        "weights": step["taken"] != 1,
    })
    yield communication(step["calls"], some(members))


# -- 4.5: accumulation ------------------------------------------------------------------------

SIZE = 5  # samples of a microbatch


def _microbatches(seed: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return k microbatches; of five, the first one is the last one, too."""
    parts = [replicas.samples(seed + 100 * k + j, SIZE) for j in range(k)]
    return [parts[-1], *parts[1:]] if k == 5 else parts


@in_group
def probe_accumulate(
    user_ns: dict, *, rank: int, named: dict, data_seed: int, seed: int, ks: list
) -> list:
    """Ask to `accumulate` on one model, for each number of microbatches of this seed of data."""
    function = reading_answer(user_ns, "accumulate")
    answers = []
    model = DistributedDataParallel(replicas.net(seed), process_group=named.get("group"))
    before = replicas.weights_of(model)
    passes = []
    called = noted_calls(model)
    model.module.register_forward_pre_hook(lambda *_: passes.append("forward"))
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: passes.append("backward"))
    for k in ks:
        model.zero_grad()
        called.clear()
        passes.clear()
        _, calls = recorded(function, model, _microbatches(data_seed, k))
        answers.append({
            "gradient": replicas.gradient_of(model.module),
            "changed": not torch.equal(before, replicas.weights_of(model)),
            "passes": list(passes),
            "called": list(called),
            "quiet": not model.require_backward_grad_sync,
            "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
            "calls": of_gradients(calls),
        })
    return answers


@task("4.5", "k microbatches, one communication", points=3)
def accumulate(ranks: Ranks, report: Report) -> None:
    """Check the gradient of one large batch; all_reduces for one backward."""
    ks = ([3, 2], [4, 3], [2, 5], [5, 4], [3, 1])  # 1 leaves nothing to accumulate: last
    given = {"seed": report.seed, "each": to_each(data_seed=report.seeds(WORLD))}
    cases = [
        {"partition": partition, "ks": of_case} | given
        for partition, of_case in zip(EVERYWHERE, ks, strict=True)
    ]
    judge_groups(ranks, report, probe_accumulate, cases, _accumulation_steps)


@functools.lru_cache(64)
def _gradients(model_seed: int, seed: int, k: int) -> list[torch.Tensor]:
    """Return the gradients of a rank's k microbatches."""
    twin = Twin(replicas.net(model_seed), 1.0)
    return [twin.gradient(*part) for part in _microbatches(seed, k)]


def _accumulation_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a rank's gradients are after k microbatches, and how they come about."""
    case = answer.case
    members = answer.members
    for k, outcome in zip(case["ks"], answer.value, strict=True):
        where = f"{k} microbatch{'es' * (k != 1)} {on(members)}"
        changed = "the weights have changed: accumulate makes gradients, no step"
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
    zero_grad = "counts: zero_grad() belongs before the first"
    yield from table({
        f"the gradients are {k} times too large: each microbatch counts 1/{k}": expected * k,
        "the gradients are this rank's own mean: the last backward must communicate": mine / k,
        "the gradients are this rank's own sum: the last backward must communicate, and each "
        f"microbatch counts 1/{k}": mine,
        f"the gradients were divided by {k} twice": expected / k,
        f"divided by the {p} ranks, too: DDP has done so": expected / p,
        f"only the last microbatch {zero_grad}": last,
        f"only the last microbatch, with 1/{k}, {zero_grad}": last / k,
        f"only the last two microbatches {zero_grad.replace('counts', 'count')}": last_two / k,
        "only the last is missing: it takes part, outside of no_sync()": all_but_last / k,
        "only the first microbatch was communicated: the last backward is the one that "
        "must": first_and_own / k,
        "there are no gradients: call backward() for each microbatch": 0 * mine,
    })


def _wrong_communication(outcome: dict[str, Any]) -> dict[str, object]:
    """Return what is wrong with what was communicated for right gradients."""
    calls = outcome["calls"]
    times = reduced_bytes(outcome["calls"]) / outcome["nbytes"]
    by_hand = [call["op"] for call in calls if call["blocking"] or call["op"] != "all_reduce"]
    return {
        f"calls {' and '.join(sorted(set(by_hand)))} itself. Leave communication to DDP: the last "
        "backward, outside of no_sync(), does it while it computes": by_hand,
        f"{times:g} times the gradients' bytes were communicated, expected once. For all but the "
        "last microbatch, forward and backward go into model.no_sync()": times > 1,
        "the gradients were not communicated": times < 1,
        "the model is still quiet after the call, so the next backward does not communicate: "
        "no_sync() ends where the with ends": outcome["quiet"],
    }


def _wrong_passes(outcome: dict[str, Any], k: int) -> dict[str, object]:
    """Return what is wrong with the forwards and backwards of k microbatches."""
    forwards, backwards = (outcome["passes"].count(kind) for kind in ("forward", "backward"))
    counts = (forwards, backwards) != (k, k)
    return {
        "all microbatches went through the model as one large batch, which needs the memory that "
        "accumulating saves: one forward for each": forwards < k,
        f"one backward for {k} forwards keeps what each of them computed until the end, which "
        "needs the memory that accumulating saves: call backward() after each "
        "forward": backwards < k,
        f"{forwards} forwards and {backwards} backwards for {k} microbatches: one of each": counts,
        "a forward comes before the backward of the microbatch before. So the memory that "
        "accumulating saves is in use: call backward() after each "
        "forward": outcome["passes"] != ["forward", "backward"] * k,
        "call the DDP model, not model.module, and the last time outside of no_sync(): DDP "
        "communicates in that backward": outcome["called"] != [False] * (k - 1) + [True],
    }
