"""The thread that advances communications while the rank computes.

MPI promises progress only inside MPI calls (MPI 4.1, section 2.9). So the thread tests pending
communications, and sleeps in between.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from types import FrameType

from ..errors import in_library
from ..mpi import MPI
from .interfaces import Group, Work
from .interrupts import guard
from .wait_monitor import is_true_within

# The pause is short enough to hide a bucket behind the backward pass, and long enough that the
# thread costs only a few percent of a core.
PAUSE = 200e-6  # seconds
# If nothing has completed for QUIET seconds, the pause grows to LONG_PAUSE.
QUIET = 0.1  # seconds
LONG_PAUSE = 2e-3  # seconds
# Works of at most so many bytes are kept for a while after their end.
SMALL = 1024
# The end of a process group waits this long for pending communications.
PATIENCE = 5.0  # seconds
_MAIN_THREAD = threading.main_thread().ident


class Progress:
    """All pending communications, and the thread that tests them while no caller waits."""

    def __init__(self) -> None:
        # This set keeps everything alive that MPI may still read or write.
        self._live: set[Work] = set()
        self._watched: list[Work] = []
        self._leaked: list[Work] = []
        # DDP's join() keeps only the C++ half of a work, and may use it late. The C++ half needs
        # the Python half, so recent works stay alive here.
        self._recent: deque[Work] = deque(maxlen=256)
        self._detached: list[_Detached] = []
        self._wake = threading.Event()
        self._stop = False
        self.thread: threading.Thread | None = None
        self._start = threading.Lock()
        self._lock = threading.Lock()
        self._last_change = 0.0
        self._process = os.getpid()
        self.available = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def begin(self, work: Work) -> None:
        """Keep ``work`` alive until :meth:`end`."""
        self._live.add(work)

    def end(self, work: Work) -> None:
        """Note that ``work`` is complete."""
        self._live.discard(work)
        if work.is_watched:
            self._unwatch(work)
        if not work.call.blocking and work.call.nbytes <= SMALL:
            with self._lock:
                self._recent.append(work)

    def watch(self, work: Work) -> None:
        """Have the thread call ``work.poll()`` until it returns True."""
        self._watched.append(work)
        self._last_change = time.perf_counter()
        self._wake_up()

    def _unwatch(self, work: Work) -> None:
        """Drop a work at once, because the list keeps its tensors alive."""
        self._last_change = time.perf_counter()
        with contextlib.suppress(ValueError):  # another thread has done it
            self._watched.remove(work)

    def _wake_up(self) -> None:
        # A Ctrl-C inside Event.set would leave its lock locked for good.
        with guard:
            if not self.available:
                self._round()
                return
            if self.thread is None:
                self._launch()
            self._wake.set()

    def make_way(self) -> None:
        """Start another progress thread, because a callback on this one will wait for a future."""
        if self.thread is threading.current_thread():
            self.thread = None
            self._wake_up()

    def leak(self, work: Work) -> None:
        """Keep the memory of an abandoned communication for good.

        MPI may write there until MPI_Finalize, which comes after Python has emptied its modules.
        """
        self._leaked.append(work)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))

    def detach(self, group: Group, poll: Callable[[], bool]) -> None:
        """Go on with steps of ``group`` that other ranks need, even if no caller waits for them."""
        self._detached.append(_Detached(group, poll))
        self._wake_up()

    def has_futures(self) -> bool:
        """Return whether a pending communication may run a callback."""
        return any(work.has_future for work in list(self._live))

    def works_of(self, group: Group) -> list[Work]:
        """Return the pending communications of ``group``."""
        return [work for work in list(self._live) if work.group is group]

    def settled(self, group: Group) -> bool:
        """Advance the collectives of ``group``; return whether all are over."""
        works = [work for work in self.works_of(group) if work.is_collective]
        detached = [steps for steps in list(self._detached) if steps.group is group]
        return all([work.poll() for work in works]) & all([steps.is_over() for steps in detached])

    def all_sent(self, group: Group) -> bool:
        """Advance the messages sent in ``group``; return whether MPI has released all of them."""
        sends = [work for work in self.works_of(group) if work.call.op == "send"]
        leaked = [work for work in self._leaked if work.group is group]
        return all([work.poll() for work in sends]) & all([work.is_free() for work in leaked])

    def free_leaked(self, group: Group) -> None:
        """Free the memory that :meth:`leak` kept for ``group``, because all of it is complete."""
        for work in [work for work in self._leaked if work.group is group]:
            self._leaked.remove(work)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(work))

    def finish(self, group: Group) -> bool:
        """End the communications of ``group``, receives at once; return whether none is left."""
        with self._lock:
            kept = [work for work in self._recent if work.group is not group]
            self._recent.clear()
            self._recent.extend(kept)
        if any(work.group is group for work in self._leaked):
            return False
        mine = self.works_of(group)
        for work in mine:
            work.withdraw_receive()
            if group.world.incident():
                work.withdraw()
        return is_true_within(PATIENCE, lambda: all([work.poll() for work in mine]), PAUSE)

    def withdraw_receives(self, since: float) -> None:
        """Give up receives begun since then (``perf_counter``), which would take later messages."""
        for work in list(self._live):
            if not work.call.blocking and work.call.start >= since:
                work.withdraw_receive()

    def stop(self) -> None:
        """End the thread, because it must not call MPI after MPI_Finalize."""
        if os.getpid() != self._process:
            return  # a forked child has neither the thread nor MPI
        self._stop = True
        self._wake.set()
        if self.thread is not None:
            self.thread.join(timeout=5)
        for work in list(self._live):
            if not work.poll():
                self.leak(work)

    def _launch(self) -> None:
        with self._start:
            if self.thread is None and not self._stop:
                self.thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while not self._stop and self.thread is me:
            self._wake.wait()
            self._wake.clear()
            while (self._watched or self._detached) and not self._stop and self.thread is me:
                self._round()
                self._pause()

    def _pause(self) -> None:
        """Yield while data travel within this machine; otherwise sleep."""
        now = time.perf_counter()
        if any(now < work.expected_until() for work in list(self._watched)):
            os.sched_yield()
        else:
            # No variable here may refer to a work, so that its memory is free after the wait.
            time.sleep(self._until_next(now))

    def _until_next(self, now: float) -> float:
        """Return the seconds until the thread has something to do again."""
        works = list(self._watched)
        dues = [due for work in works if (due := work.due()) is not None]
        pause = LONG_PAUSE if now - self._last_change > QUIET else PAUSE
        if not self._detached:  # nothing to do until the first work may begin
            pause = max(pause, min((work.not_before for work in works), default=0.0) - now)
        return max(0.0, min([pause, *(due - now for due in dues)]))

    def _round(self) -> None:
        # A work stays in the list during its test, because other threads run at that time.
        now = time.perf_counter()
        for work in list(self._watched):
            if work.not_before <= now and _has_ended(work):
                self._unwatch(work)
        for steps in list(self._detached):
            if steps.is_over():
                with contextlib.suppress(ValueError):
                    self._detached.remove(steps)


def _has_ended(work: Work) -> bool:
    try:
        return work.poll() or work.give_up_if_overdue()
    except Exception:  # an error of one work must not stop the others
        return work.is_over


class _Detached:
    """Steps for which no caller waits, and which several threads may advance."""

    def __init__(self, group: Group, poll: Callable[[], bool]) -> None:
        self.group = group
        self._poll = poll
        self._lock = threading.Lock()

    def is_over(self) -> bool:
        """Advance the steps; return whether they have ended."""
        # Two threads must never test the same request (MPI 4.1, section 11.6.2).
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._poll()
        except Exception:  # no caller is left who could get the error
            return True
        finally:
            self._lock.release()


# -- which threads of a rank may communicate, other than the one that waits ----------------------

# Threads in this code run the user's functions when a function is due, or something has ended.
_CALLERS = tuple(
    os.path.join(os.path.dirname(os.__file__), *path.split("/"))
    for path in ("asyncio/", "multiprocessing/pool.py", "concurrent/futures/process.py")
)


class Threads:
    """The threads of this process that have communicated, or could.

    A waiting rank is certainly stuck only if no other thread of its process can still send what
    other ranks wait for. Progress bars, data loaders and executors keep threads that never
    communicate. But a thread that runs a function of the user's may communicate.
    """

    def __init__(self) -> None:
        # Threads that exist now don't belong to the user.
        self._first = set(threading.enumerate())
        self._communicated: set[int] = set()

    def communicates(self) -> None:
        """Note that the present thread communicates."""
        self._communicated.add(threading.get_ident())

    def alone(self, but: Collection[threading.Thread | None]) -> bool:
        """Return True if only this thread and the backend's (``but``) may communicate."""
        frames = sys._current_frames()
        # A variable that holds this frame would keep all tensors of its callers alive.
        del frames[threading.get_ident()]
        alive = threading.enumerate()
        self._communicated &= {thread.ident for thread in alive if thread.ident}
        for thread in alive:
            if thread is threading.current_thread() or thread in but:
                continue
            if thread.ident in self._communicated:
                return False
            if thread not in self._first and _may_communicate(
                thread, frames.get(thread.ident or 0)
            ):
                return False
        return True


def _may_communicate(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Return whether a thread runs the user's code now, or will run it later by itself."""
    if isinstance(thread, threading.Timer):
        return True
    while frame is not None:
        path = frame.f_code.co_filename
        if not in_library(path) or path.startswith(_CALLERS):
            return True
        frame = frame.f_back
    return False


progress = Progress()
atexit.register(progress.stop)
