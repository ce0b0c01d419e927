"""The probes of sharding (ZeRO) and of offloading."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.groups import Group, Partition, in_group, keywords
from utils.checks.probe import (
    also_calls,
    answer_named,
    as_dict,
    reading_answer,
    recorded,
    told,
    values_of,
)

from .layers import Layers, rows_of
from .small_layers import (
    CHAIN,
    SMALL,
    STEPS,
    WIDE,
    Named,
    chained,
    collected,
    layers_of,
    loss_of,
    momentum,
    overdue,
    parameters_of,
    patched,
    row_of,
    samples,
    shards_of,
    uneven_layers,
)

# -- sharding --------------------------------------------------------------------------------------


@in_group
def probe_one(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, data: int, seed: int
) -> list:
    """Take two steps on a small model."""
    k = dist.get_rank(group)
    p = dist.get_world_size(group)
    first, *others = layers_of(seed)
    layers = nn.ModuleList([Named(first, 0), *others])
    (shard,) = shards_of([layers], p, k)
    optimizer = momentum([shard])
    steps = []
    places = [q.data_ptr() for q in layers.parameters()]
    for step in range(STEPS):
        layers.zero_grad()
        loss_of(chained(layers, samples(data, step))).backward()
        function = answer_named(user_ns, "zero1_step")
        _, calls = recorded(function, layers, shard, optimizer, **keywords(partition, group))
        parts = [q for q in (shard, shard.grad) if q is not None]
        steps.append({
            "weights": row_of(layers.parameters(), p).tolist(),
            "shard": values_of(shard),
            "calls": calls,
            "moved": places != [q.data_ptr() for q in layers.parameters()],
            "held": max(q.untyped_storage().nbytes() // q.nbytes for q in parts),
        })
    return steps


@in_group
def probe_two(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, data: int, seed: int
) -> dict:
    """Run two backwards of a small model, and one of a chain with the meter."""
    k = dist.get_rank(group)
    p = dist.get_world_size(group)
    steps = []
    function = reading_answer(user_ns, "zero2_hooks")
    layers = [Named(layer, i % 2) for i, layer in enumerate(layers_of(seed))]
    shards = shards_of(layers, p, k)
    function(layers, shards, **keywords(partition, group))
    behind = overdue(layers)
    for step in range(STEPS):
        for layer in layers:
            layer.begin()
        loss = loss_of(chained(layers, samples(data, step)))
        _, calls = recorded(loss.backward)
        left = sum(q.grad is not None for q in parameters_of(layers))
        gradients = [values_of(shard.grad) for shard in shards]
        steps.append({"gradients": gradients, "calls": calls, "left": left, "behind": [*behind]})
    layers = uneven_layers(seed)
    shards = shards_of(layers, p, k)
    function(layers, shards, **keywords(partition, group))
    _, calls = recorded(loss_of(chained(layers, samples(data, 0))).backward)
    uneven = {"gradients": [values_of(shard.grad) for shard in shards], "calls": calls}
    if partition is not None:  # metered once, where each part is smallest
        return {"steps": steps, "uneven": uneven, "rows": 0.0}
    layers = layers_of(seed, (WIDE,) * (CHAIN + 1))
    shards = shards_of(layers, p, k)
    loss = loss_of(chained(layers, samples(data, 0, WIDE)))

    def hooked() -> None:
        function(layers, shards, **keywords(partition, group))
        loss.backward()

    (_, rows), calls = recorded(collected, hooked)
    return {"steps": steps, "uneven": uneven, "rows": rows, "calls again": calls}


@also_calls("all_gather_into_tensor")
@in_group
def probe_three(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, data: int, seed: int
) -> dict:
    """Run forward and backward of a small model, and of a chain with the meter."""
    from torch_mpi.record import log

    k = dist.get_rank(group)
    p = dist.get_world_size(group)
    function = answer_named(user_ns, "Gathered")

    def gathered(sizes: Sequence[int]) -> tuple[list, list]:
        layers = layers_of(seed, sizes)
        shards = shards_of(layers, p, k)
        return shards, [
            lambda x, shard=shard, shape=layer.weight.shape: function.apply(x, shard, shape, group)
            for shard, layer in zip(shards, layers, strict=True)
        ]

    shards, layers = gathered(SMALL)
    shape = torch.Size([SMALL[1], SMALL[0]])
    parts = reading_answer(user_ns, "whole")(shards[0].detach(), shape, group)
    views = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    x = samples(data, 0).requires_grad_()
    y, forward = recorded(chained, layers, x)
    mark = log.mark()
    came = []
    y.register_hook(lambda g: came.extend([g, g.clone()]))
    loss_of(y).backward()
    result = {
        "y": values_of(y),
        "views": views,
        "changed": not torch.equal(*came),
        "dx": values_of(x.grad),
        "gradients": [values_of(shard.grad) for shard in shards],
        "forward": forward,
        "backward": [as_dict(call) for call in log.since(mark)],
        "rows forward": 0.0,
        "rows backward": 0.0,
    }
    if partition is not None:  # metered once, where each part is smallest
        return result
    _, layers = gathered((WIDE,) * (CHAIN + 1))
    x = samples(data, 0, WIDE).requires_grad_()
    (y, result["rows forward"]), forward = recorded(collected, chained, layers, x)
    (_, result["rows backward"]), backward = recorded(collected, loss_of(y).backward)
    return result | {"calls again": forward + backward}


# -- offloading ------------------------------------------------------------------------------------


#: Features of a step of ten layers.
DEEP = (24,) * 10 + (3,)
MINIBATCH = 4
#: Rows and gradients that may live at the last piece; seconds until the others must be gone.
FEW = 6
GRACE = 2.0
#: Rows that may exist at once: one in use, and one that arrives. The backend remembers messages up
#: to REMEMBERED bytes with their tensors, and the last layer's row is that short.
ROWS = 2
REMEMBERED = 1024


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a minibatch float64 [4, 24], and labels."""
    draw = torch.Generator().manual_seed(seed + step + 1)
    x = torch.randn(MINIBATCH, DEEP[0], generator=draw, dtype=torch.float64)
    return x, torch.randint(0, DEEP[-1], (MINIBATCH,), generator=draw)


