"""Check of expert parallelism in lab 09: tokens travel to experts on other ranks, and back.

The twin has all experts and does without communication.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.comparison import Calls, Mistake, Rule, inside, one_of, only
from utils.checks.probe import reading_answer
from utils.checks.task import Report, Step, communication, task
from utils.checks.trials import Group, GroupAnswer, Partition, in_group, keywords, on, tried
from utils.cluster.questions import Ranks

from .sharded_layers import (
    BYTES,
    both_ways,
    cases_apart,
    drawn,
    flat,
    flat_table,
    made_module,
    numbers,
    numbers_of,
    seeds_of,
)

#: Small, and large enough for all tokens of a rank.
CAPACITIES = (2, 7)
#: The same, and more than a byte can count.
MANY = 300


@dataclass(frozen=True)
class Routed:
    """The tokens of a rank, with the expert of each, its gate, and the gradient of its output."""

    x: Tensor
    choice: Tensor
    gate: Tensor
    upstream: Tensor


def _sizes(capacity: int) -> tuple[int, int]:
    """Return the tokens of a rank, and the features of each."""
    return (9, 3) if capacity == CAPACITIES[0] else (capacity, 4)


def _routed(seed: int, p: int, capacity: int) -> Routed:
    """Return what the rank with this seed has, where there are p experts."""
    tokens, features = _sizes(capacity)
    draw = torch.Generator().manual_seed(seed)
    popular = torch.rand(tokens, generator=draw) < 0.4
    choice = torch.randint(0, p, (tokens,), generator=draw)
    choice[popular] = p - 1
    # The surest are the first and the last of an expert: neither its first two nor its last two.
    ends = _kept(choice, 1) | _kept(choice, 1, last=True)
    gate = 0.2 + 0.3 * (ends + torch.rand(tokens, generator=draw, dtype=torch.float64))
    x, upstream = (drawn(seed + k, tokens, features) for k in (100, 200))
    x[0] = 0  # a token as good as others
    return Routed(x, choice, gate, upstream)


def _expert(seed: int, capacity: int) -> nn.Module:
    _, features = _sizes(capacity)
    return nn.Sequential(made_module(seed + 7, nn.Linear, features, features), nn.Tanh())


@contextlib.contextmanager
def _memory_of_nan() -> Iterator[None]:
    """Fill new memory that nobody has written to with NaN, so that it is not zeros by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@in_group
def probe_experts(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, capacity: int
) -> dict:
    """Send this rank's tokens to the experts, both ways."""
    function = reading_answer(user_ns, "expert_parallel")
    routed = _routed(seed, dist.get_world_size(group), capacity)
    gate = routed.gate.requires_grad_()
    expert = _expert(seed, capacity)
    named = keywords(partition, group)

    def travel(x: Tensor) -> Tensor:
        return function(x, routed.choice.clone(), gate, expert, capacity, **named)

    with _memory_of_nan():
        result = both_ways(travel, routed.x, routed.upstream)
    grads = [gate.grad, *(parameter.grad for parameter in expert.parameters())]
    return result | {"grads": [None if g is None else flat(g) for g in grads]}


def _kept(choice: Tensor, capacity: int, last: bool = False) -> Tensor:
    """Return whether each token is among the first (or last) so many of its expert."""
    order = choice.flip(0) if last else choice
    kept = [int((order[:k] == order[k]).sum()) < capacity for k in range(len(order))]
    return torch.tensor(kept).flip(0) if last else torch.tensor(kept)


def _overwritten(choice: Tensor, capacity: int) -> Tensor:
    """Return each token's token if those beyond the capacity overwrite the last place."""
    tokens = torch.arange(len(choice))
    for expert in choice.unique():
        own = (choice == expert).nonzero().flatten()
        tokens[own[capacity - 1 :]] = own[-1]
    return tokens


def _outputs(modules: list[nn.Module], x: Tensor, choice: Tensor) -> Tensor:
    """Return what the expert of each token says to it."""
    return torch.stack([modules[int(c)](token) for token, c in zip(x, choice, strict=True)])


