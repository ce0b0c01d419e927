"""Check of expert parallelism in lab 09: tokens travel to experts on other ranks, and back.

The reference model has all experts in one process, so it needs no communication.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.checks.comparison import Calls, Mistake, Rule, inside, one_of, only
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, communication, task, to_each
from utils.checks.trials import WORLD, GroupAnswer, judge_each_group, on, seeds_of
from utils.cluster.questions import Ranks

from .probes import (
    CAPACITIES,
    SPARSE,
    expert_of,
    kept_tokens,
    probe_experts,
    routed_tokens,
    sizes_of,
)
from .sharded_layers import BYTES, PARTITIONS, cases_apart, flat_table, numbers

#: This one is large enough, too, and a byte can't count so many tokens.
MANY = 300


def _overwritten(choice: Tensor, capacity: int) -> Tensor:
    """Return each token's source if tokens beyond the capacity overwrite the last slot."""
    tokens = torch.arange(len(choice))
    for expert in choice.unique():
        own = (choice == expert).nonzero().flatten()
        tokens[own[capacity - 1 :]] = own[-1]
    return tokens


def _outputs(modules: list[nn.Module], x: Tensor, choice: Tensor) -> Tensor:
    """Return what each token's expert computes from it."""
    if not len(x):
        return x
    return torch.stack([modules[int(c)](token) for token, c in zip(x, choice, strict=True)])


class ReferenceExperts:
    """A reference model that has all experts of a group in one process, after forward and backward.

    `outputs` has what the experts compute for the tokens of each rank, `ys` the results there.
    """

    def __init__(self, seeds: Sequence[int], capacity: int):
        self.capacity = capacity
        self.modules = [expert_of(seed, capacity) for seed in seeds]
        self.routed = [routed_tokens(seed, len(seeds), capacity) for seed in seeds]
        self.outputs: list[Tensor] = []
        self.ys: list[Tensor] = []
        for parameter in (q for module in self.modules for q in module.parameters()):
            parameter.grad = torch.zeros_like(parameter)  # no token may have chosen it
        for each in self.routed:
            each.x.requires_grad_()
            each.gate.requires_grad_()
            outputs = _outputs(self.modules, each.x, each.choice)
            self.outputs.append(outputs)
            self.ys.append(
                kept_tokens(each.choice, capacity)[:, None] * each.gate[:, None] * outputs
            )
        pairs = zip(self.ys, self.routed, strict=True)
        sum((y * each.upstream).sum() for y, each in pairs).backward()

    def wrong_routes(self, place: int) -> Iterator[Mistake]:
        """Yield the wrong results of likely mistakes, for one rank."""
        capacity = self.capacity
        routed = self.routed[place]
        x = routed.x.detach()
        choice = routed.choice
        gate = routed.gate.detach()[:, None]
        outputs = self.outputs[place].detach()
        kept, fewer, more = (kept_tokens(choice, capacity + n)[:, None] for n in (0, -1, 1))
        last = kept_tokens(choice, capacity, last=True)[:, None]
        order = gate[:, 0].argsort(descending=True)  # the expert's most certain token comes first
        surest = kept_tokens(choice[order], capacity)[order.argsort()][:, None]
        weighted = gate * outputs
        y = weighted * kept
        by_own_expert = gate * self.modules[place](x).detach()
        of_gated = kept * _outputs(self.modules, gate * x, choice)
        mixed = y[choice.argsort(stable=True)]
        yield from flat_table({
            "You sent all tokens to this rank's own expert. Use choice": by_own_expert * kept,
            "You left out the gate. Multiply the output, so the router learns": outputs * kept,
            "You multiplied the input by the gate. Multiply the expert's output": of_gated,
            "You multiplied by the gate twice. Multiply once": gate * y,
            "You computed tokens beyond the capacity, too. Return 0 for them": weighted,
            "You returned the token itself beyond the capacity. Return 0, because the residual "
            "connection adds the token later": y + x * ~kept,
            "You returned the weighted token beyond the capacity. Return 0": y + gate * x * ~kept,
            "You kept the last tokens of an expert. Keep the first ones": weighted * last,
            "You kept one token too few. Fill slots 0 to capacity − 1": weighted * fewer,
            "You kept one token too many. Fill slots 0 to capacity − 1": weighted * more,
            "You returned the tokens in the order of the experts. Put each token back in its old "
            "place": mixed,
            "You kept an expert's largest gates. Keep its first tokens": weighted * surest,
        })
        overwritten = gate * outputs[_overwritten(choice, capacity)]
        yield Mistake(
            one_of(values_of(overwritten), values_of(overwritten * kept)),
            "Your tokens beyond the capacity overwrite the last slot of the buffer. Leave them out",
        )


