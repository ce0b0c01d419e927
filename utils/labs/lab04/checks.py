"""Checks of lab 04: DistributedDataParallel, buckets, overlap, hooks, accumulation.

The answers are tried on groups of 1, 2, 3 and 4 ranks (`utils.checks.groups`).
What was communicated is read from the records of the ranks, in bytes and operations: no verdict
depends on how long something took.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from utils.checks.calls import Calls, inside, only, some
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
from utils.labs.shared.replicas import GroupStep, Twin

from . import overlap

# What DDP communicates beside gradients: the order in which they were ready, once.
HOUSEKEEPING = {"broadcast", "all_gather"}


def _of_gradients(calls: Calls) -> Calls:
    """Without what DDP does for itself."""
    return [call for call in calls if call["op"] not in HOUSEKEEPING]


def _bytes(calls: Calls) -> int:
    """Return how many bytes were reduced."""
    return sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")


# -- 4.1: DDP in a step -----------------------------------------------------------------------

# Samples of each minibatch; 1, 2, 3 and 4 ranks share them evenly.
MINIBATCHES = (12, 24, 12)


def _step_model(seed: int, awkward: bool) -> nn.Sequential:
    """Awkward: in double precision, and a parameter is frozen."""
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
    """`replicate` a model of this rank's own seed, then some steps on samples of that seed."""
    named = keywords(partition, group)
    given = _step_model(own, awkward)
    model = answer_named(user_ns, "replicate")(given, **named)
    if not isinstance(model, DistributedDataParallel):
        return {"returned": type(model).__name__}
    wraps = model.module is given
    start, members = replicas.weights_of(model), dist.get_process_group_ranks(model.process_group)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, called = torch.optim.SGD(trained, lr=rate), _called(model)
    steps, taken = [], []
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
        step["calls"] = _of_gradients(step["calls"])
        step["times"] = _bytes(step["calls"]) // sum(p.nbytes for p in trained)
    return {"returned": "DDP", "wraps": wraps, "group": members, "start": start, "steps": steps}


def _called(model: DistributedDataParallel) -> list[bool]:
    """From now on, of each call of the DDP model itself: whether its backward communicates."""
    calls, forward = [], model.forward

    def call(*args, **kwargs):
        calls.append(model.require_backward_grad_sync)
        return forward(*args, **kwargs)

    model.forward = call
    return calls


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
    """The first rank's weights at the start, then the sequential twin's steps."""
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
    awkward = case["awkward"]
    seeds = [case["each"][rank]["own"] for rank in members]
    mistakes, around = (STEP_MISTAKES, LOSS_MISTAKES), functools.partial(_around, members)
    for number, count in enumerate(MINIBATCHES):
        steps = [of_rank["steps"][number] for of_rank in values]
        batch = replicas.composed([_minibatch(seed, number, awkward) for seed in seeds], steps)
        where = f"step {number}, minibatch of {count} {on(members)}"
        group_step = GroupStep(members, steps, twin, batch, where)
        if not replicas.judge_step(report, group_step, mistakes, around, equal=True):
            return False
        twin.step(*batch)
    return True


def _wrong_replicas(
    outcome: dict[str, Any], members: list[int], start: list[float]
) -> dict[str, bool]:
    """Return what is wrong with a replica before the first step."""
    kind, group = outcome["returned"], outcome.get("group")
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
        f"the gradients were reduced {step['times']} times. backward() of a DDP model has "
        "averaged them already": step["times"] > 1,
        "DDP did not average the gradients: call the DDP model, not model.module, and outside of "
        "no_sync(). Its backward() communicates while it computes": step["called"] != [True],
        f"{step['taken']} calls of optimizer.step(), expected one: the optimizer moves the weights":
            step["taken"] != 1,
    })  # fmt: skip
    yield communication(step["calls"], some(members))


# -- 4.2: buckets -----------------------------------------------------------------------------


