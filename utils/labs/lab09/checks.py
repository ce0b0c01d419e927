"""Checks of lab 09: shards, conjugate operators, Megatron's layers, traffic, a loss, experts.

Answers are tried in groups of 1, 2 and 4 ranks, in double precision, forward and backward, and
compared with the layer that was not split. What was communicated forward and backward is judged
apart. Gradients are compared absolutely: that of a key's bias is zero.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils import models
from utils.checks.calls import Calls, Rule, inside, made, only, some, waited
from utils.checks.functions import Case, judge_calls
from utils.checks.groups import (
    WORLD,
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_groups,
    keywords,
    on,
    places,
    tried,
)
from utils.checks.mistakes import NO_NUMBER, Mistake, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, number, reading_answer, recorded
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply

from . import experts
from .sharded_layers import (
    BYTES,
    EXACT,
    FROZEN,
    HEADS,
    HIDDEN,
    INPUT,
    PARTITIONS,
    WIDTH,
    both_ways,
    cases_apart,
    cases_of,
    composed,
    drawn,
    flat,
    layer_of,
    made_module,
    numbers_of,
    of_size,
    probe_layer,
    seeds_of,
    shapes,
    shard,
    shard_gradient,
    uncut,
)

# -- 9.1: shards ------------------------------------------------------------------------------

WIDE, NARROW = 8, 12  # of the layer that is cut


@in_group
def probe_shards(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """Both ways to cut a layer: numbers, shapes, and how much memory lies behind them."""
    linear, result = _layer(seed, partition), {}
    for name in ("column_shard", "row_shard"):
        pair, calls = recorded(answer_named(user_ns, name), linear, **keywords(partition, group))
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"{name} returned {type(pair).__name__}, expected (weight, bias)")
        tensors = [one for one in pair if isinstance(one, Tensor)]
        result[name] = {
            "values": [one.detach().tolist() if isinstance(one, Tensor) else None for one in pair],
            "kept": [one.untyped_storage().nbytes() > one.nbytes for one in tensors],
            "same": any(
                one.data_ptr() == parameter.data_ptr()
                for one in tensors
                for parameter in (linear.weight, linear.bias)
            ),
            "graph": any(one.grad_fn is not None for one in tensors),
            "frozen": not (linear.weight.requires_grad and linear.bias.requires_grad),
            "calls": calls,
        }
    return result


def _layer(seed: int, partition: Partition) -> nn.Linear:
    """Return what is cut; a larger layer where there is no group."""
    larger = 4 * (partition is None)
    return made_module(seed, nn.Linear, WIDE + larger, NARROW + larger)


@task("9.1", "the shards of a layer", points=2)
def shards(ranks: Ranks, report: Report) -> None:
    """Blocks of rows or columns of the weight, with the bias that belongs to them."""
    judge_groups(ranks, report, probe_shards, cases_of(report), _shards)


def _shards(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what both functions have to return on a rank."""
    p, place = len(answer.members), answer.place
    linear = _layer(answer.case["seed"], answer.case["partition"])
    weight, bias = linear.weight.detach(), linear.bias.detach()
    for name, cut in (("column_shard", 0), ("row_shard", 1)):
        where, result = f"{name} {on(answer.members)}", answer.value[name]
        part, own_bias = weight.chunk(p, cut)[place], bias if cut else bias.chunk(p)[place]
        yield communication(result["calls"], only())
        for tensor, got, expected, mistakes in (
            ("weight", result["values"][0], part, _wrong_weights(weight, cut, p, place)),
            ("bias", result["values"][1], own_bias, _wrong_biases(bias, cut, p, place)),
        ):
            what = f"{where}: {tensor}"
            yield value(got, expected.tolist(), mistakes, what=what, tolerance=EXACT)
        yield facts({
            f"{where}: the shard is a view, and the whole weight stays in memory behind it: "
            "clone()": p > 1 and any(result["kept"]),
            f"{where}: this is the layer's own memory: what changes the shard changes the layer, "
            "clone()": result["same"] and not any(result["kept"]),
            f"{where}: the shard hangs on the graph of the whole layer: detach()": result["graph"],
            f"{where}: {FROZEN}": result["frozen"],
        })  # fmt: skip


def _wrong_weights(weight: Tensor, cut: int, p: int, place: int) -> list[Mistake]:
    """Return what mistakes make of a shard of the weight, which is cut along a dimension."""
    across = weight.chunk(p, 1 - cut)[place]
    every = weight[:, place::p] if cut else weight[place::p]
    return table({
        "the weight is cut along the other dimension. PyTorch's weight is [out, in]: the columns "
        "of the matrix that x is multiplied by are the rows of it": across if p > 1 else [],
        "this is the whole weight: take this rank's block": weight if p > 1 else [],
        f"every {p}-th line was taken. Take one block: the lines of an attention head belong "
        "together": every if p > 1 else [],
        "the weight is transposed: leave it as PyTorch has it, [out, in]":
            weight.chunk(p, cut)[place].T,
    })  # fmt: skip


