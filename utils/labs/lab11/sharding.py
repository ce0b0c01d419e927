"""Checks of ZeRO in lab 11: sharded optimizers, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from utils.checks.comparison import EXACT, Calls, Mistake, Rule, inside, made, only, table, waited
from utils.checks.failures import MISMATCH, NO_FIT, STUCK, Failed
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import GroupAnswer, judge_groups, on
from utils.cluster.questions import Ranks
from utils.labs.shared.replicas import Seeds

from .memory_probes import probe_one, probe_three, probe_two
from .reference_models import rows_at, trained
from .small_layers import (
    BYTES,
    CHAIN,
    RATE,
    SMALL,
    STEPS,
    chained,
    layers_of,
    loss_of,
    parameters_of,
    row_of,
    samples,
    uneven_layers,
)

WORLD = 6
#: Groups of 6, 3 and 2 ranks, and groups of unequal sizes.
PARTITIONS = (None, [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 2, 3, 5], [1], [4]])
_WITHOUT_FIT = (
    "You passed tensors that don't fit the collective. Make the large one p times the small one, "
    "with the shard's dtype, and pass group=group to every call"
)
#: Communications that failed, or parts of error texts, and the message that explains each.
#: Python's and PyTorch's error classes say too little, so their texts decide.
ERRORS = {
    Failed(MISMATCH): "Ranks with other layers or other shards took part "
    "in a collective. Average gradients over dp only",
    Failed(NO_FIT): _WITHOUT_FIT,
    "list index out of range": _WITHOUT_FIT,
    "'NoneType' object has no attribute": "You read a gradient that is None. Run backward first, "
    "and don't free the gradient too early",
    "values to unpack": "A layer may have any number of parameters. Use list(layer.parameters())",
    "'Named' object has no attribute": "You named a parameter of a layer, but layers may have "
    "parameters of any name. Use layer.parameters()",
    "must match the size": "Your two rows have different lengths. Make this rank's part as long "
    "as its shard, and the whole row p times as long",
    "returned an incorrect number of gradients": "Return from backward one value for each "
    "argument of forward: x, shard, shape, group",
    "view size is not compatible": "You called view on a tensor that isn't contiguous. Use "
    "reshape, or copy_back",
    "leaf Variable that requires grad": "You changed a weight while autograd was watching. Use "
    "copy_back, or torch.no_grad()",
    Failed(STUCK): "A rank is waiting for a message that nobody sends. Use the same tag and group "
    "on both sides, and let every rank of a group call its collectives",
    "tuple index out of range": "You asked for more pieces than there are. Use 0 to len(order) − 1",
}


def exactly(reply: Any, expected: Any, mistakes: Iterable[Mistake], what: str) -> Step:
    """Return the step that these numbers are right in double precision."""
    return value(reply, expected, mistakes, what=what, tolerance=EXACT)


def explain_errors(report: Report) -> None:
    """Add to an error of PyTorch what caused it."""
    if explanation := report.behind_errors(ERRORS):
        report.problem(f"({explanation})")
        report.found.sort(key=lambda problem: problem[2] is not None)


def _judge_in_groups(ranks: Ranks, report: Report, probe: Callable, judge: Callable) -> None:
    """Ask a probe in all partitions, with a seed for the model and one per rank for its samples."""
    arguments = {"seed": report.seed, "each": to_each(data=report.seeds(WORLD))}
    cases = [{"partition": partition} | arguments for partition in PARTITIONS]
    judge_groups(ranks, report, probe, cases, judge, world=WORLD)
    explain_errors(report)


def _seeds_of(answer: GroupAnswer) -> Seeds:
    datas = tuple(answer.case["each"][rank]["data"] for rank in answer.members)
    return Seeds(answer.case["seed"], datas)


# -- 11.4: ZeRO-1 -----------------------------------------------------------------------------


def _pair(nbytes: int) -> list[Rule]:
    """Return the rules for one reduce_scatter and one all_gather of a row of `nbytes` bytes."""

    def sizes(calls: Calls) -> str | None:
        long_sides = [(call["op"], max(call["sent"], call["received"])) for call in calls]
        for op, size in long_sides:
            if size != nbytes:
                whole = "one for all parameters, padded to a multiple of the group's size"
                return (
                    f"You made a {op} of {size} bytes on its long side, expected {nbytes}. Make "
                    f"{whole}"
                )
        return None

    halves = " in a step (reduce-scatter and all-gather are the two halves of one all_reduce)"
    both = "reduce_scatter_tensor", "all_gather_into_tensor"
    return [only(*both), *(made(op, 1, halves) for op in both), sizes, waited]


@task("11.4", "ZeRO-1", points=3)
def zero_one(ranks: Ranks, report: Report) -> None:
    """Judge whether all ranks have the reference model's weights, after two collectives."""
    _judge_in_groups(ranks, report, probe_one, _zero_one)


