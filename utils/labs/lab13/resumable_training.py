"""A small training that a check can stop, save and resume; each rank has one of its own.

:class:`Job` has the attributes of the lab's job. It draws random numbers in every step, its
learning rate decays, and its momentum and its order of samples go on over a stop: what is not
restored is seen.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional

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
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(8, CLASSES),
        )  # fmt: skip
        decay = 0.01 + seed % 7 / 100
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.2, momentum=0.9, weight_decay=decay
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.5)
        self.epoch = self.position = self.step = 0

    def train_step(self) -> float:
        """One step; its loss."""
        if self.position + BATCH > SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
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
        """Bytes of weights, momentum and random state, which every state has to hold."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return 2 * weights + torch.get_rng_state().nbytes

    def parts(self) -> dict[str, Any]:
        """All that a resumed job must have back, as numbers."""
        buffers = [one.get("momentum_buffer") for one in self.optimizer.state.values()]
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


def through_a_file(state: Any) -> Any:
    """What comes back of a state that was saved.

    Raises:
        TypeError: it holds objects that `torch.load` does not make.
    """
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        return torch.load(file)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise TypeError(
            f"the state holds whole objects ({named[1] if named else 'of a class'}), which may run "
            "any code, so torch.load does not make them: save what their state_dict() returns"
        ) from None


def bytes_in(state: Any) -> int:
    """The size of the file of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


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
        """Weights, then momentum."""
        return self._tensors

    def go_to(self, step: int) -> None:
        """Put sampler and learning rate to this step."""
        self.asked.append(step)
        self.step = step
