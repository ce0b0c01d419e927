"""Checks of lab 04: DistributedDataParallel, buckets, overlap, hooks, accumulation.

The answers are tried on groups of 1, 2, 3 and 4 ranks (`utils.checks.groups`).
What was communicated is read from the records of the ranks, in bytes and operations: no verdict
depends on how long something took.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from .groups import enough, group_of, in_group, members_of, on, partitions, right_group
from .mistakes import same, short
from .model import use_model as use_model
from .probe import answer_named, recorded
from .replicas import flat, samples_found
from .task import Report, task

WORLD = 4
PARTITIONS = partitions(WORLD)

# What DDP communicates beside gradients: the order in which they were ready, once.
HOUSEKEEPING = {"broadcast", "all_gather"}


# -- models --------------------------------------------------------------------------------


def _net(seed: int, sizes: tuple[int, ...] = (6, 8, 8, 4)) -> nn.Sequential:
    """An MLP with tanh, whose weights follow from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        for wide, narrow in itertools.pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.Tanh()]
        return nn.Sequential(*layers[:-1])


def _samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images float32 [count, 1, 2, 3] and labels int64 [count] of 4 classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 2, 3, generator=generator)
    return images, torch.randint(0, 4, (count,), generator=generator)


def _gradient(model: nn.Module) -> torch.Tensor:
    """All gradients in one row; zeros for those that are None."""
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1)
            for p in model.parameters()
        ]
    ).clone()


def _mean_gradient(model: nn.Module, images, labels) -> torch.Tensor:
    """Of the mean loss, on a copy: nothing changes."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    functional.cross_entropy(twin(images), labels).backward()
    return _gradient(twin)


def _guess(got: torch.Tensor, suspects: dict[str, torch.Tensor], noise: float) -> str | None:
    """The first suspect that this is, to the noise."""
    return next((text for text, v in suspects.items() if (got - v).abs().max() <= noise), None)


def _ratio(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What to say of gradients that are all the same multiple of the right ones."""
    factor = (got @ expected / (expected @ expected)).item()
    if (got - factor * expected).abs().max() > 1e-4 * expected.abs().max():
        return None
    return f"every gradient is {factor:.4g} times what it should be: look at the divisor"


def _reduced(calls: list[dict]) -> int:
    """Bytes in all_reduces."""
    return sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")


# -- 4.1: DDP in a step -----------------------------------------------------------------------

# Samples of each minibatch; 1, 2, 3 and 4 ranks share them evenly.
MINIBATCHES = (12, 24, 12)


@in_group
def probe_step(user_ns: dict, *, rank: int, group, partition, seed: int) -> dict:
    """`replicate` a model of this rank's own seed, then some steps beside the twin."""
    members = members_of(partition, rank, WORLD)
    keywords = {} if partition is None else {"group": group}
    first, own = _net(seed + members[0]), _net(seed + rank)
    model = answer_named(user_ns, "replicate")(own, **keywords)
    if not isinstance(model, DistributedDataParallel):
        return {"returned": type(model).__name__}
    answer = {
        "returned": "DDP",
        "group": dist.get_process_group_ranks(model.process_group),
        "same start": torch.equal(flat(model), flat(first)),
        "steps": [],
    }
    if list(answer["group"]) != members or not answer["same start"]:
        return answer
    step = answer_named(user_ns, "ddp_step")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[torch.Tensor] = []
    model.module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
    twin, old = first, torch.zeros_like(flat(first))
    for number, count in enumerate(MINIBATCHES):
        images, labels = _samples(seed + number, count)
        arguments = (model, optimizer, images.clone(), labels.clone())
        with _network(None):
            loss, calls = recorded(step, *arguments, **keywords)
        suspects = _wrong_steps(twin, images, labels, members.index(rank), len(members), old)
        before, old = flat(twin), _mean_gradient(twin, images, labels)
        with torch.no_grad():
            whole = functional.cross_entropy(twin(images), labels).item()
            part = slice(members.index(rank), None, len(members))
            mine = functional.cross_entropy(twin(images[part]), labels[part]).item()
        nn.utils.vector_to_parameters(before - 0.5 * old, twin.parameters())
        noise = 1e-4 * (0.5 * old).abs().max().item()
        right = (flat(model) - flat(twin)).abs().max().item() <= noise
        answer["steps"].append(
            {
                "right": right,
                "guess": None if right else _guess(flat(model), suspects, noise),
                "samples": samples_found(seen, images),
                "loss": _number(loss),
                "returned": type(loss).__name__,
                "whole": whole,
                "mine": mine,
                "calls": calls,
                "nbytes": sum(p.nbytes for p in model.parameters()),
            }
        )
        seen.clear()
        if not right:
            break
    return answer


