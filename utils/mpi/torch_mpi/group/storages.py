"""Refuse to free or to move memory that a pending communication reads or writes.

A tensor's memory can go while somebody holds the tensor: ``resize_`` of its storage frees it, as
FSDP does, and ``share_memory_`` moves it. A communication has the address of the memory, so it
would read or write somebody else's (MPI 4.1, section 3.7.2: the buffer belongs to the call until it
is complete). PyTorch doesn't know of this, so its functions ask here first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from ..errors import CommunicationError, place_text, users_place
from ..record import Call
from .seals import in_background


class UsesMemory(Protocol):
    """A communication that has begun."""

    call: Call

    def is_pending(self) -> bool:
        """Return whether it still reads or writes its tensors."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors that it reads or writes."""


_begun: weakref.WeakSet[UsesMemory] = weakref.WeakSet()

#: Functions of PyTorch that free or move the memory of a storage, or of a tensor's storage.
OF_A_STORAGE = ("resize_", "share_memory_", "_share_fd_cpu_", "_share_filename_cpu_")
OF_A_TENSOR = ("resize_", "resize_as_")


def note(work: UsesMemory) -> None:
    """Let no function of PyTorch free or move the memory of this communication while it pends."""
    _begun.add(work)


def keep_memory_in_use() -> None:
    """Let PyTorch's functions refuse to free or move memory that a communication uses."""
    for name in OF_A_STORAGE:
        _ask_first(torch.UntypedStorage, name, lambda storage: storage)
    for name in OF_A_TENSOR:
        _ask_first(torch.Tensor, name, torch.Tensor.untyped_storage)


def _ask_first(kind: type, name: str, storage_of: Callable[[Any], torch.UntypedStorage]) -> None:
    original = getattr(kind, name)
    if hasattr(original, "asks_first"):
        return

    @functools.wraps(original)
    def function(self: Any, *arguments: Any, **named: Any) -> Any:
        if _begun:
            _require_free(self, storage_of, name)
        return original(self, *arguments, **named)

    function.asks_first = True  # type: ignore[attr-defined]
    setattr(kind, name, function)


def _require_free(
    one: Any, storage_of: Callable[[Any], torch.UntypedStorage], function: str
) -> None:
    """Raise CommunicationError if a pending communication uses the memory of `one`."""
    storage = storage_of(one)
    if storage.device.type != "cpu" or not (memory := storage.data_ptr()):
        return
    for work in list(_begun):
        used = {tensor.untyped_storage().data_ptr() for tensor in work.tensors()}
        if memory in used and work.is_pending():
            call, now = work.call, users_place()
            here = f" at {place_text(*now)}" if now else ""
            raise CommunicationError(
                f"{function.lstrip('_')}(){here} would free or move the memory of a tensor that "
                f"{in_background(call)} at {call.where} still uses. Call its wait() first.",
                call,
            )
