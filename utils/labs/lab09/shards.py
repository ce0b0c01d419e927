"""What checks ask of layers that are cut: numbers, gradients and traffic, beside the uncut twin.

All is in double precision. What each of p ranks adds to a sum is computed from the twin, and so is
what likely mistakes lead to. Gradients are compared absolutely: that of a key's bias is zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from utils import models
from utils.checks.calls import Calls, Rule, inside, made, only, waited
from utils.checks.groups import WORLD, Group, in_group, keywords, on
from utils.checks.mistakes import Mistake, table
from utils.checks.probe import answer_named, as_dict, in_double, recorded
from utils.checks.task import Report, to_each

#: Groups of 4, 2 and 1 ranks, and no group at all.
PARTITIONS = ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], None)
#: What float64 may lose; a mistake is off by much more.
EXACT = 1e-9
BYTES = 8  # of a float64
FROZEN = (
    "the layer that it was given needs no gradients any more. Leave the layer as it is: detach() "
    "gives a tensor without the graph"
)


def cases_of(report: Report) -> list[dict]:
    """What a probe is asked: one case for each partition."""
    return [{"partition": partition, "seed": report.seed} for partition in PARTITIONS]


def cases_apart(report: Report) -> list[dict]:
    """The same, where each rank has a seed of its own that the others are not told."""
    each = to_each(seed=report.seeds(WORLD))
    return [{"partition": partition, "each": each} for partition in PARTITIONS]


def seeds_of(case: dict, members: Sequence[int]) -> list[int]:
    """The seeds that these ranks were told."""
    return [case["each"][rank]["seed"] for rank in members]


def drawn(seed: int, *shape: int) -> Tensor:
    """Numbers of a normal distribution; the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def made_module(seed: int, kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    """A module in float64 whose weights follow from the seed alone, biases of size 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = in_double(kind(*sizes))
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return module


def composed(
    common: int, seeds: Sequence[int], kind: Callable[..., nn.Module], *sizes: int
) -> nn.Module:
    """A layer whose shards follow from a seed each: whoever knows one of them has one shard.

    What all ranks have whole follows from the common seed.
    """
    whole, p = made_module(common, kind, *sizes), len(seeds)
    modules = [made_module(seed, kind, *sizes) for seed in seeds]
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if not name.endswith(WHOLE) and "norm" not in name:
                of_all = [module.get_parameter(name) for module in modules]
                parts = [shard(name, one, p, place) for place, one in enumerate(of_all)]
                parameter.copy_(torch.cat(parts, 1 if name.endswith(ROWWISE) else 0))
    return whole


def flat(value: object) -> object:
    """A tensor's numbers; anything else as its type's name, which equals no expected list."""
    if isinstance(value, Tensor):
        # The class's own method: an answer may have given this very tensor another one.
        return Tensor.detach(value).reshape(-1).tolist()
    return None if value is None else f"<{type(value).__name__}>"


def both_ways(function: Callable, x: Tensor, upstream: Tensor) -> dict:
    """Result, gradient of the input, and what was communicated forward and backward."""
    from torch_mpi.record import log

    x = x.clone().requires_grad_()
    y, forward = recorded(function, x)
    found = {"y": flat(y), "dx": None, "forward": forward, "backward": []}
    if isinstance(y, Tensor) and y.shape == upstream.shape and y.requires_grad:
        mark = log.mark()
        y.backward(upstream)
        found |= {"backward": [as_dict(c) for c in log.since(mark)], "dx": flat(x.grad)}
    elif isinstance(y, Tensor) and y.shape != upstream.shape:
        found["y"] = f"a tensor of shape {list(y.shape)}"
    elif isinstance(y, Tensor):
        found["dx"] = "nothing: the result is cut off from the input"
    return found


class WrittenBehind(TorchFunctionMode):
    """Finds results in a graph that change, though no operation of PyTorch changes them.

    A collective writes into a tensor's memory, also by way of ``y.data`` or ``y.detach()``;
    autograd learns nothing of it. Seen are the operations of this thread inside of ``with``.

    Attributes:
        found: whether there was one.
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
        for one in tree_leaves((args, out)):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                self._known[id(one)] = one, one.detach().clone()
        return out

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._look()

    def _look(self) -> None:
        self.found |= any(not torch.equal(one, values) for one, values in self._known.values())


def of_size(op: str, nbytes: int, when: str) -> Rule:
    """Each call of an operation has this size."""

    def rule(calls: Calls) -> str | None:
        wrong = [call["nbytes"] for call in calls if call["op"] == op and call["nbytes"] != nbytes]
        if not wrong:
            return None
        return f"{when}: {op} of {wrong[0]} bytes, expected {nbytes}"

    return rule


# -- layers -----------------------------------------------------------------------------------

WIDTH, HEADS, HIDDEN, INPUT = 16, 8, 24, (2, 3, 16)
KINDS = {
    "ParallelMLP": (models.FeedForward, WIDTH, HIDDEN),
    "ParallelAttention": (models.Attention, WIDTH, HEADS),
}
ROWWISE = ("down.weight", "out.weight")
WHOLE = ("down.bias", "out.bias")
#: Mistakes in which an attention uses other layers than Q, K and V, and those that it uses.
INSTEAD = {"kv": "qvk", "qq": "qqv"}


def shard(name: str, tensor: Tensor, p: int, place: int) -> Tensor:
    """What a rank has of a parameter, or of its gradient."""
    if name.endswith(WHOLE):
        return tensor
    return tensor.chunk(p, 1 if name.endswith(ROWWISE) else 0)[place]


def shapes(module: nn.Module, p: int) -> dict[str, list[int]]:
    """Of what each of p ranks has."""
    return {key: list(shard(key, t, p, 0).shape) for key, t in module.named_parameters()}


@in_group
def probe_layer(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, common: int, name: str
) -> dict:
    """A layer of the student: forward, backward, and what it holds.

    seed: of this rank's shard. In place of the other shards it is given others than those ranks.
    """
    (kind, *sizes), p = KINDS[name], dist.get_world_size(group)
    whole = composed(common, [seed] * p, kind, *sizes)
    layer = answer_named(user_ns, name)(whole, **keywords(partition, group))
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module")
    held = {key: list(p.shape) for key, p in layer.named_parameters()}
    if held != shapes(whole, p):
        return {"held": held}  # it may not even run
    behind, frozen = WrittenBehind(), not all(p.requires_grad for p in whole.parameters())
    layer.train(partition is not None)

    def forward(x: Tensor) -> Tensor:
        with behind:
            return layer(x)

    found = both_ways(forward, drawn(common + 1, *INPUT), drawn(common + 2, *INPUT))
    found |= {"held": held, "behind": behind.found, "frozen": frozen}
    found["when"] = "" if partition else ", after eval()"
    found["gradients"] = {
        key: None if p.grad is None else p.grad.reshape(-1).tolist()
        for key, p in layer.named_parameters()
    }
    return found


def _parts(
    modules: Sequence[nn.Module],
    x: Tensor | Sequence[Tensor],
    cut: str = "",
    act: Callable = functional.gelu,
) -> list[Tensor]:
    """What each rank adds, by the layer that it is given; with a mistake in it, if it is named.

    x: of an attention, three tensors are what Q, K and V read.
    """
    found, p = [], len(modules)
    for place, module in enumerate(modules):
        own = {
            key: shard(key, value.detach(), p, place)
            for key, value in module.named_parameters()
        }  # fmt: skip
        if isinstance(module, models.FeedForward):
            inner = functional.linear(x, own["up.weight"], own["up.bias"])
            inner = inner if cut == "no gelu" else act(inner)
            found.append(functional.linear(inner, own["down.weight"]))
            continue
        if cut == "fused":
            rows = [torch.cat([getattr(module, m).get_parameter(k).detach() for m in "qkv"])
                    .chunk(p)[place].chunk(3) for k in ("weight", "bias")]  # fmt: skip
            pairs = list(zip(*rows, strict=True))
        else:
            pairs = [(own[f"{m}.weight"], own[f"{m}.bias"]) for m in "qkv"]
        pairs = [pairs["qkv".index(m)] for m in INSTEAD.get(cut, "qkv")]
        size = module.head_size if cut != "small heads" else max(module.head_size // p, 1)
        size = len(pairs[0][1]) if cut == "one head" else size
        read = [x] * 3 if isinstance(x, Tensor) else x
        qkv = (functional.linear(t, *pair) for t, pair in zip(read, pairs, strict=True))
        inner = models.attend(*qkv, size)
        found.append(functional.linear(inner, own["out.weight"]))
    return found


def _without_f(modules: Sequence[nn.Module], x: Tensor, upstream: Tensor, place: int) -> dict:
    """The gradients of x if f is in front of one or two of Q, K and V only, on one rank."""
    three = [x.detach().clone().requires_grad_() for _ in "qkv"]
    parts = _parts(modules, three)
    summed, own = (
        torch.autograd.grad(part, three, upstream, retain_graph=True)
        for part in (sum(parts), parts[place])
    )
    found = {}
    for names in [*"qkv", *itertools.combinations("qkv", 2)]:
        said = f"f is in front of {' and '.join(names)} only: q, k and v all read x"
        pairs = zip("qkv", summed, own, strict=True)
        found[said] = sum(s if name in names else o for name, s, o in pairs)
    return found


def _wrong_outputs(modules: Sequence[nn.Module], x: Tensor, place: int) -> Iterator[Mistake]:
    p, parts, last = len(modules), _parts(modules, x), list(modules[0].parameters())[-1].detach()
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
    if isinstance(modules[0], models.FeedForward):
        wrong["there is no GELU between the two layers"] = sum(_parts(modules, x, "no gelu")) + last
        for said, kind in {"this is ReLU": functional.relu,
                           "this is GELU's approximation by tanh": lambda t: functional.gelu(
                               t, approximate="tanh")}.items():  # fmt: skip
            wrong[f"{said}; functional.gelu(x) is asked for"] = (
                sum(_parts(modules, x, act=kind)) + last
            )
        wrong["the GELU comes after the second layer; it belongs between the two"] = (
            functional.gelu(sum(_parts(modules, x, "no gelu")) + last)
        )
    else:
        said = {
            "fused": "Q, K and V were stacked and then cut: this rank has rows of Q and no K. Cut "
            "each of the three by itself",
            "small heads": "the heads are too small: a rank has fewer heads, of the same size",
            "one head": "all columns of this rank were taken as one head; head_size stays as it is",
            "kv": "K and V are swapped: attend takes q, k, v",
            "qq": "attend got Q twice: its second argument is K",
        }
        for cut, text in said.items():
            if p > 1:
                wrong[text] = sum(_parts(modules, x, cut)) + last
    if p > 1:
        yield from table({said: one.reshape(-1) for said, one in wrong.items()})


_BEHIND = (
    "a collective has written into a tensor that autograd keeps the graph of. That is right by "
    "luck, as a product does not need its own output for its gradient; after a sigmoid the same "
    "line gives a wrong one, and no error. Use g, which sums a copy and says what backward does"
)


def judge_layer(
    report: Report, name: str, members: list[int], values: list[dict], seeds: list[int]
) -> None:
    """What a layer holds, gives and communicates, on all ranks of a group with these seeds."""
    (kind, *sizes), p = KINDS[name], len(members)
    whole = composed(report.seed, seeds, kind, *sizes)
    given = [composed(report.seed, [seed] * p, kind, *sizes) for seed in seeds]
    x = drawn(report.seed + 1, *INPUT).requires_grad_()
    upstream = drawn(report.seed + 2, *INPUT)
    y = whole(x)
    y.backward(upstream)
    where, nbytes = on(members) + values[0].get("when", ""), BYTES * math.prod(INPUT)
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        if not _judge_held(report, rank, value["held"], shapes(whole, p), where):
            continue
        own = x.detach().clone().requires_grad_()
        _parts(given, own)[place].backward(upstream)
        wrong_dx = table({
            "this is only what this rank's part gives: f is missing, or not at the "
            "beginning. The parts of all ranks read x": own.grad.reshape(-1) if p > 1 else [],
            f"the gradient is {p} times too large: it was summed once too often":
                (p * x.grad).reshape(-1) if p > 1 else [],
        })  # fmt: skip
        if p > 1 and name == "ParallelAttention":
            cut_off = _without_f(given, x, upstream, place)
            wrong_dx += table({said: one.reshape(-1) for said, one in cut_off.items()})
        before = [only("all_reduce"), inside(members), waited]
        how = {"tolerance": EXACT}
        forward, backward = value["forward"], value["backward"]
        why = "; each all_reduce waits for all ranks"
        hint = " (one f in front of all that reads x)"
        after = [
            (forward, made("all_reduce", 1, f" forward {where}{why}")),
            (forward, of_size("all_reduce", nbytes, "forward")),
            (backward, made("all_reduce", 1, f" backward {where}{hint}")),
            (backward, of_size("all_reduce", nbytes, "backward")),
        ]
        wrong_y = _wrong_outputs(given, x.detach(), place)
        flat_y, flat_dx = y.detach().reshape(-1).tolist(), x.grad.reshape(-1).tolist()
        _ = (
            report.communication(rank, forward, *before)
            and report.judge(rank, value["y"], flat_y, wrong_y, what=f"output {where}", **how)
            and report.facts(rank, {
                _BEHIND: value["behind"], FROZEN: value["frozen"],
            })
            and report.communication(rank, backward, *before)
            and report.judge(
                rank, value["dx"], flat_dx, wrong_dx, what=f"gradient of x {where}", **how
            )
            and all(
                judge_gradient(report, rank, key, value["gradients"][key],
                                shard(key, parameter.grad, p, place), p)
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


def judge_gradient(report: Report, rank: int, key: str, got, expected: Tensor, p: int) -> bool:
    """The gradient of a rank's shard."""
    whole = expected.reshape(-1)
    wrong = table({
        f"{p} times too large. Every rank has the same loss: g hands the gradient on as "
        "it is": whole * p if p > 1 else [],
        f"{p} times too small: every rank has the same loss, and nothing is divided by the number "
        "of ranks, no bias either":
            whole / p if p > 1 else [],
    })  # fmt: skip
    wrong.append(Mistake(lambda value: value is None, "there is none: did forward use it?"))
    return report.judge(
        rank, got, whole.tolist(), wrong, what=f"gradient of {key}", tolerance=EXACT
    )