def _number(value) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _wrong_steps(twin, images, labels, place: int, size: int, old) -> dict[str, torch.Tensor]:
    """Where likely mistakes lead to: text → parameters."""
    start = flat(twin)
    parts = [_mean_gradient(twin, images[r::size], labels[r::size]) for r in range(size)]
    whole = sum(parts) / size
    wrong = {
        "the replica has not moved: optimizer.step()": torch.zeros_like(whole),
        "each replica went its own way: call the DDP model, not model.module": parts[place],
        "the gradients were divided by the number of ranks again: DDP has done so": whole / size,
        "the gradients were summed, DDP takes the mean": whole * size,
        "the loss is a sum over the part's samples; DDP wants the mean": whole
        * (len(labels) // size),
        "the gradients of the step before were still there: optimizer.zero_grad()": whole + old,
    }
    return {text: start - 0.5 * gradient for text, gradient in wrong.items()}


@task("4.1", "DDP in a training step", points=3)
def ddp_step(ranks, report: Report) -> None:
    """The first rank's weights at the start, then the sequential twin's steps."""
    if not enough(ranks, report, WORLD):
        return
    for partition in (*PARTITIONS, None):
        answers = report.answers(
            ranks, __name__, "probe_step", partition=partition, seed=report.seed
        )
        for answer in answers:
            _judge_replica(
                report, answer.rank, answer.value, members_of(partition, answer.rank, WORLD)
            )
        for members in partition or [list(range(WORLD))]:
            if answers and not report.problems:
                _judge_steps(report, members, [answers[r].value["steps"] for r in members])
        if report.problems:
            return


def _judge_replica(report: Report, rank: int, value: dict, members: list[int]) -> None:
    if value["returned"] != "DDP":
        report.problem(
            f"replicate returned {value['returned']}, expected a DistributedDataParallel", rank
        )
    elif value["group"] != members:
        report.problem(
            f"replicate: DDP works on the ranks {value['group']}, but the argument group was that "
            f"of ranks {members}: process_group=group",
            rank,
        )
    elif not value["same start"]:
        report.problem(
            f"{on(members)}: the weights after replicate are not those of rank {members[0]}, the "
            "group's first: wrap the model that was given",
            rank,
        )


def _judge_steps(report: Report, members: list[int], by_rank: list[list[dict]]) -> None:
    for number, count in enumerate(MINIBATCHES):
        steps = [steps[number] for steps in by_rank if number < len(steps)]
        if len(steps) < len(members):
            return
        where = f"step {number}, minibatch of {count} {on(members)}"
        _judge_parts(report, members, [step["samples"] for step in steps], count, where)
        for rank, step in zip(members, steps, strict=True):
            if not right_group(report, rank, members, step["calls"]):
                continue
            if not step["right"]:
                said = step["guess"] or "the weights are not those of the sequential step"
                report.problem(f"{where}: {said}", rank)
            else:
                _judge_traffic(report, rank, step, where)
                _judge_loss(report, rank, step, where)
        if report.problems:
            return


def _judge_parts(report: Report, members, parts: list[list[int]], count: int, where: str) -> None:
    """Together the ranks have each sample once, and equally many each."""
    once = sorted(index for part in parts for index in part) == list(range(count))
    if once and len({len(part) for part in parts}) == 1:
        return
    if len(members) > 1 and all(sorted(part) == list(range(count)) for part in parts):
        report.problem(f"{where}: every rank computes the whole minibatch; take this rank's part")
        return
    sizes = ", ".join(f"rank {r}: {len(p)}" for r, p in zip(members, parts, strict=True))
    report.problem(
        f"{where}: each sample must be on one rank, once, and all parts have the same size. The "
        f"models got these numbers of samples: {sizes}. The part depends on dist.get_rank(group) "
        "and dist.get_world_size(group)"
    )


def _judge_traffic(report: Report, rank: int, step: dict, where: str) -> None:
    others = sorted({c["op"] for c in step["calls"]} - {"all_reduce"} - HOUSEKEEPING)
    if others:
        report.problem(f"{where}: uses {', '.join(others)}; a step needs all_reduce only", rank)
    times = _reduced(step["calls"]) / step["nbytes"]
    if times >= 2:
        report.problem(
            f"{where}: the gradients were reduced {int(times)} times. backward() of a DDP model "
            "has averaged them already",
            rank,
        )


def _judge_loss(report: Report, rank: int, step: dict, where: str) -> None:
    loss = step["loss"]
    if loss is None:
        said = f"ddp_step returned {step['returned']}, expected the loss of the whole minibatch"
    elif same(loss, step["whole"], 1e-4):
        return
    elif same(loss, step["mine"], 1e-4):
        said = (
            "the loss returned is that of this rank's part. DDP averages gradients, not losses: "
            "reduce the loss yourself"
        )
    else:
        said = f"the loss of the minibatch is {step['whole']:.6g}, got {loss:.6g}"
    report.problem(f"{where}: {said}", rank)


# -- 4.2: buckets -----------------------------------------------------------------------------


def _assign(
    sizes: list[int], cap: int, first_cap: int, *, closes: Callable = lambda full, cap: full >= cap
) -> list[list[int]]:
    """PyTorch's rule (`dist._compute_bucket_assignment_by_size`): a bucket closes when full."""
    buckets: list[list[int]] = [[]]
    for k in range(len(sizes)):
        buckets[-1].append(k)
        full = sum(sizes[j] for j in buckets[-1])
        if closes(full, first_cap if len(buckets) == 1 else cap):
            buckets.append([])
    return buckets if buckets[-1] else buckets[:-1]


def _assign_without_overflow(sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
    """The likely mistake: a bucket never holds more than its cap."""
    buckets: list[list[int]] = [[]]
    for k, size in enumerate(sizes):
        limit = first_cap if len(buckets) == 1 else cap
        if buckets[-1] and sum(sizes[j] for j in buckets[-1]) + size > limit:
            buckets.append([])
        buckets[-1].append(k)
    return buckets


def _from_the_end(sizes: list[int], **caps: int) -> list[list[int]]:
    """Another one: begin with the last gradient of the list."""
    last = len(sizes) - 1
    return [[last - k for k in bucket] for bucket in _assign(sizes[::-1], **caps)]


def _bucket_cases(seed: int) -> list[dict]:
    """Sizes and caps: random ones, one that fills a bucket exactly, a single gradient, none."""
    draw = random.Random(seed)
    cases = [
        {
            "sizes": [4 * draw.choice((3, 10, 40, 100, 256)) for _ in range(draw.randint(6, 14))],
            "cap": draw.randint(400, 1500),
            "first_cap": draw.randint(60, 300),
        }
        for _ in range(6)
    ]
    cases.append({"sizes": [100, 100, 200, 200, 300, 50], "cap": 400, "first_cap": 200})
    cases.append({"sizes": [8], "cap": 1000, "first_cap": 1000})
    cases.append({"sizes": [], "cap": 1000, "first_cap": 1000})
    return cases


def probe_assign(user_ns: dict, *, rank: int, cases: list[dict]) -> list:
    """`assign_buckets` of every case: lists of lists, or what else was returned."""
    function = answer_named(user_ns, "assign_buckets")
    return [_as_lists(function(**copy.deepcopy(case))) for case in cases]


def _as_lists(value) -> object:
    if isinstance(value, list | tuple) and all(isinstance(b, list | tuple) for b in value):
        return [[int(k) for k in bucket] for bucket in value]
    return {"returned": repr(value)[:80]}


def probe_real_buckets(user_ns: dict, *, rank: int, widths: list[int], cap: int) -> dict:
    """What DDP really reduces in its third step, and what the answer foretells."""
    model = DistributedDataParallel(_net(0, tuple(widths)), bucket_cap_mb=cap / 2**20)
    images = torch.ones(2, widths[0])
    for _ in range(3):
        model.zero_grad()
        _, calls = recorded(lambda: model(images).sum().backward())
    sizes = [p.nbytes for p in reversed(list(model.parameters()))]
    buckets = answer_named(user_ns, "assign_buckets")(sizes, cap, cap)
    return {
        "real": [call["nbytes"] for call in calls if call["op"] == "all_reduce"],
        "foretold": [sum(sizes[k] for k in bucket) for bucket in buckets],
    }


@task("4.2", "which gradient travels in which bucket", points=2)
def assign_buckets(ranks, report: Report) -> None:
    """DDP's own assignment, on random sizes and on a real DDP."""
    cases = _bucket_cases(report.seed)
    found = {}
    for answer in report.answers(ranks, __name__, "probe_assign", cases=cases):
        for case, got in zip(cases, answer.value, strict=True):
            if got != _assign(**case):
                found[answer.rank] = _why_buckets(case, got)
                break
    for rank, text in found.items():
        report.problem(text, rank)
    if report.problems:
        return
    draw = random.Random(report.seed)
    widths = [6, *(draw.choice((8, 20, 32, 50)) for _ in range(5)), 4]
    kwargs = {"widths": widths, "cap": draw.choice((1500, 4000, 7000))}
    for answer in report.answers(ranks, __name__, "probe_real_buckets", **kwargs):
        report.expect(
            answer.rank,
            "bytes of the buckets of a real DDP",
            answer.value["foretold"],
            answer.value["real"],
        )


def _why_buckets(case: dict, got) -> str:
    sizes, expected = case["sizes"], _assign(**case)
    given = f"assign_buckets({short(sizes)}, {case['cap']}, {case['first_cap']})"
    if isinstance(got, dict):
        return f"{given} returned {got['returned']}, expected a list of lists of indices"
    whole = f"{given}: expected {short(expected)}, got {short(got)}"
    placed = [k for bucket in got for k in bucket]
    one_cap = case | {"first_cap": case["cap"]}
    first_everywhere = case | {"cap": case["first_cap"]}
    hints = [
        ([] in got, "an empty bucket never leaves: leave it out"),
        (got == expected[:-1] and bool(sizes), "the last bucket is missing: it may be not full"),
        (
            got == _assign_without_overflow(**case),
            "you close a bucket before it would become too large. DDP adds the gradient first, and "
            "closes the bucket when it holds its cap or more",
        ),
        (
            got == _assign(**case, closes=lambda full, cap: full > cap),
            "a bucket that holds exactly its cap is full: >=",
        ),
        (got == _assign(**one_cap), "the first bucket has a cap of its own, first_cap"),
        (got == _assign(**first_everywhere), "first_cap is for the first bucket only"),
        (got == _assign(**one_cap)[:-1], "the last bucket is missing; first_cap is not used"),
        (got == [b[::-1] for b in expected], "the indices in a bucket are in the wrong order"),
        (
            got in (expected[::-1], _from_the_end(**case)),
            "sizes is in the order in which the gradients are ready: begin at its beginning",
        ),
        (
            got == [[sizes[k] for k in b] for b in expected],
            "these are sizes; expected are indices into sizes",
        ),
        (sorted(placed) != list(range(len(sizes))), "each index must be in one bucket, once"),
    ]
    said = next((text for applies, text in hints if applies), "")
    return f"{said}. {whole}" if said else whole


# -- 4.3: what is hidden ----------------------------------------------------------------------


def _union(intervals: list) -> float:
    """Seconds in at least one interval."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _hidden(transfers: list, begin: float, end: float) -> float:
    """The share of the time in which data moved that lies between begin and end."""
    moving = _union(transfers)
    inside = [[max(s, begin), min(e, end)] for s, e in transfers if min(e, end) > max(s, begin)]
    return _union(inside) / moving if moving else 0.0


def _overlap_cases(seed: int) -> list[tuple[str, dict]]:
    """What is special about a case, and its arguments."""
    draw = random.Random(seed)

    def spread(count: int) -> list[list[float]]:
        starts = [draw.uniform(90, 130) for _ in range(count)]
        return [[s, s + draw.uniform(0.5, 20)] for s in starts]

    whole = {"begin": 100.0, "end": 120.0}
    return [
        ("one transfer, half of it after backward", {"transfers": [[110.0, 130.0]], **whole}),
        (
            "two transfers after each other, one of them in the open",
            {"transfers": [[105.0, 109.0], [121.0, 125.0]], **whole},
        ),
        (
            "a transfer that is already under way when backward begins",
            {"transfers": [[98.0, 104.0]], **whole},
        ),
        (
            "two transfers at the same time",
            {"transfers": [[102.0, 110.0], [106.0, 118.0], [119.0, 125.0]], **whole},
        ),
        (
            "a short transfer inside of a long one",
            {"transfers": [[101.0, 130.0], [103.0, 105.0], [108.0, 112.0]], **whole},
        ),
        (
            "transfers that are not in the order of their starts",
            {"transfers": [[121.0, 126.0], [103.0, 107.0], [105.0, 110.0]], **whole},
        ),
        ("no transfer at all", {"transfers": [], **whole}),
        ("a transfer of no duration", {"transfers": [[110.0, 110.0]], **whole}),
        ("all of it after backward", {"transfers": [[120.0, 130.0], [130.0, 140.0]], **whole}),
        *(("random transfers", {"transfers": spread(n), **whole}) for n in (3, 5, 9)),
    ]


def probe_hidden(user_ns: dict, *, rank: int, cases: list[dict]) -> list:
    """`hidden_share` of every case."""
    function = answer_named(user_ns, "hidden_share")
    answers = []
    for case in cases:
        transfers = [tuple(t) for t in case["transfers"]]
        value = function(transfers, case["begin"], case["end"])
        answers.append({"share": _number(value), "returned": repr(value)[:60]})
    return answers


DEEP = (784, *[512] * 8, 10)


def probe_overlap(user_ns: dict, *, rank: int) -> dict | None:
    """A step of DDP on ranks 0 and 1 over an emulated 1 Gbit/s: what moved when, and the answer.

    Whichever rank comes last to the first bucket still has most of its backward before it, so one
    of the two hides something however busy the machine is.
    """
    with group_of([[0, 1]], rank) as pair:
        if pair is None:
            return None
        model = DistributedDataParallel(_net(0, DEEP), process_group=pair, bucket_cap_mb=1)
        images, labels = torch.randn(128, 784), torch.zeros(128, dtype=torch.int64)
        with _network((50e-6, 125e6)):
            for _ in range(3):
                step = _timed_backward(model, images, labels)
    share = answer_named(user_ns, "hidden_share")(step["transfers"], step["begin"], step["end"])
    return step | {"share": _number(share)}


def _timed_backward(model, images, labels) -> dict:
    """Transfers of one backward, and the interval in which it computed; seconds."""
    import time

    from torch_mpi.record import log

    loss = functional.cross_entropy(model(images), labels)
    mark, begin = log.mark(), time.perf_counter()
    loss.backward()
    calls = [call for call in log.since(mark) if call.op == "all_reduce"]
    return {
        "transfers": [(call.matched, call.end) for call in calls],
        "begin": begin,
        "end": max(call.start for call in calls),
    }


@contextlib.contextmanager
def _network(speed: tuple[float, float] | None) -> Iterator[None]:
    """A network (latency in s, bandwidth in bytes/s) on this rank; None is the machine's own.

    The one before is back afterwards.
    """
    from torch_mpi.network import Network, link

    before = link.network
    link.set(None if speed is None else Network(*speed))
    try:
        yield
    finally:
        link.set(before)


@task("4.3", "how much is hidden", points=3)
def hidden_share(ranks, report: Report) -> None:
    """The share on made-up intervals, then on a step that the ranks really take."""
    cases = _overlap_cases(report.seed)
    arguments = [case for _, case in cases]
    found = {}
    for answer in report.answers(ranks, __name__, "probe_hidden", cases=arguments):
        for (what, case), got in zip(cases, answer.value, strict=True):
            expected = _hidden(**case)
            if got["share"] is None or not same(got["share"], expected, 1e-6):
                found[answer.rank] = _why_share(what, case, got, expected)
                break
    for rank, text in found.items():
        report.problem(text, rank)
    if report.problems or not enough(ranks, report, WORLD):
        return
    answers = report.answers(ranks, __name__, "probe_overlap")
    measured = [answer.value for answer in answers if answer.value]
    for rank, step in enumerate(measured):
        expected = _hidden([list(t) for t in step["transfers"]], step["begin"], step["end"])
        report.expect(rank, "hidden share of a measured step", step["share"], expected)
    if measured and not report.problems and max(step["share"] for step in measured) <= 0:
        report.problem("nothing was hidden in a step of DDP on an emulated 1 Gbit/s network")


def _why_share(what: str, case: dict, got: dict, expected: float) -> str:
    transfers, begin, end = case["transfers"], case["begin"], case["end"]
    said = (
        f"{what}: transfers {short(transfers)}, backward from {begin:g} to {end:g}: "
        f"expected {expected:.4g}, got {got['returned']}"
    )
    share = got["share"]
    if share is None:
        return f"{said}. Expected a number from 0 to 1"
    lengths = sum(e - s for s, e in transfers)
    moving = _union(transfers)
    clipped = [max(0.0, min(e, end) - max(s, begin)) for s, e in transfers]
    inside = expected * moving
    hints = [
        (100 * expected, "as a share, not in percent"),
        (inside, "these are seconds; divide by all the time in which data moved"),
        (inside / (end - begin), "divided by the length of backward; divide by the time in which "
                                 "data moved"),
        (1 - expected, "this is the share in the open, not the hidden one"),
        (sum(clipped) / lengths if lengths else None,
         "time in which two transfers move at once counts once: take the union"),
        (sum(clipped) / moving if moving else None,
         "hidden time in which two transfers move at once counts once, as in the total"),
        (inside / lengths if lengths else None,
         "in the total, time in which two transfers move at once counts once"),
        (_union([[s, e] for s, e in transfers if s >= begin and e <= end]) / moving
         if moving else None, "a transfer may be hidden in part: cut it at the end of backward"),
        (_union([[s, min(e, end)] for s, e in transfers if s < end]) / moving if moving else None,
         "cut a transfer at the begin of backward, too"),
        (_union([[s, e] for s, e in transfers if s < end]) / moving if moving else None,
         "a transfer may be hidden in part: cut it at the end of backward"),
    ]  # fmt: skip
    hint = next((t for value, t in hints if value is not None and same(share, value, 1e-6)), "")
    return f"{hint}. {said[:1].upper()}{said[1:]}" if hint else said


# -- 4.4: a hook ------------------------------------------------------------------------------

_HOOK_NET = (6, 24, 24, 16, 4)


@in_group
def probe_hook(user_ns: dict, *, rank: int, group, partition, seed: int) -> dict:
    """`fp16_hook` in DDP, on a network with latency, so that no all_reduce ends at once."""
    from torch_mpi.record import log

    hook = answer_named(user_ns, "fp16_hook")
    members = members_of(partition, rank, WORLD)
    model = DistributedDataParallel(
        _net(seed, _HOOK_NET), process_group=group, bucket_cap_mb=800 / 2**20
    )
    told: dict = {"buckets": 0, "waits": 0, "dtype": None}
    model.register_comm_hook(group, _watched(hook, told))
    parts = {r: _samples(seed + 7 * r, 8) for r in members}
    for _ in range(3):  # from the second step on there are several buckets
        model.zero_grad()
        told |= {"buckets": 0}
        mark = log.mark()
        with _network((4e-3, 1e9)):
            functional.cross_entropy(model(parts[rank][0]), parts[rank][1]).backward()
        calls = log.since(mark)
    own = {r: _mean_gradient(model.module, *parts[r]) for r in members}
    expected, got = sum(own.values()) / len(members), _gradient(model.module)
    counted = dict(told)
    overflows = _overflows(model, _samples(seed, 8))
    noise = 4e-3 * torch.stack([g.abs() for g in own.values()]).mean(0) + 2e-5
    right = bool(((got - expected).abs() <= noise).all())
    everything = sum(own.values())
    suspects = {
        "the gradients are sums: divide by the size of the group": everything,
        f"the sum was divided by {WORLD}, the size of the world: dist.get_world_size(group)":
            everything / WORLD,
        "the gradients were divided by the number of ranks twice": expected / len(members),
        "the gradients are this rank's own: return the reduced ones": own[rank],
        "the gradients are this rank's own, divided: nothing was summed": own[rank] / len(members),
    }  # fmt: skip
    loose = 4e-3 * everything.abs().max().item()
    # In a group of four, or of one, some of them are right.
    suspects = {t: v for t, v in suspects.items() if (v - expected).abs().max() > loose}
    return counted | {
        "right": right,
        "guess": None if right else _guess(got, suspects, loose),
        "off": (got - expected).abs().max().item(),
        "overflows": overflows,
        "nbytes": sum(p.nbytes for p in model.parameters()),
        "calls": [
            {
                "op": call.op,
                "group": list(call.group),
                "nbytes": call.nbytes,
                "dtype": call.dtype,
                "blocking": call.blocking,
            }
            for call in calls
        ],
    }


def _overflows(model: DistributedDataParallel, samples) -> bool:
    """Whether gradients are lost whose mean fits into float16, but not their sum."""
    largest = _mean_gradient(model.module, *samples).abs().max()
    model.zero_grad()
    with _network((4e-3, 1e9)):
        (40_000 / largest * functional.cross_entropy(model(samples[0]), samples[1])).backward()
    return not bool(_gradient(model.module).isfinite().all())


def _watched(hook: Callable, told: dict) -> Callable:
    """The hook, counted; waits inside of it for what is not over are counted, too."""
    from torch_mpi.work import MPIWork

    def call(state, bucket):
        told["buckets"] += 1
        with contextlib.ExitStack() as patches:
            for kind in (MPIWork, torch._C.Future):  # what then() gives is the latter
                patches.enter_context(mock.patch.object(kind, "wait", _counted(kind.wait, told)))
            future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"fp16_hook returned {type(future).__name__}, expected a future: "
                "work.get_future().then(...)"
            )
        return future.then(noted)

    def noted(future):
        value = future.value()
        told["dtype"] = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        return value

    return call


def _counted(wait: Callable, told: dict) -> Callable:
    def counted(self, *args, **kwargs):
        over = self.done() if isinstance(self, torch._C.Future) else self.is_completed()
        told["waits"] += not over
        return wait(self, *args, **kwargs)

    return counted


@task("4.4", "a hook that compresses", points=4)
def fp16_hook(ranks, report: Report) -> None:
    """Mean gradients to half precision, half of the bytes, and no wait inside."""
    if not enough(ranks, report, WORLD):
        return
    for partition in (*PARTITIONS, None):
        answers = report.answers(
            ranks, __name__, "probe_hook", partition=partition, seed=report.seed
        )
        for answer in answers:
            _judge_hook(
                report, answer.rank, answer.value, members_of(partition, answer.rank, WORLD)
            )
        if report.problems:
            return


def _judge_hook(report: Report, rank: int, value: dict, members: list[int]) -> None:
    if not right_group(report, rank, members, value["calls"]):
        return
    where = on(members)
    moved = [c for c in value["calls"] if c["op"] not in HOUSEKEEPING]
    others = sorted({c["op"] for c in moved} - {"all_reduce"})
    if others:
        report.problem(f"uses {', '.join(others)}; this hook needs all_reduce only", rank)
        return
    halves = {c["dtype"] for c in moved} <= {"float16"}
    if not value["right"] and (halves or value["guess"]):
        said = value["guess"] or f"a gradient is off by {value['off']:.2g}, more than fp16 rounds"
        report.problem(f"{where}: {said}", rank)
    elif halves and value["overflows"]:
        report.problem(
            f"{where}: with large gradients there is inf: the sum of {len(members)} of them passes "
            "65,504, where float16 ends. Divide before the sum",
            rank,
        )
    elif halves and value["dtype"] != "float32":
        report.problem(
            f"{where}: the value of the future is {value['dtype']}, expected the bucket in float32",
            rank,
        )
    nbytes = _reduced(moved)
    if nbytes != value["nbytes"] / 2:
        report.problem(
            f"{where}: {nbytes} bytes in all_reduces of {value['nbytes']} bytes of gradients; "
            f"expected half of them, {value['nbytes'] // 2}: reduce a float16 tensor",
            rank,
        )
    elif not halves:
        kinds = sorted({c["dtype"] for c in moved})
        report.problem(f"{where}: reduced {', '.join(kinds)}, expected float16", rank)
    elif len(moved) != value["buckets"]:
        report.problem(
            f"{where}: {len(moved)} all_reduces for {value['buckets']} buckets; one each", rank
        )
    if any(c["blocking"] for c in moved):
        report.problem(
            f"{where}: all_reduce blocks inside of the hook, and backward waits: async_op=True",
            rank,
        )
    elif value["waits"]:
        report.problem(
            f"{where}: the hook waits for its all_reduce, and backward with it: return the future "
            "and let then() do the rest",
            rank,
        )


# -- 4.5: accumulation ------------------------------------------------------------------------


@in_group
def probe_accumulate(user_ns: dict, *, rank: int, group, partition, seed: int, k: int) -> dict:
    """`accumulate` over k microbatches beside one large batch."""
    function = answer_named(user_ns, "accumulate")
    members = members_of(partition, rank, WORLD)
    model = DistributedDataParallel(_net(seed), process_group=group)
    before = flat(model)
    parts = {r: [_samples(seed + 100 * r + j, 5) for j in range(k)] for r in members}
    seen, passes = _watch_passes(model.module)
    _, calls = recorded(function, model, [(x.clone(), y.clone()) for x, y in parts[rank]])
    forwards, backwards = list(seen), len(passes)
    own = {
        r: [_mean_gradient(model.module, *microbatch) for microbatch in parts[r]] for r in members
    }
    means = {r: sum(gradients) / k for r, gradients in own.items()}
    expected, got = sum(means.values()) / len(members), _gradient(model.module)
    lasts = sum(gradients[-1] for gradients in own.values()) / len(members)
    firsts = sum(gradients[0] for gradients in own.values()) / len(members)
    late = sum(sum(gradients[-2:]) for gradients in own.values()) / len(members)
    p = len(members)
    suspects = {
        f"the gradients are {k} times too large: each microbatch counts 1/{k}": expected * k,
        "the gradients are this rank's own mean: the last backward must communicate": means[rank],
        "the gradients are this rank's own sum: the last backward must communicate, and each "
        f"microbatch counts 1/{k}": means[rank] * k,
        f"the gradients were divided by {k} twice": expected / k,
        f"divided by the {p} ranks, too: DDP has done so": expected / p,
        "only the last microbatch counts: zero_grad() belongs before the first": lasts,
        f"only the last microbatch counts, with 1/{k}: zero_grad() belongs before the first":
            lasts / k,
        "only the last two microbatches count: zero_grad() belongs before the first": late / k,
        "only the first microbatch was communicated: the last backward is the one that must":
            (firsts + sum(own[rank][1:])) / k,
        "there are no gradients: call backward() for each microbatch": torch.zeros_like(got),
    }  # fmt: skip
    noise = 1e-4 * expected.abs().max().item()
    right = (got - expected).abs().max().item() <= noise
    return {
        "right": right,
        "guess": None if right else _guess(got, suspects, noise) or _ratio(got, expected),
        "off": (got - expected).abs().max().item(),
        "changed": not torch.equal(before, flat(model)),
        "forwards": forwards,
        "backwards": backwards,
        "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
        "calls": calls,
    }


def _watch_passes(model: nn.Module) -> tuple[list[int], list[bool]]:
    """Samples of each forward pass from now on, and an entry for each backward pass."""
    samples: list[int] = []
    passes: list[bool] = []
    model.register_forward_pre_hook(lambda _, given: samples.append(len(given[0])))
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: passes.append(True))
    return samples, passes


@task("4.5", "k microbatches, one communication", points=3)
def accumulate(ranks, report: Report) -> None:
    """The gradient of one large batch; all_reduces for one backward."""
    if not enough(ranks, report, WORLD):
        return
    for partition, k in zip((*PARTITIONS, None), (3, 4, 2, 5, 1), strict=True):
        answers = report.answers(
            ranks, __name__, "probe_accumulate", partition=partition, seed=report.seed, k=k
        )
        for answer in answers:
            members = members_of(partition, answer.rank, WORLD)
            _judge_accumulation(report, answer.rank, answer.value, members, k)
        if report.problems:
            return


def _not_one_by_one(value: dict, k: int) -> str | None:
    """What is wrong with gradients that are right, but did not come microbatch by microbatch."""
    if value["forwards"] == [5 * k] and k > 1:
        return (
            "all microbatches went through the model as one large batch, which needs the memory "
            "that accumulating saves: one forward for each"
        )
    if value["backwards"] < k:
        return (
            f"one backward for {k} forwards keeps what each of them computed until the end, which "
            "needs the memory that accumulating saves: call backward() after each forward"
        )
    return None


def _judge_accumulation(report: Report, rank: int, value: dict, members, k: int) -> None:
    where = f"{k} microbatch{'es' * (k != 1)} {on(members)}"
    if value["changed"]:
        report.problem("the weights have changed: accumulate makes gradients, no step", rank)
    if not right_group(report, rank, members, value["calls"]):
        return
    if not value["right"]:
        said = value["guess"] or f"a gradient is off by {value['off']:.2g}"
        report.problem(f"{where}: {said}", rank)
    elif said := _not_one_by_one(value, k):
        report.problem(f"{where}: {said}", rank)
    others = sorted({c["op"] for c in value["calls"]} - {"all_reduce"} - HOUSEKEEPING)
    if others:
        report.problem(f"{where}: uses {', '.join(others)}; leave communication to DDP", rank)
    elif any(c["op"] == "all_reduce" and c["blocking"] for c in value["calls"]):
        report.problem(
            f"{where}: calls all_reduce itself. Leave communication to DDP: the last backward, "
            "outside of no_sync(), does it while it computes",
            rank,
        )
    times = _reduced(value["calls"]) / value["nbytes"]
    if times > 1:
        report.problem(
            f"{where}: {times:g} times the gradients' bytes were communicated, expected once. For "
            "all but the last microbatch, forward and backward go into model.no_sync()",
            rank,
        )
    elif times < 1 and value["right"]:
        report.problem(f"{where}: the gradients were not communicated", rank)
