"""Clocks that a check sets, so that the times an answer measures don't depend on the machine.

An answer that measures times runs inside :func:`moved_clocks`. Nothing sleeps: if the check decides
that a call takes 20 s, it adds 20 s to every clock of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import sys
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
    """The number of seconds by which the clocks of this process are ahead.

    Attributes:
        ahead: seconds that the check let pass.
        offset: seconds in addition, because clocks of other machines differ.
    """

    ahead: float = 0.0
    offset: float = 0.0

    def advance(self, seconds: float) -> None:
        """Let that much time pass."""
        self.ahead += seconds


@contextlib.contextmanager
def moved_clocks(*namespaces: dict[str, Any]) -> Iterator[Clock]:
    """Let all clocks of this process run ahead by the seconds of the yielded :class:`Clock`.

    The clocks are :mod:`time`, ``timeit.default_timer``, ``datetime.now`` and ``MPI.Wtime``, even
    if a namespace has them by another name, or a function there has one as an argument's default.
    """
    clock = Clock()
    places = list(_places(clock))
    moved = {id(original): new for _, _, original, new in places}
    with contextlib.ExitStack() as patches:
        for module, name, original, _ in places:
            patches.enter_context(mock.patch.object(module, name, moved[id(original)]))
        for namespace in (*namespaces, vars(timeit), {"Timer": timeit.Timer.__init__}):
            patches.enter_context(_moved_names(namespace, moved))
            for function in list(namespace.values()):
                if isinstance(function, types.FunctionType):
                    patches.enter_context(_moved_defaults(function, moved))
        yield clock


def _places(clock: Clock) -> Iterator[tuple[object, str, Any, Any]]:
    """Yield the module and the name of each clock, the clock itself, and its replacement."""
    places: list[tuple[object, str, int]] = [(timeit, "default_timer", 1)]
    if MPI := sys.modules.get("mpi4py.MPI"):  # not imported, because that would start MPI
        places.append((MPI, "Wtime", 1))
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
def _moved_names(namespace: dict[str, Any], moved: dict[int, Any]) -> Iterator[None]:
    """Replace the clocks in a namespace; what an answer stores there stays."""
    own = {name: it for name, it in namespace.items() if id(it) in moved}
    namespace.update({name: moved[id(it)] for name, it in own.items()})
    try:
        yield
    finally:
        namespace.update(own)


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
    """A call took longer than allowed; the message names the probable reason."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def ends_within(seconds: float, likely: str) -> Iterator[None]:
    """Raise NotEnded in the block if it takes longer than this, in any thread, on any system.

    Only Python code can be ended. A call into C, such as `time.sleep`, first runs to its end.

    Args:
        seconds: time limit of the block.
        likely: a sentence that says what is probably wrong, and what to do.
    """

    class Late(NotEnded):
        """Python makes the error itself, without arguments, in the thread that is late."""

        def __init__(self) -> None:
            super().__init__(f"your code did not end within {seconds:g} s. {likely}")

    Late.__name__ = NotEnded.__name__
    thread = threading.get_ident()
    ended = False
    turn = threading.Lock()

    def end() -> None:
        with turn:
            if not ended:
                _raise_in(thread, Late)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with turn:
            ended = True
        timer.cancel()


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Let a thread of this process raise the error before its next line of Python."""
    raise_ = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_(ctypes.c_ulong(thread), ctypes.py_object(error))
