"""Busy loops beside the ranks, which end with the process that started them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

LOOP = "import os\nwhile os.getppid() == {parent}:\n    for _ in range(1_000_000):\n        pass\n"


@contextlib.contextmanager
def load(n: int) -> Iterator[list[subprocess.Popen]]:
    """`n` processes that take a core each, as long as the block runs."""
    code = LOOP.format(parent=os.getpid())
    loops = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(n)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
