"""The check of offload in lab 11: what a device and its host do, and when.

Ranks work in pairs. The device computes a step of ten layers, and the host has the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from utils.checks.comparison import Calls, Mistake, Rule, inside, only, short, table, waited
from utils.checks.task import Report, Step, communication, facts, task, to_each
from utils.checks.trials import GroupAnswer, judge_groups
from utils.cluster.questions import Ranks
from utils.labs.shared.replicas import ReferenceModel

from .layers import Layers, rows_of
from .memory_probes import DEEP, FEW, ROWS, batch, host_rows, probe_offload
from .reference_models import sequential
from .sharding import WORLD, exactly, explain_errors
from .small_layers import BYTES, MOMENTUM, RATE, STEPS, layers_of

PAIRS = ([[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]])


@functools.cache
def offloaded(device: int, host: int, adds: bool = False) -> tuple[list[float], list[list[float]]]:
    """Return the losses of the steps and the rows after them, from training in one process.

    Args:
        device: the seed of the samples.
        host: the seed of the weights.
        adds: whether to add the previous step's gradient, by mistake.
    """
    training = ReferenceModel(sequential(layers_of(host, DEEP), nn.ReLU), RATE, MOMENTUM)
    losses = []
    gradient = torch.zeros_like(training.old)
    for step in range(STEPS):
        minibatch = batch(device, step)
        losses.append(training.loss(*minibatch))
        gradient = training.gradient(*minibatch) + adds * gradient
        training.move(gradient)
    return losses, [row.tolist() for row in rows_of(training.model)]


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
