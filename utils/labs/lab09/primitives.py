"""Checks of primitives in lab 09: shards of a layer, and the conjugate operators f and g."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.comparison import Mistake, inside, made, only, table, waited
from utils.checks.probe import answer_named, recorded
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.checks.trials import Group, GroupAnswer, Partition, in_group, judge_groups, keywords, on
from utils.cluster.questions import Ranks

from .sharded_layers import (
    BYTES,
    EXACT,
    FROZEN,
    PARTITIONS,
    both_ways,
    cases_apart,
    drawn,
    flat,
    flat_table,
    made_module,
    numbers,
    numbers_of,
    of_size,
    seeds_of,
)

# -- 9.1: shards ------------------------------------------------------------------------------

WIDE = 8  # of the layer that is cut
NARROW = 12


@in_group
def probe_shards(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """Cut a layer both ways; return numbers, and how much memory lies behind them."""
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
    larger = 4 * (partition is None)
    return made_module(seed, nn.Linear, WIDE + larger, NARROW + larger)


@task("9.1", "the shards of a layer", points=2)
def shards(ranks: Ranks, report: Report) -> None:
    """Judge blocks of rows or columns of the weight, with the bias that belongs to them."""
    cases = [{"partition": partition, "seed": report.seed} for partition in PARTITIONS]
    judge_groups(ranks, report, probe_shards, cases, _shards)


def _shards(answer: GroupAnswer) -> Iterator[Step]:
    p = len(answer.members)
    place = answer.place
    linear = _layer(answer.case["seed"], answer.case["partition"])
    weight = linear.weight.detach()
    bias = linear.bias.detach()
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
    other = {"the whole bias: a rank has a bias for its own outputs only": bias}
    if cut:
        other = {"the bias is cut, but each rank has all outputs here: leave it whole": part}
    by_mistake = {
        "the bias is divided by the number of ranks. That would do, if it were added before the "
        "sum; this one is added once, afterwards": bias / p,
        "the bias is zero here: it is replicated, as every rank adds it after the sum": 0 * right,
    }
    return table(by_mistake if p == 1 else other | by_mistake)


# -- 9.2: f and g -----------------------------------------------------------------------------

_SHAPE = (3, 4)


@in_group
def probe_operators(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """Call f and g with this rank's numbers, and with a gradient that is used twice."""
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
    """Judge whether f sums backward only, and g forward only."""
    judge_groups(ranks, report, probe_operators, cases_apart(report), _operators)


def _operators(answer: GroupAnswer) -> Iterator[Step]:
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
    result = answer.value[name]
    allowed = only("all_reduce"), inside(answer.members)
    right = {key: sum(of) if key == summed else of[answer.place] for key, of in inputs.items()}
    for key, when in _WHEN.items():
        calls = result[when]
        where = f"{name} {when} {on(answer.members)}"
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
    right = sum(inputs)
    wrong = inputs[place]
    text = f"these are this rank's own numbers: {name} sums over the ranks {_WHEN[key]}"
    if key != summed:
        right, wrong = wrong, right
        text = f"the numbers of the ranks were summed. {name} does that {_WHEN[summed]} only; "
        text += f"{_WHEN[key]} it hands on what it gets"
    by_mistake = {
        text: wrong,
        "this is the mean; the parts of a sum are added": right / p,
        f"this is {p} times what it should be": right * p,
    }
    return [missing, *flat_table(by_mistake)]