def _assign(
    sizes: list[int], cap: int, first_cap: int, closes=lambda full, cap, _: full >= cap
) -> list[list[int]]:
    """PyTorch's rule (`dist._compute_bucket_assignment_by_size`): a bucket closes when full.

    Another one: `closes(full, cap, next)`, bytes in the bucket, its cap, bytes of what follows.
    """
    buckets: list[list[int]] = [[]]
    for k, following in enumerate([*sizes[1:], 0][: len(sizes)]):
        buckets[-1].append(k)
        full = sum(sizes[j] for j in buckets[-1])
        if closes(full, first_cap if len(buckets) == 1 else cap, following):
            buckets.append([])
    return buckets if buckets[-1] else buckets[:-1]


def _bucket_cases(seed: int) -> list[dict]:
    """Sizes and caps: first those that tell mistakes apart, then random and special ones."""
    draw = random.Random(seed)
    cases = [([40, 100, 100, 300, 300, 40], 400, 120)]
    for _ in range(6):
        sizes = [4 * draw.choice((3, 10, 40, 100, 256)) for _ in range(draw.randint(6, 14))]
        cases.append((sizes, draw.randint(400, 1500), draw.randint(60, 300)))
    cases.append(([100, 100, 200, 200, 300, 50], 400, 200))
    cases += [([40, 900, 40, 40], 400, 1000), ([8], 1000, 1000), ([], 1000, 1000)]
    # DDP's own caps, and many gradients, of any type, in a bucket.
    large = [draw.randint(1, draw.choice((100, 10_000, 2_000_000))) for _ in range(300)]
    cases.append((large, 25 * 2**20, 2**20))
    cases.append((large[::-1], 25 * 2**20, 2**20))  # as many, and other buckets
    cases.append(([draw.randint(1, 40) for _ in range(300)], 4000, 300))
    return [dict(zip(("sizes", "cap", "first_cap"), case, strict=True)) for case in cases]


def probe_assign(user_ns: dict, *, rank: int, cases: list[dict]) -> list:
    """`assign_buckets` of every case."""
    function, results = reading_answer(user_ns, "assign_buckets"), Results()
    found = [function(**copy.deepcopy(case)) for case in cases]
    for result in found:
        results.add("assign_buckets", result)
    return told(found)


def probe_real_buckets(user_ns: dict, *, rank: int, widths: list[int], cap: int) -> dict:
    """What DDP really reduces in its third step, and what the answer foretells."""
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
    """DDP's own assignment, on random sizes and on a real DDP."""
    cases = [{"cases": _bucket_cases(report.seed)}]
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
    for given, got in zip(case["cases"], answer.value, strict=True):
        call = f"assign_buckets({short(given['sizes'])}, {given['cap']}, {given['first_cap']})"
        yield value(got, _assign(**given), _wrong_buckets(given, got), what=call, form=form)


def _wrong_buckets(case: dict, got: object) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""
    sizes, expected, last = case["sizes"], _assign(**case), len(case["sizes"]) - 1
    nested = isinstance(got, list) and all(isinstance(bucket, list) for bucket in got)
    yield Mistake(lambda _: not nested, "expected a list of lists of indices")
    yield Mistake(lambda _: [] in got, "an empty bucket never leaves: leave it out")
    yield Mistake(expected[:-1], "the last bucket is missing: it may be not full")
    one_cap, first = _assign(**case | {"first_cap": case["cap"]}), case["first_cap"]
    from_the_end = _assign(**case | {"sizes": sizes[::-1]})
    backwards = "sizes is in the order in which the gradients are ready: begin at its beginning"
    closes = {
        "you close a bucket before it would become too large. DDP adds the gradient first, and "
        "closes the bucket when it holds its cap or more": lambda full, cap, n: full + n > cap,
        "a bucket that holds exactly its cap is full: >=": lambda full, cap, _: full > cap,
        "every gradient has a bucket of its own: collect until the cap": lambda *_: True,
        "all gradients are in one bucket: close it when it is full": lambda *_: False,
    }
    yield from table({
        **{said: _assign(**case, closes=rule) for said, rule in closes.items()},
        "the first bucket has a cap of its own, first_cap": one_cap,
        "first_cap is for the first bucket only": _assign(**case | {"cap": first}),
        "the last bucket is missing; first_cap is not used": one_cap[:-1],
        "the indices in a bucket are in the wrong order": [b[::-1] for b in expected],
        backwards: [[last - k for k in bucket] for bucket in from_the_end],
        backwards + ", and return the buckets in that order": expected[::-1],
        "these are sizes; expected are indices into sizes":
            [[sizes[k] for k in bucket] for bucket in expected],
        "these are indices counted from 1": [[k + 1 for k in bucket] for bucket in expected],
    })  # fmt: skip
    placed = sorted(str(k) for bucket in got for k in bucket)
    everything = sorted(map(str, range(len(sizes))))
    yield Mistake(lambda _: placed != everything, "each index must be in one bucket, once")
    for k, (bucket, right) in enumerate(zip(got, expected, strict=False)):
        full = sum(sizes[int(j)] for j in bucket)
        cap = case["cap"] if k else first
        early = f"bucket {k} was closed at {full} bytes, before it had the {cap} of its cap: only "
        yield Mistake(
            lambda _, wrong=full < cap and bucket != right: wrong, early + "the bytes count"
        )