def host_rows(seed: int) -> list[nn.Parameter]:
    """Return the weights of each layer in a row."""
    return [nn.Parameter(row) for row in rows_of(nn.Sequential(*layers_of(seed, DEEP)))]


class Watched(Layers):
    """A step that notes at the start of each piece what has been received and sent.

    Args:
        most: rows that existed at once in earlier steps.

    Attributes:
        seen: for each piece its number, receives that were started, sends that were started, and
            sends that somebody has waited for.
        kept: rows and gradients that live at the last piece.
    """

    def __init__(self, x: Tensor, labels: Tensor, log: Any, most: int = 0):
        super().__init__(DEEP, x, labels)
        self.log = log
        self.mark = log.mark()
        self.seen: list[list[int]] = []
        self.rows: list[weakref.ref] = []
        self.came: list[weakref.ref] = []
        self.kept = 0
        self.most = most

    def receive(self, row: Tensor) -> None:
        """Note how many rows exist when the receive of this row starts."""
        if row.nbytes > REMEMBERED:
            self.came.append(weakref.ref(row.untyped_storage()))
        if self.most <= ROWS:
            self.most = _alive(self.came, ROWS)

    def work(self, n: int, row: Tensor) -> Tensor | None:
        """Compute a piece as the base class does."""
        calls = [as_dict(call) for call in self.log.since(self.mark)]
        sends = [call["waited"] for call in calls if call["op"] == "send"]
        receives = sum(call["op"] == "recv" for call in calls)
        self.seen.append([n, receives, len(sends), sum(sends)])
        gradient = super().work(n, row)
        self.rows.append(weakref.ref(row.untyped_storage()))
        if gradient is not None:
            self.rows.append(weakref.ref(gradient.untyped_storage()))
        if n == len(self.order) - 1:
            self.kept = _alive(self.rows, FEW)
        return gradient


def _alive(storages: list[weakref.ref], enough: int) -> int:
    """Return how many of these storages still live; the backend gets a moment to free them."""
    deadline = time.monotonic() + GRACE
    while True:
        alive = len({storage.data_ptr() for ref in storages if (storage := ref())})
        if alive <= enough or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def watched_optimizers(rows: Sequence[nn.Parameter], order: Sequence[int], log: Any) -> tuple:
    """Return optimizers for each row, the list of notes of their steps, and the record's mark.

    A note is the layer, its sends without a wait, the gradients received, and the sends started.
    """
    notes: list[list[int]] = []
    mark = [log.mark()]

    def note(i: int) -> None:
        calls = [as_dict(call) for call in log.since(mark[0])]
        sends = [c for c in calls if c["op"] == "send" and c["tag"] < len(order)]
        open_sends = [c for c in sends if order[c["tag"]] == i and not c["waited"]]
        received = sum(c["op"] == "recv" and c["waited"] for c in calls)
        notes.append([i, len(open_sends), received, len(sends)])

    optimizers = [momentum([row]) for row in rows]
    for i, optimizer in enumerate(optimizers):
        optimizer.register_step_pre_hook(lambda *_, i=i: note(i))
    return optimizers, notes, mark


@in_group
def probe_offload(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int
) -> dict:
    """Take two steps of a device and its host; the seed is for its samples, or its weights."""
    from torch_mpi.record import log

    place = dist.get_rank(group)
    order = Layers(DEEP, *batch(seed, 0)).order
    result: dict[str, Any] = {"losses": [], "calls": [], "seen": [], "most": 0}
    rows = host_rows(seed)
    optimizers, notes, mark = watched_optimizers(rows, order, log)
    for step in range(STEPS):
        if place == 0:
            worker = Watched(*batch(seed, step), log, result["most"])
            function = answer_named(user_ns, "device_step")
            with _receives_noted(worker):
                loss, calls = recorded(function, worker, group=group)
            result["losses"].append(told(loss))
            result |= {"kept": worker.kept, "most": worker.most}
            result["seen"].append(worker.seen)
        else:
            mark[0] = log.mark()
            notes.clear()
            function = answer_named(user_ns, "host_step")
            _, calls = recorded(function, rows, optimizers, list(order), group=group)
            result["seen"].append(list(notes))
        result["calls"].append(calls)
    return result | {"weights": [values_of(row) for row in rows]}


def _receives_noted(worker: Watched) -> AbstractContextManager[None]:
    irecv = dist.irecv

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        worker.receive(tensor)
        return irecv(tensor, *args, **kwargs)

    return patched("irecv", noting)
