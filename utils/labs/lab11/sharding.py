"""What checks of lab 11 try sharding and offload with: small models, twins, and what is watched.

Numbers are compared on small models, memory is metered on chains of many equal layers: there what
is kept too long shows in whole layers. All is in double precision.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.checks.probe import as_dict, in_double, told
from utils.labs.lab11.layers import Layers, rows_of, step_on
from utils.labs.shared.replicas import Seeds
from utils.memory import Meter

#: Features of the small model, and of the chain whose memory is metered.
SMALL, CHAIN, WIDE = (5, 4, 6, 3), 24, 48
RATE, MOMENTUM, STEPS, SAMPLES = 0.3, 0.9, 2, 4


def layers_of(seed: int, sizes: Sequence[int] = SMALL) -> list[nn.Linear]:
    """Linear layers whose weights follow from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [in_double(nn.Linear(*pair)) for pair in itertools.pairwise(sizes)]


def chained(layers: Sequence[Callable], x: Tensor) -> Tensor:
    """One layer after the other, tanh in between."""
    for layer in layers[:-1]:
        x = torch.tanh(layer(x))
    return layers[-1](x)


class Named(nn.Module):
    """A linear layer whose parameters have other names.

    After :meth:`begin` the gradient of the parameter number ``late`` comes only when backward has
    gone through all layers: autograd takes the nodes that were made last first.
    """

    def __init__(self, linear: nn.Linear, late: int):
        super().__init__()
        self.one, self.two, self.late = linear.weight, linear.bias, late
        self.copies: list[Tensor] = []

    def begin(self) -> None:
        """Prepare a forward whose backward comes in another order."""
        self.copies = list(self.parameters())
        self.copies[self.late] = self.copies[self.late] * 1

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer."""
        return nn.functional.linear(x, *(self.copies or self.parameters()))


def overdue(layers: Sequence[nn.Module]) -> list[int]:
    """Layers that still have gradients after their last hook; the list grows in each backward."""
    found: list[int] = []

    def watch(i: int, parameters: list[nn.Parameter]) -> None:
        came: list[Any] = []

        def look(parameter: nn.Parameter) -> None:
            came.append(parameter)
            complete = len(came) % len(parameters) == 0
            if complete and any(q.grad is not None for q in parameters):
                found.append(i)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(look)

    for i, layer in enumerate(layers):
        watch(i, list(layer.parameters()))
    return found


def samples(own: int, step: int, width: int = SMALL[0]) -> Tensor:
    """What the rank with this seed of its own gets in a step."""
    draw = torch.Generator().manual_seed(own + step + 1)
    return torch.randn(SAMPLES, width, generator=draw, dtype=torch.float64)


def loss_of(y: Tensor) -> Tensor:
    """Some loss."""
    return (torch.sin(y) + y**2).mean()


def row_of(tensors: Sequence[Tensor], p: int) -> Tensor:
    """All numbers in a row, padded to a multiple of p."""
    row = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return nn.functional.pad(row, (0, -len(row) % p))


def shard_of(tensors: Sequence[Tensor], p: int, k: int) -> nn.Parameter:
    """The k-th of p parts, as a parameter."""
    return nn.Parameter(row_of(tensors, p).chunk(p)[k].clone())


def gradients(layers: Sequence[nn.Linear], x: Tensor) -> list[list[Tensor]]:
    """Of each layer weight and bias."""
    parameters = [q for layer in layers for q in layer.parameters()]
    found = torch.autograd.grad(loss_of(chained(layers, x)), parameters)
    return [list(found[k : k + 2]) for k in range(0, len(found), 2)]


@functools.cache
def rows_at(seeds: Seeds, place: int, step: int) -> list[Tensor]:
    """Of each layer the gradient of what a place of the group gets, before any update."""
    x = samples(seeds.own[place], step)
    return [row_of(one, 1) for one in gradients(layers_of(seeds.model), x)]


@functools.cache
def trained(seeds: Seeds, mode: str = "mean") -> list[list[float]]:
    """The padded row of all weights after each step; ``mode`` says right, or which mistake."""
    layers, p = layers_of(seeds.model), len(seeds.own)
    parameters = [q for layer in layers for q in layer.parameters()]
    velocity, added, found = 0.0, 0.0, []
    for step in range(STEPS):
        each = []
        for own in seeds.own:
            parts = itertools.chain.from_iterable(gradients(layers, samples(own, step)))
            each.append(row_of(list(parts), p))
        mean = sum(each) / p
        added = added + mean
        gradient = {
            "mean": mean,
            "sum": p * mean,
            "twice divided": mean / p,
            "own": torch.cat([one.chunk(p)[k] for k, one in enumerate(each)]),
            "own, divided": torch.cat([one.chunk(p)[k] for k, one in enumerate(each)]) / p,
            "first": each[0],
            "adds up": added,
        }[mode]
        velocity = MOMENTUM * velocity + gradient
        row = row_of(parameters, p) - RATE * velocity
        copy_back(row, parameters)
        found.append(row.tolist())
    return found


@torch.no_grad()
def copy_back(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of :func:`row_of`, in place."""
    start = 0
    for tensor in tensors:
        tensor.copy_(row[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.SGD:
    """The optimizer of the checks: unlike Adam it shows every wrong factor."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, foreach=False)


def list_of(value: Any) -> Any:
    """A tensor's numbers, ``None``, or what else it is."""
    return value.detach().reshape(-1).tolist() if isinstance(value, Tensor) else told(value)


def collected(function: Callable, *args: Any) -> tuple[Any, float]:
    """A result, and the peak of the bytes made on the way, in rows of a layer of the chain."""
    with Meter() as meter:
        result = function(*args)
    return result, meter.peak / ((WIDE + 1) * WIDE * 8)


# -- offload ----------------------------------------------------------------------------------

#: A step of ten layers.
DEEP, MINIBATCH = (24,) * 10 + (3,), 4
#: Rows and gradients that may live at the last piece; seconds until the others have to be gone.
FEW, GRACE = 6, 2.0
#: Rows that may be there at once: one that is worked with, one that comes. The backend remembers
#: messages of so many bytes, with their tensors; the row of the last layer is as short as that.
ROWS, REMEMBERED = 2, 1024


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """A minibatch float64 [4, 24], and labels."""
    draw = torch.Generator().manual_seed(seed + step + 1)
    x = torch.randn(MINIBATCH, DEEP[0], generator=draw, dtype=torch.float64)
    return x, torch.randint(0, DEEP[-1], (MINIBATCH,), generator=draw)


def host_rows(seed: int) -> list[nn.Parameter]:
    """The weights of each layer in a row."""
    return [nn.Parameter(row) for row in rows_of(nn.Sequential(*layers_of(seed, DEEP)))]


class Watched(Layers):
    """Notes, as each piece begins, what has been received and sent.

    most: rows that there were at once in earlier steps.
    """

    def __init__(self, x: Tensor, labels: Tensor, log: Any, most: int = 0):
        super().__init__(DEEP, x, labels)
        self.log, self.mark, self.seen = log, log.mark(), []
        self.rows: list[weakref.ref] = []
        self.came: list[weakref.ref] = []
        self.kept, self.most = 0, most

    def receive(self, row: Tensor) -> None:
        """Note how many rows there are as the receive of this one begins."""
        if row.nbytes > REMEMBERED:
            self.came.append(weakref.ref(row.untyped_storage()))
        if self.most <= ROWS:
            self.most = _alive(self.came, ROWS)

    def work(self, n: int, row: Tensor) -> Tensor | None:
        """As the base class."""
        calls = [as_dict(call) for call in self.log.since(self.mark)]
        kinds = {op: [c["waited"] for c in calls if c["op"] == op] for op in ("recv", "send")}
        self.seen.append(
            [n, len(kinds["recv"]), sum(kinds["recv"]), len(kinds["send"]), sum(kinds["send"])]
        )
        gradient = super().work(n, row)
        own = [one.untyped_storage() for one in (row, gradient) if one is not None]
        self.rows += map(weakref.ref, own)
        del own
        if n == len(self.order) - 1:
            self.kept = _alive(self.rows, FEW)
        return gradient


def _alive(storages: list[weakref.ref], enough: int) -> int:
    """How many of them still live; the backend gets a moment to let them go."""
    deadline = time.monotonic() + GRACE
    while (alive := len({one.data_ptr() for ref in storages if (one := ref())})) > enough:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return alive


def watched_optimizers(rows: Sequence[nn.Parameter], order: Sequence[int], log: Any) -> tuple:
    """Optimizers for each row, and the list that their steps are noted in.

    A note is: the layer, sends of it that nobody has waited for, gradients received, sends started.
    """
    notes: list[list[int]] = []
    mark = [log.mark()]

    def note(i: int) -> None:
        calls = [as_dict(call) for call in log.since(mark[0])]
        mine = [c for c in calls if c["op"] == "send" and c["tag"] < len(order)]
        open_sends = [c for c in mine if order[c["tag"]] == i and not c["waited"]]
        received = sum(c["op"] == "recv" and c["waited"] for c in calls)
        notes.append([i, len(open_sends), received, len(mine)])

    optimizers = [momentum([row]) for row in rows]
    for i, optimizer in enumerate(optimizers):
        optimizer.register_step_pre_hook(lambda *_, i=i: note(i))
    return optimizers, notes, mark


@functools.cache
def offloaded(device: int, host: int, adds: bool = False) -> tuple[list[float], list[list[float]]]:
    """Losses of the steps and the rows after them, in one process; by the seeds of both sides.

    adds: by mistake, the gradient of the step before is added.
    """
    rows, before = host_rows(host), {}
    optimizers, losses = [momentum([row]) for row in rows], []

    def add(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (row,) = optimizer.param_groups[0]["params"]
        row.grad = before[row] = row.grad + before.get(row, 0)

    for optimizer in optimizers if adds else ():
        optimizer.register_step_pre_hook(add)
    for step in range(STEPS):
        losses.append(step_on("cpu", rows, optimizers, Layers(DEEP, *batch(device, step))))
    return losses, [row.tolist() for row in rows]
