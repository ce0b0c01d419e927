"""Ctrl-C never in the middle of a collective.

A rank that tells the others "I am here" and then leaves with a KeyboardInterrupt has them stuck
inside C, where nothing can be interrupted. So the signal's handler waits for the few microseconds
between the two.
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
    """``with guard:`` keeps SIGINT's handler back until the end of the block (main thread).

    Attributes:
        on: how many blocks are running, one in another.
        late: whether a signal came meanwhile.
    """

    def __init__(self) -> None:
        self.on = 0
        self.late = False
        self._handler: Callable[[int, FrameType | None], object] = signal.default_int_handler
        self._ear: int | None = None

    def install(self) -> None:
        """Stand before the present handler of SIGINT. Does nothing outside the main thread."""
        present = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            return
        if callable(present) and present != self._handle:
            self._handler = present
            signal.signal(signal.SIGINT, self._handle)
        self._listen()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.heard()  # it came through Python: nothing left to be heard by the progress thread
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
        """Handle what was kept back, unless a block is still running."""
        if not self.on:
            self.late = False
            self._handler(signal.SIGINT, None)

    # A main thread that waits inside PyTorch's C++ runs no Python handler. The byte that the
    # interpreter writes into a pipe at once can be read by the progress thread.

    def _listen(self) -> None:
        if self._ear is not None:
            return
        ear, mouth = os.pipe()
        os.set_blocking(ear, False)
        os.set_blocking(mouth, False)
        taken = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        self._ear = ear
        if taken != -1:  # an event loop's: it stays
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)

    def heard(self) -> bool:
        """Return whether SIGINT came since the last call, handled or not."""
        if self._ear is None:
            return False
        with contextlib.suppress(BlockingIOError):
            return signal.SIGINT in os.read(self._ear, 4096)
        return False


guard = Guard()
