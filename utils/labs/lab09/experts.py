"""What the check of expert parallelism asks: tokens travel to experts on other ranks, and back.

The twin has all experts and does without communication.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.calls import Calls, Rule, inside, only
from utils.checks.groups import Group, in_group, keywords, on
from utils.checks.mistakes import Mistake, one_of, table
from utils.checks.probe import reading_answer
from utils.checks.task import Report

from .shards import BYTES, EXACT, both_ways, drawn, flat, made_module

#: Small, and large enough for all tokens of a rank.
CAPACITIES = (2, 7)
#: The same, and more than a byte can count.
MANY = 300


def _sizes(capacity: int) -> tuple[int, int]:
    """Tokens of a rank, and features of each."""
    return (9, 3) if capacity == CAPACITIES[0] else (capacity, 4)


def _routed(seed: int, p: int, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of the rank with this seed, the expert of each, its gate, and the gradient above."""
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
    return x, choice, gate, upstream


def _expert(seed: int, capacity: int) -> nn.Module:
    _, features = _sizes(capacity)
    return nn.Sequential(made_module(seed + 7, nn.Linear, features, features), nn.Tanh())


@contextlib.contextmanager
def _memory_of_nan() -> Iterator[None]:
    """New memory that nobody has written to is NaN, and not zeros by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@in_group
def probe_experts(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, capacity: int
) -> dict:
    """`expert_parallel` of this rank's tokens with this rank's expert."""
    function = reading_answer(user_ns, "expert_parallel")
    x, choice, gate, upstream = _routed(seed, dist.get_world_size(group), capacity)
    expert = _expert(seed, capacity)
    gate.requires_grad_()
    named = keywords(partition, group)
    with _memory_of_nan():
        found = both_ways(
            lambda own: function(own, choice.clone(), gate, expert, capacity, **named), x, upstream
        )
    grads = [gate.grad, *(parameter.grad for parameter in expert.parameters())]
    return found | {"grads": [None if g is None else flat(g) for g in grads]}


def _kept(choice: Tensor, capacity: int, last: bool = False) -> Tensor:
    """Whether each token is among the first (or last) so many of its expert."""
    order = choice.flip(0) if last else choice
    seen = [int((order[:k] == order[k]).sum()) < capacity for k in range(len(order))]
    return torch.tensor(seen).flip(0) if last else torch.tensor(seen)


def _surest(choice: Tensor, gate: Tensor, capacity: int) -> Tensor:
    """Whether each token is among the so many of its expert that have the largest gates."""
    order = gate.argsort(descending=True)
    return _kept(choice[order], capacity)[order.argsort()]


def _overwritten(choice: Tensor, capacity: int) -> Tensor:
    """The token at each token's place if those beyond the capacity overwrite the last place."""
    found = torch.arange(len(choice))
    for expert in choice.unique():
        own = (choice == expert).nonzero().flatten()
        found[own[capacity - 1 :]] = own[-1]
    return found


def judge(
    report: Report, members: list[int], values: list[dict], seeds: list[int], capacity: int
) -> None:
    """Outputs, gradients and traffic of all ranks of a group, which were told these seeds."""
    p = len(members)
    modules = [_expert(seed, capacity) for seed in seeds]
    routed = [_routed(seed, p, capacity) for seed in seeds]
    for x, _, gate, _ in routed:
        x.requires_grad_(), gate.requires_grad_()
    outputs = [_outputs(modules, *own[:2]) for own in routed]
    for parameter in (q for module in modules for q in module.parameters()):
        parameter.grad = torch.zeros_like(parameter)  # of an expert that nobody has chosen
    ys = [
        _kept(choice, capacity)[:, None] * gate[:, None] * out
        for out, (_, choice, gate, _) in zip(outputs, routed, strict=True)
    ]
    sum((y * own[3]).sum() for y, own in zip(ys, routed, strict=True)).backward()
    nbytes, where = BYTES * p * capacity * _sizes(capacity)[1], on(members)
    where = f"capacity {capacity}, {where}"
    allowed = [only("all_to_all_single", "all_to_all"), inside(members)]
    # All outputs first: one that is right by chance has gradients of others' wrong ones.
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        x, choice, gate, _ = routed[place]
        wrong = _wrong_routes(modules, x, choice, gate, outputs[place], capacity, place)
        ok = (
            report.communication(rank, value["forward"], *allowed)
            and report.judge(rank, value["y"], ys[place].reshape(-1).tolist(), wrong,
                             what=f"output, {where}", tolerance=EXACT)
        )  # fmt: skip
        if not ok:
            return
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        x, _, gate, _ = routed[place]
        sizes = [_total("all_to_all", way, value[way], nbytes) for way in ("forward", "backward")]
        expected = [gate.grad, *(q.grad for q in modules[place].parameters())]
        what = ["the gates", "the expert's weight", "the expert's bias"]
        ok = (
            report.communication(rank, value["forward"], sizes[0])
            and report.judge(rank, value["dx"], x.grad.reshape(-1).tolist(),
                             _cut_off(x.grad), what=f"gradient of x, {where}", tolerance=EXACT)
            and all(
                report.judge(rank, got, g.reshape(-1).tolist(), _cut_off(g),
                             what=f"gradient of {name}, {where}", tolerance=EXACT)
                for name, got, g in zip(what, value["grads"], expected, strict=True)
            )
            and report.communication(rank, value["backward"], *allowed, sizes[1])
        )  # fmt: skip
        if not ok:
            break


