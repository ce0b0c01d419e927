"""Checks of lab 11: meshes of ranks, two axes at once, sharding by hand, offload.

All is in double precision on small models, and compared with a twin that is not split. Groups and
bytes are exact; memory is metered, and has a bound that those exceed who keep what they should
free. No verdict depends on times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.calls import Calls, Rule, inside, made, only, rules_of, waited
from utils.checks.groups import Group, enough, group_of, in_group, keywords, on, tried
from utils.checks.mistakes import NO_NUMBER, Mistake, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import (
    answer_named,
    as_dict,
    fingerprint,
    kind_of,
    number,
    reading_answer,
    recorded,
    told,
)
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks
from utils.labs.lab11.offload import Layers
from utils.labs.shared.reference_pipeline import Piece, drawn, gradient_of, twin, whole
from utils.labs.shared.replicas import Seeds
from utils.labs.shared.schedules import one_f_one_b

from .sharding import (
    CHAIN,
    DEEP,
    FEW,
    RATE,
    ROWS,
    SMALL,
    STEPS,
    WIDE,
    Named,
    Watched,
    batch,
    chained,
    collected,
    host_rows,
    layers_of,
    list_of,
    loss_of,
    momentum,
    offloaded,
    overdue,
    row_of,
    rows_at,
    samples,
    shard_of,
    trained,
    watched_optimizers,
)

WORLD = 6
#: What float64 may lose; a mistake is off by much more.
EXACT = 1e-10
BYTES = 8  # of a float64
#: Groups that sharding is tried in: of 6, 3, 2 ranks and of unequal sizes.
PARTITIONS = (None, [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 2, 3, 5], [1], [4]])

# -- 11.1: a mesh -----------------------------------------------------------------------------

SHAPES = ((2, 3), (3, 2), (6, 1), (1, 2, 3), (3, 1, 2), (6,), (2, 1, 3, 1))
#: Meshes of more ranks and of fewer than there are: of these only lines are asked.
OTHERS = ((2, 5, 3), (2, 2))


def lines(shape: Sequence[int], axis: int) -> list[list[int]]:
    """All lines of a mesh along an axis."""
    ranks = torch.arange(math.prod(shape)).view(tuple(shape))
    return sorted(ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist())


def line(rank: int, shape: Sequence[int], axis: int) -> list[int]:
    """The one with this rank in it."""
    return next(one for one in lines(shape, axis) if rank in one)


class _Group:
    """Stands for a process group that nobody made."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks


def probe_mesh(user_ns: dict, *, rank: int, shapes: list) -> list:
    """Lines of all ranks; what `new_group` is asked for, and which groups come back."""
    function, found = answer_named(user_ns, "line"), []
    for shape in map(tuple, shapes):
        axes, asked = range(len(shape)), []
        got = [[_listed(function(r, shape, axis)) for axis in axes]
               for r in range(math.prod(shape))]  # fmt: skip

        def new_group(ranks: Ranks = None, *args: Any, asked=asked, **kwargs: Any) -> Any:
            asked.append(sorted(range(dist.get_world_size()) if ranks is None else ranks))
            return _Group(asked[-1]) if rank in asked[-1] else dist.GroupMember.NON_GROUP_MEMBER

        with (
            mock.patch.object(dist, "new_group", new_group),
            mock.patch.object(dist.distributed_c10d, "new_group", new_group),
        ):
            lost = any(one is None for of_rank in got for one in of_rank)
            groups = None
            if not lost and shape not in OTHERS:
                groups = answer_named(user_ns, "mesh_groups")(shape)
        if isinstance(groups, list):
            groups = [one.ranks if isinstance(one, _Group) else f"<{type(one).__name__}>"
                      for one in groups]  # fmt: skip
        else:
            groups = None if groups is None else f"<{type(groups).__name__}>"
        found.append({"lines": got, "asked": asked, "groups": groups})
    return found


def _listed(value: Any) -> Any:
    """Return a list or None in plain types; for any other value, the name of its type."""
    return told(value) if value is None or isinstance(value, list) else f"<{kind_of(value)}>"


def _wrong_lines(shape: tuple[int, ...], axis: int) -> Iterator[Mistake]:
    """Of the lines through all ranks, along an axis."""
    every, n = range(math.prod(shape)), len(shape)
    right = [line(r, shape, axis) for r in every]
    other = n - 1 - axis if n - 1 != 2 * axis else (axis + 1) % n
    yield Mistake(lambda v: v == [None] * len(right), "returned None: return a list of ranks")
    yield Mistake(lambda v: any(isinstance(one, str) for one in v),
                  "line returns another type: return a list of ranks")  # fmt: skip
    yield from table({
        "the axes are swapped: these are the lines along another axis":
            [line(r, shape, other) for r in every],
        "the coordinates within the line; global ranks are asked for":
            [list(range(shape[axis])) for _ in every],
        "counted column by column: the last coordinate runs fastest, so neighbouring numbers are "
        "neighbours along the last axis": [line(r, shape[::-1], n - 1 - axis) for r in every],
        "these are all ranks, not those of one line": [list(every) for _ in every],
        "the rank itself is on its line, too":
            [[q for q in right[r] if q != r] for r in every],
    })  # fmt: skip
    yield Mistake(lambda v: isinstance(v, list) and [sorted(map(str, one or [])) for one in v] == [
        sorted(map(str, one)) for one in right],
        "the right ranks in another order: sort them")  # fmt: skip


@task("11.1", "a mesh of ranks and its groups", points=2)
def mesh(ranks: Ranks, report: Report) -> None:
    """Lines of meshes of several shapes, and groups that all ranks make alike."""
    if not enough(ranks, report, WORLD):
        return
    shapes = [list(s) for s in (*SHAPES, *OTHERS)]
    answers = report.answers(ranks, probe_mesh, shapes=shapes)
    for k, shape in enumerate((*SHAPES, *OTHERS)):
        for answer in answers:
            found, rank = answer.value[k], answer.rank
            for axis in range(len(shape)):
                right = [line(r, shape, axis) for r in range(math.prod(shape))]
                got = [of_rank[axis] for of_rank in found["lines"]]
                what = f"line(r, {shape}, {axis}) for r = 0, 1, …"
                if not report.judge(rank, got, right, _wrong_lines(shape, axis), what=what):
                    break
            if not report.of(rank) and shape in SHAPES:
                _judge_groups(report, rank, shape, found)
        if report.found:
            return
        asked = [answer.value[k]["asked"] for answer in answers]
        if any(one != asked[0] for one in asked):
            odd = next(r for r, one in enumerate(asked) if one != asked[0])
            report.problem(
                f"mesh_groups({shape}): rank 0 asks for {short(asked[0])}, rank {odd} for "
                f"{short(asked[odd])}. new_group is collective: every rank has to make every "
                "group, in the same order, or they wait for each other"
            )
            return


