"""Checks of trainings that go on: from a saved state, and with fewer ranks.

A resumed training is judged by a twin that was never stopped. :class:`Job` is like the lab's job.
It draws random numbers in every step, its learning rate decays, and its momentum and its order of
samples go on over a stop: what is not restored is seen.
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
        model, optimizer, schedule: what their names say; the rate halves every fourth step.
        epoch, position: of the sampler: which shuffle, and how many of its samples are used.
        step: how many steps were taken.
    """

    def __init__(self, seed: int, draws: int):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        torch.manual_seed(draws)
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
        """Take one step; return its loss."""
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
        """Return the bytes of weights, momentum and random state, which every state has to hold."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return 2 * weights + torch.get_rng_state().nbytes

    def parts(self) -> dict[str, Any]:
        """Return all that a resumed job must have back, as numbers."""
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
        """Return the names of those parts of this job that are not these."""
        return [name for name, part in self.parts().items() if part != parts[name]]


def file_of(state: Any) -> io.BytesIO:
    """Return a file that a state was saved in."""
    file = io.BytesIO()
    torch.save(state, file)
    return file


def through_a_file(state: Any) -> Any:
    """Return what comes back of a state that was saved.

    Raises:
        TypeError: it holds objects that `torch.load` does not make.
    """
    file = file_of(state)
    file.seek(0)
    try:
        return torch.load(file)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise TypeError(
            f"the state holds whole objects ({name[1] if name else 'of a class'}), which may run "
            "any code, so torch.load does not make them: save what their state_dict() returns"
        ) from None


# -- 13.2: all that a training is -------------------------------------------------------------

BEFORE, AFTER = 5, 7
_FORGOTTEN = {
    "weights": "the weights are not back: model.load_state_dict",
    "buffers": "the model's buffers are not back, such as the means of a batch norm: they are in "
    "model.state_dict(), and not among its parameters",
    "momentum": "the momentum is not back: each weight goes on with a velocity, which is in "
    "optimizer.state_dict()",
    "rate": "the learning rate is not that of this step, or another setting of the optimizer is "
    "not back: both are in its state",
    "schedule": "the schedule counts from another step, so the next decay comes at another time: "
    "schedule.state_dict()",
    "epoch": "the sampler is in another epoch, which has another order of samples: job.epoch",
    "position": "the sampler begins at another place of its epoch: some samples are seen twice, "
    "others never. job.position",
    "step": "job.step is not back",
    "random": "the random numbers go on differently, so dropout drops others: "
    "torch.get_rng_state() and torch.set_rng_state(…), the last thing to be restored",
}


def probe_resume(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Run a training that goes on, and one that goes on from its state."""
    capture, restore = (reading_answer(user_ns, name) for name in ("capture", "restore"))
    with torch.random.fork_rng(devices=[]):
        return _resumed(capture, restore, seed, seed + 1 + rank)


def _resumed(capture: Callable, restore: Callable, seed: int, draws: int) -> dict[str, Any]:
    """Return what is captured, and what is restored from it; draws: the seed of dropout."""

    def restored(state: dict) -> Job:
        job = Job(seed, 99)
        restore(job, state)
        return job

    twin = Job(seed, draws)
    expected = [twin.train_step() for _ in range(BEFORE + AFTER)]
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
    if lacking:  # was it right when it was taken?
        aliased = len(restored(through_a_file(at_once)).lacking(parts)) < len(lacking)
    resumed = [fresh.train_step() for _ in range(AFTER)]
    changed = restored(loaded).lacking(parts)
    fresh.train_step()
    kept("capture", state, lambda: capture(fresh))  # before the first state is used again
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


@task("13.2", "everything that a training is", points=4)
def resume(ranks: Ranks, report: Report) -> None:
    """Judge the losses of the resumed training by those of the twin, bit for bit."""
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
    """Judge whether the state is a dict with all of it, and capturing it changes nothing."""
    yield facts({"capture returned no dict: return the state, a dict": not result["is state"]})
    yield facts({
        "capture changes the training: it draws random numbers, or sets something. It has to "
        "look only": not result["unchanged"],
        "the state is smaller than weights, momentum and random state are: all of them have to "
        "be in the dict, or a new process does not find them": result["small"],
        "the state has changed since it was captured: state_dict() holds the weights "
        "themselves, not copies of them, and the training went on. "
        "copy.deepcopy(…)": result["aliased"],
    })


