"""What a process has for itself, for ranks that share one process.

When a rank gets its turn, :meth:`Own.enter` installs the rank's values: its random numbers, its
record of calls, and the functions and streams that its code has replaced. :meth:`Own.leave` keeps
them for the next turn. The kernel's threads run beside the rank, so a function or a stream that a
rank has replaced asks which thread uses it.
"""

from __future__ import annotations

import datetime
import operator
import os
import random
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import torch_mpi.group.arguments
import torch_mpi.present
import torch_mpi.record
import torch_mpi.settings
from utils.cluster import notebook_words, rank_side
from utils.timeline import cell_log

Place = tuple[Any, str]

# Their types are missing in NumPy's own list of names.
_numpy: Any = np.random
_CLOCKS = ("perf_counter", "monotonic", "time")
_FILTERS: Place = (warnings, "filters")
#: What code of a student or a check replaces; each rank then has its own.
REPLACED: list[Place] = [
    *((time, name) for name in _CLOCKS),
    *((time, f"{name}_ns") for name in _CLOCKS),
    *((time, "sleep"), (timeit, "default_timer"), (datetime, "datetime")),
    *((sys, "stdout"), (sys, "stderr"), (sys, "displayhook"), (sys, "breakpointhook")),
    *((module, name) for module in (dist, distributed_c10d) for name in ("isend", "irecv")),
    *((dist, "new_group"), (distributed_c10d, "new_group"), (torch, "save")),
    *((os, "fsync"), (os, "fdatasync")),
    *(_FILTERS, (warnings, "showwarning"), (warnings, "_showwarnmsg_impl")),
]
#: The same of modules that may not be there.
OPTIONAL = [("mpi4py.MPI", "Wtime"), ("utils.data", "fashion_mnist")]
#: The state of modules that run on a rank.
STATE: list[Place] = [
    *((torch_mpi.record, "recorder"), (torch_mpi.present, "world")),
    *((rank_side, "_here"), (cell_log, "_cell"), (notebook_words, "_now")),
    *((torch_mpi.settings, "time_limit"), (torch_mpi.group.arguments, "warned")),
]


