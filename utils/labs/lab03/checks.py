"""Checks of lab 03: data parallel training, replicas in sync.

The answers are tried on groups of 1, 2, 3 and 4 ranks (`utils.checks.groups`), more than once each.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from utils.checks.calls import Rule, inside, made, only, some, waited
from utils.checks.groups import (
    EVERYWHERE,
    PARTITIONS,
    WORLD,
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_groups,
    keywords,
    on,
    places,
    tried,
)
from utils.checks.mistakes import Mistake, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, in_double, numbers, recorded, told
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas
from utils.labs.shared.replicas import GroupStep, Twin

from . import training

# Where one rank of a group has nothing: last, as it could hide another mistake.
WITH_EMPTY = PARTITIONS[1::-1]


def _rules(members: list[int]) -> tuple[Rule, ...]:
    """Return the rules of all tasks but the last two."""
    return only("all_reduce"), inside(members), waited


# -- gradients: 3.1 and 3.2 -------------------------------------------------------------------

CALLS = 2  # of an answer in a row: what it keeps of the first must not change the second
# In 3.2 and 3.3 the first has many samples (an odd seed), and the second has few.


def _sizes(seed: int) -> tuple[int, ...]:
    """Draw the widths of a model: no answer is made for one of them."""
    return 6, 7 + seed % 6, 7 + seed // 6 % 6, 4


def _gradient_length(sizes: Sequence[int]) -> int:
    """Return how many numbers the gradients have; two biases have none, a shared weight one."""
    model = replicas.net(0, sizes)
    without = model[1].bias.numel() + model[3].bias.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - without


def _gradient(seed: int, samples: int = 1) -> torch.Tensor:
    """What a rank's gradients are filled with, one after the other; zeros without samples."""
    draw = torch.Generator().manual_seed(seed)
    return 10 * torch.randn(300, generator=draw) * (samples > 0)


@in_group
def probe_average(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    seed: int,
    counts: list,
    weighted: bool,
    sizes: list[int],
) -> list[dict]:
    """`average_gradients`, or the weighted one, on known gradients.

    One parameter is frozen, and one was not used. Without a partition all is in double precision.
    seed, counts: this rank's own; its samples in each call.
    """
    name = "average_gradients_weighted" if weighted else "average_gradients"
    function, answers = answer_named(user_ns, name), []
    model = replicas.net(seed, sizes).to(torch.float64 if partition is None else torch.float32)
    model[1].bias.requires_grad_(False)
    model[5].shared = model[1].weight  # as two layers that share one weight
    for k, count in enumerate(counts):
        model.zero_grad()
        values = _gradient(seed + 10 * k, count)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            if parameter is not model[3].bias:
                parameter.grad = values[: parameter.numel()].view_as(parameter).to(parameter.dtype)
                values = values[parameter.numel() :]
        before = replicas.weights_of(model)
        had = [p for p in model.parameters() if p.grad is not None]
        _, calls = recorded(function, model, *[count] * weighted, **keywords(partition, group))
        answers.append(
            {
                "gradient": torch.cat([p.grad.reshape(-1) for p in had]),
                "count": len(had),
                "others": sum(p.grad is not None for p in model.parameters()) - len(had),
                "moved": not torch.equal(replicas.weights_of(model), before),
                "nbytes": sorted((p.grad.nbytes for p in had), reverse=True),
                "calls": calls,
            }
        )
    return answers


@dataclass(frozen=True)
class GradientCall:
    """One call of the answer on a rank, and what all ranks had.

    Attributes:
        gradients, samples: of each rank in the world.
        earlier: samples of each rank in the first call.
        members: ranks of the group.
        rank: this one.
    """

    gradients: list[torch.Tensor]
    samples: tuple[int, ...]
    earlier: tuple[int, ...]
    members: list[int]
    rank: int

    @property
    def mine(self) -> torch.Tensor:
        """Return this rank's own gradients."""
        return self.gradients[self.rank]

    @property
    def plain(self) -> torch.Tensor:
        """Return the sum of the group's gradients."""
        return sum(self.gradients[r] for r in self.members)

    @property
    def weighted(self) -> torch.Tensor:
        """Return the sum of the group's gradients, each as often as it has samples."""
        return sum(self.samples[r] * self.gradients[r] for r in self.members)

    @property
    def total(self) -> int:
        """Return the number of the group's samples."""
        return sum(self.samples[r] for r in self.members)


