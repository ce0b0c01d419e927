"""The check of offload in lab 11: what a device and its host do, and when.

Ranks work in pairs. The device computes a step of ten layers, and the host has the weights.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.comparison import Calls, Mistake, Rule, inside, only, short, table, waited
from utils.checks.probe import answer_named, as_dict, recorded, told
from utils.checks.task import Report, Step, communication, facts, task, to_each
from utils.checks.trials import Group, GroupAnswer, in_group, judge_groups
from utils.cluster.questions import Ranks
from utils.labs.shared.replicas import Twin

from .layers import Layers, rows_of
from .reference_models import BYTES, MOMENTUM, RATE, STEPS, layers_of, list_of, momentum, sequential
from .sharding import WORLD, exactly, explain_errors, patched

PAIRS = ([[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]])
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


@functools.cache
def offloaded(device: int, host: int, adds: bool = False) -> tuple[list[float], list[list[float]]]:
    """Return the losses of the steps and the rows after them, from training in one process.

    Args:
        device: the seed of the samples.
        host: the seed of the weights.
        adds: whether to add the previous step's gradient, by mistake.
    """
    training = Twin(sequential(layers_of(host, DEEP), nn.ReLU), RATE, MOMENTUM)
    losses = []
    gradient = torch.zeros_like(training.old)
    for step in range(STEPS):
        minibatch = batch(device, step)
        losses.append(training.loss(*minibatch))
        gradient = training.gradient(*minibatch) + adds * gradient
        training.move(gradient)
    return losses, [row.tolist() for row in rows_of(training.model)]


@in_group
def probe_offload(user_ns: dict, *, rank: int, group: Group, partition, seed: int) -> dict:
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
    return result | {"weights": [list_of(row) for row in rows]}


def _receives_noted(worker: Watched) -> AbstractContextManager[None]:
    irecv = dist.irecv

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        worker.receive(tensor)
        return irecv(tensor, *args, **kwargs)

    return patched("irecv", noting)


@task("11.7", "offload with prefetch and early update", points=4)
def offload(ranks: Ranks, report: Report) -> None:
    """Judge the weights, and what is started, awaited and kept, and when."""
    each = to_each(seed=report.seeds(WORLD))
    cases = [{"partition": partition, "each": each} for partition in PAIRS]
    judge_groups(ranks, report, probe_offload, cases, _offload, world=WORLD)
    explain_errors(report)


def _offload(answer: GroupAnswer) -> Iterator[Step]:
    place = answer.place
    result = answer.value
    device, host = (answer.case["each"][rank]["seed"] for rank in answer.members)
    order = Layers(DEEP, *batch(device, 0)).order
    for _, calls in zip(range(STEPS), result["calls"], strict=True):
        traffic = _traffic(place, answer.members, order)
        yield communication(calls, only("send", "recv"), inside(answer.members), traffic)
    for _, seen in zip(range(STEPS), result["seen"], strict=True):
        if place == 0:
            yield facts(_wrong_device(seen, result["kept"], result["most"], len(order)))
        else:
            yield facts(_wrong_host(seen, order))
    for calls in result["calls"]:
        yield communication(calls, waited)
    if place == 0:
        nothing = Mistake([None] * STEPS, "You returned nothing. Return worker.loss")
        losses, _ = offloaded(device, host)
        yield exactly(result["losses"], losses, [nothing], "the losses")
    else:
        yield from _rows(result["weights"], device, host)


def _traffic(place: int, members: list[int], order: list[int]) -> Rule:
    """Return the rule of the messages of a step, with their tags and sizes."""
    last = len(DEEP) - 2
    other = members[1 - place]
    sizes = [(DEEP[i] + 1) * DEEP[i + 1] * BYTES for i in order]
    weights, gradients = ("recv", "send") if place == 0 else ("send", "recv")
    wanted = [(weights, n, size) for n, size in enumerate(sizes)]
    wanted += [(gradients, n, sizes[n]) for n in range(last, len(order))]

    def rule(calls: Calls) -> str | None:
        made_here = [(c["op"], c["tag"], c["nbytes"]) for c in calls if c["peer"] == other]
        for op, tag, size in made_here:
            if (op, tag, size) not in wanted:
                return (
                    f"You made a {op} with tag {tag} and {size} bytes. Use tag n for piece n's "
                    "weights and for their gradient, which have "
                    f"{dict(enumerate(sizes)).get(tag)} bytes for n = {tag}"
                )
        for op, tag, size in wanted:
            content = "weights" if op == weights else "the gradient"
            count = made_here.count((op, tag, size))
            if count != 1:
                return (
                    f"You made {count} {op} with tag {tag} for {content} of piece {tag}, expected "
                    "one"
                )
        return None

    return rule


def _wrong_device(seen: list[list[int]], kept: int, most: int, pieces: int) -> dict[str, bool]:
    """Return what is wrong with prefetch, which is one piece, and with pending gradients."""
    order = [n for n, *_ in seen]
    odd_order = order != list(range(pieces))
    surplus = [receives - min(k + 2, pieces) for k, (_, receives, *_) in enumerate(seen)] or [0]
    pending = [sends - waited_for for *_, sends, waited_for in seen] or [0]
    return {
        f"You worked on pieces in the order {short(order)}, expected 0 … {pieces - 1}": odd_order,
        "You don't prefetch. When piece n starts, the receive of piece n + 1 must be in flight": (
            min(surplus) < 0
        ),
        "You prefetch too far ahead. When piece n starts, only receives up to piece n + 1 may be "
        "in flight, because the device has room for two layers": max(surplus) > 0,
        f"{most} rows are in the device's memory when a receive starts, and {ROWS} are allowed. "
        "Before you receive piece n + 1, drop the row of piece n − 1 (row = None) and its "
        "request, which keeps the row": most > ROWS,
        "You wait for each gradient right after you send it. Start the next piece, and wait "
        "before you send the next gradient": not any(pending[(pieces + 1) // 2 :]),
        "You have two pending gradients. Before you send one, wait for the previous one": (
            max(pending) > 1
        ),
        f"{kept} rows and gradients of this step are still in memory at the last piece, and {FEW} "
        "are enough. Keep no row after its piece, and no gradient after its send": kept > FEW,
    }


def _wrong_host(notes: list[list[int]], order: list[int]) -> dict[str, bool]:
    """Return what is wrong with the updates, which must be early, but not too early."""
    wanted = sorted(set(order), reverse=True)
    layers = [layer for layer, *_ in notes]
    return {
        f"You stepped the optimizers of layers {layers}. Step each once, as its gradient arrives: "
        f"{wanted}": sorted(layers) != sorted(wanted),
        "You update a layer whose row is still being sent. Wait for all sends of layer i before "
        "optimizers[i].step()": any(unsent for _, unsent, *_ in notes),
        "You didn't send all rows at the beginning. Start the sends of all pieces before you "
        "receive a gradient": any(sends < len(order) for *_, sends in notes[:1]),
        "You update too late. Update a layer as soon as its gradient arrives, before you wait for "
        "the next gradient": any(note[2] > k + 1 for k, note in enumerate(notes)),
    }


def _rows(rows: list, device: int, host: int) -> Iterator[Step]:
    begin = host_rows(host)
    added = offloaded(device, host, adds=True)[1]
    for i, row in enumerate(offloaded(device, host)[1]):
        wrong = {
            "You never changed the weights. Put the gradient into weights[i].grad before the "
            "step": begin[i],
            "You kept the previous step's gradient in weights[i].grad. Replace it with the new "
            "one": added[i],
        }
        yield exactly(rows[i], row, table(wrong), f"row of layer {i} after {STEPS} steps")
