"""Run communications of several steps, which are written as generators.

A generator yields a list of everything that must be complete before it goes on: MPI requests,
messages to come (:class:`Incoming`), points in time (``time.perf_counter``), arrivals
(:class:`~torch_mpi.network.Arrival`, points in time that may move later) and other :class:`Steps`.
It receives the MPI statuses of the requests.

If one item of a list fails, the others still end before the error reaches the generator. So MPI
uses no memory of the list any more when a caller learns of the error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

from ..mpi import MPI, is_death

_present = threading.local()


def now() -> float:
    """Return when the running step became possible; outside a step, return the time.

    A step runs a little after it has become possible, but its work counts from the earlier time.
    Otherwise each step would add the delay until the rank noticed.
    """
    return getattr(_present, "time", None) or time.perf_counter()


class Incoming:
    """A message to come whose size only its sender knows.

    Args:
        communicator, source, tag: where it comes from.

    Attributes:
        message: the message, ready to be received; ``None`` before it is there.
        nbytes: its size in bytes.
    """

    def __init__(self, communicator: MPI.Intracomm, source: int, tag: int):
        self._from = communicator, source, tag
        self.message: MPI.Message | None = None
        self.nbytes = 0

    def is_there(self) -> bool:
        """Look for the message once; return whether it is there."""
        communicator, source, tag = self._from
        status = MPI.Status()
        self.message = communicator.Improbe(source, tag, status)
        if self.message is not None:
            self.nbytes = status.Get_elements(MPI.BYTE)
        return self.message is not None

    def due(self) -> None:
        """Return ``None``, because nobody knows when it comes."""


class Steps:
    """A runner that advances a generator as far as possible without waiting.

    Args:
        since: when the first step became possible.

    Attributes:
        count: how many steps have begun.
        done: whether the generator has ended.
        time: when its last step became possible, or when it ended.
    """

    def __init__(
        self, generator: Generator[list[Any], list[MPI.Status], None], since: float | None = None
    ):
        self._generator = generator
        self._pending: list[tuple[Any, MPI.Status | None]] = []
        self._statuses: list[MPI.Status] = []
        self._failure: Exception | None = None
        self.count = 0
        self.done = False
        self.time = since or now()
        self._advance(None)

    def poll(self) -> bool:
        """Test all pending items once, and go on if possible; return whether the steps ended.

        Raises:
            Exception: of the generator, or of an item.
        """
        while not self.done:
            self._pending = [pair for pair in self._pending if not self._has_ended(*pair)]
            if self._pending:
                return False
            self._advance(self._statuses)
        return True

    def _has_ended(self, item: Any, status: MPI.Status | None) -> bool:
        """Return whether an item is ready or has failed. The first failure is kept."""
        try:
            return self._is_ready(item, status)
        except Exception as error:
            if isinstance(error, MPI.Exception) and is_death(error):
                raise  # the others may never end
            self._failure = self._failure or error
            return True

    def _is_ready(self, item: Any, status: MPI.Status | None) -> bool:
        if status is not None:
            return item.Test(status)
        if isinstance(item, Incoming):
            return item.is_there()
        if isinstance(item, Steps):
            if not item.poll():
                return False
            reached = item.time
        else:
            reached = _time(item)
            if time.perf_counter() < reached:
                return False
        self.time = max(self.time, reached)
        return True

    def due(self) -> float | None:
        """Return the point in time for which it waits; ``None`` if it waits for anything else."""
        times = [_time(item) for item, _ in self._pending]
        return None if None in times else max(times, default=None)

    def moved(self) -> int:
        """Return how many steps have begun, including the inner steps of the present one."""
        inside = (item for item, _ in self._pending if isinstance(item, Steps))
        return self.count + sum(steps.moved() for steps in inside)

    def requests(self) -> list[MPI.Request]:
        """Return the MPI requests that are not complete yet."""
        requests = []
        for item, _ in self._pending:
            if isinstance(item, Steps):
                requests += item.requests()
            elif isinstance(item, MPI.Request):
                requests.append(item)
        return requests

    def _advance(self, statuses: list[MPI.Status] | None) -> None:
        self.count += 1
        before = getattr(_present, "time", None)
        _present.time = self.time
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                items = self._generator.throw(failure)
            else:
                items = self._generator.send(statuses)
        except StopIteration:
            self.done = True
            return
        except BaseException:
            self.done = True
            raise
        finally:
            _present.time = before
        self._pending = [(i, MPI.Status() if isinstance(i, MPI.Request) else None) for i in items]
        self._statuses = [status for _, status in self._pending if status is not None]


def _time(item: Any) -> float | None:
    """Return when an item is complete, as far as known; ``None`` if it is a request of MPI."""
    if isinstance(item, float):
        return item
    return None if isinstance(item, MPI.Request) else item.due()
