"""A thread that moves communications along while the rank computes.

MPI promises progress only inside MPI calls (MPI 4.1, section 2.9). The thread tests what
was started and sleeps in between, so that an ``isend`` or a bucket of
DistributedDataParallel finishes without anybody waiting for it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import deque

from mpi4py import MPI

# Short enough to hide a bucket behind backward, long enough to cost a few percent of a core.
PAUSE = 200e-6


class Progress:
    """Tests the works it is given until each is complete."""

    def __init__(self):
        self._works: deque = deque()
        self._buried: list = []
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()
        self.available = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def watch(self, work) -> None:
        """Keep ``work`` alive, and call its ``poll()`` until that is true."""
        self._works.append(work)
        if not self.available:
            self._round()
            return
        if self._thread is None:
            self._launch()
        self._wake.set()

    def bury(self, work) -> None:
        """Keep the memory of a communication that nobody waits for any more.

        For good, by a reference that is never given back: MPI may write there until its last
        call, which is in MPI_Finalize, after Python has emptied its modules.
        """
        self._buried.append(work)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))

    def drain(self, group, timeout: float) -> bool:
        """Wait until no work of ``group`` is under way. False when one never ends.

        Args:
            group: a process group.
            timeout: seconds.
        """
        if any(work.group is group for work in self._buried):
            return False
        deadline = time.monotonic() + timeout
        while not all(work.poll() for work in list(self._works) if work.group is group):
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE)
        return True

    def stop(self) -> None:
        """End the thread. MPI must not be finalized under it."""
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _launch(self) -> None:
        with self._start:
            if self._thread is None and not self._stop:
                self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait()
            self._wake.clear()
            while self._works and not self._stop:
                self._round()
                time.sleep(PAUSE)

    def _round(self) -> None:
        for _ in range(len(self._works)):
            work = self._works.popleft()
            if not work.poll():
                self._works.append(work)


progress = Progress()
atexit.register(progress.stop)
