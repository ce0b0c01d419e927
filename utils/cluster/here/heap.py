"""Keeps the memory of a process small in which several ranks take turns, if its C library can.

glibc gives each thread a heap, keeps what a thread has freed, and raises the size from which it
returns memory at once. That suits threads that run at the same time, but costs ranks that take
turns hundreds of megabytes.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

# Numbers of parameters in glibc's malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
ARENA_MAX = -8
MIB = 2**20
#: Seconds between two times at which memory goes back to the system.
OFTEN = 0.25

_now = time.monotonic  # ranks get other clocks
_last = _now()


def _library() -> Any:
    """Return the C library if it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def use_one() -> None:
    """Let new threads share one heap, and let the heap return tensors of 2 MiB at once."""
    if (library := _library()) is not None:
        library.mallopt(ARENA_MAX, 1)
        library.mallopt(MMAP_THRESHOLD, 2 * MIB)
        library.mallopt(TRIM_THRESHOLD, 16 * MIB)


def give_back() -> None:
    """Return free memory to the system, unless that has just happened."""
    global _last
    if _now() - _last > OFTEN and (library := _library()) is not None:
        library.malloc_trim(0)
        _last = _now()