# -- 4.3: what is hidden ----------------------------------------------------------------------

# How exact the share must be: a numerical answer, on a fine grid, is one too.
GRID = 3e-3


def probe_hidden(user_ns: dict, *, rank: int, cases: list, begin: float, end: float) -> list:
    """`hidden_share` of every case; the first one again, in the end."""
    function = reading_answer(user_ns, "hidden_share")
    given = [[tuple(pair) for pair in transfers] for transfers in [*cases, cases[0]]]
    return [replicas.one_number(told(function(transfers, begin, end))) for transfers in given]


@task("4.3", "how much is hidden", points=3)
def hidden_share(ranks: Ranks, report: Report) -> None:
    """The share on made-up intervals, then on a step that the ranks really take."""
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
        for (name, transfers), got in zip(again, answer.value, strict=True):
            expected = overlap.hidden(transfers, begin, end)
            mistakes = overlap.wrong_shares(transfers, got, begin, end)
            backward = f"backward from {begin:g} to {end:g}"
            what = f"{name}: transfers {short(transfers)}, {backward}"
            yield value(got, expected, mistakes, what=what, form=form, tolerance=GRID)

    given = {"cases": list(cases.values()), "begin": begin, "end": end}
    return report.judge_cases(ranks, probe_hidden, [given], judge)


def _judge_measured_step(ranks: Ranks, report: Report) -> None:
    """Judge the share of a step that two ranks really take, which hides something."""
    answers = report.answers(ranks, overlap.probe_overlap)
    steps = [answer.value for answer in answers if answer.value]
    words = "hidden share of a measured step (times in seconds, milliseconds apart)"
    right, hidden = [], []
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
    """`fp16_hook` in DDP: the gradients of the third step, how they came, and large ones.

    own: seed of this rank's images. seed: of the model, and of the images of the large ones.
    """
    from torch_mpi.record import log

    small = {"process_group": group, "bucket_cap_mb": 800 / 2**20}
    model = DistributedDataParallel(replicas.net(seed, _HOOK_NET), **small)
    answer: dict = {"buckets": 0, "waits": 0, "value": None, "late": False}
    model.register_comm_hook(group, _watched(answer_named(user_ns, "fp16_hook"), answer, group))
    images, labels = replicas.samples(own, 8)
    for _ in range(3):  # from the second step on there are several buckets
        model.zero_grad()
        answer["buckets"], mark = 0, log.mark()
        with replicas.network(*SLOW):
            functional.cross_entropy(model(images), labels).backward()
        calls = [as_dict(call) | {"dtype": call.dtype} for call in log.since(mark)]
    counted = answer | {
        "gradient": replicas.gradient_of(model.module),
        "nbytes": sum(p.nbytes for p in model.parameters()),
        "calls": _of_gradients(calls),
    }
    model.zero_grad()
    blocks = answer["waits"] > 0 or any(call["blocking"] for call in counted["calls"])
    if _can_be_late(group, blocks):
        answer["late"] = True
        functional.cross_entropy(model(images), labels).backward()
        answer["late"] = False
        counted["gradient where others are late"] = replicas.gradient_of(model.module)
        model.zero_grad()
    with replicas.network(*SLOW):
        images, labels = replicas.samples(seed, 8)
        (large * functional.cross_entropy(model(images), labels)).backward()
    return counted | {"overflows": not bool(replicas.gradient_of(model.module).isfinite().all())}