def _restored_again(result: dict[str, Any]) -> Iterator[Step]:
    """Judge whether the same state gives the same job once more."""
    for name in result["changed"]:
        yield facts({
            f"a second job restored from the same state has another {name}: the training of the "
            "first has changed the state. An optimizer keeps the momentum tensors that "
            "load_state_dict gives it, so restore from copy.deepcopy(state)": True
        })
    for name in result["elsewhere"]:
        yield facts({
            f"after another job was captured, the first state gives a job with another {name}: "
            "capture keeps something outside of the state, in a global name or an attribute. All "
            "of it has to be in the dict": True
        })


# -- 13.6: with those that live ---------------------------------------------------------------

PARTITIONS = ([[0, 1, 2], [3]], [[1, 3], [0, 2]], None)


class Survivor:
    """What a rank is left with after a death: weights, momentum, a step.

    Replicas of one step are equal; those of the next have moved on.
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
        """Return weights, then momentum."""
        return self._tensors

    def go_to(self, step: int) -> None:
        """Put sampler and learning rate to this step."""
        self.asked.append(step)
        self.step = step


def _steps(seed: int, p: int, ahead: bool) -> list[int]:
    """Return each survivor's step: of three or more the first is neither first nor last.

    Args:
        ahead: all but one are at the furthest step, which is more than float32 holds.
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
    """Return what a survivor has after `agree`; the seed is that of the state of its step."""
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
    """Average gradients twice, with another number of samples on each rank."""
    function = answer_named(user_ns, "mean_gradients")
    named = keywords(partition, group)
    model = _model(seed)
    _, first = recorded(function, _model(seed), samples + 7 * rank + 1, **named)
    _, calls = recorded(function, model, samples, **named)
    return {"gradient": _flat(model), "calls": calls, "calls again": first}


def _model(seed: int) -> nn.Module:
    """Return a model whose gradient is that of a rank's own samples."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


@task("13.6", "go on with fewer", points=4)
def survive(ranks: Ranks, report: Report) -> None:
    """Judge the state that survivors agree on, and gradients weighted by samples."""
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
    """Return the step of each survivor, and the seed of the state that all have who are there."""
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
        f"{where}: job.tensors() are near those of the furthest rank, and not the same bits: hand "
        "them over as they are, one of them is float64": result["tensors"] != states_by_step[most],
        f"{where}: job.tensors() has other tensors now: fill those that are there, broadcast "
        "does": not result["same objects"],
        f"{where}: job.go_to(step) was called with {result['asked']}, expected {most} on every "
        "rank: sampler and learning rate have to be at that step": result["asked"][-1:] != [most],
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
        "this rank's own tensors, unchanged": state if steps[place] > min(steps) else None,
        "this is the state of the smallest step: it is consistent, but throws away an update that "
        "some ranks have": states_by_step[min(steps)],
        "the weights are right, the momentum is this rank's own: all of job.tensors()": (
            right[:half] + state[half:]
        ),
        "these are means over the ranks: states of two steps do not mix": means,
        "the state of the group's first rank, which is not the one that is furthest": (
            states_by_step[steps[0]]
        ),
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
        "this rank's own gradient, unchanged": gradients[place],
        "the sum of samples · gradient, not divided by the number of all samples": weighted,
        "each rank counts the same, though they have different numbers of samples": (
            sum(gradients) / p
        ),
        "the sum of the gradients: weight each by its samples, and divide": sum(gradients),
        "divided by 4 ranks, of which some are not there any more": sum(gradients) / 4,
        "divided by 4 at the end: the number of ranks that there once were": weighted / 4,
        "divided by 64, or by another number of samples from before": weighted / 64,
        "divided by the number of ranks after weighting: divide by the samples of all": (
            weighted / p
        ),
        "divided by this rank's own number of samples": weighted / shares[place],
        "divided by the ranks as well": weighted / sum(shares) / p if p > 1 else None,
    })
