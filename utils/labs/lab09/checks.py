"""Checks of lab 09: shards, conjugate operators, Megatron's layers, traffic, a loss, experts.

Answers are tried in groups of 1, 2 and 4 ranks, in double precision, forward and backward, and
compared with the layer that was not split. What was communicated forward and backward is judged
apart. Gradients are compared absolutely: that of a key's bias is zero.
"""

from __future__ import annotations

import functools
import math
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils import models
from utils.checks.calls import Calls, inside, made, only, rules_of, some, waited
from utils.checks.functions import Case, judge_calls
from utils.checks.groups import WORLD, Group, Partition, in_group, keywords, on, places, tried
from utils.checks.mistakes import NO_NUMBER, Mistake, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, number, reading_answer, recorded
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks

from . import experts
from . import shards as layers
from .shards import (
    BYTES,
    EXACT,
    FROZEN,
    HEADS,
    HIDDEN,
    INPUT,
    PARTITIONS,
    WIDTH,
    both_ways,
    cases_apart,
    cases_of,
    composed,
    drawn,
    flat,
    judge_gradient,
    judge_layer,
    made_module,
    of_size,
    seeds_of,
    shapes,
    shard,
)

# -- 9.1: shards ------------------------------------------------------------------------------

WIDE, NARROW = 8, 12  # of the layer that is cut


@in_group
def probe_shards(user_ns: dict, *, rank: int, group: Group, partition, seed: int) -> dict:
    """Both ways to cut a layer: numbers, shapes, and how much memory lies behind them."""
    linear, found = _layer(seed, partition), {}
    for name in ("column_shard", "row_shard"):
        pair, calls = recorded(answer_named(user_ns, name), linear, **keywords(partition, group))
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"{name} returned {type(pair).__name__}, expected (weight, bias)")
        tensors = [one for one in pair if isinstance(one, Tensor)]
        found[name] = {
            "values": [one.detach().tolist() if isinstance(one, Tensor) else None for one in pair],
            "kept": [one.untyped_storage().nbytes() > one.nbytes for one in tensors],
            "same": any(
                one.data_ptr() == own.data_ptr()
                for one in tensors
                for own in (linear.weight, linear.bias)
            ),
            "graph": any(one.grad_fn is not None for one in tensors),
            "frozen": not (linear.weight.requires_grad and linear.bias.requires_grad),
            "calls": calls,
        }
    return found


def _layer(seed: int, partition: Partition) -> nn.Linear:
    """What is cut; a larger one where there is no group."""
    larger = 4 * (partition is None)
    return made_module(seed, nn.Linear, WIDE + larger, NARROW + larger)


@task("9.1", "the shards of a layer", points=2)
def shards(ranks: Ranks, report: Report) -> None:
    """Blocks of rows or columns of the weight, with the bias that belongs to them."""
    for case, members, values in tried(ranks, report, probe_shards, cases_of(report)):
        p, linear = len(members), _layer(report.seed, case["partition"])
        weight, bias = linear.weight.detach(), linear.bias.detach()
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            for name, cut, other in (("column_shard", 0, 1), ("row_shard", 1, 0)):
                what, got = f"{name} {on(members)}", value[name]
                part, across = weight.chunk(p, cut)[place], weight.chunk(p, other)[place]
                every = weight[place::p] if cut == 0 else weight[:, place::p]
                wrong = table({
                    "the weight is cut along the other dimension. PyTorch's weight is [out, in]: "
                    "the columns of the matrix that x is multiplied by are the rows of it":
                        across if p > 1 else [],
                    "this is the whole weight: take this rank's block":
                        weight if p > 1 else [],
                    f"every {p}-th line was taken. Take one block: the lines of an attention head "
                    "belong together": every if p > 1 else [],
                    "the weight is transposed: leave it as PyTorch has it, [out, in]": part.T,
                })  # fmt: skip
                expected = bias.chunk(p)[place] if cut == 0 else bias
                wrong_bias = table({
                    "the whole bias: a rank has a bias for its own outputs only":
                        bias if cut == 0 and p > 1 else [],
                    "the bias is cut, but each rank has all outputs here: leave it whole":
                        bias.chunk(p)[place] if cut and p > 1 else [],
                    "the bias is divided by the number of ranks. That would do, if it were added "
                    "before the sum; this one is added once, afterwards": bias / p,
                    "the bias is zero here: it is replicated, as every rank adds it after the sum":
                        torch.zeros_like(expected),
                })  # fmt: skip
                views = {
                    f"{what}: the shard is a view, and the whole weight stays in memory "
                    "behind it: clone()": p > 1 and any(got["kept"]),
                    f"{what}: this is the layer's own memory: what changes the shard changes the "
                    "layer, clone()": got["same"] and not any(got["kept"]),
                    f"{what}: the shard hangs on the graph of the whole layer: detach()":
                        got["graph"],
                    f"{what}: {FROZEN}": got["frozen"],
                }  # fmt: skip
                ok = (
                    report.communication(rank, got["calls"], only())
                    and report.judge(
                        rank, got["values"][0], part.tolist(), wrong, what=f"{what}: weight",
                        tolerance=EXACT,
                    )
                    and report.judge(
                        rank, got["values"][1], expected.tolist(), wrong_bias,
                        what=f"{what}: bias", tolerance=EXACT,
                    )
                    and report.facts(rank, views)
                )  # fmt: skip
                if not ok:
                    break


