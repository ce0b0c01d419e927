"""The probes of primitives, experts and clipping. :mod:`.layer_probes` has the probes of layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.draws import drawn
from utils.checks.groups import Group, Partition, in_group, keywords
from utils.checks.probe import (
    also_calls,
    answer_named,
    number,
    reading_answer,
    recorded,
    told,
    values_of,
)
from utils.labs.shared.small_models import weights_of

from .layer_probes import NARROW, WIDE, both_ways, made_module

# -- shards and operators --------------------------------------------------------------------------


@in_group
def probe_shards(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """Split a layer both ways; return the numbers, and how much memory they keep alive."""
    linear = drawn_layer(seed, partition)
    before = weights_of(linear)
    result = {}
    for name in ("column_shard", "row_shard"):
        split = functools.partial(answer_named(user_ns, name), **keywords(partition, group))
        pair, calls = recorded(split, linear)
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"{name} returned {type(pair).__name__}, expected (weight, bias)")
        changed = not torch.equal(before, weights_of(linear))
        stale, more = recorded(_is_stale, split, linear, pair)
        about = {"calls": calls + more, "changed": changed, "stale": stale}
        result[name] = _about(pair, linear) | about
    return result


@torch.no_grad()
def _is_stale(split: Callable[[nn.Linear], Any], linear: nn.Linear, pair: Sequence[Any]) -> bool:
    """Return whether the shards of a layer don't follow a change of the layer."""
    expected = [2 * values for values in pair if isinstance(values, Tensor)]
    for parameter in linear.parameters():
        parameter.mul_(2)
    after = [values for values in split(linear) if isinstance(values, Tensor)]
    for parameter in linear.parameters():
        parameter.div_(2)
    return not all(map(torch.equal, expected, after))


def _about(pair: Sequence[Any], linear: nn.Linear) -> dict[str, Any]:
    """Return what the kernel needs to judge a weight and a bias that were cut from a layer."""
    tensors = [shard for shard in pair if isinstance(shard, Tensor)]
    places_of_layer = {linear.weight.data_ptr(), linear.bias.data_ptr()}
    return {
        "values": [told(t) if isinstance(t, Tensor) else None for t in pair],
        "kept": [shard.untyped_storage().nbytes() > shard.nbytes for shard in tensors],
        "same": any(shard.data_ptr() in places_of_layer for shard in tensors),
        "graph": any(shard.grad_fn is not None for shard in tensors),
        "frozen": not (linear.weight.requires_grad and linear.bias.requires_grad),
    }


def drawn_layer(seed: int, partition: Partition) -> nn.Linear:
    """Return the layer to split: larger without groups, with fewer outputs in groups of two."""
    larger = 4 * (partition is None)
    sizes = (WIDE + larger, NARROW + larger)
    if partition is not None and len(partition[0]) == 2:
        sizes = sizes[::-1]
    return made_module(seed, nn.Linear, *sizes)


SHAPE = (3, 4)


