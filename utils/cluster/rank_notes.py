"""The notes that a rank writes each second of a long cell: its line, or the call it waits in.

The kernel reads the note while it waits for the cell (`live_line`). A separate thread of the rank
writes it, so the cell never stops for it. Short cells end before the first note.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from utils.timeline.cell_log import backend_world

if TYPE_CHECKING:
    from torch_mpi.present import World

# Seconds between two notes, and before the first.
EVERY = 1.0


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's note in the kernel's folder."""
    return folder / f"now-{rank}"


class Notes:
    """The notes of this rank.

    Args:
        path: the file for the latest note.
        cells: the file names of the cells that the rank has run; the set may grow.
        world: returns the rank's view of all ranks.

    The thread that makes the notes is the one that runs the rank's cells.
    """

    def __init__(
        self, path: Path, cells: set[str], world: Callable[[], World | None] = backend_world
    ):
        self._path = path
        self._cells = cells
        self._world = world
        self._began: float | None = None
        self._thread = threading.current_thread()
        threading.Thread(target=self._write_for_good, name="notes", daemon=True).start()

    def begin_cell(self) -> None:
        """Start the notes of a cell."""
        self._began = time.monotonic()

    def end_cell(self) -> None:
        """End the notes of the cell."""
        self._began = None

    def _write_for_good(self) -> None:
        # Signals must reach the main thread, because `where` asks for its stack.
        if hasattr(signal, "pthread_sigmask"):  # Windows has no such signals
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # A rank that is a thread may end long before the process does.
        while self._thread.is_alive():
            time.sleep(EVERY)
            began = self._began
            if began is not None and time.monotonic() - began >= EVERY:
                # A full disk must not end this thread.
                with contextlib.suppress(OSError):
                    self._path.write_text(json.dumps(self.now()), encoding="utf-8")

    def now(self) -> dict[str, Any]:
        """Return the line of the cell that the rank is on, and the communication it waits in."""
        status = world.own if (world := self._world()) else {}
        waits = status.get("op") if status.get("state") == "waiting" else None
        frame = sys._current_frames().get(self._thread.ident or 0)
        return {"line": self._line(frame), "waits": waits}

    def _line(self, frame: FrameType | None) -> int | None:
        """Return the innermost line of a cell on a stack."""
        while frame is not None:
            if frame.f_code.co_filename in self._cells:
                return frame.f_lineno
            frame = frame.f_back
        return None