# -- 9.2: f and g -----------------------------------------------------------------------------

_SHAPE = (3, 4)


@in_group
def probe_operators(user_ns: dict, *, rank: int, group: Group, partition, seed: int) -> dict:
    """f and g of this rank's numbers; of a gradient that is not contiguous, or used twice."""
    named, found = keywords(partition, group), {}
    x, upstream = drawn(seed, *_SHAPE), drawn(seed + 50, *_SHAPE)
    for name in ("f", "g"):
        function = answer_named(user_ns, name)
        operator = functools.partial(function, **named)
        given, shared = x.clone(), upstream.clone()
        one = both_ways(operator, x, upstream)
        earlier, again = recorded(operator, given)
        kept, later = flat(earlier), []
        turned = both_ways(lambda t, o=operator: o(t.t()).t(), x, upstream)
        leaf = (x + 1).requires_grad_()
        y, calls = recorded(operator, leaf)
        function(x.clone(), None)  # with other ranks, between forward and backward
        if isinstance(y, Tensor) and y.requires_grad:
            later = recorded(y.backward, shared)[1]
        again += turned["forward"] + turned["backward"] + calls + later
        found[name] = one | {
            "calls again": again,
            "input": torch.equal(given, x),
            "upstream": torch.equal(shared, upstream),
            "overwritten": kept != flat(earlier),
            "of the last call": any(len(c["group"]) != dist.get_world_size(group) for c in later),
            "turned": [turned["y"], turned["dx"]],
        }
    return found


@task("9.2", "the conjugate operators f and g", points=3)
def operators(ranks: Ranks, report: Report) -> None:
    """One does nothing forward and sums backward; the other the reverse."""
    nbytes = BYTES * math.prod(_SHAPE)
    cases = cases_apart(report)
    for case, members, values in tried(ranks, report, probe_operators, cases):
        p, seeds = len(members), dict(zip(members, seeds_of(case, members), strict=True))
        xs = {r: drawn(seed, *_SHAPE) for r, seed in seeds.items()}
        ups = {r: drawn(seed + 50, *_SHAPE) for r, seed in seeds.items()}
        sums = {"y": sum(xs.values()), "dx": sum(ups.values())}
        for rank, value in zip(members, values, strict=True):
            own = {"y": xs[rank], "dx": ups[rank]}
            for name, summed, calm in (("f", "dx", "y"), ("g", "y", "dx")):
                got, ok = value[name], True
                when = {"y": "forward", "dx": "backward"}
                calls = {"y": got["forward"], "dx": got["backward"]}
                for key in ("y", "dx"):
                    right = sums[key] if key == summed else own[key]
                    what = f"{name} {when[key]} {on(members)}"
                    wrong = {
                        f"the numbers of the ranks were summed. {name} does that "
                        f"{when[summed]} only; {when[calm]} it hands on what it gets":
                            sums[key] if key != summed else None,
                        f"these are this rank's own numbers: {name} sums over the ranks "
                        f"{when[key]}": own[key] if key == summed else None,
                        "this is the mean; the parts of a sum are added": right / p,
                        f"this is {p} times what it should be": right * p,
                    }  # fmt: skip
                    wrong = {
                        said: one.reshape(-1) for said, one in wrong.items() if one is not None
                    }  # fmt: skip
                    missing = (
                        "there is no gradient for x: backward returns one value for each argument "
                        "of forward, that of x first"
                    )
                    wrong = [Mistake(lambda v: v is None, missing), *table(wrong)]
                    wanted = made("all_reduce", int(key == summed), f" {when[key]} in {name}")
                    numbers = right.reshape(-1).tolist()
                    before, after = [only("all_reduce"), inside(members), waited], [wanted]
                    after.append(of_size("all_reduce", nbytes, what))
                    ok = (
                        ok
                        and report.communication(rank, calls[key], *before)
                        and report.judge(rank, got[key], numbers, wrong, what=what, tolerance=EXACT)
                        and report.communication(rank, calls[key], *after)
                    )
                turned = [sums[k] if k == summed else own[k] for k in ("y", "dx")]
                odd = {
                    f"{name}: its input has changed. Others may still need it: sum a clone":
                        not got["input"],
                    f"{name}: the gradient that came in has changed. Others in the graph use "
                    "that tensor, too: sum a clone": not got["upstream"],
                    f"{name}: a second call has changed the result of the first. Return a new "
                    "tensor each time": got["overwritten"],
                    f"{name}: backward sums over the group of a later call. Keep the group in ctx":
                        got["of the last call"],
                }  # fmt: skip
                ok = ok and report.facts(rank, odd)
                what = f"{name} of a transposed tensor, whose memory has another order"
                numbers = [one.reshape(-1).tolist() for one in turned]
                times = 2 if name == "f" else 3  # of three calls, two with backward
                more = made("all_reduce", times, f" in three more calls of {name}")
                rules = only("all_reduce"), inside(members), more, waited
                if not (
                    ok
                    and report.judge(rank, got["turned"], numbers, what=what)
                    and report.communication(rank, got["calls again"], *rules)
                ):
                    break


