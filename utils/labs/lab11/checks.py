"""Checks of lab 11: meshes of ranks, two axes at once; the other tasks' checks are imported.

All models are small, are in double precision, and are compared with a twin that is not split.
Groups and bytes are exact. No verdict depends on times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.calls import Calls, Rule, only, waited
from utils.checks.groups import enough, group_of
from utils.checks.mistakes import NO_NUMBER, Mistake, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import (
    answer_named,
    fingerprint,
    kind_of,
    number,
    reading_answer,
    recorded,
    told,
)
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared.reference_pipeline import Piece, drawn, gradient_of, twin, whole
from utils.labs.shared.schedules import one_f_one_b

from .offloading import offload as offload
from .sharding import EXACT, WORLD, exactly, explain_errors
from .sharding import zero_one as zero_one
from .sharding import zero_three as zero_three
from .sharding import zero_two as zero_two
from .twins import BYTES

# -- 11.1: a mesh -----------------------------------------------------------------------------

SHAPES = ((2, 3), (3, 2), (6, 1), (1, 2, 3), (3, 1, 2), (6,), (2, 1, 3, 1))
#: Meshes of more ranks and of fewer than there are: the check asks only for their lines.
OTHERS = ((2, 5, 3), (2, 2))


def lines(shape: Sequence[int], axis: int) -> list[list[int]]:
    """Return all lines of a mesh along an axis."""
    ranks = torch.arange(math.prod(shape)).view(tuple(shape))
    return sorted(ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist())


def lines_of_all(shape: Sequence[int], axis: int) -> list[list[int]]:
    """Return each rank's line along an axis."""
    along = lines(shape, axis)
    return [mine(along, rank) for rank in range(math.prod(shape))]


