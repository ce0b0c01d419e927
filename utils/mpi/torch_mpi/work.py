"""A communication under way: what ``isend`` and ``async_op=True`` return."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import Work

from . import algorithms, arrivals
from .errors import (
    CommunicationError,
    CommunicationMismatch,
    users_line,
)
from .failures import is_death
from .interrupts import guard
from .mpi import MPI
from .network import link
from .progress import progress
from .record import Call
from .steps import Steps
from .waiting import SPIN, Vigil, wait_for

# How long a rank that meets a mismatch waits for the other side's description.
OTHER_SIDE = 0.5  # seconds


class DoneWork(Work):
    """A communication that was complete when its call returned. One for all of them."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """It is over."""
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """It is over."""
        return True

    is_success = is_completed


class MPIWork(Work):
    """A communication: what is left of its steps, and what has to happen after them.

    Args:
        group: the process group: how long to wait, and whom to tell that a wait was given up.
        call: the record of the communication.
        result: the tensors that the future yields.
        finish: called once, after the last step.
        keep: memory that MPI uses until then.
        inputs: the tensors to show in a profile; without them, ``result``.
    """

    is_collective = False
    not_before = 0.0
    #: A :class:`torch_mpi.strict.Seal` on what is sent, where that was asked for.
    seal = None

    def __init__(
        self,
        group,
        call: Call,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        keep: object = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ):
        super().__init__()
        self.group = group
        self.call = call
        self._result = result
        self._finish = finish
        self._keep = keep
        self._steps: Steps | None = None
        # Tensors made in inference mode may be written in it only, also by another thread.
        self._for_inference = any(tensor.is_inference() for tensor in result)
        self._watched = False
        self._due = 0.0
        self._lock = threading.RLock()
        self._done = self._given_up = self._holds_back = False
        self._error: Exception | None = None
        self._source: torch.futures.Future | None = None
        self._future: torch.futures.Future | None = None
        self._vigil: Vigil | None = None
        self._span = _open_span(call, result if inputs is None else inputs)
        progress.begin(self)

    def follow(self, steps: Steps) -> None:
        """The steps of the communication, which have begun."""
        self._steps = steps

    # -- progress -------------------------------------------------------------------------

    def poll(self) -> bool:
        """Move it on without waiting. True when the communication is over.

        Never raises an error of the communication: that is kept for :meth:`wait`.
        """
        if self._done:
            return True
        # A Ctrl-C in the middle would lose a step, or the lock.
        with guard:
            # Never two threads in a test of the same request (MPI 4.1, section 11.6.2).
            if not self._lock.acquire(blocking=False):
                return False
            try:
                if not self._done and self._test():
                    self._complete()
                return self._done
            finally:
                self._lock.release()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, as far as is known without a look."""
        return self._done

    def progress(self) -> None:
        """Have it move on, and complete, without a ``wait()``."""
        if not self._watched and not self._done:
            self._watched = True
            progress.watch(self)

    def expire(self) -> bool:
        """End a future that nobody would end otherwise: after the timeout, or an incident."""
        if self._future is None or self._done:
            return False
        self._holds_back = True
        try:
            if guard.heard():
                self.group.world.stop("interrupted", "Ctrl-C", waitable=self, where=self._where())
                self._give_up()
            if self._vigil is None:
                self._vigil = Vigil(self, self.group.timeout, self.group.world, self._where())
            self._vigil.look(time.perf_counter() - self.call.start)
        except CommunicationError as error:
            self._error = error
        self._holds_back = False
        if self._done:
            self._resolve()
        return self._done

    def take_back(self) -> None:
        """Cancel it, where that leaves nothing behind: a receive that nobody has sent to."""
        if self.call.op == "recv" and not self._done:
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
            self._error = in_words(error, self.call, self.group, self)
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
            self._report_mismatch()
            self._settle()

    def _report_mismatch(self) -> None:
        if isinstance(self._error, CommunicationMismatch) and not self._error.record:
            where = self._where()
            self._error.record = self.group.world.stop(
                "mismatch", str(self._error), waitable=self, where=where,
                waited=time.perf_counter() - self.call.start, heard=self.is_heard(),
            )  # fmt: skip

    def is_heard(self) -> bool:
        """Whether somebody waits, and will be told of an error."""
        return self.call.blocking or self.call.waited

    def _where(self) -> str:
        return self.call.where or users_line()

    def _settle(self, memory_is_free: bool = True) -> None:
        """It is over: say so to all who ask, and let go of the memory."""
        if memory_is_free:
            self._finish = self._keep = self._steps = None
        if self._span is not None:
            _close_span(self._span)
            self._span = None
        self._done = True  # after _error: who sees it done must see how it ended
        progress.end(self)
        if not self._holds_back:
            self._resolve()

    def _resolve(self) -> None:
        """Complete the future, once."""
        with self._lock:
            source, self._source = self._source, None
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
        if not self._done:
            own = _seconds(timeout)
            # A receive that is waited for with a timeout of its own may be tried again.
            self._block(own or self.group.timeout, own is None or self.call.op != "recv")
        if self._error is not None:
            self.group.world.unheard = False
            raise self._error
        return True

    def synchronize(self) -> None:
        """Same as :meth:`wait`: there is no device to synchronize with."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over. Does not wait; who learns that it is has waited for it."""
        self.not_before = 0.0
        over = self.poll()
        if over and self._error is None:
            self.call.waited = True
        return over

    def is_success(self) -> bool:
        """Whether it is over without an error."""
        return self.is_completed() and self._error is None

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
                source = torch.futures.Future()
                # PyTorch's C++ sees an error of then(), but not one of set_exception().
                self._future = source.then(self._outcome)
                if self._done:
                    source.set_result(None)
                else:
                    self._source = source
                    self.progress()
            future = self._future
        with contextlib.suppress(RuntimeError):  # outside of backward
            torch.autograd.Variable._execution_engine.queue_callback(self._wait_in_backward)
        if not progress.available:
            self._block(self.group.timeout)
        return future

    def _wait_in_backward(self) -> None:
        """Wait before PyTorch's C++ does.

        DDP ends backward with a wait for the futures of its buckets. That wait sees no deadlock,
        hears no Ctrl-C, and leaves the communication to the progress thread.
        """
        if not self._done:
            self._block(self.group.timeout)

    def _outcome(self, _source: torch.futures.Future) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    # -- waiting --------------------------------------------------------------------------

    def missing(self) -> tuple[list[int], bool, bool]:
        """Global ranks that have to come; whether one is enough; whether data are moving."""
        moving = self.call.matched > 0 or self.due() is not None
        if self.call.peer is not None and self.call.peer < 0:
            return [r for r in self.call.group if r != self.group.world.rank], True, moving
        return [self.call.partner], False, moving

    def due(self) -> float | None:
        """When it will be over, where only time has to pass."""
        return self._steps.due() if self._steps is not None else None

    def moved(self) -> tuple[float, int]:
        """When its partner came, and how many steps it has taken."""
        return self.call.matched, self._steps.moved() if self._steps is not None else 0

    def requests(self) -> list[MPI.Request]:
        """What MPI has not completed of it."""
        return self._steps.requests() if self._steps is not None else []

    def is_free(self) -> bool:
        """Of one that was given up: whether MPI has let go of its memory."""
        with self._lock:
            return all([request.Test() for request in self.requests()])

    def expected_until(self) -> float:
        """Until when it is worth to move it on without a pause; 0 where it is not."""
        if not self.call.matched or link.network is not None or self._done:
            return 0.0
        return self.call.matched + SPIN + 2e-9 * self.call.nbytes

    def leave(self) -> bool:
        """Take it back, because nobody waits any more. False: it is complete."""
        self._give_up()
        return self._given_up

    def _block(self, timeout: float, fatal: bool = True) -> None:
        if self.is_collective:
            self.group.hasten()
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
            self.group.world.stop("interrupted", "Ctrl-C", waitable=self, where=users_line())
            self.leave()
            raise
        finally:
            wait[1] = time.perf_counter()

    def _give_up(self, error: Exception | None = None) -> None:
        """Nobody waits any more. Leave nothing behind that could swallow a later message."""
        with self._lock:
            if self._done or self._is_too_late():
                return
            cancelled = self._cancel()
            if not cancelled:
                # MPI may still read and write: the memory has to stay.
                progress.bury(self)
            self._given_up = True
            self._error = error or CommunicationError(
                f"{self.call.describe()} was given up: a wait for it ended early", self.call
            )
            self._settle(memory_is_free=cancelled)

    def _is_too_late(self) -> bool:
        """Whether it completed just now."""
        if self._test():
            self._complete()
        return self._done

    def _cancel(self) -> bool:
        """Have MPI forget it, which it can do with receives only; whether it did."""
        if self._steps is None:
            return True
        requests = self.requests()
        if self.call.op != "recv" or self.call.matched:
            return not requests
        for request in requests:
            request.Cancel()
            request.Wait()
        return True


