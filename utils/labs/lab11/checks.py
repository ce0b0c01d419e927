"""Checks of lab 11 for two axes at once; imports the checks of the other tasks.

Checks compare small models, in double precision, with a reference model that isn't split. Groups
and bytes are exact, and no verdict depends on times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from utils.checks.comparison import EXACT, NO_NUMBER, Calls, Mistake, Rule, only, table, waited
from utils.checks.model import use_model as use_model
from utils.checks.probe import fingerprint
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import enough, members_of
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared.pipeline_stages import samples_and_labels
from utils.labs.shared.reference_pipeline import reference_gradients
from utils.labs.shared.schedules import one_f_one_b

from .mapping import whole_machine as whole_machine
from .meshes import mesh as mesh
from .offloading import offload as offload
from .probes import CUT, WHOLE, CutLayer, probe_clip, probe_hybrid
from .sharding import WORLD, exactly, explain_errors
from .sharding import zero_one as zero_one
from .sharding import zero_three as zero_three
from .sharding import zero_two as zero_two
from .small_layers import BYTES

# -- 11.2: pipeline × data --------------------------------------------------------------------

#: Groups of the pipelines, and of their replicas.
GRIDS = (
    ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
    ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]),
    ([[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3, 4, 5]]),
    # These are two meshes, one with two replicas and one without: only the groups say so.
    ([[0, 1], [2, 3], [4, 5]], [[0, 2], [1, 3], [4], [5]]),
)


class Place(NamedTuple):
    """A rank's place in a grid of pipelines.

    Attributes:
        pp: the ranks of its pipeline.
        dp: the ranks with the same stage, one for each replica.
        stage, replica: its group ranks in `pp` and in `dp`.
    """

    pp: list[int]
    dp: list[int]
    stage: int
    replica: int

    def part_of(self, images: int) -> tuple[int, int]:
        """Return the range of its replica's images, as first and end."""
        size = images // len(self.dp)
        return self.replica * size, (self.replica + 1) * size


def place_in(grid: Sequence, rank: int) -> Place:
    """Return a rank's place in a grid."""
    pp, dp = (members_of(partition, rank, WORLD) for partition in grid)
    return Place(pp, dp, pp.index(rank), dp.index(rank))


def _on_axes(pp: list[int], dp: list[int]) -> Rule:
    """Return the rule that messages are in the pipeline, and averages over the replicas."""

    def broken_by(call: dict[str, Any]) -> str | None:
        message = call["op"] in ("send", "recv")
        if call["group"] == list(range(WORLD)) and WORLD not in (len(pp), len(dp)):
            return (
                f"You called {call['op']} over all ranks, but stages have different gradients. "
                "Average over the replicas of this stage only: group=dp"
            )
        if not message and call["group"] == pp != dp and len(pp) > 1:
            return (
                f"You called {call['op']} over the pipeline's ranks {pp}, which have different "
                "layers. Average gradients and losses over dp"
            )
        if message and call["group"] != pp:
            return f"You called {call['op']} outside this rank's pipeline {pp}. Pass group=pp"
        return None

    return lambda calls: next(filter(None, map(broken_by, calls)), None)


def _reduced(nbytes: int) -> Rule:
    """Return the rule that all_reduces have `nbytes` bytes, and perhaps a loss more."""

    def rule(calls: Calls) -> str | None:
        total = sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")
        if nbytes <= total <= nbytes + BYTES:
            return None
        return f"You all-reduced {total} bytes in all. This stage's gradients have {nbytes} bytes"

    return rule


