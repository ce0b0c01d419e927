"""The guard against a Ctrl-C in the middle of a step that has to be done as a whole.

This module needs no MPI, so ranks whose messages a kernel carries use it, too.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_MAIN_THREAD = threading.main_thread().ident
#: Seconds that an import gets to end after a Ctrl-C, and between two looks at it.
IMPORT = 4.0
LOOK = 0.05


class Guard:
    """A guard that delays SIGINT's handler until the end of a block ``with guard:`` (main thread).

    The handler also waits for the end of an import: Python keeps the modules that an interrupted
    import has finished, and fails at each later import of the package around them.

    Attributes:
        on: how many nested blocks are running.
        late: whether a signal came during a block.
    """

    def __init__(self) -> None:
        self.on = 0
        self.late = False
        self._handler: Callable[[int, FrameType | None], object] = signal.default_int_handler
        self._ear: int | None = None
        self._first_try: float | None = None

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
        elif _is_importing(frame) and self._may_wait():
            again = threading.Timer(LOOK, interrupt_main_thread)
            again.daemon = True
            again.start()
        else:
            self._first_try = None
            self._handler(number, frame)

    def _may_wait(self) -> bool:
        """Return whether the handler has not waited for long."""
        now = time.monotonic()
        if self._first_try is None:
            self._first_try = now
        return now < self._first_try + IMPORT

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


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the main thread, which is at this frame, imports a module."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def interrupt_main_thread() -> None:
    """Raise KeyboardInterrupt in the main thread, even while it waits for a lock."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(_MAIN_THREAD or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


guard = Guard()