def _judge_groups(report: Report, rank: int, shape: tuple[int, ...], found: dict) -> None:
    what = f"mesh_groups({shape})"
    own = [line(rank, shape, axis) for axis in range(len(shape))]
    every = sorted(one for axis in range(len(shape)) for one in lines(shape, axis))
    asked = sorted(found["asked"])
    wrong = [
        Mistake(lambda v: isinstance(v, str), "return a list of groups"),
        Mistake(own[::-1], "the groups are in the wrong order: that of axis 0 comes first"),
        Mistake(lambda v: isinstance(v, list) and len(v) != len(own),
                f"{len(own)} groups are expected on each rank, one for each axis"),
        Mistake(lambda v: isinstance(v, list) and any(isinstance(g, str) for g in v),
                "these are not all groups of dist.new_group with this rank in it"),
    ]  # fmt: skip
    if sorted(map(str, asked)) == sorted(map(str, own)) != sorted(map(str, every)):
        report.problem(
            f"{what}: this rank makes only the groups that it is in. new_group is collective: "
            "every rank has to call it for every line, or those inside wait for the others",
            rank,
        )
    elif report.judge(rank, found["groups"], own, wrong, what=what, form="a list of groups"):
        missing = [one for one in every if one not in asked]
        twice = [one for one in asked if asked.count(one) > every.count(one)]
        rules = {
            f"{what}: the group {missing[:1]} was never made": missing,
            f"{what}: the group of {twice[:1]} was made more than once, or is no line of this mesh":
                twice,
        }  # fmt: skip
        report.facts(rank, rules)


# -- 11.2: pipeline × data --------------------------------------------------------------------

#: Groups of the pipelines, and of their replicas.
GRIDS = (
    ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
    ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]),
    ([[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3, 4, 5]]),
    # Two meshes, with two replicas and with one: the groups alone say how many there are.
    ([[0, 1], [2, 3], [4, 5]], [[0, 2], [1, 3], [4], [5]]),
)


def mine(partition: Sequence[Sequence[int]], rank: int) -> list[int]:
    """The group of a partition that a rank is in."""
    return list(next(members for members in partition if rank in members))


@contextlib.contextmanager
def axes_of(grid: Sequence, rank: int) -> Iterator[list]:
    """This rank's group along each axis of a grid."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(group_of(partition, rank)) for partition in grid]


def probe_hybrid(
    user_ns: dict, *, rank: int, seed: int, grid: list, microbatches: int, samples: int
) -> dict:
    """One step of a grid of pipelines; the seed is that of this rank's stage."""
    with axes_of(grid, rank) as (pp, dp):
        piece = Piece(seed, dist.get_rank(pp), dist.get_world_size(pp))
        (x, labels), seen = drawn(seed, samples), []
        piece.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
        function = reading_answer(user_ns, "hybrid_step")
        loss, calls = recorded(function, piece, x, labels, microbatches, pp, dp)
        single = Piece(seed, dist.get_rank(pp), dist.get_world_size(pp)).float()
        function(single, x.float(), labels, microbatches, pp, dp)
    return {"loss": number(loss), "gradient": gradient_of(piece), "calls": calls,
            "events": piece.log.events, "images": sum(map(len, seen)),
            "piece": fingerprint(torch.cat(seen)) if seen else "",
            "dtype": str(next(single.parameters()).dtype)}  # fmt: skip


def _on_axes(calls: Calls, pp: list[int], dp: list[int]) -> str | None:
    for call in calls:
        message = call["op"] in ("send", "recv")
        if call["group"] == list(range(WORLD)) and WORLD not in (len(pp), len(dp)):
            return (
                f"{call['op']} over all ranks: the stages have different layers, and so different "
                "gradients. Average over the replicas of this stage only: group=dp"
            )
        if not message and call["group"] == pp != dp and len(pp) > 1:
            return (
                f"{call['op']} over the pipeline's ranks {pp}: they have different layers. "
                "Gradients and losses are averaged over dp"
            )
        if message and call["group"] != pp:
            return f"{call['op']} outside of this rank's pipeline {pp}: pass group=pp"
    return None


def _reduced(calls: Calls, nbytes: int) -> str | None:
    """That all_reduces are about so many bytes, and the loss perhaps."""
    total = sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")
    if nbytes <= total <= nbytes + BYTES:
        return None
    return f"all_reduces of {total} bytes in all; this stage's gradients are {nbytes} bytes"


@task("11.2", "pipeline × data", points=3)
def pipeline_data(ranks: Ranks, report: Report) -> None:
    """Gradients and loss of the twin; messages and averages on their own axis."""
    if not enough(ranks, report, WORLD):
        return
    for grid, m, n in zip(GRIDS, (4, 2, 1, 3), (24, 12, 18, 36), strict=True):
        seeds = tuple(report.seeds(len(grid[0][0])))  # of each stage
        of_ranks = [seeds[mine(grid[0], rank).index(rank)] for rank in range(WORLD)]
        asked = {"each": to_each(seed=of_ranks), "grid": grid, "microbatches": m}
        asked["samples"] = n
        for answer in report.answers(ranks, probe_hybrid, **asked):
            _judge_hybrid(report, answer.rank, answer.value, *grid, m, seeds, n)
        if report.found:
            break
    _explained(report)


