"""Checks of lab 09: shards, conjugate operators, Megatron's layers, traffic, a loss, experts.

Answers are tried in groups of 1, 2 and 4 ranks, in double precision, forward and backward, and
compared with the layer that was not split. What was communicated forward and backward is judged
apart. Gradients are compared absolutely: that of a key's bias is zero.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
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
    composed,
    drawn,
    flat,
    flat_table,
    layer_of,
    made_module,
    numbers,
    numbers_of,
    of_size,
    probe_layer,
    seeds_of,
    shapes,
    shard_gradients,
    uncut,
)

# -- 9.1: shards ------------------------------------------------------------------------------

WIDE, NARROW = 8, 12  # of the layer that is cut


@in_group
def probe_shards(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """Both ways to cut a layer: numbers, shapes, and how much memory lies behind them."""
    linear = _layer(seed, partition)
    result = {}
    for name in ("column_shard", "row_shard"):
        pair, calls = recorded(answer_named(user_ns, name), linear, **keywords(partition, group))
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"{name} returned {type(pair).__name__}, expected (weight, bias)")
        result[name] = _about(pair, linear) | {"calls": calls}
    return result


def _about(pair: Sequence[Any], linear: nn.Linear) -> dict[str, Any]:
    """Return what the kernel learns of a weight and a bias, which were cut from a layer."""
    tensors = [shard for shard in pair if isinstance(shard, Tensor)]
    places_of_layer = {linear.weight.data_ptr(), linear.bias.data_ptr()}
    return {
        "values": [t.detach().tolist() if isinstance(t, Tensor) else None for t in pair],
        "kept": [shard.untyped_storage().nbytes() > shard.nbytes for shard in tensors],
        "same": any(shard.data_ptr() in places_of_layer for shard in tensors),
        "graph": any(shard.grad_fn is not None for shard in tensors),
        "frozen": not (linear.weight.requires_grad and linear.bias.requires_grad),
    }


def _layer(seed: int, partition: Partition) -> nn.Linear:
    """Return what is cut; a larger layer where there is no group."""
    larger = 4 * (partition is None)
    return made_module(seed, nn.Linear, WIDE + larger, NARROW + larger)


@task("9.1", "the shards of a layer", points=2)
def shards(ranks: Ranks, report: Report) -> None:
    """Blocks of rows or columns of the weight, with the bias that belongs to them."""
    cases = [{"partition": partition, "seed": report.seed} for partition in PARTITIONS]
    judge_groups(ranks, report, probe_shards, cases, _shards)


def _shards(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what both functions have to return on a rank."""
    p, place = len(answer.members), answer.place
    linear = _layer(answer.case["seed"], answer.case["partition"])
    weight, bias = linear.weight.detach(), linear.bias.detach()
    for name, cut in (("column_shard", 0), ("row_shard", 1)):
        where = f"{name} {on(answer.members)}"
        result = answer.value[name]
        yield communication(result["calls"], only())
        part = weight.chunk(p, cut)[place].tolist()
        mistakes = _wrong_weights(weight, cut, p, place)
        yield value(result["values"][0], part, mistakes, what=f"{where}: weight", tolerance=EXACT)
        own_bias = bias if cut else bias.chunk(p)[place]
        mistakes = _wrong_biases(bias, cut, p, place)
        yield numbers(result["values"][1], own_bias, mistakes, where=f"{where}: bias")
        kept = any(result["kept"])
        view = kept and p > 1
        wrong = {
            "the shard is a view, and the whole weight stays in memory behind it: clone()": view,
            "this is the layer's own memory: what changes the shard changes the layer, "
            "clone()": result["same"] and not kept,
            "the shard hangs on the graph of the whole layer: detach()": result["graph"],
            FROZEN: result["frozen"],
        }
        yield facts({f"{where}: {text}": is_so for text, is_so in wrong.items()})


