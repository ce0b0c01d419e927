"""Checks of lab 03: data parallel training, replicas in sync.

Each check calls the answer several times, on groups of 1, 2, 3 and 4 ranks
(`utils.checks.trials`).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from utils.checks.comparison import Mistake, inside, made, some, table, waited
from utils.checks.model import use_model as use_model
from utils.checks.probe import numbers
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import (
    EVERYWHERE,
    PARTITIONS,
    WORLD,
    GroupAnswer,
    judge_each_group,
    judge_groups,
    on,
    places,
)
from utils.cluster.questions import Ranks
from utils.labs.shared import small_models
from utils.labs.shared.replicas import GroupStep, GroupTraining, ReferenceModel

from . import training
from .gradients import average_gradients as average_gradients
from .gradients import average_gradients_weighted as average_gradients_weighted
from .gradients import of_calls, rules, sample_counts, unequal_calls
from .probes import (
    drawn_minibatch,
    probe_metrics,
    probe_steps,
    probe_sync,
    probe_training,
    rate_of,
    step_model,
)

# -- metrics: 3.3 -----------------------------------------------------------------------------


@task("3.3", "loss and accuracy over all ranks", points=2)
def global_metrics(ranks: Ranks, report: Report) -> None:
    """Check sums and counts of all ranks by one all_reduce, then two divisions."""
    cases = []
    for partition, seeds, empty in unequal_calls(report.seed):
        parts = zip(*(_parts(seed, empty) for seed in seeds), strict=True)
        cases.append({"partition": partition, "each": to_each(parts=list(parts))})

    diverged = [[[math.nan if rank == 2 else 1.0, 3, 5]] for rank in range(WORLD)]
    cases.append({"partition": None, "each": to_each(parts=diverged)})

    def hint(case: dict[str, Any]) -> str:
        nothing = case["each"][1]["parts"][0][2] == 0
        return "rank 1 had no samples, so its three numbers were zeros" if nothing else ""

    judge_groups(ranks, report, probe_metrics, cases, _metric_steps, hint)


def _metric_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's communication and result, call by call."""
    members = answer.members
    form = "the pair (mean loss, accuracy)"
    for parts, outcome in zip(of_calls(answer.case, "parts"), answer.value, strict=True):
        calls = outcome["calls"]
        yield communication(calls, *rules(members))
        if any(math.isnan(loss) for loss, *_ in parts):
            yield facts({
                "The loss of one rank was nan, and you returned another number. Let nan be nan, so "
                "that everybody sees it": not math.isnan(outcome["result"][0])
            })
            continue
        kinds = " and ".join(sorted(set(outcome["kinds"])))
        expected = _means(*_summed(parts, members))
        mistakes = _wrong_metrics(parts, members, answer.rank)
        yield value(outcome["result"], expected, mistakes, what=on(members), form=form)
        no_floats = (
            f"Your numbers are right, but you returned {kinds}. Return a pair of two Python "
            "floats: .item() or .tolist() makes them"
        )
        yield facts({no_floats: kinds})
        yield communication(calls, made("all_reduce", 1, ", of a tensor with the three numbers"))


def _parts(seed: int, empty: bool) -> list[list]:
    """Return each rank's sum of losses, correct answers and count; zeros on rank 1 if `empty`."""
    drawn = numbers(seed, WORLD, 2, low=1, high=90).tolist()
    pairs = zip(sample_counts(seed, empty), drawn, strict=True)
    return [[n * (0.3 + a), int(n * b / 90), n] for n, (a, b) in pairs]


def _means(loss: float, correct: float, count: float) -> list[float]:
    """Return mean loss and accuracy from three sums; zeros without samples."""
    return [loss / max(count, 1), correct / max(count, 1)]


def _summed(parts: Sequence[list], members: list[int]) -> list[float]:
    return [sum(parts[r][k] for r in members) for k in range(3)]


