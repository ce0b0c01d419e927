"""A limit of memory for a question, so that no answer of a check takes the whole machine's memory.

The system counts addresses (``RLIMIT_AS``), so an allocation fails before any of it is used. Only
Linux has this limit and tells the size of a process. CUDA reserves more addresses than any machine
has memory, so there is no limit where PyTorch finds a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Bytes by which a rank may grow during a question. Ranks inside one process share them.
MOST_BYTES = 2 * 1024**3
#: What PyTorch calls its allocator when it raises RuntimeError because memory is lacking.
_ALLOCATOR = "DefaultCPUAllocator"
_SIZE = Path("/proc/self/statm")

_lock = threading.Lock()
# How many questions are running in this process, and its limit before the first one.
_running = 0
_before = (0, 0)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process grow by at most :data:`MOST_BYTES`.

    Raises:
        MemoryError: the answer needed more; the message says what to do.
    """
    _begin()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _ALLOCATOR not in str(error):
            raise
        most = MOST_BYTES // 1024**3
        said = (
            f"this call needed more than {most} GB of memory, which a check allows. Compute the "
            "result without building such large tensors"
        )
        raise MemoryError(said).with_traceback(error.__traceback__) from None
    finally:
        _end()


def _begin() -> None:
    global _running, _before
    with _lock:
        if not _running and (limits := _limits()):
            _before = limits.getrlimit(limits.RLIMIT_AS)
            pages = int(_SIZE.read_text(encoding="utf-8").split()[0])
            most = pages * limits.getpagesize() + MOST_BYTES
            allowed = [limit for limit in _before if limit != limits.RLIM_INFINITY]
            limits.setrlimit(limits.RLIMIT_AS, (min([most, *allowed]), _before[1]))
        _running += 1


def _end() -> None:
    global _running
    with _lock:
        _running -= 1
        if not _running and (limits := _limits()):
            limits.setrlimit(limits.RLIMIT_AS, _before)


def _limits() -> Any:
    """Return the module `resource`; None without Linux, or with a GPU that PyTorch uses."""
    import torch

    if not _SIZE.exists() or torch.cuda.is_available():
        return None
    try:
        return importlib.import_module("resource")
    except ImportError:  # as on Windows
        return None