# -- 9.3 and 9.4: the layers ------------------------------------------------------------------


@task("9.3", "the MLP, by columns and then by rows", points=3)
def parallel_mlp(ranks: Ranks, report: Report) -> None:
    """Equal to the MLP that was not split, with one all_reduce each way."""
    _judge_layers(ranks, report, "ParallelMLP")
    if not report.found:
        cases = [case | {"common": report.seed} for case in cases_apart(report)]
        for case, members, values in tried(ranks, report, probe_linears, cases):
            _judge_linears(report, members, values, seeds_of(case, members))


def _judge_layers(ranks: Ranks, report: Report, name: str) -> None:
    """A layer in groups of which each rank knows its own shard only."""
    given = {"name": name, "common": report.seed}
    cases = [case | given for case in cases_apart(report)]
    for case, members, values in tried(ranks, report, layers.probe_layer, cases):
        judge_layer(report, name, members, values, seeds_of(case, members))


def _linears() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(WIDE, NARROW) for name in ("up", "down")})


@in_group
def probe_linears(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, common: int
) -> dict:
    """`ColumnLinear` and `RowLinear` alone: results, and what they communicate."""
    place, p = dist.get_rank(group), dist.get_world_size(group)
    linears, found = composed(common, [seed] * p, _linears), {}
    x, upstream = drawn(common + 1, 2, WIDE), drawn(common + 2, 2, NARROW)
    for name, linear, own, up in (
        ("ColumnLinear", linears["up"], x, upstream.chunk(p, 1)[place]),
        ("RowLinear", linears["down"], x.chunk(p, 1)[place], upstream),
    ):
        layer = answer_named(user_ns, name)(linear, **keywords(partition, group))
        found[name] = both_ways(layer, own, up)
    return found


def _judge_linears(report: Report, members: list[int], values: list[dict], seeds: list) -> None:
    linears, p = composed(report.seed, seeds, _linears), len(members)
    ys = [linears[name](drawn(report.seed + 1, 2, WIDE)).detach() for name in ("up", "down")]
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        for name, reduced in (("ColumnLinear", 0), ("RowLinear", 1)):
            got, what = value[name], f"{name} by itself {on(members)}"
            right = ys[1] if reduced else ys[0].chunk(p, 1)[place]
            f_inside = "; f belongs in front of all that reads x, not into a layer"
            ok = (
                report.communication(rank, got["forward"],
                                     made("all_reduce", reduced, f" forward in {what}"))
                and report.judge(rank, got["y"], right.reshape(-1).tolist(), what=what)
                and report.communication(rank, got["backward"],
                                         made("all_reduce", 0, f" backward in {what}{f_inside}"))
            )  # fmt: skip
            if not ok:
                break


@task("9.4", "attention, by heads", points=2)
def parallel_attention(ranks: Ranks, report: Report) -> None:
    """Equal to the attention that was not split, with one all_reduce each way."""
    _judge_layers(ranks, report, "ParallelAttention")


# -- 9.5: the norm of all gradients ------------------------------------------------------------

#: Of each parameter, the shape of the whole one, and whether it is cut (its rows, not evenly).
PARAMETERS = {"a": ((9, 4), True), "b": ((5,), False), "c": ((7,), True), "d": ((3, 3), False)}