def _judge_hybrid(
    report: Report, rank: int, value: dict, pipes, columns, m, seeds, images: int
) -> None:
    pp, dp = mine(pipes, rank), mine(columns, rank)
    s, p, d, n = pp.index(rank), len(pp), dp.index(rank), len(dp)
    where = f"{n} pipelines of {p} stages"
    gradients, loss = twin(seeds, n=images)
    right, size = gradients[s], images // n
    order = [kind for kind, _ in one_f_one_b(p, m)[s]]
    forwards = value["events"].count("F")

    def of(samples: slice, labelled: slice | None = None) -> tuple[list[float], float]:
        return _part(seeds, images, s, samples, labelled)

    own, own_loss = of(slice(d * size, (d + 1) * size))
    wrong = table({
        f"{n} times too large: the sum over the replicas; divide by their number":
            [n * g for g in right] if n > 1 else [],
        f"divided once too often by {n}, the number of replicas":
            [g / n for g in right] if n > 1 else [],
        "this is the gradient of this replica's samples alone: average over dp, and give the piece "
        "of the minibatch by the place in dp, not by the place in the pipeline":
            own if n > 1 else [],
        f"divided by {p} once too often: by all ranks, or by the stages. A mean over the replicas "
        "is asked for; stages share the layers, not the samples":
            [g / p for g in right] if p > 1 else [],
        "all replicas have trained on the first piece of the minibatch: replica d has the d-th":
            of(slice(0, size))[0] if n > 1 else [],
        "the minibatch was cut by stages: each replica has a piece, and its stages share it":
            of(slice(0, images // p), slice(images - images // p, images))[0]
            if p > 1 else [],
        f"{m} times too small: run_schedule divides by the microbatches already":
            [g / m for g in right] if m > 1 else [],
    })  # fmt: skip
    said = (f"this replica has trained on {value['images']} images, expected {size}: cut the "
            f"minibatch into {n} pieces, one for each rank of dp")  # fmt: skip
    wrong.append(Mistake(lambda _: value["images"] != size, said))
    asked = drawn(seeds[0], images)[0].chunk(n)[d]
    rules = [
        lambda calls: _on_axes(calls, pp, dp),
        only("send", "recv", "all_reduce"),
        waited,
        *rules_of({
            f"{where}: {forwards} forwards on this rank, {m} microbatches were asked for: does "
            "each go through once?": forwards != m,
            f"{where}: this stage worked in the order {' '.join(value['events'])}; one_f_one_b has "
            f"{' '.join(order)}": value["events"] != order,
        }),
    ]  # fmt: skip
    losses = table({
        "this is the loss of this replica's samples; average it over dp": own_loss,
        f"the sum over {n} replicas: divide by their number": n * loss,
        "only the last stage has a loss; return None on the others": None,
    })  # fmt: skip
    if s < p - 1:
        losses = [Mistake(lambda v: v is not None, "only the last stage of a pipeline returns the "
                          "loss; return None on the others")]  # fmt: skip
    else:
        losses.append(NO_NUMBER)
    _ = (
        report.communication(rank, value["calls"], *rules)
        and report.judge(rank, value["gradient"], right, wrong, tolerance=EXACT,
                         what=f"gradients of stage {s}, {where}")
        and report.communication(
            rank, value["calls"], lambda calls: _reduced(calls, BYTES * len(right)), *rules_of({
                said: value["images"] != size,
                f"these are not the images of piece {d}: cut the minibatch in order":
                    s == 0 and value["piece"] != fingerprint(asked),
                f"the stage had parameters of float32, and has {value['dtype']} now: leave its "
                "type": value["dtype"] != "torch.float32"}))
        and report.judge(rank, value["loss"], loss if s == p - 1 else None, losses,
                         what=f"the loss, {where}", form="the loss on the last stage",
                         tolerance=EXACT)
    )  # fmt: skip


def _part(
    seeds: tuple[int, ...], n: int, s: int, samples: slice, labelled: slice | None
) -> tuple[list[float], float]:
    """The gradient of a stage, and the loss, of some samples; with others' labels by mistake."""
    pieces, (x, labels) = whole(seeds, n)
    x, labels = x[samples], labels[labelled or samples]
    for piece in pieces:
        x = piece(x)
    loss = functional.cross_entropy(x, labels)
    loss.backward()
    return gradient_of(pieces[s]), loss.item()


#: Parts of errors, and what is behind them.
ERRORS = {
    "have to make the same collective calls": "do ranks with other layers, or other shards, take "
    "part? Gradients are averaged over dp only",
    "the large tensor must be": "a collective got tensors that do not fit: the large one has the "
    "padded length, p times the small one, both have the dtype of the shard, and every call gets "
    "group=group",
    "list index out of range": "a collective got tensors that do not fit: the large one has the "
    "padded length, p times the small one, both have the dtype of the shard, and every call gets "
    "group=group",
    "'NoneType' object has no attribute": "a gradient is None where one is used: has backward been "
    "run, has it come already, and has nobody freed it before?",
    "'Named' object has no attribute": "layers may have parameters of any name: use "
    "layer.parameters()",
    "must match the size": "two rows have different lengths: this rank's part has the length of "
    "its shard, the whole row p times that",
    "returned an incorrect number of gradients": "backward returns one value for each argument of "
    "forward: x, shard, shape, group",
    "view size is not compatible": "use reshape, or copy_back",
    "leaf Variable that requires grad": "a weight is changed with autograd watching: use "
    "copy_back, or torch.no_grad()",
    "Deadlock: ": "somebody waits for what nobody sends. Do both sides use the same tag and group, "
    "and does every rank of a group call its collectives?",
    "tuple index out of range": "more pieces were asked for than there are: 0 … len(order) − 1",
}


def _judge_all(ranks: Ranks, report: Report, probe: Callable, judge: Callable) -> None:
    """Have ``judge(report, rank, place, members, seeds, value)`` see the ranks of all groups."""
    given = {"seed": report.seed, "each": to_each(own=(own := report.seeds(WORLD)))}
    cases = [{"partition": partition} | given for partition in PARTITIONS]
    for _, members, values in tried(ranks, report, probe, cases, world=WORLD):
        seeds = Seeds(report.seed, tuple(own[rank] for rank in members))
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            judge(report, rank, place, members, seeds, value)
    _explained(report)


def _explained(report: Report) -> None:
    """Add to an error of PyTorch what is behind it."""
    errors = [text for text, kind, _ in report.found if kind == "error"]
    said = next((s for part, s in ERRORS.items() if any(part in text for text in errors)), None)
    if said:
        report.problem(f"({said})")
        report.found.sort(key=lambda found: found[2] is not None)


# -- 11.3: tensor × data ----------------------------------------------------------------------

# Names that say nothing: what is cut is told by the argument.
CUT = {"p1": (5, 3), "inner.p2": (2, 4), "p4": (5,)}
WHOLE = {"inner.p1": (7,), "p3": (6,)}


class _Cut(nn.Module):
    """Parameters with these names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        for name, shape in (CUT | WHOLE).items():
            module, _, own = name.rpartition(".")
            parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            self.get_submodule(module).register_parameter(own, parameter)


def gradient(seed: int, name: str, k: int, d: int) -> Tensor:
    """Of a parameter, on place k of tp, of replica d's samples."""
    place = sorted(CUT | WHOLE).index(name)
    draw = torch.Generator().manual_seed(seed + 97 * place + 7 * d + (k + 1) * (name in CUT) * 1009)
    return torch.randn((CUT | WHOLE)[name], generator=draw, dtype=torch.float64)


def probe_clip(user_ns: dict, *, rank: int, gradients: dict, grid: list, most: float) -> dict:
    """Gradients of a made-up layer, by name, averaged and clipped."""
    with axes_of(grid, rank) as (tp, dp):
        layer = _Cut()
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.tensor(gradients[name], dtype=torch.float64)
        function = reading_answer(user_ns, "average_and_clip")
        norm, calls = recorded(function, layer, set(CUT), most, tp, dp)
    return {"norm": number(norm), "calls": calls, "gradient": gradient_of(layer)}


def _own_gradients(seed: int, tps: list, dps: list) -> list[dict[str, list]]:
    """What each rank of a grid has, by name."""
    at = [(mine(tps, rank).index(rank), mine(dps, rank).index(rank)) for rank in range(WORLD)]
    return [{name: gradient(seed, name, *one).tolist() for name in CUT | WHOLE} for one in at]


def _averages(seed: int, k: int, n: int) -> dict[str, Tensor]:
    names = [*CUT, *WHOLE]
    return {name: sum(gradient(seed, name, k, d) for d in range(n)) / n for name in names}


def _norms(seed: int, k: int, p: int, n: int, d: int) -> tuple[float, dict[str, float]]:
    """The norm of the whole gradient, and what mistakes lead to on place k."""
    means = [_averages(seed, place, n) for place in range(p)]
    cut = [sum(m[name].square().sum().item() for name in CUT) for m in means]
    whole = sum(means[0][name].square().sum().item() for name in WHOLE)
    raw = sum(gradient(seed, name, place, d).square().sum().item()
              for place in range(p) for name in CUT)  # fmt: skip
    raw += sum(gradient(seed, name, 0, d).square().sum().item() for name in WHOLE)
    total = sum(cut) + whole
    wrong = {
        "this is the norm of what this rank has: the squares of the shards have to be summed over "
        "tp": math.sqrt(cut[k] + whole),
        f"the whole parameters were counted {p} times: their gradients are the same on all ranks "
        "of tp, so their squares are not summed": math.sqrt(sum(cut) + p * whole),
        "norms were added over tp: sum the squares, and take the root at the end":
            sum(math.sqrt(c + whole) for c in cut),
        "norms of the shards were added over tp: sum their squares":
            math.sqrt(sum(map(math.sqrt, cut)) ** 2 + whole),
        "the squares were summed over dp as well: after averaging, all replicas have the same "
        "gradients": math.sqrt(n * total),
        "this is the square of the norm": total,
        "the whole parameters are missing in the norm": math.sqrt(sum(cut)),
        "the gradients were summed over dp, not averaged": n * math.sqrt(total),
        f"the gradients were divided by {WORLD // p}: the number of replicas is the size of dp, "
        f"{n}": n * math.sqrt(total) / (WORLD // p),
        "this is the norm of this replica's gradients: average over dp first": math.sqrt(raw),
    }  # fmt: skip
    return math.sqrt(total), wrong


def _between(seed: int) -> float:
    """A bound that the norm is above, and what each rank has by itself is below; in GRIDS[1]."""
    found = [_norms(seed, k, 2, 3, 0) for k in range(2)]
    return (found[0][0] + max(next(iter(wrong.values())) for _, wrong in found)) / 2


@task("11.3", "tensor × data: average and clip", points=3)
def tensor_data(ranks: Ranks, report: Report) -> None:
    """The mean over the replicas, and the norm of the whole gradient."""
    if not enough(ranks, report, WORLD):
        return
    cases = (GRIDS[1], 2.5), (GRIDS[0], 1.5), (GRIDS[1], 1e3), (GRIDS[3], 1.5), (GRIDS[1], 0)
    for grid, most in cases:
        (seed,) = report.seeds(1)
        most = most or _between(seed)
        asked = {"each": to_each(gradients=_own_gradients(seed, *grid)), "grid": grid, "most": most}
        for answer in report.answers(ranks, probe_clip, **asked):
            _judge_clip(report, answer.rank, answer.value, *grid, most, seed)
        if report.found:
            break
    _explained(report)


def _judge_clip(report: Report, rank: int, value: dict, tps, dps, most, seed: int) -> None:
    tp, dp = mine(tps, rank), mine(dps, rank)
    k, p, n = tp.index(rank), len(tp), len(dp)
    norm, wrong_norms = _norms(seed, k, p, n, dp.index(rank))
    means, layer = _averages(seed, k, n), _Cut()
    row = torch.cat([means[name].reshape(-1) for name, _ in layer.named_parameters()])
    own = torch.cat([gradient(seed, name, k, dp.index(rank)).reshape(-1)
                     for name, _ in layer.named_parameters()])  # fmt: skip
    factor = min(1.0, most / norm)
    where = f"most = {most:g}, tp {tp}, dp {dp}"
    wrong = table({
        "the gradients were not clipped: multiply each by most / norm, in place":
            row if factor < 1 else [],
        "the norm is smaller than most, and the gradients were made longer: leave them":
            row * (most / norm) if factor == 1 else [],
        "each rank has clipped by the norm of its own part: one factor for all":
            row * min(1.0, most / wrong_norms[next(iter(wrong_norms))]),
        "these are the gradients of this replica: average over dp": own * factor,
        f"a sum over the replicas: divide by {n}": n * row * factor,
        "clipped twice": row * factor**2 if factor < 1 else [],
    })  # fmt: skip
    returned = table({said: one for said, one in wrong_norms.items() if abs(one - norm) > 1e-9})
    returned.append(Mistake(min(norm, most), "this is the norm after clipping: return that from "
                            "before"))  # fmt: skip
    returned.append(NO_NUMBER)
    _ = (
        report.communication(rank, value["calls"], lambda calls: _on_mesh(calls, tp, dp),
                             only("all_reduce"), waited)
        and report.judge(rank, value["norm"], norm, returned, what=f"norm, {where}",
                         form="the norm before clipping", tolerance=1e-7)
        and report.judge(rank, value["gradient"], row.mul(factor).tolist(), wrong,
                         what=f"gradients, {where}", tolerance=1e-6)
        and report.communication(
            rank, [c for c in value["calls"] if c["group"] == dp],
            lambda calls: _reduced(calls, BYTES * len(row)))
    )  # fmt: skip


def _on_mesh(calls: Calls, tp: list[int], dp: list[int]) -> str | None:
    for call in calls:
        if call["group"] not in (tp, dp):
            return (
                f"{call['op']} over the ranks {call['group']}: shards of different ranks are "
                f"different numbers. Gradients are averaged over dp, {dp}; the squares of the "
                f"shards are summed over tp, {tp}"
            )
        if call["group"] == tp and call["nbytes"] > len(CUT | WHOLE) * BYTES:
            return (
                f"{call['op']} of {call['nbytes']} bytes over tp, {tp}: these ranks have different "
                "shards. Sum the squares of the shards, one number, over tp, and average gradients "
                "over dp"
            )
    return None


# -- 11.4: ZeRO-1 -----------------------------------------------------------------------------


@in_group
def probe_one(user_ns: dict, *, rank: int, group: Group, partition, own: int, seed: int) -> list:
    """Two steps on a small model."""
    k, p = dist.get_rank(group), dist.get_world_size(group)
    first, *others = layers_of(seed)
    layers = nn.ModuleList([Named(first, 0), *others])
    shard = shard_of(list(layers.parameters()), p, k)
    optimizer, found = momentum([shard]), []
    places = [q.data_ptr() for q in layers.parameters()]
    for step in range(STEPS):
        layers.zero_grad()
        loss_of(chained(layers, samples(own, step))).backward()
        function = answer_named(user_ns, "zero1_step")
        _, calls = recorded(function, layers, shard, optimizer, **keywords(partition, group))
        row = row_of(list(layers.parameters()), p)
        moved = places != [q.data_ptr() for q in layers.parameters()]
        held = [
            q.untyped_storage().nbytes() // q.nbytes for q in (shard, shard.grad) if q is not None
        ]
        found.append({"weights": row.tolist(), "shard": list_of(shard), "calls": calls,
                      "moved": moved, "held": max(held)})  # fmt: skip
    return found


def _pair(p: int, nbytes: int) -> list[Rule]:
    """One reduce_scatter and one all_gather of a row of so many bytes."""

    def sizes(calls: Calls) -> str | None:
        for call in calls:
            whole = max(call["sent"], call["received"])
            if whole != nbytes:
                return (
                    f"{call['op']} of {whole} bytes on its long side, expected {nbytes}: one for "
                    "all parameters, padded to a multiple of the group's size"
                )
        return None

    halves = " in a step: reduce-scatter and all-gather are the two halves of one all_reduce"
    return [
        only("reduce_scatter_tensor", "all_gather_into_tensor"),
        made("reduce_scatter_tensor", 1, halves),
        made("all_gather_into_tensor", 1, halves),
        sizes,
        waited,
    ]


@task("11.4", "ZeRO-1", points=3)
def zero_one(ranks: Ranks, report: Report) -> None:
    """Weights of the twin on all ranks, by two collectives."""
    _judge_all(ranks, report, probe_one, _judge_one)


def _judge_one(
    report: Report, rank: int, k: int, members: list[int], seeds: Seeds, steps: list
) -> None:
    p = len(members)
    begin = row_of([q for m in layers_of(seeds.model) for q in m.parameters()], p).tolist()
    part = slice(k * len(begin) // p, (k + 1) * len(begin) // p)
    for step, value in zip(range(STEPS), steps, strict=True):
        right, where = trained(seeds)[step], f"step {step + 1} {on(members)}"
        mixed = list(begin)
        mixed[part] = right[part]
        wrong = _wrong_weights(seeds, step, begin, mixed)
        shards = [
            Mistake(begin[part], "the shard has not changed: it is what the optimizer updates"),
            Mistake(begin, "the shard has become the whole row"),
        ]
        ok = (
            report.communication(rank, value["calls"], inside(members),
                                 *_pair(p, BYTES * len(begin)))
            and report.judge(rank, value["weights"], right, wrong, tolerance=EXACT,
                             what=f"weights after {where}")
            and report.judge(rank, value["shard"], right[part], shards, tolerance=EXACT,
                             what=f"shard after {where}")
            and report.facts(rank, {
                f"after {where} the parameters have other memory: put the weights into the tensors "
                "that are there (copy_back)": value["moved"],
                f"after {where} the shard, or its gradient, is a view of a whole row, and so all "
                "of the row stays in memory: copy this rank's part": value["held"] > 1})
        )  # fmt: skip
        if not ok:
            return


def _wrong_weights(seeds: Seeds, step: int, begin: list, mixed: list) -> Iterator[Mistake]:
    """What the model's weights are after mistakes; `mixed` has the right ones of one part."""
    yield Mistake(begin, "the model's weights have not changed. Had the shard a gradient when "
                  "the optimizer stepped? Then gather the shards, and put them into the model "
                  "(copy_back)")  # fmt: skip
    p = len(seeds.own)
    if p == 1:
        return
    yield Mistake(mixed, "only this rank's part of the weights is new: the others' come by "
                  "all_gather")  # fmt: skip
    modes = {
        "sum": f"the gradient is a sum over {p} ranks; a mean is asked for",
        "twice divided": f"the gradient was divided by {p} once too often",
        "own": "each part was updated by the gradient of its own rank's samples alone: "
        "reduce_scatter sums over the group",
        "own, divided": "each part was updated by the gradient of its own rank's samples alone, "
        "divided: reduce_scatter sums over the group",
        "first": "all parts were updated by the first rank's gradient",
        "adds up": "the gradient of the step before is still in shard.grad: replace it",
    }
    if not step:
        steps = zip(begin, trained(seeds)[0], strict=True)
        said = "these are the gradients: gather the shards, which are weights"
        yield Mistake([(b - a) / RATE for b, a in steps], said)
    for mode, said in modes.items():
        yield Mistake(trained(seeds, mode)[step], said)


# -- 11.5: ZeRO-2 -----------------------------------------------------------------------------


@in_group
def probe_two(user_ns: dict, *, rank: int, group: Group, partition, own: int, seed: int) -> dict:
    """Two backwards of a small model; one of a chain, with the meter."""
    k, p = dist.get_rank(group), dist.get_world_size(group)
    function, found = reading_answer(user_ns, "zero2_hooks"), []
    layers = [Named(layer, i % 2) for i, layer in enumerate(layers_of(seed))]
    shards = [shard_of(list(layer.parameters()), p, k) for layer in layers]
    function(layers, shards, **keywords(partition, group))
    behind = overdue(layers)
    for step in range(STEPS):
        for layer in layers:
            layer.begin()
        loss = loss_of(chained(layers, samples(own, step)))
        _, calls = recorded(loss.backward)
        left = sum(q.grad is not None for layer in layers for q in layer.parameters())
        grads = [None if shard.grad is None else list_of(shard.grad) for shard in shards]
        found.append({"gradients": grads, "calls": calls, "left": left, "behind": list(behind)})
    if partition is not None:  # metered once, where each part is smallest
        return {"steps": found, "rows": 0.0}
    layers = layers_of(seed, (WIDE,) * (CHAIN + 1))
    shards = [shard_of(list(layer.parameters()), p, k) for layer in layers]
    loss = loss_of(chained(layers, samples(own, 0, WIDE)))

    def hooked() -> None:
        function(layers, shards, **keywords(partition, group))
        loss.backward()

    (_, rows), calls = recorded(collected, hooked)
    return {"steps": found, "rows": rows, "calls again": calls}


def _means(seeds: Seeds, step: int, i: int) -> Tensor:
    """The padded row of a layer's gradient, its mean over a group."""
    p = len(seeds.own)
    return row_of([sum(rows_at(seeds, place, step)[i] for place in range(p)) / p], p)


#: What is behind hooks that all see the last layer.
LATE_BINDING = (
    "Does each hook know its own layer and shard? In a loop, a function that is called later sees "
    "the last value of the loop's variables"
)


def _wrong_parts(seeds: Seeds, k: int, step: int, i: int) -> Iterator[Mistake]:
    """Of the gradient of the shard of layer i, at place k of p."""
    yield Mistake(lambda v: v is None, f"this shard has no gradient. {LATE_BINDING}")
    p, row = len(seeds.own), _means(seeds, step, i)
    right = row.chunk(p)[k]
    if p > 1:
        own = row_of([rows_at(seeds, k, step)[i]], p).chunk(p)[k]
        yield from table({
            f"a sum over {p} ranks; a mean is asked for": p * right,
            f"divided by {p} once too often": right / p,
            "the gradient of this rank's samples alone: reduce_scatter over the group": own,
            "the gradient of this rank's samples alone, divided: reduce_scatter sums over the "
            "group": own / p,
            "the gradient of the whole layer: this rank's part is asked for": row,
            "the part of another place of the group": row.chunk(p)[(k + 1) % p],
        })  # fmt: skip
    cut = SMALL[i] * SMALL[i + 1]
    other = torch.cat([row[cut : cut + SMALL[i + 1]], row[:cut], row[cut + SMALL[i + 1] :]])
    said = "the bias stands in front of the weight: the row's order is weight, then bias"
    yield Mistake(other.chunk(p)[k].tolist(), said)
    turned = row[:cut].view(SMALL[i + 1], SMALL[i]).t().reshape(-1)
    other = torch.cat([turned, row[cut:]])
    said = "the weight's gradient is transposed: it is gradient.t() @ x, [out, in]"
    yield Mistake(other.chunk(p)[k].tolist(), said)
    if step:
        before = _means(seeds, step - 1, i).chunk(p)[k]
        yield from table({
            "the gradient of the backward before is still in it": right + before,
            "this is the gradient of the backward before: does the hook work a second time?":
                before,
        })  # fmt: skip


@task("11.5", "ZeRO-2", points=3)
def zero_two(ranks: Ranks, report: Report) -> None:
    """Each layer's gradient reduce-scattered and freed while backward goes on."""
    _judge_all(ranks, report, probe_two, _judge_two)


def _judge_two(
    report: Report, rank: int, k: int, members: list[int], seeds: Seeds, value: dict
) -> None:
    p, n = len(members), len(SMALL) - 1
    for step, found in zip(range(STEPS), value["steps"], strict=True):
        where = f"backward {step + 1} {on(members)}"
        means = [_means(seeds, step, i).chunk(p)[k].tolist() for i in range(n)]
        why = f" in {where}: one for each of {n} layers, with weight and bias together"
        left = f"{where}: {found['left']} parameters still have a gradient: set .grad = None"
        alone = f"{where}: the last layer alone was reduce-scattered. {LATE_BINDING}"
        reached = [gradient is not None for gradient in found["gradients"]]
        ok = report.communication(
            rank, found["calls"], only("reduce_scatter_tensor"), inside(members),
            *rules_of({alone: reached == [False] * (n - 1) + [True]}),
            made("reduce_scatter_tensor", n, why), waited,
        ) and all(
            report.judge(rank, found["gradients"][i], means[i], tolerance=EXACT,
                         mistakes=_wrong_parts(seeds, k, step, i),
                         what=f"gradient of shard {i}, {where}")
            for i in range(n)
        ) and report.facts(rank, {left: found["left"], (
            f"{where}: all parameters of layer {found['behind'][:1]} had their gradients, and "
            "still had them after their hooks: reduce-scatter and free them at once"):
                found["behind"]})  # fmt: skip
        if not ok:
            return
    # Parts of all layers, a layer's gradients, their row, what backward needs, and some time until
    # it is all freed; who keeps all gradients has 24 more.
    most = CHAIN / p + 12
    said = (
        f"{on(members)}: backward of {CHAIN} equal layers made {value['rows']:.1f} layers' worth "
        f"of bytes at its peak, {most:.1f} are enough: free a layer's gradients as soon as they "
        "are reduce-scattered, and keep no row"
    )
    report.facts(rank, {said: p > 1 and value["rows"] > most})
    if p == WORLD:
        why = f" in backward of {CHAIN} equal layers"
        rules = only("reduce_scatter_tensor"), made("reduce_scatter_tensor", CHAIN, why)
        report.communication(rank, value["calls again"], *rules)


# -- 11.6: ZeRO-3 -----------------------------------------------------------------------------


@in_group
def probe_three(user_ns: dict, *, rank: int, group: Group, partition, own: int, seed: int) -> dict:
    """Forward and backward of a small model, and of a chain with the meter."""
    from torch_mpi.record import log

    k, p = dist.get_rank(group), dist.get_world_size(group)
    function = answer_named(user_ns, "Gathered")

    def made_of(sizes: Sequence[int]) -> tuple[list, list]:
        layers = layers_of(seed, sizes)
        shards = [shard_of(list(layer.parameters()), p, k) for layer in layers]
        shapes = [layer.weight.shape for layer in layers]
        return shards, [
            lambda x, one=one, shape=shape: function.apply(x, one, shape, group)
            for one, shape in zip(shards, shapes, strict=True)
        ]

    shards, layers = made_of(SMALL)
    shape = layers_of(seed, SMALL)[0].weight.shape
    parts = reading_answer(user_ns, "whole")(shards[0].detach(), shape, group)
    views = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    x = samples(own, 0).requires_grad_()
    y, forward = recorded(chained, layers, x)
    mark, came = log.mark(), []
    y.register_hook(lambda g: came.extend([g, g.clone()]))
    loss_of(y).backward()
    backward = [as_dict(call) for call in log.since(mark)]
    grads = [None if shard.grad is None else list_of(shard.grad) for shard in shards]
    found = {"y": list_of(y), "views": views, "changed": not torch.equal(*came),
             "dx": list_of(x.grad), "gradients": grads,
             "forward": forward, "backward": backward,
             "rows forward": 0.0, "rows backward": 0.0}  # fmt: skip
    if partition is not None:  # metered once, where each part is smallest
        return found
    _, layers = made_of((WIDE,) * (CHAIN + 1))
    x = samples(own, 0, WIDE).requires_grad_()
    (y, found["rows forward"]), forward = recorded(collected, chained, layers, x)
    (_, found["rows backward"]), backward = recorded(collected, loss_of(y).backward)
    return found | {"calls again": forward + backward}


@task("11.6", "ZeRO-3", points=3)
def zero_three(ranks: Ranks, report: Report) -> None:
    """Layers that are whole only while they are used."""
    _judge_all(ranks, report, probe_three, _judge_three)


def _judge_three(
    report: Report, rank: int, k: int, members: list[int], seeds: Seeds, value: dict
) -> None:
    p, n, where = len(members), len(SMALL) - 1, on(members)
    layers = layers_of(seeds.model)
    x = samples(seeds.own[k], 0).requires_grad_()
    y = chained(layers, x)
    loss_of(y).backward()
    means = [_means(seeds, 0, i).chunk(p)[k].tolist() for i in range(n)]
    no_bias = chained([lambda t, m=m: t @ m.weight.t() for m in layers], x.detach())
    ends = [row_of(list(m.parameters()), p)[-m.out_features :] for m in layers]
    padded = chained(
        [lambda t, m=m, b=b: t @ m.weight.t() + b for m, b in zip(layers, ends, strict=True)],
        x.detach(),
    )
    wrong_y = table({
        "the bias is missing": no_bias.detach().reshape(-1),
        "the bias is not the end of the row: zeros may follow it": padded.detach().reshape(-1),
    })  # fmt: skip
    wrong_dx = table({
        f"divided by {p}: each rank has samples of its own, and only the shard's gradient is a "
        "mean": x.grad.reshape(-1) / p if p > 1 else [],
        f"divided by {p} in each layer: only the shard's gradient is a mean":
            x.grad.reshape(-1) / p**n if p > 1 else [],
        "there is none: return it first": None,
    })  # fmt: skip
    forward, backward = value["forward"], value["backward"]
    once = f" forward {where}: one for each of {n} layers"
    again = f" backward {where}: each layer once more, as its weights were forgotten"
    down = f" backward {where}: one for each of {n} layers"
    _ = (
        report.communication(rank, forward, only("all_gather_into_tensor"), inside(members),
                             made("all_gather_into_tensor", n, once), waited)
        and report.judge(rank, value["y"], list_of(y), wrong_y, tolerance=EXACT,
                         what=f"output {where}")
        and report.facts(rank, {
            "whole returns copies: weight and bias have to be views into one gathered row":
                not value["views"]})
        and report.facts(rank, _kept(p, where, value["rows forward"], "forward"))
        and report.communication(rank, backward,
                                 only("all_gather_into_tensor", "reduce_scatter_tensor"),
                                 inside(members), made("all_gather_into_tensor", n, again),
                                 made("reduce_scatter_tensor", n, down), waited)
        and report.facts(rank, {
            "backward changed the gradient that came in, which other layers may use: work on a "
            "copy of it": value["changed"]})
        and report.judge(rank, value["dx"], list_of(x.grad), wrong_dx, tolerance=EXACT,
                         what=f"gradient of x {where}")
        and all(report.judge(rank, value["gradients"][i], means[i], tolerance=EXACT,
                             mistakes=_wrong_parts(seeds, k, 0, i),
                             what=f"gradient of shard {i} {where}") for i in range(n))
        and report.facts(rank, _kept(p, where, value["rows backward"], "backward"))
        and (p < WORLD or report.communication(
            rank, value["calls again"], only("all_gather_into_tensor", "reduce_scatter_tensor"),
            made("all_gather_into_tensor", 2 * CHAIN, f" both ways through {CHAIN} equal layers"),
            made("reduce_scatter_tensor", CHAIN, f" back through {CHAIN} equal layers")))
    )  # fmt: skip


def _kept(p: int, where: str, rows: float, when: str) -> dict[str, bool]:
    """That only a few layers were whole at once."""
    # Forward: one layer, and activations worth four; backward: also a part of each gradient.
    most = 12 if when == "forward" else CHAIN / p + 12
    said = (
        f"{when} of {CHAIN} equal layers {where} made {rows:.1f} layers' worth of bytes at its "
        f"peak, {most:.1f} are enough: forget the gathered weights after each layer. What "
        "ctx keeps stays until backward: the shard, not the whole weight"
    )
    return {said: p > 1 and rows > most}


# -- 11.7: offload ----------------------------------------------------------------------------

PAIRS = ([[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]])


@in_group
def probe_offload(user_ns: dict, *, rank: int, group: Group, partition, seed: int) -> dict:
    """Two steps of a device and its host; the seed is that of its samples, or of its weights."""
    from torch_mpi.record import log

    place, order = dist.get_rank(group), Layers(DEEP, *batch(seed, 0)).order
    found: dict[str, Any] = {"losses": [], "calls": [], "seen": [], "most": 0}
    rows = host_rows(seed)
    optimizers, notes, mark = watched_optimizers(rows, order, log)
    for step in range(STEPS):
        if place == 0:
            worker = Watched(*batch(seed, step), log, found["most"])
            function = answer_named(user_ns, "device_step")
            with _receives_noted(worker):
                loss, calls = recorded(function, worker, group=group)
            found["losses"].append(told(loss))
            found |= {"kept": worker.kept, "most": worker.most}
            found["seen"].append(worker.seen)
        else:
            mark[0] = log.mark()
            notes.clear()
            function = answer_named(user_ns, "host_step")
            _, calls = recorded(function, rows, optimizers, list(order), group=group)
            found["seen"].append(list(notes))
        found["calls"].append(calls)
    return found | {"weights": [list_of(row) for row in rows]}


@contextlib.contextmanager
def _receives_noted(worker: Watched) -> Iterator[None]:
    """Tell the worker of each irecv as it begins."""
    irecv = dist.irecv

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        worker.receive(tensor)
        return irecv(tensor, *args, **kwargs)

    with (
        mock.patch.object(dist, "irecv", noting),
        mock.patch.object(dist.distributed_c10d, "irecv", noting),
    ):
        yield


def _traffic(place: int, members: list[int], order: list[int]) -> Rule:
    """The messages of a step, with their tags and sizes."""
    last, other = len(DEEP) - 2, members[1 - place]
    sizes = [(DEEP[i] + 1) * DEEP[i + 1] * BYTES for i in order]
    weights, gradients = ("recv", "send") if place == 0 else ("send", "recv")
    wanted = [(weights, n, size) for n, size in enumerate(sizes)]
    wanted += [(gradients, n, sizes[n]) for n in range(last, len(order))]

    def rule(calls: Calls) -> str | None:
        got = [(c["op"], c["tag"], c["nbytes"]) for c in calls if c["peer"] == other]
        odd = next((one for one in got if one not in wanted), None)
        missing = next((one for one in wanted if got.count(one) != 1), None)
        if odd is None and missing is None:
            return None
        op, tag, size = odd or missing
        what = "weights" if op == weights else "the gradient"
        if odd is None:
            count = got.count(missing)
            return f"{what} of piece {tag}: expected one {op} with tag {tag}, it made {count}"
        return (
            f"a {op} with tag {tag} and {size} bytes: weights of piece n have tag n, and so has "
            f"its gradient; of piece {tag} that is {dict(enumerate(sizes)).get(tag)} bytes"
        )

    return rule


def _wrong_device(seen: list, kept: int, most: int, pieces: int) -> dict[str, bool]:
    """Prefetch of one piece, and one gradient under way."""
    order, first = [one[0] for one in seen], (pieces - 1) // 2
    started = [one[1] - min(n + 2, pieces) for n, one in enumerate(seen)]
    unwaited = [one[3] - one[4] for one in seen]
    return {
        f"pieces were worked on in the order {short(order)}, expected 0 … {pieces - 1}":
            order != list(range(pieces)),
        "no prefetch: as piece n begins, the receive of piece n + 1 has to be started already":
            any(s < 0 for s in started),
        "too much prefetch: as piece n begins, receives up to piece n + 1 may be started. Each "
        "of them holds a layer's weights, and the device has room for two": any(
            s > 0 for s in started),
        f"{most} rows are in the device's memory as a receive begins, {ROWS} are allowed. Before "
        "you start the receive of piece n + 1, let go of the row of piece n − 1 (row = None), and "
        "of its request, which keeps the row": most > ROWS,
        "gradients are sent and waited for at once: start the next piece meanwhile, and wait "
        "before the next gradient is sent": not any(unwaited[first + 1 :]),
        "more than one gradient is under way: before you send one, wait for the one before": max(
            unwaited, default=0) > 1,
        f"{kept} rows and gradients of this step are still in the device's memory at the last "
        f"piece, {FEW} are enough: keep no row after its piece, and no gradient that is sent":
            kept > FEW,
    }  # fmt: skip


def _wrong_host(notes: list, order: list[int]) -> dict[str, bool]:
    """Updates early, but not too early."""
    last = max(order)
    wanted = list(range(last, -1, -1))
    layers = [note[0] for note in notes]
    return {
        f"optimizers stepped for the layers {layers}; each has to once, as its gradient comes: "
        f"{wanted}": sorted(layers) != sorted(wanted),
        "a layer is updated before this rank has waited for the sends of its row: wait for all "
        "sends of layer i before optimizers[i].step()": any(note[1] for note in notes),
        "the rows were not all sent at the beginning: start the sends of all pieces before you "
        "receive a gradient": any(note[3] < len(order) for note in notes[:1]),
        "the updates are late: as soon as a layer's gradient is there, update it, before you wait "
        "for the next one": any(note[2] > k + 1 for k, note in enumerate(notes)),
    }  # fmt: skip


@task("11.7", "offload with prefetch and early update", points=4)
def offload(ranks: Ranks, report: Report) -> None:
    """The twin's weights; what is started, waited for and held, and when."""
    seeds = report.seeds(WORLD)
    cases = [{"partition": partition, "each": to_each(seed=seeds)} for partition in PAIRS]
    for _, members, values in tried(ranks, report, probe_offload, cases, world=WORLD):
        device, host = (seeds[rank] for rank in members)
        order = Layers(DEEP, *batch(device, 0)).order
        losses, weights = offloaded(device, host)
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            ok = all(
                report.communication(rank, calls, only("send", "recv"), inside(members),
                                     _traffic(place, members, order))
                for _, calls in zip(range(STEPS), value["calls"], strict=True)
            )  # fmt: skip
            for _, seen in zip(range(STEPS), value["seen"] if ok else [()] * STEPS, strict=True):
                if not ok:
                    break
                wrong = (_wrong_device(seen, value["kept"], value["most"], len(order)) if place == 0
                         else _wrong_host(seen, order))  # fmt: skip
                ok = ok and report.facts(rank, wrong)
            ok = ok and all(report.communication(rank, calls, waited) for calls in value["calls"])
            if ok and place == 0:
                wrong = [Mistake(lambda v: v is None or v == [None] * STEPS,
                                 "nothing was returned: return worker.loss")]  # fmt: skip
                report.judge(rank, value["losses"], losses, wrong, what="the losses",
                             tolerance=EXACT)  # fmt: skip
            elif ok:
                _judge_rows(report, rank, value["weights"], weights, device, host)
    _explained(report)


def _judge_rows(
    report: Report, rank: int, got: list, expected: list, device: int, host: int
) -> None:
    begin = [row.tolist() for row in host_rows(host)]
    _, added = offloaded(device, host, adds=True)
    for i, row in enumerate(expected):
        wrong = table({
            "the weights have not changed: put the gradient into weights[i].grad before the step":
                begin[i],
            "the gradient of the step before is still in weights[i].grad: put the new one in its "
            "place": added[i],
        })  # fmt: skip
        if not report.judge(rank, got[i], row, wrong, tolerance=EXACT,
                            what=f"row of layer {i} after {STEPS} steps"):  # fmt: skip
            return
