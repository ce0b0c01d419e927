"""The reference models of ZeRO and offload in lab 11, which are not sharded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from utils.labs.shared.replicas import ReferenceModel, Seeds

from .small_layers import MOMENTUM, RATE, SMALL, STEPS, layers_of, loss_of, row_of, samples


def sequential(layers: Sequence[nn.Module], act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Return the layers with an activation in between."""
    return nn.Sequential(*itertools.chain(*((layer, act()) for layer in layers)))[:-1]


def _training(seed: int) -> ReferenceModel:
    """Return the training of the small model in one process."""
    return ReferenceModel(sequential(layers_of(seed)), RATE, MOMENTUM, loss_of)


@functools.cache
def rows_at(seeds: Seeds, place: int, step: int) -> list[Tensor]:
    """Return each layer's gradient for the samples of a group rank, before any update."""
    row = _training(seeds.model).gradient(samples(seeds.own[place], step))
    return list(row.split([(wide + 1) * narrow for wide, narrow in itertools.pairwise(SMALL)]))


@functools.cache
def trained(seeds: Seeds, mode: str = "mean") -> list[list[float]]:
    """Return the padded row of all weights after each step; ``mode`` is "mean" or a mistake."""
    training = _training(seeds.model)
    p = len(seeds.own)
    added = 0.0
    rows = []
    for step in range(STEPS):
        of_ranks = [row_of([training.gradient(samples(own, step))], p) for own in seeds.own]
        mean = sum(of_ranks) / p
        added = added + mean
        own_parts = torch.cat([row.chunk(p)[k] for k, row in enumerate(of_ranks)])
        gradient = {
            "mean": mean,
            "sum": p * mean,
            "twice divided": mean / p,
            "own": own_parts,
            "own, divided": own_parts / p,
            "first": of_ranks[0],
            "adds up": added,
        }[mode]
        training.move(gradient[: len(training.old)])
        rows.append(row_of(training.model.parameters(), p).tolist())
    return rows