def _norms(seed: int, p: int) -> tuple[dict[str, Tensor], list[list[float]], list[float]]:
    """Gradients of the whole model; squares of the shards on each of p ranks, and of the rest.

    All of them are 0 for the seed 0.
    """
    whole = {
        n: (seed > 0) * drawn(seed + k, *shape)
        for k, (n, (shape, _)) in enumerate(PARAMETERS.items())
    }
    cut = [whole[name].tensor_split(p) for name, (_, is_cut) in PARAMETERS.items() if is_cut]
    shards = [[part.square().sum().item() for part in parts] for parts in zip(*cut, strict=True)]
    rest = [whole[n].square().sum().item() for n, (_, is_cut) in PARAMETERS.items() if not is_cut]
    return whole, shards, rest


@in_group
def probe_clip(
    user_ns: dict, *, rank: int, group: Group, partition, gradients: dict[str, list], most: float
) -> dict:
    """`clip_gradients` of a model of shards and replicas; one parameter has no gradient."""
    model = nn.ParameterDict()
    for name, rows in gradients.items():
        own = torch.tensor(rows, dtype=torch.float64)
        model[name] = nn.Parameter(torch.zeros_like(own))
        model[name].grad = own.clone()
    model["unused"] = nn.Parameter(torch.ones(2, dtype=torch.float64))
    before = {name: q.grad for name, q in model.items()}
    function, cut = answer_named(user_ns, "clip_gradients"), {"a", "c"}
    norm, calls = recorded(function, model, cut.__contains__, most, **keywords(partition, group))
    return {
        "norm": number(norm),
        "calls": calls,
        "gradients": [flat(q.grad) for name, q in model.items() if before[name] is not None],
        "unused": model["unused"].grad is None and bool((model["unused"] == 1).all()),
    }


def _wrong_norms(shards: list[list[float]], rest: list[float], place: int, share: float):
    """What mistakes in the norm give, on one rank."""
    p, own, replicated = len(shards), sum(shards[place]), sum(rest)
    every = sum(map(sum, shards))
    right = math.sqrt(every + replicated)
    counted = f"replicated parameters are counted {p} times, once for each rank: their squares are "
    wrong = {
        "this is the norm of what this rank has: the squares of the other ranks' shards are "
        "missing": math.sqrt(own + replicated),
        counted + "added after the all_reduce": math.sqrt(every + p * replicated),
        "the replicated parameters are missing": math.sqrt(every),
        "the shards are missing": math.sqrt(replicated),
        "this is the square of the norm": every + replicated,
        "norms were added; squares are, and the root comes last":
            sum(math.sqrt(sum(one) + replicated) for one in shards),
        "norms of the parameters were added; squares are, and the root comes last":
            sum(math.sqrt(x) for one in shards for x in one) + sum(map(math.sqrt, rest)),
        "norms of the parameters of this rank were added; squares are, over all ranks, and the "
        "root comes last": sum(map(math.sqrt, shards[place] + rest)),
        "the mean over the ranks; the squares of shards are added": math.sqrt(
            every / p + replicated),
        "this is the norm after clipping; the one before is asked for": share * right,
    }  # fmt: skip
    return table({said: x for said, x in wrong.items() if abs(x - right) > 1e-9})


def _one_number(calls: Calls) -> str | None:
    """The rule that one number travels."""
    large = next((call["nbytes"] for call in calls if call["nbytes"] > BYTES), None)
    return large and f"an all_reduce of {large} bytes: one number is enough, the sum of squares"


def _own_gradients(seed: int, place: int, p: int) -> dict[str, list]:
    """What the rank at a place of p has: its rows of what is cut, and all of the rest."""
    whole, *_ = _norms(seed, p)
    return {
        name: (whole[name].tensor_split(p)[place] if is_cut else whole[name]).tolist()
        for name, (_, is_cut) in PARAMETERS.items()
    }


def _clip_case(seed: int, partition: Partition, share: float) -> dict:
    """share: of the norm, which is the bound."""
    gradients, most = [], []
    for place, p in places(partition):
        _, shards, rest = _norms(seed, p)
        gradients.append(_own_gradients(seed, place, p))
        most.append(share * (math.sqrt(sum(map(sum, shards)) + sum(rest)) or 1))
    return {"partition": partition, "each": to_each(gradients=gradients, most=most)}


def _hint_zeros(case: dict) -> str | None:
    zeros = not any(map(any, case["each"][0]["gradients"]["a"]))
    return "all gradients are 0, and so is their norm: don't divide by it" if zeros else None