#: Of a call of an answer: what likely mistakes give.
WrongGradients = Callable[[GradientCall], Iterator[Mistake]]


def _judge_gradients(
    ranks: Ranks, report: Report, cases: list[dict[str, Any]], mistakes: WrongGradients
) -> None:
    """Judge an answer that averages gradients, call by call, on each rank of each group."""

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        for call, outcome in zip(_gradient_calls(answer), answer.value, strict=True):
            yield from _gradient_steps(call, outcome, mistakes(call), answer.case["weighted"])

    judge_groups(ranks, report, probe_average, cases, judge, _counts)


def _gradient_calls(answer: GroupAnswer) -> Iterator[GradientCall]:
    """Yield the calls of the answer on a rank."""
    counts = _of_calls(answer.case, "counts")
    length = _gradient_length(answer.case["sizes"])
    for k, samples in enumerate(counts):
        gradients = [
            _gradient(given["seed"] + 10 * k, count)[:length]
            for given, count in zip(answer.case["each"], samples, strict=True)
        ]
        yield GradientCall(gradients, samples, counts[0], answer.members, answer.rank)


def _gradient_steps(
    call: GradientCall, outcome: dict[str, Any], likely: Iterator[Mistake], weighted: bool
) -> Iterator[Step]:
    """Yield what a rank has to communicate, and what its gradients are afterwards."""
    count, members = outcome["count"], call.members
    yield communication(outcome["calls"], *_rules(members))
    yield facts({
        "a parameter without gradient got one: leave it alone": outcome["others"],
        "the parameters have changed: average parameter.grad, not the values": outcome["moved"],
        "some all_reduces are of fewer bytes than the gradients have: reduce each whole gradient, "
        "in its own type": _reduces_less(outcome),
    })  # fmt: skip
    expected = (call.weighted / call.total).tolist()
    mistakes = itertools.chain(likely, replicas.multiple(outcome["gradient"], expected))
    where = on(members) + weighted * f", {_samples(call.samples)}"
    yield value(outcome["gradient"], expected, mistakes, what=where)
    why = ": one for each parameter that has a gradient" + weighted * ", and one for the samples"
    yield communication(
        outcome["calls"], made("all_reduce", range(count, count + weighted + 1), why)
    )


def _reduces_less(outcome: dict[str, Any]) -> bool:
    """Return whether there are as many all_reduces as gradients, and one has fewer bytes."""
    count = outcome["count"]
    reduced = sorted((call["nbytes"] for call in outcome["calls"]), reverse=True)[:count]
    if len(reduced) < count:
        return False
    pairs = zip(reduced, outcome["nbytes"], strict=True)
    return any(nbytes < needed for nbytes, needed in pairs)


def _of_calls(case: dict[str, Any], name: str) -> list[tuple]:
    """Return of each call of the answer what every rank was told by this name."""
    return list(zip(*(one[name] for one in case["each"]), strict=True))


def _counts(case: dict[str, Any]) -> str:
    """Return the samples of the last call, in words."""
    return _samples(_of_calls(case, "counts")[-1])


def _samples(counts: Sequence[int]) -> str:
    """Return in words how many samples each rank had."""
    return f"ranks 0 to 3 had {', '.join(map(str, counts))} samples"


@task("3.1", "average the gradients", points=3)
def average_gradients(ranks: Ranks, report: Report) -> None:
    """The mean of the group's gradients, by one all_reduce per parameter that has one."""
    cases = [_gradient_case(report, partition, [[1] * WORLD] * CALLS) for partition in EVERYWHERE]
    _judge_gradients(ranks, report, cases, _wrong_averages)


def _gradient_case(
    report: Report, partition: Partition, counts: list[list[int]], weighted: bool = False
) -> dict[str, Any]:
    """Return arguments of `probe_average` with fresh seeds.

    Args:
        counts: of each call the samples of all ranks.
    """
    each = to_each(seed=report.seeds(WORLD), counts=list(zip(*counts, strict=True)))
    given = {"partition": partition, "weighted": weighted, "sizes": _sizes(report.seed)}
    return given | {"each": each}


