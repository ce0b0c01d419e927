"""Checks of lab 15 about few bits: master weights, sums over ranks, loss scaling, compression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.comparison import Calls, Rule, inside, made, only, some, table, waited
from utils.checks.probe import answer_named, kept, reading_answer, recorded
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import EVERYWHERE, WORLD, Group, GroupAnswer, in_group, judge_groups, on
from utils.cluster.questions import Ranks

#: What float32 may lose over a few steps; a mistake is off by much more.
NEAR = 1e-6


def _row(seed: int, *shape: int) -> Tensor:
    """Return normally distributed float32 numbers that follow from the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _numbers(tensor: Any) -> Any:
    """Return a tensor's numbers, and the type's name for anything else."""
    if isinstance(tensor, Tensor):
        return Tensor.detach(tensor).double().reshape(-1).tolist()
    return f"<{type(tensor).__name__}>"


# -- 15.6: master weights ---------------------------------------------------------------------

SHAPES = ((3, 4), (5,), (2,))
STEPS, RATE, MOMENTUM = 30, 2e-4, 0.9


def _begun(seed: int) -> list[Tensor]:
    return [_row(seed + 7 * i, *shape).bfloat16() for i, shape in enumerate(SHAPES)]


def _gradients(seed: int, step: int) -> list[Tensor | None]:
    """Return bfloat16 gradients; the first parameter has none in step 3, the last none until 10."""
    rows = [1 + 0.5 * _row(seed + 31 * step + i, *shape) for i, shape in enumerate(SHAPES)]
    first, second, third = (row.bfloat16() for row in rows)
    return [None if step == 3 else first, 1e6 * second, third if step > 9 else None]


def probe_masters(user_ns: dict, *, rank: int, seed: int) -> dict[str, Any]:
    """Train some bfloat16 weights for a few steps by the student's two functions."""
    parameters = [q.requires_grad_() for q in _begun(seed)]
    places = [q.data_ptr() for q in parameters]
    masters = answer_named(user_ns, "make_masters")(parameters)
    if not isinstance(masters, list):
        return {"kinds": f"a {type(masters).__name__}", "begun": None}
    kinds = [f"{m.dtype}" if m.is_leaf and m.requires_grad else "not trainable" for m in masters]
    result = {"kinds": kinds, "begun": [_numbers(m) for m in masters]}
    if kinds != ["torch.float32"] * len(SHAPES):
        return result
    optimizer = torch.optim.SGD(masters, lr=RATE, momentum=MOMENTUM)
    for step in range(STEPS):
        for q, gradient in zip(parameters, _gradients(seed, step), strict=True):
            q.grad = gradient
        answer_named(user_ns, "master_step")(parameters, masters, optimizer)
    return result | {
        "masters": [_numbers(m) for m in masters],
        "weights": [_numbers(q) for q in parameters],
        "moved": places != [q.data_ptr() for q in parameters],
        "dtypes": sorted({str(q.dtype) for q in parameters}),
    }


def _trained(seed: int, mistake: str = "") -> list[Tensor]:
    """Return the masters after all steps, perhaps with a mistake."""
    masters = [q.float().requires_grad_() for q in _begun(seed)]
    optimizer = torch.optim.SGD(masters, lr=RATE, momentum=MOMENTUM)
    for step in range(STEPS):
        for m, gradient in zip(masters, _gradients(seed, step), strict=True):
            if mistake != "keeps old" or gradient is not None:
                m.grad = None if gradient is None else gradient.float()
        optimizer.step()
        for m in masters if mistake == "rounded" else ():
            m.data.copy_(m.bfloat16())
    return [m.detach() for m in masters]


@task("15.6", "float32 master weights", points=2)
def master_weights(ranks: Ranks, report: Report) -> None:
    """Compare masters and weights after steps that bfloat16 alone would lose."""
    for seed in (report.seed, report.seed + 1000):
        for answer in report.answers(ranks, probe_masters, seed=seed):
            report.follow(answer.rank, _mastered(answer.value, seed))
        if report.found:
            break


