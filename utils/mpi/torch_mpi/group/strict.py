"""Checks that take time, on request: ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, PyTorch's own switch.

Two faults run through by luck, and come out when messages grow or the machine is busy:

- Sends that rely on the library's buffers. Every send waits here until its receive has come, see
  :func:`torch_mpi.group.messages.synchronous_sends`.
- A tensor that is changed between ``isend`` and ``wait()``. A digest of what is to be sent is
  compared with what is there at the wait (MPI 4.1, section 3.7.2: the sender must not modify it).
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from ..record import Call
from . import buffers


def is_on() -> bool:
    """Whether PyTorch was asked for all checks."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def digest(memory: torch.Tensor) -> bytes:
    """Of the bytes of plain memory."""
    return hashlib.blake2b(buffers.address(memory), digest_size=16).digest()


class Seal:
    """What was to be sent, to be compared at the wait.

    Args:
        memory: what MPI sends from.
    """

    def __init__(self, memory: torch.Tensor):
        self._memory, self._digest = memory, digest(memory)

    def check(self, call: Call) -> None:
        """Raise CommunicationError where it is something else now."""
        if digest(self._memory) != self._digest:
            what = call.describe().replace("send", "isend", 1)
            raise CommunicationError(
                f"the tensor of {what} at {call.where} was changed before wait(), so the message "
                "may be a mixture of old and new. Call wait() first, or send a clone.",
                call,
            )
