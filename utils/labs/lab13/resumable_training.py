"""Checks of trainings that continue: from a saved state, and with fewer ranks.

A resumed training is compared with a training that never stopped, see :class:`.probes.Job`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import Mistake, inside, only, some, table, waited
from utils.checks.groups import Partition
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import WORLD, GroupAnswer, judge_groups, on, places
from utils.cluster.questions import Ranks

from .probes import Survivor, flat_gradient, lists, model_of, probe_agree, probe_mean, probe_resume

# -- 13.2: everything that belongs to a training run --------------------------------------------

_FORGOTTEN = {
    "weights": "The restored job has other weights. Save and load job.model's state_dict()",
    "buffers": "The restored job has other buffers, such as the means of a batch norm. Save "
    "model.state_dict(), because buffers aren't among the parameters",
    "momentum": "The restored job has another momentum, which is the velocity of each weight. Save "
    "and load optimizer.state_dict()",
    "rate": "The restored job has another learning rate, or another setting of the optimizer. Save "
    "and load optimizer.state_dict()",
    "schedule": "The schedule counts from another step, so the next decay comes at another time. "
    "Save and load schedule.state_dict()",
    "epoch": "The sampler is in another epoch and shuffles differently. Save and load job.epoch",
    "position": "The sampler starts at another position of its epoch, so the job sees some samples "
    "twice and others never. Save and load job.position",
    "step": "The restored job counts from another step. Save and load job.step",
    "random": "The random numbers continue differently, so dropout drops other neurons. Save "
    "torch.get_rng_state(), and let torch.set_rng_state(…) be the last line of restore",
}


@task("13.2", "everything that belongs to a training run", points=4)
def resume(ranks: Ranks, report: Report) -> None:
    """Judge whether the resumed training has the losses of the unstopped one, bit for bit."""
    for answer in report.answers(ranks, probe_resume, seed=report.seed):
        rank = answer.rank
        result = answer.value
        if not report.follow(rank, _captured(result)):
            continue
        for name in result["lacking"]:
            report.problem(_FORGOTTEN[name], rank)
        if not result["lacking"]:
            report.follow(rank, _restored_again(result))
            what = "the losses after resuming"
            losses = value(result["resumed"], result["expected"], what=what, tolerance=0)
            report.follow(rank, [losses])


def _captured(result: dict[str, Any]) -> Iterator[Step]:
    """Judge whether the state is a complete dict, and whether capturing changes nothing."""
    yield facts({"capture returned no dict. Return the state as a dict": not result["is state"]})
    yield facts({
        "capture changes the training, because it draws random numbers or sets something. Let it "
        "only read the job": not result["unchanged"],
        "The state is smaller than weights, momentum and random state together. Put all of them "
        "into the dict, so that a new process finds them": result["small"],
        "The state changed after capture, because state_dict() returns the weights themselves, "
        "and the training continued. Return a copy.deepcopy(…)": result["aliased"],
    })


def _restored_again(result: dict[str, Any]) -> Iterator[Step]:
    """Judge whether the same state gives the same job a second time."""
    for name in result["changed"]:
        yield facts({
            f"A second job that was restored from the same state has another {name}, because the "
            "first job's training changed the state. Restore from copy.deepcopy(state): an "
            "optimizer keeps the momentum tensors that it gets": True
        })
    for name in result["elsewhere"]:
        yield facts({
            f"After another capture, the first state gives a job with another {name}, because "
            "capture keeps a part elsewhere, such as in a global name. Put all into the dict": True
        })


# -- 13.6: with the survivors -----------------------------------------------------------------

PARTITIONS = ([[0, 1, 2], [3]], [[1, 3], [0, 2]], None)


def _steps(seed: int, p: int, ahead: bool) -> list[int]:
    """Return each survivor's step; of three or more, the first is neither ahead nor behind.

    Args:
        ahead: put all ranks except one at the furthest step, which float32 can't represent.
    """
    draw = random.Random(seed * 8 + p)
    base = draw.randrange(3, 30)
    if ahead:
        return [2**24 + base // 2 * 2 + (place != 1) for place in range(p)]
    rest = [0, 2, 2][: p - 1]
    draw.shuffle(rest)
    return [base + more for more in [1, *rest][:p]]


@task("13.6", "continue with fewer ranks", points=4)
def survive(ranks: Ranks, report: Report) -> None:
    """Judge the state that the survivors agree on, and gradients weighted by samples."""
    cases = [_agree_case(report, partition) for partition in PARTITIONS]
    cases.append(_agree_case(report, None, ahead=True))
    if not judge_groups(ranks, report, probe_agree, cases, _agreed):
        return
    draw = random.Random(report.seeds(1)[0])
    shares = [draw.randrange(5, 40) for _ in range(WORLD)]
    each = to_each(seed=report.seeds(WORLD), samples=shares)
    cases = [{"partition": partition, "each": each} for partition in PARTITIONS]
    judge_groups(ranks, report, probe_mean, cases, _mean)


def _agree_case(report: Report, partition: Partition, ahead: bool = False) -> dict:
    """Return a case: each survivor's step, and the seed that all ranks at this step share."""
    at = places(partition)
    (of_steps,) = report.seeds(1)
    steps = [_steps(of_steps, p, ahead)[place] for place, p in at]
    of_states = dict(zip(sorted(set(steps)), report.seeds(WORLD), strict=False))
    each = to_each(step=steps, seed=[of_states[step] for step in steps])
    return {"partition": partition, "each": each}