class Twin:
    """All experts of a group in one process, after forward and backward, and so with gradients.

    The outputs are what the experts say to the tokens of each rank, `ys` the results there.
    """

    def __init__(self, seeds: Sequence[int], capacity: int):
        self.capacity = capacity
        self.modules = [_expert(seed, capacity) for seed in seeds]
        self.routed = [_routed(seed, len(seeds), capacity) for seed in seeds]
        self.outputs: list[Tensor] = []
        self.ys: list[Tensor] = []
        for parameter in (q for module in self.modules for q in module.parameters()):
            parameter.grad = torch.zeros_like(parameter)  # of an expert that nobody has chosen
        for each in self.routed:
            each.x.requires_grad_()
            each.gate.requires_grad_()
            outputs = _outputs(self.modules, each.x, each.choice)
            self.outputs.append(outputs)
            self.ys.append(_kept(each.choice, capacity)[:, None] * each.gate[:, None] * outputs)
        pairs = zip(self.ys, self.routed, strict=True)
        sum((y * each.upstream).sum() for y, each in pairs).backward()

    def wrong_routes(self, place: int) -> Iterator[Mistake]:
        """Yield what a rank gets by mistake."""
        capacity = self.capacity
        routed = self.routed[place]
        x = routed.x.detach()
        choice = routed.choice
        gate = routed.gate.detach()[:, None]
        outputs = self.outputs[place].detach()
        kept, fewer, more = (_kept(choice, capacity + n)[:, None] for n in (0, -1, 1))
        last = _kept(choice, capacity, last=True)[:, None]
        order = gate[:, 0].argsort(descending=True)  # the surest of an expert, not its first
        surest = _kept(choice[order], capacity)[order.argsort()][:, None]
        weighted = gate * outputs
        y = weighted * kept
        by_own_expert = gate * self.modules[place](x).detach()
        of_gated = kept * _outputs(self.modules, gate * x, choice)
        mixed = y[choice.argsort(stable=True)]
        yield from flat_table({
            "all tokens went to this rank's own expert": by_own_expert * kept,
            "the gate is missing: an output counts by it, and so the router learns": outputs * kept,
            "the gate multiplies what goes into the expert; it belongs to what comes out": of_gated,
            "the gate counts twice": gate * y,
            "tokens beyond the capacity were computed, too: "
            "leave them behind, with the output 0": weighted,
            "tokens beyond the capacity must give 0 (the residual connection carries them on), "
            "not the token": y + x * ~kept,
            "tokens beyond the capacity must give 0, not the weighted token": y + gate * x * ~kept,
            "the first tokens of an expert have to be kept, not the last": weighted * last,
            "one token fewer than the capacity was kept: places 0 … capacity − 1": weighted * fewer,
            "one token more than the capacity was kept: places 0 … capacity − 1": weighted * more,
            "the tokens come back in the order of the experts; each belongs into its old "
            "place": mixed,
            "the first tokens of an expert have to be kept, not the surest": weighted * surest,
        })
        overwritten = gate * outputs[_overwritten(choice, capacity)]
        yield Mistake(
            one_of(numbers_of(overwritten), numbers_of(overwritten * kept)),
            "tokens beyond the capacity overwrite the last place of the buffer: leave them out",
        )


@task("9.9", "experts on other ranks", points=2)
def expert_parallel(ranks: Ranks, report: Report) -> None:
    """Judge tokens that go to their experts and back; those beyond the capacity stay behind."""
    cases = [case | {"capacity": c} for case in cases_apart(report) for c in CAPACITIES]
    cases.append(cases_apart(report)[2] | {"capacity": MANY})
    for case, members, values in tried(ranks, report, probe_experts, cases):
        _judge(report, case, members, values)


def _judge(report: Report, case: dict[str, Any], members: list[int], values: list[dict]) -> None:
    """Judge outputs, gradients and traffic of all ranks of a group, until one is wrong.

    All outputs come first: one that is right by chance has gradients of others' wrong ones.
    """
    twin = Twin(seeds_of(case, members), case["capacity"])
    for steps in (_output, _gradients):
        for place, rank in enumerate(members):
            if not report.follow(rank, steps(twin, GroupAnswer(case, members, place, values))):
                return


#: What an answer may call.
_EXCHANGES = only("all_to_all_single", "all_to_all")


def _output(twin: Twin, answer: GroupAnswer) -> Iterator[Step]:
    yield communication(answer.value["forward"], _EXCHANGES, inside(answer.members))
    where = f"output, capacity {twin.capacity}, {on(answer.members)}"
    mistakes = twin.wrong_routes(answer.place)
    yield numbers(answer.value["y"], twin.ys[answer.place], mistakes, where=where)


def _gradients(twin: Twin, answer: GroupAnswer) -> Iterator[Step]:
    capacity = answer.case["capacity"]
    members = answer.members
    result = answer.value
    nbytes = BYTES * len(members) * capacity * _sizes(capacity)[1]
    yield communication(result["forward"], _there_and_back("forward", nbytes))
    routed = twin.routed[answer.place]
    sources = (routed.x, routed.gate, *twin.modules[answer.place].parameters())
    names = ("x", "the gates", "the expert's weight", "the expert's bias")
    gradients = (result["dx"], *result["grads"])
    for name, source, gradient in zip(names, sources, gradients, strict=True):
        where = f"gradient of {name}, capacity {capacity}, {on(members)}"
        yield numbers(gradient, source.grad, _cut_off(source.grad), where=where)
    backward = _there_and_back("backward", nbytes)
    yield communication(result["backward"], _EXCHANGES, inside(members), backward)


def _there_and_back(way: str, nbytes: int) -> Rule:
    """Return the rule that two calls, each of this size, are made forward or backward."""

    def rule(calls: Calls) -> str | None:
        if len(calls) != 2:
            return f"{way}: expected 2 all_to_all, there and back, it made {len(calls)}"
        for call in calls:
            if call["nbytes"] != nbytes:
                return (
                    f"{way}: an all_to_all of {call['nbytes']} bytes, expected {nbytes}: p · "
                    "capacity tokens, full or not"
                )
        return None

    return rule


def _cut_off(gradient: Tensor) -> list[Mistake]:
    zeros = numbers_of(0 * gradient)
    return [
        Mistake(
            lambda result: result is None or result == zeros,
            "the gradient does not find its way back: dist.all_to_all_single is no part of the "
            "graph, and neither is what was detached. exchange() is",
        ),
        Mistake(
            lambda result: isinstance(result, list) and any(map(math.isnan, result)),
            "not a number: pad the blocks that are not full with zeros, not with new_empty()",
        ),
    ]
