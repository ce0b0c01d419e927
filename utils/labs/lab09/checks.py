"""Checks of lab 09: Megatron's layers, traffic, a split loss, and DTensor; imports the others.

Answers run in groups of 1, 2 and 4 ranks, in double precision, forward and backward. A check
compares them with the layer that isn't split, judges traffic forward and backward separately, and
compares gradients absolutely, because a key's bias has gradient zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from utils.checks.comparison import Calls, Mistake, Rule, inside, made, only, some, table, waited
from utils.checks.draws import drawn
from utils.checks.groups import Partition
from utils.checks.model import use_model as use_model
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import (
    WORLD,
    Case,
    GroupAnswer,
    judge_calls,
    judge_groups,
    on,
    places,
    seeds_of,
)
from utils.cluster.questions import Ranks, Reply

from .experts import expert_parallel as expert_parallel
from .gradient_norm import clip_gradients as clip_gradients
from .layer_probes import (
    LOSS_GRADIENT,
    WIDE,
    composed,
    drawn_linears,
    probe_block,
    probe_layer,
    probe_linears,
    probe_loss,
)
from .primitives import operators as operators
from .primitives import shards as shards
from .sharded_layers import (
    BYTES,
    PARTITIONS,
    cases_apart,
    flat_table,
    layer_of,
    numbers,
    shard_gradients,
    uncut,
)

# -- 9.3 and 9.4: the layers ------------------------------------------------------------------


@task("9.3", "the MLP, by columns and then by rows", points=3)
def parallel_mlp(ranks: Ranks, report: Report) -> None:
    """Compare the MLP with an unsplit MLP, and count one all_reduce each way."""
    if _judge_layer(ranks, report, "ParallelMLP"):
        cases = [case | {"common": report.seed} for case in cases_apart(report)]
        judge_groups(ranks, report, probe_linears, cases, _both_linears)


def _judge_layer(ranks: Ranks, report: Report, name: str) -> bool:
    """Judge a layer in groups whose ranks know only their own shard; return if it is right."""
    cases = [case | {"name": name, "common": report.seed} for case in cases_apart(report)]
    return judge_groups(ranks, report, probe_layer, cases, layer_of)


def _both_linears(answer: GroupAnswer) -> Iterator[Step]:
    seeds = seeds_of(answer.case, answer.members)
    linears = composed(answer.case["common"], seeds, drawn_linears)
    x = drawn(answer.case["common"] + 1, 2, WIDE)
    part = linears["up"](x).chunk(len(seeds), 1)[answer.place]
    for name, reduced, y in (("ColumnLinear", 0, part), ("RowLinear", 1, linears["down"](x))):
        result = answer.value[name]
        where = f"{name} by itself {on(answer.members)}"
        yield communication(result["forward"], made("all_reduce", reduced, f" forward in {where}"))
        yield value(result["y"], values_of(y), what=where)
        without, calls = result["without grad"]
        yield communication(calls, made("all_reduce", reduced, f" in torch.no_grad() in {where}"))
        yield value(without, values_of(y), what=f"{where} in torch.no_grad()")
        f_inside = " (apply f before everything that reads x, not in a layer)"
        backward = made("all_reduce", 0, f" backward in {where}{f_inside}")
        yield communication(result["backward"], backward)


@task("9.4", "attention, by heads", points=2)
def parallel_attention(ranks: Ranks, report: Report) -> None:
    """Compare the attention with an unsplit layer, and count one all_reduce each way."""
    _judge_layer(ranks, report, "ParallelAttention")


# -- 9.6: what travels ------------------------------------------------------------------------


@task("9.6", "what travels in a step", points=2)
def traffic(ranks: Ranks, report: Report) -> None:
    """Judge counts and bytes for models that differ from the notebook's model."""
    k = report.seed % 7
    # In the first case with several ranks, p, a float's bytes, the tokens and the all_reduces (a
    # multiple of 4) all differ. So each missing factor gives a different wrong result.
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
        "You counted the bytes of one all_reduce. Add up all of them": share * nbytes,
        "You counted the tensors. On a ring, a rank sends 2 (p − 1) / p of them": count * nbytes,
        "You counted half of the ring. All-gather sends (p − 1) / p again": sent / 2,
        "You counted numbers. A float32 has 4 bytes: multiply by 4": sent / 4,
        "You left out the tokens. Multiply by the tokens, too": sent / tokens,
        "You divided by p. Every rank sums the whole x: remove the division": sent / p,
    }
    by_mistake = {
        "You counted half of the all_reduces. A block has two layers that call it, attention and "
        "MLP, and backward calls it as often as forward": [count / 2, sent / 2]
    } | {text: [count, nbytes] for text, nbytes in by_bytes.items()}
    sizes = [depth, batch, tokens, width, p]
    form = "(number of all_reduces, bytes that each rank sends)"
    return Case(
        "tensor_parallel_traffic",
        sizes,
        [count, sent],
        table(by_mistake),
        form,
        "depth batch tokens width p",
    )


