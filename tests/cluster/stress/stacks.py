"""Where each rank and the kernel are, when a cell does not come back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# Seconds for the signal to be handled.
PATIENCE = 3.0
# In the kernel, as `utils.cluster` does it on the ranks: by a file whose name ends like theirs.
REGISTER = """\
import faulthandler, os, signal
stack_file = open({path!r}, "w")
faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
print("KERNEL", os.getpid())
"""


def of(processes: dict[str, int]) -> str:
    """The main thread's stack of each process, by name, as faulthandler writes it."""
    return "\n".join(f"{who} ({pid}):\n{_stack(pid)}" for who, pid in processes.items())


def _stack(pid: int) -> str:
    try:
        files = {path: path.stat().st_size for path in _stack_files(pid)}
        os.kill(pid, signal.SIGUSR1)
    except OSError as error:
        return f"  none: {error}"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for path, seen in files.items():
            if len(text := path.read_text(errors="replace")) > seen:
                time.sleep(0.1)  # the rest of it
                return path.read_text(errors="replace")[seen:] or text
        time.sleep(0.02)
    return "  no answer (stopped, dead or very busy)"


def _stack_files(pid: int) -> Iterator[Path]:
    """Files `stack-…` that a process has open."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = Path(os.readlink(entry))
            if target.name.startswith("stack-"):
                yield target
