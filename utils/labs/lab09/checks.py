"""Checks of lab 09: Megatron's layers, traffic, a loss, DTensor; the other checks are imported.

Answers are tried in groups of 1, 2 and 4 ranks, in double precision, forward and backward, and
compared with the layer that was not split. What was communicated forward and backward is judged
apart. Gradients are compared absolutely: that of a key's bias is zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.comparison import Calls, Mistake, Rule, inside, made, only, some, table, waited
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, reading_answer
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import (
    WORLD,
    Case,
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_calls,
    judge_groups,
    keywords,
    on,
    places,
)
from utils.cluster.questions import Ranks, Reply

from .experts import expert_parallel as expert_parallel
from .gradient_norm import clip_gradients as clip_gradients
from .primitives import NARROW, WIDE
from .primitives import operators as operators
from .primitives import shards as shards
from .sharded_layers import (
    BYTES,
    INPUT,
    KINDS,
    PARTITIONS,
    both_ways,
    cases_apart,
    composed,
    drawn,
    flat,
    flat_table,
    layer_of,
    numbers,
    numbers_of,
    probe_layer,
    seeds_of,
    shapes,
    shard_gradients,
    uncut,
)

# -- 9.3 and 9.4: the layers ------------------------------------------------------------------


@task("9.3", "the MLP, by columns and then by rows", points=3)
def parallel_mlp(ranks: Ranks, report: Report) -> None:
    """Judge the MLP by the one that was not split, and one all_reduce each way."""
    if _judge_layer(ranks, report, "ParallelMLP"):
        cases = [case | {"common": report.seed} for case in cases_apart(report)]
        judge_groups(ranks, report, probe_linears, cases, _both_linears)


def _judge_layer(ranks: Ranks, report: Report, name: str) -> bool:
    """Judge a layer in groups whose ranks know their own shard only; return if it is right."""
    cases = [case | {"name": name, "common": report.seed} for case in cases_apart(report)]
    return judge_groups(ranks, report, probe_layer, cases, layer_of)


def _linears() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(WIDE, NARROW) for name in ("up", "down")})


@in_group
def probe_linears(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, common: int
) -> dict:
    """Return what `ColumnLinear` and `RowLinear` give alone, and what they communicate."""
    place = dist.get_rank(group)
    p = dist.get_world_size(group)
    linears = composed(common, [seed] * p, _linears)
    x = drawn(common + 1, 2, WIDE)
    upstream = drawn(common + 2, 2, NARROW)

    def alone(name: str, linear: nn.Module, part: Tensor, gradient: Tensor) -> dict[str, Any]:
        layer = answer_named(user_ns, name)(linear, **keywords(partition, group))
        return both_ways(layer, part, gradient)

    return {
        "ColumnLinear": alone("ColumnLinear", linears["up"], x, upstream.chunk(p, 1)[place]),
        "RowLinear": alone("RowLinear", linears["down"], x.chunk(p, 1)[place], upstream),
    }


def _both_linears(answer: GroupAnswer) -> Iterator[Step]:
    seeds = seeds_of(answer.case, answer.members)
    linears = composed(answer.case["common"], seeds, _linears)
    x = drawn(answer.case["common"] + 1, 2, WIDE)
    part = linears["up"](x).chunk(len(seeds), 1)[answer.place]
    for name, reduced, y in (("ColumnLinear", 0, part), ("RowLinear", 1, linears["down"](x))):
        result = answer.value[name]
        where = f"{name} by itself {on(answer.members)}"
        yield communication(result["forward"], made("all_reduce", reduced, f" forward in {where}"))
        yield value(result["y"], numbers_of(y), what=where)
        f_inside = "; f belongs in front of all that reads x, not into a layer"
        backward = made("all_reduce", 0, f" backward in {where}{f_inside}")
        yield communication(result["backward"], backward)


@task("9.4", "attention, by heads", points=2)
def parallel_attention(ranks: Ranks, report: Report) -> None:
    """Judge the attention by the one that was not split, and one all_reduce each way."""
    _judge_layer(ranks, report, "ParallelAttention")


# -- 9.6: what travels ------------------------------------------------------------------------


@task("9.6", "what travels in a step", points=2)
def traffic(ranks: Ranks, report: Report) -> None:
    """Judge numbers and bytes of other models than the notebook's."""
    k = report.seed % 7
    # In the first case with several ranks p, the bytes of a number, the tokens and the number of
    # all_reduces (a multiple of 4) all differ. So a missing factor is recognized as what it is.
    models_cut = (
        (1, 2 + k, 16, 64, 1),
        (3 + k, 8, 17, 32, 6),
        (2, 64, 16, 64, 2),
        (24, 4, 1024, 64 * (k + 2), 8),
        (2, 4, 16, 64, 9 + report.seed % 90),
    )
    replicas = ((1000 + k, 1), (54_986 + k, 6), (104_970, 2), (3 * 10**9, 8))
    cases = [_tensor_parallel(*sizes) for sizes in models_cut]
    cases += [_data_parallel(*sizes) for sizes in replicas]
    judge_calls(ranks, report, cases)