# What to do where something else than a future is returned.
RETURN = {
    "NoneType": "return work.get_future().then(…), with the word return before it",
    "MPIWork": "that is the work; return work.get_future().then(…)",
    "Tensor": "the sum has not come yet; return work.get_future().then(…)",
}


def _can_be_late(group: Group, blocks: bool) -> bool:
    """Whether the others of a group can wait until the hook of its first rank has returned.

    Not where a rank is known to block in it, and not on ranks whose futures complete at once.
    """
    from torch_mpi.group.work import MPIWork
    from torch_mpi.protocol.progress import progress

    unable = torch.zeros(1)
    work = dist.all_reduce(unable, group=group, async_op=True)
    work.wait()
    unable += blocks or not isinstance(work, MPIWork) or not progress.available
    dist.all_reduce(unable, group=group)
    return not unable.item() and dist.get_world_size(group) > 1


# Of messages by which the check itself tells a rank to go on.
SIGNAL = 404
WAITS = (
    "the hook waits for its all_reduce, and backward with it: return the future and let then() do "
    "the rest"
)


def _watched(hook: Callable, answer: dict, group: Group) -> Callable:
    """The hook, counted; waits inside of it for what is not over are counted, too.

    Where the other ranks are `late`, they begin when the hook of the group's first has returned:
    there no all_reduce can be over before.
    """
    first, signal = dist.get_rank(group) == 0, torch.zeros(1)
    others = range(1, dist.get_world_size(group)) if first else ()

    def call(state, bucket):
        answer["buckets"] += 1
        if answer["late"] and not first:
            dist.recv(signal, group_src=0, group=group, tag=SIGNAL)
        with _waits_counted(answer, first):
            future = hook(state, bucket)
        if answer["late"]:
            for place in others:
                dist.send(signal, group_dst=place, group=group, tag=SIGNAL)
        if not isinstance(future, torch._C.Future):
            kind = type(future).__name__
            raise TypeError(f"fp16_hook returned {kind}, expected a future: {RETURN.get(kind, '')}")
        return future.then(functools.partial(noted, bucket))

    def noted(bucket, future):
        value = future.value()
        kind = getattr(value, "dtype", type(value).__name__)
        answer["value"] = str(kind).removeprefix("torch.")
        return value if isinstance(value, torch.Tensor) else bucket.buffer()

    return call


@functools.cache
def _waiting() -> dict[tuple[type, str], tuple[Callable, Callable]]:
    """Methods of works and futures by which one waits or asks; and what tells whether it is over.

    As they are before a check has replaced any.
    """
    from torch_mpi.group.work import MPIWork

    future = torch._C.Future  # what then() gives is one
    over = {MPIWork: MPIWork.is_completed, future: future.done}
    names = [(MPIWork, "is_completed"), (future, "done"), (MPIWork, "wait"), (future, "wait")]
    return {(kind, name): (getattr(kind, name), over[kind]) for kind, name in names}


