"""A communication under way: what ``isend`` and ``async_op=True`` return."""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import Work

from ..errors import CommunicationError, CommunicationMismatch, users_line
from ..mpi import MPI
from ..network import link
from ..protocol.progress import guard, progress
from ..protocol.wait_monitor import SPIN, WaitMonitor, wait_for
from ..record import Call
from .step_runner import Steps

if TYPE_CHECKING:
    from ..protocol.status import Status
    from .process_group import ProcessGroupMPI

_autograd = torch._C._autograd
_closer = ThreadPoolExecutor(1, thread_name_prefix="mpi-profiler")


class WorkState(enum.Enum):
    """The state of a work; all but the first are final."""

    UNDER_WAY = "under way"
    DONE = "done"  # with or without an error
    CANCELLED = "cancelled"  # nobody waits, and MPI has forgotten it
    LEAKED = "leaked"  # nobody waits, and MPI may use its memory until the rank ends


class MPIWork(Work):
    """A communication: what is left of its steps, and what has to happen after them.

    Args:
        result: the tensors that the future yields.
        finish: called once, after the last step.
        keep: memory that MPI uses until then.
        inputs: the tensors to show in a profile; without them, ``result``.
    """

    is_collective = False
    not_before = 0.0
    has_future = False
    seal = None  #: a :class:`~.messages.Seal` on what is sent, where that was asked for

    def __init__(
        self,
        group: ProcessGroupMPI,
        call: Call,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        keep: object = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ):
        super().__init__()
        self.group = group
        self.call = call
        self.state = WorkState.UNDER_WAY
        self.is_watched = False
        self._result = result
        self._finish = finish
        self._keep = keep
        self._steps: Steps | None = None
        # Tensors made in inference mode may be written in it only, also by another thread.
        self._for_inference = any(tensor.is_inference() for tensor in result)
        self._due = 0.0
        self._lock = threading.RLock()
        self._error: Exception | None = None
        self._source: torch.futures.Future | None = None
        self._future: torch.futures.Future | None = None
        self._future_held = False
        self._monitor: WaitMonitor | None = None
        self._span = None
        if torch.autograd._profiler_enabled():
            # An event of torch.profiler, as PyTorch's own backends begin it.
            name = "recvAnySource" if call.op == "recv" and call.peer < 0 else call.op
            shown = result if inputs is None else inputs
            self._span = _autograd._record_function_with_args_enter(f"mpi:{name}", *shown)
        progress.begin(self)

    def take_over(self, steps: Steps) -> MPIWork:
        """Take over the steps of the communication, which have begun; return the work."""
        self._steps = steps
        if not self.call.blocking:
            self.progress()
        return self

    # -- progress -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Move it on; return whether it is over. Its error is kept for :meth:`wait`."""
        if self.is_over:
            return True
        # A Ctrl-C in the middle would lose a step, or the lock.
        with guard:
            # Never two threads in a test of the same request (MPI 4.1, section 11.6.2).
            if not self._lock.acquire(blocking=False):
                return False
            try:
                if not self.is_over and self._test():
                    self._complete()
                return self.is_over
            finally:
                self._lock.release()

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, as far as is known without a look."""
        return self.state is not WorkState.UNDER_WAY

    def progress(self) -> None:
        """Have it move on, and complete, without a ``wait()``."""
        if not self.is_watched and not self.is_over:
            self.is_watched = True
            progress.watch(self)

    def give_up_if_overdue(self) -> bool:
        """End a future that nobody would end otherwise: after the timeout, or an incident."""
        if self._future is None or self.is_over:
            return False
        self._future_held = True
        try:
            if guard.heard():
                self._begin_interrupted(self._where())
                self._give_up()
            if self._monitor is None:
                group = self.group
                self._monitor = WaitMonitor(self, group.timeout, group.world, self._where())
            self._monitor.look(time.perf_counter() - self.call.start)
        except CommunicationError as error:
            self._error = error
        self._future_held = False
        if self.is_over:
            self._resolve()
        return self.is_over

    def withdraw_receive(self) -> None:
        """Cancel it if it is a receive that nobody has sent to: that leaves nothing behind."""
        if self.call.op == "recv" and not self.is_over:
            self._give_up()

    def _test(self) -> bool:
        if self._steps is None:
            return False
        try:
            if self._for_inference:
                with torch.inference_mode():
                    return self._steps.poll()
            return self._steps.poll()
        except MPI.Exception as error:
            self._error = self.group.error_in_words(error, self.call, self)
        except Exception as error:  # kept: raised where somebody waits
            self._error = error
        return True

    def _complete(self) -> None:
        self.call.end = time.perf_counter()
        self._due = self._steps.time if self._steps is not None else self.call.end
        self.call.matched = self.call.matched or self.call.end
        try:
            if self._error is None and self._finish is not None:
                with torch.inference_mode(self._for_inference):
                    self._finish()
        except Exception as error:  # kept: raised where somebody waits
            self._error = error
        except BaseException:
            self._error = CommunicationError(f"{self.call.describe()}: interrupted at its end")
            raise
        finally:
            if isinstance(self._error, CommunicationMismatch) and not self._error.record:
                self._error.record = self.begin_mismatch(str(self._error), self._where())
            self._end(WorkState.DONE)

    def begin_mismatch(self, error: str, where: str, **more: object) -> Status:
        """Begin the incident of a mismatch; return this rank's status."""
        return self.group.world.begin_incident(
            "mismatch",
            error,
            waitable=self,
            where=where,
            waited=time.perf_counter() - self.call.start,
            heard=self.call.blocking or self.call.waited,
            **more,
        )

    def _where(self) -> str:
        return self.call.where or users_line()

    def _end(self, state: WorkState) -> None:
        """End it: say so to all who ask, and let go of the memory."""
        if state is not WorkState.LEAKED:
            self._finish = self._keep = self._steps = None
        if self._span is not None:
            # An event that ends on another thread is asynchronous. So the profiler doesn't count
            # what the rank computes meanwhile as a part of it.
            _closer.submit(_autograd._record_function_with_args_exit, self._span).result()
            self._span = None
        self.state = state  # after _error: who sees it over must see how it ended
        progress.end(self)
        if not self._future_held:
            self._resolve()

    def _resolve(self) -> None:
        """Complete the future, once."""
        with self._lock:
            source = self._source
            self._source = None
        if source is not None:
            source.set_result(None)

    # -- what PyTorch calls ---------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete.

        Raises:
            CommunicationTimeout: not within ``timeout``, or the group's; or it never will.
            CommunicationMismatch: the other side made another call.
            CommunicationStopped: another rank failed.
            CommunicationError: MPI reported an error.
        """
        self.call.waited = True
        if self.seal is not None:
            self.seal.check(self.call)
        if not self.is_over:
            # PyTorch says "none given" by zero, or less.
            own = max(0.0, timeout.total_seconds()) if timeout else 0.0
            # A receive that is waited for with a timeout of its own may be tried again.
            self._block(own or self.group.timeout, not own or self.call.op != "recv")
        if self._error is not None:
            self.group.world.unheard = False
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as there is no device to synchronize with; a replaced `wait` counts here, too."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over, without waiting; who learns that it is has waited for it."""
        self.not_before = 0.0
        over = self.poll()
        if over and self._error is None:
            self.call.waited = True
        return over

    def is_success(self) -> bool:
        """Return whether it is over without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error it ended with."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were communicated."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank in the group that a ``recv`` from any source received from."""
        return self.call.peer

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the list of tensors. It completes, or fails, without a ``wait()``."""
        progress.make_way()
        with self._lock:
            self.call.waited = True
            if self._future is None:
                source = torch.futures.Future()
                # PyTorch's C++ sees an error of then(), but not one of set_exception().
                self._future = source.then(self._outcome)
                self.has_future = True
                if self.is_over:
                    source.set_result(None)
                else:
                    self._source = source
                    self.progress()
            future = self._future
        with contextlib.suppress(RuntimeError):  # outside of a backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._wait_in_backward)
        if not progress.available:
            self._block(self.group.timeout)
        return future

    def _wait_in_backward(self) -> None:
        # DDP ends backward with a wait in C++ for the futures of its buckets. That wait sees no
        # deadlock, hears no Ctrl-C, and leaves the communication to the progress thread.
        if not self.is_over:
            self._block(self.group.timeout)

    def _outcome(self, _source: torch.futures.Future) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    # -- waiting --------------------------------------------------------------------------

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the global ranks that have to come, if one is enough, and if data are moving."""
        moving = self.call.matched > 0 or self.due() is not None
        if self.call.peer is not None and self.call.peer < 0:
            return [r for r in self.call.group if r != self.group.world.rank], True, moving
        return [self.call.partner], False, moving

    def due(self) -> float | None:
        """Return when it will be over, where only time has to pass."""
        return self._steps.due() if self._steps is not None else None

    def moved(self) -> tuple[float, int]:
        """Return when its partner came, and how many steps it has taken."""
        return self.call.matched, self._steps.moved() if self._steps is not None else 0

    def _requests(self) -> list[MPI.Request]:
        return self._steps.requests() if self._steps is not None else []

    def is_free(self) -> bool:
        """Return whether MPI has let go of the memory of one that was given up."""
        with self._lock:
            return all([request.Test() for request in self._requests()])

    def expected_until(self) -> float:
        """Return until when it is worth to move it on without a pause; 0 where it is not."""
        if not self.call.matched or link.network is not None or self.is_over:
            return 0.0
        return self.call.matched + SPIN + 2e-9 * self.call.nbytes

    def withdraw(self) -> bool:
        """Take it back, because nobody waits any more; return False if it is complete."""
        self._give_up()
        return self.state in (WorkState.CANCELLED, WorkState.LEAKED)

    def withdraw_or_take_part(self) -> None:
        """Leave; or, where another rank relies on this one, take part: all have come already."""
        with guard:
            while not self.withdraw() and not self.is_over:
                os.sched_yield()

    def leave_interrupted(self) -> None:
        """Begin the incident of a Ctrl-C in this rank's call, and leave; or take part."""
        self._begin_interrupted(users_line())
        self.withdraw_or_take_part()

    def _begin_interrupted(self, where: str) -> None:
        self.group.world.begin_incident("interrupted", "Ctrl-C", waitable=self, where=where)

    def _block(self, timeout: float, fatal: bool = True) -> None:
        if self.is_collective:
            self.group.handshake.hasten()
        wait = [time.perf_counter(), 0.0]
        self.call.waits.append(wait)
        try:
            where = "" if self.call.blocking else self.call.where
            wait_for(self, timeout, self.group.world, where, fatal)
            if link.network is not None:
                link.ended(self._due)
        except CommunicationError as error:
            self._error = error
            raise
        except KeyboardInterrupt:
            self.leave_interrupted()
            raise
        finally:
            wait[1] = time.perf_counter()

    def _give_up(self) -> None:
        """End it, as nobody waits. Leave nothing behind that could swallow a later message."""
        with self._lock:
            if not self.is_over and self._test():
                self._complete()  # just now
            if self.is_over:
                return
            state = WorkState.CANCELLED
            if not self._cancel():
                state = WorkState.LEAKED
                progress.leak(self)
            self._error = CommunicationError(
                f"{self.call.describe()} was given up: a wait for it ended early", self.call
            )
            self._end(state)

    def _cancel(self) -> bool:
        """Have MPI forget it, which it can do with receives only; return whether it did."""
        requests = self._requests()
        if self.call.op != "recv" or self.call.matched:
            return not requests
        for request in requests:
            request.Cancel()
            request.Wait()
        return True


class DoneWork(Work):
    """A communication that was complete when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once: it is over."""
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return that it is over."""
        return True

    is_success = is_completed


#: The one work of all calls that were over at once.
DONE = DoneWork()