def mine(partition: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return the group of a partition that a rank is in."""
    return list(next(members for members in partition if rank in members))


class _Group:
    """Stands for a process group that nobody made."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks


def probe_mesh(user_ns: dict, *, rank: int, shapes: list) -> list:
    """Return the lines of all ranks, what `new_group` is asked for, and the groups."""
    line = answer_named(user_ns, "line")
    meshes = []
    for shape in map(tuple, shapes):
        axes = range(len(shape))
        of_ranks = [
            [_listed(line(r, shape, axis)) for axis in axes] for r in range(math.prod(shape))
        ]
        lost = any(members is None for of_rank in of_ranks for members in of_rank)
        groups: Any = None
        asked: list[list[int]] = []
        if not lost and shape not in OTHERS:
            with _groups_noted(rank, asked):
                groups = _groups_listed(answer_named(user_ns, "mesh_groups")(shape))
        meshes.append({"lines": of_ranks, "asked": asked, "groups": groups})
    return meshes


@contextlib.contextmanager
def _groups_noted(rank: int, asked: list[list[int]]) -> Iterator[None]:
    """Make no group, but list the ranks of each that `new_group` is asked for."""

    def new_group(ranks: Iterable[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        asked.append(sorted(range(dist.get_world_size()) if ranks is None else ranks))
        return _Group(asked[-1]) if rank in asked[-1] else dist.GroupMember.NON_GROUP_MEMBER

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist.distributed_c10d, "new_group", new_group),
    ):
        yield


def _groups_listed(groups: Any) -> Any:
    if groups is None:
        return None
    if not isinstance(groups, list):
        return f"<{type(groups).__name__}>"
    return [
        group.ranks if isinstance(group, _Group) else f"<{type(group).__name__}>"
        for group in groups
    ]


def _listed(line: Any) -> Any:
    """Return a list or None in plain types; for any other value, the name of its type."""
    return told(line) if line is None or isinstance(line, list) else f"<{kind_of(line)}>"


def _wrong_lines(shape: tuple[int, ...], axis: int) -> Iterator[Mistake]:
    """Yield which lines of all ranks, along an axis, mistakes lead to."""
    right = lines_of_all(shape, axis)
    every = range(len(right))
    n = len(shape)
    other = n - 1 - axis if n - 1 != 2 * axis else (axis + 1) % n
    yield Mistake([None] * len(right), "returned None: return a list of ranks")
    yield Mistake(
        lambda reply: any(isinstance(members, str) for members in reply),
        "line returns another type: return a list of ranks",
    )
    wrong = {
        "the axes are swapped: these are the lines along another axis": lines_of_all(shape, other),
        "the coordinates within the line; global ranks are asked for": [
            list(range(shape[axis])) for _ in every
        ],
        "counted column by column: the last coordinate runs fastest, so neighbouring numbers are "
        "neighbours along the last axis": lines_of_all(shape[::-1], n - 1 - axis),
        "these are all ranks, not those of one line": [list(every) for _ in every],
        "the rank itself is on its line, too": [[q for q in right[r] if q != r] for r in every],
    }
    yield from table(wrong)
    yield Mistake(
        lambda reply: isinstance(reply, list) and _any_order(reply) == _any_order(right),
        "the right ranks in another order: sort them",
    )


def _any_order(of_ranks: list) -> list[list[str]]:
    """Return lines in a form that says nothing of the order of their ranks."""
    return [sorted(map(str, members or [])) for members in of_ranks]


@task("11.1", "a mesh of ranks and its groups", points=2)
def mesh(ranks: Ranks, report: Report) -> None:
    """Judge the lines of meshes of several shapes, and groups that all ranks make alike."""
    if not enough(ranks, report, WORLD):
        return
    shapes = (*SHAPES, *OTHERS)
    answers = report.answers(ranks, probe_mesh, shapes=[list(shape) for shape in shapes])
    for k, shape in enumerate(shapes):
        meshes = {answer.rank: answer.value[k] for answer in answers}
        right = [report.follow(rank, _mesh(rank, shape, made)) for rank, made in meshes.items()]
        if not (all(right) and report.follow(None, _asked_alike(shape, meshes))):
            return


def _mesh(rank: int, shape: tuple[int, ...], result: dict[str, Any]) -> Iterator[Step]:
    """Judge the lines of a shape, and the groups that a rank makes of them."""
    for axis in range(len(shape)):
        of_ranks = [of_rank[axis] for of_rank in result["lines"]]
        call = f"line(r, {shape}, {axis}) for r = 0, 1, …"
        yield value(of_ranks, lines_of_all(shape, axis), _wrong_lines(shape, axis), what=call)
    if shape in SHAPES:
        yield from _mesh_groups(rank, shape, result)


def _mesh_groups(rank: int, shape: tuple[int, ...], result: dict[str, Any]) -> Iterator[Step]:
    call = f"mesh_groups({shape})"
    asked = sorted(result["asked"])
    own_lines = [mine(lines(shape, axis), rank) for axis in range(len(shape))]
    every_line = sorted(members for axis in range(len(shape)) for members in lines(shape, axis))
    own_only = sorted(map(str, asked)) == sorted(map(str, own_lines))
    alone = (
        f"{call}: this rank makes only the groups that it is in. new_group is collective: every "
        "rank has to call it for every line, or those inside wait for the others"
    )
    yield facts({alone: own_only and len(own_lines) < len(every_line)})
    mistakes = [
        Mistake(lambda reply: isinstance(reply, str), "return a list of groups"),
        Mistake(own_lines[::-1], "the groups are in the wrong order: that of axis 0 comes first"),
        Mistake(
            lambda reply: isinstance(reply, list) and len(reply) != len(own_lines),
            f"{len(own_lines)} groups are expected on each rank, one for each axis",
        ),
        Mistake(
            lambda reply: isinstance(reply, list) and any(isinstance(of, str) for of in reply),
            "these are not all groups of dist.new_group with this rank in it",
        ),
    ]
    yield value(result["groups"], own_lines, mistakes, what=call, form="a list of groups")
    missing = [members for members in every_line if members not in asked]
    twice = [members for members in asked if asked.count(members) > every_line.count(members)]
    wrong = {
        f"{call}: the group {missing[:1]} was never made": missing,
        f"{call}: the group of {twice[:1]} was made more than once, or is no line of this "
        "mesh": twice,
    }
    yield facts(wrong)


def _asked_alike(shape: tuple[int, ...], meshes: dict[int, dict[str, Any]]) -> Iterator[Step]:
    """Judge whether all ranks ask for the same groups in the same order."""
    first = meshes[0]["asked"]
    for rank, result in meshes.items():
        differs = (
            f"mesh_groups({shape}): rank 0 asks for {short(first)}, rank {rank} for "
            f"{short(result['asked'])}. new_group is collective: every rank has to make every "
            "group, in the same order, or they wait for each other"
        )
        yield facts({differs: result["asked"] != first})


# -- 11.2: pipeline × data --------------------------------------------------------------------

#: Groups of the pipelines, and of their replicas.
GRIDS = (
    ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
    ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]),
    ([[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3, 4, 5]]),
    # Two meshes, with two replicas and with one: the groups alone say how many there are.
    ([[0, 1], [2, 3], [4, 5]], [[0, 2], [1, 3], [4], [5]]),
)


