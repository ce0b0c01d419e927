"""One grader at a time in a results folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from utils.course.notebook import NotebookError

LOCK, HOLDER = ".lock", ".holder.json"


class HeldError(NotebookError):
    """Someone else grades into this folder, or nobody can; the message says who, or why."""


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Have the results folder for this process alone; makes it where there is none.

    The system gives the lock back when its holder dies, whatever lies in the folder then. Raises
    HeldError with process, host and time of the holder, or where the folder can't be written.
    """
    lock = filelock.FileLock(out / LOCK, timeout=0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        (out / HOLDER).write_text(
            json.dumps({
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            })
        )  # fmt: skip
    except filelock.Timeout:
        raise HeldError(
            f"{out}: {_holder(out)} grades into this folder: wait for its end"
        ) from None
    except OSError as error:
        lock.release()
        raise HeldError(f"{out}: can't be written: {error.strerror or error}") from error
    for left in out.glob(".*.tmp"):  # of one that was killed while it wrote
        left.unlink(missing_ok=True)
    try:
        yield
    finally:
        (out / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(out: Path) -> str:
    """Who holds the lock, in words."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads((out / HOLDER).read_text())
        return f"process {about['pid']} on {about['host']}, since {about['since']},"
    return "another process"