def _wrong_weights(weight: Tensor, cut: int, p: int, place: int) -> list[Mistake]:
    turned = weight.chunk(p, cut)[place].T
    transposed = {"the weight is transposed: leave it as PyTorch has it, [out, in]": turned}
    if p == 1:
        return table(transposed)
    by_mistake = {
        "the weight is cut along the other dimension. PyTorch's weight is [out, in]: the columns "
        "of the matrix that x is multiplied by are the rows of it": weight.chunk(p, 1 - cut)[place],
        "this is the whole weight: take this rank's block": weight,
        f"every {p}-th line was taken. Take one block: the lines of an attention head belong "
        "together": weight[:, place::p] if cut else weight[place::p],
    }
    return table(by_mistake | transposed)


def _wrong_biases(bias: Tensor, cut: int, p: int, place: int) -> list[Mistake]:
    part = bias.chunk(p)[place]
    right = bias if cut else part
    by_mistake = {
        "the bias is divided by the number of ranks. That would do, if it were added before the "
        "sum; this one is added once, afterwards": bias / p,
        "the bias is zero here: it is replicated, as every rank adds it after the sum": 0 * right,
    }
    if p == 1:
        return table(by_mistake)
    if cut:
        other = {"the bias is cut, but each rank has all outputs here: leave it whole": part}
    else:
        other = {"the whole bias: a rank has a bias for its own outputs only": bias}
    return table(other | by_mistake)


# -- 9.2: f and g -----------------------------------------------------------------------------

_SHAPE = (3, 4)