@contextlib.contextmanager
def axes_of(grid: Sequence, rank: int) -> Iterator[list]:
    """Yield this rank's group along each axis of a grid."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(group_of(partition, rank)) for partition in grid]


class Place(NamedTuple):
    """A rank's place in a grid of pipelines.

    Attributes:
        pp: the ranks of its pipeline.
        dp: the ranks with the same stage, one for each replica.
        stage: its place in `pp`.
        replica: its place in `dp`.
    """

    pp: list[int]
    dp: list[int]
    stage: int
    replica: int


def place_in(grid: Sequence, rank: int) -> Place:
    """Return a rank's place in a grid."""
    pp, dp = (mine(partition, rank) for partition in grid)
    return Place(pp, dp, pp.index(rank), dp.index(rank))


def probe_hybrid(
    user_ns: dict, *, rank: int, seed: int, grid: list, microbatches: int, samples: int
) -> dict:
    """Take a step of a grid of pipelines; the seed is that of this rank's stage."""
    with axes_of(grid, rank) as (pp, dp):
        place = dist.get_rank(pp), dist.get_world_size(pp)
        piece = Piece(seed, *place)
        x, labels = drawn(seed, samples)
        seen = []
        piece.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
        function = reading_answer(user_ns, "hybrid_step")
        loss, calls = recorded(function, piece, x, labels, microbatches, pp, dp)
        single = Piece(seed, *place).float()
        function(single, x.float(), labels, microbatches, pp, dp)
    return {
        "loss": number(loss),
        "gradient": gradient_of(piece),
        "calls": calls,
        "events": piece.log.events,
        "images": sum(map(len, seen)),
        "piece": fingerprint(torch.cat(seen)) if seen else "",
        "dtype": str(next(single.parameters()).dtype),
    }


def _on_axes(pp: list[int], dp: list[int]) -> Rule:
    """Return the rule that messages are in the pipeline, and averages over the replicas."""

    def broken_by(call: dict[str, Any]) -> str | None:
        message = call["op"] in ("send", "recv")
        if call["group"] == list(range(WORLD)) and WORLD not in (len(pp), len(dp)):
            return (
                f"{call['op']} over all ranks: the stages have different layers, and so "
                "different gradients. Average over the replicas of this stage only: group=dp"
            )
        if not message and call["group"] == pp != dp and len(pp) > 1:
            return (
                f"{call['op']} over the pipeline's ranks {pp}: they have different layers. "
                "Gradients and losses are averaged over dp"
            )
        if message and call["group"] != pp:
            return f"{call['op']} outside of this rank's pipeline {pp}: pass group=pp"
        return None

    return lambda calls: next(filter(None, map(broken_by, calls)), None)


