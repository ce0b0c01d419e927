"""The check of offload in lab 11: a device and its host, and what each of them does when.

Ranks work in pairs. The device computes a step of ten layers; the host has the weights.
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
from .sharding import WORLD, exactly, explain_errors, patched
from .twins import BYTES, MOMENTUM, RATE, STEPS, layers_of, list_of, momentum, sequential

PAIRS = ([[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]])
#: Features of a step of ten layers.
DEEP = (24,) * 10 + (3,)
MINIBATCH = 4
#: Rows and gradients that may live at the last piece; seconds until the others have to be gone.
FEW = 6
GRACE = 2.0
#: Rows that may be there at once: one that is worked with, one that comes. The backend remembers
#: messages of so many bytes, with their tensors; the row of the last layer is as short as that.
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
    """A step that notes, as each piece begins, what has been received and sent.

    Args:
        most: rows that there were at once in earlier steps.

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
        """Note how many rows there are as the receive of this one begins."""
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
    """Return how many of them still live; the backend gets a moment to let them go."""
    deadline = time.monotonic() + GRACE
    while True:
        alive = len({storage.data_ptr() for ref in storages if (storage := ref())})
        if alive <= enough or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def watched_optimizers(rows: Sequence[nn.Parameter], order: Sequence[int], log: Any) -> tuple:
    """Return optimizers for each row, the list of notes of their steps, and the record's mark.

    A note is: the layer, sends of it that nobody has waited for, gradients received, sends started.
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
        adds: by mistake, the gradient of the step before is added.
    """
    twin = Twin(sequential(layers_of(host, DEEP), nn.ReLU), RATE, MOMENTUM)
    losses = []
    gradient = torch.zeros_like(twin.old)
    for step in range(STEPS):
        minibatch = batch(device, step)
        losses.append(twin.loss(*minibatch))
        gradient = twin.gradient(*minibatch) + adds * gradient
        twin.move(gradient)
    return losses, [row.tolist() for row in rows_of(twin.model)]


@in_group
def probe_offload(user_ns: dict, *, rank: int, group: Group, partition, seed: int) -> dict:
    """Take two steps of a device and its host; the seed is that of its samples, or its weights."""
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
    """Judge the weights by the twin; and what is started, waited for and held, and when."""
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
        nothing = Mistake([None] * STEPS, "nothing was returned: return worker.loss")
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
                    f"a {op} with tag {tag} and {size} bytes: weights of piece n have tag n, and "
                    f"so has its gradient; of piece {tag} that is "
                    f"{dict(enumerate(sizes)).get(tag)} bytes"
                )
        for op, tag, size in wanted:
            content = "weights" if op == weights else "the gradient"
            count = made_here.count((op, tag, size))
            if count != 1:
                return (
                    f"{content} of piece {tag}: expected one {op} with tag {tag}, it made {count}"
                )
        return None

    return rule


def _wrong_device(seen: list[list[int]], kept: int, most: int, pieces: int) -> dict[str, bool]:
    """Return what is wrong with prefetch, which is of one piece, and with pending gradients."""
    order = [n for n, *_ in seen]
    odd_order = order != list(range(pieces))
    surplus = [receives - min(k + 2, pieces) for k, (_, receives, *_) in enumerate(seen)] or [0]
    pending = [sends - waited_for for *_, sends, waited_for in seen] or [0]
    return {
        f"pieces were worked on in the order {short(order)}, expected 0 … {pieces - 1}": odd_order,
        "no prefetch: as piece n begins, the receive of piece n + 1 has to be started already": (
            min(surplus) < 0
        ),
        "too much prefetch: as piece n begins, receives up to piece n + 1 may be started. Each "
        "of them holds a layer's weights, and the device has room for two": max(surplus) > 0,
        f"{most} rows are in the device's memory as a receive begins, {ROWS} are allowed. Before "
        "you start the receive of piece n + 1, let go of the row of piece n − 1 (row = None), and "
        "of its request, which keeps the row": most > ROWS,
        "gradients are sent and waited for at once: start the next piece meanwhile, and wait "
        "before the next gradient is sent": not any(pending[(pieces + 1) // 2 :]),
        "more than one gradient is under way: before you send one, wait for the one before": (
            max(pending) > 1
        ),
        f"{kept} rows and gradients of this step are still in the device's memory at the last "
        f"piece, {FEW} are enough: keep no row after its piece, and no gradient that is "
        "sent": kept > FEW,
    }


def _wrong_host(notes: list[list[int]], order: list[int]) -> dict[str, bool]:
    """Return what is wrong with the updates, which are early, but not too early."""
    wanted = sorted(set(order), reverse=True)
    layers = [layer for layer, *_ in notes]
    return {
        f"optimizers stepped for the layers {layers}; each has to once, as its gradient comes: "
        f"{wanted}": sorted(layers) != sorted(wanted),
        "a layer is updated before this rank has waited for the sends of its row: wait for all "
        "sends of layer i before optimizers[i].step()": any(unsent for _, unsent, *_ in notes),
        "the rows were not all sent at the beginning: start the sends of all pieces before you "
        "receive a gradient": any(sends < len(order) for *_, sends in notes[:1]),
        "the updates are late: as soon as a layer's gradient is there, update it, before you wait "
        "for the next one": any(note[2] > k + 1 for k, note in enumerate(notes)),
    }


def _rows(rows: list, device: int, host: int) -> Iterator[Step]:
    begin = host_rows(host)
    added = offloaded(device, host, adds=True)[1]
    for i, row in enumerate(offloaded(device, host)[1]):
        wrong = {
            "the weights have not changed: put the gradient into weights[i].grad before the "
            "step": begin[i],
            "the gradient of the step before is still in weights[i].grad: put the new one in its "
            "place": added[i],
        }
        yield exactly(rows[i], row, table(wrong), f"row of layer {i} after {STEPS} steps")