def _data_parallel(parameters: int, p: int) -> Case:
    nbytes = 4 * parameters
    sent = 2 * (p - 1) / p * nbytes
    by_mistake = {
        "You counted the gradients. On a ring, a rank sends 2 (p − 1) / p of them": nbytes,
        "You counted half of the ring. All-gather sends (p − 1) / p again": sent / 2,
        "You counted numbers. A float32 has 4 bytes: multiply by 4": sent / 4,
        "You counted the gradients twice. They travel once in a step": 2 * sent,
        "You divided by p, but every rank has all gradients. Remove the division": sent / p,
    }
    form = "bytes that each rank sends"
    return Case(
        "data_parallel_traffic", [parameters, p], sent, table(by_mistake), form, "parameters p"
    )


# -- 9.7: a loss over classes that are split --------------------------------------------------


def _logits(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return logits and labels: 6 samples of 11 classes, or 5 of 9 with logits far from 0."""
    samples, classes = (6, 11) if scale == 1 else (5, 9)
    draw = torch.Generator().manual_seed(seed + 9)
    labels = torch.randint(0, classes, (samples,), generator=draw)
    labels[0] = (classes + 1) // 2  # the second half of the ranks starts with this class
    level = (scale > 1) * 5 * scale * (-1.0) ** torch.arange(samples)
    return scale * drawn(seed, samples, classes) + level.double()[:, None], labels


def _loss_case(seed: int, partition: Partition, scale: float) -> dict[str, Any]:
    """Return a case in which each rank knows only the logits of its classes."""
    logits, labels = _logits(seed, scale)
    each = []
    for place, p in places(partition):
        parts = logits.tensor_split(p, dim=1)
        first = sum(part.shape[1] for part in parts[:place])
        each.append({"part": parts[place].tolist(), "first": first})
    return {"partition": partition, "labels": labels.tolist(), "each": each}


@task("9.7", "bonus task: a loss over split classes", points=2)
def class_parallel_loss(ranks: Ranks, report: Report) -> None:
    """Compare the cross entropy of all classes, and the gradient of this rank's logits."""
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
    (LOSS_GRADIENT * loss).backward()
    where = f"with logits of size {scale:g}, {on(members)}"
    yield communication(result["forward"], only("all_reduce"), inside(members), waited)
    mistakes = _wrong_losses(logits.detach(), labels, p, place)
    yield value(result["y"], [loss.item()], mistakes, what=where, form="the mean loss")
    gradient = logits.grad.tensor_split(p, dim=1)[place]
    mistakes = _wrong_logit_gradients(logits.detach(), gradient, p, place)
    yield numbers(result["dx"], gradient, mistakes, where=f"gradient of the logits {where}")
    yield communication(result["forward"], _few_numbers(where, len(labels)), some(members))
    yield communication(result["backward"], made("all_reduce", 0, " backward"), only())


def _few_numbers(where: str, samples: int) -> Rule:
    """Return the rule that three all_reduces are enough, with one number per sample each."""

    def rule(calls: Calls) -> str | None:
        if len(calls) > 3:
            return (
                f"{where}: You made {len(calls)} all_reduces. Use three: for the maximum, the "
                "sum, and the label's logit"
            )
        nbytes = sum(call["nbytes"] for call in calls)
        enough = 3 * samples * BYTES
        if nbytes > enough:
            return (
                f"{where}: You reduced {nbytes} bytes. Reduce one number per sample each time, at "
                f"most {enough} bytes"
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
    owner = torch.bucketize(labels, edges, right=True)  # which group rank has its class
    maxima_of_owners = torch.stack(maxima)[owner, range(len(labels))]
    of_own_classes = parts[place].exp().sum(1).log() - picked
    own_maxima = sum(sums).log() + maxima_of_owners - picked
    no_label = logits.exp().sum(1).log()
    losses = {
        "You summed over the samples. Take the mean": loss * len(labels),
        f"You summed the loss over the {p} ranks. Each has the whole loss: don't sum it": loss * p,
        "You summed only the classes of this rank. Sum the exponentials over the "
        "ranks": of_own_classes.mean(),
        "You left out the label's logit. The rank with its class must add it": no_label.mean(),
        "Each rank subtracted a different maximum before the sum. Subtract the maximum over all "
        "ranks (ReduceOp.MAX)": own_maxima.mean(),
    }
    infinite = Mistake(
        lambda result: isinstance(result, list) and not all(map(math.isfinite, result)),
        "The loss is not finite, because exp() of a large logit is inf. First subtract the "
        "largest logit of each sample",
    )
    return [infinite, *flat_table(losses | _wrong_masks(logits, labels, p))]


def _wrong_masks(logits: Tensor, labels: Tensor, p: int) -> dict[str, Tensor]:
    """Return the losses for masks that let through more than the label's class."""
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
        "You took the label's logit from ranks without its class, too. Multiply by a "
        "mask": everywhere.mean(),
        "Two ranks count the class at their border. A rank has the classes from first to first + "
        "count − 1": near.mean(),
        "You compared labels with local class numbers. Compare them with first and first + count": (
            below.mean()
        ),
    }


def _wrong_logit_gradients(logits: Tensor, right: Tensor, p: int, place: int) -> list[Mistake]:
    samples = len(logits)
    largest = logits.tensor_split(p, dim=1)[place].argmax(1, keepdim=True)
    of_maximum = right.scatter_add(1, largest, -right.sum(1, keepdim=True))
    exponentials = (LOSS_GRADIENT * logits.softmax(1) / samples).tensor_split(p, dim=1)[place]
    return flat_table({
        f"You ignore the gradient of the loss, here {LOSS_GRADIENT}. Multiply by what backward "
        "gets, or let autograd do it": right / LOSS_GRADIENT,
        f"Your gradient is {p} times too large. Don't sum over ranks with the same loss": right * p,
        "Your gradient is for a sum over the samples. Take the mean": right * samples,
        "Your gradient has only the exponentials' part. Keep the label's logit in the graph: no "
        "detach(), no write in place": exponentials,
        "Your gradient includes the maximum. Take the maximum of detached logits": of_maximum,
    })


# -- 9.8: the same with DTensor ---------------------------------------------------------------


@task("9.8", "the same with DTensor", points=2)
def with_dtensor(ranks: Ranks, report: Report) -> None:
    """Compare a block with the reference model, and count two all_reduces each way."""
    for size, seeds in {size: report.seeds(WORLD) for size in (4, 2)}.items():
        meshes = [list(range(k, k + size)) for k in range(0, WORLD, size) for _ in range(size)]
        # The first rank of a mesh knows the seeds of all shards, every other rank only its own.
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
        f"parallelize returned {returned}. Change the block itself, and return the block": returned,
        f"{', '.join(missing or ())} are not DTensors. Give them a style in the plan": missing,
        f"{where}: You split {', '.join(odd or ())} in another way. Split q, k, v and up by "
        "columns (ColwiseParallel), out and down by rows (RowwiseParallel), over the mesh that "
        "you received": odd,
    })
    reference = uncut("Block", case["common"], tuple(seeds[rank] for rank in members))
    yield numbers(result["y"], reference.y, where=f"output {where}")
    yield numbers(result["dx"], reference.x.grad, where=f"gradient of x {where}")
    yield from shard_gradients(
        reference, result["gradients"], len(members), members.index(answer.rank)
    )
    yield facts(_wrong_reductions(result, where))


def _wrong_reductions(result: dict[str, Any], where: str) -> dict[str, object]:
    forward, backward = (
        sum(call["op"].startswith("all_reduce") for call in result[way])
        for way in ("forward", "backward")
    )
    ops = {call["op"] for call in result["forward"] + result["backward"]}
    others = sorted(op for op in ops if not op.startswith("all_reduce"))
    return {
        f"{where}: Your block calls {', '.join(others)}. All_reduces are enough, because each "
        "rank attends with its own heads": others,
        f"{where}: You make {forward} all_reduces in forward, expected 2": forward != 2,
        f"{where}: You make {backward} all_reduces in backward, expected 2. Each of Q, K and V "
        "reduces its own gradient: let PrepareModuleInput make x a DTensor once": backward > 2,
        f"{where}: You make {backward} all_reduces in backward, expected 2": backward < 2,
    }