def _tensor_parallel(depth: int, batch: int, tokens: int, width: int, p: int) -> Case:
    share = 2 * (p - 1) / p
    nbytes = 4 * batch * tokens * width
    count = 4 * depth
    sent = count * share * nbytes
    by_bytes = {
        "the bytes are those of one all_reduce": share * nbytes,
        "the bytes of the tensors: on a ring a rank sends 2 (p − 1) / p of them": count * nbytes,
        "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each": sent / 2,
        "numbers, not bytes: a float32 has four": sent / 4,
        "each token has a row of its own: batch · tokens · width numbers": sent / tokens,
        "every rank has all of x, and all of x is summed: don't divide by p": sent / p,
    }
    by_mistake = {
        "this is half of them: a block has two layers with an all_reduce, attention and MLP, and "
        "backward has as many as forward": [count / 2, sent / 2]
    } | {text: [count, nbytes] for text, nbytes in by_bytes.items()}
    sizes = [depth, batch, tokens, width, p]
    form = "(number of all_reduces, bytes that each rank sends)"
    return Case("tensor_parallel_traffic", sizes, [count, sent], table(by_mistake), form)


def _data_parallel(parameters: int, p: int) -> Case:
    nbytes = 4 * parameters
    sent = 2 * (p - 1) / p * nbytes
    by_mistake = {
        "the bytes of the gradients: on a ring a rank sends 2 (p − 1) / p of them": nbytes,
        "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each": sent / 2,
        "numbers, not bytes: a float32 has four": sent / 4,
        "the gradients travel once, not forward and backward": 2 * sent,
        "every rank has the gradients of all parameters: don't divide by p": sent / p,
    }
    form = "bytes that each rank sends"
    return Case("data_parallel_traffic", [parameters, p], sent, table(by_mistake), form)


# -- 9.7: a loss over classes that are split --------------------------------------------------


