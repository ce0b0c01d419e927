"""The stages of a small pipeline, which record their calls, and a run of all in one process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.probe import in_double

FEATURES = (6, 5, 7, 4, 3)
CLASSES = FEATURES[-1]
IMAGES = 24


class Token:
    """An object that lives as long as the graph of a microbatch."""


class _Watched(torch.autograd.Function):
    """A function that returns x; its graph keeps a token, and its backward is recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: StageLog) -> Tensor:
        ctx.token = Token()
        ctx.log = log
        log.forward(ctx.token)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.log.note("B")
        return gradient, None


class StageLog:
    """A record of a stage's calls and their times, and of how many graphs were alive at once."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.times: list[float] = []  # of each event, by time.perf_counter
        self.most = 0
        self._tokens: list[weakref.ref] = []

    def note(self, event: str) -> None:
        """Record that a forward or a backward happens now."""
        self.events.append(event)
        self.times.append(time.perf_counter())

    def forward(self, token: Token) -> None:
        """Record that a graph with this token now exists."""
        self.note("F")
        self._tokens.append(weakref.ref(token))
        self.most = max(self.most, sum(ref() is not None for ref in self._tokens))


class Piece(nn.Module):
    """Stage ``place`` of ``p``: one or several layers, always of the same model."""

    def __init__(self, seed: int, place: int, p: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            whole = [in_double(nn.Linear(*FEATURES[k : k + 2])) for k in range(4)]
        first = place * 4 // p
        end = (place + 1) * 4 // p
        self.linear = nn.ModuleList(whole[first:end])
        self.last = end == 4
        self.features = FEATURES[first]
        self.log = StageLog()

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, features of the next stage, or classes] for x [n, features]."""
        for layer in self.linear:
            x = torch.tanh(layer(x))
        # The output is watched, because every backward of the stage begins there.
        return _Watched.apply(3 * x if self.last else x, self.log)


def samples_and_labels(seed: int, n: int = IMAGES) -> tuple[Tensor, Tensor]:
    """Return samples float64 [n, 6] and labels int64 [n]."""
    draw = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(n, FEATURES[0], generator=draw, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (n,), generator=draw)


class Worker:
    """A stage for `run_schedule` that records what it is asked for."""

    def __init__(self, piece: Piece, images: int):
        self.piece = piece
        self.images = images
        self.features = piece.features
        self.asked: list[list] = []

    def forward(self, k: int, x: Tensor) -> Tensor:
        """Return the output of microbatch k."""
        self.asked.append(["F", k])
        return self.piece(x)

    def loss(self, y: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a microbatch; the sum of all is the loss of the minibatch."""
        return functional.cross_entropy(y, labels, reduction="sum") / self.images

    def done(self, k: int) -> None:
        """Record that the backward of microbatch k is over."""
        self.asked.append(["B", k])
        # Record if this was called before the stage's backward ran.
        if self.piece.log.events.count("B") < sum(kind == "B" for kind, _ in self.asked):
            self.asked[-1][0] = "done before backward"


def number_of(k: int) -> int:
    """Return a number for the k-th microbatch; it differs from k, because any number will do."""
    return 3 * k + 2


def played(
    kind: Callable,
    seed: int,
    p: int,
    n: int,
    order: Sequence[Sequence[Any]],
    look: Callable = lambda *_: None,
) -> tuple[list[Piece], list[Any]]:
    """Run PipeDream with n microbatches in one process; return the p stages and their workers.

    Args:
        order: stage, "F" or "B", and microbatch of each action.
        look: is called after each action.
    """
    x, labels = samples_and_labels(seed, 4 * n)
    rate = 0.11 + seed % 8 / 20
    pieces = [Piece(seed, s, p) for s in range(p)]
    workers = [kind(piece, rate) for piece in pieces]
    inputs: dict[tuple, Tensor] = {(0, k): one for k, one in enumerate(x.chunk(n))}
    outputs: dict[tuple, Tensor] = {}
    for s, action, k in order:
        worker = workers[s]
        if action == "F":
            y = worker.forward(number_of(k), inputs[s, k].requires_grad_())
            if s == p - 1:
                outputs[s, k] = worker.loss(y, labels.chunk(n)[k])
            else:
                outputs[s, k] = y
                inputs[s + 1, k] = y.detach().clone()
        else:
            gradient = None if s == p - 1 else inputs.pop((s + 1, k)).grad
            outputs.pop((s, k)).backward(gradient)
            worker.done(number_of(k))
        look(s, pieces[s], worker.stash, action, number_of(k))
    return pieces, workers
