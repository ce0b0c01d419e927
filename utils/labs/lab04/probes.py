"""The probes of lab 04, which run on the ranks beside the student's answers."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from utils.checks.groups import group_of, in_group
from utils.checks.probe import Results, also_calls, answer_named, reading_answer, recorded, told
from utils.labs.shared import small_models

# -- steps and microbatches ------------------------------------------------------------------------


# Samples of each minibatch, which 1, 2, 3 and 4 ranks share evenly.
MINIBATCHES = (12, 24, 12)


def step_model(seed: int, awkward: bool) -> nn.Sequential:
    """Return the model to train, in double precision and with a frozen parameter if `awkward`."""
    model = small_models.net(seed)
    model[3].bias.requires_grad_(not awkward)
    return model.double() if awkward else model


def drawn_minibatch(seed: int, number: int, awkward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a minibatch with a rank's samples."""
    dtype = torch.float64 if awkward else torch.float32
    return small_models.samples(seed + number, MINIBATCHES[number], dtype)


@also_calls("all_gather", "broadcast")
@in_group
def probe_step(
    user_ns: dict, *, rank: int, named: dict, data_seed: int, awkward: bool, rate: float
) -> dict:
    """Wrap a model drawn from this rank's seed, and take steps on samples of the same seed."""
    module = step_model(data_seed, awkward)
    model = answer_named(user_ns, "replicate")(module, **named)
    if not isinstance(model, DistributedDataParallel):
        return {"returned": type(model).__name__}
    wraps = model.module is module
    start = small_models.weights_of(model)
    members = dist.get_process_group_ranks(model.process_group)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate)
    called = noted_calls(model)
    steps = []
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    step_with = (
        answer_named(user_ns, "ddp_step"),
        model,
        small_models.watched(model.module),
        optimizer,
    )
    nbytes = sum(p.nbytes for p in trained)
    with small_models.network():
        for number in range(len(MINIBATCHES)):
            taken.clear()
            called.clear()
            batch = drawn_minibatch(data_seed, number, awkward)
            step = small_models.taken(*step_with, batch, **named)
            calls = of_gradients(step["calls"])
            step |= {"calls": calls, "times": reduced_bytes(calls) // nbytes}
            steps.append(step | {"taken": len(taken), "called": list(called)})
    return {"returned": "DDP", "wraps": wraps, "group": members, "start": start, "steps": steps}


def size_of(k: int) -> int:
    """Return how many samples each of k microbatches has."""
    return 3 + k


def drawn_microbatches(seed: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return k microbatches; if there are five, the first and the last one are the same."""
    parts = [small_models.samples(seed + 100 * k + j, size_of(k)) for j in range(k)]
    return [parts[-1], *parts[1:]] if k == 5 else parts


@also_calls("all_gather", "broadcast")
@in_group
def probe_accumulate(
    user_ns: dict, *, rank: int, named: dict, data_seed: int, seed: int, ks: list
) -> list:
    """Call `accumulate` on one model, with each number of microbatches from this data seed."""
    function = reading_answer(user_ns, "accumulate")
    answers = []
    model = DistributedDataParallel(small_models.net(seed), process_group=named.get("group"))
    before = small_models.weights_of(model)
    passes, called = noted_passes(model), noted_calls(model)
    for k in ks:
        model.zero_grad()
        called.clear()
        passes.clear()
        _, calls = recorded(function, model, drawn_microbatches(data_seed, k))
        answers.append({
            "gradient": small_models.gradient_of(model.module),
            "changed": not torch.equal(before, small_models.weights_of(model)),
            "passes": list(passes),
            "called": list(called),
            "quiet": not model.require_backward_grad_sync,
            "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
            "calls": of_gradients(calls),
        })
    return answers


# -- what DDP communicates -------------------------------------------------------------------------


# In addition to gradients, DDP communicates once the order in which they became ready.
HOUSEKEEPING = {"broadcast", "all_gather"}


def of_gradients(calls: list[dict]) -> list[dict]:
    """Return the calls without DDP's housekeeping."""
    return [call for call in calls if call["op"] not in HOUSEKEEPING]


def reduced_bytes(calls: list[dict]) -> int:
    """Return how many bytes were reduced."""
    return sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")


def noted_calls(model: DistributedDataParallel) -> list[bool]:
    """Return a list that records for each call of the DDP model whether backward communicates."""
    calls = []
    forward = model.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(model.require_backward_grad_sync)
        return forward(*args, **kwargs)

    model.forward = call
    return calls


def noted_passes(model: DistributedDataParallel) -> list[str]:
    """Return a list to which each forward and each backward of the model is appended."""
    passes: list[str] = []
    model.module.register_forward_pre_hook(lambda *_: passes.append("forward"))
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: passes.append("backward"))
    return passes


# -- buckets ---------------------------------------------------------------------------------------


def probe_assign(user_ns: dict, *, rank: int, cases: list[dict]) -> list:
    """Call `assign_buckets` for every case."""
    function = reading_answer(user_ns, "assign_buckets")
    results = Results()
    answers = [function(**copy.deepcopy(case)) for case in cases]
    for result in answers:
        results.add("assign_buckets", result)
    return told(answers)


def probe_real_buckets(user_ns: dict, *, rank: int, widths: list[int], cap: int) -> dict:
    """Return what DDP really reduces in its third step, and what the answer predicts."""
    model = DistributedDataParallel(small_models.net(0, widths), bucket_cap_mb=cap / 2**20)
    images = torch.ones(2, widths[0])
    for _ in range(3):
        model.zero_grad()
        _, calls = recorded(lambda: model(images).sum().backward())
    sizes = [p.nbytes for p in reversed(list(model.parameters()))]
    buckets = reading_answer(user_ns, "assign_buckets")(sizes, cap, cap)
    return {
        "real": [call["nbytes"] for call in calls if call["op"] == "all_reduce"],
        "predicted": [sum(sizes[k] for k in bucket) for bucket in buckets],
    }


# -- overlap ---------------------------------------------------------------------------------------


DEEP = (784, *[512] * 8, 10)


def probe_overlap(user_ns: dict, *, rank: int) -> dict | None:
    """Return when data moved in a DDP step of two ranks over 1 Gbit/s, and the answer's share.

    The rank that comes last to the first bucket still has most of its backward to do. So one of the
    ranks hides something, even on a busy machine.
    """
    from torch_mpi.record import log

    with group_of([[0, 1]], rank) as pair:
        if pair is None:
            return None
        model = DistributedDataParallel(
            small_models.net(0, DEEP), process_group=pair, bucket_cap_mb=1
        )
        images = torch.randn(128, 784)
        labels = torch.zeros(128, dtype=torch.int64)
        with small_models.network(50e-6, 125e6):
            for _ in range(3):
                loss = functional.cross_entropy(model(images), labels)
                mark = log.mark()
                begin = time.perf_counter()
                loss.backward()
        calls = [call for call in log.since(mark) if call.op == "all_reduce"]
    transfers = [(call.matched, call.end) for call in calls]
    step = {"transfers": transfers, "begin": begin, "end": max(call.start for call in calls)}
    share = reading_answer(user_ns, "hidden_share")(**step)
    return step | {"share": small_models.one_number(told(share))}


def probe_hidden(user_ns: dict, *, rank: int, cases: list, begin: float, end: float) -> list:
    """Call `hidden_share` for every case."""
    function = reading_answer(user_ns, "hidden_share")
    given = [[tuple(pair) for pair in transfers] for transfers in cases]
    return [small_models.one_number(told(function(transfers, begin, end))) for transfers in given]