class ByThread:
    """A function that a rank has replaced, for the rank's thread; other threads get the old one."""

    def __init__(self, own: Callable[..., Any], other: Callable[..., Any]):
        self.own = own
        self._other = other
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that this thread has."""
        mine = threading.get_ident() == self._thread
        return (self.own if mine else self._other)(*args, **kwargs)


class StreamByThread:
    """A stream that is one rank's in the rank's thread, and the kernel's in the kernel's threads.

    Another rank may get it from what ranks share, such as a handler of `logging`. There it is this
    rank's own stream of the same name.
    """

    def __init__(self, name: str, own: Any, other: Any):
        self.__dict__.update(_name=name, own=own, _other=other, _thread=threading.get_ident())

    def _mine(self) -> Any:
        present = getattr(sys, self._name)
        for stream in (self, present):
            if isinstance(stream, StreamByThread) and stream._thread == threading.get_ident():
                return stream.own
        return self._other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)


def _by_thread(name: str, own: Any, other: Any) -> Any:
    if hasattr(own, "write"):
        return StreamByThread(name, own, other)
    if callable(own) and not isinstance(own, type):
        return ByThread(own, other)
    return own


def _without(value: Any) -> Any:
    return value.own if isinstance(value, ByThread | StreamByThread) else value


class Own:
    """The values of each rank.

    Args:
        n: number of ranks.
        shared: values for all ranks, which ask by themselves which thread uses them.
        first: values that a rank has from the beginning instead of the process's, by place.
    """

    def __init__(self, n: int, shared: dict[Place, Any], first: Callable[[int], dict[Place, Any]]):
        self._places = [*REPLACED, *STATE]
        self._to_come = list(OPTIONAL)
        self._states = len(STATE)
        self._outside = self._present()
        self._shared = [shared.get(place) for place in self._places]
        self._own: list[list[Any]] = []
        # What a rank's turn installs, until a value changes; and what the last turn has left there.
        self._ready: list[list[Any]] = [[] for _ in range(n)]
        self._there = self._outside
        self._main: list[ModuleType | None] = [None] * n
        for rank in range(n):
            values = shared | first(rank)
            defaults = zip(self._places, self._outside, strict=True)
            self._own.append([values.get(place, default) for place, default in defaults])
        self._random = [first_random_state() for _ in range(n)]
        self._random_outside = _random_state()
        self._is_outside = True
        self._take_in()

    def _take_in(self) -> None:
        """Add the places of modules that have been imported since."""
        for place in [place for place in self._to_come if place[0] in sys.modules]:
            module = sys.modules[place[0]]
            name = place[1]
            if not hasattr(module, name):
                continue  # its import has not ended
            self._to_come.remove(place)
            self._places.insert(0, (module, name))
            for values in (self._outside, *self._own):
                values.insert(0, getattr(module, name))
            self._shared.insert(0, None)
            self._there = self._present()
            self._ready = [[] for _ in self._ready]

    def of(self, rank: int, place: Place) -> Any:
        """Return a rank's value, when another rank has its turn."""
        return self._own[rank][self._places.index(place)]

    def set_main(self, rank: int, module: ModuleType) -> None:
        """Make this the module ``__main__`` of a rank, where pickles look for its classes."""
        self._main[rank] = module

    def enter(self, rank: int) -> None:
        """Install the values of the rank whose thread calls this."""
        if self._to_come:
            self._take_in()
        if self._is_outside:
            self._there = self._present()
            self._random_outside = _random_state()
            if not all(map(operator.is_, self._there, self._outside)):
                self._outside = self._there
                self._ready = [[] for _ in self._ready]
            self._main_outside = sys.modules["__main__"]
            self._is_outside = False
        ready = self._ready[rank] = self._ready[rank] or self._for_this_thread(self._own[rank])
        self._install(ready)
        sys.modules["__main__"] = self._main[rank] or self._main_outside
        _set_random_state(self._random[rank])

    def _for_this_thread(self, values: list[Any]) -> list[Any]:
        """Return what to install for these values: other threads still get the process's own."""
        plain = zip(self._places, values, self._outside, self._shared, strict=True)
        ready = [
            own if own is outside or own is shared else _by_thread(name, own, outside)
            for (_, name), own, outside, shared in plain
        ]
        return ready[: -self._states] + values[-self._states :]

    def leave(self, rank: int, to_outside: bool) -> None:
        """Keep the rank's values; with ``to_outside``, install the process's own."""
        if self._to_come:
            self._take_in()
        self._there = self._present()
        ready = self._ready[rank]
        if not (ready and all(map(operator.is_, self._there, ready))):
            self._own[rank] = list(map(_without, self._there))
            self._ready[rank] = []
        self._random[rank] = _random_state()
        if to_outside:
            self._is_outside = True
            self._install(self._outside)
            sys.modules["__main__"] = self._main_outside
            _set_random_state(self._random_outside)

    def leave_to_outside(self, rank: int) -> None:
        """Do so if the process has a rank's values, as when that rank ends during its turn."""
        if not self._is_outside:
            self.leave(rank, to_outside=True)

    def _install(self, values: list[Any]) -> None:
        for place, value, there in zip(self._places, values, self._there, strict=True):
            if value is not there:
                setattr(*place, value)
                if place == _FILTERS:
                    _forget_warnings()

    def _present(self) -> list[Any]:
        return [getattr(module, name) for module, name in self._places]


def _forget_warnings() -> None:
    """Let Python forget which lines have warned, because other filters decide about it now."""
    old_name = getattr(warnings, "_filters_mutated", None)
    forget: Any = old_name or warnings._filters_mutated_lock_held  # type: ignore[attr-defined]
    forget()


def _random_state() -> tuple[Any, ...]:
    """Return the state of the random numbers of PyTorch, Python and NumPy, and the usual dtype."""
    numbers = random.getstate(), _numpy.get_bit_generator()
    return torch.default_generator.get_state(), *numbers, torch.get_default_dtype()


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    _numpy.set_bit_generator(state[2])
    if torch.get_default_dtype() is not state[3]:
        torch.set_default_dtype(state[3])


def first_random_state() -> tuple[Any, ...]:
    """Return a new state: ranks that set no seed draw different numbers, as processes do."""
    generator = torch.Generator()
    generator.seed()
    numbers = random.Random().getstate(), np.random.MT19937()
    return generator.get_state(), *numbers, torch.get_default_dtype()