@task("11.2", "pipeline × data", points=3)
def pipeline_data(ranks: Ranks, report: Report) -> None:
    """Compare gradients and loss with the reference model's; judge calls by their axes."""
    if enough(ranks, report, WORLD):
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
    m = case["microbatches"]
    images = case["samples"]
    stages = len(place.pp)
    replicas = len(place.dp)
    seeds = tuple(case["each"][other]["seed"] for other in place.pp)
    where = f"{replicas} pipelines of {stages} stages"
    order = [kind for kind, _ in one_f_one_b(stages, m)[place.stage]]
    forwards = result["events"].count("F")
    in_axes = _on_axes(place.pp, place.dp)
    yield communication(calls, in_axes, only("send", "recv", "all_reduce"), waited)
    yield facts({
        f"{where}: You ran {forwards} forwards on this rank, expected {m}. Run each microbatch "
        "through once": forwards != m,
        f"{where}: Your stage worked in the order {' '.join(result['events'])}. Use the order of "
        f"one_f_one_b, {' '.join(order)}": result["events"] != order,
    })
    gradients, loss = reference_gradients(seeds, n=images)
    gradient = gradients[place.stage]
    mistakes = _wrong_gradients(place, seeds, images, m, result["images"])
    gradients_of = f"gradients of stage {place.stage}, {where}"
    yield exactly(result["gradient"], gradient, mistakes, gradients_of)
    yield communication(calls, _reduced(BYTES * len(gradient)))
    own_images = samples_and_labels(seeds[0], images)[0].chunk(replicas)[place.replica]
    others = place.stage == 0 and result["piece"] != fingerprint(own_images)
    yield facts({
        _other_images(place, images, result["images"]): result["images"] != images // replicas,
        f"You used other images than replica {place.replica}'s. Split the minibatch in "
        "order": others,
        f"You changed the stage's parameters from float32 to {result['dtype']}. Leave their "
        "type": result["dtype"] != "torch.float32",
    })
    loss_of = f"the loss, {where}"
    if place.stage == stages - 1:
        mistakes = _wrong_losses(place, seeds, images, loss)
        form = "the loss on the last stage"
        yield value(result["loss"], loss, mistakes, what=loss_of, form=form, tolerance=EXACT)
    else:
        yield value(result["loss"], None, [NO_LOSS], what=loss_of)


def _other_images(place: Place, images: int, seen: int) -> str:
    """Return the message for a replica that trained on too many samples, or too few."""
    n = len(place.dp)
    return (
        f"You trained this replica on {seen} images, expected {images // n}. Split the minibatch "
        f"into {n} pieces, one for each rank of dp"
    )


