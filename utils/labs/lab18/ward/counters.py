"""Count what a program computes and keeps, as numbers that don't depend on the machine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_mpi.errors import helper
from utils.labs.shared.memory import Meter


class Work(TorchDispatchMode):
    """Counts the numbers that PyTorch's operations compute inside a ``with`` block.

    Args:
        file: the program, for the counts of its functions.

    Attributes:
        numbers: how many they are.
        by_function: the same by the program's innermost function that is running.
    """

    def __init__(self, file: str = "") -> None:
        super().__init__()
        self.file = file
        self.numbers = 0
        self.by_function: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        made = sum(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        self.numbers += made
        if self.file:
            self.by_function[place_in(self.file)[0]] += made
        return out


def place_in(file: str) -> tuple[str, int]:
    """Return the function and the line at which this thread is in a file; ("", 0) if in none."""
    frame = inspect.currentframe()
    while frame and frame.f_code.co_filename != file:
        frame = frame.f_back
    return (frame.f_code.co_name, frame.f_lineno) if frame else ("", 0)


class Census(Meter):
    """A meter that also remembers the tensors at the peak: their bytes, and the line of each.

    Args:
        file: the program whose lines count.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.sizes: Counter[tuple[int, int]] = Counter()
        self._lines: dict[int, int] = {}

    def _note(self) -> None:
        before = self.peak
        super()._note()
        line = place_in(self.file)[1]
        self._lines = {id_: self._lines.get(id_, line) for id_ in self._storages}
        if self.peak > before:
            self.sizes = Counter(
                (size, self._lines[id_]) for id_, (_, size) in self._storages.items()
            )


class Watched:
    """Stands for `torch.distributed` in a program, and sees races and new groups.

    Attributes:
        groups: how many groups this rank has asked for.
        pending: the call in the background that may still change a storage, by its address.
        inside: how many of the functions of `torch.distributed` are running.
    """

    def __init__(self) -> None:
        self.groups = 0
        self.pending: dict[int, Any] = {}
        self.inside = 0

    def __getattr__(self, name: str) -> Any:
        thing = getattr(dist, name)
        is_plain = isinstance(thing, types.FunctionType) and name not in ("isend", "P2POp")
        return functools.partial(self.call, thing) if is_plain else thing

    @helper
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of `torch.distributed`; remember what it does in the background."""
        self.groups += function.__name__ == "new_group"
        self.inside += 1
        try:
            work = function(*args, **kwargs)
        finally:
            self.inside -= 1
        if not (kwargs.get("async_op") or function.__name__ == "irecv") or work is None:
            return work
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for tensor in tensors:
            self.pending[tensor.untyped_storage().data_ptr()] = work
        return Waited(work, self)


class Waited:
    """Stands for a call in the background; after `wait`, its tensors may be used."""

    def __init__(self, work: Any, watched: Watched) -> None:
        self._work = work
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    @helper
    def wait(self, *args: Any) -> Any:
        """Wait for the call."""
        pending = self._watched.pending
        for address in [key for key, work in pending.items() if work is self._work]:
            del pending[address]
        return self._work.wait(*args)


class Races(TorchDispatchMode):
    """Counts the operations on tensors that a call in the background may still change."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self.watched.pending and not self.watched.inside and function.namespace != "c10d":
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
            addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            self.count += bool(addresses & self.watched.pending.keys())
        return function(*args, **(kwargs or {}))


def bytes_alive(roots: Iterable[Any]) -> int:
    """Return the bytes of all numbers, texts, arrays and tensors that these objects refer to."""
    todo = list(roots)
    seen = set()
    total = 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, types.ModuleType | type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
            todo += [one.grad] if one.is_leaf and one.grad is not None else []
            continue
        total += sys.getsizeof(one, 0)
        todo += _inside(one)
    return total


def _inside(one: Any) -> list[Any]:
    """Return the objects to which an object refers."""
    if isinstance(one, dict):
        return [*one.keys(), *one.values()]
    if isinstance(one, list | tuple | set | frozenset | deque):
        return list(one)
    if isinstance(one, types.FunctionType):
        cells = [cell.cell_contents for cell in one.__closure__ or () if _is_full(cell)]
        return [*cells, *(one.__defaults__ or ()), vars(one)]
    if isinstance(one, types.CellType):
        return [one.cell_contents] if _is_full(one) else []
    base = getattr(one, "base", None)  # of an array that is a view
    return [*([vars(one)] if hasattr(one, "__dict__") else []), *([] if base is None else [base])]


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _kept(file: str) -> int:
    """Return the bytes to which the running functions of a program, and its names, refer."""
    frame = inspect.currentframe()
    roots = []
    while frame:
        if frame.f_code.co_filename == file:
            own = {k: v for k, v in frame.f_globals.items() if not k.startswith("__")}
            roots += [dict(frame.f_locals), own]
        frame = frame.f_back
    return bytes_alive(roots)


@contextlib.contextmanager
def steps_seen(counts: dict[str, Any], file: str, weighs: bool) -> Iterator[None]:
    """Count in "hasty" the calls in the background that an optimizer's step did not wait for.

    "rate" becomes the largest learning rate of all steps, and "kept" the most bytes at a step, if
    `weighs` is true.
    """
    from torch_mpi.record import log

    mark = log.mark()
    thread = threading.get_ident()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() == thread:  # ranks may be threads of one process
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            counts["rate"] = max(counts["rate"], *rates)
            counts["hasty"] += sum(not (c.blocking or c.waited) for c in log.since(mark))
            counts["kept"] = max(counts["kept"], _kept(file) if weighs else 0)

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def counted(limits: Collection[str], file: str, watched: Watched) -> Iterator[dict[str, Any]]:
    """Yield a dict that has the counts of :func:`.program.measured` after the block."""
    counts: dict[str, Any] = {"hasty": 0, "rate": 0.0, "work": 0, "peak": 0, "kept": 0}
    with contextlib.ExitStack() as stack:
        stack.enter_context(steps_seen(counts, file, "kept" in limits))
        races = stack.enter_context(Races(watched)) if "races" in limits else None
        work = stack.enter_context(Work()) if "work" in limits else None
        meter = stack.enter_context(Meter()) if "peak" in limits else None
        yield counts
        counts.update(work=work.numbers if work else 0, peak=meter.peak if meter else 0)
        counts.update(races=races.count if races else 0, groups=watched.groups)
