"""What checks ask of layers that are cut: numbers, gradients and traffic, beside the uncut twin.

All is in double precision. What each of p ranks adds to a sum is computed from the twin, and so is
what likely mistakes lead to. Gradients are compared absolutely: that of a key's bias is zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from utils import models
from utils.checks.comparison import Calls, Mistake, Rule, inside, made, only, table, waited
from utils.checks.probe import answer_named, as_dict, in_double, recorded
from utils.checks.task import Report, Step, communication, each_of, facts, to_each, value
from utils.checks.trials import WORLD, Group, GroupAnswer, Partition, in_group, keywords, on

#: Groups of 4, 2 and 1 ranks, and no group at all.
PARTITIONS = ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], None)
#: What float64 may lose; a mistake is off by much more.
EXACT = 1e-9
BYTES = 8  # of a float64
FROZEN = (
    "the layer that it was given needs no gradients any more. Leave the layer as it is: detach() "
    "gives a tensor without the graph"
)


def cases_apart(report: Report) -> list[dict[str, Any]]:
    """Return a case for each partition; each rank has a seed that the others are not told."""
    each = to_each(seed=report.seeds(WORLD))
    return [{"partition": partition, "each": each} for partition in PARTITIONS]


def seeds_of(case: dict[str, Any], members: Sequence[int]) -> list[int]:
    """Return the seeds that these ranks were told."""
    return [case["each"][rank]["seed"] for rank in members]


def drawn(seed: int, *shape: int) -> Tensor:
    """Return numbers of a normal distribution; the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made_module(seed: int, kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    """Return a module in float64 whose weights follow from the seed alone, biases of size 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = in_double(kind(*sizes))
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return module


def composed(common: int, seeds: Sequence[int], kind: Callable[[], nn.Module]) -> nn.Module:
    """Return a layer whose shards follow from a seed each: who knows one of them has one shard.

    What all ranks have whole follows from the common seed.
    """
    whole = made_module(common, kind)
    modules = [made_module(seed, kind) for seed in seeds]
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if not name.endswith(WHOLE) and "norm" not in name:
                parts = [
                    shard(name, module.get_parameter(name), len(seeds), place)
                    for place, module in enumerate(modules)
                ]
                parameter.copy_(torch.cat(parts, 1 if name.endswith(ROWWISE) else 0))
    return whole


def numbers_of(tensor: Tensor) -> list[float]:
    """Return the numbers of a tensor of the check's own."""
    return tensor.detach().reshape(-1).tolist()


def numbers(result: Any, expected: Tensor, mistakes: Iterable[Mistake] = (), *, where: str) -> Step:
    """Return the step that a result has the numbers of this tensor, in double precision."""
    return value(result, numbers_of(expected), mistakes, what=where, tolerance=EXACT)


def flat_table(by_mistake: Mapping[str, Tensor]) -> list[Mistake]:
    """Return mistakes, each from what to say of it and the tensor that it gives."""
    return table({text: numbers_of(tensor) for text, tensor in by_mistake.items()})


def flat(result: object) -> object:
    """Return a tensor's numbers; anything else as its type's name, which equals no list."""
    if isinstance(result, Tensor):
        # The class's own method: an answer may have given this very tensor another one.
        return Tensor.detach(result).reshape(-1).tolist()
    return None if result is None else f"<{type(result).__name__}>"


def both_ways(function: Callable, x: Tensor, upstream: Tensor) -> dict[str, Any]:
    """Return a result, the gradient of the input, and what was communicated each way."""
    from torch_mpi.record import log

    x = x.clone().requires_grad_()
    y, forward = recorded(function, x)
    result = {"y": flat(y), "dx": None, "forward": forward, "backward": []}
    if not isinstance(y, Tensor):
        return result
    if y.shape != upstream.shape:
        return result | {"y": f"a tensor of shape {list(y.shape)}"}
    if not y.requires_grad:
        return result | {"dx": "nothing: the result is cut off from the input"}
    mark = log.mark()
    y.backward(upstream)
    return result | {"backward": [as_dict(c) for c in log.since(mark)], "dx": flat(x.grad)}


class WrittenBehind(TorchFunctionMode):
    """Finds results in a graph that change, though no operation of PyTorch changes them.

    A collective writes into a tensor's memory, also by way of ``y.data`` or ``y.detach()``;
    autograd learns nothing of it. Seen are the operations of this thread inside of ``with``;
    `found` says whether there was such a result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # with the values that each should have

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self._look()
        out = func(*args, **(kwargs or {}))
        if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            self._look()  # no operation for autograd
        for leaf in tree_leaves((args, out)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._known[id(leaf)] = leaf, leaf.detach().clone()
        return out

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._look()

    def _look(self) -> None:
        self.found |= any(not torch.equal(one, values) for one, values in self._known.values())


def of_size(op: str, nbytes: int, when: str) -> Rule:
    """Return the rule that each call of an operation has this size."""

    def rule(calls: Calls) -> str | None:
        sizes = [call["nbytes"] for call in calls if call["op"] == op and call["nbytes"] != nbytes]
        return f"{when}: {op} of {sizes[0]} bytes, expected {nbytes}" if sizes else None

    return rule


# -- layers -----------------------------------------------------------------------------------

INPUT = (2, 3, 16)
#: By name how a layer is made: of 16 features, with 8 heads and 24 hidden features.
KINDS = {
    "ParallelMLP": functools.partial(models.FeedForward, 16, 24),
    "ParallelAttention": functools.partial(models.Attention, 16, 8),
    "Block": functools.partial(models.Block, 16, 8, 24),
}
ROWWISE = ("down.weight", "out.weight")
WHOLE = ("down.bias", "out.bias")
#: Mistakes in the heads of an attention, and what to say of them.
WRONG_HEADS = {
    "fused": "Q, K and V were stacked and then cut: this rank has rows of Q and no K. Cut each of "
    "the three by itself",
    "small heads": "the heads are too small: a rank has fewer heads, of the same size",
    "one head": "all columns of this rank were taken as one head; head_size stays as it is",
    "kv": "K and V are swapped: attend takes q, k, v",
    "qq": "attend got Q twice: its second argument is K",
}


def shard(name: str, tensor: Tensor, p: int, place: int) -> Tensor:
    """Return what a rank has of a parameter, or of its gradient."""
    if name.endswith(WHOLE):
        return tensor
    return tensor.chunk(p, 1 if name.endswith(ROWWISE) else 0)[place]


def shapes(module: nn.Module, p: int) -> dict[str, list[int]]:
    """Return the shapes of what each of p ranks has."""
    return {key: list(shard(key, t, p, 0).shape) for key, t in module.named_parameters()}


@dataclass(frozen=True)
class Uncut:
    """A layer that was not split after one forward and backward, whose gradient is `upstream`."""

    layer: nn.Module
    x: Tensor
    y: Tensor
    upstream: Tensor


@functools.lru_cache(maxsize=4)
def uncut(name: str, common: int, seeds: tuple[int, ...]) -> Uncut:
    """Return the layer of a name of :data:`KINDS`, whose shards follow from these seeds."""
    layer = composed(common, seeds, KINDS[name])
    x = drawn(common + 1, *INPUT).requires_grad_()
    upstream = drawn(common + 2, *INPUT)
    y = layer(x)
    y.backward(upstream)
    return Uncut(layer, x, y, upstream)


@in_group
def probe_layer(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    seed: int,
    common: int,
    name: str,
) -> dict:
    """Run a layer of the student forward and backward; return what it gives, and what it holds.

    Args:
        seed: of this rank's shard. In place of the other shards it is given others than those
            ranks.
    """
    p = dist.get_world_size(group)
    whole = composed(common, [seed] * p, KINDS[name])
    layer = answer_named(user_ns, name)(whole, **keywords(partition, group))
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module")
    held = {key: list(p.shape) for key, p in layer.named_parameters()}
    if held != shapes(whole, p):
        return {"held": held}  # it may not even run
    behind = WrittenBehind()
    frozen = not all(p.requires_grad for p in whole.parameters())
    layer.train(partition is not None)

    def forward(x: Tensor) -> Tensor:
        with behind:
            return layer(x)

    return both_ways(forward, drawn(common + 1, *INPUT), drawn(common + 2, *INPUT)) | {
        "held": held,
        "behind": behind.found,
        "frozen": frozen,
        "when": "" if partition else ", after eval()",
        "gradients": {key: flat(p.grad) for key, p in layer.named_parameters()},
    }


def _parts(
    modules: Sequence[nn.Module],
    x: Tensor | Sequence[Tensor],
    cut: str = "",
    act: Callable = functional.gelu,
) -> list[Tensor]:
    """Return what each rank adds, by the layer that it is given.

    Args:
        modules: the layer of each rank.
        x: the input; of an attention, three tensors are what Q, K and V read.
        cut: the name of a mistake, if there is one.
        act: between the two layers of an MLP.
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
    """Return what the heads of one of p ranks give, by its own parameters."""
    if cut == "fused":
        # Of stacked Q, K and V a rank has one block of rows.
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
    """Return the gradients of x if f is in front of one or two of Q, K and V only, on one rank."""
    three = [x.detach().clone().requires_grad_() for _ in "qkv"]
    parts = _parts(modules, three)
    summed = torch.autograd.grad(sum(parts), three, upstream, retain_graph=True)
    alone = torch.autograd.grad(parts[place], three, upstream)
    gradients = {}
    for names in [*"qkv", *itertools.combinations("qkv", 2)]:
        text = f"f is in front of {' and '.join(names)} only: q, k and v all read x"
        triples = zip("qkv", summed, alone, strict=True)
        gradients[text] = sum(s if name in names else o for name, s, o in triples)
    return gradients


def _wrong_outputs(modules: Sequence[nn.Module], x: Tensor, place: int) -> Iterator[Mistake]:
    p = len(modules)
    if p == 1:
        return
    bias = list(modules[0].parameters())[-1].detach()
    parts = _parts(modules, x)
    total = sum(parts)
    biased = total + p * bias
    outputs = {
        "this rank's part of the sum: g is missing": parts[place] + bias,
        "this rank's part of the sum, without a bias: g is missing": parts[place],
        "the bias was left out: it comes after the sum": total,
        f"the bias was added on each rank, and is in the sum {p} times: add it after g": biased,
        "this is the mean of the parts; g is the sum": total / p + bias,
        "the mean of the parts, the bias among them; g is the sum": total / p + bias / p,
    }

    def output(**mistake: Any) -> Tensor:
        return sum(_parts(modules, x, **mistake)) + bias

    if isinstance(modules[0], models.FeedForward):
        linear = output(act=lambda t: t)
        by_tanh = output(act=functools.partial(functional.gelu, approximate="tanh"))
        late = functional.gelu(linear)
        outputs |= {
            "there is no GELU between the two layers": linear,
            "this is ReLU; functional.gelu(x) is asked for": output(act=functional.relu),
            "this is GELU's approximation by tanh; functional.gelu(x) is asked for": by_tanh,
            "the GELU comes after the second layer; it belongs between the two": late,
        }
    else:
        outputs |= {text: output(cut=cut) for cut, text in WRONG_HEADS.items()}
    yield from flat_table(outputs)


_BEHIND = (
    "a collective has written into a tensor that autograd keeps the graph of. That is right by "
    "luck, as a product does not need its own output for its gradient; after a sigmoid the same "
    "line gives a wrong one, and no error. Use g, which sums a copy and says what backward does"
)


def layer_of(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a rank's part of a layer has to hold, to give, and to communicate."""
    members = answer.members
    result = answer.value
    place = answer.place
    p = len(members)
    twin = uncut(answer.case["name"], answer.case["common"], tuple(seeds_of(answer.case, members)))
    where = on(members) + answer.values[0].get("when", "")
    yield facts(_other_parameters(result["held"], shapes(twin.layer, p), where))
    apart = _as_given(answer)
    always = only("all_reduce"), inside(members), waited
    yield communication(result["forward"], *always)
    mistakes = _wrong_outputs(apart, twin.x.detach(), place)
    yield numbers(result["y"], twin.y, mistakes, where=f"output {where}")
    yield facts({_BEHIND: result["behind"], FROZEN: result["frozen"]})
    yield communication(result["backward"], *always)
    mistakes = _wrong_inputs(answer.case["name"], apart, twin, place)
    yield numbers(result["dx"], twin.x.grad, mistakes, where=f"gradient of x {where}")
    yield from shard_gradients(twin, result["gradients"], p, place)
    yield _once_each_way(result, where)


def _as_given(answer: GroupAnswer) -> list[nn.Module]:
    """Return the layer that each rank of a group was given: all its shards are of one seed."""
    case = answer.case
    seeds = seeds_of(case, answer.members)
    return [composed(case["common"], [seed] * len(seeds), KINDS[case["name"]]) for seed in seeds]


def _other_parameters(
    held: dict[str, list[int]], expected: dict[str, list[int]], where: str
) -> dict[str, bool]:
    names = sorted(expected)
    if sorted(held) != names:
        return {f"the parameters are {sorted(held)}, expected {names}": True}
    text = "{}: {} has the shape {} on this rank, expected {}"
    return {
        text.format(where, key, held[key], expected[key]): held[key] != expected[key]
        for key in names
    }


def _wrong_inputs(
    name: str, modules: Sequence[nn.Module], twin: Uncut, place: int
) -> Iterator[Mistake]:
    p = len(modules)
    if p == 1:
        return
    x = twin.x.detach().clone().requires_grad_()
    _parts(modules, x)[place].backward(twin.upstream)
    gradients = {
        "this is only what this rank's part gives: f is missing, or not at the "
        "beginning. The parts of all ranks read x": x.grad,
        f"the gradient is {p} times too large: it was summed once too often": p * twin.x.grad,
    }
    if name == "ParallelAttention":
        gradients |= _without_f(modules, twin.x, twin.upstream, place)
    yield from flat_table(gradients)


def shard_gradients(twin: Uncut, gradients: dict[str, Any], p: int, place: int) -> Iterator[Step]:
    """Yield that the gradients of a rank's shards are right, by the names of the parameters."""
    missing = Mistake(lambda value: value is None, "there is none: did forward use it?")
    for key, parameter in twin.layer.named_parameters():
        right = parameter.grad if "norm" in key else shard(key, parameter.grad, p, place)
        by_mistake = {
            f"{p} times too large. Every rank has the same loss: g hands the gradient on as "
            "it is": right * p,
            f"{p} times too small: every rank has the same loss, and nothing is divided by the "
            "number of ranks, no bias either": right / p,
        }
        mistakes = [*flat_table(by_mistake if p > 1 else {}), missing]
        yield numbers(gradients[key], right, mistakes, where=f"gradient of {key}")


def _once_each_way(result: dict[str, Any], where: str) -> Step:
    """Return the step of one all_reduce each way; all that is wrong with them is told."""
    reasons = {
        "forward": "; each all_reduce waits for all ranks",
        "backward": " (one f in front of all that reads x)",
    }
    steps = []
    for way, reason in reasons.items():
        once = made("all_reduce", 1, f" {way} {where}{reason}")
        size = of_size("all_reduce", BYTES * math.prod(INPUT), way)
        steps += [communication(result[way], once)], [communication(result[way], size)]
    return each_of(*steps)