def _wrong_gradients(
    place: Place, seeds: tuple[int, ...], images: int, m: int, seen: int
) -> Iterator[Mistake]:
    p = len(place.pp)
    n = len(place.dp)
    size = images // n

    def gradient_by(**samples: tuple[int, int]) -> list[float]:
        return reference_gradients(seeds, n=images, **samples)[0][place.stage]

    gradient = torch.tensor(gradient_by(), dtype=torch.float64)
    if n > 1:
        alone = gradient_by(part=place.part_of(images))
        yield from table({
            f"You summed over {n} replicas. Divide by their number": n * gradient,
            f"You divided by {n}, the number of replicas, once too often": gradient / n,
            "You used this replica's samples alone. Average over dp, and choose the piece of the "
            "minibatch by the rank in dp, not by the rank in the pipeline": alone,
            "You trained all replicas on the first piece of the minibatch. Give replica d the "
            "d-th piece": gradient_by(part=(0, size)),
        })
    if p > 1:
        yield from table({
            f"You divided by {p} once too often, by all ranks or by the stages. Average over the "
            "replicas only, because stages share the layers, not the samples": gradient / p,
            "You split the minibatch by stages. Give each replica a piece, which its stages "
            "share": gradient_by(part=(0, images // p), labelled=(images - images // p, images)),
        })
    if m > 1:
        said = f"You divided by the {m} microbatches again. run_schedule has done so"
        yield Mistake((gradient / m).tolist(), said)
    yield Mistake(lambda _: seen != size, _other_images(place, images, seen))


#: The mistake of a stage that is not the last one.
NO_LOSS = Mistake(
    lambda reply: reply is not None,
    "You returned a loss on a stage that has none. Return None there",
)


def _wrong_losses(
    place: Place, seeds: tuple[int, ...], images: int, loss: float
) -> Iterator[Mistake]:
    n = len(place.dp)
    _, loss_here = reference_gradients(seeds, n=images, part=place.part_of(images))
    yield from table({
        "You returned this replica's loss. Average it over dp": loss_here,
        f"You summed over {n} replicas. Divide by their number": n * loss,
        "Return the loss on the last stage, and None on the others": None,
    })
    yield NO_NUMBER


# -- 11.3: tensor × data ----------------------------------------------------------------------


#: The layer's parameters in their order, and which numbers in a row of them are split.
NAMES = [name for name, _ in CutLayer().named_parameters()]
IS_CUT = torch.cat([torch.full((q.numel(),), n in CUT) for n, q in CutLayer().named_parameters()])


def _gradient(seed: int, name: str, k: int, d: int) -> Tensor:
    """Return a parameter's gradient on rank k of tp, for the samples of replica d."""
    place = sorted(CUT | WHOLE).index(name)
    draw = torch.Generator().manual_seed(seed + 97 * place + 7 * d + (k + 1) * (name in CUT) * 1009)
    return torch.randn((CUT | WHOLE)[name], generator=draw, dtype=torch.float64)


@task("11.3", "tensor × data: average and clip", points=3)
def tensor_data(ranks: Ranks, report: Report) -> None:
    """Judge the mean over the replicas, and the norm of the whole gradient."""
    if enough(ranks, report, WORLD):
        report.judge_cases(ranks, probe_clip, _clip_cases(report), _clip)
        explain_errors(report)


def _clip_cases(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case; each rank knows only its own gradients."""
    bounds = (GRIDS[1], 2.5), (GRIDS[0], 1.5), (GRIDS[1], 1e3), (GRIDS[3], 1.5), (GRIDS[1], 0)
    for grid, most in bounds:
        (seed,) = report.seeds(1)
        gradients = []
        for rank in range(WORLD):
            k, d = (members_of(partition, rank, WORLD).index(rank) for partition in grid)
            gradients.append({n: _gradient(seed, n, k, d).tolist() for n in CUT | WHOLE})
        case = {"each": to_each(gradients=gradients), "grid": grid}
        alone = max(Clipping(case, rank).alone for rank in members_of(grid[0], 0, WORLD))
        # The norm is above this bound, and each rank's own norm is below it.
        yield case | {"most": most or (Clipping(case, 0).norm + alone) / 2}


class Clipping:
    """The results of averaging and clipping on one rank.

    Attributes:
        tp, dp: the ranks along both axes.
        row: the rank's gradients, averaged over the replicas.
        alone: the norm of this row.
        cut: the squares of the averaged shards, for each rank of tp.
        whole: the squares of the parameters that are not split.
        norm: the norm of the whole gradient, before clipping.
    """

    def __init__(self, case: dict[str, Any], rank: int):
        self.case = case
        self.rank = rank
        self.tp, self.dp = (members_of(partition, rank, WORLD) for partition in case["grid"])
        self.row = self._mean(rank)
        self.alone = self.row.norm().item()
        self.cut = [self._mean(other).square()[IS_CUT].sum().item() for other in self.tp]
        self.whole = self.row.square()[~IS_CUT].sum().item()
        self.norm = math.sqrt(sum(self.cut) + self.whole)

    def held(self, rank: int) -> Tensor:
        """Return the gradients that a rank has, in one row."""
        gradients = self.case["each"][rank]["gradients"]
        parts = [torch.tensor(gradients[name], dtype=torch.float64) for name in NAMES]
        return torch.cat([part.reshape(-1) for part in parts])

    def _mean(self, rank: int) -> Tensor:
        replicas = [self.held(other) for other in members_of(self.case["grid"][1], rank, WORLD)]
        return sum(replicas) / len(replicas)

    def wrong_norms(self) -> dict[str, float]:
        """Return the wrong norms of likely mistakes."""
        p = len(self.tp)
        n = len(self.dp)
        total = sum(self.cut) + self.whole
        raw = sum(self.held(other)[IS_CUT].square().sum().item() for other in self.tp)
        raw += self.held(self.rank)[~IS_CUT].square().sum().item()
        return {
            "You used only what this rank has. Sum the squares of the shards over tp": self.alone,
            f"You counted the whole parameters {p} times. Don't sum their squares, because all "
            "ranks of tp have the same gradients": (math.sqrt(sum(self.cut) + p * self.whole)),
            "You added norms over tp. Sum the squares, and take the root last": sum(
                math.sqrt(square + self.whole) for square in self.cut
            ),
            "You added norms of shards over tp. Sum their squares": math.sqrt(
                sum(map(math.sqrt, self.cut)) ** 2 + self.whole
            ),
            "You summed the squares over dp, too. After averaging, all replicas have the same "
            "gradients": math.sqrt(n * total),
            "You returned the square of the norm. Take the root": total,
            "You left the whole parameters out of the norm": math.sqrt(sum(self.cut)),
            "You summed the gradients over dp. Average them": n * self.norm,
            f"You divided the gradients by {WORLD // p}. Divide by the number of replicas, the "
            f"size of dp: {n}": n * self.norm / (WORLD // p),
            "You used this replica's gradients. Average over dp first": math.sqrt(raw),
        }

    def wrong_rows(self, most: float) -> list[Mistake]:
        """Return the wrong gradients of likely mistakes for this bound."""
        n = len(self.dp)
        factor = min(1.0, most / self.norm)
        wrong = {
            "Each rank clipped by its own norm. Use one factor for all ranks": (
                self.row * min(1.0, most / self.alone)
            ),
            "You used this replica's gradients. Average over dp": (self.held(self.rank) * factor),
            f"You summed over the replicas. Divide by {n}": n * (self.row * factor),
        }
        if factor < 1:
            text = "You didn't clip the gradients. Multiply each by most / norm, in place"
            return table({text: self.row} | wrong | {"You clipped twice": self.row * factor**2})
        text = "You enlarged gradients whose norm is smaller than most. Leave them"
        return table({text: self.row * (most / self.norm)} | wrong)


def _clip(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    result = answer.value
    calls = result["calls"]
    right = Clipping(case, answer.rank)
    most = case["most"]
    where = f"most = {most:g}, tp {right.tp}, dp {right.dp}"
    norms = right.wrong_norms().items()
    mistakes = [
        *table({text: norm for text, norm in norms if abs(norm - right.norm) > 1e-9}),
        Mistake(
            min(right.norm, most), "You returned the norm after clipping. Return the one before"
        ),
        NO_NUMBER,
    ]
    yield communication(calls, _on_mesh(right.tp, right.dp), only("all_reduce"), waited)
    name = f"norm, {where}"
    form = "the norm before clipping"
    yield value(result["norm"], right.norm, mistakes, what=name, form=form, tolerance=1e-7)
    row = (right.row * min(1.0, most / right.norm)).tolist()
    name = f"gradients, {where}"
    yield value(result["gradient"], row, right.wrong_rows(most), what=name, tolerance=1e-6)
    yield communication([c for c in calls if c["group"] == right.dp], _reduced(BYTES * len(row)))


def _on_mesh(tp: list[int], dp: list[int]) -> Rule:
    """Return the rule that gradients are averaged over dp, and a few numbers summed over tp."""

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["group"] not in (tp, dp):
                return (
                    f"You called {call['op']} over the ranks {call['group']}, but different ranks "
                    f"have different shards. Average gradients over dp, {dp}, and sum the squares "
                    f"of the shards over tp, {tp}"
                )
            if call["group"] == tp and call["nbytes"] > len(CUT | WHOLE) * BYTES:
                return (
                    f"You called {call['op']} of {call['nbytes']} bytes over tp, {tp}, but these "
                    "ranks have different shards. Sum one number over tp, the shards' squares, "
                    "and average gradients over dp"
                )
        return None

    return rule
