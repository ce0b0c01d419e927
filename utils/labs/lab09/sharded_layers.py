"""What the checks of split layers share: numbers, gradients, traffic, and a reference model.

Everything is in double precision. The reference model gives each rank's partial sum, and the wrong
results of likely mistakes. Gradients are compared absolutely: a key's bias has gradient zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils import models
from utils.checks.comparison import EXACT, Calls, Mistake, Rule, inside, made, only, table, waited
from utils.checks.draws import drawn
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, communication, each_of, facts, to_each, value
from utils.checks.trials import WORLD, GroupAnswer, on, seeds_of

from .layer_probes import INPUT, KINDS, composed, shapes, shard

#: Groups of 4, 2 and 1 ranks, and no group at all.
PARTITIONS = ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], None)
BYTES = 8  # of a float64
FROZEN = (
    "The layer that you received no longer needs gradients. Leave it as it is, and use detach(), "
    "which returns a tensor without the graph"
)
SHARED = (
    "Your layer and the layer that you received have a parameter in common, so training changes "
    "both. Make shards that are separate tensors, even on one rank"
)
CHANGED = "You changed the numbers of the layer that you received. Copy them, and leave it as it is"


def cases_apart(report: Report) -> list[dict[str, Any]]:
    """Return a case for each partition; only the rank itself knows its seed."""
    each = to_each(seed=report.seeds(WORLD))
    return [{"partition": partition, "each": each} for partition in PARTITIONS]


def numbers(result: Any, expected: Tensor, mistakes: Iterable[Mistake] = (), *, where: str) -> Step:
    """Return the step that a result has the numbers of this tensor, in double precision."""
    return value(result, values_of(expected), mistakes, what=where, tolerance=EXACT)


def flat_table(by_mistake: Mapping[str, Tensor]) -> list[Mistake]:
    """Return mistakes from a mapping of words to wrong tensors."""
    return table({text: values_of(tensor) for text, tensor in by_mistake.items()})


def of_size(op: str, nbytes: int, when: str) -> Rule:
    """Return the rule that each call of an operation has this size."""

    def rule(calls: Calls) -> str | None:
        sizes = [call["nbytes"] for call in calls if call["op"] == op and call["nbytes"] != nbytes]
        return f"{when}: You made an {op} of {sizes[0]} bytes, expected {nbytes}" if sizes else None

    return rule


# -- layers -----------------------------------------------------------------------------------

#: Mistakes in the heads of an attention, and the message for each.
WRONG_HEADS = {
    "fused": "You stacked Q, K and V and then split them, so this rank has rows of Q and no K. "
    "Split each of the three by itself",
    "small heads": "Your heads are too small. A rank has fewer heads of the same size",
    "one head": "You took all columns of this rank as one head. Keep head_size as it is",
    "kv": "You swapped K and V. Pass q, k, v to attend",
    "qq": "You passed Q twice to attend. Its second argument is K",
}


@dataclass(frozen=True)
class Uncut:
    """A layer that is not split, after forward and backward with the gradient `upstream`."""

    layer: nn.Module
    x: Tensor
    y: Tensor
    upstream: Tensor


@functools.lru_cache(maxsize=4)
def uncut(name: str, common: int, seeds: tuple[int, ...]) -> Uncut:
    """Return the layer with this name in :data:`KINDS`, whose shards come from these seeds."""
    layer = composed(common, seeds, KINDS[name])
    x = drawn(common + 1, *INPUT).requires_grad_()
    upstream = drawn(common + 2, *INPUT)
    y = layer(x)
    y.backward(upstream)
    return Uncut(layer, x, y, upstream)


def _parts(
    modules: Sequence[nn.Module],
    x: Tensor | Sequence[Tensor],
    cut: str = "",
    act: Callable = functional.gelu,
) -> list[Tensor]:
    """Return each rank's partial sum, computed from the layer that it received.

    Args:
        modules: the layer of each rank.
        x: the input. For an attention, three tensors are the inputs of Q, K and V.
        cut: the name of a mistake, if there is one.
        act: the activation between the two layers of an MLP.
    """
    parts = []
    for place, module in enumerate(modules):
        parameters = {
            key: shard(key, parameter.detach(), len(modules), place)
            for key, parameter in module.named_parameters()
        }
        if isinstance(module, models.FeedForward):
            inner = act(functional.linear(x, parameters["up.weight"], parameters["up.bias"]))
            last = parameters["down.weight"]
        else:
            inner = _heads(module, parameters, x, len(modules), place, cut)
            last = parameters["out.weight"]
        parts.append(functional.linear(inner, last))
    return parts


def _heads(
    module: models.Attention,
    parameters: dict[str, Tensor],
    x: Tensor | Sequence[Tensor],
    p: int,
    place: int,
    cut: str,
) -> Tensor:
    """Return the output of one rank's heads, from its own parameters."""
    if cut == "fused":
        # A rank has one block of rows of the stacked Q, K and V.
        stacks = (
            torch.cat([module.get_parameter(f"{m}.{key}").detach() for m in "qkv"])
            for key in ("weight", "bias")
        )
        layers = list(zip(*(stack.chunk(p)[place].chunk(3) for stack in stacks), strict=True))
    else:
        used = {"kv": "qvk", "qq": "qqv"}.get(cut, "qkv")
        layers = [(parameters[f"{m}.weight"], parameters[f"{m}.bias"]) for m in used]
    size = module.head_size
    if cut == "small heads":
        size = max(size // p, 1)
    elif cut == "one head":
        size = len(layers[0][1])
    inputs = [x] * 3 if isinstance(x, Tensor) else x
    qkv = (functional.linear(t, *layer) for t, layer in zip(inputs, layers, strict=True))
    return models.attend(*qkv, size)


def _without_f(
    modules: Sequence[nn.Module], x: Tensor, upstream: Tensor, place: int
) -> dict[str, Tensor]:
    """Return one rank's gradients of x when f is in front of only one or two of Q, K and V."""
    three = [x.detach().clone().requires_grad_() for _ in "qkv"]
    parts = _parts(modules, three)
    summed = torch.autograd.grad(sum(parts), three, upstream, retain_graph=True)
    alone = torch.autograd.grad(parts[place], three, upstream)
    gradients = {}
    for names in [*"qkv", *itertools.combinations("qkv", 2)]:
        text = f"You put f in front of {' and '.join(names)} only. Put it before q, k and v"
        triples = zip("qkv", summed, alone, strict=True)
        gradients[text] = sum(s if name in names else o for name, s, o in triples)
    return gradients


def _wrong_outputs(answer: GroupAnswer, x: Tensor) -> Iterator[Mistake]:
    p, place = len(answer.members), answer.place
    if p == 1:
        return
    modules = _as_given(answer)
    bias = list(modules[0].parameters())[-1].detach()
    parts = _parts(modules, x)
    total = sum(parts)
    biased = total + p * bias
    outputs = {
        "You returned this rank's partial sum. Apply g": parts[place] + bias,
        "You returned this rank's partial sum, without a bias. Apply g": parts[place],
        "You left out the bias. Add it after the sum": total,
        f"You added the bias on each rank, so the sum has it {p} times. Add it after g": biased,
        "You took the mean of the parts. Sum them with g": total / p + bias,
        "You took the mean of parts and bias. Sum the parts with g": total / p + bias / p,
    }

    def output(**mistake: Any) -> Tensor:
        return sum(_parts(modules, x, **mistake)) + bias

    if isinstance(modules[0], models.FeedForward):
        linear = output(act=lambda t: t)
        by_tanh = output(act=functools.partial(functional.gelu, approximate="tanh"))
        late = functional.gelu(linear)
        outputs |= {
            "You left out the GELU between the two layers. Call functional.gelu(x)": linear,
            "You used ReLU. Use functional.gelu(x)": output(act=functional.relu),
            "You used GELU's tanh approximation. Use functional.gelu(x)": by_tanh,
            "You applied GELU after the second layer. Apply it between the two": late,
        }
    else:
        outputs |= {text: output(cut=cut) for cut, text in WRONG_HEADS.items()}
    yield from flat_table(outputs)


_BEHIND = (
    "Your collective wrote into a tensor of autograd's graph. The gradient is right by luck here, "
    "and silently wrong behind a sigmoid: use g, which sums a copy and defines backward"
)


def layer_of(answer: GroupAnswer) -> Iterator[Step]:
    """Yield the steps for a rank's part of a layer: parameters, results and communication."""
    members = answer.members
    result = answer.value
    place = answer.place
    p = len(members)
    reference = uncut(
        answer.case["name"], answer.case["common"], tuple(seeds_of(answer.case, members))
    )
    where = on(members) + answer.values[0].get("when", "")
    yield facts(_other_parameters(result["held"], shapes(reference.layer, p), where))
    always = only("all_reduce"), inside(members), waited
    yield communication(result["forward"], *always)
    mistakes = _wrong_outputs(answer, reference.x.detach())
    yield numbers(result["y"], reference.y, mistakes, where=f"output {where}")
    yield facts({
        _BEHIND: result["behind"],
        FROZEN: result["frozen"],
        CHANGED: result["changed"],
        SHARED: result["shared"],
    })
    yield communication(result["backward"], *always)
    mistakes = _wrong_inputs(answer, reference)
    yield numbers(result["dx"], reference.x.grad, mistakes, where=f"gradient of x {where}")
    yield from shard_gradients(reference, result["gradients"], p, place)
    yield _once_each_way(result, where)


def _as_given(answer: GroupAnswer) -> list[nn.Module]:
    """Return the layer that each rank received: all its shards come from the rank's seed."""
    case = answer.case
    seeds = seeds_of(case, answer.members)
    return [composed(case["common"], [seed] * len(seeds), KINDS[case["name"]]) for seed in seeds]


def _other_parameters(
    held: dict[str, list[int]], expected: dict[str, list[int]], where: str
) -> dict[str, bool]:
    names = sorted(expected)
    if sorted(held) != names:
        return {f"Your layer has the parameters {sorted(held)}, expected {names}": True}
    text = "{}: Your {} has the shape {} on this rank, expected {}"
    return {
        text.format(where, key, held[key], expected[key]): held[key] != expected[key]
        for key in names
    }


def _wrong_inputs(answer: GroupAnswer, reference: Uncut) -> Iterator[Mistake]:
    p, place = len(answer.members), answer.place
    if p == 1:
        return
    modules = _as_given(answer)
    x = reference.x.detach().clone().requires_grad_()
    _parts(modules, x)[place].backward(reference.upstream)
    gradients = {
        "You returned only this rank's part of the gradient, but all ranks read x. Begin with f, "
        "which sums it": x.grad,
        f"You summed the gradient once too often: it is {p} times too large": p * reference.x.grad,
    }
    if answer.case["name"] == "ParallelAttention":
        gradients |= _without_f(modules, reference.x, reference.upstream, place)
    yield from flat_table(gradients)


def shard_gradients(
    reference: Uncut, gradients: dict[str, Any], p: int, place: int
) -> Iterator[Step]:
    """Yield the steps for the gradients of a rank's shards, by the names of the parameters."""
    missing = Mistake(
        lambda value: value is None, "This parameter has no gradient. Use it in forward"
    )
    for key, parameter in reference.layer.named_parameters():
        right = parameter.grad if "norm" in key else shard(key, parameter.grad, p, place)
        by_mistake = {
            f"Your gradient is {p} times too large. Every rank has the same loss, so g's backward "
            "must return the gradient as it is": right * p,
            f"Your gradient is {p} times too small. Every rank has the same loss, so don't divide "
            "by the number of ranks, not even for a bias": right / p,
        }
        mistakes = [*flat_table(by_mistake if p > 1 else {}), missing]
        yield numbers(gradients[key], right, mistakes, where=f"gradient of {key}")


def _once_each_way(result: dict[str, Any], where: str) -> Step:
    """Return the step of one all_reduce each way, which reports all that is wrong."""
    reasons = {
        "forward": " (each all_reduce waits for all ranks)",
        "backward": " (one f before everything that reads x)",
    }
    steps = []
    for way, reason in reasons.items():
        once = made("all_reduce", 1, f" {way} {where}{reason}")
        size = of_size("all_reduce", BYTES * math.prod(INPUT), way)
        steps += [communication(result[way], once)], [communication(result[way], size)]
    return each_of(*steps)