def _zero_one(answer: GroupAnswer) -> Iterator[Step]:
    seeds = _seeds_of(answer)
    p = len(answer.members)
    begin = row_of(parameters_of(layers_of(seeds.model)), p).tolist()
    part = slice(answer.place * len(begin) // p, (answer.place + 1) * len(begin) // p)
    wrong_shards = {
        "You never changed the shard. Let the optimizer update it": begin[part],
        "You put the whole row into the shard. Keep this rank's part": begin,
    }
    for step, result in zip(range(STEPS), answer.value, strict=True):
        weights = trained(seeds)[step]
        where = f"step {step + 1} {on(answer.members)}"
        mistakes = _wrong_weights(seeds, step, begin, part)
        yield communication(result["calls"], inside(answer.members), *_pair(BYTES * len(begin)))
        yield exactly(result["weights"], weights, mistakes, f"weights after {where}")
        yield exactly(result["shard"], weights[part], table(wrong_shards), f"shard after {where}")
        yield facts({
            f"After {where}, your parameters use other memory. Put the weights into the existing "
            "tensors (copy_back)": result["moved"],
            f"After {where}, your shard or its gradient is a view, which keeps the whole row in "
            "memory. Copy this rank's part": result["held"] > 1,
        })


def _wrong_weights(seeds: Seeds, step: int, begin: list[float], part: slice) -> Iterator[Mistake]:
    """Yield the model's weights after mistakes; `part` is this rank's part of them."""
    yield Mistake(
        begin,
        "You never changed the model's weights. Give the shard a gradient before the optimizer "
        "steps, then gather the shards and put them into the model (copy_back)",
    )
    p = len(seeds.own)
    if p == 1:
        return
    right = trained(seeds)[step]
    own_part_alone = [*begin[: part.start], *right[part], *begin[part.stop :]]
    text = "You updated only this rank's part. Get the others by all_gather"
    yield Mistake(own_part_alone, text)
    if step == 0:
        text = "You gathered the gradients. Gather the shards, which are weights"
        yield Mistake([(b - a) / RATE for b, a in zip(begin, right, strict=True)], text)
    own_gradient = "You updated each part with its own rank's gradient alone"
    for mode, text in {
        "sum": f"You summed the gradient over {p} ranks. Take the mean",
        "twice divided": f"You divided the gradient by {p} once too often",
        "own": f"{own_gradient}. Use reduce_scatter, which sums over the group",
        "own, divided": f"{own_gradient}, divided. Use reduce_scatter, which sums over the group",
        "first": "You updated all parts with the first rank's gradient",
        "adds up": "You kept the previous step's gradient in shard.grad. Replace it",
    }.items():
        yield Mistake(trained(seeds, mode)[step], text)


# -- 11.5: ZeRO-2 -----------------------------------------------------------------------------


@task("11.5", "ZeRO-2", points=3)
def zero_two(ranks: Ranks, report: Report) -> None:
    """Judge whether backward reduce-scatters and frees each layer's gradient as it goes."""
    _judge_in_groups(ranks, report, probe_two, _zero_two)


LATE_BINDING = (
    "Give each hook its own layer and shard: a function that you define in a loop sees the last "
    "value of the loop's variables"
)


def _zero_two(answer: GroupAnswer) -> Iterator[Step]:
    p = len(answer.members)
    result = answer.value
    for step, of_step in zip(range(STEPS), result["steps"], strict=True):
        yield from _backward(answer, step, of_step)
    yield from _uneven(answer, result["uneven"])
    # Enough for parts of all layers, one layer's gradients and row, what backward needs, and some
    # delay. An answer that keeps all gradients has 24 more.
    most = CHAIN / p + 12
    yield facts({
        f"{on(answer.members)}: Your backward of {CHAIN} equal layers held {result['rows']:.1f} "
        f"layers' worth of bytes, and {most:.1f} are enough. Free a layer's gradients right after "
        "their reduce-scatter, and keep no row": p > 1 and result["rows"] > most
    })
    if p == WORLD:
        scatters = made("reduce_scatter_tensor", CHAIN, f" in backward of {CHAIN} equal layers")
        yield communication(result["calls again"], only("reduce_scatter_tensor"), scatters)


def _backward(answer: GroupAnswer, step: int, result: dict[str, Any]) -> Iterator[Step]:
    """Judge the gradients of the shards after a backward, and what is freed on the way."""
    n = len(SMALL) - 1
    where = f"backward {step + 1} {on(answer.members)}"
    yield communication(result["calls"], only("reduce_scatter_tensor"), inside(answer.members))
    reached = [gradient is not None for gradient in result["gradients"]]
    late = f"{where}: You reduce-scattered only the last layer. {LATE_BINDING}"
    yield facts({late: reached == [False] * (n - 1) + [True]})
    why = f" in {where} (one for each of {n} layers, with weight and bias together)"
    yield communication(result["calls"], made("reduce_scatter_tensor", n, why), waited)
    yield from _shard_gradients(answer, result["gradients"], step, f", {where}")
    left = result["left"]
    yield facts({
        f"{where}: {left} parameters still have a gradient. Set .grad = None": left,
        f"{where}: You kept the gradients of layer {result['behind'][:1]} after their last hook. "
        "Reduce-scatter and free them at once": result["behind"],
    })


def _uneven(answer: GroupAnswer, result: dict[str, Any]) -> Iterator[Step]:
    """Judge the gradients of a layer with one parameter, and of one with four."""
    p = len(answer.members)
    where = f" in backward {on(answer.members)}, for layers of one and of four parameters"
    rules = only("reduce_scatter_tensor"), inside(answer.members), waited
    once = made("reduce_scatter_tensor", 2, f"{where} (one for each layer)")
    yield communication(result["calls"], *rules, once)
    seeds = _seeds_of(answer)
    rows = [_uneven_rows(seeds.model, data, p) for data in seeds.own]
    for i, (gradient, of_layer) in enumerate(
        zip(result["gradients"], zip(*rows, strict=True), strict=True)
    ):
        right = (sum(of_layer) / p).chunk(p)[answer.place].tolist()
        yield exactly(gradient, right, (), f"gradient of shard {i}{where}")


def _uneven_rows(model: int, data: int, p: int) -> list[Tensor]:
    """Return the padded row of each layer's gradient for the samples of one rank."""
    layers = uneven_layers(model)
    loss_of(chained(layers, samples(data, 0))).backward()
    return [row_of([q.grad for q in layer.parameters()], p) for layer in layers]


def _shard_gradients(answer: GroupAnswer, gradients: list, step: int, where: str) -> Iterator[Step]:
    seeds = _seeds_of(answer)
    for i in range(len(SMALL) - 1):
        mean = _means(seeds, step, i).chunk(len(seeds.own))[answer.place].tolist()
        mistakes = _wrong_parts(seeds, answer.place, step, i)
        yield exactly(gradients[i], mean, mistakes, f"gradient of shard {i}{where}")


def _means(seeds: Seeds, step: int, i: int) -> Tensor:
    """Return the padded row of a layer's gradient, averaged over a group."""
    p = len(seeds.own)
    return row_of([sum(rows_at(seeds, place, step)[i] for place in range(p)) / p], p)


def _wrong_parts(seeds: Seeds, k: int, step: int, i: int) -> Iterator[Mistake]:
    yield Mistake(lambda v: v is None, f"Your shard has no gradient. {LATE_BINDING}")
    p = len(seeds.own)
    row = _means(seeds, step, i)
    right = row.chunk(p)[k]
    if p > 1:
        alone = row_of([rows_at(seeds, k, step)[i]], p).chunk(p)[k]
        yield from table({
            f"You summed over {p} ranks. Take the mean": p * right,
            f"You divided by {p} once too often": right / p,
            "You used only this rank's samples. Reduce-scatter over the group": alone,
            "You used only this rank's samples, divided. Use reduce_scatter, which sums over the "
            "group": alone / p,
            "You kept the gradient of the whole layer. Keep this rank's part": row,
            "You kept the part of another group rank": row.chunk(p)[(k + 1) % p],
        })
    wide, narrow = SMALL[i : i + 2]
    weight, bias, padding = row.split([wide * narrow, narrow, len(row) - (wide + 1) * narrow])
    transposed = weight.view(narrow, wide).t().reshape(-1)
    bias_first = torch.cat([bias, weight, padding]).chunk(p)[k]
    turned = torch.cat([transposed, bias, padding]).chunk(p)[k]
    yield from table({
        "You put the bias in front of the weight. Put the weight first": bias_first,
        "You transposed the weight's gradient. It is gradient.t() @ x, [out, in]": turned,
    })
    if step:
        before = _means(seeds, step - 1, i).chunk(p)[k]
        yield from table({
            "You added the previous backward's gradient. Replace it": right + before,
            "You kept the previous backward's gradient. Make the hook work each time": before,
        })


# -- 11.6: ZeRO-3 -----------------------------------------------------------------------------


@task("11.6", "ZeRO-3", points=3)
def zero_three(ranks: Ranks, report: Report) -> None:
    """Judge layers that are whole only while they are in use."""
    _judge_in_groups(ranks, report, probe_three, _zero_three)


_BOTH = only("all_gather_into_tensor", "reduce_scatter_tensor")


def _zero_three(answer: GroupAnswer) -> Iterator[Step]:
    layers = layers_of(answer.case["seed"])
    x = samples(_seeds_of(answer).own[answer.place], 0).requires_grad_()
    y = chained(layers, x)
    loss_of(y).backward()
    yield from _gathered_forward(answer, layers, x.detach(), y)
    yield from _gathered_backward(answer, x.grad)
    if len(answer.members) == WORLD:
        through = f" both ways through {CHAIN} equal layers"
        gathers = made("all_gather_into_tensor", 2 * CHAIN, through)
        scatters = made("reduce_scatter_tensor", CHAIN, f" back through {CHAIN} equal layers")
        yield communication(answer.value["calls again"], _BOTH, gathers, scatters)


def _gathered_forward(
    answer: GroupAnswer, layers: list[nn.Linear], x: Tensor, y: Tensor
) -> Iterator[Step]:
    """Judge the output, and layers gathered one by one; x and y belong to the reference model."""
    result = answer.value
    members = answer.members
    p = len(members)
    where = on(members)
    why = f" forward {where} (one for each of {len(layers)} layers)"
    rules = inside(members), made("all_gather_into_tensor", len(layers), why), waited
    yield communication(result["forward"], only("all_gather_into_tensor"), *rules)
    yield exactly(result["y"], values_of(y), _wrong_outputs(layers, x, p), f"output {where}")
    said = "Your whole() returns copies. Return weight and bias as views into one gathered row"
    yield facts({said: not result["views"]})
    # Enough for one layer, and for activations worth four.
    yield _kept(p, where, "forward", result["rows forward"], 12)


def _gathered_backward(answer: GroupAnswer, slope: Tensor) -> Iterator[Step]:
    """Judge gradients, and layers gathered again; `slope` is the reference gradient of x."""
    result = answer.value
    members = answer.members
    where = on(members)
    p = len(members)
    n = len(SMALL) - 1
    why = f" backward {where} (each layer once more, because its weights were forgotten)"
    gathers = made("all_gather_into_tensor", n, why)
    scatters = made("reduce_scatter_tensor", n, f" backward {where} (one for each of {n} layers)")
    yield communication(result["backward"], _BOTH, inside(members), gathers, scatters, waited)
    changed = (
        "Your backward changed the gradient that came in, which other layers may use. Work on a "
    )
    yield facts({changed + "copy of it": result["changed"]})
    mistakes = _wrong_slopes(slope.reshape(-1), p, n)
    yield exactly(result["dx"], values_of(slope), mistakes, f"gradient of x {where}")
    yield from _shard_gradients(answer, result["gradients"], 0, f" {where}")
    # This includes a part of each gradient.
    yield _kept(p, where, "backward", result["rows backward"], CHAIN / p + 12)


def _wrong_outputs(layers: list[nn.Linear], x: Tensor, p: int) -> Iterator[Mistake]:
    no_bias = [lambda x, weight=layer.weight: x @ weight.t() for layer in layers]
    ends = [row_of(layer.parameters(), p)[-layer.out_features :] for layer in layers]
    padded = [
        lambda x, weight=layer.weight, end=end: x @ weight.t() + end
        for layer, end in zip(layers, ends, strict=True)
    ]
    of_padded = chained(padded, x).detach().reshape(-1)
    yield from table({
        "You left out the bias. Add it": chained(no_bias, x).detach().reshape(-1),
        "You took the bias from the row's end, where padding follows": of_padded,
    })


def _wrong_slopes(slope: Tensor, p: int, n: int) -> Iterator[Mistake]:
    if p > 1:
        yield from table({
            f"You divided by {p}, but each rank has its own samples. Average only the shard's "
            "gradient": slope / p,
            f"You divided by {p} in each layer. Average only the shard's gradient": slope / p**n,
        })
    yield Mistake(None, "You returned none. Return it first")


def _kept(p: int, where: str, when: str, rows: float, most: float) -> Step:
    """Judge whether more layers than these were whole at once."""
    return facts({
        f"Your {when} of {CHAIN} equal layers {where} held {rows:.1f} layers' worth of bytes, and "
        f"{most:.1f} are enough. Forget the gathered weights after each layer, and keep only the "
        "shard in ctx": p > 1 and rows > most
    })
