"""The probes of lab 15, which run on the ranks beside the student's answers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint as library
from torch import Tensor, nn

from utils.checks.groups import Group, in_group
from utils.checks.probe import answer_named, kept, reading_answer, recorded
from utils.labs.shared.memory import Meter

# -- precision -------------------------------------------------------------------------------------


def row_of(seed: int, *shape: int) -> Tensor:
    """Return normally distributed float32 numbers that follow from the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers_of(tensor: Any) -> Any:
    """Return a tensor's numbers, and the type's name for anything else."""
    if isinstance(tensor, Tensor):
        return Tensor.detach(tensor).double().reshape(-1).tolist()
    return f"<{type(tensor).__name__}>"


SHAPES = ((3, 4), (5,), (2,))
STEPS, RATE, MOMENTUM = 30, 2e-4, 0.9


def first_weights(seed: int) -> list[Tensor]:
    """Return the bfloat16 parameters before the first step."""
    return [row_of(seed + 7 * i, *shape).bfloat16() for i, shape in enumerate(SHAPES)]


def drawn_gradients(seed: int, step: int) -> list[Tensor | None]:
    """Return bfloat16 gradients; the first parameter has none in step 3, the last none until 10."""
    rows = [1 + 0.5 * row_of(seed + 31 * step + i, *shape) for i, shape in enumerate(SHAPES)]
    first, second, third = (row.bfloat16() for row in rows)
    return [None if step == 3 else first, 1e6 * second, third if step > 9 else None]


def probe_masters(user_ns: dict, *, rank: int, seed: int) -> dict[str, Any]:
    """Train some bfloat16 weights for a few steps by the student's two functions."""
    parameters = [q.requires_grad_() for q in first_weights(seed)]
    places = [q.data_ptr() for q in parameters]
    masters = answer_named(user_ns, "make_masters")(parameters)
    if not isinstance(masters, list):
        return {"kinds": f"a {type(masters).__name__}", "begun": None}
    kinds = [f"{m.dtype}" if m.is_leaf and m.requires_grad else "not trainable" for m in masters]
    result = {"kinds": kinds, "begun": [numbers_of(m) for m in masters]}
    if kinds != ["torch.float32"] * len(SHAPES):
        return result
    optimizer = torch.optim.SGD(masters, lr=RATE, momentum=MOMENTUM)
    for step in range(STEPS):
        for q, gradient in zip(parameters, drawn_gradients(seed, step), strict=True):
            q.grad = gradient
        answer_named(user_ns, "master_step")(parameters, masters, optimizer)
    return result | {
        "masters": [numbers_of(m) for m in masters],
        "weights": [numbers_of(q) for q in parameters],
        "moved": places != [q.data_ptr() for q in parameters],
        "dtypes": sorted({str(q.dtype) for q in parameters}),
    }


