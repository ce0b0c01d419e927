"""The probes of split layers, and the layers that a rank draws from its seed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from utils import models
from utils.checks.draws import drawn
from utils.checks.groups import WORLD, Group, Partition, in_group, keywords
from utils.checks.probe import (
    also_calls,
    answer_named,
    as_dict,
    in_double,
    reading_answer,
    recorded,
    values_of,
)
from utils.labs.shared.small_models import weights_of


def made_module(seed: int, kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    """Return a module in float64 whose weights depend only on the seed, with biases of size 1."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = in_double(kind(*sizes))
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return module


def composed(common: int, seeds: Sequence[int], kind: Callable[[], nn.Module]) -> nn.Module:
    """Return a layer with one seed per shard, so that a rank with one seed knows one shard.

    Parameters that every rank has whole come from the common seed.
    """
    whole = made_module(common, kind)
    modules = {seed: made_module(seed, kind) for seed in {*seeds}}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if not name.endswith(WHOLE) and "norm" not in name:
                parts = [
                    shard(name, modules[seed].get_parameter(name), len(seeds), place)
                    for place, seed in enumerate(seeds)
                ]
                parameter.copy_(torch.cat(parts, 1 if name.endswith(ROWWISE) else 0))
    return whole


def both_ways(function: Callable, x: Tensor, upstream: Tensor) -> dict[str, Any]:
    """Return a result, the gradient of the input, and what was communicated each way."""
    from torch_mpi.record import log

    x = x.clone().requires_grad_()
    y, forward = recorded(function, x)
    result = {"y": values_of(y), "dx": None, "forward": forward, "backward": []}
    if not isinstance(y, Tensor):
        return result
    if y.shape != upstream.shape:
        return result | {"y": f"a tensor of shape {list(y.shape)}"}
    if not y.requires_grad:
        return result | {"dx": "nothing: the result is cut off from the input"}
    mark = log.mark()
    y.backward(upstream)
    return result | {"backward": [as_dict(c) for c in log.since(mark)], "dx": values_of(x.grad)}


class WrittenBehind(TorchFunctionMode):
    """Finds results in a graph that change, though no operation of PyTorch changes them.

    A collective writes into a tensor's memory, for example through ``y.data`` or ``y.detach()``,
    and autograd doesn't notice. This mode watches the operations of this thread within ``with``.
    `found` says whether there was a result of this kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # with its expected values

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self._look()
        out = func(*args, **(kwargs or {}))
        if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            self._look()  # autograd doesn't see this operation
        for leaf in tree_leaves((args, out)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._known[id(leaf)] = leaf, leaf.detach().clone()
        return out

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._look()

    def _look(self) -> None:
        self.found |= any(not torch.equal(one, values) for one, values in self._known.values())


INPUT = (2, 3, 16)
#: How each layer is made, by its name: 16 features, 8 heads and 24 hidden features.
KINDS = {
    "ParallelMLP": functools.partial(models.FeedForward, 16, 24),
    "ParallelAttention": functools.partial(models.Attention, 16, 8),
    "Block": functools.partial(models.Block, 16, 8, 24),
}
ROWWISE = ("down.weight", "out.weight")
WHOLE = ("down.bias", "out.bias")


def shard(name: str, tensor: Tensor, p: int, place: int) -> Tensor:
    """Return a rank's shard of a parameter, or of its gradient."""
    if name.endswith(WHOLE):
        return tensor
    return tensor.chunk(p, 1 if name.endswith(ROWWISE) else 0)[place]


def shapes(module: nn.Module, p: int) -> dict[str, list[int]]:
    """Return the shapes of the parameters that each of p ranks has."""
    return {key: list(shard(key, t, p, 0).shape) for key, t in module.named_parameters()}


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
    """Run the student's layer forward and backward; return its results and its shapes.

    Args:
        seed: for this rank's shard. The other shards come from the same seed, so the rank doesn't
            know the real ones.
    """
    p = dist.get_world_size(group)
    whole = composed(common, [seed] * p, KINDS[name])
    before = weights_of(whole)
    layer = answer_named(user_ns, name)(whole, **keywords(partition, group))
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module")
    held = {key: list(p.shape) for key, p in layer.named_parameters()}
    if held != shapes(whole, p):
        return {"held": held}  # such a layer may not even run
    behind = WrittenBehind()
    frozen = not all(p.requires_grad for p in whole.parameters())
    layer.train(partition is not None)

    def forward(x: Tensor) -> Tensor:
        with behind:
            return layer(x)

    result = both_ways(forward, drawn(common + 1, *INPUT), drawn(common + 2, *INPUT))
    own = {parameter.data_ptr() for parameter in whole.parameters()}
    return result | {
        "held": held,
        "shared": any(parameter.data_ptr() in own for parameter in layer.parameters()),
        "changed": not torch.equal(before, weights_of(whole)),
        "behind": behind.found,
        "frozen": frozen,
        "when": "" if partition else ", after eval()",
        "gradients": {key: values_of(p.grad) for key, p in layer.named_parameters()},
    }


