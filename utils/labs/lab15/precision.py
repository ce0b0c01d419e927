"""Checks of lab 15 about few bits: master weights, sums over ranks, loss scaling, compression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import Calls, Mistake, Rule, inside, made, only, some, table, waited
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import EVERYWHERE, WORLD, GroupAnswer, judge_groups, on, seeds_of
from utils.cluster.questions import Ranks

from .probes import (
    EDITED,
    EMPTY,
    GROW_EVERY,
    INERTIA,
    KEPT,
    LARGE,
    MASTERS,
    OVERFLOWS,
    ROW,
    SCALES,
    SLOW,
    STEPS,
    addend,
    drawn_gradients,
    drawn_row,
    edit,
    first_weights,
    large_gradient,
    optimizer_of,
    probe_compressed,
    probe_masters,
    probe_scaler,
    probe_sum,
    row_of,
)

#: What float32 may lose over a few steps; a mistake is off by much more.
NEAR = 1e-6


# -- 15.6: master weights ---------------------------------------------------------------------


def _trained(seed: int, mistake: str = "") -> list[Tensor]:
    """Return the masters after all steps, perhaps with a mistake."""
    masters = [q.float().requires_grad_() for q in first_weights(seed)]
    optimizer = optimizer_of(masters)
    for step in range(STEPS):
        if step == EDITED:
            edit(masters[0])
        for m, gradient in zip(masters, drawn_gradients(seed, step), strict=True):
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
    begun = [values_of(q) for q in first_weights(seed)]
    yield facts({
        f"make_masters returned {kinds}. Return a list, with a float32 leaf tensor that requires a "
        "gradient for each parameter, in its shape": kinds != MASTERS
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
        "the parameters": [values_of(m) for m in _trained(seed, "rounded")],
        "You updated a parameter without a gradient by its old gradient. Set the master's "
        "gradient to None": [values_of(m) for m in _trained(seed, "keeps old")],
    })
    right = [values_of(m) for m in masters]
    what = f"masters after {STEPS} steps"
    yield value(result["masters"], right, mistakes, what=what, tolerance=NEAR)
    old = {"You never wrote the masters into the parameters. Copy them after the step": begun}
    weights = [values_of(m.bfloat16()) for m in masters]
    yield value(result["weights"], weights, table(old), what="parameters at the end")


# -- 15.7: a sum in float32 from bfloat16 messages --------------------------------------------

LENGTHS = ((13,), (3, 5), (2,), (8,))
#: float16 ends at 65,504, and rounds numbers below 0.00000003 to 0.
SIZES = (1.0, 2.0**17, 2.0**-30)


@task("15.7", "bfloat16 messages, a float32 sum", points=3)
def bfloat16_sum(ranks: Ranks, report: Report) -> None:
    """Judge the sum's only rounding, and the bytes that a rank sends and receives."""
    pairs = [*zip(itertools.cycle(EVERYWHERE), LENGTHS * 2, strict=False)]
    pairs += [(None, (1001,)), (EVERYWHERE[1], (0,))]
    cases = [
        {"partition": partition, "shape": shape, "size": size}
        | {"each": to_each(seed=report.seeds(WORLD))}
        for (partition, shape), size in zip(pairs, itertools.cycle(SIZES), strict=False)
    ]
    judge_groups(ranks, report, probe_sum, cases, _summed)


def _summed(answer: GroupAnswer) -> Iterator[Step]:
    shape = answer.case["shape"]
    members = answer.members
    size = answer.case["size"]
    rows = [addend(seed, shape, size) for seed in seeds_of(answer.case, members)]
    where = f"{list(shape)} of size {size:.2g} {on(members)}"
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
    half = torch.stack(rows).half().sum(0).bfloat16()
    in_half = "You added in float16, which has too few exponents. Add in float32"
    mistakes = table({
        "You rounded after each addition. Add in float32, and round once": chain,
        in_half: half,
        "You returned the mean. Return the sum": (total / len(rows)).bfloat16(),
        "You returned this rank's numbers. Add the numbers of all ranks": rows[answer.place],
    })
    infinite = lambda got: isinstance(got, list) and not all(map(math.isfinite, got))  # noqa: E731
    mistakes = [Mistake(infinite, in_half), *mistakes]
    yield value(result["sum"], values_of(right), mistakes, what=f"sum of {where}", tolerance=0)
    p = len(rows)
    part = 2 * math.ceil(right.numel() / p)
    few = _at_most((p + 1) * part, 2 * p * part, where, "bfloat16 parts, there and back")
    for calls in ("calls", "calls again"):
        needed = [some(members)] if right.numel() else []
        yield communication(result[calls], *needed, *([few] if p > 1 else []))
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