@task("9.5", "the norm of all gradients", points=2)
def clip_gradients(ranks: Ranks, report: Report) -> None:
    """The norm of the whole model on each rank, and all gradients scaled by it."""
    # Not the same each time: who knows the bound, or was alone before, does not know the norm.
    # Below half of it, so that a rank's own norm is above the bound, too.
    draw, seeds = random.Random(report.seed), report.seeds(2 * len(PARTITIONS))
    shares = [draw.uniform(low, 2 * low) for low in (0.2, 1.2) for _ in PARTITIONS]
    # A bound that the norm is above and a rank's own is not; then all gradients are 0.
    seeds, shares = [*seeds, report.seed, 0], [*shares, draw.uniform(0.9, 0.97), 1.5]
    among = (*PARTITIONS * 2, PARTITIONS[0], None)
    cases = [_clip_case(*one) for one in zip(seeds, among, shares, strict=True)]
    for case, members, values in tried(ranks, report, probe_clip, cases, _hint_zeros):
        p, number = len(members), cases.index(case)
        share = shares[number]
        whole, shards, rest = _norms(seeds[number], p)
        right = math.sqrt(sum(map(sum, shards)) + sum(rest))
        factor, where = min(share, 1), f"{on(members)}, bound {'below' if share < 1 else 'above'}"
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            whole_grads = [
                one.tensor_split(p)[place] if PARAMETERS[name][1] else one
                for name, one in whole.items()
            ]
            own = math.sqrt(sum(shards[place]) + sum(rest))
            scales = {
                "nothing was scaled, though the norm is above the bound": 1.0,
                "the gradients were scaled, though the norm is not above the bound": share,
                "divided by the norm, but not multiplied by the bound": 1 / (right or 1),
                "multiplied by the bound, but not divided by the norm": share * right,
                "scaled twice": factor**2,
                "scaled by the norm of what this rank has; the ranks' replicas now differ":
                    min(share * right / (own or 1), 1),
                "the gradients are gone": 0.0,
            }  # fmt: skip
            wrong = table({
                said: [(x * one).reshape(-1).tolist() for one in whole_grads]
                for said, x in scales.items() if abs(x - factor) > 1e-9
            })  # fmt: skip
            for said, cut in {
                "only the shards were scaled: multiply the replicated gradients as well": True,
                "only the replicated gradients were scaled: multiply the shards as well": False,
            }.items():
                half = [
                    one * (factor if PARAMETERS[name][1] == cut else 1)
                    for name, one in zip(whole, whole_grads, strict=True)
                ]
                wrong += table({said: [one.reshape(-1).tolist() for one in half]})
            expected = [(factor * one).reshape(-1).tolist() for one in whole_grads]
            rules = only("all_reduce"), inside(members), waited
            unused = {f"{where}: a parameter without a gradient has changed, or got one: leave out "
                      "those whose grad is None": not value["unused"]}  # fmt: skip
            _ = (
                report.communication(rank, value["calls"], *rules)
                and report.judge(rank, value["norm"], right,
                                 [NO_NUMBER, *_wrong_norms(shards, rest, place, share)],
                                 what=f"the norm {where}", form="the norm, a number")
                and report.judge(rank, value["gradients"], expected, wrong,
                                 what=f"gradients {where}")
                and report.facts(rank, unused)
                and report.communication(rank, value["calls"], made("all_reduce", 1), _one_number)
            )  # fmt: skip


# -- 9.6: what travels ------------------------------------------------------------------------