@task("9.9", "experts on other ranks", points=2)
def expert_parallel(ranks: Ranks, report: Report) -> None:
    """Judge tokens that go to their experts and back, up to each expert's capacity."""
    cases = [case | {"capacity": c} for case in cases_apart(report) for c in CAPACITIES]
    cases.append(cases_apart(report)[2] | {"capacity": MANY})
    cases.append(_sparse_case(report))
    judge = functools.partial(_judge, report)
    judge_each_group(ranks, report, probe_experts, cases, judge)


def _sparse_case(report: Report) -> dict[str, Any]:
    """Return a case of four ranks in a group, of which every second one has no token."""
    seeds = [2 * (seed // 2) + rank % 2 for rank, seed in enumerate(report.seeds(WORLD))]
    return {"partition": PARTITIONS[0], "each": to_each(seed=seeds), "capacity": SPARSE}


def _judge(report: Report, case: dict[str, Any], members: list[int], values: list[dict]) -> None:
    """Judge outputs, gradients and traffic of all ranks of a group, until one is wrong.

    All outputs come first, because one rank's gradients depend on the outputs of the others.
    """
    reference = ReferenceExperts(seeds_of(case, members), case["capacity"])
    for steps in (_output, _gradients):
        for place, rank in enumerate(members):
            if not report.follow(rank, steps(reference, GroupAnswer(case, members, place, values))):
                return


#: The only operations that an answer may call.
_EXCHANGES = only("all_to_all_single", "all_to_all")


def _output(reference: ReferenceExperts, answer: GroupAnswer) -> Iterator[Step]:
    yield communication(answer.value["forward"], _EXCHANGES, inside(answer.members))
    where = f"output, capacity {reference.capacity}, {on(answer.members)}"
    mistakes = reference.wrong_routes(answer.place)
    yield numbers(answer.value["y"], reference.ys[answer.place], mistakes, where=where)


def _gradients(reference: ReferenceExperts, answer: GroupAnswer) -> Iterator[Step]:
    capacity = answer.case["capacity"]
    members = answer.members
    result = answer.value
    nbytes = BYTES * len(members) * capacity * sizes_of(capacity)[1]
    yield communication(result["forward"], _there_and_back("forward", nbytes))
    routed = reference.routed[answer.place]
    sources = (routed.x, routed.gate, *reference.modules[answer.place].parameters())
    names = ("x", "the gates", "the expert's weight", "the expert's bias")
    gradients = (result["dx"], *result["grads"])
    for name, source, gradient in zip(names, sources, gradients, strict=True):
        where = f"gradient of {name}, capacity {capacity}, {on(members)}"
        yield numbers(gradient, source.grad, _cut_off(source.grad), where=where)
    backward = _there_and_back("backward", nbytes)
    yield communication(result["backward"], _EXCHANGES, inside(members), backward)


def _there_and_back(way: str, nbytes: int) -> Rule:
    """Return the rule that forward or backward makes two calls, each of this size."""

    def rule(calls: Calls) -> str | None:
        if len(calls) != 2:
            return f"{way}: You made {len(calls)} all_to_all. Make 2: there and back"
        for call in calls:
            if call["nbytes"] != nbytes:
                return (
                    f"{way}: You sent {call['nbytes']} bytes in an all_to_all, expected {nbytes}. "
                    "Send p · capacity tokens, full or not"
                )
        return None

    return rule


def _cut_off(gradient: Tensor) -> list[Mistake]:
    zeros = values_of(0 * gradient)
    return [
        Mistake(
            lambda result: result is None or result == zeros,
            "No gradient flows back, because dist.all_to_all_single and detach() cut the graph. "
            "Use exchange()",
        ),
        Mistake(
            lambda result: isinstance(result, list) and any(map(math.isnan, result)),
            "You got NaN. Pad blocks that are not full with zeros, not with new_empty()",
        ),
    ]