def _wrong_averages(call: GradientCall) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""
    p, mine, total = len(call.members), call.mine, call.plain
    yield from table({
        "the gradients are this rank's own, unchanged: all_reduce each parameter.grad, and store "
        "the result there": mine,
        f"the gradients are the sum over {p} ranks: divide by the number of ranks, and store the "
        "result in parameter.grad": total,
        f"the sum was divided by {WORLD}, the size of the world; this group has {p} ranks: "
        "dist.get_world_size(group)": total / WORLD,
        f"the gradients were divided by {p} twice": total / p**2,
        "the gradients were divided, but never summed over ranks": mine / p,
        "the gradients were cut to whole numbers": (total / p).trunc(),
        "these are the largest of all ranks: op=dist.ReduceOp.SUM":
            torch.stack([call.gradients[r] for r in call.members]).amax(0),
    })  # fmt: skip


@task("3.2", "average over unequal parts", points=3)
def average_gradients_weighted(ranks: Ranks, report: Report) -> None:
    """The gradient of the mean over all samples of the group."""
    cases = []
    for step, partition in enumerate([*EVERYWHERE, *WITH_EMPTY]):
        empty, seeds = step >= len(EVERYWHERE), [2 * (report.seed + step) - k for k in (1, 0)]
        counts = [_sample_counts(seed, empty) for seed in seeds]
        cases.append(_gradient_case(report, partition, counts, weighted=True))
    _judge_gradients(ranks, report, cases, _wrong_weighted)


def _sample_counts(seed: int, empty: bool) -> list[int]:
    """Samples of each rank, all different, for odd seeds up to 350,000; none on rank 1 if asked."""
    order = torch.randperm(WORLD, generator=torch.Generator().manual_seed(seed)).tolist()
    scale = 9_000 + 37 * (seed % 700) if seed % 2 else 1
    counts = [scale * (1, 3, 6, 10)[k] + 10 * (seed % 3) for k in order]
    return [0 if empty and rank == 1 else count for rank, count in enumerate(counts)]


def _wrong_weighted(call: GradientCall) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""
    p, n, mine, plain = len(call.members), call.samples[call.rank], call.mine, call.plain
    weighted, total = call.weighted, call.total
    yield from table({
        "this is the mean of the ranks' means: a rank with few samples counts as much as one with "
        "many. Weight each gradient by samples / all samples": plain / p,
        "weighted by samples, but never divided by the number of all samples": weighted,
        f"weighted by samples, then divided by the {p} ranks: divide by the samples of all":
            weighted / p,
        f"weighted by samples / all samples, and divided by the {p} ranks once more":
            weighted / total / p,
        "divided by the samples of the whole world: count them with group=group":
            weighted / sum(call.samples),
        "divided by the samples of an earlier call: count them in each call":
            weighted / sum(call.earlier[r] for r in call.members),
        "this is the plain sum over the ranks: weight each gradient before. (samples / total is "
        "1 where the total is this rank's own: all_reduce it)": plain,
        "divided by the samples of all, but not weighted by samples before": plain / total,
        "weighted after the sum, so that every gradient in it has this rank's weight: scale this "
        "rank's own gradient first, then all_reduce": plain * n / total,
        "weighted, but never summed over ranks": mine * n / total,
        "the gradients are this rank's own, unchanged: store the result in parameter.grad": mine,
        "the gradients were cut to whole numbers": (weighted / total).trunc(),
    })  # fmt: skip


# -- metrics: 3.3 -----------------------------------------------------------------------------


@in_group
def probe_metrics(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, parts: list
) -> list[dict]:
    """`global_metrics` on this rank's sums, once for each call."""
    function, answers = answer_named(user_ns, "global_metrics"), []
    for sums in parts:
        result, calls = recorded(function, *sums, **keywords(partition, group))
        pair = isinstance(result, tuple | list)
        kinds = [type(number).__name__ for number in (result if pair else [result])]
        floats = pair and all(isinstance(number, float) for number in result)
        answers.append({"result": told(result), "kinds": [] if floats else kinds, "calls": calls})
    return answers


@task("3.3", "loss and accuracy over all ranks", points=2)
def global_metrics(ranks: Ranks, report: Report) -> None:
    """Sums and counts of all ranks by one all_reduce, then two divisions."""
    cases = []
    for step, partition in enumerate([*EVERYWHERE, *WITH_EMPTY]):
        empty, seeds = step >= len(EVERYWHERE), [2 * (report.seed + step) - k for k in (1, 0)]
        parts = zip(*(_parts(seed, empty) for seed in seeds), strict=True)
        cases.append({"partition": partition, "each": to_each(parts=list(parts))})

    def hint(case: dict[str, Any]) -> str:
        nothing = case["each"][1]["parts"][0][2] == 0
        return "rank 1 had no sample: its three numbers were zeros" if nothing else ""

    judge_groups(ranks, report, probe_metrics, cases, _metric_steps, hint)