@task("9.6", "what travels in a step", points=2)
def traffic(ranks: Ranks, report: Report) -> None:
    """Numbers and bytes of other models than the notebook's."""
    cases = []
    k = report.seed % 7
    # In the first case with several ranks p, the bytes of a number, the tokens and the number of
    # all_reduces (a multiple of 4) all differ. So a missing factor is recognized as what it is.
    for depth, batch, tokens, width, p in (
        (1, 2 + k, 16, 64, 1), (3 + k, 8, 17, 32, 6), (2, 64, 16, 64, 2),
        (24, 4, 1024, 64 * (k + 2), 8), (2, 4, 16, 64, 9 + report.seed % 90),
    ):  # fmt: skip
        nbytes, number = 4 * batch * tokens * width, 4 * depth
        share = 2 * (p - 1) / p
        wrong = table({
            "this is half of them: a block has two layers with an all_reduce, attention and MLP, "
            "and backward has as many as forward": [number / 2, number / 2 * share * nbytes],
            "the bytes are those of one all_reduce": [number, share * nbytes],
            "the bytes of the tensors: on a ring a rank sends 2 (p − 1) / p of them":
                [number, number * nbytes],
            "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each":
                [number, number * share * nbytes / 2],
            "numbers, not bytes: a float32 has four": [number, number * share * nbytes / 4],
            "each token has a row of its own: batch · tokens · width numbers":
                [number, number * share * nbytes / tokens],
            "every rank has all of x, and all of x is summed: don't divide by p":
                [number, number * share * nbytes / p],
        })  # fmt: skip
        form = "(number of all_reduces, bytes that each rank sends)"
        right = [number, number * share * nbytes]
        arguments = [depth, batch, tokens, width, p]
        cases.append(Case("tensor_parallel_traffic", arguments, right, wrong, form))
    for parameters, p in ((1000 + k, 1), (54_986 + k, 6), (104_970, 2), (3 * 10**9, 8)):
        share, nbytes = 2 * (p - 1) / p, 4 * parameters
        wrong = table({
            "the bytes of the gradients: on a ring a rank sends 2 (p − 1) / p of them": nbytes,
            "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each":
                share * nbytes / 2,
            "numbers, not bytes: a float32 has four": share * parameters,
            "the gradients travel once, not forward and backward": 2 * share * nbytes,
            "every rank has the gradients of all parameters: don't divide by p":
                share * nbytes / p,
        })  # fmt: skip
        form = "bytes that each rank sends"
        right = share * nbytes
        cases.append(Case("data_parallel_traffic", [parameters, p], right, wrong, form))
    judge_calls(ranks, report, cases)


# -- 9.7: a loss over classes that are split --------------------------------------------------


