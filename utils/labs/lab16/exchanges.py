"""Checks of lab 16: operators whose forward and backward are the two halves of one exchange.

Each operator has a conjugate operator, which does in forward what the first one does in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from utils.checks.comparison import inside, only, waited
from utils.checks.draws import drawn
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.checks.trials import GroupAnswer, judge_groups, on, seeds_of
from utils.cluster.questions import Ranks

from .probes import FUNCTIONS, OPERATORS, probe_operators, upstream_of
from .replies import Tensors, alike, cases, lengths


def _results(name: str, xs: Tensors, sizes: list[int]) -> list[Tensor]:
    """Return what an operator gives each rank of a group, from the inputs of all of them."""
    p = len(sizes)
    if name == "gather_tokens":
        return [torch.cat(list(xs))] * p
    if name == "scatter_sums":
        return list(sum(xs).split(sizes))
    if name == "heads_of":
        return [torch.cat([x.chunk(p)[r] for x in xs], 1) for r in range(p)]
    return [torch.cat([x.split(sizes, 1)[r] for x in xs]) for r in range(p)]


def _operators(answer: GroupAnswer) -> Iterator[Step]:
    p = len(answer.members)
    place = answer.place
    seeds = seeds_of(answer.case, answer.members)
    sizes = answer.case["sizes"][:p]
    for name in answer.case["names"]:
        reply = answer.value[name]
        both = ("y", "forward", name, 0), ("dx", "backward", OPERATORS[name][1], 1)
        for key, when, does, more in both:
            op, _, shape = OPERATORS[does]
            where = f"{name} {when} {on(answer.members)}"
            inputs = [drawn(seed, *shape(sizes, r)) for r, seed in enumerate(seeds)]
            if more:
                shapes = [shape(sizes, r) for r in range(p)]
                inputs = [upstream_of(s, shapes[r], r, p) for r, s in enumerate(seeds)]
            results = _results(does, inputs, sizes)
            right = results[place]
            calls = reply[when]
            yield communication(calls, only(op), inside(answer.members), waited)
            wrong = _wrong(does, inputs, results, sizes, place) if p > 1 else {}
            if when == "forward":
                yield from alike(reply["alone"], right, wrong, FUNCTIONS[name])
            yield from alike(reply[key], right, wrong, where)
            sizes_of = [[call["sent"], call["received"]] for call in calls]
            expected = [[inputs[place].nbytes, right.nbytes]] if calls or p > 1 else []
            yield value(sizes_of, expected, what=f"{where}: bytes that {op} sends and receives")
        yield communication(reply["others"], only(OPERATORS[name][0]), waited)
        text = f"{name}: You changed the gradient that came in. Work on a copy of it"
        yield facts({text: reply.get("changed")})


def _wrong(name: str, inputs: Tensors, results: Tensors, sizes: list[int], place: int) -> dict:
    p = len(sizes)
    right = results[place]
    wrong = {
        f"Your result is {p} times too large. Communicate once": p * right,
        f"Your result is {p} times too small. Don't divide by the number of ranks": right / p,
    }
    if name == "scatter_sums":
        alone = "You returned this rank's numbers alone. Sum over the ranks with reduce_scatter"
        return wrong | {alone: inputs[place].split(sizes)[place]}
    if name == "gather_tokens":
        own = [x * (r == place) for r, x in enumerate(inputs)]
        wrong["You have this rank's tokens only. Gather those of all ranks"] = torch.cat(own)
        other = "You joined the tokens in another order. Keep the order of the group's ranks"
        return wrong | {other: torch.cat(list(inputs)[::-1])}
    for r, one in enumerate(results):
        if r != place and one.shape == right.shape:
            wrong[f"You have what belongs to group rank {r}"] = one
    if name == "heads_of":
        every = [torch.cat([x[r::p] for r in range(p)]) for x in inputs]
        text = f"You gave each rank every {p}-th head. Give it a block of heads"
        wrong[text] = _results(name, every, sizes)[place]
    return wrong


@task("16.2", "the operators of sequence parallelism", points=2)
def token_operators(ranks: Ranks, report: Report) -> None:
    """Judge all_gather and reduce_scatter as conjugate operators, with unequal sizes."""
    listed = cases(report, names=["gather_tokens", "scatter_sums"])
    judge_groups(ranks, report, probe_operators, listed, _operators, lengths)


@task("16.7", "exchange heads", points=2)
def head_exchange(ranks: Ranks, report: Report) -> None:
    """Judge both exchanges of heads, each as the backward of the other one."""
    listed = cases(report, names=["heads_of", "tokens_of"])
    judge_groups(ranks, report, probe_operators, listed, _operators, lengths)
