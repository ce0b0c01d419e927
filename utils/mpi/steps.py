"""Communications of several steps, written as generators.

A generator yields lists of what has to be complete before it goes on: MPI requests, points in
time (``time.perf_counter``), other :class:`Steps`. It is sent the MPI statuses of the requests.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from mpi4py import MPI


class Steps:
    """Runs a generator as far as it goes without waiting.

    Attributes:
        done: whether it has ended.
        value: what it returned.
    """

    def __init__(self, generator: Generator[list, list[MPI.Status], object]):
        self._generator = generator
        self._pending: list[tuple[object, MPI.Status | None]] = []
        self._statuses: list[MPI.Status] = []
        self.done = False
        self.value: object = None
        self._advance(None)

    def poll(self) -> bool:
        """Test once what it waits for, and go on where possible; whether it has ended."""
        while not self.done:
            self._pending = [pair for pair in self._pending if not _is_ready(*pair)]
            if self._pending:
                return False
            self._advance(self._statuses)
        return True

    def due(self) -> float | None:
        """The point in time it waits for, if it waits for nothing else."""
        times = [_time(item) for item, _ in self._pending]
        return None if None in times else max(times, default=None)

    def requests(self) -> list[MPI.Request]:
        """The MPI requests that are not complete."""
        found = []
        for item, _ in self._pending:
            if isinstance(item, Steps):
                found += item.requests()
            elif isinstance(item, MPI.Request):
                found.append(item)
        return found

    def _advance(self, statuses: list[MPI.Status] | None) -> None:
        try:
            items = self._generator.send(statuses)
        except StopIteration as end:
            self.done, self.value = True, end.value
            return
        self._pending = [(i, MPI.Status() if isinstance(i, MPI.Request) else None) for i in items]
        self._statuses = [status for _, status in self._pending if status is not None]


def _is_ready(item, status: MPI.Status | None) -> bool:
    if status is not None:
        return item.Test(status)
    if isinstance(item, float):
        return time.perf_counter() >= item
    return item.poll()


def _time(item) -> float | None:
    if isinstance(item, float):
        return item
    return item.due() if isinstance(item, Steps) else None