@also_calls("all_reduce")
@in_group
def probe_operators(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """Call f and g with this rank's numbers, and with a gradient that is used twice."""
    named = keywords(partition, group)
    x = drawn(seed, *SHAPE)
    upstream = drawn(seed + 50, *SHAPE)
    return {name: _operated(answer_named(user_ns, name), named, x, upstream) for name in ("f", "g")}


def _operated(function: Callable, named: dict, x: Tensor, upstream: Tensor) -> dict[str, Any]:
    """Return what an operator computes in five calls, and what it changes.

    In one call, the group's first rank has only zeros.
    """
    operator = functools.partial(function, **named)
    copy = x.clone()
    shared = upstream.clone()
    result = both_ways(operator, x, upstream)
    earlier, again = recorded(operator, copy)
    before = values_of(earlier)
    turned = both_ways(lambda t: operator(t.t()).t(), x, upstream)
    y, calls = recorded(operator, (x + 1).requires_grad_())
    function(x.clone(), None)  # calls it with other ranks, between forward and backward
    later = []
    if isinstance(y, Tensor) and y.requires_grad:
        later = recorded(y.backward, shared)[1]
    size = dist.get_world_size(named.get("group"))
    first = dist.get_rank(named.get("group")) == 0
    quiet = both_ways(operator, x * (not first), upstream * (not first))
    more = turned["forward"] + turned["backward"] + quiet["forward"] + quiet["backward"]
    return result | {
        "calls again": again + more + calls + later,
        "input changed": not torch.equal(copy, x),
        "upstream changed": not torch.equal(shared, upstream),
        "overwritten": before != values_of(earlier),
        "of the last call": any(len(call["group"]) != size for call in later),
        "turned": [turned["y"], turned["dx"]],
    }


# -- experts ---------------------------------------------------------------------------------------


#: One is too small for some experts, and one is large enough for all tokens of a rank.
CAPACITIES = (2, 7)
#: With this one, some ranks have no token.
SPARSE = 5


@dataclass(frozen=True)
class Routed:
    """The tokens of a rank, with each token's expert, its gate, and its output's gradient."""

    x: Tensor
    choice: Tensor
    gate: Tensor
    upstream: Tensor


def sizes_of(capacity: int) -> tuple[int, int]:
    """Return the most tokens of a rank, and the features per token."""
    return (9, 3) if capacity == CAPACITIES[0] else (capacity, 4)


def routed_tokens(seed: int, p: int, capacity: int) -> Routed:
    """Return the tokens of the rank with this seed, when there are p experts.

    With the small capacity, all ranks have equally many tokens. Otherwise the numbers differ, and
    with :data:`SPARSE`, a rank with an odd seed has no token.
    """
    most, features = sizes_of(capacity)
    tokens = most - seed % 3 * (capacity != CAPACITIES[0])
    if capacity == SPARSE and seed % 2:
        tokens = 0
    draw = torch.Generator().manual_seed(seed)
    popular = torch.rand(tokens, generator=draw) < 0.4
    choice = torch.randint(0, p, (tokens,), generator=draw)
    choice[popular] = p - 1
    # An expert's largest gates are its first and last: neither the first two nor the last two.
    ends = kept_tokens(choice, 1) | kept_tokens(choice, 1, last=True)
    gate = 0.2 + 0.3 * (ends + torch.rand(tokens, generator=draw, dtype=torch.float64))
    x, upstream = (drawn(seed + k, tokens, features) for k in (100, 200))
    x[:1] = 0  # a zero token counts like any other
    return Routed(x, choice, gate, upstream)


def expert_of(seed: int, capacity: int) -> nn.Module:
    """Return the expert of the rank with this seed."""
    _, features = sizes_of(capacity)
    return nn.Sequential(made_module(seed + 7, nn.Linear, features, features), nn.Tanh())


@contextlib.contextmanager
def _memory_of_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that forgotten entries aren't zero by luck."""
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
    """Send this rank's tokens to the experts and back, forward and backward."""
    function = reading_answer(user_ns, "expert_parallel")
    routed = routed_tokens(seed, dist.get_world_size(group), capacity)
    gate = routed.gate.requires_grad_()
    expert = expert_of(seed, capacity)
    named = keywords(partition, group)

    def travel(x: Tensor) -> Tensor:
        return function(x, routed.choice.clone(), gate, expert, capacity, **named)

    with _memory_of_nan():
        result = both_ways(travel, routed.x, routed.upstream)
    grads = [gate.grad, *(parameter.grad for parameter in expert.parameters())]
    return result | {"grads": [values_of(g) for g in grads]}


def kept_tokens(choice: Tensor, capacity: int, last: bool = False) -> Tensor:
    """Return whether each token is among its expert's first (or last) `capacity` tokens."""
    order = choice.flip(0) if last else choice
    kept = [int((order[:k] == order[k]).sum()) < capacity for k in range(len(order))]
    flags = torch.tensor(kept, dtype=torch.bool)
    return flags.flip(0) if last else flags


# -- clipping --------------------------------------------------------------------------------------


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
    """Clip gradients of a model of shards and replicas; one parameter has no gradient."""
    model = nn.ParameterDict()
    for name, rows in gradients.items():
        rows_of_rank = torch.tensor(rows, dtype=torch.float64)
        model[name] = nn.Parameter(torch.zeros_like(rows_of_rank))
        model[name].grad = rows_of_rank
    model["unused"] = nn.Parameter(torch.ones(2, dtype=torch.float64))
    function = answer_named(user_ns, "clip_gradients")
    named = keywords(partition, group)
    norm, calls = recorded(function, model, {"a", "c"}.__contains__, most, **named)
    return {
        "norm": number(norm),
        "calls": calls,
        "gradients": [values_of(model[name].grad) for name in gradients],
        "unused": model["unused"].grad is None and bool((model["unused"] == 1).all()),
    }