def _wrong_biases(bias: Tensor, cut: int, p: int, place: int) -> list[Mistake]:
    """Return what mistakes make of a rank's bias."""
    part = bias.chunk(p)[place]
    return table({
        "the whole bias: a rank has a bias for its own outputs only":
            bias if cut == 0 and p > 1 else [],
        "the bias is cut, but each rank has all outputs here: leave it whole":
            part if cut and p > 1 else [],
        "the bias is divided by the number of ranks. That would do, if it were added before the "
        "sum; this one is added once, afterwards": bias / p,
        "the bias is zero here: it is replicated, as every rank adds it after the sum":
            torch.zeros_like(bias if cut else part),
    })  # fmt: skip


# -- 9.2: f and g -----------------------------------------------------------------------------

_SHAPE = (3, 4)


@in_group
def probe_operators(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """f and g of this rank's numbers; of a gradient that is not contiguous, or used twice."""
    named, results = keywords(partition, group), {}
    x, upstream = drawn(seed, *_SHAPE), drawn(seed + 50, *_SHAPE)
    for name in ("f", "g"):
        function = answer_named(user_ns, name)
        operator = functools.partial(function, **named)
        given, shared = x.clone(), upstream.clone()
        result = both_ways(operator, x, upstream)
        earlier, again = recorded(operator, given)
        kept, later = flat(earlier), []
        turned = both_ways(lambda t, o=operator: o(t.t()).t(), x, upstream)
        leaf = (x + 1).requires_grad_()
        y, calls = recorded(operator, leaf)
        function(x.clone(), None)  # with other ranks, between forward and backward
        if isinstance(y, Tensor) and y.requires_grad:
            later = recorded(y.backward, shared)[1]
        again += turned["forward"] + turned["backward"] + calls + later
        results[name] = result | {
            "calls again": again,
            "input": torch.equal(given, x),
            "upstream": torch.equal(shared, upstream),
            "overwritten": kept != flat(earlier),
            "of the last call": any(len(c["group"]) != dist.get_world_size(group) for c in later),
            "turned": [turned["y"], turned["dx"]],
        }
    return results


@task("9.2", "the conjugate operators f and g", points=3)
def operators(ranks: Ranks, report: Report) -> None:
    """One does nothing forward and sums backward; the other the reverse."""
    judge_groups(ranks, report, probe_operators, cases_apart(report), _operators)


def _operators(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what f and g have to do on a rank."""
    seeds, place = seeds_of(answer.case, answer.members), answer.place
    xs = [drawn(seed, *_SHAPE) for seed in seeds]
    upstreams = [drawn(seed + 50, *_SHAPE) for seed in seeds]
    own = {"y": xs[place], "dx": upstreams[place]}
    sums = {"y": sum(xs), "dx": sum(upstreams)}
    yield from _operator(answer, "f", "dx", own, sums)
    yield from _operator(answer, "g", "y", own, sums)


#: When an operator gives its result, and the gradient of its input.
_WHEN = {"y": "forward", "dx": "backward"}


def _operator(
    answer: GroupAnswer, name: str, summed: str, numbers: dict[str, Tensor], sums: dict[str, Tensor]
) -> Iterator[Step]:
    """Yield what an operator has to do that sums either its result or the gradient."""
    members, result = answer.members, answer.value[name]
    allowed = only("all_reduce"), inside(members)
    right = numbers | {summed: sums[summed]}
    for key, when in _WHEN.items():
        calls, what = result[when], f"{name} {when} {on(members)}"
        yield communication(calls, *allowed, waited)
        mistakes = _wrong_operators(name, key, summed, numbers[key], sums[key], len(members))
        yield value(result[key], numbers_of(right[key]), mistakes, what=what, tolerance=EXACT)
        once = made("all_reduce", int(key == summed), f" {when} in {name}")
        yield communication(calls, once, of_size("all_reduce", BYTES * math.prod(_SHAPE), what))
    yield facts({
        f"{name}: its input has changed. Others may still need it: sum a clone":
            not result["input"],
        f"{name}: the gradient that came in has changed. Others in the graph use that tensor, too: "
        "sum a clone": not result["upstream"],
        f"{name}: a second call has changed the result of the first. Return a new tensor each time":
            result["overwritten"],
        f"{name}: backward sums over the group of a later call. Keep the group in ctx":
            result["of the last call"],
    })  # fmt: skip
    what = f"{name} of a transposed tensor, whose memory has another order"
    yield value(result["turned"], [numbers_of(right[key]) for key in _WHEN], what=what)
    times = 2 if name == "f" else 3  # of three calls, two with backward
    more = made("all_reduce", times, f" in three more calls of {name}")
    yield communication(result["calls again"], *allowed, more, waited)


def _wrong_operators(
    name: str, key: str, summed: str, numbers: Tensor, total: Tensor, p: int
) -> list[Mistake]:
    """Return what mistakes make of a result, or of a gradient, which is summed or is not."""
    missing = Mistake(
        lambda got: got is None,
        "there is no gradient for x: backward returns one value for each argument of forward, that "
        "of x first",
    )
    if key == summed:
        right = total
        text = f"these are this rank's own numbers: {name} sums over the ranks {_WHEN[key]}"
        by_mistake = {text: numbers}
    else:
        right = numbers
        text = f"the numbers of the ranks were summed. {name} does that {_WHEN[summed]} only; "
        text += f"{_WHEN[key]} it hands on what it gets"
        by_mistake = {text: total}
    by_mistake["this is the mean; the parts of a sum are added"] = right / p
    by_mistake[f"this is {p} times what it should be"] = right * p
    return [missing, *table({text: wrong.reshape(-1) for text, wrong in by_mistake.items()})]


# -- 9.3 and 9.4: the layers ------------------------------------------------------------------


@task("9.3", "the MLP, by columns and then by rows", points=3)
def parallel_mlp(ranks: Ranks, report: Report) -> None:
    """Equal to the MLP that was not split, with one all_reduce each way."""
    if _judge_layer(ranks, report, "ParallelMLP"):
        cases = [case | {"common": report.seed} for case in cases_apart(report)]
        judge_groups(ranks, report, probe_linears, cases, _both_linears)


def _judge_layer(ranks: Ranks, report: Report, name: str) -> bool:
    """Judge a layer in groups whose ranks know their own shard only; return if it is right."""
    given = {"name": name, "common": report.seed}
    cases = [case | given for case in cases_apart(report)]
    return judge_groups(ranks, report, probe_layer, cases, layer_of)


def _linears() -> nn.Module:
    """Return the layers that are cut by columns and by rows."""
    return nn.ModuleDict({name: nn.Linear(WIDE, NARROW) for name in ("up", "down")})


@in_group
def probe_linears(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, common: int
) -> dict:
    """`ColumnLinear` and `RowLinear` alone: results, and what they communicate."""
    place, p = dist.get_rank(group), dist.get_world_size(group)
    linears, results = composed(common, [seed] * p, _linears), {}
    x, upstream = drawn(common + 1, 2, WIDE), drawn(common + 2, 2, NARROW)
    for name, linear, own, up in (
        ("ColumnLinear", linears["up"], x, upstream.chunk(p, 1)[place]),
        ("RowLinear", linears["down"], x.chunk(p, 1)[place], upstream),
    ):
        layer = answer_named(user_ns, name)(linear, **keywords(partition, group))
        results[name] = both_ways(layer, own, up)
    return results


def _both_linears(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what both layers have to give, and which of them communicates."""
    common, seeds = answer.case["common"], seeds_of(answer.case, answer.members)
    linears, x = composed(common, seeds, _linears), drawn(common + 1, 2, WIDE)
    part = linears["up"](x).chunk(len(seeds), 1)[answer.place]
    for name, reduced, y in (("ColumnLinear", 0, part), ("RowLinear", 1, linears["down"](x))):
        result, what = answer.value[name], f"{name} by itself {on(answer.members)}"
        forward = made("all_reduce", reduced, f" forward in {what}")
        yield communication(result["forward"], forward)
        yield value(result["y"], numbers_of(y), what=what)
        f_inside = "; f belongs in front of all that reads x, not into a layer"
        backward = made("all_reduce", 0, f" backward in {what}{f_inside}")
        yield communication(result["backward"], backward)


@task("9.4", "attention, by heads", points=2)
def parallel_attention(ranks: Ranks, report: Report) -> None:
    """Equal to the attention that was not split, with one all_reduce each way."""
    _judge_layer(ranks, report, "ParallelAttention")


# -- 9.5: the norm of all gradients ------------------------------------------------------------

#: Of each parameter, the shape of the whole one, and whether it is cut (its rows, not evenly).
PARAMETERS = {"a": ((9, 4), True), "b": ((5,), False), "c": ((7,), True), "d": ((3, 3), False)}


def _norms(seed: int, p: int) -> tuple[dict[str, Tensor], list[list[float]], list[float]]:
    """Return gradients of the whole model; squares of the shards on each of p ranks, and the rest.

    All of them are 0 for the seed 0.
    """
    whole = {
        name: (seed > 0) * drawn(seed + k, *shape)
        for k, (name, (shape, _)) in enumerate(PARAMETERS.items())
    }
    cut = [whole[name].tensor_split(p) for name, (_, is_cut) in PARAMETERS.items() if is_cut]
    shards = [[part.square().sum().item() for part in parts] for parts in zip(*cut, strict=True)]
    rest = [whole[n].square().sum().item() for n, (_, is_cut) in PARAMETERS.items() if not is_cut]
    return whole, shards, rest


def _norm(shards: list[list[float]], rest: list[float]) -> float:
    """Return the norm of all gradients, of these squares."""
    return math.sqrt(sum(map(sum, shards)) + sum(rest))


@in_group
def probe_clip(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    gradients: dict[str, list],
    most: float,
) -> dict:
    """`clip_gradients` of a model of shards and replicas; one parameter has no gradient."""
    model = nn.ParameterDict()
    for name, rows in gradients.items():
        rows_of_rank = torch.tensor(rows, dtype=torch.float64)
        model[name] = nn.Parameter(torch.zeros_like(rows_of_rank))
        model[name].grad = rows_of_rank.clone()
    model["unused"] = nn.Parameter(torch.ones(2, dtype=torch.float64))
    before = {name: q.grad for name, q in model.items()}
    function, cut = answer_named(user_ns, "clip_gradients"), {"a", "c"}
    norm, calls = recorded(function, model, cut.__contains__, most, **keywords(partition, group))
    return {
        "norm": number(norm),
        "calls": calls,
        "gradients": [flat(q.grad) for name, q in model.items() if before[name] is not None],
        "unused": model["unused"].grad is None and bool((model["unused"] == 1).all()),
    }


def _gradients_of_rank(whole: dict[str, Tensor], place: int, p: int) -> dict[str, Tensor]:
    """Return what the rank at a place of p has: its rows of what is cut, and all of the rest."""
    return {
        name: whole[name].tensor_split(p)[place] if is_cut else whole[name]
        for name, (_, is_cut) in PARAMETERS.items()
    }


def _clip_case(seed: int, partition: Partition, share: float) -> dict[str, Any]:
    """Return a case of gradients of this seed, and of a bound that is a share of their norm."""
    gradients, most = [], []
    for place, p in places(partition):
        whole, shards, rest = _norms(seed, p)
        of_rank = _gradients_of_rank(whole, place, p)
        gradients.append({name: tensor.tolist() for name, tensor in of_rank.items()})
        most.append(share * (_norm(shards, rest) or 1))
    return {"partition": partition, "each": to_each(gradients=gradients, most=most)}


def _hint_zeros(case: dict[str, Any]) -> str:
    """Return what to say of an error where all gradients are 0."""
    zeros = not any(map(any, case["each"][0]["gradients"]["a"]))
    return "all gradients are 0, and so is their norm: don't divide by it" if zeros else ""


@task("9.5", "the norm of all gradients", points=2)
def clip_gradients(ranks: Ranks, report: Report) -> None:
    """The norm of the whole model on each rank, and all gradients scaled by it."""
    # Not the same each time: who knows the bound, or was alone before, does not know the norm.
    # Below half of it, so that a rank's own norm is above the bound, too.
    draw, seeds = random.Random(report.seed), report.seeds(2 * len(PARTITIONS))
    shares = [draw.uniform(low, 2 * low) for low in (0.2, 1.2) for _ in PARTITIONS]
    # A bound that the norm is above and a rank's own is not; then all gradients are 0.
    seeds, shares = [*seeds, report.seed, 0], [*shares, draw.uniform(0.9, 0.97), 1.5]
    among = (*PARTITIONS * 2, PARTITIONS[0], None)
    cases = [_clip_case(*case) for case in zip(seeds, among, shares, strict=True)]

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        k = cases.index(answer.case)
        return _clipped(answer, seeds[k], shares[k])

    judge_groups(ranks, report, probe_clip, cases, judge, _hint_zeros)


def _clipped(answer: GroupAnswer, seed: int, share: float) -> Iterator[Step]:
    """Yield what a rank has to return and to scale, where the bound is this share of the norm."""
    members, place, result = answer.members, answer.place, answer.value
    whole, shards, rest = _norms(seed, len(members))
    norm, factor = _norm(shards, rest), min(share, 1)
    where = f"{on(members)}, bound {'below' if share < 1 else 'above'}"
    yield communication(result["calls"], only("all_reduce"), inside(members), waited)
    mistakes = [NO_NUMBER, *_wrong_norms(shards, rest, place, share)]
    what, form = f"the norm {where}", "the norm, a number"
    yield value(result["norm"], norm, mistakes, what=what, form=form)
    gradients = _gradients_of_rank(whole, place, len(members))
    own = _norm([shards[place]], rest)
    mistakes = [
        *_wrong_factors(list(gradients.values()), factor, share, norm, own),
        *_half_scaled(gradients, factor),
    ]
    scaled = [numbers_of(factor * gradient) for gradient in gradients.values()]
    yield value(result["gradients"], scaled, mistakes, what=f"gradients {where}")
    yield facts({
        f"{where}: a parameter without a gradient has changed, or got one: leave out those whose "
        "grad is None": not result["unused"],
    })  # fmt: skip
    yield communication(result["calls"], made("all_reduce", 1), _one_number)


def _wrong_norms(
    shards: list[list[float]], rest: list[float], place: int, share: float
) -> list[Mistake]:
    """Return what mistakes in the norm give, on one rank."""
    p, of_rank, replicated = len(shards), sum(shards[place]), sum(rest)
    every = sum(map(sum, shards))
    right = _norm(shards, rest)
    counted = f"replicated parameters are counted {p} times, once for each rank: their squares are "
    norms = {
        "this is the norm of what this rank has: the squares of the other ranks' shards are "
        "missing": math.sqrt(of_rank + replicated),
        counted + "added after the all_reduce": math.sqrt(every + p * replicated),
        "the replicated parameters are missing": math.sqrt(every),
        "the shards are missing": math.sqrt(replicated),
        "this is the square of the norm": every + replicated,
        "norms were added; squares are, and the root comes last":
            sum(math.sqrt(sum(squares) + replicated) for squares in shards),
        "norms of the parameters were added; squares are, and the root comes last":
            sum(math.sqrt(x) for squares in shards for x in squares) + sum(map(math.sqrt, rest)),
        "norms of the parameters of this rank were added; squares are, over all ranks, and the "
        "root comes last": sum(map(math.sqrt, shards[place] + rest)),
        "the mean over the ranks; the squares of shards are added": math.sqrt(
            every / p + replicated),
        "this is the norm after clipping; the one before is asked for": share * right,
    }  # fmt: skip
    return table({text: norm for text, norm in norms.items() if abs(norm - right) > 1e-9})


def _wrong_factors(
    gradients: list[Tensor], factor: float, share: float, norm: float, norm_of_rank: float
) -> list[Mistake]:
    """Return what gradients become when they are scaled by another factor."""
    factors = {
        "nothing was scaled, though the norm is above the bound": 1.0,
        "the gradients were scaled, though the norm is not above the bound": share,
        "divided by the norm, but not multiplied by the bound": 1 / (norm or 1),
        "multiplied by the bound, but not divided by the norm": share * norm,
        "scaled twice": factor**2,
        "scaled by the norm of what this rank has; the ranks' replicas now differ":
            min(share * norm / (norm_of_rank or 1), 1),
        "the gradients are gone": 0.0,
    }  # fmt: skip
    return table(
        {
            text: [numbers_of(other * gradient) for gradient in gradients]
            for text, other in factors.items()
            if abs(other - factor) > 1e-9
        }
    )


def _half_scaled(gradients: dict[str, Tensor], factor: float) -> list[Mistake]:
    """Return what gradients are where only the shards, or only the replicas, were scaled."""
    return table(
        {
            text: [
                numbers_of(gradient * (factor if PARAMETERS[name][1] == scaled else 1))
                for name, gradient in gradients.items()
            ]
            for text, scaled in {
                "only the shards were scaled: multiply the replicated gradients as well": True,
                "only the replicated gradients were scaled: multiply the shards as well": False,
            }.items()
        }
    )


def _one_number(calls: Calls) -> str | None:
    """Say of calls in which more than one number travels that one is enough."""
    for call in calls:
        if call["nbytes"] > BYTES:
            size = call["nbytes"]
            return f"an all_reduce of {size} bytes: one number is enough, the sum of squares"
    return None


# -- 9.6: what travels ------------------------------------------------------------------------


@task("9.6", "what travels in a step", points=2)
def traffic(ranks: Ranks, report: Report) -> None:
    """Numbers and bytes of other models than the notebook's."""
    k = report.seed % 7
    # In the first case with several ranks p, the bytes of a number, the tokens and the number of
    # all_reduces (a multiple of 4) all differ. So a missing factor is recognized as what it is.
    models_cut = ((1, 2 + k, 16, 64, 1), (3 + k, 8, 17, 32, 6), (2, 64, 16, 64, 2),
                  (24, 4, 1024, 64 * (k + 2), 8), (2, 4, 16, 64, 9 + report.seed % 90))  # fmt: skip
    replicas = ((1000 + k, 1), (54_986 + k, 6), (104_970, 2), (3 * 10**9, 8))
    cases = [_tensor_parallel(*sizes) for sizes in models_cut]
    cases += [_data_parallel(*sizes) for sizes in replicas]
    judge_calls(ranks, report, cases)


def _tensor_parallel(depth: int, batch: int, tokens: int, width: int, p: int) -> Case:
    """Return the case of a model whose layers are cut."""
    nbytes, count, share = 4 * batch * tokens * width, 4 * depth, 2 * (p - 1) / p
    mistakes = table({
        "this is half of them: a block has two layers with an all_reduce, attention and MLP, "
        "and backward has as many as forward": [count / 2, count / 2 * share * nbytes],
        "the bytes are those of one all_reduce": [count, share * nbytes],
        "the bytes of the tensors: on a ring a rank sends 2 (p − 1) / p of them":
            [count, count * nbytes],
        "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each":
            [count, count * share * nbytes / 2],
        "numbers, not bytes: a float32 has four": [count, count * share * nbytes / 4],
        "each token has a row of its own: batch · tokens · width numbers":
            [count, count * share * nbytes / tokens],
        "every rank has all of x, and all of x is summed: don't divide by p":
            [count, count * share * nbytes / p],
    })  # fmt: skip
    return Case(
        "tensor_parallel_traffic",
        [depth, batch, tokens, width, p],
        [count, count * share * nbytes],
        mistakes,
        "(number of all_reduces, bytes that each rank sends)",
    )


def _data_parallel(parameters: int, p: int) -> Case:
    """Return the case of a model of which each rank has a replica."""
    share, nbytes = 2 * (p - 1) / p, 4 * parameters
    mistakes = table({
        "the bytes of the gradients: on a ring a rank sends 2 (p − 1) / p of them": nbytes,
        "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each":
            share * nbytes / 2,
        "numbers, not bytes: a float32 has four": share * parameters,
        "the gradients travel once, not forward and backward": 2 * share * nbytes,
        "every rank has the gradients of all parameters: don't divide by p": share * nbytes / p,
    })  # fmt: skip
    form = "bytes that each rank sends"
    return Case("data_parallel_traffic", [parameters, p], share * nbytes, mistakes, form)


# -- 9.7: a loss over classes that are split --------------------------------------------------


def _logits(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return logits and labels: 6 samples of 11 classes; large ones 5 of 9, some all below 0."""
    samples, classes = (6, 11) if scale == 1 else (5, 9)
    draw = torch.Generator().manual_seed(seed + 9)
    labels = torch.randint(0, classes, (samples,), generator=draw)
    labels[0] = (classes + 1) // 2  # where the second half of the ranks has its first class
    level = (scale > 1) * 5 * scale * (-1.0) ** torch.arange(samples)
    return scale * drawn(seed, samples, classes) + level.double()[:, None], labels


@in_group
def probe_loss(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    part: list,
    first: int,
    labels: list,
) -> dict:
    """`class_parallel_loss` of this rank's classes, and the gradient of its logits."""
    function, given = reading_answer(user_ns, "class_parallel_loss"), torch.tensor(labels)
    logits, one = torch.tensor(part, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    return both_ways(
        lambda own: function(own, first, given, **keywords(partition, group)), logits, one
    )


def _loss_case(seed: int, partition: Partition, scale: float) -> dict[str, Any]:
    """Return a case in which each rank is told the logits of its own classes."""
    logits, labels = _logits(seed, scale)
    parts, first = [], []
    for place, p in places(partition):
        of_ranks = logits.tensor_split(p, dim=1)
        parts.append(of_ranks[place].tolist())
        first.append(sum(part.shape[1] for part in of_ranks[:place]))
    each = to_each(part=parts, first=first)
    return {"partition": partition, "labels": labels.tolist(), "each": each}


@task("9.7", "extra mile: a loss over split classes", points=2)
def class_parallel_loss(ranks: Ranks, report: Report) -> None:
    """The cross entropy of all classes, and the gradient of this rank's logits."""
    scales = (1.0, 900.0) * len(PARTITIONS)
    seeds, among = report.seeds(len(scales)), [one for one in PARTITIONS for _ in range(2)]
    cases = [_loss_case(*case) for case in zip(seeds, among, scales, strict=True)]

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        k = cases.index(answer.case)
        return _loss_of_classes(answer, seeds[k], scales[k])

    judge_groups(ranks, report, probe_loss, cases, judge)


def _loss_of_classes(answer: GroupAnswer, seed: int, scale: float) -> Iterator[Step]:
    """Yield what the loss and the gradient have to be on a rank, and how much may travel."""
    members, result = answer.members, answer.value
    p, place = len(members), answer.place
    logits, labels = _logits(seed, scale)
    logits.requires_grad_()
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    where = f"with logits of a size of {scale:g}, {on(members)}"
    yield communication(result["forward"], only("all_reduce"), inside(members), waited)
    mistakes = _wrong_losses(logits.detach(), labels, p, place)
    yield value(result["y"], [loss.item()], mistakes, what=where, form="the mean loss")
    gradient = logits.grad.tensor_split(p, dim=1)[place]
    yield value(
        result["dx"],
        numbers_of(gradient),
        _wrong_logit_gradients(logits.detach(), gradient, p, place),
        what=f"gradient of the logits {where}",
        tolerance=EXACT,
    )
    yield communication(result["forward"], _few_numbers(where, len(labels)), some(members))
    yield communication(result["backward"], made("all_reduce", 0, " backward"), only())


def _few_numbers(where: str, samples: int) -> Rule:
    """Return the rule that all_reduces are few, and one number a sample at a time."""

    def rule(calls: Calls) -> str | None:
        if len(calls) > 3:
            return (
                f"{where}: {len(calls)} all_reduces; three are enough: the maximum, the sum, the "
                "label's logit"
            )
        nbytes, enough = sum(call["nbytes"] for call in calls), 3 * samples * BYTES
        if nbytes > enough:
            return (
                f"{where}: {nbytes} bytes reduced; one number a sample and a time is enough: "
                f"{enough} at most"
            )
        return None

    return rule


def _wrong_losses(logits: Tensor, labels: Tensor, p: int, place: int) -> list[Mistake]:
    """Return what mistakes make of the loss, on one of p ranks."""
    loss = functional.cross_entropy(logits, labels).item()
    samples, parts = range(len(labels)), logits.tensor_split(p, dim=1)
    picked = logits[samples, labels]
    maxima = [part.max(1).values for part in parts]
    sums = [(part - most[:, None]).exp().sum(1) for part, most in zip(parts, maxima, strict=True)]
    edges = torch.tensor([part.shape[1] for part in parts]).cumsum(0)
    owner = torch.bucketize(labels, edges, right=True)  # the place that has the label's class
    maxima_of_owners = torch.stack(maxima)[owner, samples]
    losses = {
        "this is a sum over the samples; take the mean": loss * len(labels),
        f"the loss is summed over the {p} ranks": loss * p,
        "the classes of this rank only were summed: sum the exponentials over the ranks":
            (parts[place].exp().sum(1).log() - picked).mean().item(),
        "the logit of the label is missing: the rank that has the class knows it":
            logits.exp().sum(1).log().mean().item(),
        "each rank subtracted a maximum of its own, and then summed: the maximum must be "
        "that of all ranks (ReduceOp.MAX)":
            (sum(sums).log() + maxima_of_owners - picked).mean().item(),
    }  # fmt: skip
    losses |= _wrong_masks(logits, labels, p)
    infinite = Mistake(
        lambda got: not _finite(got),
        "not a finite number. exp() of a large logit is inf: subtract the largest logit of each "
        "sample first",
    )
    return [infinite, *table({text: [wrong] for text, wrong in losses.items()})]


def _wrong_masks(logits: Tensor, labels: Tensor, p: int) -> dict[str, float]:
    """Return the losses if ranks that do not have the label's class add something to its logit."""
    shifted, first = logits - logits.amax(1, keepdim=True), 0
    losses = dict.fromkeys((
        "the label's logit also comes from ranks that do not have its class: multiply it by a mask",
        "a class at the border is counted by two ranks: this rank has the classes from first to "
        "first + count − 1",
        "labels are numbers of all classes: compare them with first and first + count",
    ), shifted.exp().sum(1).log())  # fmt: skip
    for part in shifted.tensor_split(p, dim=1):
        count = part.shape[1]
        picked = part.gather(1, (labels - first).clamp(0, count - 1)[:, None]).squeeze(1)
        near = (first <= labels) & (labels <= first + count)
        for text, mask in zip(losses, (1, near, labels < count), strict=True):
            losses[text] = losses[text] - picked * mask
        first += count
    return {text: loss.mean().item() for text, loss in losses.items()}


def _finite(result: object) -> bool:
    """Return whether a list has finite numbers only."""
    return not isinstance(result, list) or all(map(math.isfinite, result))


def _wrong_logit_gradients(logits: Tensor, right: Tensor, p: int, place: int) -> list[Mistake]:
    """Return what mistakes make of the gradient of the logits of one of p ranks."""
    samples, part = len(logits), logits.tensor_split(p, dim=1)[place]
    largest = part.argmax(1, keepdim=True)
    exponentials = (logits.softmax(1) / samples).tensor_split(p, dim=1)[place]
    gradients = {
        "a sum over the samples": right * samples,
        "the exponentials' part only: the label's logit was cut off, by detach or in place":
            exponentials,
        "the maximum has a gradient here: detach the logits that it is taken of":
            right.scatter_add(1, largest, -right.sum(1, keepdim=True)),
    }  # fmt: skip
    if p > 1:
        text = f"{p} times too large: it was summed over ranks that have the same loss"
        gradients = {text: right * p} | gradients
    return table({text: gradient.reshape(-1) for text, gradient in gradients.items()})


# -- 9.8: the same with DTensor ---------------------------------------------------------------


def probe_block(user_ns: dict, *, rank: int, seeds: list, common: int, size: int) -> dict:
    """A block that the student's plan has cut, on a mesh of the first ranks.

    seeds: of the shards. The first of the mesh, who hands them out, knows all; the others their
    own, and stand-ins for the rest.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    meshes = [DeviceMesh("cpu", list(range(k, k + size))) for k in range(0, 4, size)]
    mesh = meshes[rank // size]
    block = composed(common, seeds, models.Block, WIDTH, HEADS, HIDDEN)
    result = answer_named(user_ns, "parallelize")(block, mesh)
    if not isinstance(result, nn.Module):
        return {"returned": "nothing" if result is None else f"a {type(result).__name__}"}
    if result is not block:
        return {"returned": "another module than the block"}
    local = {
        name: list(p.to_local().shape) if isinstance(p, DTensor) else None
        for name, p in block.named_parameters()
        if "norm" not in name
    }
    missing = [name for name, shape in local.items() if shape is None]
    whole = models.Block(WIDTH, HEADS, HIDDEN)
    odd = [name for name, shape in shapes(whole, size).items() if local.get(name, shape) != shape]
    if missing or odd:
        return {"missing": missing, "odd": odd}
    found = both_ways(block, drawn(common + 1, *INPUT), drawn(common + 2, *INPUT))
    grads = {name: p.grad for name, p in block.named_parameters()}
    grads = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return found | {
        "gradients": {name: None if g is None else flat(g) for name, g in grads.items()}
    }


@task("9.8", "the same with DTensor", points=2)
def with_dtensor(ranks: Ranks, report: Report) -> None:
    """A block of the model: as the twin, with two all_reduces each way."""
    seeds = {size: report.seeds(WORLD) for size in (4, 2)}

    def judge(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
        members = _mesh_of(answer.rank, case["size"])
        own_seeds = tuple(seeds[case["size"]][rank] for rank in members)
        return _block(case, answer, members, own_seeds)

    cases = [
        {"each": _seeds_told(own, size), "common": report.seed, "size": size}
        for size, own in seeds.items()
    ]
    report.judge_cases(ranks, probe_block, cases, judge)


def _mesh_of(rank: int, size: int) -> list[int]:
    """Return the ranks of the mesh that a rank is in, where each has this size."""
    first = rank - rank % size
    return list(range(first, first + size))


def _seeds_told(seeds: list[int], size: int) -> list[dict[str, Any]]:
    """Return the seeds of shards that each rank is told: all, or its own and stand-ins."""
    seeds_told = []
    for rank in range(WORLD):
        members = _mesh_of(rank, size)
        seeds_told.append([seeds[r] if rank in (r, members[0]) else seeds[rank] for r in members])
    return to_each(seeds=seeds_told)


def _block(
    case: dict[str, Any], answer: Reply, members: list[int], seeds: tuple[int, ...]
) -> Iterator[Step]:
    """Yield what a rank's part of the block has to be, to give, and to communicate."""
    result, size, where = answer.value, case["size"], on(members)
    returned, missing, odd = (result.get(name) for name in ("returned", "missing", "odd"))
    yield facts({
        f"parallelize returned {returned}: change the block itself, and return the block": returned,
        f"{', '.join(missing or ())}: no DTensors, the plan has no style for them": missing,
        f"{where}: {', '.join(odd or ())}: cut in another way. q, k, v and up go by columns "
        "(ColwiseParallel), out and down by rows (RowwiseParallel), all of them over the mesh that "
        "was handed in": odd,
    })  # fmt: skip
    twin, what = uncut("Block", case["common"], seeds), f"output {where}"
    yield value(result["y"], numbers_of(twin.y), what=what, tolerance=EXACT)
    what = f"gradient of x {where}"
    yield value(result["dx"], numbers_of(twin.x.grad), what=what, tolerance=EXACT)
    for name, parameter in twin.layer.named_parameters():
        whole = "norm" in name
        own = parameter.grad if whole else shard(name, parameter.grad, size, answer.rank % size)
        yield shard_gradient(name, result["gradients"][name], own, size)
    yield facts(_wrong_reductions(result, where))


def _wrong_reductions(result: dict[str, Any], where: str) -> dict[str, object]:
    """Return what is wrong with the collectives of a block: two all_reduces each way."""
    forward, backward = (
        sum(call["op"].startswith("all_reduce") for call in result[way])
        for way in ("forward", "backward")
    )
    ops = {call["op"] for call in result["forward"] + result["backward"]}
    others = sorted(op for op in ops if not op.startswith("all_reduce"))
    return {
        f"{where}: it calls {', '.join(others)}. All_reduces are enough: each rank attends "
        "with its own heads": others,
        f"{where}: {forward} all_reduces forward, expected 2": forward != 2,
        f"{where}: {backward} all_reduces backward, expected 2. Q, K and V each take x for "
        "themselves, and each reduces its gradient: PrepareModuleInput makes x a DTensor once, for "
        "all three": backward > 2,
        f"{where}: {backward} all_reduces backward, expected 2": backward < 2,
    }


# -- 9.9: experts -----------------------------------------------------------------------------


@task("9.9", "experts on other ranks", points=2)
def expert_parallel(ranks: Ranks, report: Report) -> None:
    """Tokens go to their experts and come back; those beyond the capacity stay behind."""
    cases = [case | {"capacity": c} for case in cases_apart(report) for c in experts.CAPACITIES]
    cases.append(cases_apart(report)[2] | {"capacity": experts.MANY})
    for case, members, results in tried(ranks, report, experts.probe_experts, cases):
        experts.judge(report, case, members, results)
