"""The clock of each rank, on which ranks compute at the same time although they take turns.

A rank's clock runs while the rank has its turn, as if the rank had its own core. A communication
moves the clock on by what the world says that it costs. So times are comparable with each other,
and not with another machine's.
"""

from __future__ import annotations

import contextlib
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

from .own import Place

_real = time.perf_counter
_real_sleep = time.sleep
_REAL = {name: getattr(time, name) for name in ("perf_counter", "monotonic", "time")}


class Clocks:
    """The clocks of n ranks.

    Args:
        n: number of ranks.
        sleep: lets a rank sleep until a moment.
    """

    def __init__(self, n: int, sleep: Callable[[float], None]):
        self._sleep_until = sleep
        self._at = [_real()] * n
        self._since: float | None = None
        self._running = 0
        self._ranks: dict[int, int] = {}

    # -- reading ----------------------------------------------------------------------------

    def now(self, rank: int) -> float:
        """Return the time of a rank, in seconds of its `time.perf_counter`."""
        if self._since is not None and rank == self._running:
            return self._at[rank] + _real() - self._since
        return self._at[rank]

    def belongs_to(self, rank: int) -> None:
        """Note that the present thread is this rank's."""
        self._ranks[threading.get_ident()] = rank

    def functions(self) -> dict[Place, Any]:
        """Return what replaces the functions of `time`, in all threads."""
        places: dict[Place, Any] = {(time, "sleep"): self._sleep}
        for name, real in _REAL.items():
            ahead = real() - _real()
            read = self._reading(real, ahead)
            places[time, name] = read
            places[time, f"{name}_ns"] = _in_nanoseconds(read, getattr(time, f"{name}_ns"))
        places[timeit, "default_timer"] = places[time, "perf_counter"]
        return places

    def _reading(self, real: Callable[[], float], ahead: float) -> Callable[[], float]:
        def read() -> float:
            rank = self._ranks.get(threading.get_ident())
            return real() if rank is None else self.now(rank) + ahead

        return read

    def _sleep(self, seconds: float) -> None:
        """Move this rank's clock on instead of sleeping; a thread of no rank sleeps."""
        rank = self._ranks.get(threading.get_ident())
        if rank is None:
            _real_sleep(seconds)
            return
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self._sleep_until(self.now(rank) + seconds)

    # -- turns ------------------------------------------------------------------------------

    def begin_together(self) -> None:
        """Let all ranks begin at the same time, when the kernel sends them a cell."""
        self._at = [max(_real(), *self._at)] * len(self._at)

    def start(self, rank: int) -> None:
        """Note that the rank has its turn."""
        self._running = rank
        self._since = _real()

    def stop(self, rank: int) -> None:
        """Note that the rank's turn is over."""
        if self._since is not None:
            self._at[rank] += _real() - self._since
            self._since = None

    def turn(self) -> float:
        """Return for how many seconds the present turn has lasted."""
        return 0.0 if self._since is None else _real() - self._since

    def reach(self, rank: int, moment: float) -> None:
        """Move a rank's clock on to this moment, unless it is later already."""
        late = moment - self.now(rank)
        if late > 0:
            self._at[rank] += late

    @contextlib.contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """Let no time pass for the rank that has its turn, while it moves data of other ranks."""
        before = self.now(rank)
        yield
        self._at[rank] -= self.now(rank) - before


def _in_nanoseconds(read: Callable[[], float], real: Callable[[], int]) -> Callable[[], int]:
    """Return a clock of whole nanoseconds; its values since the epoch would lose digits as floats.

    The real clock gives the date, and the rank's clock what has passed since then.
    """
    began = read()
    began_ns = real()
    return lambda: began_ns + round((read() - began) * 1e9)