class CollectiveWork(MPIWork):
    """A collective: begins when all ranks of the group have come with the same call.

    Args:
        native: the blocking MPI calls it can be made of: ``(name, arguments)`` pairs.
        steps: the communication as a generator; where it is missing, ``native`` without blocking.
        may_block: whether ``native`` is used when all ranks are in blocking calls.

    Attributes:
        not_before: when this rank comes to it at the earliest, if nobody waits for it before.
    """

    is_collective = True

    def __init__(self, group, call, result, finish, keep, inputs, native, steps, may_block):
        super().__init__(group, call, result, finish, keep, inputs)
        self._native, self._generator, self.may_block = native, steps, may_block
        self.word, self.not_before = 0, 0.0
        self.come = self.begun = False
        self._missing: list[int] = []

    def _test(self) -> bool:
        if not self.begun:
            self.group.pump()
        if self._error is not None:
            return True
        return self.begun and (self._steps is None or super()._test())

    @property
    def arrival(self) -> tuple[int, int]:
        """The collective's number, and this rank's word for it."""
        return self.call.sequence, self.word

    def look(self) -> arrivals.Sight:
        """Who is there."""
        sight = self.group.arrivals.look(*self.arrival)
        self._missing = [self.call.group[rank] for rank in sight.missing]
        return sight

    def begin(self, direct: bool) -> None:
        """All ranks are there: make the MPI calls. With ``direct``, those that block."""
        self.call.matched = time.perf_counter()
        try:
            if direct and self.may_block:
                for name, arguments in self._native():
                    getattr(self.group.channels.data, name)(*arguments)
            else:
                self._steps = Steps((self._generator or self._without_blocking)(), self._since())
        except MPI.Exception as error:
            self._error = in_words(error, self.call, self.group, self)
        except Exception as error:  # kept: raised where somebody waits
            self._error = error
        self.begun = True  # last: another thread may poll

    def _since(self) -> float:
        """When it began, for the slow network: a small message leaves before its receiver comes."""
        small = self.call.nbytes <= algorithms.SMALL
        return link.called(self.call.start) if small else self.call.matched

    def _without_blocking(self) -> Generator:
        data = self.group.channels.data
        yield [getattr(data, f"I{n[0].lower()}{n[1:]}")(*args) for n, args in self._native()]

    def refuse(self, error: Exception) -> None:
        """It will never begin."""
        self._error = error

    def missing(self) -> tuple[list[int], bool, bool]:
        """Who has not come."""
        return self._missing, False, self.begun

    def _give_up(self, error: Exception | None = None) -> None:
        with self.group.lock, self._lock:
            if not self._done and not self.begun and not self.group.withdraw(self):
                return  # all are there: it goes on, whoever waits
            super()._give_up(error)

    def _cancel(self) -> bool:
        if self.begun and self._steps is not None and not self._steps.done:
            progress.adopt(self.group, self._steps)  # the other ranks need this one's part in it
            return False
        return True