def _metric_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a rank has to communicate and to return, call by call."""
    members = answer.members
    form = "the pair (mean loss, accuracy)"
    for parts, outcome in zip(_of_calls(answer.case, "parts"), answer.value, strict=True):
        calls, kinds = outcome["calls"], " and ".join(sorted(set(outcome["kinds"])))
        yield communication(calls, *_rules(members))
        expected = _means(*_summed(parts, members))
        mistakes = _wrong_metrics(parts, members, answer.rank)
        yield value(outcome["result"], expected, mistakes, what=on(members), form=form)
        no_floats = (
            f"the numbers are right, but returned as {kinds}: the task asks for a pair of two "
            "Python floats, .item() or .tolist() makes them"
        )
        yield facts({no_floats: kinds})
        yield communication(calls, made("all_reduce", 1, ", of a tensor with the three numbers"))


def _parts(seed: int, empty: bool) -> list[list]:
    """Sum of losses, correct answers, count of each rank; zeros on rank 1 if asked."""
    drawn = numbers(seed, WORLD, 2, low=1, high=90).tolist()
    pairs = zip(_sample_counts(seed, empty), drawn, strict=True)
    return [[n * (0.3 + a), int(n * b / 90), n] for n, (a, b) in pairs]


def _means(loss: float, correct: float, count: float) -> list[float]:
    """Return mean loss and accuracy of three sums; zeros without samples."""
    return [loss / max(count, 1), correct / max(count, 1)]


def _summed(parts: Sequence[list], members: list[int]) -> list[float]:
    """Return the three sums of a group."""
    return [sum(parts[r][k] for r in members) for k in range(3)]


def _wrong_metrics(parts: Sequence[list], members: list[int], rank: int) -> list[Mistake]:
    """Return what likely mistakes give."""
    p, mine = len(members), parts[rank]
    loss, correct, count = sums = _summed(parts, members)
    expected = _means(*sums)
    summed = [sum(_means(*parts[r])[k] for r in members) for k in (0, 1)]
    whole = sum(int(torch.tensor(parts[r][0])) for r in members)
    return table({
        "the two are swapped: return (mean loss, accuracy)": expected[::-1],
        "these are this rank's own means": _means(*mine),
        "these are means of the ranks' means: reduce the sums and the count, then divide":
            [summed[0] / p, summed[1] / p],
        "these are sums of the ranks' means: reduce the sums and the count, then divide": summed,
        "these are the sums: divide by the number of samples of all ranks": [loss, correct],
        "divided by the number of ranks, not of samples": [loss / p, correct / p],
        "divided by this rank's count: reduce the count, too": _means(loss, correct, mine[2]),
        "only the count was reduced: the sums, too": _means(*mine[:2], count),
        "the accuracy is a share, not in percent": [expected[0], 100 * expected[1]],
        "the losses were cut to whole numbers: make a tensor of floats":
            _means(whole, correct, count),
        "these are the three sums: divide, and return (mean loss, accuracy)": sums,
        "return two numbers only, (mean loss, accuracy)": [*expected, count],
    })  # fmt: skip


# -- a step: 3.4 ------------------------------------------------------------------------------

KINDS = {
    "plain": "",
    "tied": "two tied weights, ",
    "frozen": "a frozen parameter, ",
    "unused": "a parameter that is not used, ",
    "double": "double precision, ",
}
# Groups, model, samples of each minibatch. Last what could hide another mistake: an empty part.
STEPS = [
    *((partition, "plain", [8, 5]) for partition in EVERYWHERE),
    *((PARTITIONS[1], kind, [8, 7]) for kind in list(KINDS)[1:]),
    *((partition, "plain", [3, 1]) for partition in PARTITIONS[:3]),
]


def _rate(seed: int) -> float:
    """Draw the learning rate."""
    return 0.4 + seed % 41 / 200


def _step_model(seed: int, kind: str) -> nn.Sequential:
    """Return the model that is trained."""
    model = replicas.net(seed, (6, 6, 6, 4) if kind == "tied" else _sizes(seed))
    if kind == "frozen":
        model[1].bias.requires_grad_(False)
    elif kind == "tied":
        model[3].weight = model[1].weight
    elif kind == "unused":
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model.double() if kind == "double" else model


def _minibatch(seed: int, number: int, count: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a minibatch of a rank's own samples."""
    dtype = torch.float64 if kind == "double" else torch.float32
    return replicas.samples(seed + number, count, dtype)