def drawn_linears() -> nn.Module:
    """Return the two layers of an MLP, one to split by columns and one by rows."""
    return nn.ModuleDict({name: nn.Linear(WIDE, NARROW) for name in ("up", "down")})


@in_group
def probe_linears(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, common: int
) -> dict:
    """Return what `ColumnLinear` and `RowLinear` compute alone, and what they communicate."""
    place = dist.get_rank(group)
    p = dist.get_world_size(group)
    linears = composed(common, [seed] * p, drawn_linears)
    x = drawn(common + 1, 2, WIDE)
    upstream = drawn(common + 2, 2, NARROW)

    def alone(name: str, linear: nn.Module, part: Tensor, gradient: Tensor) -> dict[str, Any]:
        layer = answer_named(user_ns, name)(linear, **keywords(partition, group))
        with torch.no_grad():
            y, calls = recorded(layer, part)
        return both_ways(layer, part, gradient) | {"without grad": [values_of(y), calls]}

    return {
        "ColumnLinear": alone("ColumnLinear", linears["up"], x, upstream.chunk(p, 1)[place]),
        "RowLinear": alone("RowLinear", linears["down"], x.chunk(p, 1)[place], upstream),
    }


#: The gradient that reaches the loss of task 9.7, as if the model had a second loss.
LOSS_GRADIENT = 0.7


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
    """Return the loss and the gradient of this rank's logits, from its classes."""
    function = reading_answer(user_ns, "class_parallel_loss")
    labels_of_all = torch.tensor(labels)
    return both_ways(
        lambda own: function(own, first, labels_of_all, **keywords(partition, group)),
        torch.tensor(part, dtype=torch.float64),
        torch.tensor(LOSS_GRADIENT, dtype=torch.float64),
    )


@also_calls("broadcast", "scatter")
def probe_block(user_ns: dict, *, rank: int, seeds: list, common: int, size: int) -> dict:
    """Run a block that the student's plan has split, on a mesh of `size` ranks.

    Args:
        seeds: one for each shard. The first rank of a mesh distributes the shards, so it knows all
            seeds. Every other rank knows its own seed, and repeats it for the other shards.
    """
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [DeviceMesh("cpu", list(range(k, k + size))) for k in range(0, WORLD, size)]
    block = composed(common, seeds, KINDS["Block"])
    result = answer_named(user_ns, "parallelize")(block, meshes[rank // size])
    if not isinstance(result, nn.Module):
        return {"returned": "nothing" if result is None else f"a {type(result).__name__}"}
    if result is not block:
        return {"returned": "another module than the block"}
    odd = _odd_parameters(block, size)
    if any(odd.values()):
        return odd
    passed = both_ways(block, drawn(common + 1, *INPUT), drawn(common + 2, *INPUT))
    gradients = {name: values_of(_local(p.grad)) for name, p in block.named_parameters()}
    return passed | {"gradients": gradients}


def _local(tensor: Tensor | None) -> Tensor | None:
    """Return this rank's shard of a DTensor; anything else as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _odd_parameters(block: nn.Module, size: int) -> dict[str, list[str]]:
    """Return which parameters are not DTensors, and which have a wrong shape."""
    parameters = {name: p for name, p in block.named_parameters() if "norm" not in name}
    missing = [name for name, p in parameters.items() if _local(p) is p]
    odd = [
        name
        for name, shape in shapes(KINDS["Block"](), size).items()
        if name in parameters and list(_local(parameters[name]).shape) != shape
    ]
    return {"missing": missing, "odd": odd}


WIDE = 8  # sizes of the layer that is split
NARROW = 12
