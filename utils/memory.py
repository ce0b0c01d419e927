"""How many bytes of tensors a rank holds: now, at the peak, and of which kind.

    with Meter(model) as meter:                  # counts what the block makes, and the model
        loss = model(images).mean()
        held = meter.now                         # bytes alive: weights, activations, the rest
        loss.backward()
    meter.peak                                   # the most that was alive at once, in bytes

Counted are storages: a view, or a tensor that several names stand for, counts once. The numbers
follow from the program, not from the machine: they are the same at each run. What no operation of
PyTorch makes is not seen: an array of NumPy, buffers of the MPI library, workspaces inside of an
operation. So the process needs more than this; how much more, the resident set size tells.

Idea: PyTorch's `torch.distributed._tools.mem_tracker` (2024).
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "gradients", "optimizer state", "other")


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside a ``with`` block, on this thread.

    Args:
        things: Modules, optimizers, tensors, or lists and dicts of them, that exist already and
            shall count from the beginning; of a module parameters, gradients and buffers.

    Attributes:
        peak: The most bytes alive at once, since the block began or :meth:`restart` was called.
        history: (seconds of ``time.perf_counter``, bytes alive) at each new tensor.

    A block may be entered again: the meter goes on. Deleted tensors count no more as soon as they
    are gone; tensors that still live keep their place between two blocks.
    """

    def __init__(self, *things: Any) -> None:
        super().__init__()
        # Of each storage, by its id, a weak reference and its bytes when last looked at.
        self._storages: dict[int, tuple[weakref.ref, int]] = {}
        self.peak = 0
        self.history: list[tuple[float, int]] = []
        self.watch(*things)

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return sum(storage.nbytes() for storage in self._alive())

    def watch(self, *things: Any) -> None:
        """Count these, too, from now on; of a module what it has at this moment."""
        tensors = list(tensors_of(*things))
        gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        plain = _plain([tensors, gradients])
        if self._changed((tensor.untyped_storage() for tensor in plain), new=True):
            self._note()

    def restart(self) -> int:
        """Begin a new peak and a new history; return the bytes that are alive."""
        self.peak = 0
        self.history = []
        self._note()
        return self.peak

    def kinds(self, parameters: Any = (), optimizer: Any = ()) -> dict[str, int]:
        """Return what is alive, in bytes, by kind.

        Args:
            parameters: A module, or parameters.
            optimizer: An optimizer, or tensors that are its state.

        Returns:
            "parameters", "gradients" (of those parameters), "optimizer state", and "other": what
            else this meter has seen, such as activations and the minibatch.
        """
        weights = list(_parameters(parameters))
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        seen: set[int] = set()
        sizes = [_bytes(part, seen) for part in (weights, gradients, tensors_of(optimizer))]
        rest = sum(storage.nbytes() for storage in self._alive() if id(storage) not in seen)
        return dict(zip(KINDS, [*sizes, rest], strict=True))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: let it come to the plain tensors that it consists of
        out = function(*args, **(kwargs or {}))
        used = [tensor.untyped_storage() for tensor in _plain((args, kwargs))]
        # A view of what is used, or itself, is not new; but torch.tensor(…) is shown so at first.
        lifted = function is torch.ops.aten.lift_fresh.default
        before = set() if lifted else {id(storage) for storage in used}
        results = [tensor.untyped_storage() for tensor in _plain(out)]
        made = [storage for storage in results if id(storage) not in before]
        # FSDP gives a storage its bytes by no operation: so look at what is used, too.
        grown = self._changed(used, new=False)
        if self._changed(made, new=True) or grown:
            self._note()
        return out

    def _alive(self) -> list[torch.UntypedStorage]:
        storages = [reference() for reference, _ in list(self._storages.values())]
        return [storage for storage in storages if storage is not None]

    def _changed(self, storages: Iterable[torch.UntypedStorage], new: bool) -> bool:
        """Note sizes, of new storages as well if they shall; return whether one has changed."""
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
        self.peak = max(self.peak, now)
        self.history.append((time.perf_counter(), now))


def tensors_of(*things: Any) -> Iterator[Tensor]:
    """Yield all tensors of modules (without gradients), optimizers (their state), and containers.

    Raises:
        TypeError: Something is none of these.
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
                "a module, an optimizer, a tensor, or lists and dicts of them are measured; got "
                + type(thing).__name__
            )


def _parameters(thing: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(thing):
        yield from leaf.parameters() if isinstance(leaf, nn.Module) else (leaf,)


def nbytes(*things: Any) -> int:
    """Return the bytes of all tensors of modules, optimizers, containers: each storage once.

    Of a module parameters and buffers count, no gradients; of an optimizer what it keeps for each
    parameter, without the parameters themselves. Of a DTensor it is the shard of this rank.
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
    """Yield what this process has of a tensor: of a DTensor its shard."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, Tensor):  # there may be a mesh as well
                yield from _locally(part)
    else:
        yield tensor


def _plain(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree that have bytes of their own in this process."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            yield from _locally(leaf)
