"""End a call that does not come to an end by itself, with a sentence about it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class NotEnded(RuntimeError):
    """A call took longer than it may; the message says why that is likely."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def ends_within(seconds: float, likely: str) -> Iterator[None]:
    """Raise NotEnded in the block if it takes longer than this.

    Only Python code of the main thread can be ended. On other threads there is no limit.

    Args:
        seconds: that the block may take.
        likely: a sentence that says what is probably wrong, and what to do.
    """

    def end(*_: object) -> None:
        raise NotEnded(f"no end after {seconds:g} s. {likely}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
