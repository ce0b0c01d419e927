"""Checks of lab 04: DistributedDataParallel, buckets, overlap, hooks, accumulation.

The answers are tried on groups of 1, 2, 3 and 4 ranks (`utils.checks.groups`).
What was communicated is read from the records of the ranks, in bytes and operations: no verdict
depends on how long something took.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from utils.checks.calls import inside, only, some
from utils.checks.functions import Results
from utils.checks.groups import (
    EVERYWHERE,
    PARTITIONS,
    WORLD,
    Group,
    GroupAnswer,
    Partition,
    enough,
    in_group,
    judge_groups,
    keywords,
    on,
    tried,
)
from utils.checks.mistakes import Mistake, same, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, as_dict, reading_answer, recorded, told
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared import replicas
from utils.labs.shared.replicas import GroupTraining, Twin

from . import buckets, ddp_notes, overlap

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
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    awkward: bool,
    rate: float,
) -> dict:
    """Have a model of this rank's own seed wrapped, then take steps on samples of that seed."""
    named = keywords(partition, group)
    module = _step_model(own, awkward)
    model = answer_named(user_ns, "replicate")(module, **named)
    if not isinstance(model, DistributedDataParallel):
        return {"returned": type(model).__name__}
    wraps = model.module is module
    start = replicas.weights_of(model)
    members = dist.get_process_group_ranks(model.process_group)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate)
    called = ddp_notes.noted_calls(model)
    steps = []
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    step_with = answer_named(user_ns, "ddp_step"), model, replicas.watched(model.module), optimizer
    with replicas.network():
        batches = [_minibatch(own, number, awkward) for number in range(len(MINIBATCHES))]
        for batch in batches:
            taken.clear()
            called.clear()
            step = replicas.taken(*step_with, batch, **named)
            steps.append(step | {"taken": len(taken), "called": list(called)})
    for step in steps:
        step["calls"] = ddp_notes.of_gradients(step["calls"])
        step["times"] = ddp_notes.reduced_bytes(step["calls"]) // sum(p.nbytes for p in trained)
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
    each = to_each(own=report.seeds(WORLD))
    draw = random.Random(report.seed)
    cases = [
        {"partition": partition, "awkward": False, "rate": draw.uniform(0.2, 0.8), "each": each}
        for partition in EVERYWHERE
    ]
    cases.append(cases[1] | {"awkward": True})
    right: list[bool] = []  # of each group
    for case, members, values in tried(ranks, report, probe_step, cases):
        twin = Twin(_step_model(each[members[0]]["own"], case["awkward"]), case["rate"])
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
    training = GroupTraining(
        twin=twin,
        members=members,
        steps=list(zip(*(of_rank["steps"] for of_rank in values), strict=True)),
        minibatches=[
            [_minibatch(case["each"][rank]["own"], number, case["awkward"]) for rank in members]
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
    wrong = {
        f"the gradients were reduced {step['times']} times. backward() of a DDP model has averaged "
        "them already": step["times"] > 1,
        "DDP did not average the gradients: call the DDP model, not model.module, and outside of "
        "no_sync(). Its backward() communicates while it computes": step["called"] != [True],
        f"{step['taken']} calls of optimizer.step(), expected one: the optimizer moves the "
        "weights": step["taken"] != 1,
    }
    yield facts(wrong)
    yield communication(step["calls"], some(members))


# -- 4.2: buckets -----------------------------------------------------------------------------


def probe_assign(user_ns: dict, *, rank: int, cases: list[dict]) -> list:
    """Ask for `assign_buckets` of every case."""
    function = reading_answer(user_ns, "assign_buckets")
    results = Results()
    answers = [function(**copy.deepcopy(case)) for case in cases]
    for result in answers:
        results.add("assign_buckets", result)
    return told(answers)


def probe_real_buckets(user_ns: dict, *, rank: int, widths: list[int], cap: int) -> dict:
    """Return what DDP really reduces in its third step, and what the answer foretells."""
    model = DistributedDataParallel(replicas.net(0, widths), bucket_cap_mb=cap / 2**20)
    images = torch.ones(2, widths[0])
    for _ in range(3):
        model.zero_grad()
        _, calls = recorded(lambda: model(images).sum().backward())
    sizes = [p.nbytes for p in reversed(list(model.parameters()))]
    buckets = reading_answer(user_ns, "assign_buckets")(sizes, cap, cap)
    return {
        "real": [call["nbytes"] for call in calls if call["op"] == "all_reduce"],
        "foretold": [sum(sizes[k] for k in bucket) for bucket in buckets],
    }


@task("4.2", "which gradient travels in which bucket", points=2)
def assign_buckets(ranks: Ranks, report: Report) -> None:
    """Check DDP's own assignment, on random sizes and on a real DDP."""
    cases = [{"cases": buckets.cases(report.seed)}]
    if not report.judge_cases(ranks, probe_assign, cases, _assignment_steps):
        return
    draw = random.Random(report.seed)
    widths = [6, *(draw.choice((8, 20, 32, 50)) for _ in range(5)), 4]
    given = {"widths": widths, "cap": draw.choice((1500, 4000, 7000))}
    for answer in report.answers(ranks, probe_real_buckets, **given):
        foretold, real = answer.value["foretold"], answer.value["real"]
        report.expect(answer.rank, "bytes of the buckets of a real DDP", foretold, real)


def _assignment_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield that all gradients are in the right buckets."""
    form = "a list of lists of indices"
    for arguments, result in zip(case["cases"], answer.value, strict=True):
        sizes, cap, first_cap = (arguments[name] for name in ("sizes", "cap", "first_cap"))
        call = f"assign_buckets({short(sizes)}, {cap}, {first_cap})"
        mistakes = buckets.wrong_buckets(arguments, result)
        yield value(result, buckets.assign(**arguments), mistakes, what=call, form=form)


# -- 4.3: what is hidden ----------------------------------------------------------------------

# How exact the share must be: a numerical answer, on a fine grid, is one too.
GRID = 3e-3


def probe_hidden(user_ns: dict, *, rank: int, cases: list, begin: float, end: float) -> list:
    """Ask for `hidden_share` of every case; in the end of the first one again."""
    function = reading_answer(user_ns, "hidden_share")
    given = [[tuple(pair) for pair in transfers] for transfers in [*cases, cases[0]]]
    return [replicas.one_number(told(function(transfers, begin, end))) for transfers in given]


@task("4.3", "how much is hidden", points=3)
def hidden_share(ranks: Ranks, report: Report) -> None:
    """Check the share on made-up intervals, then on a step that the ranks really take."""
    cases = overlap.cases(report.seed)
    right = [
        _shares_right(ranks, report, cases, begin=100.0, end=120.0),
        # Again in tenths of a microsecond, around 0.
        _shares_right(ranks, report, _moved(cases, 1e-7, 0.0), begin=-1e-6, end=1e-6),
        # On the clock of a machine that runs for days.
        _shares_right(ranks, report, _moved(cases, 1e-3, 3e5), begin=3e5 - 0.01, end=3e5 + 0.01),
    ]
    if all(right) and enough(ranks, report, WORLD):
        _judge_measured_step(ranks, report)


def _moved(cases: dict[str, list], unit: float, middle: float) -> dict[str, list]:
    """Return the cases in another unit of time, with the middle of backward at another time."""
    return {
        name: [[middle + unit * (t - 110) for t in transfer] for transfer in transfers]
        for name, transfers in cases.items()
    }


def _shares_right(
    ranks: Ranks, report: Report, cases: dict[str, list], *, begin: float, end: float
) -> bool:
    """Judge the shares of all cases, and of the first one again; return whether all are right."""
    again = [*cases.items(), ("the first case again", next(iter(cases.values())))]

    def judge(_: dict[str, Any], answer: Reply) -> Iterator[Step]:
        form = "a number from 0 to 1"
        for (name, transfers), share in zip(again, answer.value, strict=True):
            expected = overlap.hidden(transfers, begin, end)
            mistakes = overlap.wrong_shares(transfers, share, begin, end)
            backward = f"backward from {begin:g} to {end:g}"
            case = f"{name}: transfers {short(transfers)}, {backward}"
            yield value(share, expected, mistakes, what=case, form=form, tolerance=GRID)

    given = {"cases": list(cases.values()), "begin": begin, "end": end}
    return report.judge_cases(ranks, probe_hidden, [given], judge)


def _judge_measured_step(ranks: Ranks, report: Report) -> None:
    """Judge the share of a step that two ranks really take, which hides something."""
    answers = report.answers(ranks, overlap.probe_overlap)
    steps = [answer.value for answer in answers if answer.value]
    words = "hidden share of a measured step (times in seconds, milliseconds apart)"
    right = []
    hidden = []
    for rank, step in enumerate(steps):
        share = step.pop("share")
        hidden.append(overlap.hidden(**step))
        right.append(report.judge(rank, share, hidden[-1], what=words, tolerance=GRID))
    if steps and all(right):
        nothing = "nothing was hidden in a step of DDP on an emulated 1 Gbit/s network"
        report.facts(None, {nothing: max(hidden) <= 0})


# -- 4.4: a hook ------------------------------------------------------------------------------

_HOOK_NET = (6, 24, 24, 24, 24, 4)  # two of its buckets are of one length
FLOAT16 = 6e-3  # how exact a gradient must be that was reduced in half precision
SLOW = (4e-3, 1e9)  # a network with latency, so that no all_reduce ends at once


@in_group
def probe_hook(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    seed: int,
    large: float,
) -> dict:
    """Use `fp16_hook` in DDP; return the third step's gradients, how they came, and large ones.

    Args:
        own: seed of this rank's images.
        seed: of the model, and of the images of the large gradients.
    """
    from torch_mpi.record import log

    small = {"process_group": group, "bucket_cap_mb": 800 / 2**20}
    model = DistributedDataParallel(replicas.net(seed, _HOOK_NET), **small)
    answer: dict = {"buckets": 0, "waits": 0, "value": None, "late": False}
    model.register_comm_hook(
        group, ddp_notes.noted_hook(answer_named(user_ns, "fp16_hook"), answer, group)
    )
    images, labels = replicas.samples(own, 8)
    for _ in range(3):  # from the second step on there are several buckets
        model.zero_grad()
        answer["buckets"] = 0
        mark = log.mark()
        with replicas.network(*SLOW):
            functional.cross_entropy(model(images), labels).backward()
        calls = [as_dict(call) | {"dtype": call.dtype} for call in log.since(mark)]
    counted = answer | {
        "gradient": replicas.gradient_of(model.module),
        "nbytes": sum(p.nbytes for p in model.parameters()),
        "calls": ddp_notes.of_gradients(calls),
    }
    model.zero_grad()
    blocks = answer["waits"] > 0 or any(call["blocking"] for call in counted["calls"])
    if ddp_notes.can_be_late(group, blocks):
        answer["late"] = True
        functional.cross_entropy(model(images), labels).backward()
        answer["late"] = False
        counted["gradient where others are late"] = replicas.gradient_of(model.module)
        model.zero_grad()
    with replicas.network(*SLOW):
        images, labels = replicas.samples(seed, 8)
        (large * functional.cross_entropy(model(images), labels)).backward()
    return counted | {"overflows": not bool(replicas.gradient_of(model.module).isfinite().all())}


VALUES = {
    "the value of the future is a list, as all_reduce leaves it: with .then(decompress) it becomes "
    "what decompress returns": "list",
    "the function that then() calls returns nothing: return the averaged bucket": "NoneType",
    "the value of the future is float16, expected the bucket in float32: copy it into "
    "bucket.buffer(), and return that": "float16",
}


@task("4.4", "a hook that compresses", points=4)
def fp16_hook(ranks: Ranks, report: Report) -> None:
    """Check mean gradients to half precision, half of the bytes, and no wait inside."""
    twin = Twin(replicas.net(report.seed, _HOOK_NET), 1.0)
    # A loss so many times as large has gradients whose mean fits into float16, but no sum does.
    large = 40_000 / twin.gradient(*replicas.samples(report.seed, 8)).abs().max().item()
    seeds = report.seeds(WORLD)
    gradients = [twin.gradient(*replicas.samples(seed, 8)) for seed in seeds]
    given = {"seed": report.seed, "large": large, "each": to_each(own=seeds)}
    cases = [{"partition": partition} | given for partition in PARTITIONS]
    judge = functools.partial(_hook_steps, gradients)
    judge_groups(ranks, report, probe_hook, cases, judge)


def _hook_steps(gradients: list[torch.Tensor], answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a rank's hook has to communicate, and what the gradients are afterwards.

    Args:
        gradients: of all ranks, those of their own samples.
    """
    members = answer.members
    outcome = answer.value
    where = on(answer.members)
    yield communication(outcome["calls"], only("all_reduce"), inside(members))
    yield facts(_not_halved(outcome, where))
    yield value(outcome["value"], "float32", table(VALUES))
    mean = sum(gradients[r] for r in members) / len(members)
    in_units = functools.partial(replicas.scaled, like=mean)
    wrong = _wrong_gradients(gradients, members, answer.rank)
    mistakes = table({text: in_units(row) for text, row in wrong.items()})

    def is_mean(row: list[float], words: str) -> Step:
        got = in_units(torch.tensor(row))
        return value(got, in_units(mean), mistakes, what=words, tolerance=FLOAT16)

    units = "gradients in units of the largest"
    yield is_mean(outcome["gradient"], f"{where}: {units}")
    yield facts(_wrong_hook(outcome, where, len(members)))
    late = outcome.get("gradient where others are late")
    if late is not None:
        words = (
            f"{where}, where the others are late: {units}. The hook must not use the sum before "
            "its future is complete"
        )
        yield is_mean(late, words)


def _wrong_gradients(
    gradients: list[torch.Tensor], members: list[int], rank: int
) -> dict[str, torch.Tensor]:
    """Return what likely mistakes give."""
    p = len(members)
    summed = sum(gradients[r] for r in members)
    mine = gradients[rank]
    world = summed / WORLD
    late = mine / p
    return {
        "the gradients are sums: divide by the size of the group": summed,
        f"the sum was divided by {WORLD}, the size of the world: dist.get_world_size(group)": world,
        "the gradients were divided by the number of ranks twice": summed / p**2,
        "the gradients are this rank's own: return the reduced ones": mine,
        "the gradients are this rank's own, divided: nothing was summed, or it came too late": late,
    }


def _not_halved(outcome: dict[str, Any], where: str) -> dict[str, object]:
    """Return whether something else was reduced than the gradients in half precision."""
    calls = outcome["calls"]
    nbytes = outcome["nbytes"]
    reduced = ddp_notes.reduced_bytes(calls)
    half = nbytes // 2
    kinds = {call["dtype"] for call in calls} - {"float16"}
    return {
        "there is no all_reduce of the bucket": not calls,
        f"{where}: {reduced} bytes in all_reduces of {nbytes} bytes of gradients; expected "
        f"half of them, {half}: reduce a float16 tensor": reduced != half,
        f"{where}: reduced {', '.join(sorted(kinds))}, expected float16": kinds,
    }


def _wrong_hook(outcome: dict[str, Any], where: str, p: int) -> dict[str, object]:
    """Return what is wrong with a hook whose gradients are right."""
    calls = outcome["calls"]
    buckets = outcome["buckets"]
    blocks = any(call["blocking"] for call in calls)
    return {
        f"{where}: {len(calls)} all_reduces for {buckets} buckets; one each": len(calls) != buckets,
        f"{where}: with large gradients there is inf: the sum of {p} of them passes 65,504, where "
        "float16 ends. Divide before the sum": outcome["overflows"],
        f"{where}: all_reduce blocks inside of the hook, and backward waits: async_op=True": blocks,
        f"{where}: {ddp_notes.WAITS}": outcome["waits"],
    }


# -- 4.5: accumulation ------------------------------------------------------------------------

SIZE = 5  # samples of a microbatch


def _microbatches(seed: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return k microbatches; of five, the first one is the last one, too."""
    parts = [replicas.samples(seed + 100 * k + j, SIZE) for j in range(k)]
    return [parts[-1], *parts[1:]] if k == 5 else parts


@in_group
def probe_accumulate(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, own: int, seed: int, ks: list
) -> list:
    """Ask to `accumulate` on one model, for each number of microbatches; ``own`` is their seed."""
    function = reading_answer(user_ns, "accumulate")
    answers = []
    model = DistributedDataParallel(replicas.net(seed), process_group=group)
    before = replicas.weights_of(model)
    passes = []
    called = ddp_notes.noted_calls(model)
    model.module.register_forward_pre_hook(lambda *_: passes.append("forward"))
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: passes.append("backward"))
    for k in ks:
        model.zero_grad()
        called.clear()
        passes.clear()
        _, calls = recorded(function, model, _microbatches(own, k))
        answers.append({
            "gradient": replicas.gradient_of(model.module),
            "changed": not torch.equal(before, replicas.weights_of(model)),
            "passes": list(passes),
            "called": list(called),
            "quiet": not model.require_backward_grad_sync,
            "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
            "calls": ddp_notes.of_gradients(calls),
        })
    return answers


@task("4.5", "k microbatches, one communication", points=3)
def accumulate(ranks: Ranks, report: Report) -> None:
    """Check the gradient of one large batch; all_reduces for one backward."""
    ks = ([3, 2], [4, 3], [2, 5], [5, 4], [3, 1])  # 1 leaves nothing to accumulate: last
    seeds = report.seeds(WORLD)
    given = {"seed": report.seed, "each": to_each(own=seeds)}
    cases = [
        {"partition": partition, "ks": of_case} | given
        for partition, of_case in zip(EVERYWHERE, ks, strict=True)
    ]

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        for k, outcome in zip(answer.case["ks"], answer.value, strict=True):
            gradients = {r: _gradients(report.seed, seeds[r], k) for r in answer.members}
            yield from _accumulation_steps(outcome, gradients, answer.rank, k)

    judge_groups(ranks, report, probe_accumulate, cases, judge)


@functools.lru_cache(64)
def _gradients(model_seed: int, seed: int, k: int) -> list[torch.Tensor]:
    """Return the gradients of a rank's k microbatches."""
    twin = Twin(replicas.net(model_seed), 1.0)
    return [twin.gradient(*part) for part in _microbatches(seed, k)]


def _accumulation_steps(
    outcome: dict[str, Any], gradients: dict[int, list[torch.Tensor]], rank: int, k: int
) -> Iterator[Step]:
    """Yield what a rank's gradients are after k microbatches, and how they come about.

    Args:
        gradients: by rank of the group, of each of its microbatches.
    """
    members = list(gradients)
    where = f"{k} microbatch{'es' * (k != 1)} {on(members)}"
    changed = "the weights have changed: accumulate makes gradients, no step"
    yield facts({changed: outcome["changed"]})
    yield communication(outcome["calls"], inside(members))
    expected = (sum(map(sum, gradients.values())) / k / len(members)).tolist()
    mistakes = itertools.chain(
        _wrong_accumulations(gradients, rank, k), replicas.multiple(outcome["gradient"], expected)
    )
    yield value(outcome["gradient"], expected, mistakes, what=where)
    wrong = _wrong_communication(outcome) | _wrong_passes(outcome, k)
    yield facts({f"{where}: {text}": is_so for text, is_so in wrong.items()})


def _wrong_accumulations(
    gradients: dict[int, list[torch.Tensor]], rank: int, k: int
) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""
    p = len(gradients)

    def mean_of(part: slice) -> torch.Tensor:
        return sum(sum(of_rank[part]) for of_rank in gradients.values()) / p

    expected = mean_of(slice(None)) / k
    mine = sum(gradients[rank])
    last, last_two = mean_of(slice(-1, None)), mean_of(slice(-2, None))
    all_but_last = mean_of(slice(0, -1)) if k > 1 else 0 * mine
    first_and_own = mean_of(slice(0, 1)) + sum(gradients[rank][1:])
    zero_grad = "counts: zero_grad() belongs before the first"
    wrong = {
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
    }
    yield from table(wrong)


def _wrong_communication(outcome: dict[str, Any]) -> dict[str, object]:
    """Return what is wrong with what was communicated for right gradients."""
    calls = outcome["calls"]
    times = ddp_notes.reduced_bytes(outcome["calls"]) / outcome["nbytes"]
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
