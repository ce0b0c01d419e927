"""Checks of lab 11: meshes of ranks, two axes at once, sharding by hand, offload.

All is in double precision on small models, and compared with a twin that is not split. Groups and
bytes are exact; memory is metered, and has a bound that those exceed who keep what they should
free. No verdict depends on times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.calls import Calls, Rule, inside, made, only, waited
from utils.checks.groups import (
    Group,
    GroupAnswer,
    enough,
    group_of,
    in_group,
    judge_groups,
    keywords,
    on,
)
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
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply
from utils.labs.lab11.layers import Layers
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
    """Return all lines of a mesh along an axis."""
    ranks = torch.arange(math.prod(shape)).view(tuple(shape))
    return sorted(ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist())


def line(rank: int, shape: Sequence[int], axis: int) -> list[int]:
    """Return the line with this rank in it."""
    return next(members for members in lines(shape, axis) if rank in members)


class _Group:
    """Stands for a process group that nobody made."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks


def probe_mesh(user_ns: dict, *, rank: int, shapes: list) -> list:
    """Lines of all ranks; what `new_group` is asked for, and which groups come back."""
    function, meshes = answer_named(user_ns, "line"), []
    for shape in map(tuple, shapes):
        axes = range(len(shape))
        of_ranks = [
            [_listed(function(r, shape, axis)) for axis in axes] for r in range(math.prod(shape))
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
    """Return the ranks of each group of a list; for any other value, the name of its type."""
    if groups is None:
        return None
    if not isinstance(groups, list):
        return f"<{type(groups).__name__}>"
    return [
        group.ranks if isinstance(group, _Group) else f"<{type(group).__name__}>"
        for group in groups
    ]


def _listed(value: Any) -> Any:
    """Return a list or None in plain types; for any other value, the name of its type."""
    return told(value) if value is None or isinstance(value, list) else f"<{kind_of(value)}>"


def _wrong_lines(shape: tuple[int, ...], axis: int) -> Iterator[Mistake]:
    """Yield which lines through all ranks, along an axis, mistakes lead to."""
    every, n = range(math.prod(shape)), len(shape)
    right = [line(r, shape, axis) for r in every]
    other = n - 1 - axis if n - 1 != 2 * axis else (axis + 1) % n
    yield Mistake([None] * len(right), "returned None: return a list of ranks")
    yield Mistake(
        lambda got: any(isinstance(members, str) for members in got),
        "line returns another type: return a list of ranks",
    )
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
    yield Mistake(
        lambda got: isinstance(got, list) and _any_order(got) == _any_order(right),
        "the right ranks in another order: sort them",
    )


def _any_order(of_ranks: list) -> list[list[str]]:
    """Return lines in a form that says nothing of the order of their ranks."""
    return [sorted(map(str, members or [])) for members in of_ranks]


@task("11.1", "a mesh of ranks and its groups", points=2)
def mesh(ranks: Ranks, report: Report) -> None:
    """Lines of meshes of several shapes, and groups that all ranks make alike."""
    if not enough(ranks, report, WORLD):
        return
    shapes = (*SHAPES, *OTHERS)
    answers = report.answers(ranks, probe_mesh, shapes=[list(shape) for shape in shapes])
    for k, shape in enumerate(shapes):
        by_rank = {answer.rank: answer.value[k] for answer in answers}
        if not _mesh_is_right(report, shape, by_rank):
            return


def _mesh_is_right(
    report: Report, shape: tuple[int, ...], by_rank: dict[int, dict[str, Any]]
) -> bool:
    """Judge what all ranks have made of a shape; return whether all of it is right."""
    right = [report.follow(rank, _mesh(rank, shape, result)) for rank, result in by_rank.items()]
    return all(right) and report.follow(None, _asked_alike(shape, by_rank))


def _mesh(rank: int, shape: tuple[int, ...], result: dict[str, Any]) -> Iterator[Step]:
    """Judge the lines of a shape, and the groups that a rank makes of them."""
    for axis in range(len(shape)):
        right = [line(r, shape, axis) for r in range(math.prod(shape))]
        got = [of_rank[axis] for of_rank in result["lines"]]
        call = f"line(r, {shape}, {axis}) for r = 0, 1, …"
        yield value(got, right, _wrong_lines(shape, axis), what=call)
    if shape in SHAPES:
        yield from _mesh_groups(rank, shape, result)


def _mesh_groups(rank: int, shape: tuple[int, ...], result: dict[str, Any]) -> Iterator[Step]:
    """Judge the groups that a rank asks for, and those that it returns."""
    call, asked = f"mesh_groups({shape})", sorted(result["asked"])
    own_lines = [line(rank, shape, axis) for axis in range(len(shape))]
    every_line = sorted(members for axis in range(len(shape)) for members in lines(shape, axis))
    own_only = sorted(map(str, asked)) == sorted(map(str, own_lines))
    yield facts({
        f"{call}: this rank makes only the groups that it is in. new_group is collective: every "
        "rank has to call it for every line, or those inside wait for the others":
            own_only and len(own_lines) < len(every_line),
    })  # fmt: skip
    mistakes = [
        Mistake(lambda got: isinstance(got, str), "return a list of groups"),
        Mistake(own_lines[::-1], "the groups are in the wrong order: that of axis 0 comes first"),
        Mistake(
            lambda got: isinstance(got, list) and len(got) != len(own_lines),
            f"{len(own_lines)} groups are expected on each rank, one for each axis",
        ),
        Mistake(
            lambda got: isinstance(got, list) and any(isinstance(group, str) for group in got),
            "these are not all groups of dist.new_group with this rank in it",
        ),
    ]
    yield value(result["groups"], own_lines, mistakes, what=call, form="a list of groups")
    missing = [members for members in every_line if members not in asked]
    twice = [members for members in asked if asked.count(members) > every_line.count(members)]
    yield facts({
        f"{call}: the group {missing[:1]} was never made": missing,
        f"{call}: the group of {twice[:1]} was made more than once, or is no line of this mesh":
            twice,
    })  # fmt: skip


def _asked_alike(shape: tuple[int, ...], by_rank: dict[int, dict[str, Any]]) -> Iterator[Step]:
    """Judge whether all ranks ask for the same groups in the same order."""
    yield facts({
        f"mesh_groups({shape}): rank 0 asks for {short(by_rank[0]['asked'])}, rank {rank} for "
        f"{short(result['asked'])}. new_group is collective: every rank has to make every "
        "group, in the same order, or they wait for each other": True
        for rank, result in by_rank.items()
        if result["asked"] != by_rank[0]["asked"]
    })  # fmt: skip


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
    """Yield this rank's group along each axis of a grid."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(group_of(partition, rank)) for partition in grid]


class Place(NamedTuple):
    """Where a rank is in a grid of pipelines.

    Attributes:
        pp, dp: the ranks of its pipeline, and those of the replicas of its stage.
        stage, stages: its place in the pipeline, and the length of that.
        replica, replicas: its place among the replicas, and their number.
    """

    pp: list[int]
    dp: list[int]
    stage: int
    stages: int
    replica: int
    replicas: int


def place_in(grid: Sequence, rank: int) -> Place:
    """Return where a rank is in a grid."""
    pp, dp = (mine(partition, rank) for partition in grid)
    return Place(pp, dp, pp.index(rank), len(pp), dp.index(rank), len(dp))


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

    def rule(calls: Calls) -> str | None:
        for call in calls:
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

    return rule


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
    """Gradients and loss of the twin; messages and averages on their own axis."""
    if not enough(ranks, report, WORLD):
        return
    report.judge_cases(ranks, probe_hybrid, _hybrid_cases(report), _hybrid)
    _explained(report)


def _hybrid_cases(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case; ranks of the same stage have the same seed."""
    for grid, microbatches, images in zip(GRIDS, (4, 2, 1, 3), (24, 12, 18, 36), strict=True):
        of_stages = report.seeds(len(grid[0][0]))
        of_ranks = [of_stages[place_in(grid, rank).stage] for rank in range(WORLD)]
        yield {
            "each": to_each(seed=of_ranks),
            "grid": grid,
            "microbatches": microbatches,
            "samples": images,
        }


def _hybrid(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Judge what a rank has computed and communicated in one step of a grid of pipelines."""
    rank, result, calls = answer.rank, answer.value, answer.value["calls"]
    place, m, images = place_in(case["grid"], rank), case["microbatches"], case["samples"]
    seeds = tuple(case["each"][other]["seed"] for other in place.pp)
    gradients, loss = twin(seeds, n=images)
    gradient, is_last = gradients[place.stage], place.stage == place.stages - 1
    where = f"{place.replicas} pipelines of {place.stages} stages"
    order = [kind for kind, _ in one_f_one_b(place.stages, m)[place.stage]]
    forwards = result["events"].count("F")
    yield communication(
        calls, _on_axes(place.pp, place.dp), only("send", "recv", "all_reduce"), waited
    )
    yield facts({
        f"{where}: {forwards} forwards on this rank, {m} microbatches were asked for: does each go "
        "through once?": forwards != m,
        f"{where}: this stage worked in the order {' '.join(result['events'])}; one_f_one_b has "
        f"{' '.join(order)}": result["events"] != order,
    })  # fmt: skip
    mistakes = _wrong_gradients(place, seeds, images, m, result["images"])
    what = f"gradients of stage {place.stage}, {where}"
    yield value(result["gradient"], gradient, mistakes, what=what, tolerance=EXACT)
    yield communication(calls, _reduced(BYTES * len(gradient)))
    own_images = drawn(seeds[0], images)[0].chunk(place.replicas)[place.replica]
    yield facts({
        _other_images(place, images, result["images"]):
            result["images"] != images // place.replicas,
        f"these are not the images of piece {place.replica}: cut the minibatch in order":
            place.stage == 0 and result["piece"] != fingerprint(own_images),
        f"the stage had parameters of float32, and has {result['dtype']} now: leave its type":
            result["dtype"] != "torch.float32",
    })  # fmt: skip
    yield value(
        result["loss"],
        loss if is_last else None,
        _wrong_losses(place, seeds, images, loss) if is_last else [NO_LOSS],
        what=f"the loss, {where}",
        form="the loss on the last stage",
        tolerance=EXACT,
    )


def _other_images(place: Place, images: int, seen: int) -> str:
    """Return what is said of a replica that has trained on too many samples, or too few."""
    n = place.replicas
    return (
        f"this replica has trained on {seen} images, expected {images // n}: cut the minibatch "
        f"into {n} pieces, one for each rank of dp"
    )


def _wrong_gradients(
    place: Place, seeds: tuple[int, ...], images: int, m: int, seen: int
) -> Iterator[Mistake]:
    """Yield which gradients of a stage mistakes lead to; it has seen so many images."""
    p, n, size = place.stages, place.replicas, images // place.replicas
    gradient = twin(seeds, n=images)[0][place.stage]

    def of(samples: slice, labelled: slice | None = None) -> list[float]:
        return _part(seeds, images, place.stage, samples, labelled)[0]

    if n > 1:
        yield from table({
            f"{n} times too large: the sum over the replicas; divide by their number":
                [n * g for g in gradient],
            f"divided once too often by {n}, the number of replicas": [g / n for g in gradient],
            "this is the gradient of this replica's samples alone: average over dp, and give the "
            "piece of the minibatch by the place in dp, not by the place in the pipeline":
                of(slice(place.replica * size, (place.replica + 1) * size)),
            "all replicas have trained on the first piece of the minibatch: replica d has the d-th":
                of(slice(0, size)),
        })  # fmt: skip
    if p > 1:
        first, last = slice(0, images // p), slice(images - images // p, images)
        yield from table({
            f"divided by {p} once too often: by all ranks, or by the stages. A mean over the "
            "replicas is asked for; stages share the layers, not the samples":
                [g / p for g in gradient],
            "the minibatch was cut by stages: each replica has a piece, and its stages share it":
                of(first, last),
        })  # fmt: skip
    if m > 1:
        yield from table({
            f"{m} times too small: run_schedule divides by the microbatches already":
                [g / m for g in gradient],
        })  # fmt: skip
    yield Mistake(lambda _: seen != size, _other_images(place, images, seen))


#: The mistake of a stage that is not the last one.
NO_LOSS = Mistake(
    lambda got: got is not None,
    "only the last stage of a pipeline returns the loss; return None on the others",
)


def _wrong_losses(
    place: Place, seeds: tuple[int, ...], images: int, loss: float
) -> Iterator[Mistake]:
    """Yield which losses mistakes lead to on the last stage."""
    n, size = place.replicas, images // place.replicas
    samples = slice(place.replica * size, (place.replica + 1) * size)
    yield from table({
        "this is the loss of this replica's samples; average it over dp":
            _part(seeds, images, place.stage, samples)[1],
        f"the sum over {n} replicas: divide by their number": n * loss,
        "only the last stage has a loss; return None on the others": None,
    })  # fmt: skip
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


#: Parts of errors' texts, and what is behind them. All but three are words of Python or PyTorch,
#: whose classes of errors say too little. The three are this course's own: two of collectives that
#: do not fit ("have to make", "the large tensor"), and "Deadlock: ".
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


def _judge_in_groups(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    judge: Callable[[GroupAnswer], Iterator[Step]],
) -> None:
    """Ask a probe in all partitions, with a seed for the model and one for each rank's samples."""
    given = {"seed": report.seed, "each": to_each(own=report.seeds(WORLD))}
    cases = [{"partition": partition} | given for partition in PARTITIONS]
    judge_groups(ranks, report, probe, cases, judge, world=WORLD)
    _explained(report)


def _seeds_of(answer: GroupAnswer) -> Seeds:
    """Return the seed of the model, and those of the samples of each rank of the group."""
    own = tuple(answer.case["each"][rank]["own"] for rank in answer.members)
    return Seeds(answer.case["seed"], own)


def _explained(report: Report) -> None:
    """Add to an error of PyTorch what is behind it."""
    errors = [text for text, kind, _ in report.found if kind == "error"]
    for part, explanation in ERRORS.items():
        if any(part in text for text in errors):
            report.problem(f"({explanation})")
            report.found.sort(key=lambda found: found[2] is not None)
            return


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
    """Return that of a parameter, on place k of tp, of replica d's samples."""
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


@task("11.3", "tensor × data: average and clip", points=3)
def tensor_data(ranks: Ranks, report: Report) -> None:
    """The mean over the replicas, and the norm of the whole gradient."""
    if not enough(ranks, report, WORLD):
        return
    report.judge_cases(ranks, probe_clip, _clip_cases(report), _clip)
    _explained(report)


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
    norm = _norm(case, 0)
    alone = [next(iter(_wrong_norms(case, rank).values())) for rank in mine(case["grid"][0], 0)]
    return (norm + max(alone)) / 2


def _held(case: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """Return the gradients that a rank has, by name."""
    gradients = case["each"][rank]["gradients"]
    return {name: torch.tensor(gradients[name], dtype=torch.float64) for name in CUT | WHOLE}


def _averages(case: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """Return the means over the replicas that a rank has, by name."""
    replicas = [_held(case, other) for other in mine(case["grid"][1], rank)]
    return {name: sum(held[name] for held in replicas) / len(replicas) for name in CUT | WHOLE}


def _square(gradients: dict[str, Tensor], names: Iterable[str]) -> float:
    """Return the sum of the squares of some gradients."""
    return sum(gradients[name].square().sum().item() for name in names)


def _squares(case: dict[str, Any], rank: int) -> tuple[dict[int, float], float]:
    """Return the squares of the averaged shards, by rank of tp, and those of whole parameters."""
    means = {other: _averages(case, other) for other in mine(case["grid"][0], rank)}
    return {other: _square(mean, CUT) for other, mean in means.items()}, _square(means[rank], WHOLE)


def _norm(case: dict[str, Any], rank: int) -> float:
    """Return the norm of the whole gradient."""
    shards, whole = _squares(case, rank)
    return math.sqrt(sum(shards.values()) + whole)


def _wrong_norms(case: dict[str, Any], rank: int) -> dict[str, float]:
    """Return which norms mistakes lead to; the first is that of what a rank has by itself."""
    shards, whole = _squares(case, rank)
    tp, dp = (mine(partition, rank) for partition in case["grid"])
    p, n, cut = len(tp), len(dp), list(shards.values())
    total = sum(cut) + whole
    raw = sum(_square(_held(case, other), [name]) for other in tp for name in CUT)
    raw += _square(_held(case, rank), WHOLE)
    return {
        "this is the norm of what this rank has: the squares of the shards have to be summed over "
        "tp": math.sqrt(shards[rank] + whole),
        f"the whole parameters were counted {p} times: their gradients are the same on all ranks "
        "of tp, so their squares are not summed": math.sqrt(sum(cut) + p * whole),
        "norms were added over tp: sum the squares, and take the root at the end":
            sum(math.sqrt(square + whole) for square in cut),
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


def _clip(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Judge the norm that a rank returns, and the gradients that it has afterwards."""
    rank, result, calls = answer.rank, answer.value, answer.value["calls"]
    tp, dp = (mine(partition, rank) for partition in case["grid"])
    most, norm, wrong_norms = case["most"], _norm(case, rank), _wrong_norms(case, rank)
    where = f"most = {most:g}, tp {tp}, dp {dp}"
    others = {text: other for text, other in wrong_norms.items() if abs(other - norm) > 1e-9}
    mistakes = [
        *table(others),
        Mistake(min(norm, most), "this is the norm after clipping: return that from before"),
        NO_NUMBER,
    ]
    yield communication(calls, _on_mesh(tp, dp), only("all_reduce"), waited)
    form = "the norm before clipping"
    yield value(result["norm"], norm, mistakes, what=f"norm, {where}", form=form, tolerance=1e-7)
    row = _row(_averages(case, rank))
    clipped = (row * min(1.0, most / norm)).tolist()
    wrong_clips, what = _wrong_clips(case, rank), f"gradients, {where}"
    yield value(result["gradient"], clipped, wrong_clips, what=what, tolerance=1e-6)
    yield communication([call for call in calls if call["group"] == dp], _reduced(BYTES * len(row)))


def _wrong_clips(case: dict[str, Any], rank: int) -> Iterator[Mistake]:
    """Yield which gradients mistakes lead to."""
    most, norm, n = case["most"], _norm(case, rank), len(mine(case["grid"][1], rank))
    row, factor = _row(_averages(case, rank)), min(1.0, most / norm)
    norm_here = next(iter(_wrong_norms(case, rank).values()))
    yield from table({
        "the gradients were not clipped: multiply each by most / norm, in place":
            row if factor < 1 else [],
        "the norm is smaller than most, and the gradients were made longer: leave them":
            row * (most / norm) if factor == 1 else [],
        "each rank has clipped by the norm of its own part: one factor for all":
            row * min(1.0, most / norm_here),
        "these are the gradients of this replica: average over dp":
            _row(_held(case, rank)) * factor,
        f"a sum over the replicas: divide by {n}": n * row * factor,
        "clipped twice": row * factor**2 if factor < 1 else [],
    })  # fmt: skip


def _row(gradients: dict[str, Tensor]) -> Tensor:
    """Return gradients in the order of the layer's parameters."""
    return torch.cat([gradients[name].reshape(-1) for name, _ in _Cut().named_parameters()])


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


# -- 11.4: ZeRO-1 -----------------------------------------------------------------------------


@in_group
def probe_one(user_ns: dict, *, rank: int, group: Group, partition, own: int, seed: int) -> list:
    """Two steps on a small model."""
    k, p = dist.get_rank(group), dist.get_world_size(group)
    first, *others = layers_of(seed)
    layers = nn.ModuleList([Named(first, 0), *others])
    shard = shard_of(list(layers.parameters()), p, k)
    optimizer, steps = momentum([shard]), []
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
        steps.append(
            {
                "weights": row.tolist(),
                "shard": list_of(shard),
                "calls": calls,
                "moved": moved,
                "held": max(held),
            }
        )
    return steps


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
    _judge_in_groups(ranks, report, probe_one, _zero_one)


def _zero_one(answer: GroupAnswer) -> Iterator[Step]:
    """Judge the weights and the shard of a rank after each step."""
    seeds, members, p = _seeds_of(answer), answer.members, len(answer.members)
    begin = row_of([q for m in layers_of(seeds.model) for q in m.parameters()], p).tolist()
    part = slice(answer.place * len(begin) // p, (answer.place + 1) * len(begin) // p)
    shards = [
        Mistake(begin[part], "the shard has not changed: it is what the optimizer updates"),
        Mistake(begin, "the shard has become the whole row"),
    ]
    for step, result in zip(range(STEPS), answer.value, strict=True):
        weights, where = trained(seeds)[step], f"step {step + 1} {on(members)}"
        mistakes = _wrong_weights(seeds, step, begin, part)
        yield communication(result["calls"], inside(members), *_pair(p, BYTES * len(begin)))
        what = f"weights after {where}"
        yield value(result["weights"], weights, mistakes, what=what, tolerance=EXACT)
        what = f"shard after {where}"
        yield value(result["shard"], weights[part], shards, what=what, tolerance=EXACT)
        yield facts({
            f"after {where} the parameters have other memory: put the weights into the tensors "
            "that are there (copy_back)": result["moved"],
            f"after {where} the shard, or its gradient, is a view of a whole row, and so all of "
            "the row stays in memory: copy this rank's part": result["held"] > 1,
        })  # fmt: skip


def _wrong_weights(seeds: Seeds, step: int, begin: list[float], part: slice) -> Iterator[Mistake]:
    """Yield what the model's weights are after mistakes; one part of them is this rank's."""
    yield Mistake(
        begin,
        "the model's weights have not changed. Had the shard a gradient when the optimizer "
        "stepped? Then gather the shards, and put them into the model (copy_back)",
    )
    p = len(seeds.own)
    if p == 1:
        return
    mixed = list(begin)
    mixed[part] = trained(seeds)[step][part]
    yield Mistake(
        mixed, "only this rank's part of the weights is new: the others' come by all_gather"
    )
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
    function, steps = reading_answer(user_ns, "zero2_hooks"), []
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
        steps.append({"gradients": grads, "calls": calls, "left": left, "behind": list(behind)})
    if partition is not None:  # metered once, where each part is smallest
        return {"steps": steps, "rows": 0.0}
    layers = layers_of(seed, (WIDE,) * (CHAIN + 1))
    shards = [shard_of(list(layer.parameters()), p, k) for layer in layers]
    loss = loss_of(chained(layers, samples(own, 0, WIDE)))

    def hooked() -> None:
        function(layers, shards, **keywords(partition, group))
        loss.backward()

    (_, rows), calls = recorded(collected, hooked)
    return {"steps": steps, "rows": rows, "calls again": calls}


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
        alone = row_of([rows_at(seeds, k, step)[i]], p).chunk(p)[k]
        yield from table({
            f"a sum over {p} ranks; a mean is asked for": p * right,
            f"divided by {p} once too often": right / p,
            "the gradient of this rank's samples alone: reduce_scatter over the group": alone,
            "the gradient of this rank's samples alone, divided: reduce_scatter sums over the "
            "group": alone / p,
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
    _judge_in_groups(ranks, report, probe_two, _zero_two)


def _zero_two(answer: GroupAnswer) -> Iterator[Step]:
    """Judge each backward of the small model, and the memory and calls of that of the chain."""
    members, p, result = answer.members, len(answer.members), answer.value
    for step, of_step in zip(range(STEPS), result["steps"], strict=True):
        yield from _backward(answer, step, of_step)
    # Parts of all layers, a layer's gradients, their row, what backward needs, and some time until
    # it is all freed; who keeps all gradients has 24 more.
    most = CHAIN / p + 12
    yield facts({
        f"{on(members)}: backward of {CHAIN} equal layers made {result['rows']:.1f} layers' worth "
        f"of bytes at its peak, {most:.1f} are enough: free a layer's gradients as soon as they "
        "are reduce-scattered, and keep no row": p > 1 and result["rows"] > most,
    })  # fmt: skip
    if p == WORLD:
        why = f" in backward of {CHAIN} equal layers"
        rules = only("reduce_scatter_tensor"), made("reduce_scatter_tensor", CHAIN, why)
        yield communication(result["calls again"], *rules)


def _backward(answer: GroupAnswer, step: int, result: dict[str, Any]) -> Iterator[Step]:
    """Judge the gradients of the shards after a backward, and what is freed on the way."""
    seeds, members, n = _seeds_of(answer), answer.members, len(SMALL) - 1
    where = f"backward {step + 1} {on(members)}"
    why = f" in {where}: one for each of {n} layers, with weight and bias together"
    reached = [gradient is not None for gradient in result["gradients"]]
    yield communication(result["calls"], only("reduce_scatter_tensor"), inside(members))
    yield facts({
        f"{where}: the last layer alone was reduce-scattered. {LATE_BINDING}":
            reached == [False] * (n - 1) + [True],
    })  # fmt: skip
    yield communication(result["calls"], made("reduce_scatter_tensor", n, why), waited)
    yield from _shard_gradients(result["gradients"], seeds, answer.place, step, f", {where}")
    left, behind = result["left"], result["behind"]
    yield facts({
        f"{where}: {left} parameters still have a gradient: set .grad = None": left,
        f"{where}: all parameters of layer {behind[:1]} had their gradients, and still had them "
        "after their hooks: reduce-scatter and free them at once": behind,
    })  # fmt: skip


def _shard_gradients(
    gradients: list, seeds: Seeds, k: int, step: int, where: str
) -> Iterator[Step]:
    """Judge the gradient of each layer's shard, at place k of a group."""
    for i in range(len(SMALL) - 1):
        mean = _means(seeds, step, i).chunk(len(seeds.own))[k].tolist()
        mistakes, what = _wrong_parts(seeds, k, step, i), f"gradient of shard {i}{where}"
        yield value(gradients[i], mean, mistakes, what=what, tolerance=EXACT)


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
            lambda x, shard=shard, shape=shape: function.apply(x, shard, shape, group)
            for shard, shape in zip(shards, shapes, strict=True)
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
    result = {
        "y": list_of(y),
        "views": views,
        "changed": not torch.equal(*came),
        "dx": list_of(x.grad),
        "gradients": grads,
        "forward": forward,
        "backward": backward,
        "rows forward": 0.0,
        "rows backward": 0.0,
    }
    if partition is not None:  # metered once, where each part is smallest
        return result
    _, layers = made_of((WIDE,) * (CHAIN + 1))
    x = samples(own, 0, WIDE).requires_grad_()
    (y, result["rows forward"]), forward = recorded(collected, chained, layers, x)
    (_, result["rows backward"]), backward = recorded(collected, loss_of(y).backward)
    return result | {"calls again": forward + backward}


@task("11.6", "ZeRO-3", points=3)
def zero_three(ranks: Ranks, report: Report) -> None:
    """Layers that are whole only while they are used."""
    _judge_in_groups(ranks, report, probe_three, _zero_three)


def _zero_three(answer: GroupAnswer) -> Iterator[Step]:
    """Judge forward, backward, and what of the gathered weights is kept in between."""
    seeds = _seeds_of(answer)
    layers = layers_of(seeds.model)
    x = samples(seeds.own[answer.place], 0).requires_grad_()
    y = chained(layers, x)
    loss_of(y).backward()
    yield from _gathered_forward(answer, layers, x.detach(), y)
    yield from _gathered_backward(answer, seeds, x.grad)
    if len(answer.members) == WORLD:
        through = f" both ways through {CHAIN} equal layers"
        gathers = made("all_gather_into_tensor", 2 * CHAIN, through)
        scatters = made("reduce_scatter_tensor", CHAIN, f" back through {CHAIN} equal layers")
        both = only("all_gather_into_tensor", "reduce_scatter_tensor")
        yield communication(answer.value["calls again"], both, gathers, scatters)


def _gathered_forward(
    answer: GroupAnswer, layers: list[nn.Linear], x: Tensor, y: Tensor
) -> Iterator[Step]:
    """Judge the output, and that layers are gathered one by one; x and y are those of the twin."""
    result, members = answer.value, answer.members
    p, where = len(members), on(members)
    once = f" forward {where}: one for each of {len(layers)} layers"
    gathers = made("all_gather_into_tensor", len(layers), once)
    alone = only("all_gather_into_tensor")
    yield communication(result["forward"], alone, inside(members), gathers, waited)
    mistakes, what = _wrong_outputs(layers, x, p), f"output {where}"
    yield value(result["y"], list_of(y), mistakes, what=what, tolerance=EXACT)
    yield facts({
        "whole returns copies: weight and bias have to be views into one gathered row":
            not result["views"],
    })  # fmt: skip
    yield facts(_kept(p, where, result["rows forward"], "forward"))


def _gathered_backward(answer: GroupAnswer, seeds: Seeds, slope: Tensor) -> Iterator[Step]:
    """Judge gradients, and that layers are gathered again; the slope is that of the twin's x."""
    result, members, n = answer.value, answer.members, len(SMALL) - 1
    p, where = len(members), on(members)
    again = f" backward {where}: each layer once more, as its weights were forgotten"
    gathers = made("all_gather_into_tensor", n, again)
    down = f" backward {where}: one for each of {n} layers"
    scatters = made("reduce_scatter_tensor", n, down)
    both = only("all_gather_into_tensor", "reduce_scatter_tensor")
    yield communication(result["backward"], both, inside(members), gathers, scatters, waited)
    yield facts({
        "backward changed the gradient that came in, which other layers may use: work on a copy of "
        "it": result["changed"],
    })  # fmt: skip
    mistakes, what = _wrong_slopes(slope.reshape(-1), p, n), f"gradient of x {where}"
    yield value(result["dx"], list_of(slope), mistakes, what=what, tolerance=EXACT)
    yield from _shard_gradients(result["gradients"], seeds, answer.place, 0, f" {where}")
    yield facts(_kept(p, where, result["rows backward"], "backward"))


def _wrong_outputs(layers: list[nn.Linear], x: Tensor, p: int) -> Iterator[Mistake]:
    """Yield which outputs mistakes lead to, with the weights over p ranks."""
    ends = [row_of(list(layer.parameters()), p)[-layer.out_features :] for layer in layers]
    no_bias = [lambda x, weight=layer.weight: x @ weight.t() for layer in layers]
    padded = [
        lambda x, linear=linear, end=end: linear(x) + end
        for linear, end in zip(no_bias, ends, strict=True)
    ]
    yield from table({
        "the bias is missing": chained(no_bias, x).detach().reshape(-1),
        "the bias is not the end of the row: zeros may follow it":
            chained(padded, x).detach().reshape(-1),
    })  # fmt: skip


def _wrong_slopes(slope: Tensor, p: int, n: int) -> Iterator[Mistake]:
    """Yield which gradients of the input mistakes lead to, with n layers over p ranks."""
    if p > 1:
        yield from table({
            f"divided by {p}: each rank has samples of its own, and only the shard's gradient is a "
            "mean": slope / p,
            f"divided by {p} in each layer: only the shard's gradient is a mean": slope / p**n,
        })  # fmt: skip
    yield Mistake(None, "there is none: return it first")


def _kept(p: int, where: str, rows: float, when: str) -> dict[str, bool]:
    """Return whether more than a few layers were whole at once, by what is said then."""
    # Forward: one layer, and activations worth four; backward: also a part of each gradient.
    most = 12 if when == "forward" else CHAIN / p + 12
    too_much = (
        f"{when} of {CHAIN} equal layers {where} made {rows:.1f} layers' worth of bytes at its "
        f"peak, {most:.1f} are enough: forget the gathered weights after each layer. What "
        "ctx keeps stays until backward: the shard, not the whole weight"
    )
    return {too_much: p > 1 and rows > most}


# -- 11.7: offload ----------------------------------------------------------------------------

PAIRS = ([[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]])


@in_group
def probe_offload(user_ns: dict, *, rank: int, group: Group, partition, seed: int) -> dict:
    """Two steps of a device and its host; the seed is that of its samples, or of its weights."""
    from torch_mpi.record import log

    place, order = dist.get_rank(group), Layers(DEEP, *batch(seed, 0)).order
    result: dict[str, Any] = {"losses": [], "calls": [], "seen": [], "most": 0}
    rows = host_rows(seed)
    optimizers, notes, mark = watched_optimizers(rows, order, log)
    for step in range(STEPS):
        if place == 0:
            worker = Watched(*batch(seed, step), log, result["most"])
            function = answer_named(user_ns, "device_step")
            with _receives_noted(worker):
                loss, calls = recorded(function, worker, group=group)
            result["losses"].append(told(loss))
            result |= {"kept": worker.kept, "most": worker.most}
            result["seen"].append(worker.seen)
        else:
            mark[0] = log.mark()
            notes.clear()
            function = answer_named(user_ns, "host_step")
            _, calls = recorded(function, rows, optimizers, list(order), group=group)
            result["seen"].append(list(notes))
        result["calls"].append(calls)
    return result | {"weights": [list_of(row) for row in rows]}


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
        made_here = [(c["op"], c["tag"], c["nbytes"]) for c in calls if c["peer"] == other]
        odd = next((message for message in made_here if message not in wanted), None)
        missing = next((message for message in wanted if made_here.count(message) != 1), None)
        if odd is None and missing is None:
            return None
        op, tag, size = odd or missing
        content = "weights" if op == weights else "the gradient"
        if odd is None:
            count = made_here.count(missing)
            return f"{content} of piece {tag}: expected one {op} with tag {tag}, it made {count}"
        return (
            f"a {op} with tag {tag} and {size} bytes: weights of piece n have tag n, and so has "
            f"its gradient; of piece {tag} that is {dict(enumerate(sizes)).get(tag)} bytes"
        )

    return rule


def _wrong_device(seen: list, kept: int, most: int, pieces: int) -> dict[str, bool]:
    """Prefetch of one piece, and one pending gradient."""
    order, first = [note[0] for note in seen], (pieces - 1) // 2
    started = [note[1] - min(n + 2, pieces) for n, note in enumerate(seen)]
    unwaited = [note[3] - note[4] for note in seen]
    return {
        f"pieces were worked on in the order {short(order)}, expected 0 … {pieces - 1}":
            order != list(range(pieces)),
        "no prefetch: as piece n begins, the receive of piece n + 1 has to be started already":
            min(started, default=0) < 0,
        "too much prefetch: as piece n begins, receives up to piece n + 1 may be started. Each "
        "of them holds a layer's weights, and the device has room for two":
            max(started, default=0) > 0,
        f"{most} rows are in the device's memory as a receive begins, {ROWS} are allowed. Before "
        "you start the receive of piece n + 1, let go of the row of piece n − 1 (row = None), and "
        "of its request, which keeps the row": most > ROWS,
        "gradients are sent and waited for at once: start the next piece meanwhile, and wait "
        "before the next gradient is sent": not any(unwaited[first + 1 :]),
        "more than one gradient is under way: before you send one, wait for the one before":
            max(unwaited, default=0) > 1,
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
    each = to_each(seed=report.seeds(WORLD))
    cases = [{"partition": partition, "each": each} for partition in PAIRS]
    judge_groups(ranks, report, probe_offload, cases, _offload, world=WORLD)
    _explained(report)


def _offload(answer: GroupAnswer) -> Iterator[Step]:
    """Judge the steps of a device, at place 0, or of its host."""
    place, members, result = answer.place, answer.members, answer.value
    device, host = (answer.case["each"][rank]["seed"] for rank in members)
    order = Layers(DEEP, *batch(device, 0)).order
    for _, calls in zip(range(STEPS), result["calls"], strict=True):
        traffic = _traffic(place, members, order)
        yield communication(calls, only("send", "recv"), inside(members), traffic)
    for _, seen in zip(range(STEPS), result["seen"], strict=True):
        if place == 0:
            yield facts(_wrong_device(seen, result["kept"], result["most"], len(order)))
        else:
            yield facts(_wrong_host(seen, order))
    for calls in result["calls"]:
        yield communication(calls, waited)
    if place == 0:
        yield _losses(result["losses"], offloaded(device, host)[0])
    else:
        yield from _rows(result["weights"], device, host)


def _losses(losses: Any, expected: list[float]) -> Step:
    """Judge what the device has returned in each step."""
    nothing = Mistake(
        lambda got: got is None or got == [None] * STEPS,
        "nothing was returned: return worker.loss",
    )
    return value(losses, expected, [nothing], what="the losses", tolerance=EXACT)


def _rows(rows: list, device: int, host: int) -> Iterator[Step]:
    """Judge the weights of each layer on the host."""
    begin = [row.tolist() for row in host_rows(host)]
    _, expected = offloaded(device, host)
    _, added = offloaded(device, host, adds=True)
    for i, row in enumerate(expected):
        mistakes = table({
            "the weights have not changed: put the gradient into weights[i].grad before the step":
                begin[i],
            "the gradient of the step before is still in weights[i].grad: put the new one in its "
            "place": added[i],
        })  # fmt: skip
        what = f"row of layer {i} after {STEPS} steps"
        yield value(rows[i], row, mistakes, what=what, tolerance=EXACT)