def _mastered(result: dict[str, Any], seed: int) -> Iterator[Step]:
    kinds = result["kinds"]
    begun = [_numbers(q) for q in _begun(seed)]
    yield facts({
        f"make_masters returned {kinds}. Return a list, with a float32 leaf tensor that requires a "
        "gradient for each parameter": kinds != ["torch.float32"] * len(SHAPES)
    })
    yield value(result["begun"], begun, what="masters at the beginning")
    dtypes = result["dtypes"]
    yield facts({
        "Your parameters use other memory. Copy into the tensors of the model": result["moved"],
        f"Your parameters became {dtypes}. Keep them in bfloat16": dtypes != ["torch.bfloat16"],
    })
    masters = _trained(seed)
    mistakes = table({
        "You never changed the masters. Give them gradients, and call optimizer.step()": begun,
        "You rounded the masters to bfloat16 after each step, so small updates vanish. Round only "
        "the parameters": [_numbers(m) for m in _trained(seed, "rounded")],
        "You updated a parameter without a gradient by its old gradient. Set the master's "
        "gradient to None": [_numbers(m) for m in _trained(seed, "keeps old")],
    })
    right = [_numbers(m) for m in masters]
    what = f"masters after {STEPS} steps"
    yield value(result["masters"], right, mistakes, what=what, tolerance=NEAR)
    old = {"You never wrote the masters into the parameters. Copy them after the step": begun}
    weights = [_numbers(m.bfloat16()) for m in masters]
    yield value(result["weights"], weights, table(old), what="parameters at the end")


# -- 15.7: a sum in float32 from bfloat16 messages --------------------------------------------

LENGTHS = ((13,), (3, 5), (2,), (8,))


