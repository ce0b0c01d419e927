"""The notebook's stop button, while the kernel waits for its ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stop_button() -> Iterator[list[int]]:
    """Collect SIGINTs, so that none of them raises an exception at an arbitrary place.

    An exception while a cell is sent would leave the cell on some ranks only.
    """
    presses: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield presses  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: presses.append(number))
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)
