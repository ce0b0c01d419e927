"""A memory fence for all processors at once, paid for by the one who asks.

Two ranks that write one word each and then read the other's may both read the old one: a processor
keeps a store to itself for a moment while it goes on loading. A fence between store and load on
both sides forbids that. Here one side is every collective, the other a rank that takes a call back,
which is rare: so that one has the system put a fence into all running threads of the ranks
(membarrier(2), ``MEMBARRIER_CMD_GLOBAL_EXPEDITED``), and the other side needs none.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4
# Where the system has no such call: a processor keeps a store back for less than a microsecond.
_PAUSE = 1e-3  # seconds

_available = False


def _membarrier(command: int) -> bool:
    number = _NUMBERS.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, command, 0) == 0)


def register() -> bool:
    """Have this process take part in the fences of others; whether the system has them."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def use(available: bool) -> None:
    """Whether every rank is registered."""
    global _available
    _available = available


def everywhere() -> None:
    """What this process has written is seen by all ranks, and all that they had written by it."""
    if not (_available and _membarrier(_GLOBAL_EXPEDITED)):
        time.sleep(_PAUSE)