@in_group
def probe_operators(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """f and g of this rank's numbers; of a gradient that is not contiguous, or used twice."""
    named = keywords(partition, group)
    x = drawn(seed, *_SHAPE)
    upstream = drawn(seed + 50, *_SHAPE)
    return {name: _operated(answer_named(user_ns, name), named, x, upstream) for name in ("f", "g")}


def _operated(function: Callable, named: dict, x: Tensor, upstream: Tensor) -> dict[str, Any]:
    """Return what an operator gives in four calls, and what it changes."""
    operator = functools.partial(function, **named)
    copy = x.clone()
    shared = upstream.clone()
    result = both_ways(operator, x, upstream)
    earlier, again = recorded(operator, copy)
    before = flat(earlier)
    turned = both_ways(lambda t: operator(t.t()).t(), x, upstream)
    y, calls = recorded(operator, (x + 1).requires_grad_())
    function(x.clone(), None)  # with other ranks, between forward and backward
    later = []
    if isinstance(y, Tensor) and y.requires_grad:
        later = recorded(y.backward, shared)[1]
    size = dist.get_world_size(named.get("group"))
    return result | {
        "calls again": again + turned["forward"] + turned["backward"] + calls + later,
        "input changed": not torch.equal(copy, x),
        "upstream changed": not torch.equal(shared, upstream),
        "overwritten": before != flat(earlier),
        "of the last call": any(len(call["group"]) != size for call in later),
        "turned": [turned["y"], turned["dx"]],
    }


@task("9.2", "the conjugate operators f and g", points=3)
def operators(ranks: Ranks, report: Report) -> None:
    """One does nothing forward and sums backward; the other the reverse."""
    judge_groups(ranks, report, probe_operators, cases_apart(report), _operators)


def _operators(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what f and g have to do on a rank."""
    seeds = seeds_of(answer.case, answer.members)
    inputs = {"y": [drawn(seed, *_SHAPE) for seed in seeds]}
    inputs["dx"] = [drawn(seed + 50, *_SHAPE) for seed in seeds]
    yield from _operator(answer, "f", "dx", inputs)
    yield from _operator(answer, "g", "y", inputs)


#: When an operator gives its result, and the gradient of its input.
_WHEN = {"y": "forward", "dx": "backward"}


#: What an operator must not do, by its name in the reply.
_HARM = {
    "input changed": "its input has changed. Others may still need it: sum a clone",
    "upstream changed": "the gradient that came in has changed. Others in the graph use that "
    "tensor, too: sum a clone",
    "overwritten": "a second call has changed the result of the first. Return a new tensor each "
    "time",
    "of the last call": "backward sums over the group of a later call. Keep the group in ctx",
}


def _operator(
    answer: GroupAnswer, name: str, summed: str, inputs: dict[str, list[Tensor]]
) -> Iterator[Step]:
    """Yield what an operator has to do that sums either its result or the gradient.

    Args:
        summed: which of the two, by its name in the reply.
        inputs: of each of the two, what the ranks of the group hand in.
    """
    members, result = answer.members, answer.value[name]
    allowed = only("all_reduce"), inside(members)
    right = {key: sum(of) if key == summed else of[answer.place] for key, of in inputs.items()}
    for key, when in _WHEN.items():
        calls = result[when]
        where = f"{name} {when} {on(members)}"
        yield communication(calls, *allowed, waited)
        mistakes = _wrong_operators(name, key, summed, inputs[key], answer.place)
        yield numbers(result[key], right[key], mistakes, where=where)
        once = made("all_reduce", int(key == summed), f" {when} in {name}")
        yield communication(calls, once, of_size("all_reduce", BYTES * math.prod(_SHAPE), where))
    yield facts({f"{name}: {text}": result[key] for key, text in _HARM.items()})
    turned = [numbers_of(right[key]) for key in _WHEN]
    text = f"{name} of a transposed tensor, whose memory has another order"
    yield value(result["turned"], turned, what=text)
    times = 2 if name == "f" else 3  # of three calls, two with backward
    more = made("all_reduce", times, f" in three more calls of {name}")
    yield communication(result["calls again"], *allowed, more, waited)


def _wrong_operators(
    name: str, key: str, summed: str, inputs: list[Tensor], place: int
) -> list[Mistake]:
    p = len(inputs)
    missing = Mistake(
        lambda gradient: gradient is None,
        "there is no gradient for x: backward returns one value for each argument of forward, that "
        "of x first",
    )
    if key == summed:
        right, wrong = sum(inputs), inputs[place]
        text = f"these are this rank's own numbers: {name} sums over the ranks {_WHEN[key]}"
    else:
        right, wrong = inputs[place], sum(inputs)
        text = f"the numbers of the ranks were summed. {name} does that {_WHEN[summed]} only; "
        text += f"{_WHEN[key]} it hands on what it gets"
    by_mistake = {
        text: wrong,
        "this is the mean; the parts of a sum are added": right / p,
        f"this is {p} times what it should be": right * p,
    }
    return [missing, *flat_table(by_mistake)]


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
    linears = composed(common, [seed] * p, _linears)
    x = drawn(common + 1, 2, WIDE)
    upstream = drawn(common + 2, 2, NARROW)

    def alone(name: str, linear: nn.Module, part: Tensor, gradient: Tensor) -> dict[str, Any]:
        layer = answer_named(user_ns, name)(linear, **keywords(partition, group))
        return both_ways(layer, part, gradient)

    return {
        "ColumnLinear": alone("ColumnLinear", linears["up"], x, upstream.chunk(p, 1)[place]),
        "RowLinear": alone("RowLinear", linears["down"], x.chunk(p, 1)[place], upstream),
    }


def _both_linears(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what both layers have to give, and which of them communicates."""
    common = answer.case["common"]
    seeds = seeds_of(answer.case, answer.members)
    linears = composed(common, seeds, _linears)
    x = drawn(common + 1, 2, WIDE)
    part = linears["up"](x).chunk(len(seeds), 1)[answer.place]
    for name, reduced, y in (("ColumnLinear", 0, part), ("RowLinear", 1, linears["down"](x))):
        result = answer.value[name]
        where = f"{name} by itself {on(answer.members)}"
        yield communication(result["forward"], made("all_reduce", reduced, f" forward in {where}"))
        yield value(result["y"], numbers_of(y), what=where)
        f_inside = "; f belongs in front of all that reads x, not into a layer"
        backward = made("all_reduce", 0, f" backward in {where}{f_inside}")
        yield communication(result["backward"], backward)


@task("9.4", "attention, by heads", points=2)
def parallel_attention(ranks: Ranks, report: Report) -> None:
    """Equal to the attention that was not split, with one all_reduce each way."""
    _judge_layer(ranks, report, "ParallelAttention")


# -- 9.5: the norm of all gradients ------------------------------------------------------------

#: Of each parameter, the shape of the whole one, and whether it is cut (its rows, not evenly).
PARAMETERS = {"a": ((9, 4), True), "b": ((5,), False), "c": ((7,), True), "d": ((3, 3), False)}


class Gradients:
    """Gradients of a model on p ranks, by the seed of the whole ones; for the seed 0 all are 0.

    Attributes:
        shards: the squares of the norms of what is cut, of each rank.
        rest: those of what all ranks have.
        norm: of all.
    """

    def __init__(self, seed: int, p: int):
        self.p = p
        self.whole = {
            name: (seed > 0) * drawn(seed + k, *shape)
            for k, (name, (shape, _)) in enumerate(PARAMETERS.items())
        }
        squares = [
            {name: part.square().sum().item() for name, part in self.of_rank(place).items()}
            for place in range(p)
        ]
        self.shards = [[row[name] for name in row if PARAMETERS[name][1]] for row in squares]
        self.rest = [x for name, x in squares[0].items() if not PARAMETERS[name][1]]
        self.norm = math.sqrt(sum(map(sum, self.shards)) + sum(self.rest))

    def of_rank(self, place: int) -> dict[str, Tensor]:
        """Return what the rank at a place has: its rows of what is cut, and all of the rest."""
        return {
            name: self.whole[name].tensor_split(self.p)[place] if is_cut else self.whole[name]
            for name, (_, is_cut) in PARAMETERS.items()
        }

    def scaled(self, place: int, cut: float, rest: float) -> list[list[float]]:
        """Return the numbers of a rank, by factors for what is cut and for the rest."""
        return [
            numbers_of(tensor * (cut if PARAMETERS[name][1] else rest))
            for name, tensor in self.of_rank(place).items()
        ]

    def norm_of_rank(self, place: int) -> float:
        """Return the norm of what the rank at a place has."""
        return math.sqrt(sum(self.shards[place]) + sum(self.rest))


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
        model[name].grad = rows_of_rank
    model["unused"] = nn.Parameter(torch.ones(2, dtype=torch.float64))
    function = answer_named(user_ns, "clip_gradients")
    is_cut = {"a", "c"}.__contains__
    norm, calls = recorded(function, model, is_cut, most, **keywords(partition, group))
    return {
        "norm": number(norm),
        "calls": calls,
        "gradients": [flat(model[name].grad) for name in gradients],
        "unused": model["unused"].grad is None and bool((model["unused"] == 1).all()),
    }


def _clip_case(seed: int, partition: Partition, share: float) -> dict[str, Any]:
    """Return a case of gradients of this seed, and of a bound that is a share of their norm."""
    each = []
    for place, p in places(partition):
        gradients = Gradients(seed, p)
        rows = {name: tensor.tolist() for name, tensor in gradients.of_rank(place).items()}
        each.append({"gradients": rows, "most": share * (gradients.norm or 1)})
    return {"partition": partition, "each": each}


def _hint_zeros(case: dict[str, Any]) -> str:
    """Return what to say of an error where all gradients are 0."""
    zeros = not any(map(any, case["each"][0]["gradients"]["a"]))
    return "all gradients are 0, and so is their norm: don't divide by it" if zeros else ""


@task("9.5", "the norm of all gradients", points=2)
def clip_gradients(ranks: Ranks, report: Report) -> None:
    """The norm of the whole model on each rank, and all gradients scaled by it."""
    # Not the same each time: who knows the bound, or was alone before, does not know the norm.
    # Below half of it, so that a rank's own norm is above the bound, too.
    draw = random.Random(report.seed)
    seeds = report.seeds(2 * len(PARTITIONS))
    shares = [draw.uniform(low, 2 * low) for low in (0.2, 1.2) for _ in PARTITIONS]
    # A bound that the norm is above and a rank's own is not; then all gradients are 0.
    seeds += [report.seed, 0]
    shares += [draw.uniform(0.9, 0.97), 1.5]
    among = (*PARTITIONS * 2, PARTITIONS[0], None)
    for seed, partition, share in zip(seeds, among, shares, strict=True):
        judge = functools.partial(_clipped, seed=seed, share=share)
        case = _clip_case(seed, partition, share)
        if not judge_groups(ranks, report, probe_clip, [case], judge, _hint_zeros):
            break


def _clipped(answer: GroupAnswer, seed: int, share: float) -> Iterator[Step]:
    """Yield what a rank has to return and to scale, where the bound is this share of the norm."""
    members, place, result = answer.members, answer.place, answer.value
    gradients = Gradients(seed, len(members))
    where = f"{on(members)}, bound {'below' if share < 1 else 'above'}"
    yield communication(result["calls"], only("all_reduce"), inside(members), waited)
    yield value(
        result["norm"],
        gradients.norm,
        [NO_NUMBER, *_wrong_norms(gradients, place, share)],
        what=f"the norm {where}",
        form="the norm, a number",
    )
    factor = min(share, 1)
    scaled = gradients.scaled(place, factor, factor)
    mistakes = _wrong_scales(gradients, place, share)
    yield value(result["gradients"], scaled, mistakes, what=f"gradients {where}")
    text = "a parameter without a gradient has changed, or got one: leave out those whose grad is "
    yield facts({f"{where}: {text}None": not result["unused"]})
    yield communication(result["calls"], made("all_reduce", 1), _one_number)


def _wrong_norms(gradients: Gradients, place: int, share: float) -> list[Mistake]:
    p = gradients.p
    every = sum(map(sum, gradients.shards))
    replicated = sum(gradients.rest)
    of_ranks = [gradients.norm_of_rank(k) for k in range(p)]
    of_shards = [sum(map(math.sqrt, squares)) for squares in gradients.shards]
    of_rest = sum(map(math.sqrt, gradients.rest))
    of_all = sum(of_shards) + of_rest
    mean = math.sqrt(every / p + replicated)
    norms = {
        "this is the norm of what this rank has: the squares of the other ranks' shards are "
        "missing": of_ranks[place],
        f"replicated parameters are counted {p} times, once for each rank: their squares are added "
        "after the all_reduce": math.sqrt(every + p * replicated),
        "the replicated parameters are missing": math.sqrt(every),
        "the shards are missing": math.sqrt(replicated),
        "this is the square of the norm": every + replicated,
        "norms were added; squares are, and the root comes last": sum(of_ranks),
        "norms of the parameters were added; squares are, and the root comes last": of_all,
        "norms of the parameters of this rank were added; squares are, over all ranks, and the "
        "root comes last": of_shards[place] + of_rest,
        "the mean over the ranks; the squares of shards are added": mean,
        "this is the norm after clipping; the one before is asked for": share * gradients.norm,
    }
    return table({text: norm for text, norm in norms.items() if abs(norm - gradients.norm) > 1e-9})


def _wrong_scales(gradients: Gradients, place: int, share: float) -> list[Mistake]:
    norm = gradients.norm
    right = min(share, 1)
    by_rank = min(share * norm / (gradients.norm_of_rank(place) or 1), 1)
    factors = {
        "nothing was scaled, though the norm is above the bound": 1.0,
        "the gradients were scaled, though the norm is not above the bound": share,
        "divided by the norm, but not multiplied by the bound": 1 / (norm or 1),
        "multiplied by the bound, but not divided by the norm": share * norm,
        "scaled twice": right**2,
        "scaled by the norm of what this rank has; the ranks' replicas now differ": by_rank,
        "the gradients are gone": 0.0,
    }
    pairs = {  # of what is cut, and of the rest
        **{text: (factor, factor) for text, factor in factors.items()},
        "only the shards were scaled: multiply the replicated gradients as well": (right, 1),
        "only the replicated gradients were scaled: multiply the shards as well": (1, right),
    }
    return [
        Mistake(gradients.scaled(place, *pair), text)
        for text, pair in pairs.items()
        if max(abs(factor - right) for factor in pair) > 1e-9
    ]


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
    models_cut = (
        (1, 2 + k, 16, 64, 1),
        (3 + k, 8, 17, 32, 6),
        (2, 64, 16, 64, 2),
        (24, 4, 1024, 64 * (k + 2), 8),
        (2, 4, 16, 64, 9 + report.seed % 90),
    )
    replicas = ((1000 + k, 1), (54_986 + k, 6), (104_970, 2), (3 * 10**9, 8))
    cases = [_tensor_parallel(*sizes) for sizes in models_cut]
    cases += [_data_parallel(*sizes) for sizes in replicas]
    judge_calls(ranks, report, cases)


def _tensor_parallel(depth: int, batch: int, tokens: int, width: int, p: int) -> Case:
    """Return the case of a model whose layers are cut."""
    share = 2 * (p - 1) / p
    nbytes = 4 * batch * tokens * width
    count = 4 * depth
    sent = count * share * nbytes
    half = (
        "this is half of them: a block has two layers with an all_reduce, attention and MLP, and "
        "backward has as many as forward"
    )
    by_bytes = {
        "the bytes are those of one all_reduce": share * nbytes,
        "the bytes of the tensors: on a ring a rank sends 2 (p − 1) / p of them": count * nbytes,
        "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each": sent / 2,
        "numbers, not bytes: a float32 has four": sent / 4,
        "each token has a row of its own: batch · tokens · width numbers": sent / tokens,
        "every rank has all of x, and all of x is summed: don't divide by p": sent / p,
    }
    by_mistake = {half: [count / 2, sent / 2]}
    by_mistake |= {text: [count, nbytes] for text, nbytes in by_bytes.items()}
    sizes = [depth, batch, tokens, width, p]
    form = "(number of all_reduces, bytes that each rank sends)"
    return Case("tensor_parallel_traffic", sizes, [count, sent], table(by_mistake), form)


def _data_parallel(parameters: int, p: int) -> Case:
    """Return the case of a model of which each rank has a replica."""
    nbytes = 4 * parameters
    sent = 2 * (p - 1) / p * nbytes
    by_mistake = {
        "the bytes of the gradients: on a ring a rank sends 2 (p − 1) / p of them": nbytes,
        "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each": sent / 2,
        "numbers, not bytes: a float32 has four": sent / 4,
        "the gradients travel once, not forward and backward": 2 * sent,
        "every rank has the gradients of all parameters: don't divide by p": sent / p,
    }
    form = "bytes that each rank sends"
    return Case("data_parallel_traffic", [parameters, p], sent, table(by_mistake), form)


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
    function = reading_answer(user_ns, "class_parallel_loss")
    labels_of_all = torch.tensor(labels)
    return both_ways(
        lambda own: function(own, first, labels_of_all, **keywords(partition, group)),
        torch.tensor(part, dtype=torch.float64),
        torch.ones((), dtype=torch.float64),
    )


def _loss_case(seed: int, partition: Partition, scale: float) -> dict[str, Any]:
    """Return a case in which each rank is told the logits of its own classes."""
    logits, labels = _logits(seed, scale)
    each = []
    for place, p in places(partition):
        parts = logits.tensor_split(p, dim=1)
        first = sum(part.shape[1] for part in parts[:place])
        each.append({"part": parts[place].tolist(), "first": first})
    return {"partition": partition, "labels": labels.tolist(), "each": each}


@task("9.7", "extra mile: a loss over split classes", points=2)
def class_parallel_loss(ranks: Ranks, report: Report) -> None:
    """The cross entropy of all classes, and the gradient of this rank's logits."""
    runs = list(itertools.product(PARTITIONS, (1.0, 900.0)))
    for seed, (partition, scale) in zip(report.seeds(len(runs)), runs, strict=True):
        judge = functools.partial(_loss_of_classes, seed=seed, scale=scale)
        case = _loss_case(seed, partition, scale)
        if not judge_groups(ranks, report, probe_loss, [case], judge):
            break


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
    mistakes = _wrong_logit_gradients(logits.detach(), gradient, p, place)
    yield numbers(result["dx"], gradient, mistakes, where=f"gradient of the logits {where}")
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
        nbytes = sum(call["nbytes"] for call in calls)
        enough = 3 * samples * BYTES
        if nbytes > enough:
            return (
                f"{where}: {nbytes} bytes reduced; one number a sample and a time is enough: "
                f"{enough} at most"
            )
        return None

    return rule


def _wrong_losses(logits: Tensor, labels: Tensor, p: int, place: int) -> list[Mistake]:
    loss = functional.cross_entropy(logits, labels)
    parts = logits.tensor_split(p, dim=1)
    picked = logits[range(len(labels)), labels]
    maxima = [part.max(1).values for part in parts]
    sums = [(part - most[:, None]).exp().sum(1) for part, most in zip(parts, maxima, strict=True)]
    edges = torch.tensor([part.shape[1] for part in parts]).cumsum(0)
    owner = torch.bucketize(labels, edges, right=True)  # the place that has the label's class
    maxima_of_owners = torch.stack(maxima)[owner, range(len(labels))]
    of_own_classes = parts[place].exp().sum(1).log() - picked
    own_maxima = sum(sums).log() + maxima_of_owners - picked
    no_label = logits.exp().sum(1).log()
    losses = {
        "this is a sum over the samples; take the mean": loss * len(labels),
        f"the loss is summed over the {p} ranks": loss * p,
        "the classes of this rank only were summed: sum the exponentials over the "
        "ranks": of_own_classes.mean(),
        "the logit of the label is missing: the rank that has the class knows it": no_label.mean(),
        "each rank subtracted a maximum of its own, and then summed: the maximum must be "
        "that of all ranks (ReduceOp.MAX)": own_maxima.mean(),
    }
    infinite = Mistake(
        lambda result: not _finite(result),
        "not a finite number. exp() of a large logit is inf: subtract the largest logit of each "
        "sample first",
    )
    return [infinite, *flat_table(losses | _wrong_masks(logits, labels, p))]


def _wrong_masks(logits: Tensor, labels: Tensor, p: int) -> dict[str, Tensor]:
    shifted = logits - logits.amax(1, keepdim=True)
    total = shifted.exp().sum(1).log()
    losses = dict.fromkeys(("everywhere", "near", "below"), total)
    first = 0
    for part in shifted.tensor_split(p, dim=1):
        count = part.shape[1]
        picked = part.gather(1, (labels - first).clamp(0, count - 1)[:, None]).squeeze(1)
        losses["everywhere"] = losses["everywhere"] - picked
        near = (first <= labels) & (labels <= first + count)
        losses["near"] = losses["near"] - picked * near
        losses["below"] = losses["below"] - picked * (labels < count)
        first += count
    return {_WRONG_MASKS[name]: loss.mean() for name, loss in losses.items()}


#: What to say of a mask that lets through more than the label's class.
_WRONG_MASKS = {
    "everywhere": "the label's logit also comes from ranks that do not have its class: multiply it "
    "by a mask",
    "near": "a class at the border is counted by two ranks: this rank has the classes from first "
    "to first + count − 1",
    "below": "labels are numbers of all classes: compare them with first and first + count",
}


def _finite(result: object) -> bool:
    """Return whether a list has finite numbers only."""
    return not isinstance(result, list) or all(map(math.isfinite, result))


def _wrong_logit_gradients(logits: Tensor, right: Tensor, p: int, place: int) -> list[Mistake]:
    samples = len(logits)
    largest = logits.tensor_split(p, dim=1)[place].argmax(1, keepdim=True)
    of_maximum = right.scatter_add(1, largest, -right.sum(1, keepdim=True))
    exponentials = (logits.softmax(1) / samples).tensor_split(p, dim=1)[place]
    gradients = {
        f"{p} times too large: it was summed over ranks that have the same loss": right * p,
        "a sum over the samples": right * samples,
        "the exponentials' part only: the label's logit was cut off, by detach or in "
        "place": exponentials,
        "the maximum has a gradient here: detach the logits that it is taken of": of_maximum,
    }
    return flat_table(gradients)


# -- 9.8: the same with DTensor ---------------------------------------------------------------


def probe_block(user_ns: dict, *, rank: int, seeds: list, common: int, size: int) -> dict:
    """Run a block that the student's plan has cut, on a mesh of as many ranks as `size` says.

    Args:
        seeds: of the shards. The first of the mesh, who hands them out, knows all; the others
            their own, and stand-ins for the rest.
    """
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [DeviceMesh("cpu", list(range(k, k + size))) for k in range(0, WORLD, size)]
    block = composed(common, seeds, models.Block, WIDTH, HEADS, HIDDEN)
    result = answer_named(user_ns, "parallelize")(block, meshes[rank // size])
    if not isinstance(result, nn.Module):
        return {"returned": "nothing" if result is None else f"a {type(result).__name__}"}
    if result is not block:
        return {"returned": "another module than the block"}
    odd = _odd_parameters(block, size)
    if any(odd.values()):
        return odd
    passed = both_ways(block, drawn(common + 1, *INPUT), drawn(common + 2, *INPUT))
    gradients = {name: flat(_local(p.grad)) for name, p in block.named_parameters()}
    return passed | {"gradients": gradients}


def _local(tensor: Tensor | None) -> Tensor | None:
    """Return what this rank has of a DTensor; anything else as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _odd_parameters(block: nn.Module, size: int) -> dict[str, list[str]]:
    """Return the names of parameters that are no DTensors, and of those with another shape."""
    parameters = {name: p for name, p in block.named_parameters() if "norm" not in name}
    whole = models.Block(WIDTH, HEADS, HIDDEN)
    missing = [name for name, p in parameters.items() if _local(p) is p]
    odd = [
        name
        for name, shape in shapes(whole, size).items()
        if name in parameters and list(_local(parameters[name]).shape) != shape
    ]
    return {"missing": missing, "odd": odd}


@task("9.8", "the same with DTensor", points=2)
def with_dtensor(ranks: Ranks, report: Report) -> None:
    """A block of the model: as the twin, with two all_reduces each way."""
    for size, seeds in {size: report.seeds(WORLD) for size in (4, 2)}.items():
        meshes = [list(range(k, k + size)) for k in range(0, WORLD, size) for _ in range(size)]
        # The first of a mesh is told the seeds of all its shards, the others their own.
        known = [
            [seeds[r] if rank in (r, members[0]) else seeds[rank] for r in members]
            for rank, members in enumerate(meshes)
        ]
        case = {"each": to_each(seeds=known), "common": report.seed, "size": size}
        judge = functools.partial(_block, meshes=meshes, seeds=seeds)
        if not report.judge_cases(ranks, probe_block, [case], judge):
            break


def _block(
    case: dict[str, Any], answer: Reply, meshes: list[list[int]], seeds: list[int]
) -> Iterator[Step]:
    """Yield what a rank's part of the block has to be, to give, and to communicate."""
    result = answer.value
    members = meshes[answer.rank]
    where = on(members)
    returned, missing, odd = (result.get(name) for name in ("returned", "missing", "odd"))
    text = f"parallelize returned {returned}: change the block itself, and return the block"
    yield facts({text: returned})
    text = f"{', '.join(missing or ())}: no DTensors, the plan has no style for them"
    yield facts({text: missing})
    text = (
        f"{where}: {', '.join(odd or ())}: cut in another way. q, k, v and up go by columns "
        "(ColwiseParallel), out and down by rows (RowwiseParallel), all of them over the mesh that "
        "was handed in"
    )
    yield facts({text: odd})
    twin = uncut("Block", case["common"], tuple(seeds[rank] for rank in members))
    yield numbers(result["y"], twin.y, where=f"output {where}")
    yield numbers(result["dx"], twin.x.grad, where=f"gradient of x {where}")
    place = members.index(answer.rank)
    yield from shard_gradients(twin, result["gradients"], len(members), place)
    yield facts(_wrong_reductions(result, where))


def _wrong_reductions(result: dict[str, Any], where: str) -> dict[str, object]:
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
