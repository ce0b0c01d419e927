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
    """A communication: its MPI requests, and what has to happen when they are complete.

    Args:
        group: the process group: how long to wait, and whom to tell that a wait was given up.
        call: the record of the communication.
        start: starts it and returns the MPI requests.
        result: the tensors that the future yields.
        finish: called once, after the last request, with the MPI statuses (in request order).
        keep: memory that MPI reads until the requests are complete.
    """

    def __init__(
        self,
        group,
        call: Call,
        start: Callable[[], list[MPI.Request]],
        result: list[torch.Tensor],
        finish: Callable[[list[MPI.Status]], None] | None = None,
        keep: object = None,
    ):
        super().__init__()
        self.group = group
        self.call = call
        self._result = result
        self._finish = finish
        self._keep = keep
        self._watched = False
        self._lock = threading.RLock()
        self._done = False
        self._error: Exception | None = None
        self._source: torch.futures.Future | None = None
        self._future: torch.futures.Future | None = None
        self._where = ""
        self._span = _profiler_span(call)
        self._requests: list[MPI.Request] = []
        progress.begin(self)
        self._start(start)
        self._statuses = [MPI.Status() for _ in self._requests]

    def _start(self, start: Callable[[], list[MPI.Request]]) -> None:
        try:
            self._requests = start()
        except Exception:
            self._settle()  # MPI refused it: nothing is under way
            raise
        except BaseException:  # a Ctrl-C between MPI's start and ours
            self._give_up()
            raise

    # -- progress -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Test the requests once. True when the communication is over.

        Never raises an error of the communication: that is kept for :meth:`wait`.
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

    def expire(self) -> bool:
        """End a future that has waited for the group's timeout; nobody else would."""
        waited = time.perf_counter() - self.call.start
        if self._future is None or waited < self.group.timeout:
            return False
        self._give_up(self._timed_out(waited))
        return True

    def take_back(self) -> None:
        """Cancel it, where MPI can cancel: a receive."""
        if self.call.op == "recv" and not self._done:
            self._give_up()

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
        try:
            if self._error is None and self._finish is not None:
                with torch.inference_mode(self._for_inference()):
                    self._finish(self._statuses)
        except Exception as error:  # kept: raised where somebody waits
            self._error = error
        except BaseException:
            self._error = CommunicationError(f"{self.call.describe()}: interrupted at its end")
            raise
        finally:
            self._settle()

    def _for_inference(self) -> bool:
        """Tensors made in inference mode may be written in it only, also by another thread."""
        return any(tensor.is_inference() for tensor in self._result)

    def _settle(self, memory_is_free: bool = True) -> None:
        """It is over: say so to all who ask, and let go of the memory."""
        if memory_is_free:
            self._finish = self._keep = None
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        self._done = True  # after _error: who sees it done must see how it ended
        progress.end(self)
        if self._source is not None:
            self._source.set_result(None)

    # -- what PyTorch calls ---------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete.

        Raises:
            CommunicationTimeout: not within ``timeout``, or the group's.
            CommunicationError: MPI reported an error.
        """
        self.call.waited = True
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
        """A future of the list of tensors. It completes, or fails, without a ``wait()``."""
        progress.make_way()
        with self._lock:
            self.call.waited = True
            if self._future is None:
                self._where = users_line()
                source = torch.futures.Future()
                # PyTorch's C++ sees an error of then(), but not one of set_exception().
                self._future = source.then(self._outcome)
                if self._done:
                    source.set_result(None)
                else:
                    self._source = source
                    self.progress()
            future = self._future
        if not progress.available:
            self._block(self.group.timeout)
        return future

    def _outcome(self, _source: torch.futures.Future) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

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
        except CommunicationTimeout as error:
            self._give_up(error)
            raise
        except KeyboardInterrupt:
            self._give_up()
            raise

    def _timed_out(self, waited: float) -> CommunicationTimeout:
        where = self._where or users_line()
        rank = MPI.COMM_WORLD.rank
        return CommunicationTimeout(
            f"rank {rank} waited {waited:.1f} s in {self.call.describe()} at {where}, "
            f"and {_partner(self.call, rank)} did not come. {_advice(self.call)}",
            self.call,
            where,
            waited,
        )

    def _give_up(self, error: Exception | None = None) -> None:
        """Nobody waits any more. Leave nothing behind that could swallow a later message."""
        with self._lock:
            if self._done or (self._requests and self._receive_cancelled() is False):
                return
            # Where it is no cancelled receive, MPI may still read and write: memory has to stay.
            cancelled = self.call.op == "recv" and bool(self._requests)
            if not cancelled:
                progress.bury(self)
                self.group.given_up(self.call)
            self._error = error or CommunicationError(
                f"{self.call.describe()} was given up: a wait for it ended early"
            )
            self._settle(memory_is_free=cancelled)

    def _receive_cancelled(self) -> bool | None:
        """Cancel a receive. False: it was too late, the message is here; None: not a receive."""
        if self.call.op != "recv":
            return None
        self._requests[0].Cancel()
        self._requests[0].Wait(self._statuses[0])
        if self._statuses[0].Is_cancelled():
            return True
        self._complete()
        return False


class JoinedWork(MPIWork):
    """Several works as one."""

    def __init__(self, works: list[MPIWork], result: list[torch.Tensor]):
        self._works = works
        super().__init__(works[0].group, works[0].call, list, result)
        self.progress()

    def _test(self) -> bool:
        over = all([work.poll() for work in self._works])
        if over:
            self._error = next((w._error for w in self._works if w._error is not None), None)
        return over

    def _give_up(self, error: Exception | None = None) -> None:
        for work in self._works:
            work._give_up(error)
        self._error = self._error or error
        self._settle()


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
    others = [str(r) for r in call.group if r != rank]
    who = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(others)}"
    return f"the same call on every other rank of the group ({who})"


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
