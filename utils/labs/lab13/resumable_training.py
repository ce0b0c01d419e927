"""The check of a resumed training, and a small training that can be stopped, saved and resumed.

Each rank has a training of its own. :class:`Job` has the attributes of the lab's job. It draws
random numbers in every step, its learning rate decays, and its momentum and its order of samples go
on over a stop: what is not restored is seen.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from utils.checks.probe import kept, reading_answer
from utils.checks.steps import Step, facts, value
from utils.checks.task import Report, task
from utils.cluster.contracts import Ranks

SAMPLES, FEATURES, CLASSES, BATCH = 24, 6, 3, 8


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
        buffers = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        return {
            "weights": [p.tolist() for p in self.model.parameters()],
            "buffers": [b.tolist() for b in self.model.buffers()],
            "momentum": [None if b is None else b.tolist() for b in buffers],
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
    before = torch.get_rng_state()
    try:
        return _resumed(capture, restore, seed, seed + 1 + rank)
    finally:
        torch.set_rng_state(before)


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
        "changed": [] if lacking else changed,
        "elsewhere": [] if lacking or changed else elsewhere,
        "resumed": resumed,
        "expected": expected[BEFORE:],
    }


@task("13.2", "everything that a training is", points=4)
def resume(ranks: Ranks, report: Report) -> None:
    """Judge the losses of the resumed training by those of the twin, bit for bit."""
    for answer in report.answers(ranks, probe_resume, seed=report.seed):
        rank, result = answer.rank, answer.value
        if not report.follow(rank, _captured(result)):
            continue
        for name in result["lacking"]:
            report.problem(_FORGOTTEN[name], rank)
        if not result["lacking"]:
            report.follow(rank, _restored_again(result))
            report.follow(rank, _goes_on(result))


def _captured(result: dict[str, Any]) -> Iterator[Step]:
    """Judge whether the state is a dict with all of it, and capturing it changes nothing."""
    yield facts({"capture returned no dict: return the state, a dict": not result["is state"]})
    wrong = {
        "capture changes the training: it draws random numbers, or sets something. It has to "
        "look only": not result["unchanged"],
        "the state is smaller than weights, momentum and random state are: all of them have to "
        "be in the dict, or a new process does not find them": result["small"],
        "the state has changed since it was captured: state_dict() holds the weights "
        "themselves, not copies of them, and the training went on. "
        "copy.deepcopy(…)": result["aliased"],
    }
    yield facts(wrong)


def _restored_again(result: dict[str, Any]) -> Iterator[Step]:
    """Judge whether the same state gives the same job once more."""
    for name in result["changed"]:
        said = (
            f"a second job restored from the same state has another {name}: the training of the "
            "first has changed the state. An optimizer keeps the momentum tensors that "
            "load_state_dict gives it, so restore from copy.deepcopy(state)"
        )
        yield facts({said: True})
    for name in result["elsewhere"]:
        said = (
            f"after another job was captured, the first state gives a job with another {name}: "
            "capture keeps something outside of the state, in a global name or an attribute. All "
            "of it has to be in the dict"
        )
        yield facts({said: True})


def _goes_on(result: dict[str, Any]) -> Iterator[Step]:
    """Judge the losses of the resumed training."""
    what = "the losses after resuming"
    yield value(result["resumed"], result["expected"], what=what, tolerance=0)
