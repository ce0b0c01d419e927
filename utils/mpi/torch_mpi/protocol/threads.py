"""Which threads of this rank may communicate, besides the one that waits?

A rank that waits can be called stuck for certain only when nobody else in its process can still
send what the others wait for. A thread that exists is no sign: progress bars, data loaders and
executors keep threads that never communicate. One that runs a function of the user's may.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection
from types import FrameType

from ..errors import in_library

# They run functions of the user's when these are due, or something has ended.
_CALLERS = tuple(
    os.path.join(os.path.dirname(os.__file__), *path.split("/"))
    for path in ("asyncio/", "multiprocessing/pool.py", "concurrent/futures/process.py")
)


class Threads:
    """The threads of this process: those that have communicated, and those that could."""

    def __init__(self) -> None:
        # Threads that were there before are none of the user's.
        self._first = set(threading.enumerate())
        self._communicated: set[int] = set()

    def communicates(self) -> None:
        """The present thread does."""
        self._communicated.add(threading.get_ident())

    def alone(self, but: Collection[threading.Thread | None]) -> bool:
        """Whether the present thread is the only one that may communicate.

        Args:
            but: threads of the backend's own.
        """
        frames = sys._current_frames()
        # This frame, held by its own variable, would keep all tensors of its callers alive.
        del frames[threading.get_ident()]
        others = [
            thread
            for thread in threading.enumerate()
            if thread is not threading.current_thread() and thread not in but
        ]
        alive = {thread.ident: thread for thread in threading.enumerate()}
        self._communicated &= alive.keys()
        return not any(
            thread.ident in self._communicated
            or (
                thread not in self._first
                and _may_communicate(thread, frames.get(thread.ident or 0))
            )
            for thread in others
        )


def _may_communicate(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether it runs the user's code now, or will without being told to."""
    if isinstance(thread, threading.Timer):
        return True
    while frame is not None:
        path = frame.f_code.co_filename
        if not in_library(path) or path.startswith(_CALLERS):
            return True
        frame = frame.f_back
    return False
