"""The guard against a Ctrl-C in the middle of a step that has to be done as a whole.

This module needs no MPI, so ranks whose messages a kernel carries use it, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_MAIN_THREAD = threading.main_thread().ident


class Guard:
    """A guard that delays SIGINT's handler until the end of a block ``with guard:`` (main thread).

    Attributes:
        on: how many nested blocks are running.
        late: whether a signal came during a block.
    """

    def __init__(self) -> None:
        self.on = 0
        self.late = False
        self._handler: Callable[[int, FrameType | None], object] = signal.default_int_handler
        self._ear: int | None = None

    def install(self) -> None:
        """Wrap the present handler of SIGINT; do nothing outside the main thread."""
        present = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            return
        if callable(present) and present != self._handle:
            self._handler = present
            signal.signal(signal.SIGINT, self._handle)
        if self._ear is not None:
            return
        # A main thread that waits inside PyTorch's C++ runs no Python handler. But the interpreter
        # writes a byte into a pipe at once, which the progress thread can read.
        ear, mouth = os.pipe()
        os.set_blocking(ear, False)
        os.set_blocking(mouth, False)
        taken = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        self._ear = ear
        if taken != -1:  # an event loop uses its own pipe, and keeps it
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.heard()  # Python handles this signal, so the progress thread must not hear it, too
        if self.on:
            self.late = True
        else:
            self._handler(number, frame)

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN_THREAD:
            self.on += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == _MAIN_THREAD:
            self.on -= 1
            if self.late:
                self.release()

    def release(self) -> None:
        """Handle the delayed signal, unless a block is still running."""
        if not self.on:
            self.late = False
            self._handler(signal.SIGINT, None)

    def heard(self) -> bool:
        """Return whether SIGINT came since the last call, handled or not."""
        if self._ear is None:
            return False
        with contextlib.suppress(BlockingIOError):
            return signal.SIGINT in os.read(self._ear, 4096)
        return False


guard = Guard()
