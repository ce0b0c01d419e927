"""Checks of trainings that continue: from a saved state, and with fewer ranks.

A resumed training is compared with a training that never stopped. :class:`Job` is like the lab's
job. It draws random numbers in every step, its learning rate decays, and its momentum and its order
of samples continue after a stop, so a part that wasn't restored shows in the losses.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from utils.checks.comparison import Mistake, inside, only, some, table, waited
from utils.checks.probe import answer_named, kept, reading_answer, recorded
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import (
    WORLD,
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_groups,
    keywords,
    on,
    places,
)
from utils.cluster.questions import Ranks

SAMPLES, FEATURES, CLASSES, BATCH = 24, 6, 3, 8


def lists(tensors: Iterable[torch.Tensor]) -> list:
    """Return tensors as lists of numbers."""
    return [tensor.tolist() for tensor in tensors]


class Job:
    """A model with batch norm and dropout, SGD with momentum, a decaying rate, shuffled samples.

    Attributes:
        model, optimizer, schedule: as in the lab; the learning rate halves every fourth step.
        epoch, position: the sampler's shuffle, and how many of its samples were used.
        step: how many steps were taken.
    """

    def __init__(self, seed: int, draws: int):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        torch.default_generator.manual_seed(draws)
        first = nn.Linear(FEATURES, 8)
        rest = [nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)]
        self.model = nn.Sequential(first, *rest)
        decay = 0.01 + seed % 7 / 100
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.2, momentum=0.9, weight_decay=decay
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.5)
        self.epoch = self.position = self.step = 0

    def train_step(self) -> float:
        """Take one step, and return its loss."""
        if self.position + BATCH > SAMPLES:
            self.epoch += 1
            self.position = 0
        order = torch.Generator().manual_seed(self.epoch)
        batch = torch.randperm(SAMPLES, generator=order)[self.position : self.position + BATCH]
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.position += BATCH
        self.step += 1
        return loss.item()

    def nbytes(self) -> int:
        """Return the bytes of weights, momentum and random state, which every state contains."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return 2 * weights + torch.get_rng_state().nbytes

    def parts(self) -> dict[str, Any]:
        """Return everything that a resumed job must restore, as numbers."""
        momentum = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        return {
            "weights": lists(self.model.parameters()),
            "buffers": lists(self.model.buffers()),
            "momentum": [None if b is None else b.tolist() for b in momentum],
            "rate": [
                [group[name] for name in ("lr", "momentum", "weight_decay")]
                for group in self.optimizer.param_groups
            ],
            "schedule": self.schedule.last_epoch,
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "random": torch.get_rng_state().tolist(),
        }

    def lacking(self, parts: dict[str, Any]) -> list[str]:
        """Return the names of the parts in which this job differs."""
        return [name for name, part in self.parts().items() if part != parts[name]]


def file_of(state: Any) -> io.BytesIO:
    """Return a file in memory that contains the saved state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file


def through_a_file(state: Any) -> Any:
    """Return the state after saving and loading it.

    Raises:
        TypeError: the state contains objects that `torch.load` refuses.
    """
    file = file_of(state)
    file.seek(0)
    try:
        return torch.load(file)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise TypeError(
            f"torch.load refuses whole objects ({name[1] if name else 'of a class'}), which may "
            "run any code. Save what their state_dict() returns"
        ) from None


# -- 13.2: everything that belongs to a training run --------------------------------------------

BEFORE, AFTER = 5, 7
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


def probe_resume(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Run a training that never stops, and a training that resumes from its state."""
    capture, restore = (reading_answer(user_ns, name) for name in ("capture", "restore"))
    with torch.random.fork_rng(devices=[]):
        return _resumed(capture, restore, seed, seed + 1 + rank)


def _resumed(capture: Callable, restore: Callable, seed: int, draws: int) -> dict[str, Any]:
    """Return facts about the captured state and about the jobs restored from it."""

    def restored(state: dict) -> Job:
        job = Job(seed, 99)
        restore(job, state)
        return job

    unstopped = Job(seed, draws)
    expected = [unstopped.train_step() for _ in range(BEFORE + AFTER)]
    job = Job(seed, draws)
    losses = [job.train_step() for _ in range(BEFORE)]
    parts = job.parts()
    state = capture(job)
    if not isinstance(state, dict):
        return {"is state": False, "lacking": []}
    unchanged = job.parts() == parts
    small = len(file_of(state).getvalue()) < job.nbytes()
    at_once = copy.deepcopy(state)
    losses += [job.train_step() for _ in range(AFTER)]
    loaded = through_a_file(state)
    fresh = restored(loaded)
    lacking = fresh.lacking(parts)
    aliased = False
    if lacking:  # was the state right when it was captured?
        aliased = len(restored(through_a_file(at_once)).lacking(parts)) < len(lacking)
    resumed = [fresh.train_step() for _ in range(AFTER)]
    changed = restored(loaded).lacking(parts)
    fresh.train_step()
    kept("capture", state, lambda: capture(fresh))  # before the first state is restored again
    elsewhere = restored(loaded).lacking(parts)
    return {
        "is state": True,
        "small": small,
        "unchanged": unchanged and losses == expected,
        "lacking": lacking,
        "aliased": aliased,
        "changed": changed,
        "elsewhere": elsewhere,
        "resumed": resumed,
        "expected": expected[BEFORE:],
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
            report.judge(rank, result["resumed"], result["expected"], what=what, tolerance=0)


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


class Survivor:
    """A rank's job after another rank's death: weights, momentum, a step.

    Replicas at the same step are equal, and replicas at another step have other tensors.
    """

    def __init__(self, seed: int, step: int):
        generator = torch.Generator().manual_seed(seed + step)
        self.step = step
        self.asked: list[int] = []
        self._tensors = [
            torch.randn(n, generator=generator, dtype=kind)
            for kind in (torch.float32, torch.float64)
            for n in (5, 3, 4, 2)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights, then the momentum."""
        return self._tensors

    def go_to(self, step: int) -> None:
        """Set the sampler and the learning rate to this step."""
        self.asked.append(step)
        self.step = step


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


@in_group
def probe_agree(user_ns: dict, *, rank: int, group: Group, partition, seed: int, step: int) -> dict:
    """Return what a survivor has after `agree`; ranks at the same step have the same seed."""
    job = Survivor(seed, step)
    objects = [id(t) for t in job.tensors()]
    function = reading_answer(user_ns, "agree")
    _, calls = recorded(function, job, **keywords(partition, group))
    return {
        "tensors": lists(job.tensors()),
        "same objects": objects == [id(t) for t in job.tensors()],
        "step": job.step,
        "asked": job.asked,
        "calls": calls,
    }


@in_group
def probe_mean(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, samples: int
) -> dict:
    """Average gradients twice, with different numbers of samples on the ranks."""
    function = answer_named(user_ns, "mean_gradients")
    named = keywords(partition, group)
    model = _model(seed)
    _, first = recorded(function, _model(seed), samples + 7 * rank + 1, **named)
    _, calls = recorded(function, model, samples, **named)
    return {"gradient": _flat(model), "calls": calls, "calls again": first}


def _model(seed: int) -> nn.Module:
    """Return a model with the gradient of a rank's samples, drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


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
    gradients = [torch.tensor(_flat(_model(of_rank["seed"]))) for of_rank in given]
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