@in_group
def probe_steps(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    seed: int,
    kind: str,
    counts: list,
) -> list[dict]:
    """`train_step` on one minibatch after the other; ``own`` is the seed of this rank's samples."""
    model = _step_model(seed, kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=_rate(seed))
    given = answer_named(user_ns, "train_step"), model, replicas.watched(model), optimizer
    batches = [_minibatch(own, number, count, kind) for number, count in enumerate(counts)]
    named = keywords(partition, group)
    return [replicas.taken(*given, batch, **named) for batch in batches]


ALONE = "each replica went its own way: average the gradients between backward and step"
STEP_MISTAKES = {
    "still": "the replica has not moved: optimizer.step()",
    "own": ALONE,
    "own of the sum": ALONE,
    "means": "a mean of the ranks' means: weight by the number of samples",
    "summed": "the gradients were summed, but not divided",
    "kept": "the gradients of the step before were still there: optimizer.zero_grad()",
    "divided": "divided by the number of ranks once too often",
    "sum over samples": "this is the gradient of a sum over the samples, not of the mean",
    "sum over the part": "the loss is a sum over the part, and then a mean over the ranks",
}
LOSS_MISTAKES = {
    "nan": "nan: a mean over no samples is 0 / 0, and one nan spoils every sum",
    "own": "that of this rank's part; expected that of the whole minibatch",
    "own of the sum": "the sum over this rank's part; expected the mean over the whole minibatch",
    "sum over samples": "a sum over the samples: divide by their number",
    "own of all": "this rank's share of it: reduce it over the group",
    "means": "the mean of the ranks' means: reduce sum and number of samples",
    "summed": "the sum of the ranks' means",
    "afterwards": "that after the step; expected the one before it",
}


@task("3.4", "one data-parallel step", points=4)
def train_step(ranks: Ranks, report: Report) -> None:
    """The step of the sequential twin, at 1 to 4 ranks and on awkward minibatches and models."""
    names = ("partition", "kind", "counts")
    seeds = report.seeds(WORLD)  # a rank has right samples in its own part of a minibatch only
    given = {"seed": report.seed, "each": to_each(own=seeds)}
    cases = [dict(zip(names, step, strict=True), **given) for step in STEPS]

    def hint(case: dict[str, Any]) -> str:
        if 1 in case["counts"]:
            return "that was a minibatch of 1 sample, or of 3: some ranks have none"
        words = KINDS[case["kind"]].rstrip(", ")
        return words and f"that was a model with {words}"

    for case, members, values in tried(ranks, report, probe_steps, cases, hint):
        _judge_steps(report, case, members, values)


def _judge_steps(
    report: Report, case: dict[str, Any], members: list[int], values: list[list[dict]]
) -> None:
    """Compare a group's steps with the twin's, until the replicas go another way."""
    kind = case["kind"]
    seeds = [case["each"][rank]["own"] for rank in members]
    twin = Twin(_step_model(case["seed"], kind), _rate(case["seed"]))
    for number, count in enumerate(case["counts"]):
        steps = [of_rank[number] for of_rank in values]
        batch = replicas.composed([_minibatch(seed, number, count, kind) for seed in seeds], steps)
        where = f"{KINDS[kind]}minibatch of {count} {on(members)}"
        group_step = GroupStep(members, steps, twin, batch, where)
        mistakes, around = (STEP_MISTAKES, LOSS_MISTAKES), functools.partial(_around, members)
        if not replicas.judge_step(report, group_step, mistakes, around):
            return
        for place, rank in enumerate(members):
            report.facts(rank, _wrong_demands(group_step, place))
        twin.step(*batch)


def _around(members: list[int], step: dict[str, Any], compared: Iterator[Step]) -> Iterator[Step]:
    """Yield what a rank has to do beside the right step."""
    yield communication(step["calls"], *_rules(members))
    by_hand = (
        "the weights have moved, but optimizer.step() of the optimizer handed in was called "
        f"{step['steps']} times: call it once"
    )
    yield facts({by_hand: step["moved"] and step["steps"] != 1})
    yield from compared
    least = step["gradients"] + 1
    why = ": one for each gradient, one for the loss, perhaps one for the number of samples"
    yield communication(step["calls"], made("all_reduce", (least, least + 1), why))


