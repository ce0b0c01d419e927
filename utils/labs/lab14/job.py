"""The harness on each rank of an entry: it provides the device, counts, and kills one rank.

The entry gets a :class:`Job`. The clock of the played machine counts gradients and messages. The
images are in another process (:mod:`.device`), so each gradient of :meth:`Job.gradient` is counted.
An entry is a program on the same computer, and it can get around all of this, for example through
a file. That is against the rules of the notebook, and the instructor reads the entries that win.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_mpi.network import Network, link
from torch_mpi.protocol import world
from utils import data

from .device import Device, Model, fingerprint
from .rules import NODES, RANKS, TRAIN

#: Seconds that a rank waits for others before the backend says which rank is missing.
PATIENCE = 20.0
MOST_SHOWN = 60


class Job:
    """The calls that an entry's `train(job)` works with.

    Attributes:
        born: this rank's first number, 0 to 3, which it keeps when other ranks die.
    """

    def __init__(self, folder: Path, device: Device, victim: int, dies_at: int):
        self.born = dist.get_rank()
        self._device = device
        device.keep_record(folder / f"device-{self.born}.txt")
        self._folder = folder
        self._victim = victim
        self._dies_at = dies_at
        self._events: list[list] = []
        self._computed = self._shown = 0
        self._size = RANKS

    @property
    def rank(self) -> int:
        """Return this rank's present number."""
        return dist.get_rank()

    @property
    def living(self) -> list[int]:
        """Return the first numbers of the surviving ranks; entry k is now rank k."""
        return _living(dist.get_world_size(), self._victim)

    @property
    def nodes(self) -> list[list[int]]:
        """Return the present ranks of each node that has ranks, at first [[0, 1], [2, 3]]."""
        living = self.living
        kept = [[living.index(rank) for rank in node if rank in living] for node in NODES]
        return [node for node in kept if node]

    def model(self) -> nn.Module:
        """Return the MLP (784, 64, 10), with the same weights on every rank."""
        return Model(self._compute)

    def batch(self, number: int, size: int) -> Tensor:
        """Return random indices of a minibatch, int64 [size], drawn with `number` as the seed."""
        drawn = torch.Generator().manual_seed(number)
        return torch.randint(TRAIN, (size,), generator=drawn)

    def gradient(self, model: nn.Module, indices: Tensor) -> float:
        """Compute the mean cross entropy of these images, and put its gradient into `.grad`.

        Earlier gradients in `.grad` are discarded. This call takes time on the played machine, and
        the victim dies in it. Returns the loss.

        Args:
            model: from `job.model`, alone or in DistributedDataParallel.
            indices: int64 [m], the numbers of the images, from 0 to 11,999.

        Raises:
            TypeError, ValueError: the model or the indices are something else.
        """
        if not isinstance(getattr(model, "module", model), Model):
            raise TypeError(
                f"job.gradient() got the model {type(model).__name__}. Pass the model of "
                "job.model(), alone or in DistributedDataParallel"
            )
        model.zero_grad()
        loss = model(indices)
        loss.backward()
        return loss.item()

    def show(self, model: nn.Module | dict[str, Tensor]) -> None:
        """Submit the present weights, in no time; the last submission counts.

        The first weights that reach the target set the entry's seconds. A rank may call this 60
        times.
        """
        if self._shown == MOST_SHOWN:
            raise RuntimeError(f"You called job.show() more than {MOST_SHOWN} times on a rank")
        module = getattr(model, "module", model)  # in DDP
        weights = module.state_dict() if isinstance(module, nn.Module) else module
        if not isinstance(weights, dict) or not all(
            isinstance(t, Tensor) for t in weights.values()
        ):
            raise TypeError(
                f"job.show() got {type(module).__name__}. Pass a model or its state_dict()"
            )
        name = f"shown-{self.born}-{self._shown}.pt"
        with (self._folder / name).open("xb") as file:  # what was submitted stays as it was
            torch.save({key: tensor.detach().clone() for key, tensor in weights.items()}, file)
        self._shown += 1
        self._events.append(["show", name])

    # -- what the harness does ----------------------------------------------------------------

    def _compute(self, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of the device, and count the images."""
        indices = _checked(indices)
        self._notice_a_new_group()
        self._die_if_it_is_time(len(indices))
        self._events.append(["work", len(indices), fingerprint(weights)])
        self._computed += len(indices)
        return self._device.compute(indices, weights)

    def watch(self) -> None:
        """Count every message from now on, even the messages inside collectives."""
        link.set(Network())  # as fast as the machine, but collectives send message by message
        link.wire = self._wire

    def _wire(self, me: int, other: int) -> _Counter:
        self._notice_a_new_group()
        return _Counter(self._events, self._size, _living(self._size, self._victim)[other])

    def _notice_a_new_group(self) -> None:
        here = world.current()
        if here is not None and here.size != self._size:
            self._size = here.size
            self._events.append(["shrunk"])

    def _die_if_it_is_time(self, samples: int) -> None:
        if self.born == self._victim and self._computed + samples > self._dies_at:
            self._events.append(["died"])
            self.close("died")
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self, how: str, words: str = "") -> None:
        """Write a file for the harness: what this rank did, and how it ended."""
        self._device.close()
        told = {"how": how, "words": words, "events": self._events}
        path = self._folder / f"rank-{self.born}.json"
        path.with_suffix(".tmp").write_text(json.dumps(told), encoding="utf-8")
        path.with_suffix(".tmp").replace(path)


class _Counter:
    """A link to one rank: counts the messages, and delays none."""

    def __init__(self, events: list[list], size: int, other: int):
        self._events = events
        self._size = size
        self._other = other

    def sends(self, nbytes: int, at: float) -> tuple[float, float]:
        """Count a message that leaves, and let it arrive immediately."""
        self._events.append(["send", self._size, self._other, nbytes])
        return at, at

    def receives(self, nbytes: int, told: float) -> float:
        """Count a message that has arrived."""
        self._events.append(["recv", self._size, self._other, nbytes])
        return time.perf_counter()


# -- an entry from start to end -------------------------------------------------------------------


def _living(size: int, victim: int) -> list[int]:
    """Return the first numbers of `size` ranks: all ranks, or all except the victim."""
    return list(range(RANKS)) if size == RANKS else [r for r in range(RANKS) if r != victim][:size]


def _checked(indices: Tensor) -> Tensor:
    """Return numbers of images as a plain tensor, whose length is how many there are.

    Raises:
        TypeError: they have another dtype or shape. A batch of batches would count as one image.
        ValueError: there are none, or no image has such a number.
    """
    if isinstance(indices, Tensor):
        indices = indices.as_subclass(Tensor)
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.dim() != 1:
        got = type(indices).__name__
        if isinstance(indices, Tensor):
            got = f"{indices.dtype} {list(indices.shape)}".removeprefix("torch.")
        raise TypeError(f"job.gradient() got the indices {got}. Pass int64 [m], as of job.batch()")
    if not len(indices) or not 0 <= int(indices.min()) <= int(indices.max()) < TRAIN:
        raise ValueError(
            f"job.gradient() takes the numbers of at least one image, from 0 to {TRAIN - 1:,}"
        )
    return indices


def main() -> None:
    """Run the entry's file on this rank."""
    entry = sys.argv[1]
    folder = Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    device = Device(folder / "train.pt")
    dist.init_process_group("mpi", timeout=timedelta(seconds=PATIENCE))
    data.fashion_mnist = _no_images
    job = Job(folder, device, plan["victim"], plan["dies_at"])
    dist.barrier()
    job.watch()
    try:
        train = runpy.run_path(entry).get("train")
        if not callable(train):
            raise TypeError("The file has no function train(job). Define it")
        result = train(job)
        if result is not None:
            job.show(result)
        job.close("done")
    except BaseException as error:
        how = "open" if isinstance(error, NotImplementedError) else "raised"
        job.close(how, _last_words(error, entry))
        raise
    dist.barrier()


def _no_images(train: bool = True, *_: object, **__: object) -> NoReturn:
    if not train:
        raise PermissionError("The test images belong to the judge. Train with job.gradient")
    raise PermissionError("The training images are in the device's memory. Train with job.gradient")


def _last_words(error: BaseException, entry: str) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == entry]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    said = re.sub(r"( because rank \d died): its process.*", r"\1", said)  # the rest is advice
    return f"line {lines[-1]}: {said}" if lines else said


if __name__ == "__main__":
    main()
