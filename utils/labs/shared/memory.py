"""Measures the bytes of a rank's tensors: now, at the peak, and by kind.

    with Meter(model) as meter:                  # counts the model and all tensors of the block
        loss = model(images).mean()
        held = meter.now                         # bytes in use: weights, activations, the rest
        loss.backward()
    meter.peak                                   # the most bytes in use at once

A meter counts storages, so a view or a tensor with several names counts once. The numbers depend on
the program and not on the machine, so every run gives the same. A meter doesn't see memory that no
PyTorch operation allocates, such as NumPy arrays, buffers of the MPI library, and workspaces inside
an operation. The process therefore needs more, and its resident set size shows how much.

Idea: PyTorch's `torch.distributed._tools.mem_tracker` (2024).
"""

from __future__ import annotations

import itertools
import linecache
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TORCH = str(Path(torch.__file__).parent)
KINDS = ("parameters", "gradients", "optimizer state", "other")


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that this thread makes inside a ``with`` block.

    Args:
        things: Existing modules, optimizers, tensors, or lists and dicts of them, that count from
            the beginning. A module counts with its parameters, gradients and buffers.

    Attributes:
        peak: The most bytes in use at once since the block began or :meth:`restart` was called.
        peak_line: The line of code that made the peak: the innermost line that isn't PyTorch's.
        history: (seconds of ``time.perf_counter``, bytes in use) at each new tensor.

    You may enter a block again, and the meter continues. A deleted tensor stops counting at once,
    and a tensor that still exists between two blocks keeps counting.
    """

    def __init__(self, *things: Any) -> None:
        super().__init__()
        # For each storage, by its id: a weak reference, and its bytes at the last look.
        self._storages: dict[int, tuple[weakref.ref, int]] = {}
        self.peak = 0
        self._peak_at: tuple[str, int] = ("", 0)
        self.history: list[tuple[float, int]] = []
        self.watch(*things)

    @property
    def now(self) -> int:
        """Return the bytes that are in use."""
        return sum(storage.nbytes() for storage in self._alive())

    @property
    def peak_line(self) -> str:
        """Return the line of code that made the peak, without indentation."""
        return linecache.getline(*self._peak_at).strip()

    def watch(self, *things: Any) -> None:
        """Count these, too, from now on; for a module, the tensors that it has now."""
        tensors = list(tensors_of(*things))
        gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        plain = _plain([tensors, gradients])
        if self._changed((tensor.untyped_storage() for tensor in plain), new=True):
            self._note()

    def restart(self) -> int:
        """Begin a new peak and a new history; return the bytes that are in use."""
        self.peak = 0
        self.history = []
        self._note()
        return self.peak

    def kinds(self, parameters: Any = (), optimizer: Any = ()) -> dict[str, int]:
        """Return the bytes in use by kind.

        Args:
            parameters: A module, or parameters.
            optimizer: An optimizer, or the tensors of its state.

        Returns:
            "parameters", "gradients" (of these parameters), "optimizer state", and "other" for the
            remaining tensors that this meter has seen, such as activations and the minibatch.
        """
        weights = list(_parameters(parameters))
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        seen: set[int] = set()
        sizes = [_bytes(part, seen) for part in (weights, gradients, tensors_of(optimizer))]
        rest = sum(storage.nbytes() for storage in self._alive() if id(storage) not in seen)
        return dict(zip(KINDS, [*sizes, rest], strict=True))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: PyTorch then dispatches on its plain tensors
        out = function(*args, **(kwargs or {}))
        used = [tensor.untyped_storage() for tensor in _plain((args, kwargs))]
        # A result that shares storage with an argument isn't new, except for torch.tensor(…).
        lifted = function is torch.ops.aten.lift_fresh.default
        before = set() if lifted else {id(storage) for storage in used}
        results = [tensor.untyped_storage() for tensor in _plain(out)]
        made = [storage for storage in results if id(storage) not in before]
        # FSDP resizes storages without an operation, so look at the arguments, too.
        grown = self._changed(used, new=False)
        if self._changed(made, new=True) or grown:
            self._note()
        return out

    def _alive(self) -> list[torch.UntypedStorage]:
        storages = [reference() for reference, _ in list(self._storages.values())]
        return [storage for storage in storages if storage is not None]

    def _changed(self, storages: Iterable[torch.UntypedStorage], new: bool) -> bool:
        """Note the sizes of known (and if `new`, new) storages; return whether one has changed."""
        changed = False
        for storage in storages:
            ref, size = self._storages.get(id(storage), (None, None))
            known = ref is not None and ref() is storage
            if (known or new) and (not known or size != storage.nbytes()):
                self._storages[id(storage)] = weakref.ref(storage), storage.nbytes()
                changed = True
        return changed

    def _note(self) -> None:
        alive = self._alive()
        self._storages = {id(s): (weakref.ref(s), s.nbytes()) for s in alive}
        now = sum(size for _, size in self._storages.values())
        if now > self.peak:
            self.peak, self._peak_at = now, _place_outside()
        self.history.append((time.perf_counter(), now))


def _place_outside() -> tuple[str, int]:
    """Return file and line of the innermost frame that isn't PyTorch's or this module's."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def tensors_of(*things: Any) -> Iterator[Tensor]:
    """Yield all tensors of modules (without gradients), optimizers (their state), and containers.

    Raises:
        TypeError: An argument has another type.
    """
    for thing in tree_leaves(things):
        if isinstance(thing, nn.Module):
            yield from itertools.chain(thing.parameters(), thing.buffers())
        elif isinstance(thing, torch.optim.Optimizer):
            state = tree_leaves([list(of.values()) for of in thing.state.values()])
            yield from (value for value in state if isinstance(value, Tensor))
        elif isinstance(thing, Tensor):
            yield thing
        elif thing is not None:
            raise TypeError(
                f"A meter can't measure an object of type {type(thing).__name__}. Give it modules, "
                "optimizers, tensors, or lists and dicts of them."
            )


def _parameters(thing: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(thing):
        yield from leaf.parameters() if isinstance(leaf, nn.Module) else (leaf,)


def nbytes(*things: Any) -> int:
    """Return the bytes of all tensors of modules, optimizers and containers, each storage once.

    A module counts with its parameters and buffers, but without gradients. An optimizer counts with
    its state for each parameter, but without the parameters. A DTensor counts with this rank's
    shard.
    """
    return _bytes(tensors_of(*things), set())


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of storages that are not in ``seen``, and add them to it."""
    total = 0
    for storage in (tensor.untyped_storage() for tensor in _plain(list(tensors))):
        if id(storage) not in seen:
            seen.add(id(storage))
            total += storage.nbytes()
    return total


def _locally(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the part of a tensor that is in this process, which for a DTensor is its shard."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, Tensor):  # another part may be a mesh
                yield from _locally(part)
    else:
        yield tensor


def _plain(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree that have memory in this process."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            yield from _locally(leaf)