def _wrong_demands(group_step: GroupStep, place: int) -> dict[str, bool]:
    """Return which demands the part and the gradients of a right step do not meet."""
    steps, where, p = group_step.steps, group_step.where, len(group_step.members)
    parameters = group_step.twin.model.parameters()
    trained = sum(parameter.grad is not None for parameter in parameters)
    count = sum(len(part) for step in steps for part in step["passes"])
    part = sorted(itertools.chain(*steps[place]["passes"]))
    other = part != list(range(place, count, p))
    return {
        f"{where}: its part was {part}: take [r::p], every {p}th sample": other,
        f"{where}: a parameter that is not used got a gradient; momentum and weight decay "
        "would move it: leave None": steps[place]["gradients"] > trained,
    }


# -- the run: 3.5 -----------------------------------------------------------------------------


TAKE = {
    "trained": "train_step(…, group) takes this rank's part of each minibatch",
    "tested": "In each epoch give test_sums this rank's part, images[part] and labels[part], and "
    "reduce the sums",
}


def _all_groups_right(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Sequence[dict[str, Any]],
    judge: Callable[[dict[str, Any], list[int], list[Any]], bool],
) -> bool:
    """Ask a probe made by `in_group`; return whether all groups were right in all cases.

    Args:
        judge: of a case, the ranks of a group, and what the probe told on each of them, whether
            all is right. The first group with a problem is the last that is judged.
    """
    judged = 0
    for case, members, values in tried(ranks, report, probe, cases):
        if not judge(case, members, values):
            return False
        judged += 1
    # An answer that raised an error ends the cases early.
    return judged == sum(len(case["partition"] or ["all ranks"]) for case in cases)


@task("3.5", "the same result as the sequential run", points=2)
def same_result(ranks: Ranks, report: Report) -> None:
    """`train_parallel` on a few images, then the histories of the run and what was trained."""
    # Groups of 4, of 2, of 3 and 1 ranks; a training takes too long for more. Where the parts are
    # not of the same size, rank 0 has the largest one: it alone has an odd seed.
    seeds = [2 * seed + (rank == 0) for rank, seed in enumerate(report.seeds(WORLD))]
    given = {"each": to_each(seed=seeds)}
    cases = [{"partition": partition} | given for partition in (None, *PARTITIONS[1:3])]

    def judge(_, members: list[int], values: list[dict[str, Any]]) -> bool:
        return _trains_alike(report, [seeds[rank] for rank in members], members, values)

    if _all_groups_right(ranks, report, training.probe_training, cases, judge):
        training.judge_run(ranks, report)


def _trains_alike(
    report: Report, seeds: list[int], members: list[int], values: list[dict[str, Any]]
) -> bool:
    """Judge the trainings of a group; return whether they and the twin's are alike."""
    if not training.tell_each(report, _no_shares(members, values)):
        return False
    epochs = training.composed(seeds, values)
    twin = training.history_of_twin(epochs)
    right = []
    for place, rank in enumerate(members):
        part = slice(place, None, len(members))
        steps = _history_steps(values[place], members, twin, epochs, part)
        right.append(report.follow(rank, steps))
    return all(right) and training.tell_each(report, _unequal_shares(members, values))


@dataclass(frozen=True)
class Shares:
    """How a group has shared images.

    Attributes:
        kind: what they are for, "trained" or "tested".
        taken: how many each rank took, in all epochs.
        wanted: how many the group has to take.
    """

    kind: str
    taken: list[int]
    wanted: int

    @property
    def all_on_each(self) -> bool:
        """Return whether each of several ranks took all images."""
        return len(self.taken) > 1 and min(self.taken) >= self.wanted

    @property
    def apart(self) -> bool:
        """Return whether parts differ by more than a minibatch in an epoch."""
        most = training.EPOCHS * training.MINIBATCH[self.kind]
        return max(self.taken) - min(self.taken) > most

    @property
    def too_few_tests(self) -> bool:
        """Return whether images were not tested."""
        return self.kind == "tested" and sum(self.taken) < self.wanted

    def problem(self, members: list[int]) -> str:
        """Return in words what is wrong, if something is."""
        how = "too few in all epochs together"
        if self.apart or sum(self.taken) > self.wanted:
            how = "unequal parts"
        if self.all_on_each:
            how = "every rank takes all images"
        of_all = f"{self.taken} of {self.wanted} were {self.kind}"
        return f"{on(members)}: {how}: {of_all}. {TAKE[self.kind]}"


