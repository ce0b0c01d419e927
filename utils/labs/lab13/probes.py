"""The probes of resumed jobs and of survivors. :mod:`.save_probe` has the other one.

:class:`Job` is like the lab's job. It draws random numbers in every step, its learning rate decays,
and its momentum and its order of samples continue after a stop, so a part that wasn't restored
shows in the losses.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from utils.checks.draws import across
from utils.checks.groups import Group, Partition, in_group, keywords
from utils.checks.probe import answer_named, kept, reading_answer, recorded, told

SAMPLES, FEATURES, CLASSES, BATCH = 24, 6, 3, 8


def lists(tensors: Iterable[torch.Tensor]) -> list:
    """Return tensors as lists of numbers."""
    return [told(tensor) for tensor in tensors]


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


BEFORE, AFTER = 5, 7


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
        ] + [torch.randn(6, generator=generator)[::2]]

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights, then the momentum."""
        return self._tensors

    def go_to(self, step: int) -> None:
        """Set the sampler and the learning rate to this step."""
        self.asked.append(step)
        self.step = step


@in_group
def probe_agree(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, step: int
) -> dict:
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
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, samples: int
) -> dict:
    """Average gradients twice, with different numbers of samples on the ranks."""
    function = answer_named(user_ns, "mean_gradients")
    named = keywords(partition, group)
    model = model_of(seed)
    _, first = recorded(function, model_of(seed), samples + 7 * rank + 1, **named)
    _, calls = recorded(function, model, samples, **named)
    return {"gradient": flat_gradient(model), "calls": calls, "calls again": first}


def model_of(seed: int) -> nn.Module:
    """Return a model with the gradient of a rank's samples, drawn from the seed.

    Two layers have the same weights, and gradients of matrices aren't contiguous.
    """
    generator = torch.Generator().manual_seed(seed)
    first, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.weight = first.weight
    model = nn.Sequential(first, nn.LayerNorm(2), nn.Linear(2, 3), other, nn.Linear(2, 1))
    for parameter in model.parameters():
        parameter.grad = across(torch.randn(parameter.shape, generator=generator))
    return model


def flat_gradient(model: nn.Module) -> list[float]:
    """Return all gradients of a model in a row."""
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
