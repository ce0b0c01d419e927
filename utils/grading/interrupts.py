"""Ctrl-C that loses nothing, however often it comes."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any


class Interrupts:
    """The first Ctrl-C (or SIGTERM) ends the work; the books are written whatever comes after.

    A context manager; `finish` says that there is no more work to end, `begin` that there is some
    again. stopped: has there been a first one?
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.finishing = self.stopped = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._heard) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heard(self, *_: object) -> None:
        if self.finishing:
            print("a moment: the books are being written", file=sys.stderr)
            return
        self.finishing = self.stopped = True
        raise KeyboardInterrupt

    def begin(self) -> None:
        """From now on a Ctrl-C ends what is done."""
        self.finishing = False

    def finish(self) -> None:
        """From now on a Ctrl-C waits."""
        self.finishing = True