@contextlib.contextmanager
def _waits_counted(answer: dict, first: bool) -> Iterator[None]:
    """Count waits for what is not over; and what is asked for again and again, whether it is over.

    Where nothing can be over, as the others are late, such a wait would have no end: it is an error
    on the group's first rank.
    """
    asked: list[bool] = []

    def counted(method: Callable, is_over: Callable, most: int) -> Callable:
        def call(self, *args, **kwargs):
            if not is_over(self):
                asked.append(True)
                if len(asked) > most:
                    answer["waits"] += 1
                    if answer["late"] and first:
                        raise RuntimeError(WAITS)
            return method(self, *args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for (kind, name), (method, is_over) in _waiting().items():
            method = counted(method, is_over, int(name != "wait"))
            patches.enter_context(mock.patch.object(kind, name, method))
        yield


VALUES = {
    "the value of the future is a list, as all_reduce leaves it: with .then(decompress) it becomes "
    "what decompress returns": "list",
    "the function that then() calls returns nothing: return the averaged bucket": "NoneType",
    "the value of the future is float16, expected the bucket in float32: copy it into "
    "bucket.buffer(), and return that": "float16",
}


@task("4.4", "a hook that compresses", points=4)
def fp16_hook(ranks: Ranks, report: Report) -> None:
    """Mean gradients to half precision, half of the bytes, and no wait inside."""
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
    members, outcome, where = answer.members, answer.value, on(answer.members)
    yield communication(outcome["calls"], only("all_reduce"), inside(members))
    yield facts(_not_halved(outcome, where))
    yield value(outcome["value"], "float32", table(VALUES))
    mean = sum(gradients[r] for r in members) / len(members)
    in_units = functools.partial(replicas.scaled, like=mean)
    expected = in_units(mean)
    wrong = _wrong_gradients(gradients, members, answer.rank)
    mistakes = table({text: in_units(row) for text, row in wrong.items()})
    what = f"{where}: gradients in units of the largest"
    got = in_units(torch.tensor(outcome["gradient"]))
    yield value(got, expected, mistakes, what=what, tolerance=FLOAT16)
    yield facts(_wrong_hook(outcome, where, len(members)))
    late = outcome.get("gradient where others are late")
    if late is not None:
        what = (
            f"{where}, where the others are late: gradients in units of the largest. The hook must "
            "not use the sum before its future is complete"
        )
        got = in_units(torch.tensor(late))
        yield value(got, expected, mistakes, what=what, tolerance=FLOAT16)


def _wrong_gradients(
    gradients: list[torch.Tensor], members: list[int], rank: int
) -> dict[str, torch.Tensor]:
    """Return what likely mistakes give."""
    p, summed, mine = len(members), sum(gradients[r] for r in members), gradients[rank]
    return {
        "the gradients are sums: divide by the size of the group": summed,
        f"the sum was divided by {WORLD}, the size of the world: dist.get_world_size(group)":
            summed / WORLD,
        "the gradients were divided by the number of ranks twice": summed / p**2,
        "the gradients are this rank's own: return the reduced ones": mine,
        "the gradients are this rank's own, divided: nothing was summed, or it came too late":
            mine / p,
    }  # fmt: skip


def _not_halved(outcome: dict[str, Any], where: str) -> dict[str, object]:
    """Return whether something else was reduced than the gradients in half precision."""
    calls, nbytes = outcome["calls"], outcome["nbytes"]
    half, kinds = nbytes // 2, {call["dtype"] for call in calls} - {"float16"}
    return {
        "there is no all_reduce of the bucket": not calls,
        f"{where}: {_bytes(calls)} bytes in all_reduces of {nbytes} bytes of gradients; expected "
        f"half of them, {half}: reduce a float16 tensor": _bytes(calls) != half,
        f"{where}: reduced {', '.join(sorted(kinds))}, expected float16": kinds,
    }


def _wrong_hook(outcome: dict[str, Any], where: str, p: int) -> dict[str, object]:
    """Return what is wrong with a hook whose gradients are right."""
    calls, buckets = outcome["calls"], outcome["buckets"]
    blocks = any(call["blocking"] for call in calls)
    return {
        f"{where}: {len(calls)} all_reduces for {buckets} buckets; one each": len(calls) != buckets,
        f"{where}: with large gradients there is inf: the sum of {p} of them passes 65,504, where "
        "float16 ends. Divide before the sum": outcome["overflows"],
        f"{where}: all_reduce blocks inside of the hook, and backward waits: async_op=True": blocks,
        f"{where}: {WAITS}": outcome["waits"],
    }


# -- 4.5: accumulation ------------------------------------------------------------------------

SIZE = 5  # samples of a microbatch


def _microbatches(seed: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of five, the first one is the last one, too."""
    parts = [replicas.samples(seed + 100 * k + j, SIZE) for j in range(k)]
    return [parts[-1], *parts[1:]] if k == 5 else parts


@in_group
def probe_accumulate(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, own: int, seed: int, ks: list
) -> list:
    """`accumulate` on one model, once for each number of microbatches; ``own`` is their seed."""
    function, answers = reading_answer(user_ns, "accumulate"), []
    model = DistributedDataParallel(replicas.net(seed), process_group=group)
    before, passes, called = replicas.weights_of(model), [], _called(model)
    model.module.register_forward_pre_hook(lambda *_: passes.append("forward"))
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: passes.append("backward"))
    for k in ks:
        model.zero_grad()
        called.clear()
        passes.clear()
        _, calls = recorded(function, model, _microbatches(own, k))
        answers.append(
            {
                "gradient": replicas.gradient_of(model.module),
                "changed": not torch.equal(before, replicas.weights_of(model)),
                "passes": list(passes),
                "called": list(called),
                "quiet": not model.require_backward_grad_sync,
                "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
                "calls": _of_gradients(calls),
            }
        )
    return answers


@task("4.5", "k microbatches, one communication", points=3)
def accumulate(ranks: Ranks, report: Report) -> None:
    """The gradient of one large batch; all_reduces for one backward."""
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

    expected, mine, rest = mean_of(slice(None)) / k, sum(gradients[rank]), sum(gradients[rank][1:])
    zero_grad = "counts: zero_grad() belongs before the first"
    yield from table({
        f"the gradients are {k} times too large: each microbatch counts 1/{k}": expected * k,
        "the gradients are this rank's own mean: the last backward must communicate": mine / k,
        "the gradients are this rank's own sum: the last backward must communicate, and each "
        f"microbatch counts 1/{k}": mine,
        f"the gradients were divided by {k} twice": expected / k,
        f"divided by the {p} ranks, too: DDP has done so": expected / p,
        f"only the last microbatch {zero_grad}": mean_of(slice(-1, None)),
        f"only the last microbatch, with 1/{k}, {zero_grad}": mean_of(slice(-1, None)) / k,
        f"only the last two microbatches {zero_grad.replace('counts', 'count')}":
            mean_of(slice(-2, None)) / k,
        "only the last is missing: it takes part, outside of no_sync()":
            mean_of(slice(0, -1)) / k if k > 1 else 0 * mine,
        "only the first microbatch was communicated: the last backward is the one that must":
            (mean_of(slice(0, 1)) + rest) / k,
        "there are no gradients: call backward() for each microbatch": 0 * mine,
    })  # fmt: skip


def _wrong_communication(outcome: dict[str, Any]) -> dict[str, object]:
    """Return what is wrong with what was communicated for right gradients."""
    calls, times = outcome["calls"], _bytes(outcome["calls"]) / outcome["nbytes"]
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
    return {
        "all microbatches went through the model as one large batch, which needs the memory that "
        "accumulating saves: one forward for each": forwards < k,
        f"one backward for {k} forwards keeps what each of them computed until the end, which "
        "needs the memory that accumulating saves: call backward() after each forward":
            backwards < k,
        f"{forwards} forwards and {backwards} backwards for {k} microbatches: one of each":
            (forwards, backwards) != (k, k),
        "a forward comes before the backward of the microbatch before. So the memory that "
        "accumulating saves is in use: call backward() after each forward":
            outcome["passes"] != ["forward", "backward"] * k,
        "call the DDP model, not model.module, and the last time outside of no_sync(): DDP "
        "communicates in that backward": outcome["called"] != [False] * (k - 1) + [True],
    }  # fmt: skip