def _shares(members: list[int], values: list[dict[str, Any]]) -> list[Shares]:
    """Return how a group has shared the images of each kind."""
    return [
        Shares(kind, [len(of_rank[kind]) for of_rank in values], training.EPOCHS * count)
        for kind, count in training.few(len(members)).items()
    ]


def _no_shares(members: list[int], values: list[dict[str, Any]]) -> dict[str, bool]:
    """Return what makes all else wrong: all images on each rank, or too few tests."""
    return {
        shares.problem(members): shares.all_on_each or shares.too_few_tests
        for shares in _shares(members, values)
    }


def _unequal_shares(members: list[int], values: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether an image was on no rank or on several, or parts differ by a minibatch."""
    return {
        shares.problem(members): shares.apart or sum(shares.taken) != shares.wanted
        for shares in _shares(members, values)
    }


def _history_steps(
    outcome: dict[str, Any], members: list[int], twin: dict, epochs: list, part: slice
) -> Iterator[Step]:
    """Yield what a rank's history has to be, and how the model was trained."""
    history, calls = outcome["history"], outcome["calls"]
    got = sorted(history) if isinstance(history, dict) else history
    form = 'train_parallel must return a dict with "loss", "test_loss" and "accuracy"'
    is_history = isinstance(history, dict) and set(history) == set(training.KEYS)
    yield facts({f"{form}; it returned {got}": not is_history})
    yield communication(calls, inside(members), some(members))
    for key, expected in twin.items():
        what = f'train_parallel on a few images {on(members)}: "{key}"'
        mistakes = training.wrong_histories(key, twin, epochs, part)
        tolerance = training.TOLERANCES[key]
        yield value(history[key], expected, mistakes, what=what, tolerance=tolerance)
    evaluates = (
        "the model was in evaluation mode when it was trained, so dropout and batch "
        "normalization would not train as they should: call model.train() after the test"
    )
    yield facts({evaluates: not outcome["in training mode"]})


# -- in sync: 3.6 -----------------------------------------------------------------------------

# Parameters of the model that is damaged.
PARAMETERS = ["1.weight", "1.bias (frozen)", "3.weight", "3.bias", "5.weight", "5.bias"]
SUBTLE = {
    "swap": "two weights are swapped on one rank, so that all sums agree",
    "checksum": "four weights in a row differ in their last bits on one rank, so that sums of the "
    "bits agree, also if each counts k times at place k",
    "opposite": "one weight is larger by 1 on one rank and smaller by 1 on another",
    "one nan": "NaN on one rank only",
    "nan": "NaN at the same place on all ranks: NaN is not equal to itself, but its bits are",
    "signs": "one weight has the other sign on every second rank, so that a sum of the bits wraps",
    "many": "256 weights of 3.weight differ in their last bits on one rank, so that a count of "
    "them in 8 bits is 0",
    "zero": "0.0 on one rank and -0.0 on another, equal as numbers, but the bits differ",
    "none": "identical replicas",
}
# Every parameter in turn, and every rank. So many are sound that nobody guesses which.
DAMAGES = ["none", *map(str, range(len(PARAMETERS))), *SUBTLE, *["none"] * 6]


@in_group
def probe_sync(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, damages: list[list]
) -> list[dict]:
    """`replicas_in_sync` on replicas that may differ: one dict for each time.

    damages: what is done to this rank's replica each time, see :func:`_damages`.
    """
    function, answers = answer_named(user_ns, "replicas_in_sync"), []
    for damage in damages:
        first, *middle, last = _sizes(seed)  # 3.weight has more than 256 numbers
        model = replicas.net(seed, (first, *(width + 10 for width in middle), last))
        model[1].bias.requires_grad_(False)
        if partition is None:
            in_double(model)
        model.register_buffer("mean", torch.full((3,), float(rank)))  # a buffer, not a parameter
        _damage(model, *damage)
        before = replicas.weights_of(model).view(torch.int32)
        result, calls = recorded(function, model, **keywords(partition, group))
        changed = not torch.equal(before, replicas.weights_of(model).view(torch.int32))
        kind = result if isinstance(result, bool) else f"<{type(result).__name__}>"
        answers.append({"result": kind, "changed": changed, "calls": calls})
    return answers


def _damage_of(damage: str, place: int, size: int, seed: int) -> list:
    """What is done to the replica at a place of a group: how, which parameter, where in it.

    "" is nothing: who is told so cannot know whether another replica is damaged.
    """
    count, last = len(PARAMETERS), place == size - 1
    which = int(damage) if damage.isdigit() else seed % count
    if damage == "many":
        which = PARAMETERS.index("3.weight")
    if damage.isdigit():
        how = "last bit" if place == (which + seed) % size else ""
    elif damage == "opposite":
        how = "larger" if place == 0 else "smaller" if last else ""
    elif damage == "signs":
        how = "other sign" if place % 2 else ""
    elif damage == "zero":
        how = "-0.0" if last else "0.0"
    else:
        how = damage if damage == "nan" or (damage != "none" and last) else ""
    return [how, which, _spot(damage, size, seed)]


def _spot(damage: str, size: int, seed: int) -> int:
    """Which weight of the parameter: over all groups its last one (-1), its first one, another."""
    return (-1, 0, seed // 7)[(int(damage) + size) % 3] if damage.isdigit() else seed // 7


@torch.no_grad()
def _damage(model: nn.Module, how: str, which: int, at: int) -> None:
    """Change a parameter of a replica; see `_damage_of`."""
    row = list(model.parameters())[which].view(-1)
    k = at % len(row)
    if how in ("swap", "checksum"):
        k = at % (len(row) - 3)
    if how == "last bit":
        row[k] = torch.nextafter(row[k], row.new_tensor(9.0))
    elif how in ("-0.0", "0.0", "nan", "one nan"):
        row[k] = float(how.removeprefix("one "))
    elif how == "checksum":
        bits = row.view(torch.int64 if row.dtype == torch.float64 else torch.int32)
        bits[k : k + 4] += torch.tensor([1, -3, 3, -1], dtype=bits.dtype)
    elif how == "many":
        row[:256] = torch.nextafter(row[:256], row.new_tensor(9.0))
    elif how == "other sign":
        row[k] = -row[k]
    elif how == "swap":
        row[k : k + 2] = row[k : k + 2].flip(0).clone()
    elif how:
        row[k] += 1.0 if how == "larger" else -1.0


@task("3.6", "are the replicas in sync?", points=2)
def replicas_in_sync(ranks: Ranks, report: Report) -> None:
    """True exactly when the group's replicas agree bit by bit, and the same on all its ranks."""
    # In another order in each case: in a group of its own a rank sees all damages.
    draw, cases, orders = random.Random(report.seeds(1)[0]), [], []
    for partition in EVERYWHERE:
        order = draw.sample(range(len(DAMAGES)), len(DAMAGES))
        at = places(partition)
        damages = [[_damage_of(DAMAGES[k], *where, report.seed) for k in order] for where in at]
        each = to_each(damages=damages)
        orders.append(order)
        cases.append({"partition": partition, "seed": report.seed, "each": each})

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        outcomes = dict(zip(orders[cases.index(answer.case)], answer.value, strict=True))
        for k, damage in enumerate(DAMAGES):
            yield from _sync_steps(outcomes[k], answer.members, damage, report.seed)

    judge_groups(ranks, report, probe_sync, cases, judge)


def _sync_steps(
    outcome: dict[str, Any], members: list[int], damage: str, seed: int
) -> Iterator[Step]:
    """Yield what a rank has to communicate and to find, of replicas with this damage."""
    yield communication(outcome["calls"], inside(members), waited)
    yield facts({"the model was changed: compare with a copy": outcome["changed"]})
    expected = damage in ("none", "nan") or len(members) == 1
    no_bool = "return True or False, a Python bool: .item() makes one of a tensor"
    mistakes = [Mistake(lambda got: isinstance(got, str), no_bool)]
    what = f"{on(members)}: {_in_words(damage, members, seed)}"
    yield value(outcome["result"], expected, mistakes, what=what, form="True or False")
    yield communication(outcome["calls"], some(members))


def _in_words(damage: str, members: list[int], seed: int) -> str:
    """Return how the replicas of a group differ."""
    if not damage.isdigit():
        return SUBTLE[damage]
    which, size = int(damage), len(members)
    victim = members[(which + seed) % size]
    weight = {-1: "the last", 0: "the first"}.get(_spot(damage, size, seed), "one")
    return f"{weight} weight of {PARAMETERS[which]} differs in its last bit on rank {victim}"
