"""Clocks that a check moves on: what an answer measures then does not depend on the machine.

An answer that takes times is run with :func:`moved_clocks`. Nobody sleeps: what the check says
takes 20 s adds 20 s to every clock of the process.
"""

from __future__ import annotations

import contextlib
import datetime
import signal
import threading
import time
import timeit
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass
class Clock:
    """By how many seconds the clocks of this process are ahead.

    Attributes:
        ahead: by what the check let pass.
        offset: besides; ranks on other machines have clocks that differ.
    """

    ahead: float = 0.0
    offset: float = 0.0

    def advance(self, seconds: float) -> None:
        """Let that much time pass."""
        self.ahead += seconds


@contextlib.contextmanager
def moved_clocks(*namespaces: dict[str, Any]) -> Iterator[Clock]:
    """Let all clocks of this process run ahead by what the yielded :class:`Clock` says.

    Those of :mod:`time`, ``timeit.default_timer``, ``datetime.now``, ``MPI.Wtime``; also where a
    namespace has them by another name, or a function in it as the default of an argument.
    """
    clock = Clock()
    places = list(_places(clock))
    moved = {id(original): new for _, _, original, new in places}
    with contextlib.ExitStack() as patches:
        for module, name, original, _ in places:
            patches.enter_context(mock.patch.object(module, name, moved[id(original)]))
        for namespace in (*namespaces, vars(timeit), {"Timer": timeit.Timer.__init__}):
            own = {name: moved[id(it)] for name, it in namespace.items() if id(it) in moved}
            patches.enter_context(mock.patch.dict(namespace, own))
            for function in list(namespace.values()):
                if isinstance(function, types.FunctionType):
                    patches.enter_context(_moved_defaults(function, moved))
        yield clock


def _places(clock: Clock) -> Iterator[tuple[object, str, Any, Any]]:
    """Yield where clocks are (module and name), each of them, and the one that is ahead."""
    from mpi4py import MPI  # on the ranks only: a kernel has no business with MPI

    places: list[tuple[object, str, int]] = [(timeit, "default_timer", 1), (MPI, "Wtime", 1)]
    for name in ("perf_counter", "monotonic", "time"):
        places += [(time, name, 1), (time, f"{name}_ns", 10**9)]
    for module, name, unit in places:
        original = getattr(module, name)
        yield module, name, original, _ahead(original, clock, unit)
    yield datetime, "datetime", datetime.datetime, _moved_dates(datetime.datetime, clock)


def _ahead(original: Callable[[], Any], clock: Clock, unit: int) -> Callable[[], Any]:
    def read() -> Any:
        now = original()
        return now + type(now)((clock.ahead + clock.offset) * unit)

    return read


def _moved_dates(date: type[datetime.datetime], clock: Clock) -> type[datetime.datetime]:
    class Moved(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return date.now(tz) + datetime.timedelta(seconds=clock.ahead)

        @classmethod
        def utcnow(cls) -> Any:
            return date.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(
                seconds=clock.ahead
            )

    return Moved


@contextlib.contextmanager
def _moved_defaults(function: types.FunctionType, moved: dict[int, Any]) -> Iterator[None]:
    positional, named = function.__defaults__, function.__kwdefaults__
    function.__defaults__ = positional and tuple(moved.get(id(it), it) for it in positional)
    function.__kwdefaults__ = named and {key: moved.get(id(it), it) for key, it in named.items()}
    try:
        yield
    finally:
        function.__defaults__, function.__kwdefaults__ = positional, named


# --- a time limit --------------------------------------------------------------------------------


class NotEnded(RuntimeError):
    """A call took longer than it may; the message says why that is likely."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def ends_within(seconds: float, likely: str) -> Iterator[None]:
    """Raise NotEnded in the block if it takes longer than this.

    Only Python code of the main thread can be ended. On other threads there is no limit.

    Args:
        seconds: that the block may take.
        likely: a sentence that says what is probably wrong, and what to do.
    """

    def end(*_: object) -> None:
        raise NotEnded(f"no end after {seconds:g} s. {likely}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