def addend(seed: int, shape: Sequence[int]) -> Tensor:
    """Return bfloat16 numbers from 1 to 2, so that float32 holds the sum over 4 ranks exactly."""
    return (1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@in_group
def probe_sum(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, shape: list[int]
) -> dict[str, Any]:
    """Return the sum over the group, its dtype and shape, and what was communicated."""
    x = addend(seed, shape)
    function = reading_answer(user_ns, "sum_in_float32")
    y, calls = recorded(function, x, **named)
    later = kept("sum_in_float32", y, lambda: recorded(function, x + 1, **named)[1])
    known = isinstance(y, Tensor)
    kind = f"{y.dtype} {list(y.shape)}" if known else f"a {type(y).__name__}"
    same = known and y.data_ptr() == x.data_ptr()
    return {"sum": numbers_of(y), "kind": kind, "same": same, "calls": calls, "calls again": later}


GROW_EVERY, SCALES = 3, (3.0, 2.0**20)
#: The group ranks whose gradients overflow in each step, modulo the size of the group.
OVERFLOWS = ((), (1,), (), (), (0,), (), (), (), (), (), (), (2, 3), (3,), (), ())
#: In this step, the last rank of a group has no gradients.
EMPTY = 6


@in_group
def probe_scaler(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, first: float
) -> dict[str, Any]:
    """Run a scaler over steps of which some overflow on one or two ranks."""
    place, p = dist.get_rank(group), dist.get_world_size(group)
    scaler = answer_named(user_ns, "LossScaler")(first, GROW_EVERY)
    weight, large, unused = (torch.zeros(4, requires_grad=True) for _ in range(3))
    optimizer = torch.optim.SGD([weight, large, unused], lr=1.0)
    loss = torch.tensor(12.0)
    losses = [scaler.scaled(loss).item()]
    steps = []
    for step, bad in enumerate(OVERFLOWS):
        weight.grad = row_of(seed + step, 4) * float(scaler.scale)
        large.grad = torch.full((4,), 1e30)
        if place in [one % p for one in bad]:
            weight.grad[step % 4] = math.nan if step == 4 else math.inf
        if step == EMPTY and place == p - 1:
            weight.grad = large.grad = None
        took, calls = recorded(scaler.step, [weight, large, unused], optimizer, **named)
        finite = weight.isfinite().all().item()
        steps.append({
            "took": took if isinstance(took, bool) else f"<{type(took).__name__}>",
            "scale": float(scaler.scale),
            "weight": weight.tolist() if finite else "numbers that are not finite",
            "calls": calls,
        })
    losses += [scaler.scaled(loss).item(), loss.item()]
    return {"steps": steps, "losses": losses}


KEPT, ROW = 3, 11


@in_group
def probe_compressed(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, zeros: int
) -> list[dict[str, Any]]:
    """Average this rank's gradients over three steps; return the mean and what is left.

    The gradients begin with so many zeros, which are left out of the result.
    """
    memory = torch.zeros(zeros + ROW)
    function = reading_answer(user_ns, "compressed_mean", changes=(1,))
    steps = []
    for step in range(3):
        gradient = torch.cat([torch.zeros(zeros), row_of(seed + step, ROW)])
        mean, calls = recorded(function, gradient, memory, KEPT + step // 2, **named)
        shaped = isinstance(mean, Tensor) and mean.shape == gradient.shape
        ends = numbers_of(mean[zeros:] if shaped else None), numbers_of(memory[zeros:])
        steps.append({"mean": ends[0], "memory": ends[1], "calls": calls})
    return steps


# -- recomputation ---------------------------------------------------------------------------------


ROWS, WIDTH, HIDDEN = 512, 6, 64


class Counted(nn.Module):
    """A module with dropout that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape [rows, 6]."""
        self.calls += 1
        return self.down(torch.dropout(self.up(x).tanh(), 0.3, True))


def made(seed: int) -> tuple[Counted, Tensor, Tensor]:
    """Return a module, its input, and the gradient of its output, from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = Counted().double()
        x, upstream = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return module, x.requires_grad_(), upstream


def some_numbers(*tensors: Tensor | None) -> list[Any]:
    """Return some numbers of each tensor, and its sum, which all its numbers change."""
    return [
        None if t is None else [*Tensor.detach(t).flatten()[:7].tolist(), t.sum().item()]
        for t in tensors
    ]


@contextlib.contextmanager
def without_library() -> Iterator[None]:
    """Let PyTorch's own checkpoint raise, however an answer has imported it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Write recompute by hand, without torch.utils.checkpoint")

    with (
        mock.patch.object(library, "_checkpoint_without_reentrant_generator", refuse),
        mock.patch.object(library.CheckpointFunction, "apply", refuse),
    ):
        yield


def both_passes(function: Callable, seed: int) -> dict[str, Any]:
    """Run forward and backward twice, with random numbers drawn before, between and after."""
    module, x, upstream = made(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + 1)
        with Meter(module, x, upstream) as meter:
            before = meter.now
            y = function(module, x)
            if not isinstance(y, Tensor) or y.grad_fn is None:
                return {"y": f"a {type(y).__name__} without a graph"}
            result, total = some_numbers(y), (y * upstream).sum()
            del y
            kept = meter.now - before - total.nbytes
        between = torch.rand(2).tolist()
        forwards = module.calls
        total.backward()
        after = torch.rand(2).tolist()
        calls = module.calls
        gradients = some_numbers(x.grad, *(q.grad for q in module.parameters()))
        function(module, function(module, x)).backward(upstream)
        later = some_numbers(x.grad, *(q.grad for q in module.parameters()))
    counts = {"kept": kept, "forwards": forwards, "calls": calls, "drawn": [between, after]}
    return counts | {"y": result, "gradients": gradients, "later": later}


def probe_recompute(user_ns: dict, *, rank: int, seed: int) -> dict[str, Any]:
    """Return numbers, bytes and calls of the student's function."""
    function = reading_answer(user_ns, "recompute")
    with without_library():
        return both_passes(function, seed)