class JoinedWork(MPIWork):
    """Several works as one."""

    is_collective = True

    def __init__(self, works: list[MPIWork], result: list[torch.Tensor]):
        self._works = works
        super().__init__(works[0].group, works[0].call, result)
        self.progress()

    def _test(self) -> bool:
        over = all([work.poll() for work in self._works])
        if over:
            self._error = next((w._error for w in self._works if w._error is not None), None)
        return over

    def missing(self) -> tuple[list[int], bool, bool]:
        """Who has to come for the first one that is not over."""
        return next((w for w in self._works if not w._done), self._works[0]).missing()

    def _give_up(self, error: Exception | None = None) -> None:
        with self._lock:
            if self._done or self.poll():
                return
            for work in self._works:
                work._give_up(error)
            self._given_up = any(work._given_up for work in self._works)
            self.poll()


def _seconds(timeout: timedelta | None) -> float | None:
    """Seconds of a timeout; PyTorch says "none given" by zero or a negative one."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


def in_words(error: MPI.Exception, call: Call, group, waitable=None) -> CommunicationError:
    """What a user is told of an error of MPI; after a death the group is of no use any more."""
    if is_death(error):
        group.revoke()
        return group.world.follow(call, waitable, time.perf_counter() - call.start)
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return CommunicationMismatch(
            f"{call.describe()} at {users_line()}: the message that arrived is larger than the "
            f"tensor to receive it. Sender and receiver must agree on shape and dtype.",
            call,
        )
    return CommunicationError(f"{call.describe()} at {users_line()} failed: {error}", call)


def _open_span(call: Call, tensors: list[torch.Tensor]):
    """Show the communication in torch.profiler, as PyTorch's own backends do."""
    if not torch.autograd._profiler_enabled():
        return None
    name = "recvAnySource" if call.op == "recv" and call.peer < 0 else call.op
    return torch._C._autograd._record_function_with_args_enter(f"mpi:{name}", *tensors)


def _close_span(span) -> None:
    # An event that ends on another thread is an asynchronous one: what the rank computes
    # meanwhile is then not taken for a part of it.
    _closer.submit(torch._C._autograd._record_function_with_args_exit, span).result()


_closer = ThreadPoolExecutor(1, thread_name_prefix="mpi-profiler")
