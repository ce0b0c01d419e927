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
    places = _places()
    namespaces = (*namespaces, vars(timeit), {"Timer": timeit.Timer.__init__})
    moved = {id(place.original): place.moved(clock) for place in places}
    with contextlib.ExitStack() as patches:
        for place in places:
            new = moved[id(place.original)]
            patches.enter_context(mock.patch.object(place.module, place.name, new))
        for namespace in namespaces:
            own = {name: moved[id(it)] for name, it in namespace.items() if id(it) in moved}
            patches.enter_context(mock.patch.dict(namespace, own))
            for function in list(namespace.values()):
                if isinstance(function, types.FunctionType):
                    patches.enter_context(_moved_defaults(function, moved))
        yield clock


@dataclass(frozen=True)
class _Place:
    """Where a clock is found, and how to make one that is ahead."""

    module: object
    name: str
    original: Any
    moved: Callable[[Clock], Any]


def _places() -> list[_Place]:
    from mpi4py import MPI  # on the ranks only: a kernel has no business with MPI

    places = []
    for name in ("perf_counter", "monotonic", "time"):
        places.append(_place(time, name, 1))
        places.append(_place(time, f"{name}_ns", 10**9))
    places.append(_place(timeit, "default_timer", 1))
    places.append(_place(MPI, "Wtime", 1))
    date = datetime.datetime
    places.append(_Place(datetime, "datetime", date, lambda clock: _moved_dates(date, clock)))
    return places


def _place(module: object, name: str, unit: int) -> _Place:
    original = getattr(module, name)

    def moved(clock: Clock) -> Callable[[], Any]:
        def read() -> Any:
            now = original()
            return now + type(now)((clock.ahead + clock.offset) * unit)

        return read

    return _Place(module, name, original, moved)


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