def _wrong_metrics(parts: Sequence[list], members: list[int], rank: int) -> list[Mistake]:
    p = len(members)
    mine = parts[rank]
    loss, correct, count = sums = _summed(parts, members)
    expected = _means(*sums)
    summed = [sum(_means(*parts[r])[k] for r in members) for k in (0, 1)]
    means = [summed[0] / p, summed[1] / p]
    whole = _means(sum(int(torch.tensor(parts[r][0])) for r in members), correct, count)
    return table({
        "You swapped the two. Return (mean loss, accuracy)": expected[::-1],
        "You returned this rank's means. Reduce the sums and the count": _means(*mine),
        "You returned means of the ranks' means. Reduce the sums "
        "and the count, and then divide": means,
        "You returned sums of the ranks' means. Reduce the sums "
        "and the count, and then divide": summed,
        "You returned the sums. Divide by the number of samples of all ranks": [loss, correct],
        "You divided by the number of ranks. Divide by the number of samples": [
            loss / p,
            correct / p,
        ],
        "You divided by this rank's count. Reduce the count, too": _means(loss, correct, mine[2]),
        "You reduced only the count. Reduce the sums, too": _means(*mine[:2], count),
        "Your accuracy is in percent. Return a share": [expected[0], 100 * expected[1]],
        "You cut the losses to whole numbers. Make a tensor of floats": whole,
        "You returned the three sums. Divide, and return (mean loss, accuracy)": sums,
        "Return only two numbers, (mean loss, accuracy)": [*expected, count],
    })


# -- a step: 3.4 ------------------------------------------------------------------------------

KINDS = {
    "plain": "",
    "tied": "two tied weights, ",
    "frozen": "a frozen parameter, ",
    "unused": "a parameter that is not used, ",
    "evaluating": "the mode eval(), ",
    "double": "double precision, ",
}
# Groups, model, and samples of each minibatch. Empty parts come last, as they could hide mistakes.
STEPS = [
    *((partition, "plain", [8, 5]) for partition in EVERYWHERE),
    *((PARTITIONS[1], kind, [8, 7]) for kind in list(KINDS)[1:]),
    *((partition, "plain", [3, 1]) for partition in PARTITIONS[:3]),
    *((PARTITIONS[0], kind, [3, 1]) for kind in ("frozen", "unused")),
]


ALONE = "Each replica took its own step. Average the gradients between backward and step"
STEP_MISTAKES = {
    "still": "The replica has not moved. Call optimizer.step()",
    "own": ALONE,
    "own of the sum": ALONE,
    "means": "You used the mean of the ranks' means. Weight each rank by its number of samples",
    "summed": "You summed the gradients, but you didn't divide them. "
    "Divide by the number of samples",
    "kept": "The gradients of the step before were still there. Call optimizer.zero_grad()",
    "divided": "You divided by the number of ranks once too often. Remove one division",
    "sum over samples": "You used the gradient of a sum over the samples. Use the mean",
    "sum over the part": "Your loss is a sum over the part, and then a mean over "
    "the ranks. Divide by all samples",
}
LOSS_MISTAKES = {
    "nan": "The loss is nan, because a mean over no samples is 0 / 0. Reduce sums instead",
    "own": "You returned the loss of this rank's part. Return the loss of the whole minibatch",
    "own of the sum": "You returned the sum over this rank's part. Return the whole mean",
    "sum over samples": "You returned a sum over the samples. Divide it by their number",
    "own of all": "You returned this rank's share of the loss. Reduce it over the group",
    "means": "You returned the mean of the ranks' means. Reduce the sum and the number of samples",
    "summed": "You returned the sum of the ranks' means. Reduce the sum and the number of samples",
    "afterwards": "You returned the loss after the step. Return the loss before it",
}


@task("3.4", "one data-parallel step", points=4)
def train_step(ranks: Ranks, report: Report) -> None:
    """Check that 1 to 4 ranks take the sequential step, even on awkward minibatches and models."""
    names = ("partition", "kind", "counts")
    seeds = report.seeds(WORLD)  # a rank has the right samples only in its part of a minibatch
    given = {"seed": report.seed, "each": to_each(data_seed=seeds)}
    cases = [dict(zip(names, step, strict=True), **given) for step in STEPS]

    def hint(case: dict[str, Any]) -> str:
        if 1 in case["counts"]:
            return "The minibatch had 1 sample, or 3, so some ranks have none"
        words = KINDS[case["kind"]].rstrip(", ")
        return words and f"The model had {words}"

    judge = functools.partial(_judge_steps, report)
    judge_each_group(ranks, report, probe_steps, cases, judge, hint)


