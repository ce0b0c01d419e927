"""A communication under way: what ``isend`` and ``async_op=True`` return."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from mpi4py import MPI
from torch.distributed import Work

from .errors import CommunicationError, CommunicationTimeout, users_line
from .progress import progress
from .record import Call

# A wait first tests without a pause: as long as the data may be on their way. Then it leaves
# its core to others, because a large message moves only while somebody tests.
SPIN = 200e-6  # seconds
SPIN_PER_BYTE = 5e-9  # seconds; 200 MB/s
MAX_PAUSE = 200e-6  # seconds


class MPIWork(Work):
    """Requests of MPI, and what has to happen when they are complete.

    Args:
        group: the process group: how long to wait, and whom to tell that a wait was given up.
        call: the record of the communication.
        requests: the MPI requests.
        result: the tensors that the future yields.
        finish: called once, after the last request, with the MPI statuses (in request order).
        keep: memory that MPI reads until the requests are complete.
    """

    def __init__(
        self,
        group,
        call: Call,
        requests: list[MPI.Request],
        result: list[torch.Tensor],
        finish: Callable[[list[MPI.Status]], None] | None = None,
        keep: object = None,
    ):
        super().__init__()
        self.group = group
        self.call = call
        self._requests = requests
        self._statuses = [MPI.Status() for _ in requests]
        self._result = result
        self._finish = finish
        self._keep = keep
        self._watched = False
        self._lock = threading.RLock()
        self._done = False
        self._error: Exception | None = None
        self._future: torch.futures.Future | None = None
        self._span = _profiler_span(call)

    # -- progress -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Test the requests once. True when the communication is over.

        Never raises: an error is kept for :meth:`wait`.
        """
        if self._done:
            return True
        # Never two threads in a test of the same request (MPI 4.1, section 11.6.2).
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._done and self._test():
                self._complete()
            return self._done
        finally:
            self._lock.release()

    def progress(self) -> None:
        """Have it move on, and complete, without a ``wait()``."""
        if not self._watched and not self._done:
            self._watched = True
            progress.watch(self)

    def _test(self) -> bool:
        try:
            if len(self._requests) == 1:
                return self._requests[0].Test(self._statuses[0])
            return MPI.Request.Testall(self._requests, self._statuses)
        except MPI.Exception as error:
            self._error = _in_words(error, self.call, self._statuses)
            return True

    def _complete(self) -> None:
        self.call.end = time.perf_counter()
        if self._error is None and self._finish is not None:
            try:
                self._finish(self._statuses)
            except Exception as error:  # kept: raised where somebody waits
                self._error = error
        self._finish = self._keep = None
        self._end_span()
        self._done = True
        if self._future is not None:
            self._resolve(self._future)

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    # -- what PyTorch calls ---------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete.

        Raises:
            CommunicationTimeout: not within ``timeout``, or the group's.
            CommunicationError: MPI reported an error.
        """
        self.call.waited = True
        if not self.poll():
            self._block(_seconds(timeout) or self.group.timeout)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Same as :meth:`wait`: there is no device to synchronize with."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over. Does not wait."""
        return self.poll()

    def is_success(self) -> bool:
        """Whether it is over without an error."""
        return self.poll() and self._error is None

    def exception(self) -> Exception | None:
        """The error it ended with."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that were communicated."""
        return self._result

    def source_rank(self) -> int:
        """The rank in the group that a ``recv`` from any source received from."""
        return self.call.peer

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the list of tensors. It completes without a ``wait()``."""
        with self._lock:
            self.call.waited = True
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done:
                    self._resolve(self._future)
                elif progress.available:
                    self.progress()
                else:
                    self._block(self.group.timeout)
            return self._future

    def _resolve(self, future: torch.futures.Future) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._result)

    # -- waiting --------------------------------------------------------------------------

    def _block(self, timeout: float) -> None:
        start = time.perf_counter()
        spin = SPIN + SPIN_PER_BYTE * self.call.nbytes
        pause = 0.0
        try:
            while not self.poll():
                waited = time.perf_counter() - start
                if waited < spin:
                    os.sched_yield()
                    continue
                if waited > timeout:
                    raise self._timed_out(waited)
                pause = min(pause + 5e-6, MAX_PAUSE)
                time.sleep(pause)
        except (CommunicationTimeout, KeyboardInterrupt):
            self._abandon()
            raise

    def _timed_out(self, waited: float) -> CommunicationTimeout:
        where = users_line()
        rank = MPI.COMM_WORLD.rank
        return CommunicationTimeout(
            f"rank {rank} waited {waited:.1f} s in {self.call.describe()} at {where}, "
            f"and {_partner(self.call, rank)} did not come. {_advice(self.call)}",
            self.call,
            where,
            waited,
        )

    def _abandon(self) -> None:
        """Leave nothing behind that could swallow a later message."""
        with self._lock:
            if self._done:
                return
            if self.call.op == "recv":
                self._requests[0].Cancel()
                self._requests[0].Wait()
            else:
                # MPI may still read and write their memory: it has to stay.
                progress.bury(self)
                self.group.given_up(self.call)
            self._done = True
            self._end_span()
            self._error = CommunicationError(
                f"{self.call.describe()} was given up: a wait for it ended early"
            )


class JoinedWork(MPIWork):
    """Several works as one."""

    def __init__(self, works: list[MPIWork], result: list[torch.Tensor]):
        self._works = works
        super().__init__(works[0].group, works[0].call, [], result)
        self.progress()

    def _test(self) -> bool:
        over = all([work.poll() for work in self._works])
        if over:
            self._error = next((w._error for w in self._works if w._error is not None), None)
        return over

    def _abandon(self) -> None:
        for work in self._works:
            work._abandon()
        super()._abandon()


def _seconds(timeout: timedelta | None) -> float | None:
    """Seconds of a timeout; PyTorch says "none given" by zero or a negative one."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


def _partner(call: Call, rank: int) -> str:
    if call.op in ("send", "recv"):
        verb = "receive" if call.op == "send" else "send"
        peer = "any rank" if call.peer < 0 else f"rank {call.group[call.peer]}"
        return f"the matching {verb} of {peer}"
    others = ", ".join(str(r) for r in call.group if r != rank)
    return f"the same call on every other rank of the group (ranks {others})"


def _advice(call: Call) -> str:
    if call.op in ("send", "recv"):
        return (
            "Do two ranks wait for each other? Let one of them send first and the other receive "
            "first, or use isend and irecv. Check ranks and tags."
        )
    return "Every rank of the group has to make the same collective calls in the same order."


def _in_words(error: MPI.Exception, call: Call, statuses: list[MPI.Status]) -> CommunicationError:
    classes = {error.Get_error_class()} | {
        MPI.Get_error_class(status.Get_error()) for status in statuses
    }
    if MPI.ERR_TRUNCATE in classes:
        return CommunicationError(
            f"{call.describe()} at {users_line()}: the message that arrived is larger than the "
            f"tensor to receive it. Sender and receiver must agree on shape and dtype."
        )
    return CommunicationError(f"{call.describe()} at {users_line()} failed: {error}")


def _profiler_span(call: Call):
    if not torch.autograd._profiler_enabled():
        return None
    span = torch.profiler.record_function(f"mpi:{call.op}")
    span.__enter__()
    return span
