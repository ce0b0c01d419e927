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

from utils.checks.draws import across, drawn, seeded
from utils.checks.groups import Group, in_group
from utils.checks.probe import answer_named, kept, reading_answer, recorded, values_of
from utils.labs.shared.memory import Meter

# -- precision -------------------------------------------------------------------------------------


def row_of(seed: int, *shape: int) -> Tensor:
    """Return normally distributed float32 numbers, the same for the same seed."""
    return drawn(seed, *shape, dtype=torch.float32)


SHAPES = ((3, 4), (5,), (0, 3), (60,))
STEPS, RATE, MOMENTUM = 30, 2e-4, 0.9
#: Before this step somebody else changes the first master, which then gets no gradient.
EDITED = STEPS - 1


def first_weights(seed: int) -> list[Tensor]:
    """Return the bfloat16 parameters before the first step; a matrix isn't contiguous."""
    rows = [row_of(seed + 7 * i, *shape).bfloat16() for i, shape in enumerate(SHAPES)]
    return [across(row) if row.dim() == 2 else row for row in rows]


def drawn_gradients(seed: int, step: int) -> list[Tensor | None]:
    """Return bfloat16 gradients; the first parameter has none in step 3, the last none until 10.

    In step 5, the first gradient is zero, which isn't none: the momentum goes on.
    """
    rows = [1 + 0.5 * row_of(seed + 31 * step + i, *shape) for i, shape in enumerate(SHAPES)]
    first, second, empty, third = (row.bfloat16() for row in rows)
    first *= step != 5
    gone = step in (3, EDITED)
    return [None if gone else first, 1e6 * second, empty, third if step > 9 else None]


