"""The differences between the ranks' clocks.

Rank 0 asks each rank for its time, and assumes that the answer was given halfway between question
and reply (F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989; the
clock filter of NTP, RFC 5905, section 10, also trusts the sample with the shortest round trip). So
the offset is wrong by at most half of the round trip, whenever the answer was really given.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_mpi.mpi import MPI

Clock = Callable[[], float]

SAMPLES = 30
# A rank that waits for its turn leaves its core to the ranks that measure.
PAUSE = 50e-6  # seconds
_QUESTION, _ANSWER, _RESULT = 1, 2, 3


@dataclass(frozen=True)
class Offset:
    """The time by which a rank's clock is ahead of rank 0's.

    Attributes:
        seconds: the best estimate.
        error: bound of the estimate's error in seconds, which is half of the shortest round trip.
    """

    seconds: float
    error: float

    @property
    def significant(self) -> bool:
        """Return whether the clocks certainly differ; clocks of one machine don't."""
        return abs(self.seconds) > self.error


def offsets(comm: MPI.Comm, **how: Any) -> list[float]:
    """Return the seconds that each rank's clock is ahead of rank 0's; 0.0 if they may be the same.

    Subtract a rank's offset from its times to have them on rank 0's clock. Linux and macOS count
    ``time.perf_counter`` from the machine's start, so ranks of one machine share it. For the
    arguments and exceptions see :func:`measure`.
    """
    return [one.seconds if one.significant else 0.0 for one in measure(comm, **how)]


def measure(
    comm: MPI.Comm,
    *,
    clock: Clock = time.perf_counter,
    samples: int = SAMPLES,
    timeout: float = 2.0,
) -> list[Offset]:
    """Return the measured offsets. Every rank of ``comm`` has to call, and gets the whole list.

    Raises:
        TimeoutError: it took longer than ``timeout`` seconds. Don't use ``comm`` for this again.
    """
    deadline = time.monotonic() + timeout
    flat = array("d", [0.0] * (2 * comm.size))
    if comm.rank == 0:
        for rank in range(1, comm.size):
            flat[2 * rank : 2 * rank + 2] = array("d", _ask(comm, rank, clock, samples, deadline))
        for rank in range(1, comm.size):
            _complete(comm.Isend(flat, rank, _RESULT), deadline)
    else:
        _answer(comm, clock, samples, deadline)
        _complete(comm.Irecv(flat, 0, _RESULT), deadline, PAUSE)
    return [Offset(*flat[k : k + 2]) for k in range(0, len(flat), 2)]


def duplicate(comm: MPI.Comm, *, timeout: float) -> MPI.Comm:
    """Return a communicator of the same ranks, whose messages meet no other messages.

    All ranks have to call.

    Raises:
        TimeoutError: it took longer than ``timeout`` seconds.
    """
    made, request = comm.Idup()
    _complete(request, time.monotonic() + timeout, PAUSE)
    return made


def _ask(comm: MPI.Comm, rank: int, clock: Clock, samples: int, deadline: float):
    """Return offset and error of the exchange with the shortest round trip."""
    best = (0.0, float("inf"))
    question, answer = array("d", [0.0]), array("d", [0.0])
    for _ in range(samples):
        reply = comm.Irecv(answer, rank, _ANSWER)
        asked = clock()
        _complete(comm.Isend(question, rank, _QUESTION), deadline)
        _complete(reply, deadline)
        told = clock()
        best = min(best, (answer[0] - (asked + told) / 2, (told - asked) / 2), key=lambda b: b[1])
    return best


def _answer(comm: MPI.Comm, clock: Clock, samples: int, deadline: float) -> None:
    """Send rank 0 this rank's time as often as it asks."""
    question, answer = array("d", [0.0]), array("d", [0.0])
    for k in range(samples):
        # A rank sleeps before its turn. During its turn, sleep would lengthen the round trip.
        _complete(comm.Irecv(question, 0, _QUESTION), deadline, 0.0 if k else PAUSE)
        answer[0] = clock()
        _complete(comm.Isend(answer, 0, _ANSWER), deadline)


def _complete(request: MPI.Request, deadline: float, pause: float = 0.0) -> None:
    """Wait for a request until the deadline."""
    while not request.Test():
        if time.monotonic() > deadline:
            # MPI may still write into the memory of a request that is neither done nor cancelled.
            _abandoned.append(request)
            raise TimeoutError("the clocks can't be compared, because a rank did not take part")
        if pause:
            time.sleep(pause)
        else:
            os.sched_yield()


_abandoned: list[MPI.Request] = []
