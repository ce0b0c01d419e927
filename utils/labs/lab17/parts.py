"""What ranks serve with: a cache of keys and values, a rank's part of a model, and its layers."""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor, nn

from utils import models

#: The head's weights in Llama 3.2 1B (262.7 million), divided by a block's (60.8 million).
HEAD = 4.32


class Cache:
    """The keys and values of all blocks, with room for some tokens of each text.

    `keys` and `values` have a tensor [samples, room, columns] for each block, whose first `length`
    tokens are filled.
    """

    def __init__(self, model: models.GPT, samples: int, room: int):
        weights = [block.attention.k.weight for block in model.blocks]
        self.keys = [w.new_zeros(samples, room, len(w)) for w in weights]
        self.values = [w.new_zeros(samples, room, len(w)) for w in weights]
        self.length = 0


def part_of(model: models.GPT, place: int, p: int) -> models.GPT:
    """Return the part of a model for one of p ranks: its heads and its hidden columns.

    `q`, `k`, `v` and `up` have only this rank's outputs, and `out` and `down` only its inputs, but
    their whole bias. All else is as in the model. Any p is possible.
    """
    part = copy.deepcopy(model)
    for block in part.blocks:
        attention = block.attention
        mlp = block.mlp
        columns = torch.arange(attention.q.out_features).view(attention.heads, -1)
        own = columns.tensor_split(p)[place]
        hidden = torch.arange(mlp.up.out_features).tensor_split(p)[place]
        attention.heads = len(own)
        for layer in (attention.q, attention.k, attention.v):
            _cut(layer, 0, own.flatten())
        _cut(attention.out, 1, own.flatten())
        _cut(mlp.up, 0, hidden)
        _cut(mlp.down, 1, hidden)
    return part


def _cut(layer: nn.Linear, dim: int, kept: Tensor) -> None:
    """Keep only these outputs (dim 0) or inputs (dim 1) of a layer."""
    layer.weight = nn.Parameter(layer.weight.detach().index_select(dim, kept), requires_grad=False)
    if dim == 0:
        layer.bias = nn.Parameter(layer.bias.detach()[kept], requires_grad=False)
    layer.out_features, layer.in_features = layer.weight.shape


class Chain:
    """The layers of a GPT in a row: the embedding, the blocks, and the head with its norm.

    Attributes:
        costs: the time of each layer for a microbatch, in units of a block.
        width, dtype: of the activations between two layers.
        marks: (start, end) of each call of :meth:`run`, by ``time.perf_counter``.
    """

    def __init__(self, model: models.GPT, seconds: float = 0.0):
        self.layers = [model.embedded, *model.blocks, model.logits]
        self.costs = [0.0] + [1.0] * len(model.blocks) + [HEAD]
        self.seconds = seconds
        self.width = model.head.in_features
        self.dtype = model.head.weight.dtype
        self.marks: list[tuple[float, float]] = []

    def run(self, first: int, end: int, x: Tensor) -> Tensor:
        """Return what the layers first, …, end − 1 make of x, as late as on a device."""
        start = time.perf_counter()
        for layer in self.layers[first:end]:
            x = layer(x)
        if self.seconds:
            time.sleep(self.seconds * sum(self.costs[first:end]))
        self.marks.append((start, time.perf_counter()))
        return x
