"""The work, a pending communication, which ``isend`` and ``async_op=True`` return."""

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
from ..protocol.interrupts import guard
from ..protocol.progress import progress
from ..protocol.wait_monitor import SPIN, WaitMonitor, wait_for
from ..record import Call
from . import storages
from .step_runner import Steps

if TYPE_CHECKING:
    from ..protocol.status import Status
    from .process_group import ProcessGroupMPI
    from .seals import Seal

_autograd = torch._C._autograd
_closer = ThreadPoolExecutor(1, thread_name_prefix="mpi-profiler")


class WorkState(enum.Enum):
    """The state of a work; all states except the first are final."""

    UNDER_WAY = "under way"
    DONE = "done"  # with or without an error
    CANCELLED = "cancelled"  # no caller waits, and MPI has forgotten it
    LEAKED = "leaked"  # no caller waits, but MPI may use its memory until the rank ends


class MPIWork(Work):
    """A communication with its remaining steps, and with the function that completes it.

    Args:
        result: the tensors that the future yields.
        finish: called once, after the last step.
        keep: memory that MPI uses until then.
        inputs: the tensors to show in a profile; by default, ``result``.
    """

    is_collective = False
    not_before = 0.0
    has_future = False
    seal: Seal | None = None  #: of the tensor of an ``isend``, in a notebook, or with all checks

    def __init__(
        self,
        group: ProcessGroupMPI,
        call: Call,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        keep: torch.Tensor | Sequence[torch.Tensor] | None = None,
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
        # Tensors made in inference mode may be written only in it, even by another thread.
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
            # PyTorch's own backends begin an event of torch.profiler in the same way.
            name = "recvAnySource" if call.op == "recv" and call.peer < 0 else call.op
            shown = result if inputs is None else inputs
            self._span = _autograd._record_function_with_args_enter(f"mpi:{name}", *shown)
        progress.begin(self)
        storages.note(self)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that MPI reads or writes until it is over."""
        kept = [self._keep] if isinstance(self._keep, torch.Tensor) else self._keep or ()
        return [*self._result, *kept]

    def is_pending(self) -> bool:
        """Return whether MPI may still use the tensors; advances it, as :meth:`poll` does."""
        return not self.poll()

    def take_over(self, steps: Steps) -> MPIWork:
        """Take over steps that have already begun; return the work."""
        self._steps = steps
        if not self.call.blocking:
            self.progress()
        return self

    # -- progress -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Advance the work; return whether it is over. Its error is kept for :meth:`wait`."""
        if self.is_over:
            return True
        # A Ctrl-C in the middle would lose a step, or the lock.
        with guard:
            # Two threads must never test the same request (MPI 4.1, section 11.6.2).
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
        """Return whether it is known to have ended, without testing it."""
        return self.state is not WorkState.UNDER_WAY

    def progress(self) -> None:
        """Have the progress thread advance the work, so that it completes without a ``wait()``."""
        if not self.is_watched and not self.is_over:
            self.is_watched = True
            progress.watch(self)

    def give_up_if_overdue(self) -> bool:
        """End a future after its timeout or an incident, because no caller waits for it."""
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
        """Cancel a receive without a message; nothing of it is left."""
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
        except Exception as error:  # kept, because the caller that waits has to get it
            self._error = error
        return True

    def _complete(self) -> None:
        self.call.end = time.perf_counter()
        self._due = self._steps.time if self._steps is not None else self.call.end
        if self._error is None:
            self.call.matched = self.call.matched or self.call.end
        try:
            if self._error is None and self._finish is not None:
                with torch.inference_mode(self._for_inference):
                    self._finish()
        except Exception as error:  # kept, because the caller that waits has to get it
            self._error = error
        except BaseException:
            self._error = CommunicationError(f"{self.call.describe()} was interrupted at its end")
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
        """End the work with its final state, and release its memory if MPI doesn't use it."""
        if state is WorkState.DONE and self._requests():  # a rank has died
            progress.leak(self)
        elif state is not WorkState.LEAKED:
            self._finish = self._keep = self._steps = None
        if self._span is not None:
            # An event that ends on another thread is asynchronous. So the profiler doesn't count
            # computations at the same time as a part of it.
            _closer.submit(_autograd._record_function_with_args_exit, self._span).result()
            self._span = None
        self.state = state  # after _error, so that a thread that sees the end sees the error
        progress.end(self)
        if not self._future_held:
            self._resolve()

    def _resolve(self) -> None:
        """Complete the future, if it isn't complete yet."""
        with self._lock:
            source = self._source
            self._source = None
        if source is not None:
            source.set_result(None)

    # -- what PyTorch calls ---------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete.

        Raises:
            CommunicationTimeout: ``timeout``, or the group's, has passed, or the end never comes.
            CommunicationMismatch: the other side made another call.
            CommunicationStopped: another rank failed.
            CommunicationError: MPI reported an error.
        """
        self.call.waited = True
        if not self.is_over:
            # In PyTorch, a timeout of zero or less means that there is none.
            own = max(0.0, timeout.total_seconds()) if timeout else 0.0
            # If a receive gets its own timeout, the caller may try again after the timeout.
            self._block(own or self.group.timeout, not own or self.call.op != "recv")
        elif not self.call.blocking and not self.call.waits:
            # A slower network would have made this wait longer, so a replay needs its time.
            now = time.perf_counter()
            self.call.waits.append([now, now])
        if self._error is not None:
            self.group.world.unheard = False
            raise self._error
        self._lift_seal()
        return True

    def _lift_seal(self) -> None:
        """Look at the seal once, because the program may change the tensor from now on."""
        seal, self.seal = self.seal, None
        if seal is not None:
            seal.check()

    def synchronize(self) -> None:
        """Call ``wait()``, even one that was replaced, because there is no device to wait for."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over; a caller that gets True counts as having waited for it."""
        self.not_before = 0.0
        over = self.poll()
        if over and self._error is None:
            self.call.waited = True
            self._lift_seal()
        return over

    def is_success(self) -> bool:
        """Return whether it is over without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error with which it ended; ``None`` without one."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were communicated."""
        return self._result

    def source_rank(self) -> int:
        """Return the group rank from which a ``recv`` from any source received."""
        return self.call.peer

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the list of tensors, which completes or fails without a ``wait()``."""
        progress.make_way()
        with self._lock:
            self.call.waited = True
            self.seal = None  # the future says when the program may change the tensor
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
        with contextlib.suppress(RuntimeError):  # outside a backward pass
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
        """Return the global ranks still missing, whether one suffices, and whether data move."""
        moving = self.call.matched > 0 or self.due() is not None
        if self.call.peer is not None and self.call.peer < 0:
            return [r for r in self.call.group if r != self.group.world.rank], True, moving
        return [self.call.partner], False, moving

    def due(self) -> float | None:
        """Return when it will be over if only time has to pass; otherwise ``None``."""
        return self._steps.due() if self._steps is not None else None

    def moved(self) -> tuple[float, int]:
        """Return when its partner came, and how many steps have begun."""
        return self.call.matched, self._steps.moved() if self._steps is not None else 0

    def _requests(self) -> list[MPI.Request]:
        return self._steps.requests() if self._steps is not None else []

    def is_free(self) -> bool:
        """Return whether MPI no longer uses the memory of this abandoned work."""
        with self._lock:
            return all([request.Test() for request in self._requests()])

    def expected_until(self) -> float:
        """Return until when it should be tested without a pause; 0 if pauses are fine."""
        if not self.call.matched or link.network is not None or self.is_over:
            return 0.0
        return self.call.matched + SPIN + 2e-9 * self.call.nbytes

    def withdraw(self) -> bool:
        """Withdraw it, because no caller waits any more; return False if it is complete."""
        self._give_up()
        return self.state in (WorkState.CANCELLED, WorkState.LEAKED)

    def withdraw_or_take_part(self) -> None:
        """Leave the call, or take part in it if another rank relies on this one."""
        with guard:
            while not self.withdraw() and not self.is_over:
                os.sched_yield()

    def leave_interrupted(self) -> None:
        """Begin the incident of a Ctrl-C in this rank's call, and leave it or take part in it."""
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
        """End the work without a waiting caller, so that no receive takes a later message."""
        with self._lock:
            if not self.is_over and self._test():
                self._complete()  # it has just ended
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
        """Have MPI forget it, which is possible only for receives; return whether MPI did."""
        requests = self._requests()
        if self.call.op != "recv" or self.call.matched:
            return not requests
        for request in requests:
            request.Cancel()
            request.Wait()
        return True


class DoneWork(Work):
    """The work of a communication that was complete when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True at once, because the communication is over."""
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed


#: All calls that were over at once return this work.
DONE = DoneWork()
