"""Find a tensor that a program changes while its ``isend`` is pending.

The receiver then gets old values, new ones, or a mixture, depending on the size of the message
(MPI 4.1, section 3.7.2). So a seal keeps a digest of the tensor's bytes, and compares it at
``wait()``, and before the same memory is sent again. Notebooks always do this; a program does it
with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib

import torch
import torch.distributed as dist

from .. import settings
from ..errors import CommunicationError, place_text, users_place
from ..record import Call
from .tensors import nbytes, overlap

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
        self._digest = digest(memory)

    def covers(self, memory: torch.Tensor) -> bool:
        """Return whether other memory overlaps."""
        return overlap(self._memory, memory)

    def check(self) -> None:
        """Raise CommunicationError if the memory has changed; the call that asks comes later."""
        if digest(self._memory) == self._digest:
            return
        call, now = self.call, users_place()
        what = call.describe().replace("send", "isend", 1)
        line = place_text(*now) if now else "an unknown line"
        raise CommunicationError(
            f"the tensor of {what}, sent at {call.where}, was changed before wait(): when {line} "
            f"ran, it had other values. So rank {call.partner} may receive old values, new ones, "
            "or a mixture. Call wait() before you write into the tensor, or send a clone.",
            call,
        )


class Seals:
    """The seals of a rank's pending messages in one group; a work keeps its seal."""

    def __init__(self) -> None:
        self._pending: weakref.WeakSet[Seal] = weakref.WeakSet()

    def put(self, call: Call, memory: torch.Tensor) -> Seal | None:
        """Seal what an ``isend`` sends, if this is a notebook, or all checks are on.

        Raises:
            CommunicationError: the same memory is being sent, and has changed since.
        """
        if not (settings.seals_sends or all_checks_are_on()):
            return None
        for pending in [one for one in self._pending if one.covers(memory)]:
            pending.check()
        seal = Seal(call, memory)
        self._pending.add(seal)
        return seal

    def lift(self, seal: Seal | None, check: bool = True) -> None:
        """End a seal, as the program may change the tensor from now on.

        Raises:
            CommunicationError: with ``check``, if the tensor has changed before.
        """
        if seal in self._pending:
            self._pending.discard(seal)
            if check:
                seal.check()

    def clear(self) -> None:
        """End all seals, as after an incident nothing is pending."""
        self._pending.clear()


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