def _outputs(modules: list[nn.Module], x: Tensor, choice: Tensor) -> Tensor:
    """What the expert of each token says to it."""
    return torch.stack([modules[int(c)](token) for token, c in zip(x, choice, strict=True)])


def _total(op: str, way: str, calls: Calls, nbytes: int) -> Rule:
    def rule(_: Calls) -> str | None:
        if len(calls) != 2:
            return f"{way}: expected 2 {op}, there and back, it made {len(calls)}"
        odd = next((call["nbytes"] for call in calls if call["nbytes"] != nbytes), None)
        said = f"{way}: an {op} of {odd} bytes, expected {nbytes}: p · capacity tokens, full or not"
        return said if odd is not None else None

    return rule


def _cut_off(gradient: Tensor) -> list[Mistake]:
    """Where no gradient comes back."""
    said = (
        "the gradient does not find its way back: dist.all_to_all_single is no part of the graph, "
        "and neither is what was detached. exchange() is"
    )
    zeros = (0 * gradient).reshape(-1).tolist()
    padding = "not a number: pad the blocks that are not full with zeros, not with new_empty()"
    return [
        Mistake(lambda value: value is None or value == zeros, said),
        Mistake(lambda value: isinstance(value, list) and any(map(math.isnan, value)), padding),
    ]


def _wrong_routes(modules, x, choice, gate, outputs, capacity, place) -> Iterator[Mistake]:
    x, gate, outputs = x.detach(), gate.detach()[:, None], outputs.detach()
    kept = _kept(choice, capacity)[:, None]
    with torch.no_grad():
        own = torch.stack([modules[place](token) for token in x])
        weighted = _outputs(modules, gate * x, choice)
        sparse = torch.where(kept, gate * outputs, 0)
        order = choice.argsort(stable=True)
        last = gate * outputs[_overwritten(choice, capacity)]
        wrong = {
            "all tokens went to this rank's own expert": torch.where(kept, gate * own, 0),
            "the gate is missing: an output counts by it, and so the router learns":
                torch.where(kept, outputs, 0),
            "the gate multiplies what goes into the expert; it belongs to what comes out":
                torch.where(kept, weighted, 0),
            "the gate counts twice": torch.where(kept, gate**2 * outputs, 0),
            "tokens beyond the capacity were computed, too: leave them behind, with the output 0":
                gate * outputs,
            "tokens beyond the capacity must give 0 (the residual connection carries them on), "
            "not the token": torch.where(kept, gate * outputs, x),
            "tokens beyond the capacity must give 0, not the weighted token":
                torch.where(kept, gate * outputs, gate * x),
            "the first tokens of an expert have to be kept, not the last":
                torch.where(_kept(choice, capacity, True)[:, None], gate * outputs, 0),
            "one token fewer than the capacity was kept: places 0 … capacity − 1":
                torch.where(_kept(choice, capacity - 1)[:, None], gate * outputs, 0),
            "one token more than the capacity was kept: places 0 … capacity − 1":
                torch.where(_kept(choice, capacity + 1)[:, None], gate * outputs, 0),
            "the tokens come back in the order of the experts; each belongs into its old place":
                sparse[order],
            "the first tokens of an expert have to be kept, not the surest":
                torch.where(_surest(choice, gate[:, 0], capacity)[:, None], gate * outputs, 0),
        }  # fmt: skip
    yield from table({said: one.reshape(-1) for said, one in wrong.items()})
    every = [one.reshape(-1).tolist() for one in (last, torch.where(kept, last, 0))]
    said = "tokens beyond the capacity overwrite the last place of the buffer: leave them out"
    yield Mistake(one_of(*every), said)
