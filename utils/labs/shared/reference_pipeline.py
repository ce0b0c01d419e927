"""The reference model for checks of pipelines, whose stages are in :mod:`.pipeline_stages`.

The model is the same for every number of stages, and its weights depend only on the seed. All
numbers are in double precision. :class:`Reference` trains like PipeDream, or makes a given mistake.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from .pipeline_stages import IMAGES, Piece, played, samples_and_labels
from .replicas import ReferenceModel
from .schedules import gpipe, one_f_one_b, planned
from .small_models import weights_of


def _whole(seeds: tuple[int, ...], n: int) -> tuple[ReferenceModel, list[Piece], Tensor, Tensor]:
    """Return the reference model of all stages, these stages, and the samples with their labels.

    The first stage has the samples, and the last stage has their labels.
    """
    pieces = [Piece(seed, s, len(seeds)) for s, seed in enumerate(seeds)]
    whole = ReferenceModel(nn.Sequential(*pieces), rate=0.0)
    return whole, pieces, samples_and_labels(seeds[0], n)[0], samples_and_labels(seeds[-1], n)[1]


@functools.cache
def reference_gradients(
    seeds: tuple[int, ...],
    reduction: str = "mean",
    n: int = IMAGES,
    part: tuple[int, int | None] = (0, None),
    labelled: tuple[int, int] | None = None,
) -> tuple[list[list[float]], float]:
    """Return each stage's gradients, and the loss, from the model that isn't split.

    Args:
        seeds: the seed of each stage.
        part: which of n samples to use, as (start, stop).
        labelled: the same for the samples whose labels they get by mistake.
    """
    alone, pieces, x, labels = _whole(seeds, n)
    batch = x[slice(*part)], labels[slice(*(labelled or part))]
    row = alone.gradient(*batch, reduction=reduction)
    sizes = [len(weights_of(piece)) for piece in pieces]
    return [part.tolist() for part in row.split(sizes)], alone.loss(*batch, reduction=reduction)


@functools.cache
def losses_of(seeds: tuple[int, ...], m: int, n: int = IMAGES) -> list[float]:
    """Return how much each of m microbatches of n samples adds to the loss.

    Args:
        seeds: the seed of each stage.
    """
    alone, _, x, labels = _whole(seeds, n)
    chunks = zip(x.chunk(m), labels.chunk(m), strict=True)
    return [alone.loss(*chunk, reduction="sum") / n for chunk in chunks]


class Reference:
    """A stage that updates after each backward; ``mode`` chooses the right way or a mistake."""

    def __init__(self, piece: nn.Module, rate: float, mode: str = "stash"):
        self.piece = piece
        self.rate = rate
        self.mode = mode
        self.stash: dict[int, dict[str, Tensor]] = {}
        self.shared: dict[str, Tensor] = {}  # the copy of this version

    def loss(self, y: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a microbatch."""
        return functional.cross_entropy(y, labels)

    def forward(self, k: int, x: Tensor) -> Tensor:
        """Return the output of microbatch k, computed with the newest weights."""
        if self.mode == "newest":
            return self.piece(x)
        named = self.piece.named_parameters()
        copy = {n: q.detach().clone().requires_grad_() for n, q in named}
        if self.mode == "shared":
            copy = self.shared = self.shared or copy
        self.stash[k] = copy
        return functional_call(self.piece, copy, (x,))

    @torch.no_grad()
    def done(self, k: int) -> None:
        """Update the weights, or make a mistake."""
        old = self.stash.pop(k, {})
        self.shared = {}
        factor = {"still": 0, "up": -1, "no rate": 1 / self.rate}.get(self.mode, 1)
        for name, q in self.piece.named_parameters():
            used = old.get(name, q)
            gradient = used.grad
            if used is q:
                q.grad = None
            if self.mode == "momentum":
                gradient = q.grad = gradient + (0 if q.grad is None else q.grad)
            begin = used if self.mode == "from old" else q
            q.data.copy_(begin - factor * self.rate * gradient)


def order_of(p: int, n: int, reverse: bool = False) -> list[list[Any]]:
    """Return stage, "F" or "B", and microbatch of each action of PipeDream, for :func:`played`.

    Args:
        reverse: all forwards come first, then the backwards from the last microbatch on.
    """
    schedule = gpipe(p, n) if reverse else one_f_one_b(p, n)
    return [[s, kind, k] for s, kind, k, *_ in planned(schedule)[0]]


@functools.cache
def weights_by(mode: str, seed: int, p: int, n: int, reverse: bool) -> list[list[float]]:
    """Return the weights of each stage after all microbatches."""
    pieces, _ = played(functools.partial(Reference, mode=mode), seed, p, n, order_of(p, n, reverse))
    return [weights_of(piece).tolist() for piece in pieces]
