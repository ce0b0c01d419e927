"""The check of task 15.4: a module whose activations are recomputed in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as library
from torch import Tensor, nn

from utils.checks.comparison import Mistake
from utils.checks.probe import reading_answer
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks
from utils.labs.shared.memory import Meter

#: What float64 may lose; a mistake is off by much more.
EXACT = 1e-10
ROWS, WIDTH, HIDDEN = 512, 6, 64
#: Bytes that an answer may keep in addition to x, for example the state of random numbers.
SLACK = 8_192


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


def _made(seed: int) -> tuple[Counted, Tensor, Tensor]:
    """Return a module, its input, and the gradient of its output, from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = Counted().double()
        x, upstream = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return module, x.requires_grad_(), upstream


def _numbers(*tensors: Tensor | None) -> list[Any]:
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


def _run(function: Callable, seed: int) -> dict[str, Any]:
    """Run forward and backward twice, with random numbers drawn before, between and after."""
    module, x, upstream = _made(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + 1)
        with Meter(module, x, upstream) as meter:
            before = meter.now
            y = function(module, x)
            if not isinstance(y, Tensor) or y.grad_fn is None:
                return {"y": f"a {type(y).__name__} without a graph"}
            result, total = _numbers(y), (y * upstream).sum()
            del y
            kept = meter.now - before - total.nbytes
        between = torch.rand(2).tolist()
        forwards = module.calls
        total.backward()
        after = torch.rand(2).tolist()
        calls = module.calls
        gradients = _numbers(x.grad, *(q.grad for q in module.parameters()))
        function(module, function(module, x)).backward(upstream)
        later = _numbers(x.grad, *(q.grad for q in module.parameters()))
    counts = {"kept": kept, "forwards": forwards, "calls": calls, "drawn": [between, after]}
    return counts | {"y": result, "gradients": gradients, "later": later}


def probe_recompute(user_ns: dict, *, rank: int, seed: int) -> dict[str, Any]:
    """Return numbers, bytes and calls of the student's function."""
    function = reading_answer(user_ns, "recompute")
    with without_library():
        return _run(function, seed)


def _forgetful(seed: int) -> list[Any]:
    """Return the gradients if backward draws another dropout mask than forward."""
    module, x, upstream = _made(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + 1)
        module(x)
        torch.rand(2)  # as between forward and backward in `_run`
        module(x).backward(upstream)
    return _numbers(x.grad, *(q.grad for q in module.parameters()))


@task("15.4", "recompute by hand", points=3)
def recompute(ranks: Ranks, report: Report) -> None:
    """Compare with the module itself, and look at what the function keeps and how it draws."""
    right = _run(nn.Module.__call__, report.seed)
    for answer in report.answers(ranks, probe_recompute, seed=report.seed):
        report.follow(answer.rank, _recomputed(answer.value, right, report.seed))


def _recomputed(result: dict[str, Any], right: dict[str, Any], seed: int) -> Iterator[Step]:
    cut = f"You returned {result['y']}. Return module(x), with a graph back to x"
    yield facts({cut: isinstance(result["y"], str)})
    yield value(result["y"], right["y"], what="result", tolerance=EXACT)
    forwards, calls = result["forwards"], result["calls"]
    yield facts({
        f"You ran the module {forwards} times in forward. Run it once": forwards != 1,
        f"After forward, you keep {result['kept']:,} bytes in addition to x. At most {SLACK:,} are "
        "allowed. Run forward under torch.no_grad(), and keep only x": result["kept"] > SLACK,
        "You ran the module once. Run it again in backward, because its activations are gone": calls
        == 1,
        f"You ran the module {calls} times. Twice is enough: in forward and in backward": calls > 2,
    })
    gradients = result["gradients"], right["gradients"]
    yield value(*gradients, _wrong_gradients(seed), what="gradients", tolerance=EXACT)
    stays = "random numbers after forward and after backward, which stay as without recompute"
    yield value(result["drawn"], right["drawn"], what=stays)
    adds = (
        "gradients after a second backward, through the module twice, which must add to the first"
    )
    yield value(result["later"], right["later"], what=adds, tolerance=EXACT)


def _wrong_gradients(seed: int) -> Iterator[Mistake]:
    yield Mistake(
        lambda got: isinstance(got, list) and bool(got) and got[0] is None,
        "x has no gradient. Recompute with a copy of x that requires a gradient, and return its "
        "gradient from backward",
    )
    yield Mistake(
        lambda got: isinstance(got, list) and None in got,
        "The parameters have no gradient. Recompute under torch.enable_grad(), and call "
        "backward on the new result",
    )
    yield Mistake(
        _forgetful(seed),
        "Backward drew another dropout mask than forward. Keep torch.get_rng_state() before "
        "forward, and set it before you recompute",
    )