def _judge_steps(
    report: Report, case: dict[str, Any], members: list[int], values: list[list[dict]]
) -> None:
    """Compare a group's steps with the reference model's, up to the first that differs."""
    kind = case["kind"]
    training = GroupTraining(
        reference=ReferenceModel(step_model(case["seed"], kind), rate_of(case["seed"])),
        members=members,
        steps=list(zip(*values, strict=True)),
        minibatches=[
            [
                drawn_minibatch(case["each"][rank]["data_seed"], number, count, kind)
                for rank in members
            ]
            for number, count in enumerate(case["counts"])
        ],
        where=[f"{KINDS[kind]}minibatch of {count} {on(members)}" for count in case["counts"]],
    )
    mistakes = (STEP_MISTAKES, LOSS_MISTAKES)
    around = functools.partial(_around, members)
    for group_step in training.right_steps(report, mistakes, around):
        for place, rank in enumerate(members):
            report.follow(rank, [facts(_wrong_demands(group_step, place))])


def _around(members: list[int], step: dict[str, Any], compared: Iterator[Step]) -> Iterator[Step]:
    """Yield the steps that judge a rank, with the comparison of the training step among them."""
    yield communication(step["calls"], *rules(members))
    by_hand = (
        "The weights have moved, but you called optimizer.step() of the given optimizer "
        f"{step['steps']} times. Call it once"
    )
    yield facts({
        by_hand: step["moved"] and step["steps"] != 1,
        small_models.SWITCHED: step["switched"],
    })
    yield from compared
    least = step["gradients"] + 1
    why = ": one for each gradient, one for the loss, perhaps one for the number of samples"
    yield communication(step["calls"], made("all_reduce", (least, least + 1), why))


def _wrong_demands(group_step: GroupStep, place: int) -> dict[str, bool]:
    """Return what is wrong with the part and the gradients of a right step."""
    steps = group_step.steps
    where = group_step.where
    p = len(group_step.members)
    parameters = group_step.reference.model.parameters()
    trained = sum(parameter.grad is not None for parameter in parameters)
    count = sum(len(part) for step in steps for part in step["passes"])
    part = sorted(itertools.chain(*steps[place]["passes"]))
    other = part != list(range(place, count, p))
    return {
        f"{where}: You used {part}. Use [r::p], every {p}th sample": other,
        f"{where}: A parameter that is not used got a gradient, so momentum and weight "
        "decay would move it. Leave its gradient None": steps[place]["gradients"] > trained,
    }


# -- the run: 3.5 -----------------------------------------------------------------------------


@task("3.5", "the same result as the sequential run", points=2)
def same_result(ranks: Ranks, report: Report) -> None:
    """Check `train_parallel` on a few images, then the run's histories and what was trained."""
    # Groups of 4, of 2, and of 3 and 1 ranks, because a training takes too long for more. Rank 0
    # alone has an odd seed, because it has the largest part if parts are unequal.
    seeds = [2 * seed + (rank == 0) for rank, seed in enumerate(report.seeds(WORLD))]
    given = {"each": to_each(seed=seeds)}
    cases = [{"partition": partition} | given for partition in (None, *PARTITIONS[1:3])]

    right: list[bool] = []  # for each group, until one is wrong

    def judge(_: dict[str, Any], members: list[int], values: list[Any]) -> None:
        if all(right):
            own = [seeds[rank] for rank in members]
            right.append(training.trains_alike(report, own, members, values))

    if judge_each_group(ranks, report, probe_training, cases, judge):
        training.judge_run(ranks, report)


# -- in sync: 3.6 -----------------------------------------------------------------------------

