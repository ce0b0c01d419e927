"""Count what a program computes and keeps, as numbers that don't depend on the machine."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.labs.shared.memory import Meter


class Work(TorchDispatchMode):
    """Counts the numbers that PyTorch's operations compute inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.numbers += sum(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


class Census(Meter):
    """A meter that also remembers the sizes of the tensors at the peak, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[int] = Counter()

    def _note(self) -> None:
        before = self.peak
        super()._note()
        if self.peak > before:
            self.sizes = Counter(size for _, size in self._storages.values())


@contextlib.contextmanager
def hasty_steps(counts: dict[str, Any]) -> Iterator[None]:
    """Count in "hasty" the calls in the background that an optimizer's step did not wait for.

    "rate" becomes the largest learning rate of all steps.
    """
    from torch_mpi.record import log

    mark, thread = log.mark(), threading.get_ident()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() == thread:  # ranks may be threads of one process
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            counts["rate"] = max(counts["rate"], *rates)
            counts["hasty"] += sum(not (c.blocking or c.waited) for c in log.since(mark))

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def counted(limits: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield a dict that has "hasty", "rate", "work" and "peak" after the block.

    "work" and "peak" are 0 if they aren't in the limits.
    """
    counts: dict[str, Any] = {"hasty": 0, "rate": 0.0, "work": 0, "peak": 0}
    with contextlib.ExitStack() as stack:
        stack.enter_context(hasty_steps(counts))
        work = stack.enter_context(Work()) if "work" in limits else None
        meter = stack.enter_context(Meter()) if "peak" in limits else None
        yield counts
        counts.update(work=work.numbers if work else 0, peak=meter.peak if meter else 0)
