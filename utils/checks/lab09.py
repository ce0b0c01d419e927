"""Checks of lab 09: shards, conjugate operators, Megatron's layers, traffic, a loss, experts.

Answers are tried in groups of 1, 2 and 4 ranks, in double precision, forward and backward, and
compared with the layer that was not split. What was communicated forward and backward is judged
apart. Gradients are compared absolutely: that of a key's bias is zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils import models

from .calls import Calls, Rule, inside, made, only
from .functions import Case, judge_calls
from .groups import in_group, on, tried
from .mistakes import Mistake, table
from .model import use_model as use_model
from .probe import answer_named, as_dict, recorded
from .replicas import keywords, rules_of
from .task import Report, task

PARTITIONS = ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], None)
#: What float64 may lose; a mistake is off by much more.
EXACT = 1e-9
BYTES = 8  # of a float64


def _cases(report: Report) -> list[dict]:
    return [{"partition": partition, "seed": report.seed} for partition in PARTITIONS]


def _drawn(seed: int, *shape: int) -> Tensor:
    """Numbers of a normal distribution; the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def _made(seed: int, kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    """A module in float64 whose weights follow from the seed alone, biases of size 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = kind(*sizes).double()
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return module


def _flat(value: object) -> object:
    """A tensor's numbers; anything else as its type's name, which equals no expected list."""
    if isinstance(value, Tensor):
        return value.detach().reshape(-1).tolist()
    return None if value is None else f"<{type(value).__name__}>"


def _both_ways(function: Callable, x: Tensor, upstream: Tensor) -> dict:
    """Result, gradient of the input, and what was communicated forward and backward."""
    from torch_mpi.record import log

    x = x.clone().requires_grad_()
    y, forward = recorded(function, x)
    found = {"y": _flat(y), "dx": None, "forward": forward, "backward": []}
    if isinstance(y, Tensor) and y.shape == upstream.shape and y.requires_grad:
        mark = log.mark()
        y.backward(upstream)
        found |= {"backward": [as_dict(c) for c in log.since(mark)], "dx": _flat(x.grad)}
    elif isinstance(y, Tensor) and y.shape != upstream.shape:
        found["y"] = f"a tensor of shape {list(y.shape)}"
    elif isinstance(y, Tensor):
        found["dx"] = "nothing: the result is cut off from the input"
    return found


def _size(op: str, nbytes: int, when: str) -> Rule:
    """Each call of an operation has this size."""

    def rule(calls: Calls) -> str | None:
        wrong = [call["nbytes"] for call in calls if call["op"] == op and call["nbytes"] != nbytes]
        if not wrong:
            return None
        return f"{when}: {op} of {wrong[0]} bytes, expected {nbytes}"

    return rule


# -- 9.1: shards ------------------------------------------------------------------------------

WIDE, NARROW = 8, 12  # of the layer that is cut


@in_group
def probe_shards(user_ns: dict, *, rank: int, group, partition, seed: int) -> dict:
    """Both ways to cut a layer: numbers, shapes, and how much memory lies behind them."""
    linear, found = _made(seed, nn.Linear, WIDE, NARROW), {}
    for name in ("column_shard", "row_shard"):
        pair, calls = recorded(answer_named(user_ns, name), linear, **keywords(partition, group))
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"{name} returned {type(pair).__name__}, expected (weight, bias)")
        tensors = [one for one in pair if isinstance(one, Tensor)]
        found[name] = {
            "values": [one.detach().tolist() if isinstance(one, Tensor) else None for one in pair],
            "kept": [one.untyped_storage().nbytes() > one.nbytes for one in tensors],
            "graph": any(one.grad_fn is not None for one in tensors),
            "calls": calls,
        }
    return found


@task("9.1", "the shards of a layer", points=2)
def shards(ranks, report: Report) -> None:
    """Blocks of rows or columns of the weight, with the bias that belongs to them."""
    linear = _made(report.seed, nn.Linear, WIDE, NARROW)
    weight, bias = linear.weight.detach(), linear.bias.detach()
    for _, members, values in tried(ranks, report, __name__, "probe_shards", _cases(report)):
        p = len(members)
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
                views = rules_of({
                    f"{what}: the shard is a view, and the whole weight stays in memory "
                    "behind it: clone()": p > 1 and any(got["kept"]),
                    f"{what}: the shard hangs on the graph of the whole layer: detach()":
                        got["graph"],
                })  # fmt: skip
                ok = (
                    report.communication(rank, got["calls"], only())
                    and report.judge(
                        rank, got["values"][0], part.tolist(), wrong, what=f"{what}: weight"
                    )
                    and report.judge(
                        rank, got["values"][1], expected.tolist(), wrong_bias, what=f"{what}: bias"
                    )
                    and report.communication(rank, [], *views)
                )
                if not ok:
                    break


# -- 9.2: f and g -----------------------------------------------------------------------------

_SHAPE = (3, 4)


@in_group
def probe_operators(user_ns: dict, *, rank: int, group, partition, seed: int) -> dict:
    """f and g of this rank's numbers; of a gradient that is not contiguous, or used twice."""
    named, found = keywords(partition, group), {}
    x, upstream = _drawn(seed + rank, *_SHAPE), _drawn(seed + 50 + rank, *_SHAPE)
    for name in ("f", "g"):
        operator = functools.partial(answer_named(user_ns, name), **named)
        given = x.clone()
        one = _both_ways(operator, x, upstream)
        operator(given)
        turned = _both_ways(lambda t, o=operator: o(t.t()).t(), x, upstream)
        shared = upstream.clone()
        leaf = x.clone().requires_grad_()
        y = operator(leaf)
        if isinstance(y, Tensor) and y.requires_grad:
            y.backward(shared)
        found[name] = one | {
            "input": torch.equal(given, x),
            "upstream": torch.equal(shared, upstream),
            "turned": [turned["y"], turned["dx"]],
        }
    return found


@task("9.2", "the conjugate operators f and g", points=3)
def operators(ranks, report: Report) -> None:
    """One does nothing forward and sums backward; the other the reverse."""
    nbytes = BYTES * math.prod(_SHAPE)
    for _, members, values in tried(ranks, report, __name__, "probe_operators", _cases(report)):
        p = len(members)
        xs = {r: _drawn(report.seed + r, *_SHAPE) for r in members}
        ups = {r: _drawn(report.seed + 50 + r, *_SHAPE) for r in members}
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
                    wrong = table({
                        f"the numbers of the ranks were summed. {name} does that "
                        f"{when[summed]} only; {when[calm]} it hands on what it gets":
                            sums[key] if key != summed else [],
                        f"these are this rank's own numbers: {name} sums over the ranks "
                        f"{when[key]}": own[key] if key == summed else [],
                        "this is the mean; the parts of a sum are added": right / p,
                        "this is the sum of the world or a multiple": right * p,
                        "there is no gradient for x: backward returns one value for each "
                        "argument of forward, that of x first": "None",
                    })  # fmt: skip
                    wrong.append(Mistake(lambda v: v is None, wrong[-1].said))
                    wanted = made("all_reduce", int(key == summed), f" {when[key]} in {name}")
                    flat = right.reshape(-1).tolist()
                    before, after = [only("all_reduce"), inside(members)], [wanted]
                    after.append(_size("all_reduce", nbytes, what))
                    ok = (
                        ok
                        and report.communication(rank, calls[key], *before)
                        and report.judge(
                            rank, got[key], flat, wrong, what=what, tolerance=EXACT
                        )
                        and report.communication(rank, calls[key], *after)
                    )
                turned = [sums[k] if k == summed else own[k] for k in ("y", "dx")]
                odd = rules_of({
                    f"{name}: its input has changed. Others may still need it: sum a clone":
                        not got["input"],
                    f"{name}: the gradient that came in has changed. Others in the graph use "
                    "that tensor, too: sum a clone": not got["upstream"],
                })  # fmt: skip
                ok = ok and report.communication(rank, [], *odd)
                what = f"{name} of a transposed tensor, whose memory has another order"
                flat = [one.reshape(-1).tolist() for one in turned]
                if not (ok and report.judge(rank, got["turned"], flat, what=what)):
                    break


# -- 9.3 and 9.4: the layers ------------------------------------------------------------------

WIDTH, HEADS, HIDDEN, INPUT = 8, 4, 16, (2, 3, 8)
KINDS = {
    "ParallelMLP": (models.FeedForward, WIDTH, HIDDEN),
    "ParallelAttention": (models.Attention, WIDTH, HEADS),
}
ROWWISE = ("down.weight", "out.weight")
WHOLE = ("down.bias", "out.bias")


def _shard(name: str, tensor: Tensor, p: int, place: int) -> Tensor:
    """What a rank has of a parameter, or of its gradient."""
    if name.endswith(WHOLE):
        return tensor
    return tensor.chunk(p, 1 if name.endswith(ROWWISE) else 0)[place]


@in_group
def probe_layer(user_ns: dict, *, rank: int, group, partition, seed: int, name: str) -> dict:
    """A layer of the student: forward, backward, and what it holds."""
    kind, *sizes = KINDS[name]
    whole = _made(seed, kind, *sizes)
    layer = answer_named(user_ns, name)(whole, **keywords(partition, group))
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module")
    held = {key: list(p.shape) for key, p in layer.named_parameters()}
    found = _both_ways(layer, _drawn(seed + 1, *INPUT), _drawn(seed + 2, *INPUT))
    found["held"] = held
    found["gradients"] = {
        key: None if p.grad is None else p.grad.reshape(-1).tolist()
        for key, p in layer.named_parameters()
    }
    return found


def _parts(module: nn.Module, x: Tensor, p: int, cut: str = "") -> list[Tensor]:
    """What each of p ranks adds to the sum; with a mistake in it, if one is named."""
    found = []
    for place in range(p):
        own = {
            key: _shard(key, value.detach(), p, place)
            for key, value in module.named_parameters()
        }  # fmt: skip
        if isinstance(module, models.FeedForward):
            inner = functional.linear(x, own["up.weight"], own["up.bias"])
            inner = inner if cut == "no gelu" else functional.gelu(inner)
            found.append(functional.linear(inner, own["down.weight"]))
            continue
        if cut == "fused":
            rows = [torch.cat([getattr(module, m).get_parameter(k).detach() for m in "qkv"])
                    .chunk(p)[place].chunk(3) for k in ("weight", "bias")]  # fmt: skip
            pairs = list(zip(*rows, strict=True))
        else:
            pairs = [(own[f"{m}.weight"], own[f"{m}.bias"]) for m in "qkv"]
        size = module.head_size if cut != "small heads" else max(module.head_size // p, 1)
        size = len(pairs[0][1]) if cut == "one head" else size
        inner = models.attend(*(functional.linear(x, *pair) for pair in pairs), size)
        found.append(functional.linear(inner, own["out.weight"]))
    return found


def _wrong_outputs(module: nn.Module, x: Tensor, p: int, place: int) -> Iterator[Mistake]:
    parts, last = _parts(module, x, p), list(module.parameters())[-1].detach()
    total = sum(parts)
    wrong = {
        "this rank's part of the sum: g is missing": parts[place] + last,
        "this rank's part of the sum, without a bias: g is missing": parts[place],
        "the bias was left out: it comes after the sum": total,
        f"the bias was added on each rank, and is in the sum {p} times: add it after g":
            total + p * last,
        "this is the mean of the parts; g is the sum": total / p + last,
        "the mean of the parts, the bias among them; g is the sum": total / p + last / p,
    }  # fmt: skip
    if isinstance(module, models.FeedForward):
        wrong["there is no GELU between the two layers"] = (
            sum(_parts(module, x, p, "no gelu")) + last
        )
        wrong["the GELU comes after the second layer; it belongs between the two"] = (
            functional.gelu(sum(_parts(module, x, p, "no gelu")) + last)
        )
    else:
        said = {
            "fused": "Q, K and V were stacked and then cut: this rank has rows of Q and no K. Cut "
            "each of the three by itself",
            "small heads": "the heads are too small: a rank has fewer heads, of the same size",
            "one head": "all columns of this rank were taken as one head; head_size stays as it is",
        }
        for cut, text in said.items():
            if p > 1:
                wrong[text] = sum(_parts(module, x, p, cut)) + last
    if p > 1:
        yield from table({said: one.reshape(-1) for said, one in wrong.items()})


def _judge_layer(report: Report, name: str, members: list[int], values: list[dict]) -> None:
    kind, *sizes = KINDS[name]
    whole, p = _made(report.seed, kind, *sizes), len(members)
    x = _drawn(report.seed + 1, *INPUT).requires_grad_()
    upstream = _drawn(report.seed + 2, *INPUT)
    y = whole(x)
    y.backward(upstream)
    where, nbytes = on(members), BYTES * math.prod(INPUT)
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        expected = {
            key: list(_shard(key, tensor, p, place).shape)
            for key, tensor in whole.named_parameters()
        }
        if not _judge_held(report, rank, value["held"], expected, where):
            continue
        own = x.detach().clone().requires_grad_()
        _parts(whole, own, p)[place].backward(upstream)
        wrong_dx = table({
            "this is only what this rank's part gives: f is missing, or not at the "
            "beginning. The parts of all ranks read x": own.grad.reshape(-1) if p > 1 else [],
            f"the gradient is {p} times too large: it was summed once too often":
                (p * x.grad).reshape(-1) if p > 1 else [],
        })  # fmt: skip
        before = [only("all_reduce"), inside(members)]
        how = {"tolerance": EXACT}
        forward, backward = value["forward"], value["backward"]
        why = "; each all_reduce waits for all ranks"
        hint = " (one f in front of all that reads x)"
        after = [
            (forward, made("all_reduce", 1, f" forward {where}{why}")),
            (forward, _size("all_reduce", nbytes, "forward")),
            (backward, made("all_reduce", 1, f" backward {where}{hint}")),
            (backward, _size("all_reduce", nbytes, "backward")),
        ]
        wrong_y = _wrong_outputs(whole, x.detach(), p, place)
        flat_y, flat_dx = y.detach().reshape(-1).tolist(), x.grad.reshape(-1).tolist()
        _ = (
            report.communication(rank, forward, *before)
            and report.judge(rank, value["y"], flat_y, wrong_y, what=f"output {where}", **how)
            and report.communication(rank, backward, *before)
            and report.judge(
                rank, value["dx"], flat_dx, wrong_dx, what=f"gradient of x {where}", **how
            )
            and all(
                _judge_gradient(report, rank, key, value["gradients"][key],
                                _shard(key, parameter.grad, p, place), p)
                for key, parameter in whole.named_parameters()
            )
            and all([report.communication(rank, calls, rule) for calls, rule in after])
        )  # fmt: skip


def _judge_held(report: Report, rank: int, held: dict, expected: dict, where: str) -> bool:
    names = sorted(expected)
    if sorted(held) != names:
        report.problem(f"the parameters are {sorted(held)}, expected {names}", rank)
        return False
    odd = next((key for key in names if held[key] != expected[key]), None)
    if odd is None:
        return True
    said = f"{where}: {odd} has the shape {held[odd]} on this rank, expected {expected[odd]}"
    report.problem(said, rank)
    return False


def _judge_gradient(report: Report, rank: int, key: str, got, expected: Tensor, p: int) -> bool:
    flat = expected.reshape(-1)
    wrong = table({
        f"{p} times too large. Every rank has the same loss: g hands the gradient on as "
        "it is": flat * p if p > 1 else [],
        f"divided by {p}: the ranks share a loss, they do not average it":
            flat / p if p > 1 else [],
    })  # fmt: skip
    wrong.append(Mistake(lambda value: value is None, "there is none: did forward use it?"))
    return report.judge(
        rank, got, flat.tolist(), wrong, what=f"gradient of {key}", tolerance=EXACT
    )


@task("9.3", "the MLP, by columns and then by rows", points=3)
def parallel_mlp(ranks, report: Report) -> None:
    """Equal to the MLP that was not split, with one all_reduce each way."""
    cases = [case | {"name": "ParallelMLP"} for case in _cases(report)]
    for _, members, values in tried(ranks, report, __name__, "probe_layer", cases):
        _judge_layer(report, "ParallelMLP", members, values)


@task("9.4", "attention, by heads", points=2)
def parallel_attention(ranks, report: Report) -> None:
    """Equal to the attention that was not split, with one all_reduce each way."""
    cases = [case | {"name": "ParallelAttention"} for case in _cases(report)]
    for _, members, values in tried(ranks, report, __name__, "probe_layer", cases):
        _judge_layer(report, "ParallelAttention", members, values)


# -- 9.5: what travels ------------------------------------------------------------------------


@task("9.5", "what travels in a step", points=2)
def traffic(ranks, report: Report) -> None:
    """Numbers and bytes of other models than the notebook's."""
    cases = []
    k = report.seed % 7
    for depth, batch, tokens, width, p in (
        (1, 2 + k, 16, 64, 1), (2, 64, 16, 64, 2), (3 + k, 8, 16, 32, 4),
        (24, 4, 1024, 64 * (k + 2), 8),
    ):  # fmt: skip
        nbytes, number = 4 * batch * tokens * width, 4 * depth
        share = 2 * (p - 1) / p
        wrong = table({
            "this counts forward only; backward has as many": [number / 2, number / 2 * share
                                                               * nbytes],
            "the bytes are those of one all_reduce": [number, share * nbytes],
            "the bytes of the tensors: on a ring a rank sends 2 (p − 1) / p of them":
                [number, number * nbytes],
            "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each":
                [number, number * share * nbytes / 2],
            "numbers, not bytes: a float32 has four": [number, number * share * nbytes / 4],
            "each token has a row of its own: batch · tokens · width numbers":
                [number, number * share * nbytes / tokens],
            "one layer a block: a block has two, attention and MLP":
                [number / 2, number / 2 * share * nbytes],
        })  # fmt: skip
        form = "(number of all_reduces, bytes that each rank sends)"
        right = [number, number * share * nbytes]
        arguments = [depth, batch, tokens, width, p]
        cases.append(Case("tensor_parallel_traffic", arguments, right, wrong, form))
    for parameters, p in ((1000 + k, 1), (104_970, 2), (54_986 + k, 4), (3 * 10**9, 8)):
        share, nbytes = 2 * (p - 1) / p, 4 * parameters
        wrong = table({
            "the bytes of the gradients: on a ring a rank sends 2 (p − 1) / p of them": nbytes,
            "a ring has two halves, reduce-scatter and all-gather: (p − 1) / p each":
                share * nbytes / 2,
            "numbers, not bytes: a float32 has four": share * parameters,
            "the gradients travel once, not forward and backward": 2 * share * nbytes,
        })  # fmt: skip
        form = "bytes that each rank sends"
        right = share * nbytes
        cases.append(Case("data_parallel_traffic", [parameters, p], right, wrong, form))
    judge_calls(ranks, report, cases)


# -- 9.6: a loss over classes that are split --------------------------------------------------

SAMPLES, CLASSES = 6, 11


def _logits(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed + 9)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    return scale * _drawn(seed, SAMPLES, CLASSES), labels


@in_group
def probe_loss(user_ns: dict, *, rank: int, group, partition, seed: int, scale: float) -> dict:
    """`class_parallel_loss` of this rank's classes, and the gradient of its logits."""
    function = answer_named(user_ns, "class_parallel_loss")
    logits, labels = _logits(seed, scale)
    parts = logits.tensor_split(dist.get_world_size(group), dim=1)
    place = dist.get_rank(group)
    first = sum(part.shape[1] for part in parts[:place])
    one = torch.ones((), dtype=torch.float64)
    return _both_ways(
        lambda own: function(own, first, labels, **keywords(partition, group)), parts[place], one
    )


@task("9.6", "extra mile: a loss over split classes", points=2)
def class_parallel_loss(ranks, report: Report) -> None:
    """The cross entropy of all classes, and the gradient of this rank's logits."""
    cases = [case | {"scale": scale} for case in _cases(report) for scale in (1.0, 900.0)]
    for case, members, values in tried(ranks, report, __name__, "probe_loss", cases):
        logits, labels = _logits(report.seed, case["scale"])
        logits.requires_grad_()
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        p, detached = len(members), logits.detach()
        parts = logits.grad.tensor_split(p, dim=1)
        exps = detached.exp().sum(1)
        picked = detached[range(SAMPLES), labels]
        maxima = [one.max(1).values for one in detached.tensor_split(p, dim=1)]
        sums = [(one - most[:, None]).exp().sum(1) for one, most in
                zip(detached.tensor_split(p, dim=1), maxima, strict=True)]  # fmt: skip
        what = f"with logits of a size of {case['scale']:g}, {on(members)}"
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            own = detached.tensor_split(p, dim=1)[place]
            wrong = table({
                "this is a sum over the samples; take the mean": [loss.item() * SAMPLES],
                f"the loss is summed over the {p} ranks": [loss.item() * p],
                "the classes of this rank only were summed: sum the exponentials over the ranks":
                    [(own.exp().sum(1).log() - picked).mean().item()],
                "the logit of the label is missing: the rank that has the class knows it":
                    [exps.log().mean().item()],
                "each rank subtracted a maximum of its own, and then summed: the maximum must be "
                "that of all ranks (ReduceOp.MAX)":
                    [(sum(sums).log() + maxima[place] - picked).mean().item()],
            })  # fmt: skip
            wrong.append(Mistake(lambda v: isinstance(v, list) and not all(map(math.isfinite, v)),
                "not a finite number. exp() of a large logit is inf: subtract the largest logit "
                "of each sample first"))  # fmt: skip
            expected = parts[place].reshape(-1)
            wrong_dx = table({
                f"{p} times too large: it was summed over ranks that have the same loss":
                    expected * p if p > 1 else [],
                "a sum over the samples": expected * SAMPLES,
                "the exponentials' part only: the label's logit was cut off, by detach or in place":
                    (detached.softmax(1) / SAMPLES).tensor_split(p, dim=1)[place].reshape(-1),
            })  # fmt: skip
            many = sum(call["nbytes"] for call in value["forward"])
            allowed = rules_of({
                f"{what}: {len(value['forward'])} all_reduces; three are enough: the maximum, the "
                "sum, the label's logit": len(value["forward"]) > 3,
                f"{what}: {many} bytes reduced; one number a sample and a time is enough: "
                f"{3 * SAMPLES * BYTES} at most": many > 3 * SAMPLES * BYTES,
            })  # fmt: skip
            form = "the mean loss"
            _ = (
                report.communication(rank, value["forward"], only("all_reduce"), inside(members))
                and report.judge(rank, value["y"], [loss.item()], wrong, what=what, form=form)
                and report.judge(rank, value["dx"], expected.tolist(), wrong_dx,
                                 what=f"gradient of the logits {what}", tolerance=EXACT)
                and report.communication(rank, [], *allowed)
                and report.communication(rank, value["backward"],
                                         made("all_reduce", 0, " backward"), only())
            )  # fmt: skip


# -- 9.7: the same with DTensor ---------------------------------------------------------------


def probe_block(user_ns: dict, *, rank: int, seed: int, size: int) -> dict:
    """A block that the student's plan has cut, on a mesh of the first ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    meshes = [DeviceMesh("cpu", list(range(k, k + size))) for k in range(0, 4, size)]
    mesh = meshes[rank // size]
    block = _made(seed, models.Block, WIDTH, HEADS, HIDDEN)
    got = answer_named(user_ns, "parallelize")(block, mesh)
    block = got if isinstance(got, nn.Module) else block
    kinds = [name for name, p in block.named_parameters() if isinstance(p, DTensor)]
    found = _both_ways(block, _drawn(seed + 1, *INPUT), _drawn(seed + 2, *INPUT))
    local = {name: p.grad for name, p in block.named_parameters()}
    local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in local.items()}
    return found | {
        "cut": kinds,
        "returned": isinstance(got, nn.Module),
        "gradients": {name: None if g is None else _flat(g) for name, g in local.items()},
    }


@task("9.7", "the same with DTensor", points=2)
def with_dtensor(ranks, report: Report) -> None:
    """A block of the model: as the twin, with two all_reduces each way."""
    for size in (4, 2, 1):
        block = _made(report.seed, models.Block, WIDTH, HEADS, HIDDEN)
        x = _drawn(report.seed + 1, *INPUT).requires_grad_()
        y = block(x)
        y.backward(_drawn(report.seed + 2, *INPUT))
        replies = report.answers(ranks, __name__, "probe_block", seed=report.seed, size=size)
        linear = [name for name, _ in block.named_parameters() if "norm" not in name]
        for reply in replies:
            rank, value = reply.rank, reply.value
            members = list(range(rank // size * size, rank // size * size + size))
            where = on(members)
            missing = [name for name in linear if name not in value["cut"]]
            expected = {
                name: _shard(name, p.grad, size, rank % size) if "norm" not in name else p.grad
                for name, p in block.named_parameters()
            }
            shapes = [n for n, g in expected.items() if len(value["gradients"][n] or []) !=
                      g.numel()]  # fmt: skip
            rules = rules_of({
                "parallelize returned nothing: return the block": not value["returned"],
                f"{', '.join(missing)} are no DTensors: the plan has no style for them": missing,
                f"{where}: {', '.join(shapes)} cut in another way: q, k, v and up by columns "
                "(ColwiseParallel), out and down by rows (RowwiseParallel)": shapes,
            })  # fmt: skip
            counts = [
                sum(call["op"].startswith("all_reduce") for call in value[way])
                for way in ("forward", "backward")
            ]
            reductions = rules_of({
                f"{where}: {counts[0]} all_reduces forward, expected 2": counts[0] != 2,
                f"{where}: {counts[1]} all_reduces backward, expected 2. Q, K and V each take x "
                "for themselves, and each reduces its gradient: PrepareModuleInput makes x a "
                "DTensor once, for all three": counts[1] > 2,
                f"{where}: {counts[1]} all_reduces backward, expected 2": counts[1] < 2,
            }) if size > 1 else []  # fmt: skip
            how = {"tolerance": EXACT}
            flat_y, flat_dx = y.detach().reshape(-1).tolist(), x.grad.reshape(-1).tolist()
            _ = (
                report.communication(rank, [], *rules)
                and report.judge(rank, value["y"], flat_y, what=f"output {where}", **how)
                and report.judge(rank, value["dx"], flat_dx, what=f"gradient of x {where}", **how)
                and all(_judge_gradient(report, rank, name, value["gradients"][name], g, size)
                        for name, g in expected.items())
                and report.communication(rank, [], *reductions)
            )  # fmt: skip
        if report.found:
            return


# -- 9.8: experts -----------------------------------------------------------------------------

TOKENS, FEATURES = 9, 3


def _routed(seed: int, place: int, p: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of the rank at this place, the expert of each, its gate, and the gradient above."""
    draw = torch.Generator().manual_seed(seed + 31 * place)
    popular = torch.rand(TOKENS, generator=draw) < 0.4
    choice = torch.randint(0, p, (TOKENS,), generator=draw)
    choice[popular] = p - 1
    gate = 0.2 + 0.6 * torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    x, upstream = (_drawn(seed + k + place, TOKENS, FEATURES) for k in (100, 200))
    return x, choice, gate, upstream


def _expert(seed: int, place: int) -> nn.Module:
    return nn.Sequential(_made(seed + 7 * place, nn.Linear, FEATURES, FEATURES), nn.Tanh())


@in_group
def probe_experts(user_ns: dict, *, rank: int, group, partition, seed: int, capacity: int) -> dict:
    """`expert_parallel` of this rank's tokens with this rank's expert."""
    function = answer_named(user_ns, "expert_parallel")
    place, p = dist.get_rank(group), dist.get_world_size(group)
    x, choice, gate, upstream = _routed(seed, place, p)
    expert = _expert(seed, place)
    gate.requires_grad_()
    named = keywords(partition, group)
    found = _both_ways(
        lambda own: function(own, choice.clone(), gate, expert, capacity, **named), x, upstream
    )
    grads = [gate.grad, *(parameter.grad for parameter in expert.parameters())]
    return found | {"grads": [None if g is None else _flat(g) for g in grads]}


def _kept(choice: Tensor, capacity: int, last: bool = False) -> Tensor:
    """Whether each token is among the first (or last) so many of its expert."""
    order = choice.flip(0) if last else choice
    seen = [int((order[:k] == order[k]).sum()) < capacity for k in range(len(order))]
    return torch.tensor(seen).flip(0) if last else torch.tensor(seen)


@task("9.8", "experts on other ranks", points=2)
def experts(ranks, report: Report) -> None:
    """Tokens go to their experts and come back; those beyond the capacity stay behind."""
    cases = [case | {"capacity": c} for case in _cases(report) for c in (2, TOKENS)]
    for case, members, values in tried(ranks, report, __name__, "probe_experts", cases):
        p, capacity = len(members), case["capacity"]
        modules = [_expert(report.seed, place) for place in range(p)]
        routed = [_routed(report.seed, place, p) for place in range(p)]
        for x, _, gate, _ in routed:
            x.requires_grad_(), gate.requires_grad_()
        outputs = [_outputs(modules, *own[:2]) for own in routed]
        ys = [
            _kept(choice, capacity)[:, None] * gate[:, None] * out
            for out, (_, choice, gate, _) in zip(outputs, routed, strict=True)
        ]
        sum((y * own[3]).sum() for y, own in zip(ys, routed, strict=True)).backward()
        nbytes, where = BYTES * p * capacity * FEATURES, f"capacity {capacity}, {on(members)}"
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            x, choice, gate, _ = routed[place]
            allowed = [only("all_to_all_single", "all_to_all"), inside(members)]
            sizes = [
                _total("all_to_all", way, value[way], nbytes) for way in ("forward", "backward")
            ]
            expected = [gate.grad, *(q.grad for q in modules[place].parameters())]
            what = ["the gates", "the expert's weight", "the expert's bias"]
            wrong = _wrong_routes(modules, x, choice, gate, outputs[place], capacity, place)
            ok = (
                report.communication(rank, value["forward"], *allowed)
                and report.judge(rank, value["y"], ys[place].reshape(-1).tolist(), wrong,
                                 what=f"output, {where}", tolerance=EXACT)
                and report.communication(rank, value["forward"], sizes[0])
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
    return [Mistake(lambda value: value is None or value == zeros, said)]


def _wrong_routes(modules, x, choice, gate, outputs, capacity, place) -> Iterator[Mistake]:
    x, gate, outputs = x.detach(), gate.detach()[:, None], outputs.detach()
    kept = _kept(choice, capacity)[:, None]
    with torch.no_grad():
        own = torch.stack([modules[place](token) for token in x])
        weighted = _outputs(modules, gate * x, choice)
        sparse = torch.where(kept, gate * outputs, 0)
        order = choice.argsort(stable=True)
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
        }  # fmt: skip
    yield from table({said: one.reshape(-1) for said, one in wrong.items()})