# Parameters of the model that is damaged.
PARAMETERS = ["1.weight", "1.bias (frozen)", "3.weight", "3.bias", "5.weight", "5.bias"]
SUBTLE = {
    "swap": "two weights are swapped on one rank, so that all sums agree",
    "checksum": "four weights in a row differ in their last bits on one rank, so that sums of the "
    "bits agree, even if the bits at index k count k times",
    "opposite": "one weight is larger by 1 on one rank and smaller by 1 on another",
    "one nan": "NaN on one rank only",
    "nan": "NaN at the same place on all ranks: NaN is not equal to itself, but its bits are",
    "signs": "one weight has the other sign on every second rank, so that a sum of the bits wraps",
    "many": "256 weights of 3.weight differ in their last bits on one rank, so that counting them "
    "in 8 bits gives 0",
    "zero": "0.0 on one rank and -0.0 on another, equal as numbers, but the bits differ",
    "none": "identical replicas",
}
# Every parameter and every rank are damaged in turn. Many replicas are sound, so that an answer
# can't guess.
DAMAGES = ["none", *map(str, range(len(PARAMETERS))), *SUBTLE, *["none"] * 6]


def _damage_of(damage: str, place: int, size: int, seed: int) -> list:
    """Return how to damage the replica with this group rank, which parameter, and where in it.

    "" damages nothing, so such a rank can't know whether another replica is damaged.
    """
    if damage.isdigit():
        which = int(damage)
        how = "last bit" if place == (which + seed) % size else ""
        return [how, which, _spot(which, size, seed)]
    which = PARAMETERS.index("3.weight") if damage == "many" else seed % len(PARAMETERS)
    return [_how(damage, place, last=place == size - 1), which, seed // 7]


def _how(damage: str, place: int, last: bool) -> str:
    ends = "smaller" if last else ""
    on_some = {
        "none": "",
        "nan": "nan",
        "opposite": "larger" if place == 0 else ends,
        "signs": "other sign" if place % 2 else "",
        "zero": "-0.0" if last else "0.0",
    }
    return on_some.get(damage, damage if last else "")


def _spot(which: int, size: int, seed: int) -> int:
    """Return which weight is damaged, which varies: the last one (-1), the first, or another."""
    return (-1, 0, seed // 7)[(which + size) % 3]


def _damage_in_words(damage: str, members: Sequence[int], seed: int) -> str:
    if not damage.isdigit():
        return SUBTLE[damage]
    which = int(damage)
    size = len(members)
    victim = members[(which + seed) % size]
    weight = {-1: "the last", 0: "the first"}.get(_spot(which, size, seed), "one")
    return f"{weight} weight of {PARAMETERS[which]} differs in its last bit on rank {victim}"


@task("3.6", "are the replicas in sync?", points=2)
def replicas_in_sync(ranks: Ranks, report: Report) -> None:
    """Check that all ranks get True exactly if the group's replicas agree bit by bit."""
    # Each case has a different order, because a rank alone in its group sees all damages.
    draw = random.Random(report.seeds(1)[0])
    for partition in EVERYWHERE:
        order = draw.sample(range(len(DAMAGES)), len(DAMAGES))
        at = places(partition)
        damages = [[_damage_of(DAMAGES[k], *where, report.seed) for k in order] for where in at]
        each = to_each(damages=damages)
        case = {"partition": partition, "seed": report.seed, "each": each}
        judge = functools.partial(_sync_steps, order)
        if not judge_groups(ranks, report, probe_sync, [case], judge):
            return


def _sync_steps(order: list[int], answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's communication and its verdict for each damage."""
    members = answer.members
    outcomes = dict(zip(order, answer.value, strict=True))
    no_bool = "Return True or False as a Python bool: .item() turns a tensor into one"
    mistakes = [Mistake(lambda got: isinstance(got, str), no_bool)]
    for k, damage in enumerate(DAMAGES):
        outcome = outcomes[k]
        yield communication(outcome["calls"], inside(members), waited)
        yield facts({"You changed the model. Compare with a copy": outcome["changed"]})
        expected = damage in ("none", "nan") or len(members) == 1
        what = f"{on(members)}: {_damage_in_words(damage, members, answer.case['seed'])}"
        yield value(outcome["result"], expected, mistakes, what=what, form="True or False")
        yield communication(outcome["calls"], some(members))
