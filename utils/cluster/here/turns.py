"""Threads of which one runs at a time, each with a queue of jobs: the ranks of one process.

A rank runs until it waits for another one. Then the next rank that can go on gets its turn, in the
order of their numbers. So a run is the same each time, and when no rank can go on, that is a
deadlock, which :class:`Turns` reports at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import FrameType

from torch_mpi import compat, record
from torch_mpi.errors import users_place
from utils.cluster.world.carrier import Waited

from . import heap
from .clocks import Clocks
from .own import Own, Place

_RECORDER: Place = (record, "recorder")
# A job returns what has to be called once the rank's turn is over.
Job = Callable[[], Callable[[], None]]
# Seconds that the thread of an idle rank gets to end.
GOODBYE = 5.0


class Sleep:
    """A sleep until a moment on the ranks' clocks. No other rank that can run is earlier then."""

    done = False

    def __init__(self, until: float):
        self.until = until


class Deadline(Sleep):
    """A wait that ends at a moment, unless what it waits for comes before."""

    def __init__(self, waited: Waited, until: float):
        super().__init__(until)
        self.waited = waited


class Retired(BaseException):
    """Ends the thread of a rank that fresh ranks have replaced."""


class Turns:
    """The threads of n ranks.

    Attributes:
        n: number of ranks.
        rank: the rank that has its turn, or had the last one.
        batch: how often all ranks were idle, and then got a job.
        clocks: the ranks' clocks.
        own: what each rank has for itself; set it before the first job.
        stuck: is called when each rank waits or has nothing to do. It must end what they wait for.
    """

    own: Own
    stuck: Callable[[], None]

    def __init__(self, n: int):
        self.n = n
        self.rank = 0
        self.batch = 0
        self.clocks = Clocks(n, self.sleep)
        # What a rank waits for; True: it can run; None: it has nothing to do.
        self._state: list[Waited | bool | None] = [None] * n
        self._jobs: list[deque[Job]] = [deque() for _ in range(n)]
        self._interrupted = [False] * n
        self._is_running = False
        self._is_switching = False
        self._retired = False
        self._lock = threading.Lock()
        # Locks that another thread releases: many times cheaper than threading.Semaphore.
        self._turns = [_taken() for _ in range(n)]
        self._threads = [
            threading.Thread(target=self._live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(n)
        ]

    # -- from outside -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        heap.use_one()
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Mapping[int, Job]) -> None:
        """Give jobs to ranks. All of these ranks can run before one is found to wait forever."""
        with self._lock:
            for rank, job in jobs.items():
                self._jobs[rank].append(job)
                if self._state[rank] is None:
                    self._state[rank] = True
            if self._is_running:
                return
            self._is_running = True
            self.batch += 1
            self.clocks.begin_together()
        self._turns[min(jobs)].release()

    def busy(self) -> list[int]:
        """Return the ranks that have something to do."""
        return [rank for rank in range(self.n) if self._state[rank] is not None]

    def present(self) -> tuple[int | None, float]:
        """Return the rank that has its turn, if one has, and for how many seconds."""
        return (self.rank if self._is_running else None), self.clocks.turn()

    def waiting(self) -> dict[int, Waited]:
        """Return by rank what ranks wait for."""
        states = enumerate(self._state)
        return {r: w for r, w in states if not isinstance(w, bool | Sleep | None) and not w.done}

    def log(self, rank: int) -> record.Log:
        """Return the record of a rank's calls."""
        log: record.Log = record.recorder if rank == self.rank else self.own.of(rank, _RECORDER)
        return log

    place = staticmethod(users_place)
    is_called_by = staticmethod(compat.is_called_by)

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raise KeyboardInterrupt on these ranks. A rank inside C gets it when it returns."""
        for rank in set(ranks) & set(self.busy()):
            self._interrupted[rank] = True
            if self._is_running and rank == self.rank and not self._is_switching:
                self._interrupted[rank] = False
                self._raise(KeyboardInterrupt, rank)

    def idents(self) -> list[int]:
        """Return the identifier of each rank's thread."""
        return [thread.ident or 0 for thread in self._threads]

    def frame(self, rank: int) -> FrameType | None:
        """Return the innermost frame of a rank's thread."""
        return sys._current_frames().get(self._threads[rank].ident or 0)

    def retire(self) -> None:
        """End the threads, and give the process its own values again.

        A thread that computes in C ends when it returns from there.
        """
        with self._lock:
            self._retired = True
            running = self.rank if self._is_running else None
        for turn in self._turns:
            with contextlib.suppress(RuntimeError):  # this rank has just got its turn
                turn.release()
        if running is not None:
            self._raise(Retired, running)
        # PyTorch may not be torn down while a thread still frees its groups.
        for thread in self._threads:
            thread.join(GOODBYE)
        self.own.leave_to_outside(self.rank)

    def _raise(self, error: type[BaseException], rank: int) -> None:
        """Raise an error in a rank's thread, at its next step in Python."""
        thread = ctypes.c_ulong(self._threads[rank].ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))

    # -- from a rank ------------------------------------------------------------------------

    def block(self, waited: Waited, until: float | None = None) -> None:
        """Let other ranks run until this is done, or until a moment on this rank's clock.

        Raises:
            KeyboardInterrupt: this rank has been interrupted.
        """
        if waited.done:
            return
        self._is_switching = True
        rank = self.rank
        self._state[rank] = waited if until is None else Deadline(waited, until)
        self._pass_on(rank)
        self._state[rank] = True
        if until is not None and not waited.done:
            self.clocks.reach(rank, until)
        self._raise_if_interrupted()

    def ended(self, waited: Waited) -> None:
        """Do nothing: a rank goes on in its next turn."""

    def sleep(self, until: float) -> None:
        """Let the other ranks run that are earlier than this moment.

        Raises:
            KeyboardInterrupt: this rank has been interrupted.
        """
        self._is_switching = True
        rank = self.rank
        self._state[rank] = Sleep(until)
        self._pass_on(rank)
        self._state[rank] = True
        self.clocks.reach(rank, until)
        self._raise_if_interrupted()

    def let_others_run(self) -> bool:
        """Let the next rank run that can; return False if there is none."""
        self._is_switching = True
        rank = self.rank
        alone = self._next(rank) == rank
        if not alone:
            self._pass_on(rank)
        self._raise_if_interrupted()
        return not alone

    def take_interrupt(self) -> bool:
        """Return whether the rank that runs was interrupted; this ends the interrupt."""
        rank = self.rank
        was, self._interrupted[rank] = self._interrupted[rank], False
        return was

    def _raise_if_interrupted(self) -> None:
        self._is_switching = False
        if self.take_interrupt():
            raise KeyboardInterrupt

    # -- turns ------------------------------------------------------------------------------

    def _live(self, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.clocks.belongs_to(rank)
        try:
            self._enter(rank)
            while True:
                report = self._jobs[rank].popleft()()
                self._is_switching = True
                self._finish(rank, report)
        except Retired:
            return

    def _enter(self, rank: int) -> None:
        self._turns[rank].acquire()
        with self._lock:
            if self._retired:
                raise Retired
            self.rank = rank
            self.own.enter(rank)
        self.clocks.start(rank)
        self._is_switching = False

    def _finish(self, rank: int, report: Callable[[], None]) -> None:
        with self._lock:
            self._interrupted[rank] = False
            self._state[rank] = True if self._jobs[rank] else None
        self._pass_on(rank, report)

    def _pass_on(self, rank: int, report: Callable[[], None] | None = None) -> None:
        """Give the turn to the next rank, and return when this one has its turn again.

        Args:
            rank: this rank.
            report: is called between the two turns, when the process has its own values again
                unless another rank runs.
        """
        if self._retired:
            raise Retired
        following = self._next(rank)
        if following is None and self.waiting():
            self.stuck()
            following = self._next(rank)
        if following == rank and report is None:
            return
        with self._lock:
            if self._retired:
                raise Retired
            if following is None:
                following = self._next(rank)  # the kernel may have sent a cell
            self.clocks.stop(rank)
            self.own.leave(rank, to_outside=following is None)
            self._is_running = following is not None
        if report is not None:
            report()
        heap.give_back()
        if following is not None:
            self._turns[following].release()
        self._enter(rank)

    def _next(self, rank: int) -> int | None:
        """Return the next rank that can run: this one if no other can, ``None`` if none can."""
        order = [(rank + k) % self.n for k in range(1, self.n + 1)]
        sleeping = {r: s for r in order if (s := self._sleep_of(r)) is not None}
        ready = [r for r in order if r not in sleeping and self._is_ready(r)]
        if sleeping:
            return self._next_awake(order, sleeping, ready)
        return ready[0] if ready else None

    def _next_awake(self, order: list[int], sleeping: dict[int, Sleep], ready: list[int]) -> int:
        """Return the next rank that is ready or awake by now, or else the first that wakes up."""
        if not ready:
            return min(sleeping, key=lambda r: sleeping[r].until)
        earliest = min(self.clocks.now(r) for r in ready)
        awake = {r for r, sleep in sleeping.items() if sleep.until <= earliest}
        return next(r for r in order if r in ready or r in awake)

    def _sleep_of(self, rank: int) -> Sleep | None:
        """Return the sleep of a rank, or its wait that has a deadline and is not over."""
        state = self._state[rank]
        over = isinstance(state, Deadline) and (state.waited.done or self._interrupted[rank])
        return state if isinstance(state, Sleep) and not over else None

    def _is_ready(self, rank: int) -> bool:
        state = self._state[rank]
        if isinstance(state, Deadline):
            state = state.waited
        if isinstance(state, bool | None):
            return state is True
        return state.done or self._interrupted[rank]


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
