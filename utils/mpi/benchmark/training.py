"""Training steps of the course's MLP: with DDP on both backends, by hand, and alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .measure import Candidate, Case
from .transports import Transports

BATCH = 128  # per rank, in the DDP step
GLOBAL_BATCH = 256  # of the epoch
TRAINING_SET = 60_000  # Fashion-MNIST
SIZES = (784, 512, 512, 10)  # of the MLP: 669,706 parameters, 2.7 MB in float32
EPOCH_STEPS = TRAINING_SET // GLOBAL_BATCH


def step_case(world: Transports, seconds: float) -> Case:
    """One step with `BATCH` images per rank: DDP on mpi and on gloo, and by hand on mpi.

    The steps that communicate nothing show what is left to a backend: DDP's own work, its copies
    of the gradients into buckets and back, is in all of its times.
    """
    ready = {
        "DDP on mpi": _ddp_step(world.mpi),
        "DDP on gloo": _ddp_step(world.gloo),
        "all_reduce per parameter on mpi": _step_by_hand(world.mpi),
        "DDP, nothing communicated": _ddp_step(world.mpi, _nothing_communicated),
        "nothing communicated": Candidate(_step(mlp(), _Data(BATCH).batch)),
    }
    return Case("ddp_step", lambda: (ready, None), seconds)


def epoch_case(world: Transports, steps: int) -> Case:
    """`steps` steps at a fixed global batch: rank 0 alone, and DDP on mpi with all ranks.

    And all ranks without communication: the least time, whatever the backend.
    """
    n = world.comm.size
    share = max(1, GLOBAL_BATCH // n)
    mine = _Data(share, steps)
    together = _step(DistributedDataParallel(mlp(), process_group=world.mpi), mine.batch)
    alone = _nothing
    if world.comm.rank == 0:
        alone = _step(mlp(), _Data(share * n, steps).batch)
    apart = _step(mlp(), mine.batch)
    ready = {
        "1 rank": Candidate(alone),
        f"{n} ranks": Candidate(together),
        f"{n} ranks, nothing communicated": Candidate(apart),
    }
    repetitions = dict.fromkeys(ready, steps)
    # The unit makes a step's time an epoch's.
    return Case("epoch", lambda: (ready, None), 0, 0, TRAINING_SET / (share * n), repetitions)


def mlp() -> nn.Sequential:
    """Return the MLP of `SIZES`, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Flatten()]
        for wide, narrow in itertools.pairwise(SIZES):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no ReLU behind the logits


def _nothing(i: int) -> None:
    """What the other ranks do while rank 0 trains alone; the clock lets them sleep then."""


class _Data:
    """Random images and labels of Fashion-MNIST's shape, in shuffled batches."""

    def __init__(self, batch: int, steps: int = 1):
        count = batch * steps
        self._images, self._labels = torch.rand(count, 1, 28, 28), torch.randint(10, (count,))
        self._batches = torch.randperm(count).split(batch)

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        """The i-th batch: copied together, as a data loader does."""
        chosen = self._batches[i % len(self._batches)]
        return self._images[chosen], self._labels[chosen]


def _step(model: nn.Module, batch: Callable, reduce: Callable = lambda: None) -> Callable:
    """The function of i that makes the i-th step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()

    def step(i: int) -> None:
        images, labels = batch(i)
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        reduce()
        optimizer.step()

    return step


def _ddp_step(group: dist.ProcessGroup, hook: Callable | None = None) -> Candidate:
    model = DistributedDataParallel(mlp(), process_group=group)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return Candidate(_step(model, _Data(BATCH).batch))


def _nothing_communicated(state, bucket):  # annotations as strings are refused by DDP
    """A communication hook of DDP that gives each rank its own gradients back."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _step_by_hand(group: dist.ProcessGroup) -> Candidate:
    model, n = mlp(), group.size()

    def reduce() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= n

    return Candidate(_step(model, _Data(BATCH).batch, reduce))


def describe(n: int) -> dict:
    """What the numbers are about, for the report."""
    return {
        "mlp": list(SIZES),
        "batch_per_rank": BATCH,
        "global_batch": max(1, GLOBAL_BATCH // n) * n,
        "images": TRAINING_SET,
    }
