"""The clock of each rank, on which ranks compute at the same time although they take turns.

A rank's clock runs while the rank has its turn, as if the rank had its own core. A
communication moves the clock on by Hockney's model (R. Hockney, Parallel Computing 20, 1994): a
message of n bytes takes ``latency + n / bandwidth``. A collective takes what the usual algorithms
need in this model (R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19, 2005), and begins when its last
rank has called it. So times are comparable with each other, and not with another machine's.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_mpi.network import Arrival, Network, Wire, link

from .own import Place

#: The network of ranks in one process, unless `ranks.network` sets another one: about what MPI
#: reaches through the memory of a laptop.
OWN_NETWORK = Network(latency=10e-6, bandwidth=4e9)

#: Up to this size, an all_reduce uses recursive doubling; see ``torch_mpi.group.algorithms``.
SMALL = 16 * 1024  # bytes

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
        self._wires: dict[tuple[int, Network], Wire] = {}
        self._busy = [0.0] * n

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
        self._running, self._since = rank, _real()

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

    # -- what communication costs -----------------------------------------------------------

    def forget_messages(self) -> None:
        """Let the next messages find free links, as after a change of the network."""
        self._wires.clear()
        self._busy = [0.0] * len(self._busy)

    def leaves(self, rank: int, to: int, nbytes: int, at: float) -> tuple[float, float]:
        """Return when a message's last byte leaves its sender, and when it arrives."""
        return self._wire(rank, rank, to).sends(nbytes, at)

    @staticmethod
    def leaves_late(rank: int, to: int, nbytes: int, gone: float, matched: float) -> float:
        """Return when a long message leaves that was announced, and is received at `matched`.

        In a slow network it moves before, as between ranks that are processes.
        """
        own = _between(rank, to) is OWN_NETWORK
        return max(gone, matched + nbytes / OWN_NETWORK.bandwidth) if own else gone

    def arrives(self, rank: int, source: int, nbytes: int, told: float) -> Arrival:
        """Return the arrival of a message that its sender says arrives at `told`."""
        return self._wire(rank, source, rank).receives(nbytes, told)

    def _wire(self, owner: int, source: int, to: int) -> Wire:
        network = _between(source, to)
        key = (owner, network)
        if key not in self._wires:
            self._wires[key] = Wire(network, shared_clock=True)
        return self._wires[key]

    def collective(self, op: str, members: Sequence[int], nbytes: int, called: float) -> float:
        """Return when a collective ends that its last rank called at `called`.

        Args:
            op: its name.
            members: global ranks.
            nbytes: bytes of a rank's whole tensor, or of one part if each rank has a part.
        """
        pairs = itertools.combinations(members, 2)
        networks = {_between(a, b) for a, b in pairs}
        spent = max((seconds(op, len(members), nbytes, net) for net in networks), default=0.0)
        # The collectives of a rank use its link one after the other.
        end = max(called, *(self._busy[rank] for rank in members)) + spent
        for rank in members:
            self._busy[rank] = end
        return end


def seconds(op: str, ranks: int, nbytes: int, network: Network) -> float:
    """Return the seconds of a collective in Hockney's model.

    Args:
        op: its name.
        ranks: size of the group.
        nbytes: see :meth:`Clocks.collective`.
        network: the slowest between two of the ranks.
    """
    latency, transfer = network.latency, nbytes / network.bandwidth
    levels = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    steps = ranks - 1
    if op == "barrier":
        return levels * latency
    if op.startswith("all_reduce"):
        if nbytes > SMALL:
            return 2 * steps * (latency + transfer / ranks)
        return levels * latency + _tensors_sent(ranks) * transfer
    if op in ("broadcast", "reduce"):
        pipelined = levels * latency + 2 * transfer * steps / ranks
        return min(levels * (latency + transfer), pipelined + steps * latency)
    if op in ("gather", "scatter"):
        return levels * latency + steps * transfer
    return steps * (latency + transfer)


def bytes_sent(op: str, ranks: int, nbytes: int) -> int | None:
    """Return the bytes that a rank sends in a collective on a slow network; None if unknown."""
    if not op.startswith("all_reduce") or link.network is None:
        return None
    if nbytes > SMALL:
        return 2 * (ranks - 1) * nbytes // ranks
    return _tensors_sent(ranks) * nbytes


def _tensors_sent(ranks: int) -> int:
    """Return how many tensors a rank sends in a short all_reduce.

    For a power of two of ranks it is one in each round, otherwise all that the rank has.
    """
    return ranks.bit_length() - 1 if ranks & (ranks - 1) == 0 else ranks - 1


def _between(rank: int, other: int) -> Network:
    network = link.network and link.network.between(rank, other)
    return network or OWN_NETWORK


def _in_nanoseconds(read: Callable[[], float], real: Callable[[], int]) -> Callable[[], int]:
    """Return a clock of whole nanoseconds; its values since the epoch would lose digits as floats.

    The real clock gives the date, and the rank's clock what has passed since then.
    """
    began, began_ns = read(), real()
    return lambda: began_ns + round((read() - began) * 1e9)