def _logits(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Of 6 samples and 11 classes; large ones of 5 and 9, some samples all below 0."""
    samples, classes = (6, 11) if scale == 1 else (5, 9)
    draw = torch.Generator().manual_seed(seed + 9)
    labels = torch.randint(0, classes, (samples,), generator=draw)
    labels[0] = (classes + 1) // 2  # where the second half of the ranks has its first class
    level = (scale > 1) * 5 * scale * (-1.0) ** torch.arange(samples)
    return scale * drawn(seed, samples, classes) + level.double()[:, None], labels


def _wrong_masks(logits: Tensor, labels: Tensor, p: int) -> dict[str, float]:
    """The losses if ranks that do not have the label's class add something to its logit."""
    shifted, first = logits - logits.amax(1, keepdim=True), 0
    losses = dict.fromkeys((
        "the label's logit also comes from ranks that do not have its class: multiply it by a mask",
        "a class at the border is counted by two ranks: this rank has the classes from first to "
        "first + count − 1",
        "labels are numbers of all classes: compare them with first and first + count",
    ), shifted.exp().sum(1).log())  # fmt: skip
    for part in shifted.tensor_split(p, dim=1):
        count = part.shape[1]
        picked = part.gather(1, (labels - first).clamp(0, count - 1)[:, None]).squeeze(1)
        near = (first <= labels) & (labels <= first + count)
        for said, mask in zip(losses, (1, near, labels < count), strict=True):
            losses[said] = losses[said] - picked * mask
        first += count
    return {said: one.mean().item() for said, one in losses.items()}


def _finite(value: object) -> bool:
    return not isinstance(value, list) or all(map(math.isfinite, value))


@in_group
def probe_loss(
    user_ns: dict, *, rank: int, group: Group, partition, part: list, first: int, labels: list
) -> dict:
    """`class_parallel_loss` of this rank's classes, and the gradient of its logits."""
    function, given = reading_answer(user_ns, "class_parallel_loss"), torch.tensor(labels)
    logits, one = torch.tensor(part, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    return both_ways(
        lambda own: function(own, first, given, **keywords(partition, group)), logits, one
    )


def _loss_case(seed: int, partition: Partition, scale: float) -> dict:
    """Each rank is told the logits of its own classes."""
    logits, labels = _logits(seed, scale)
    own = [(logits.tensor_split(p, dim=1), place) for place, p in places(partition)]
    first = [sum(part.shape[1] for part in parts[:place]) for parts, place in own]
    each = to_each(part=[parts[place].tolist() for parts, place in own], first=first)
    return {"partition": partition, "labels": labels.tolist(), "each": each}


@task("9.7", "extra mile: a loss over split classes", points=2)
def class_parallel_loss(ranks: Ranks, report: Report) -> None:
    """The cross entropy of all classes, and the gradient of this rank's logits."""
    scales = (1.0, 900.0) * len(PARTITIONS)
    seeds, among = report.seeds(len(scales)), [one for one in PARTITIONS for _ in range(2)]
    cases = [_loss_case(*one) for one in zip(seeds, among, scales, strict=True)]
    for case, members, values in tried(ranks, report, probe_loss, cases):
        number = cases.index(case)
        scale = scales[number]
        logits, labels = _logits(seeds[number], scale)
        logits.requires_grad_()
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        p, detached, samples = len(members), logits.detach(), len(labels)
        parts = logits.grad.tensor_split(p, dim=1)
        exps = detached.exp().sum(1)
        picked = detached[range(samples), labels]
        maxima = [one.max(1).values for one in detached.tensor_split(p, dim=1)]
        sums = [(one - most[:, None]).exp().sum(1) for one, most in
                zip(detached.tensor_split(p, dim=1), maxima, strict=True)]  # fmt: skip
        edges = torch.tensor([one.shape[1] for one in detached.tensor_split(p, dim=1)]).cumsum(0)
        owner = torch.bucketize(labels, edges, right=True)  # the place that has the label's class
        owners = torch.stack(maxima)[owner, range(samples)]
        what = f"with logits of a size of {scale:g}, {on(members)}"
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            own = detached.tensor_split(p, dim=1)[place]
            wrong = table({
                "this is a sum over the samples; take the mean": [loss.item() * samples],
                f"the loss is summed over the {p} ranks": [loss.item() * p],
                "the classes of this rank only were summed: sum the exponentials over the ranks":
                    [(own.exp().sum(1).log() - picked).mean().item()],
                "the logit of the label is missing: the rank that has the class knows it":
                    [exps.log().mean().item()],
                "each rank subtracted a maximum of its own, and then summed: the maximum must be "
                "that of all ranks (ReduceOp.MAX)":
                    [(sum(sums).log() + owners - picked).mean().item()],
            })  # fmt: skip
            masks = _wrong_masks(detached, labels, p)
            wrong += table({said: [one] for said, one in masks.items()})
            infinite = (
                "not a finite number. exp() of a large logit is inf: subtract the largest logit "
                "of each sample first"
            )
            wrong.insert(0, Mistake(lambda v: not _finite(v), infinite))
            expected = parts[place].reshape(-1)
            with_maximum = parts[place].scatter_add(
                1, own.argmax(1, keepdim=True), -parts[place].sum(1, keepdim=True)
            )
            wrong_dx = table({
                f"{p} times too large: it was summed over ranks that have the same loss":
                    expected * p if p > 1 else [],
                "a sum over the samples": expected * samples,
                "the exponentials' part only: the label's logit was cut off, by detach or in place":
                    (detached.softmax(1) / samples).tensor_split(p, dim=1)[place].reshape(-1),
                "the maximum has a gradient here: detach the logits that it is taken of":
                    with_maximum.reshape(-1),
            })  # fmt: skip
            many = sum(call["nbytes"] for call in value["forward"])
            allowed = rules_of({
                f"{what}: {len(value['forward'])} all_reduces; three are enough: the maximum, the "
                "sum, the label's logit": len(value["forward"]) > 3,
                f"{what}: {many} bytes reduced; one number a sample and a time is enough: "
                f"{3 * samples * BYTES} at most": many > 3 * samples * BYTES,
            })  # fmt: skip
            form = "the mean loss"
            _ = (
                report.communication(rank, value["forward"], only("all_reduce"), inside(members),
                                     waited)
                and report.judge(rank, value["y"], [loss.item()], wrong, what=what, form=form)
                and report.judge(rank, value["dx"], expected.tolist(), wrong_dx,
                                 what=f"gradient of the logits {what}", tolerance=EXACT)
                and report.communication(rank, value["forward"], *allowed, some(members))
                and report.communication(rank, value["backward"],
                                         made("all_reduce", 0, " backward"), only())
            )  # fmt: skip


# -- 9.8: the same with DTensor ---------------------------------------------------------------


def probe_block(user_ns: dict, *, rank: int, seeds: list, common: int, size: int) -> dict:
    """A block that the student's plan has cut, on a mesh of the first ranks.

    seeds: of the shards. The first of the mesh, who hands them out, knows all; the others their
    own, and stand-ins for the rest.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    meshes = [DeviceMesh("cpu", list(range(k, k + size))) for k in range(0, 4, size)]
    mesh = meshes[rank // size]
    block = composed(common, seeds, models.Block, WIDTH, HEADS, HIDDEN)
    got = answer_named(user_ns, "parallelize")(block, mesh)
    if not isinstance(got, nn.Module):
        return {"returned": "nothing" if got is None else f"a {type(got).__name__}"}
    if got is not block:
        return {"returned": "another module than the block"}
    local = {
        name: list(p.to_local().shape) if isinstance(p, DTensor) else None
        for name, p in got.named_parameters()
        if "norm" not in name
    }
    missing = [name for name, shape in local.items() if shape is None]
    whole = models.Block(WIDTH, HEADS, HIDDEN)
    odd = [name for name, shape in shapes(whole, size).items() if local.get(name, shape) != shape]
    if missing or odd:
        return {"missing": missing, "odd": odd}
    found = both_ways(got, drawn(common + 1, *INPUT), drawn(common + 2, *INPUT))
    grads = {name: p.grad for name, p in got.named_parameters()}
    grads = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return found | {
        "gradients": {name: None if g is None else flat(g) for name, g in grads.items()}
    }


def _twin_of_block(common: int, seeds: list[int]) -> tuple[nn.Module, Tensor, Tensor]:
    """The block that is not cut, with gradients; its input and output."""
    block = composed(common, seeds, models.Block, WIDTH, HEADS, HIDDEN)
    x = drawn(common + 1, *INPUT).requires_grad_()
    y = block(x)
    y.backward(drawn(common + 2, *INPUT))
    return block, x, y


@task("9.8", "the same with DTensor", points=2)
def with_dtensor(ranks: Ranks, report: Report) -> None:
    """A block of the model: as the twin, with two all_reduces each way."""
    for size in (4, 2):
        own, meshes = report.seeds(WORLD), [range(k, k + size) for k in range(0, WORLD, size)]
        each = to_each(seeds=[
            [own[r if rank in (r, members[0]) else rank] for r in members]
            for members in meshes for rank in members
        ])  # fmt: skip
        twins = [_twin_of_block(report.seed, [own[r] for r in members]) for members in meshes]
        given = {"each": each, "common": report.seed, "size": size}
        for reply in report.answers(ranks, probe_block, **given):
            rank, value = reply.rank, reply.value
            block, x, y = twins[rank // size]
            where = on(meshes[rank // size])
            expected = {
                name: shard(name, p.grad, size, rank % size) if "norm" not in name else p.grad
                for name, p in block.named_parameters()
            }
            returned, missing = value.get("returned"), value.get("missing")
            rules = {
                f"parallelize returned {returned}: change the block itself, and return the block":
                    returned,
                f"{', '.join(missing or ())}: no DTensors, the plan has no style for them": missing,
                f"{where}: {', '.join(value.get('odd', ()))}: cut in another way. q, k, v and up "
                "go by columns (ColwiseParallel), out and down by rows (RowwiseParallel), all of "
                "them over the mesh that was handed in":
                    value.get("odd"),
            }  # fmt: skip
            if not report.facts(rank, rules):
                continue
            counts = [
                sum(call["op"].startswith("all_reduce") for call in value[way])
                for way in ("forward", "backward")
            ]
            ops = {call["op"] for way in ("forward", "backward") for call in value[way]}
            others = sorted(op for op in ops if not op.startswith("all_reduce"))
            reductions = {
                f"{where}: it calls {', '.join(others)}. All_reduces are enough: each rank attends "
                "with its own heads": others,
                f"{where}: {counts[0]} all_reduces forward, expected 2": counts[0] != 2,
                f"{where}: {counts[1]} all_reduces backward, expected 2. Q, K and V each take x "
                "for themselves, and each reduces its gradient: PrepareModuleInput makes x a "
                "DTensor once, for all three": counts[1] > 2,
                f"{where}: {counts[1]} all_reduces backward, expected 2": counts[1] < 2,
            }  # fmt: skip
            how = {"tolerance": EXACT}
            flat_y, flat_dx = y.detach().reshape(-1).tolist(), x.grad.reshape(-1).tolist()
            _ = (
                report.judge(rank, value["y"], flat_y, what=f"output {where}", **how)
                and report.judge(rank, value["dx"], flat_dx, what=f"gradient of x {where}", **how)
                and all(judge_gradient(report, rank, name, value["gradients"][name], g, size)
                        for name, g in expected.items())
                and report.facts(rank, reductions)
            )  # fmt: skip
        if report.found:
            return


# -- 9.9: experts -----------------------------------------------------------------------------


@task("9.9", "experts on other ranks", points=2)
def expert_parallel(ranks: Ranks, report: Report) -> None:
    """Tokens go to their experts and come back; those beyond the capacity stay behind."""
    cases = [case | {"capacity": c} for case in cases_apart(report) for c in experts.CAPACITIES]
    cases += [cases_apart(report)[2] | {"capacity": experts.MANY}]
    for case, members, values in tried(ranks, report, experts.probe_experts, cases):
        seeds = seeds_of(case, members)
        experts.judge(report, members, values, seeds, case["capacity"])
