"""One pipeline of stages that runs a schedule with messages, as students build it in lab 10."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from utils.labs.shared.schedules import Schedule


def run_schedule(
    stage: nn.Module,
    schedule: Schedule,
    inputs: list[Tensor],
    labels: list[Tensor],
    group: dist.ProcessGroup | None = None,
) -> float | None:
    """Run forward and backward of all microbatches through the stages of a group's ranks.

    Args:
        stage: this rank's stage; ``stage.features`` is the width of its input.
        schedule: a list of actions for each stage, see :mod:`utils.labs.shared.schedules`; the rank
            runs its own list.
        inputs, labels: one of each per microbatch, on all ranks; the first stage uses the inputs,
        the last the labels. All microbatches have the same number of samples.

    Returns:
        On the last stage the mean of the loss over all samples, on the others ``None``. The
        gradients of the mean are added to ``.grad`` of the stage's parameters.
    """
    s = dist.get_rank(group)
    p = dist.get_world_size(group)
    held: dict[int, tuple] = {}
    sends = []
    total = 0.0
    for kind, k in schedule[s]:
        if kind == "F":
            x = inputs[k]
            if s > 0:
                x = torch.empty(len(inputs[k]), stage.features, dtype=inputs[k].dtype)
                dist.recv(x, group_src=s - 1, group=group, tag=2 * k)
                x.requires_grad_()
            y = stage(x)
            if s == p - 1:
                y = functional.cross_entropy(y, labels[k]) / len(inputs)
                total += y.item()
            else:
                sends.append(dist.isend(y.detach(), group_dst=s + 1, group=group, tag=2 * k))
            held[k] = x, y
            continue
        x, y = held.pop(k)
        gradient = None
        if s < p - 1:
            gradient = torch.empty_like(y)
            dist.recv(gradient, group_src=s + 1, group=group, tag=2 * k + 1)
        y.backward(gradient)
        if s > 0:
            sends.append(dist.isend(x.grad, group_dst=s - 1, group=group, tag=2 * k + 1))
    for send in sends:
        send.wait()
    return total if s == p - 1 else None