def _agreed(answer: GroupAnswer) -> Iterator[Step]:
    result = answer.value
    members = answer.members
    where = on(members)
    arguments = [answer.case["each"][rank] for rank in members]
    steps = [of_rank["step"] for of_rank in arguments]
    most = max(steps)
    survivors = [Survivor(of_rank["seed"], of_rank["step"]) for of_rank in arguments]
    states_by_step = {job.step: lists(job.tensors()) for job in survivors}
    mistakes = _wrong_states(steps, states_by_step, answer.place)
    what = f"{where}: weights and momentum"
    yield communication(result["calls"], inside(members), waited)
    yield value(result["tensors"], states_by_step[most], mistakes, what=what)
    yield facts({
        f"{where}: job.tensors() are near the furthest rank's tensors, but not bit for bit equal. "
        "Send them as they are, in float64 too": result["tensors"] != states_by_step[most],
        f"{where}: job.tensors() has other tensors now. Fill the tensors that are there, as "
        "broadcast does": not result["same objects"],
        f"{where}: You called job.go_to(step) with {result['asked']}. Call it with {most} on every "
        "rank, for the sampler and the learning rate": result["asked"][-1:] != [most],
    })
    yield communication(result["calls"], some(members))


def _wrong_states(
    steps: list[int], states_by_step: dict[int, list], place: int
) -> Iterator[Mistake]:
    state = states_by_step[steps[place]]
    right = states_by_step[max(steps)]
    half = len(right) // 2
    columns = zip(*(states_by_step[step] for step in steps), strict=True)
    means = [
        [sum(numbers) / len(steps) for numbers in zip(*tensors, strict=True)] for tensors in columns
    ]
    yield from table({
        "You left this rank's tensors unchanged. Fill them from a rank with the largest step": state
        if steps[place] > min(steps)
        else None,
        "You took the state of the smallest step, which throws away an update that some ranks "
        "have. Take the state of the largest step": states_by_step[min(steps)],
        "You sent the weights, but the momentum is still this rank's. Send all of job.tensors()": (
            right[:half] + state[half:]
        ),
        "You averaged over the ranks, but states of two steps don't mix. Take the tensors of one "
        "rank with the largest step": means,
        "You took the state of the group's first rank, which isn't the furthest. Send from a "
        "rank with the largest step": states_by_step[steps[0]],
    })


def _mean(answer: GroupAnswer) -> Iterator[Step]:
    result = answer.value
    members = answer.members
    given = [answer.case["each"][rank] for rank in members]
    shares = [of_rank["samples"] for of_rank in given]
    gradients = [torch.tensor(flat_gradient(model_of(of_rank["seed"]))) for of_rank in given]
    weighted = sum(n * gradient for n, gradient in zip(shares, gradients, strict=True))
    mistakes = _wrong_means(gradients, shares, answer.place)
    rules = (only("all_reduce"), inside(members), waited)
    yield communication(result["calls"] + result["calls again"], *rules)
    yield value(
        result["gradient"],
        (weighted / sum(shares)).tolist(),
        mistakes,
        what=f"{on(members)}, with {shares} samples: the gradient",
        form="nothing, and change the gradients in place",
        tolerance=1e-4,
    )
    for calls in (result["calls"], result["calls again"]):
        yield communication(calls, some(members))


def _wrong_means(gradients: list[torch.Tensor], shares: list[int], place: int) -> Iterator[Mistake]:
    p = len(shares)
    weighted = sum(n * gradient for n, gradient in zip(shares, gradients, strict=True))
    yield from table({
        "You left this rank's gradient unchanged. Average it over the ranks": gradients[place],
        "You weighted the gradients and summed them. Divide by the number of all samples": weighted,
        "You counted each rank the same, but the ranks have different numbers of samples. Weight "
        "each gradient by its samples": sum(gradients) / p,
        "You summed the gradients. Weight each by its samples, and divide": sum(gradients),
        "You divided by 4 ranks, but some are dead. Weight by samples": sum(gradients) / 4,
        "You divided by 4, the old number of ranks. Divide by all samples": weighted / 4,
        "You divided by 64, or by another old number of samples. Count them anew": weighted / 64,
        "You weighted, and divided by the number of ranks. Divide by all samples": weighted / p,
        "You divided by this rank's samples. Divide by all samples": weighted / shares[place],
        "You divided by all samples and by the number of ranks. Divide only by samples": weighted
        / sum(shares)
        / p
        if p > 1
        else None,
    })