def _reduced(nbytes: int) -> Rule:
    """Return the rule that all_reduces are about so many bytes, and the loss perhaps."""

    def rule(calls: Calls) -> str | None:
        total = sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")
        if nbytes <= total <= nbytes + BYTES:
            return None
        return f"all_reduces of {total} bytes in all; this stage's gradients are {nbytes} bytes"

    return rule


@task("11.2", "pipeline × data", points=3)
def pipeline_data(ranks: Ranks, report: Report) -> None:
    """Judge gradients and loss by the twin; messages and averages by their axes."""
    if not enough(ranks, report, WORLD):
        return
    report.judge_cases(ranks, probe_hybrid, _hybrid_cases(report), _hybrid)
    explain_errors(report)


def _hybrid_cases(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case; ranks of the same stage have the same seed."""
    for grid, microbatches, images in zip(GRIDS, (4, 2, 1, 3), (24, 12, 18, 36), strict=True):
        of_stages = report.seeds(len(grid[0][0]))
        each = to_each(seed=[of_stages[place_in(grid, rank).stage] for rank in range(WORLD)])
        yield {"each": each, "grid": grid, "microbatches": microbatches, "samples": images}


def _hybrid(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    result = answer.value
    calls = result["calls"]
    place = place_in(case["grid"], answer.rank)
    m, images = case["microbatches"], case["samples"]
    stages, replicas = len(place.pp), len(place.dp)
    seeds = tuple(case["each"][other]["seed"] for other in place.pp)
    where = f"{replicas} pipelines of {stages} stages"
    order = [kind for kind, _ in one_f_one_b(stages, m)[place.stage]]
    forwards = result["events"].count("F")
    in_axes = _on_axes(place.pp, place.dp)
    yield communication(calls, in_axes, only("send", "recv", "all_reduce"), waited)
    wrong = {
        f"{where}: {forwards} forwards on this rank, {m} microbatches were asked for: does each go "
        "through once?": forwards != m,
        f"{where}: this stage worked in the order {' '.join(result['events'])}; one_f_one_b has "
        f"{' '.join(order)}": result["events"] != order,
    }
    yield facts(wrong)
    gradients, loss = twin(seeds, n=images)
    gradient = gradients[place.stage]
    mistakes = _wrong_gradients(place, seeds, images, m, result["images"])
    gradients_of = f"gradients of stage {place.stage}, {where}"
    yield exactly(result["gradient"], gradient, mistakes, gradients_of)
    yield communication(calls, _reduced(BYTES * len(gradient)))
    own_images = drawn(seeds[0], images)[0].chunk(replicas)[place.replica]
    others = place.stage == 0 and result["piece"] != fingerprint(own_images)
    wrong = {
        _other_images(place, images, result["images"]): result["images"] != images // replicas,
        f"these are not the images of piece {place.replica}: cut the minibatch in order": others,
        f"the stage had parameters of float32, and has {result['dtype']} now: leave its "
        "type": result["dtype"] != "torch.float32",
    }
    yield facts(wrong)
    loss_of = f"the loss, {where}"
    if place.stage == stages - 1:
        mistakes = _wrong_losses(place, seeds, images, loss)
        form = "the loss on the last stage"
        yield value(result["loss"], loss, mistakes, what=loss_of, form=form, tolerance=EXACT)
    else:
        yield value(result["loss"], None, [NO_LOSS], what=loss_of)


def _other_images(place: Place, images: int, seen: int) -> str:
    """Return what is said of a replica that has trained on too many samples, or too few."""
    n = len(place.dp)
    return (
        f"this replica has trained on {seen} images, expected {images // n}: cut the minibatch "
        f"into {n} pieces, one for each rank of dp"
    )


def _wrong_gradients(
    place: Place, seeds: tuple[int, ...], images: int, m: int, seen: int
) -> Iterator[Mistake]:
    p, n = len(place.pp), len(place.dp)
    size = images // n
    gradient = torch.tensor(twin(seeds, n=images)[0][place.stage], dtype=torch.float64)

    def gradient_by(samples: slice, labelled: slice | None = None) -> list[float]:
        return _part(seeds, images, place.stage, samples, labelled)[0]

    if n > 1:
        alone = gradient_by(slice(place.replica * size, (place.replica + 1) * size))
        wrong = {
            f"{n} times too large: the sum over the replicas; divide by their number": n * gradient,
            f"divided once too often by {n}, the number of replicas": gradient / n,
            "this is the gradient of this replica's samples alone: average over dp, and give the "
            "piece of the minibatch by the place in dp, not by the place in the pipeline": alone,
            "all replicas have trained on the first piece of the minibatch: replica d has the "
            "d-th": gradient_by(slice(0, size)),
        }
        yield from table(wrong)
    if p > 1:
        first, last = slice(0, images // p), slice(images - images // p, images)
        wrong = {
            f"divided by {p} once too often: by all ranks, or by the stages. A mean over the "
            "replicas is asked for; stages share the layers, not the samples": gradient / p,
            "the minibatch was cut by stages: each replica has a piece, and its stages share "
            "it": gradient_by(first, last),
        }
        yield from table(wrong)
    if m > 1:
        said = f"{m} times too small: run_schedule divides by the microbatches already"
        yield Mistake((gradient / m).tolist(), said)
    yield Mistake(lambda _: seen != size, _other_images(place, images, seen))


#: The mistake of a stage that is not the last one.
NO_LOSS = Mistake(
    lambda reply: reply is not None,
    "only the last stage of a pipeline returns the loss; return None on the others",
)


def _wrong_losses(
    place: Place, seeds: tuple[int, ...], images: int, loss: float
) -> Iterator[Mistake]:
    n, size = len(place.dp), images // len(place.dp)
    samples = slice(place.replica * size, (place.replica + 1) * size)
    loss_here = _part(seeds, images, place.stage, samples)[1]
    wrong = {
        "this is the loss of this replica's samples; average it over dp": loss_here,
        f"the sum over {n} replicas: divide by their number": n * loss,
        "only the last stage has a loss; return None on the others": None,
    }
    yield from table(wrong)
    yield NO_NUMBER


def _part(
    seeds: tuple[int, ...], n: int, s: int, samples: slice, labelled: slice | None = None
) -> tuple[list[float], float]:
    """Return a stage's gradient, and the loss, of some samples; by mistake with others' labels."""
    pieces, (x, labels) = whole(seeds, n)
    x, labels = x[samples], labels[labelled or samples]
    for piece in pieces:
        x = piece(x)
    loss = functional.cross_entropy(x, labels)
    loss.backward()
    return gradient_of(pieces[s]), loss.item()


# -- 11.3: tensor × data ----------------------------------------------------------------------

# The names say nothing: an argument tells which parameters are cut.
CUT = {"p1": (5, 3), "inner.p2": (2, 4), "p4": (5,)}
WHOLE = {"inner.p1": (7,), "p3": (6,)}


class _Cut(nn.Module):
    """A layer whose parameters have these names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        for name, shape in (CUT | WHOLE).items():
            module, _, last_name = name.rpartition(".")
            parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            self.get_submodule(module).register_parameter(last_name, parameter)


#: The layer's parameters in their order, and which numbers of a row of them are cut.
NAMES = [name for name, _ in _Cut().named_parameters()]
IS_CUT = torch.cat([torch.full((q.numel(),), n in CUT) for n, q in _Cut().named_parameters()])


def gradient(seed: int, name: str, k: int, d: int) -> Tensor:
    """Return that of a parameter, on place k of tp, of replica d's samples."""
    place = sorted(CUT | WHOLE).index(name)
    draw = torch.Generator().manual_seed(seed + 97 * place + 7 * d + (k + 1) * (name in CUT) * 1009)
    return torch.randn((CUT | WHOLE)[name], generator=draw, dtype=torch.float64)


def probe_clip(user_ns: dict, *, rank: int, gradients: dict, grid: list, most: float) -> dict:
    """Average and clip the gradients of a made-up layer, which are given by name."""
    with axes_of(grid, rank) as (tp, dp):
        layer = _Cut()
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.tensor(gradients[name], dtype=torch.float64)
        function = reading_answer(user_ns, "average_and_clip")
        norm, calls = recorded(function, layer, set(CUT), most, tp, dp)
    return {"norm": number(norm), "calls": calls, "gradient": gradient_of(layer)}


@task("11.3", "tensor × data: average and clip", points=3)
def tensor_data(ranks: Ranks, report: Report) -> None:
    """Judge the mean over the replicas, and the norm of the whole gradient."""
    if not enough(ranks, report, WORLD):
        return
    report.judge_cases(ranks, probe_clip, _clip_cases(report), _clip)
    explain_errors(report)


def _clip_cases(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case; each rank is told the gradients that it has itself."""
    bounds = (GRIDS[1], 2.5), (GRIDS[0], 1.5), (GRIDS[1], 1e3), (GRIDS[3], 1.5), (GRIDS[1], 0)
    for grid, most in bounds:
        (seed,) = report.seeds(1)
        gradients = []
        for rank in range(WORLD):
            k, d = (mine(partition, rank).index(rank) for partition in grid)
            gradients.append({n: gradient(seed, n, k, d).tolist() for n in CUT | WHOLE})
        case = {"each": to_each(gradients=gradients), "grid": grid, "most": most}
        yield case | {"most": most or _between(case)}


def _between(case: dict[str, Any]) -> float:
    """Return a bound that the norm is above, and what each rank has by itself is below."""
    alone = [_norm_alone(case, rank) for rank in mine(case["grid"][0], 0)]
    return (_norm(case, 0) + max(alone)) / 2


def _held(case: dict[str, Any], rank: int) -> Tensor:
    """Return the gradients that a rank has, in one row."""
    gradients = case["each"][rank]["gradients"]
    parts = [torch.tensor(gradients[name], dtype=torch.float64) for name in NAMES]
    return torch.cat([part.reshape(-1) for part in parts])


def _average(case: dict[str, Any], rank: int) -> Tensor:
    """Return the mean over the replicas that a rank has."""
    replicas = [_held(case, other) for other in mine(case["grid"][1], rank)]
    return sum(replicas) / len(replicas)


def _squares(case: dict[str, Any], rank: int) -> tuple[dict[int, float], float]:
    """Return the squares of the averaged shards, by rank of tp, and those of whole parameters."""
    squares = {other: _average(case, other).square() for other in mine(case["grid"][0], rank)}
    shards = {other: row[IS_CUT].sum().item() for other, row in squares.items()}
    return shards, squares[rank][~IS_CUT].sum().item()


def _norm(case: dict[str, Any], rank: int) -> float:
    shards, whole = _squares(case, rank)
    return math.sqrt(sum(shards.values()) + whole)


def _norm_alone(case: dict[str, Any], rank: int) -> float:
    """Return the norm of what a rank has by itself."""
    return _average(case, rank).norm().item()


def _wrong_norms(case: dict[str, Any], rank: int) -> dict[str, float]:
    shards, whole = _squares(case, rank)
    tp, dp = (mine(partition, rank) for partition in case["grid"])
    p = len(tp)
    n = len(dp)
    cut = list(shards.values())
    total = sum(cut) + whole
    norm = math.sqrt(total)
    raw = sum(_held(case, other)[IS_CUT].square().sum().item() for other in tp)
    raw += _held(case, rank)[~IS_CUT].square().sum().item()
    return {
        "this is the norm of what this rank has: the squares of the shards have to be summed over "
        "tp": _norm_alone(case, rank),
        f"the whole parameters were counted {p} times: their gradients are the same on all ranks "
        "of tp, so their squares are not summed": math.sqrt(sum(cut) + p * whole),
        "norms were added over tp: sum the squares, and take the root at the end": sum(
            math.sqrt(square + whole) for square in cut
        ),
        "norms of the shards were added over tp: sum their squares": math.sqrt(
            sum(map(math.sqrt, cut)) ** 2 + whole
        ),
        "the squares were summed over dp as well: after averaging, all replicas have the same "
        "gradients": math.sqrt(n * total),
        "this is the square of the norm": total,
        "the whole parameters are missing in the norm": math.sqrt(sum(cut)),
        "the gradients were summed over dp, not averaged": n * norm,
        f"the gradients were divided by {WORLD // p}: the number of replicas is the size of dp, "
        f"{n}": n * norm / (WORLD // p),
        "this is the norm of this replica's gradients: average over dp first": math.sqrt(raw),
    }


def _clip(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    rank, result = answer.rank, answer.value
    calls = result["calls"]
    tp, dp = (mine(partition, rank) for partition in case["grid"])
    most = case["most"]
    norm = _norm(case, rank)
    where = f"most = {most:g}, tp {tp}, dp {dp}"
    wrong_norms = _wrong_norms(case, rank).items()
    mistakes = [
        *table({text: other for text, other in wrong_norms if abs(other - norm) > 1e-9}),
        Mistake(min(norm, most), "this is the norm after clipping: return that from before"),
        NO_NUMBER,
    ]
    yield communication(calls, _on_mesh(tp, dp), only("all_reduce"), waited)
    form = "the norm before clipping"
    yield value(result["norm"], norm, mistakes, what=f"norm, {where}", form=form, tolerance=1e-7)
    row = _average(case, rank)
    clipped = (row * min(1.0, most / norm)).tolist()
    what = f"gradients, {where}"
    yield value(result["gradient"], clipped, _wrong_clips(case, rank), what=what, tolerance=1e-6)
    yield communication([call for call in calls if call["group"] == dp], _reduced(BYTES * len(row)))


def _wrong_clips(case: dict[str, Any], rank: int) -> Iterator[Mistake]:
    most = case["most"]
    norm = _norm(case, rank)
    n = len(mine(case["grid"][1], rank))
    row = _average(case, rank)
    factor = min(1.0, most / norm)
    wrong = {
        "each rank has clipped by the norm of its own part: one factor for all": (
            row * min(1.0, most / _norm_alone(case, rank))
        ),
        "these are the gradients of this replica: average over dp": _held(case, rank) * factor,
        f"a sum over the replicas: divide by {n}": n * row * factor,
    }
    if factor < 1:
        said = "the gradients were not clipped: multiply each by most / norm, in place"
        wrong = {said: row} | wrong | {"clipped twice": row * factor**2}
    else:
        said = "the norm is smaller than most, and the gradients were made longer: leave them"
        wrong = {said: row * (most / norm)} | wrong
    yield from table(wrong)


def _on_mesh(tp: list[int], dp: list[int]) -> Rule:
    """Return the rule that gradients are averaged over dp, and a few numbers summed over tp."""

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["group"] not in (tp, dp):
                return (
                    f"{call['op']} over the ranks {call['group']}: shards of different ranks are "
                    f"different numbers. Gradients are averaged over dp, {dp}; the squares of the "
                    f"shards are summed over tp, {tp}"
                )
            if call["group"] == tp and call["nbytes"] > len(CUT | WHOLE) * BYTES:
                return (
                    f"{call['op']} of {call['nbytes']} bytes over tp, {tp}: these ranks have "
                    "different shards. Sum the squares of the shards, one number, over tp, and "
                    "average gradients over dp"
                )
        return None

    return rule