@task("15.8", "loss scaling for float16", points=3)
def loss_scaler(ranks: Ranks, report: Report) -> None:
    """Judge which steps are taken, how the scale moves, and one small all_reduce per step."""
    pairs = [*zip(EVERYWHERE, itertools.cycle(SCALES[:2]), strict=False), (None, SCALES[2])]
    cases = [
        {"partition": part, "seed": report.seed, "first": first, "grow_every": every}
        for (part, first), every in zip(pairs, itertools.cycle(GROW_EVERY), strict=False)
    ]
    judge_groups(ranks, report, probe_scaler, cases, _scaled)


def _looks_undivided(got: Any) -> bool:
    """Is this the second weight, as a share of its gradients, after steps without a division?"""
    return isinstance(got, str) or max(map(abs, got)) > SLOW / 2


class Moved:
    """A weight that begins at 0 and moves as the optimizer of the check moves it."""

    def __init__(self, rate: float = 1.0) -> None:
        self.now, self._pace, self._rate = torch.zeros(4), torch.zeros(4), rate

    def move(self, gradient: Tensor) -> None:
        """Take a step with momentum."""
        self._pace = INERTIA * self._pace + gradient
        self.now = self.now - self._rate * self._pace


def _too_large(scale: float, step: int, p: int) -> tuple[int, ...]:
    """Return whose large gradients overflow when they are divided by a scale below 1."""
    fits = LARGE / scale <= torch.finfo(torch.float32).max
    return () if fits or (step == EMPTY and p == 1) else (0,)


def _taken_if_finite(
    took: object, bad: Sequence[int], members: Sequence[int], where: str
) -> Iterator[Step]:
    """Yield the steps that a step was taken just if no place in the group has bad gradients."""
    right = not bad
    culprit = members[(bad or (0,))[0] % len(members)]
    yield facts({
        f"{where}: You took a step, but a gradient on rank {culprit} is infinite or NaN. Let "
        "all ranks skip the step: all_reduce a flag": not right and took is True,
        f"{where}: You skipped a step, but all gradients are finite": right and took is False,
    })
    yield value(took, right, what=f"result of {where}")


def _scaled(answer: GroupAnswer) -> Iterator[Step]:
    members = answer.members
    scale, good = answer.case["first"], 0
    weight, large = Moved(), Moved(SLOW)
    yield value(answer.value["losses"][0], [12 * scale], what="scaled(loss) of a loss of 12")
    yield facts({
        "scaled(loss) has no graph, so backward can't start from it. Multiply the loss itself": (
            answer.value["gradient"] is None
        )
    })
    yield value(answer.value["gradient"], [scale], what="gradient of the loss from scaled(loss)")
    for step, result in enumerate(answer.value["steps"]):
        where = f"step {step + 1} {on(members)}"
        bad = OVERFLOWS[step] or _too_large(scale, step, len(members))
        yield communication(result["calls"], only("all_reduce"), inside(members), waited)
        yield from _taken_if_finite(result["took"], bad, members, where)
        right = not bad
        before = scale
        good = good + 1 if right else 0
        empty = step == EMPTY and answer.place == len(members) - 1
        if right and not empty:
            weight.move(row_of(answer.case["seed"] + step, 4))
            large.move(large_gradient(step) / scale)
        if not right or good == answer.case["grow_every"]:
            scale, good = (2 * scale if right else scale / 2), 0
        about = {"what": f"weight after {where}", "tolerance": NEAR}
        yield value(result["weight"], weight.now.tolist(), **about)
        undivided = Mistake(
            _looks_undivided if scale > 2 else (lambda _: False),
            "You divided only some of the gradients by the scale. Divide each of them",
        )
        about = {"what": f"second weight after {where}, as a share of {LARGE:g}", "tolerance": NEAR}
        yield value(result["large"], (large.now / LARGE).tolist(), [undivided], **about)
        mistakes = table({"You left the scale as it was. Double it now, or halve it": before})
        yield value(result["scale"], scale, mistakes, what=f"scale after {where}")
        once = made("all_reduce", 1, f" in {where}")
        yield communication(result["calls"], once, _at_most(8, 8, where, "one number"))
    what = "scaled(loss) at the end, and the loss itself, which stays as it is"
    yield value(answer.value["losses"][1:], [[12 * scale], 12.0], what=what)


# -- 15.9: compression with error feedback ----------------------------------------------------


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
    seeds = seeds_of(answer.case, answer.members)
    memories = [torch.zeros(ROW) for _ in seeds]
    for step, result in zip(range(3), answer.value, strict=True):
        count = KEPT + step // 2
        where = f"step {step + 1} {on(answer.members)}"
        rows = [drawn_row(seed, step) for seed in seeds]
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