def optimizer_of(masters: list[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer with two groups of parameters."""
    groups = [{"params": masters[:1]}, {"params": masters[1:]}]
    return torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM)


def edit(master: Tensor) -> None:
    """Change a master as somebody does who loads or averages weights."""
    master.data.mul_(1.5)


#: What each master has to be, as :func:`probe_masters` says it.
MASTERS = [f"torch.float32 {list(shape)}" for shape in SHAPES]


def _kind_of_master(master: Any) -> str:
    if not isinstance(master, Tensor):
        return f"a {type(master).__name__}"
    if not (master.is_leaf and master.requires_grad):
        return "not trainable"
    return f"{master.dtype} {list(master.shape)}"


def probe_masters(user_ns: dict, *, rank: int, seed: int) -> dict[str, Any]:
    """Train some bfloat16 weights for a few steps by the student's two functions."""
    parameters = first_weights(seed)
    for q in parameters[:-1]:
        q.requires_grad_()  # the last one is frozen, until it has a master
    places = [q.data_ptr() for q in parameters]
    masters = answer_named(user_ns, "make_masters")(parameters)
    parameters[-1].requires_grad_()
    if not isinstance(masters, list):
        return {"kinds": f"a {type(masters).__name__}", "begun": None}
    kinds = [_kind_of_master(m) for m in masters]
    result = {"kinds": kinds, "begun": [values_of(m) for m in masters]}
    if kinds != MASTERS:
        return result
    _take_steps(user_ns, parameters, masters, seed)
    return result | {
        "masters": [values_of(m) for m in masters],
        "weights": [values_of(q) for q in parameters],
        "moved": places != [q.data_ptr() for q in parameters],
        "dtypes": sorted({str(q.dtype) for q in parameters}),
    }


def _take_steps(user_ns: dict, parameters: list[Tensor], masters: list[Tensor], seed: int) -> None:
    """Call `master_step` a few times; before one of the calls, a master changes."""
    optimizer = optimizer_of(masters)
    for step in range(STEPS):
        if step == EDITED:
            edit(masters[0])
        for q, gradient in zip(parameters, drawn_gradients(seed, step), strict=True):
            q.grad = gradient
        answer_named(user_ns, "master_step")(parameters, masters, optimizer)


def addend(seed: int, shape: Sequence[int], size: float) -> Tensor:
    """Return bfloat16 numbers of a size, a power of 2, up to twice the size, of both signs.

    So float32 holds the sum over 4 ranks exactly. float16 holds neither large nor small ones. A
    matrix isn't contiguous.
    """
    draw = seeded(seed)
    row = (1 + torch.rand(*reversed(shape), generator=draw)).bfloat16() * size
    row = torch.where(torch.rand(row.shape, generator=draw) < 0.3, -row, row)
    return row.t() if len(shape) == 2 else row


@in_group
def probe_sum(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    named: dict,
    seed: int,
    shape: list[int],
    size: float,
) -> dict[str, Any]:
    """Return the sum over the group, its dtype and shape, and what was communicated."""
    x = addend(seed, shape, size)
    function = reading_answer(user_ns, "sum_in_float32")
    y, calls = recorded(function, x, **named)
    later = kept("sum_in_float32", y, lambda: recorded(function, x + 1, **named)[1])
    known = isinstance(y, Tensor)
    kind = f"{y.dtype} {list(y.shape)}" if known else f"a {type(y).__name__}"
    same = known and y.numel() > 0 and y.data_ptr() == x.data_ptr()
    return {"sum": values_of(y), "kind": kind, "same": same, "calls": calls, "calls again": later}


SCALES = (48.0, 2.0**20, 0.9)
#: After so many good steps the scale doubles.
GROW_EVERY = (3, 2, 4)
#: The group ranks whose gradients overflow in each step, modulo the size of the group. In odd
#: steps it is the second parameter's gradient.
OVERFLOWS = (
    *((), (), (), (1,), (), (), (0,), (), ()),
    *((), (), (), (), (2, 3), (3,), (), ()),
)
#: In this step, the last rank of a group has no gradients. In the other one, a gradient is NaN.
EMPTY, NOT_A_NUMBER = 8, 6
#: With momentum, a step with gradients of zero still moves the weights.
INERTIA = 0.5
#: The learning rate of the second parameter, whose sum over the steps must stay finite.
SLOW = 0.1
#: The size of the second parameter's gradients, near the end of float32: their sum is infinite.
LARGE = 2e38


@in_group
def probe_scaler(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, first: float, grow_every: int
) -> dict[str, Any]:
    """Run a scaler over steps of which some overflow on one or two ranks."""
    place, p = dist.get_rank(group), dist.get_world_size(group)
    scaler = answer_named(user_ns, "LossScaler")(first, grow_every)
    weight, large, unused = (torch.zeros(4, requires_grad=True) for _ in range(3))
    groups = [{"params": [weight, unused]}, {"params": [large], "lr": SLOW}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=INERTIA)
    loss = torch.tensor(12.0, requires_grad=True)
    scaled = scaler.scaled(loss)
    losses = [values_of(scaled)]
    if not (isinstance(scaled, Tensor) and scaled.requires_grad):
        return {"steps": [], "losses": [losses[0], None, None], "gradient": None}
    scaled.backward()
    steps = []
    for step, bad in enumerate(OVERFLOWS):
        weight.grad = row_of(seed + step, 4) * float(scaler.scale)
        large.grad = large_gradient(step)
        if place in [one % p for one in bad]:
            overflowing = (weight, large)[step % 2].grad
            infinite = math.inf if step % 3 else -math.inf
            overflowing[step % 4] = math.nan if step == NOT_A_NUMBER else infinite
        if step == EMPTY and place == p - 1:
            weight.grad = large.grad = None
        took, calls = recorded(scaler.step, [weight, large, unused], optimizer, **named)
        steps.append({
            "took": took if isinstance(took, bool) else f"<{type(took).__name__}>",
            "scale": float(scaler.scale),
            "weight": _if_finite(weight),
            "large": _if_finite(large / LARGE),
            "calls": calls,
        })
    losses += [values_of(scaler.scaled(loss)), loss.item()]
    return {"steps": steps, "losses": losses, "gradient": values_of(loss.grad)}


def large_gradient(step: int) -> Tensor:
    """Return the second parameter's gradient in a step; the signs alternate."""
    return torch.full((4,), LARGE if step % 2 else -LARGE)


def _if_finite(weight: Tensor) -> list[float] | str:
    finite = bool(weight.isfinite().all())
    return values_of(weight) if finite else "numbers that are not finite"


KEPT, ROW = 3, 11


def drawn_row(seed: int, step: int) -> Tensor:
    """Return a gradient; in the first step, its largest entries are nearly equal."""
    row = row_of(seed + step, ROW)
    if step == 0:
        near = torch.tensor([9.0, -9.01, 9.02, -9.03])
        row[seed % 7 :][:4] = near
    return row


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
        gradient = torch.cat([torch.zeros(zeros), drawn_row(seed, step)])
        mean, calls = recorded(function, gradient, memory, KEPT + step // 2, **named)
        shaped = isinstance(mean, Tensor) and mean.shape == gradient.shape
        ends = values_of(mean[zeros:] if shaped else None), values_of(memory[zeros:])
        steps.append({"mean": ends[0], "memory": ends[1], "calls": calls})
    return steps


# -- recomputation ---------------------------------------------------------------------------------


ROWS, WIDTH, HIDDEN = 512, 6, 64


class Counted(nn.Module):
    """A module with dropout while it trains, and with noise always, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape [rows, 6]."""
        self.calls += 1
        hidden = self.up(x).tanh()
        hidden = hidden + 0.1 * torch.rand_like(hidden)
        return self.down(torch.dropout(hidden, 0.3, self.training))


class Bare(nn.Module):
    """A module without parameters, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        self.calls += 1
        return torch.dropout(x.tanh(), 0.3, self.training)


def made(seed: int) -> tuple[Counted, Counted, Tensor, Tensor]:
    """Return two modules, an input, and the gradient of an output, from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module, other = Counted().double(), Counted().double()
        x, upstream = torch.randn(2, WIDTH, ROWS, dtype=torch.float64).transpose(1, 2)
    return module, other, x.requires_grad_(), upstream


def some_numbers(*tensors: Tensor | None) -> list[Any]:
    """Return some numbers of each tensor, and its sum, which all its numbers change."""
    rows = map(values_of, tensors)
    return [None if row is None else [*row[:7], sum(row)] for row in rows]


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
    """Run forward and backward several times, with random numbers drawn before, between and after.

    The second time, the module is once behind a function, and another module comes after it, in
    eval mode. The third time, one call holds both modules, and a call has no backward; the backward
    of the first call comes first.
    """
    module, other, x, upstream = made(seed)
    other.eval()
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
        counts = {"kept": kept, "forwards": forwards, "calls": calls, "drawn": [between, after]}
        counts |= {"y": result, "gradients": gradients}
        if forwards > 1 or calls > 2 or None in gradients:
            return counts  # an answer of this kind may fail in what follows
        y = function(module, function(module, function(lambda z: module(z), x)))
        function(other, y).backward(upstream)
        parameters = [*module.parameters(), *other.parameters()]
        later = some_numbers(x.grad, *(q.grad for q in parameters))
        calls_of_other = other.calls
        bare, both = Bare(), nn.Sequential(module, other)
        first, _, last = function(both, x), function(both, x), function(bare, x)
        first.backward(upstream)
        last.backward(upstream)
        apart = some_numbers(x.grad, *(q.grad for q in parameters))
    counts |= {"evaluates": not module.training, "trains": other.training}
    return counts | {"later": later, "apart": apart, "others": [calls_of_other, bare.calls]}


def probe_recompute(user_ns: dict, *, rank: int, seed: int) -> dict[str, Any]:
    """Return numbers, bytes and calls of the student's function."""
    function = reading_answer(user_ns, "recompute")
    with without_library():
        return both_passes(function, seed)
