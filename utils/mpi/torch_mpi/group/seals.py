"""Find a tensor that a program changes while its ``isend`` is pending.

The receiver then gets old values, new ones, or a mixture, depending on the size of the message
(MPI 4.1, section 3.7.2). So a seal keeps a digest of the tensor's bytes, and compares it at
``wait()``. Notebooks always do this; a program does it with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
"""

from __future__ import annotations

import ctypes
import zlib

import torch
import torch.distributed as dist

from .. import settings
from ..errors import CommunicationError, place_text, users_place
from ..record import Call
from .tensors import nbytes

# Sums of so many columns of words: equal after a change only by chance, even if rows have moved.
_COLUMNS = 1021
_WORD = 8  # bytes
# The checksum of few bytes costs less than a call of PyTorch.
_FEW = 8192  # bytes


def all_checks_are_on() -> bool:
    """Return whether the user asked PyTorch for all checks."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


class Seal:
    """A digest of plain memory that a call sends.

    Args:
        call: the pending call.
        memory: what it sends.
    """

    def __init__(self, call: Call, memory: torch.Tensor):
        self.call, self._memory = call, memory
        self._at = memory.data_ptr()
        self._digest = digest(memory)

    def check(self) -> None:
        """Raise CommunicationError if the memory has changed; the call that asks comes later."""
        # Memory that has been freed must not be read.
        if self._memory.data_ptr() == self._at and digest(self._memory) == self._digest:
            return
        call, now = self.call, users_place()
        what = in_background(call)
        line = place_text(*now) if now else "an unknown line"
        raise CommunicationError(
            f"the tensor of {what}, sent at {call.where}, was changed before wait(): when {line} "
            f"ran, it had other values. So rank {call.partner} may receive old values, new ones, "
            "or a mixture. Call wait() before you write into the tensor, or send a clone.",
            call,
        )


def in_background(call: Call) -> str:
    """Return a description of a message that doesn't block, with the name that users call."""
    return f"i{call.describe()}" if call.op in ("send", "recv") else call.describe()


def sealed(call: Call, memory: torch.Tensor) -> Seal | None:
    """Return a seal on what an ``isend`` sends, in a notebook or with all checks on; else None."""
    return Seal(call, memory) if settings.seals_sends or all_checks_are_on() else None


def digest(memory: torch.Tensor) -> tuple[int, bytes]:
    """Return a digest of the bytes of plain memory: 0.1 ms per MiB.

    It is made for mistakes, not for attacks.
    """
    size = nbytes(memory)
    at = memory.data_ptr()
    words = size // _WORD // _COLUMNS * _COLUMNS
    if size <= _FEW or at % _WORD:
        return _checksum(at, size), b""
    array = (ctypes.c_char * (words * _WORD)).from_address(at)
    rows = torch.frombuffer(array, dtype=torch.int64).view(-1, _COLUMNS)
    rest = _checksum(at + words * _WORD, size - words * _WORD)
    return rest, rows.sum(0).numpy().tobytes()


def _checksum(at: int, size: int) -> int:
    return zlib.crc32((ctypes.c_char * size).from_address(at)) if size else 0
