"""Checks of primitives in lab 09: shards of a layer, and the conjugate operators f and g."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from utils.checks.comparison import EXACT, Mistake, inside, made, only, table, waited
from utils.checks.draws import drawn
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.checks.trials import GroupAnswer, judge_groups, on, seeds_of
from utils.cluster.questions import Ranks

from .probes import SHAPE, drawn_layer, probe_operators, probe_shards
from .sharded_layers import (
    BYTES,
    CHANGED,
    FROZEN,
    PARTITIONS,
    cases_apart,
    flat_table,
    numbers,
    of_size,
)

# -- 9.1: shards ------------------------------------------------------------------------------


@task("9.1", "the shards of a layer", points=2)
def shards(ranks: Ranks, report: Report) -> None:
    """Compare blocks of the weight's rows or columns, with the bias that belongs to them."""
    cases = [{"partition": partition, "seed": report.seed} for partition in PARTITIONS]
    judge_groups(ranks, report, probe_shards, cases, _shards)


def _shards(answer: GroupAnswer) -> Iterator[Step]:
    p = len(answer.members)
    place = answer.place
    linear = drawn_layer(answer.case["seed"], answer.case["partition"])
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
            "You returned a view, which keeps the whole weight in memory. Use clone()": view,
            "You returned the layer's own memory, so a change of the shard changes the layer. Use "
            "clone()": result["same"] and not kept,
            "You kept the graph of the whole layer. Use detach()": result["graph"],
            FROZEN: result["frozen"],
            CHANGED: result["changed"],
            "Your second call returned the first call's shards, although the layer had other "
            "numbers. Cut it in each call": result["stale"],
        }
        yield facts({f"{where}: {text}": is_so for text, is_so in wrong.items()})


def _wrong_weights(weight: Tensor, cut: int, p: int, place: int) -> list[Mistake]:
    turned = weight.chunk(p, cut)[place].T
    transposed = {"You transposed the weight. Leave it as PyTorch has it, [out, in]": turned}
    if p == 1:
        return table(transposed)
    by_mistake = {
        "You split the weight along the other dimension. PyTorch's weight is [out, in], so the "
        "columns of the matrix that multiplies x are its rows": weight.chunk(p, 1 - cut)[place],
        "You returned the whole weight. Take this rank's block": weight,
        f"You took every {p}-th line. Take one block, because the lines of an attention head "
        "belong together": weight[:, place::p] if cut else weight[place::p],
    }
    return table(by_mistake | transposed)


def _wrong_biases(bias: Tensor, cut: int, p: int, place: int) -> list[Mistake]:
    part = bias.chunk(p)[place]
    right = bias if cut else part
    other = {"You returned the whole bias. Take the part for this rank's outputs": bias}
    if cut:
        other = {"You split the bias, but each rank has all outputs. Leave it whole": part}
    by_mistake = {
        "You divided the bias by the number of ranks, but it is added once, after the sum. Leave "
        "it whole": bias / p,
        "Your bias is zero. Keep it: every rank adds it after the sum": 0 * right,
    }
    return table(by_mistake if p == 1 else other | by_mistake)


# -- 9.2: f and g -----------------------------------------------------------------------------


@task("9.2", "the conjugate operators f and g", points=3)
def operators(ranks: Ranks, report: Report) -> None:
    """Judge whether f sums only in backward, and g only in forward."""
    judge_groups(ranks, report, probe_operators, cases_apart(report), _operators)


def _operators(answer: GroupAnswer) -> Iterator[Step]:
    seeds = seeds_of(answer.case, answer.members)
    inputs = {"y": [drawn(seed, *SHAPE) for seed in seeds]}
    inputs["dx"] = [drawn(seed + 50, *SHAPE) for seed in seeds]
    yield from _operator(answer, "f", "dx", inputs)
    yield from _operator(answer, "g", "y", inputs)


#: The pass in which an operator gives its result, and its input's gradient.
_WHEN = {"y": "forward", "dx": "backward"}
#: What an operator must not do, by its name in the reply.
_HARM = {
    "input changed": "You changed the input, and others may need it. Sum a clone",
    "upstream changed": "You changed the gradient that came in, and others in the graph use it. "
    "Sum a clone",
    "overwritten": "Your second call changed the result of the first. Return a new tensor each "
    "time",
    "of the last call": "Your backward sums over the group of a later call. Keep the group in ctx",
}


def _operator(
    answer: GroupAnswer, name: str, summed: str, inputs: dict[str, list[Tensor]]
) -> Iterator[Step]:
    """Yield the steps for an operator that sums either its result or its gradient.

    Args:
        summed: the name of the summed one in the reply.
        inputs: for each of the two, the tensors that the ranks of the group pass.
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
        yield communication(calls, once, of_size("all_reduce", BYTES * math.prod(SHAPE), where))
    yield facts({f"{name}: {text}": result[key] for key, text in _HARM.items()})
    turned = [values_of(right[key]) for key in _WHEN]
    text = f"{name} of a transposed tensor, whose memory has another order"
    yield value(result["turned"], turned, what=text)
    times = 3 if name == "f" else 4  # four calls, three of them with backward
    more = made("all_reduce", times, f" in four more calls of {name}, one with zeros on a rank")
    yield communication(result["calls again"], *allowed, more, waited)


def _wrong_operators(
    name: str, key: str, summed: str, inputs: list[Tensor], place: int
) -> list[Mistake]:
    p = len(inputs)
    missing = Mistake(
        lambda gradient: gradient is None,
        "You returned no gradient for x. backward returns one value for each argument of forward, "
        "the gradient of x first",
    )
    right = sum(inputs)
    wrong = inputs[place]
    text = f"You returned this rank's own numbers. {name} must sum over the ranks in {_WHEN[key]}"
    if key != summed:
        right, wrong = wrong, right
        text = f"You summed the numbers of the ranks, but {name} sums in {_WHEN[summed]} only. "
        text += f"In {_WHEN[key]}, return what it gets"
    by_mistake = {
        text: wrong,
        "You returned the mean. Return the sum": right / p,
        f"Your result is {p} times too large. Sum once": right * p,
    }
    return [missing, *flat_table(by_mistake)]