def _addend(seed: int, shape: Sequence[int]) -> Tensor:
    """Return bfloat16 numbers from 1 to 2, so that float32 holds the sum over 4 ranks exactly."""
    return (1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@in_group
def probe_sum(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, shape: list[int]
) -> dict[str, Any]:
    """Return the sum over the group, its dtype and shape, and what was communicated."""
    x = _addend(seed, shape)
    function = reading_answer(user_ns, "sum_in_float32")
    y, calls = recorded(function, x, **named)
    later = kept("sum_in_float32", y, lambda: recorded(function, x + 1, **named)[1])
    known = isinstance(y, Tensor)
    kind = f"{y.dtype} {list(y.shape)}" if known else f"a {type(y).__name__}"
    same = known and y.data_ptr() == x.data_ptr()
    return {"sum": _numbers(y), "kind": kind, "same": same, "calls": calls, "calls again": later}


@task("15.7", "bfloat16 messages, a float32 sum", points=3)
def bfloat16_sum(ranks: Ranks, report: Report) -> None:
    """Judge the sum's only rounding, and the bytes that a rank sends and receives."""
    pairs = [*zip(itertools.cycle(EVERYWHERE), LENGTHS * 2, strict=False), (None, (1001,))]
    cases = [
        {"partition": partition, "shape": shape, "each": to_each(seed=report.seeds(WORLD))}
        for partition, shape in pairs
    ]
    judge_groups(ranks, report, probe_sum, cases, _summed)


def _summed(answer: GroupAnswer) -> Iterator[Step]:
    shape = answer.case["shape"]
    members = answer.members
    rows = [_addend(answer.case["each"][rank]["seed"], shape) for rank in members]
    where = f"{list(shape)} {on(members)}"
    result = answer.value
    allowed = "all_to_all_single", "all_to_all", "all_gather_into_tensor", "all_gather"
    yield communication(result["calls"], only(*allowed), inside(members), waited)
    kind = f"torch.bfloat16 {list(shape)}"
    yield facts({
        f"{where}: You returned {result['kind']}, expected {kind}": result["kind"] != kind
    })
    total = torch.stack(rows).double().sum(0)
    chain = rows[0]
    for row in rows[1:]:
        chain = chain + row
    right = total.bfloat16()
    mistakes = table({
        "You rounded after each addition. Add in float32, and round once": chain,
        "You returned the mean. Return the sum": (total / len(rows)).bfloat16(),
        "You returned this rank's numbers. Add the numbers of all ranks": rows[answer.place],
    })
    yield value(result["sum"], _numbers(right), mistakes, what=f"sum of {where}", tolerance=0)
    p = len(rows)
    part = 2 * math.ceil(right.numel() / p)
    few = _at_most((p + 1) * part, 2 * p * part, where, "bfloat16 parts, there and back")
    for calls in ("calls", "calls again"):
        yield communication(result[calls], some(members), *([few] if p > 1 else []))
    yield facts({"You returned the memory of x. Return a new tensor": result["same"]})


def _at_most(sent: int, received: int, where: str, what: str) -> Rule:
    """Return the rule that a rank sends and receives at most so many bytes."""

    def rule(calls: Calls) -> str | None:
        out, back = (sum(call[way] for call in calls) for way in ("sent", "received"))
        if out <= sent and back <= received:
            return None
        return (
            f"{where}: You sent {out} and received {back} bytes, and {sent} and {received} are "
            f"enough. Send only {what}"
        )

    return rule


# -- 15.8: loss scaling -----------------------------------------------------------------------

GROW_EVERY, SCALES = 3, (3.0, 2.0**20)
#: The group ranks whose gradients overflow in each step, modulo the size of the group.
OVERFLOWS = ((), (1,), (), (), (0,), (), (), (), (), (), (), (2, 3), (3,), (), ())
#: In this step, the last rank of a group has no gradients.
EMPTY = 6


@in_group
def probe_scaler(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, first: float
) -> dict[str, Any]:
    """Run a scaler over steps of which some overflow on one or two ranks."""
    place, p = dist.get_rank(group), dist.get_world_size(group)
    scaler = answer_named(user_ns, "LossScaler")(first, GROW_EVERY)
    weight, large, unused = (torch.zeros(4, requires_grad=True) for _ in range(3))
    optimizer = torch.optim.SGD([weight, large, unused], lr=1.0)
    loss = torch.tensor(12.0)
    losses = [scaler.scaled(loss).item()]
    steps = []
    for step, bad in enumerate(OVERFLOWS):
        weight.grad = _row(seed + step, 4) * float(scaler.scale)
        large.grad = torch.full((4,), 1e30)
        if place in [one % p for one in bad]:
            weight.grad[step % 4] = math.nan if step == 4 else math.inf
        if step == EMPTY and place == p - 1:
            weight.grad = large.grad = None
        took, calls = recorded(scaler.step, [weight, large, unused], optimizer, **named)
        finite = weight.isfinite().all().item()
        steps.append({
            "took": took if isinstance(took, bool) else f"<{type(took).__name__}>",
            "scale": float(scaler.scale),
            "weight": weight.tolist() if finite else "numbers that are not finite",
            "calls": calls,
        })
    losses += [scaler.scaled(loss).item(), loss.item()]
    return {"steps": steps, "losses": losses}


@task("15.8", "loss scaling for float16", points=3)
def loss_scaler(ranks: Ranks, report: Report) -> None:
    """Judge which steps are taken, how the scale moves, and one small all_reduce per step."""
    pairs = zip(EVERYWHERE, itertools.cycle(SCALES), strict=False)
    cases = [{"partition": part, "seed": report.seed, "first": first} for part, first in pairs]
    judge_groups(ranks, report, probe_scaler, cases, _scaled)


def _scaled(answer: GroupAnswer) -> Iterator[Step]:
    members = answer.members
    scale, good = answer.case["first"], 0
    weight = torch.zeros(4)
    yield value(answer.value["losses"][0], 12 * scale, what="scaled(loss) of a loss of 12")
    for step, result in enumerate(answer.value["steps"]):
        where = f"step {step + 1} {on(members)}"
        bad = OVERFLOWS[step]
        yield communication(result["calls"], only("all_reduce"), inside(members), waited)
        right = not bad
        culprit = members[(bad or (0,))[0] % len(members)]
        yield facts({
            f"{where}: You took a step, but a gradient on rank {culprit} is infinite or NaN. Let "
            "all ranks skip the step: all_reduce a flag": not right and result["took"] is True,
            f"{where}: You skipped a step, but all gradients are finite": right
            and result["took"] is False,
        })
        yield value(result["took"], right, what=f"result of {where}")
        before = scale
        good = good + 1 if right else 0
        empty = step == EMPTY and answer.place == len(members) - 1
        if right and not empty:
            weight = weight - _row(answer.case["seed"] + step, 4)
        if not right or good == GROW_EVERY:
            scale, good = (2 * scale if right else scale / 2), 0
        yield value(result["weight"], weight.tolist(), what=f"weight after {where}", tolerance=NEAR)
        mistakes = table({"You left the scale as it was. Double it now, or halve it": before})
        yield value(result["scale"], scale, mistakes, what=f"scale after {where}")
        once = made("all_reduce", 1, f" in {where}")
        yield communication(result["calls"], once, _at_most(8, 8, where, "one number"))
    what = "scaled(loss) at the end, and the loss itself, which stays as it is"
    yield value(answer.value["losses"][1:], [12 * scale, 12.0], what=what)


# -- 15.9: compression with error feedback ----------------------------------------------------

KEPT, ROW = 3, 11


@in_group
def probe_compressed(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, zeros: int
) -> list[dict[str, Any]]:
    """Average this rank's gradients over three steps; return the mean and what is left.

    The gradients begin with so many zeros, which are left out of the result.
    """
    memory = torch.zeros(zeros + ROW)
    function = reading_answer(user_ns, "compressed_mean", changes=(1,))
    steps = []
    for step in range(3):
        gradient = torch.cat([torch.zeros(zeros), _row(seed + step, ROW)])
        mean, calls = recorded(function, gradient, memory, KEPT + step // 2, **named)
        shaped = isinstance(mean, Tensor) and mean.shape == gradient.shape
        ends = _numbers(mean[zeros:] if shaped else None), _numbers(memory[zeros:])
        steps.append({"mean": ends[0], "memory": ends[1], "calls": calls})
    return steps


@task("15.9", "the largest gradients, with error feedback", points=3)
def compressed_mean(ranks: Ranks, report: Report) -> None:
    """Judge the mean of the ranks' largest entries, what each rank keeps, and the bytes."""
    seeds = to_each(seed=report.seeds(WORLD))
    pairs = zip(EVERYWHERE, (0, 0, 40_000, 0, 5), strict=True)
    cases = [{"partition": part, "each": seeds, "zeros": zeros} for part, zeros in pairs]
    judge_groups(ranks, report, probe_compressed, cases, _compressed)


def _compressed(answer: GroupAnswer) -> Iterator[Step]:
    k = answer.place
    p = len(answer.members)
    seeds = [answer.case["each"][rank]["seed"] for rank in answer.members]
    memories = [torch.zeros(ROW) for _ in seeds]
    for step, result in zip(range(3), answer.value, strict=True):
        count = KEPT + step // 2
        where = f"step {step + 1} {on(answer.members)}"
        rows = [_row(seed + step, ROW) for seed in seeds]
        sums = [row + memory for row, memory in zip(rows, memories, strict=True)]
        sent = [_largest(row, count) for row in sums]
        gathers = only("all_gather", "all_gather_into_tensor")
        yield communication(result["calls"], gathers, inside(answer.members), waited)
        mean = sum(sent) / p
        signed = sum(_largest(row, count, signed=True) for row in sums) / p
        alone = sum(_largest(row, count) for row in rows) / p
        mistakes = table({
            "You returned the sum. Divide by the number of ranks": mean * p,
            "You sent all entries. Send the k largest": sum(sums) / p,
            "You returned this rank's entries only. Gather the entries of all ranks": sent[k],
            "You chose the largest numbers. Choose the largest absolute values": signed,
            "You left out what the memory holds. Add it before you choose": alone,
        })
        what = f"mean, {where}"
        yield value(result["mean"], mean.tolist(), mistakes, what=what, tolerance=NEAR)
        memories = [row - chosen for row, chosen in zip(sums, sent, strict=True)]
        mistakes = table({
            "Your memory still has what you sent. Keep only what you left out": sums[k],
            "Your memory is empty. Keep what you left out": torch.zeros(ROW),
            "Your memory has what you sent. Keep what you left out": sent[k],
        })
        what = f"memory after {where}"
        yield value(result["memory"], memories[k].tolist(), mistakes, what=what, tolerance=NEAR)
        few = _at_most(12 * count, 12 * count * p, where, f"{count} values and {count} indices")
        yield communication(result["calls"], some(answer.members), few)


def _largest(row: Tensor, k: int, signed: bool = False) -> Tensor:
    """Return the row with zeros except for its k entries of the largest absolute value."""
    places = (row if signed else row.abs()).topk(k).indices
    return torch.zeros_like(row).index_copy(0, places, row[places])