def _logits(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return logits and labels: 6 samples of 11 classes; large ones 5 of 9, some all below 0."""
    samples, classes = (6, 11) if scale == 1 else (5, 9)
    draw = torch.Generator().manual_seed(seed + 9)
    labels = torch.randint(0, classes, (samples,), generator=draw)
    labels[0] = (classes + 1) // 2  # where the second half of the ranks has its first class
    level = (scale > 1) * 5 * scale * (-1.0) ** torch.arange(samples)
    return scale * drawn(seed, samples, classes) + level.double()[:, None], labels


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
    """Return the loss by this rank's classes, and the gradient of its logits."""
    function = reading_answer(user_ns, "class_parallel_loss")
    labels_of_all = torch.tensor(labels)
    return both_ways(
        lambda own: function(own, first, labels_of_all, **keywords(partition, group)),
        torch.tensor(part, dtype=torch.float64),
        torch.ones((), dtype=torch.float64),
    )


def _loss_case(seed: int, partition: Partition, scale: float) -> dict[str, Any]:
    """Return a case in which each rank is told the logits of its own classes."""
    logits, labels = _logits(seed, scale)
    each = []
    for place, p in places(partition):
        parts = logits.tensor_split(p, dim=1)
        first = sum(part.shape[1] for part in parts[:place])
        each.append({"part": parts[place].tolist(), "first": first})
    return {"partition": partition, "labels": labels.tolist(), "each": each}


@task("9.7", "extra mile: a loss over split classes", points=2)
def class_parallel_loss(ranks: Ranks, report: Report) -> None:
    """Judge the cross entropy of all classes, and the gradient of this rank's logits."""
    runs = list(itertools.product(PARTITIONS, (1.0, 900.0)))
    for seed, (partition, scale) in zip(report.seeds(len(runs)), runs, strict=True):
        judge = functools.partial(_loss_of_classes, seed=seed, scale=scale)
        if not judge_groups(ranks, report, probe_loss, [_loss_case(seed, partition, scale)], judge):
            break


def _loss_of_classes(answer: GroupAnswer, seed: int, scale: float) -> Iterator[Step]:
    members = answer.members
    result = answer.value
    p = len(members)
    place = answer.place
    logits, labels = _logits(seed, scale)
    logits.requires_grad_()
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    where = f"with logits of a size of {scale:g}, {on(members)}"
    yield communication(result["forward"], only("all_reduce"), inside(members), waited)
    mistakes = _wrong_losses(logits.detach(), labels, p, place)
    yield value(result["y"], [loss.item()], mistakes, what=where, form="the mean loss")
    gradient = logits.grad.tensor_split(p, dim=1)[place]
    mistakes = _wrong_logit_gradients(logits.detach(), gradient, p, place)
    yield numbers(result["dx"], gradient, mistakes, where=f"gradient of the logits {where}")
    yield communication(result["forward"], _few_numbers(where, len(labels)), some(members))
    yield communication(result["backward"], made("all_reduce", 0, " backward"), only())


def _few_numbers(where: str, samples: int) -> Rule:
    """Return the rule that all_reduces are few, and one number a sample at a time."""

    def rule(calls: Calls) -> str | None:
        if len(calls) > 3:
            return (
                f"{where}: {len(calls)} all_reduces; three are enough: the maximum, the sum, the "
                "label's logit"
            )
        nbytes = sum(call["nbytes"] for call in calls)
        enough = 3 * samples * BYTES
        if nbytes > enough:
            return (
                f"{where}: {nbytes} bytes reduced; one number a sample and a time is enough: "
                f"{enough} at most"
            )
        return None

    return rule


def _wrong_losses(logits: Tensor, labels: Tensor, p: int, place: int) -> list[Mistake]:
    loss = functional.cross_entropy(logits, labels)
    parts = logits.tensor_split(p, dim=1)
    picked = logits[range(len(labels)), labels]
    maxima = [part.max(1).values for part in parts]
    sums = [(part - most[:, None]).exp().sum(1) for part, most in zip(parts, maxima, strict=True)]
    edges = torch.tensor([part.shape[1] for part in parts]).cumsum(0)
    owner = torch.bucketize(labels, edges, right=True)  # the place that has the label's class
    maxima_of_owners = torch.stack(maxima)[owner, range(len(labels))]
    of_own_classes = parts[place].exp().sum(1).log() - picked
    own_maxima = sum(sums).log() + maxima_of_owners - picked
    no_label = logits.exp().sum(1).log()
    losses = {
        "this is a sum over the samples; take the mean": loss * len(labels),
        f"the loss is summed over the {p} ranks": loss * p,
        "the classes of this rank only were summed: sum the exponentials over the "
        "ranks": of_own_classes.mean(),
        "the logit of the label is missing: the rank that has the class knows it": no_label.mean(),
        "each rank subtracted a maximum of its own, and then summed: the maximum must be "
        "that of all ranks (ReduceOp.MAX)": own_maxima.mean(),
    }
    infinite = Mistake(
        lambda result: isinstance(result, list) and not all(map(math.isfinite, result)),
        "not a finite number. exp() of a large logit is inf: subtract the largest logit of each "
        "sample first",
    )
    return [infinite, *flat_table(losses | _wrong_masks(logits, labels, p))]


def _wrong_masks(logits: Tensor, labels: Tensor, p: int) -> dict[str, Tensor]:
    """Return the loss where a mask lets through more than the label's class."""
    shifted = logits - logits.amax(1, keepdim=True)
    everywhere = near = below = shifted.exp().sum(1).log()
    first = 0
    for part in shifted.tensor_split(p, dim=1):
        count = part.shape[1]
        picked = part.gather(1, (labels - first).clamp(0, count - 1)[:, None]).squeeze(1)
        everywhere = everywhere - picked
        near = near - picked * ((first <= labels) & (labels <= first + count))
        below = below - picked * (labels < count)
        first += count
    return {
        "the label's logit also comes from ranks that do not have its class: multiply it by a "
        "mask": everywhere.mean(),
        "a class at the border is counted by two ranks: this rank has the classes from first to "
        "first + count − 1": near.mean(),
        "labels are numbers of all classes: compare them with first and first + count": (
            below.mean()
        ),
    }


def _wrong_logit_gradients(logits: Tensor, right: Tensor, p: int, place: int) -> list[Mistake]:
    samples = len(logits)
    largest = logits.tensor_split(p, dim=1)[place].argmax(1, keepdim=True)
    of_maximum = right.scatter_add(1, largest, -right.sum(1, keepdim=True))
    exponentials = (logits.softmax(1) / samples).tensor_split(p, dim=1)[place]
    return flat_table({
        f"{p} times too large: it was summed over ranks that have the same loss": right * p,
        "a sum over the samples": right * samples,
        "the exponentials' part only: the label's logit was cut off, by detach or in "
        "place": exponentials,
        "the maximum has a gradient here: detach the logits that it is taken of": of_maximum,
    })


# -- 9.8: the same with DTensor ---------------------------------------------------------------


def probe_block(user_ns: dict, *, rank: int, seeds: list, common: int, size: int) -> dict:
    """Run a block that the student's plan has cut, on a mesh of as many ranks as `size` says.

    Args:
        seeds: of the shards. The first of the mesh, who hands them out, knows all; the others
            their own, and stand-ins for the rest.
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
    gradients = {name: flat(_local(p.grad)) for name, p in block.named_parameters()}
    return passed | {"gradients": gradients}


def _local(tensor: Tensor | None) -> Tensor | None:
    """Return what this rank has of a DTensor; anything else as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _odd_parameters(block: nn.Module, size: int) -> dict[str, list[str]]:
    """Return the names of parameters that are no DTensors, and of those with another shape."""
    parameters = {name: p for name, p in block.named_parameters() if "norm" not in name}
    missing = [name for name, p in parameters.items() if _local(p) is p]
    odd = [
        name
        for name, shape in shapes(KINDS["Block"](), size).items()
        if name in parameters and list(_local(parameters[name]).shape) != shape
    ]
    return {"missing": missing, "odd": odd}


@task("9.8", "the same with DTensor", points=2)
def with_dtensor(ranks: Ranks, report: Report) -> None:
    """Judge a block of the model by its twin, and two all_reduces each way."""
    for size, seeds in {size: report.seeds(WORLD) for size in (4, 2)}.items():
        meshes = [list(range(k, k + size)) for k in range(0, WORLD, size) for _ in range(size)]
        # The first of a mesh is told the seeds of all its shards, the others their own.
        known = [
            [seeds[r] if rank in (r, members[0]) else seeds[rank] for r in members]
            for rank, members in enumerate(meshes)
        ]
        case = {"each": to_each(seeds=known), "common": report.seed, "size": size}
        judge = functools.partial(_block, meshes=meshes, seeds=seeds)
        if not report.judge_cases(ranks, probe_block, [case], judge):
            break


def _block(
    case: dict[str, Any], answer: Reply, meshes: list[list[int]], seeds: list[int]
) -> Iterator[Step]:
    result = answer.value
    members = meshes[answer.rank]
    where = on(members)
    returned, missing, odd = (result.get(name) for name in ("returned", "missing", "odd"))
    yield facts({
        f"parallelize returned {returned}: change the block itself, and return the block": returned,
        f"{', '.join(missing or ())}: no DTensors, the plan has no style for them": missing,
        f"{where}: {', '.join(odd or ())}: cut in another way. q, k, v and up go by columns "
        "(ColwiseParallel), out and down by rows (RowwiseParallel), all of them over the mesh that "
        "was handed in": odd,
    })
    twin = uncut("Block", case["common"], tuple(seeds[rank] for rank in members))
    yield numbers(result["y"], twin.y, where=f"output {where}")
    yield numbers(result["dx"], twin.x.grad, where=f"gradient of x {where}")
    yield from shard_gradients(twin, result["gradients"], len(members), members.index(answer.rank))
    yield facts(_wrong_reductions(result, where))


def _wrong_reductions(result: dict[str, Any], where: str) -> dict[str, object]:
    forward, backward = (
        sum(call["op"].startswith("all_reduce") for call in result[way])
        for way in ("forward", "backward")
    )
    ops = {call["op"] for call in result["forward"] + result["backward"]}
    others = sorted(op for op in ops if not op.startswith("all_reduce"))
    return {
        f"{where}: it calls {', '.join(others)}. All_reduces are enough: each rank attends "
        "with its own heads": others,
        f"{where}: {forward} all_reduces forward, expected 2": forward != 2,
        f"{where}: {backward} all_reduces backward, expected 2. Q, K and V each take x for "
        "themselves, and each reduces its gradient: PrepareModuleInput makes x a DTensor once, for "
        "all three": backward > 2,
        f"{where}: {backward} all_reduces backward, expected 2": backward < 2,
    }
