"""The replay of a recorded run on another machine, with more ranks.

The recorded ranks are a *tile*. A run on 1,024 ranks that was recorded on four has 256 replicas of
this tile. All replicas of a recorded rank do the same, so they are played together: their times are
one array. Some groups grow over the replicas, such as a gradient's all_reduce, and the other groups
stay within each replica. So the work grows with the recorded run and not with the ranks.

Idea: trace-driven simulators such as Dimemas and LogGOPSim (T. Hoefler, T. Schneider,
A. Lumsdaine, HPDC 2010), which replay each rank; folding equal ranks is ours.
"""

from __future__ import annotations

import heapq
import math
import statistics
from dataclasses import dataclass, field

import numpy as np

from . import collectives
from .collectives import Price
from .errors import RunError, ScaleError
from .links import Links, Times
from .machines import Machine
from .run import COMPUTE, START, WAIT, Call, Run
from .tree import Devices

#: How many steps a replay plays at least, to get their distribution.
STEPS = 32
#: The largest number of times in an array.
_MOST = 1 << 18


@dataclass(frozen=True)
class Layout:
    """The places of the ranks, and the groups that grow.

    Attributes:
        devices: device numbers of shape [positions in the tile, replicas].
        grown: the recorded groups that join all replicas.
        axes: for each recorded group, all groups of its axis. They call at the same time, and share
            links.
    """

    devices: Devices
    grown: frozenset[frozenset[int]]
    axes: dict[tuple[int, ...], list[tuple[int, ...]]]

    def groups(self, call: Call) -> Devices:
        """Return the device numbers of all groups that make this call together."""
        size = len(self.devices)
        rows = [
            self.devices[[rank for rank in group if rank < size]].T
            for group in self.axes[call.group]
        ]
        if frozenset(call.group) in self.grown:
            # Replica by replica, so that neighbors in the group are neighbors on the machine.
            rows = [row.reshape(1, -1) for row in rows]
        return np.concatenate(rows)


def layout(run: Run, ranks: int, grow: tuple[int, ...] | None) -> Layout:
    """Return where the ranks of the larger run are.

    The named group grows, together with its parallel groups. By default all groups grow if every
    rank made the same collectives with all ranks.

    Raises:
        ScaleError: the run doesn't say how it grows, or it can't grow to this number of ranks.
    """
    tile = run.ranks
    if run.alike and grow is None:
        tile = math.gcd(tile, ranks)
        grown = {frozenset(range(run.ranks))}
    elif ranks == tile:
        grown = set()
    else:
        grown = _growing(run, grow)
    if ranks % tile:
        raise ScaleError(
            f"This run can grow to multiples of its {tile} ranks only, not to {ranks:,}."
        )
    devices = np.arange(ranks, dtype=np.int64).reshape(-1, tile).T.copy()
    return Layout(devices, frozenset(grown), _axes(run))


def _growing(run: Run, grow: tuple[int, ...] | None) -> set[frozenset[int]]:
    """Return the groups that grow: the named one, its parallel groups, and the world."""
    used = {frozenset(call.group) for call in run.calls if call.op != "message"}
    if not used:
        raise ScaleError(
            "The run has messages and no collectives, so it can't grow. "
            f"Keep its {run.ranks} ranks."
        )
    named = ", ".join(str(tuple(sorted(group))) for group in sorted(used, key=sorted))
    if grow is None:
        raise ScaleError(
            f"The run uses the groups {named}. Name the group that joins the replicas, such as "
            "grow=(0, 2), or keep the recorded number of ranks."
        )
    chosen = frozenset(grow)
    if chosen not in used:
        raise ScaleError(f"No collective uses the group {tuple(grow)}. Choose one of: {named}.")
    axes = [groups for group, groups in _axes(run).items() if frozenset(group) == chosen]
    axis = {frozenset(group) for groups in axes for group in groups}
    return axis | {frozenset(range(run.ranks))} & used


def _axes(run: Run) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Return for each group the groups of its axis: its shifted copies that share no rank."""
    used = dict.fromkeys(call.group for call in run.calls if call.op != "message")
    axes = {}
    for group in used:
        shape = [rank - group[0] for rank in group]
        copies = [other for other in used if [rank - other[0] for rank in other] == shape]
        axes[group] = [group, *(other for other in copies if not set(other) & set(group))]
    return axes


@dataclass(frozen=True)
class Played:
    """What a replay found out."""

    seconds: Times  # of each played step, from the first rank's begin to the last rank's end
    computing: float  # mean seconds that a rank computes in a step
    #: For each different collective its call, its price, and how often a step has it.
    prices: tuple[tuple[Call, Price, float], ...]


@dataclass
class _State:
    """A call in the replay: when its members have started it, and when it ends."""

    starts: dict[int, Times] = field(default_factory=dict)  # by position
    left: Times | None = None  # when a message has left its sender
    end: Times | None = None
    waiting: list[int] = field(default_factory=list)


class Replay:
    """A replay of a run on a machine.

    Args:
        run, machine, slow, algorithm: as in :func:`utils.forecast.forecast`.
        where: the ranks' places.
        scale: for each recorded rank, the factor of its computing.
        jitter: standard deviation of a step's computing, as a share of it.
        even: whether each rank computes equally long in all steps, namely the median. Otherwise the
            recorded differences are played, too.
    """

    def __init__(
        self,
        run: Run,
        machine: Machine,
        where: Layout,
        scale: tuple[float, ...],
        jitter: float = 0.0,
        even: bool = True,
        slow: dict[int, float] | None = None,
        algorithm: str = "",
    ):
        positions, replicas = where.devices.shape
        samples = math.ceil(STEPS / run.steps) if jitter else 1
        samples = max(1, min(samples, _MOST // (positions * replicas)))
        self._run, self._machine, self._where = run, machine, where
        self._choice, self._jitter = algorithm or machine.library, jitter
        self._draw = np.random.default_rng(0)
        self._links = Links(machine, where.devices, samples)
        self._clocks = [np.zeros((samples, replicas)) for _ in range(positions)]
        self._scales = [np.full((samples, replicas), scale[k]) for k in range(positions)]
        for rank, factor in (slow or {}).items():
            self._scales[rank % positions][:, rank // positions] *= factor
        self._shares = [_shares(run.computing(position), even) for position in range(positions)]
        self._programs = [list(run.program(position)) for position in range(positions)]
        self._ends: list[list[Times]] = [[] for _ in range(positions)]
        self._factors = [self._factor(position) for position in range(positions)]
        self._states = [_State() for _ in run.calls]
        self._prices: dict[Call, Price] = {}

    def play(self) -> Played:
        """Play all ranks; the rank with the earliest clock goes on.

        Raises:
            RunError: no rank can continue.
        """
        nexts = [0] * len(self._programs)
        ready = [(0.0, position) for position in range(len(nexts))]
        while ready:
            _, position = heapq.heappop(ready)
            if self._goes_on(position, nexts, ready):
                heapq.heappush(ready, (self._time(position), position))
        if any(at < len(program) for at, program in zip(nexts, self._programs, strict=True)):
            raise RunError("A rank of this run waits for a call that another rank never starts.")
        return self._played()

    def _goes_on(self, position: int, nexts: list[int], ready: list[tuple[float, int]]) -> bool:
        """Play a rank until it has computed; return False if it has to wait, or is at its end.

        Args:
            position: the rank's.
            nexts: the next event of each rank.
            ready: a heap of clocks and ranks, to which those are added that no longer wait.
        """
        program = self._programs[position]
        while nexts[position] < len(program):
            kind, value = program[nexts[position]]
            if kind == WAIT and not self._await(position, int(value)):
                return False
            nexts[position] += 1
            if kind == START:
                for other in self._start(position, int(value)):
                    heapq.heappush(ready, (self._time(other), other))
            elif kind != WAIT:
                self._pass(position, kind, value)
                break
        return nexts[position] < len(program)

    def _time(self, position: int) -> float:
        return float(self._clocks[position].mean())

    def _pass(self, position: int, kind: str, value: float) -> None:
        """Let a rank compute, or end its step."""
        if kind == COMPUTE:
            self._clocks[position] = self._clocks[position] + value * self._factors[position]
            return
        self._ends[position].append(self._clocks[position])
        self._factors[position] = self._factor(position)

    def _factor(self, position: int) -> Times:
        """Return the factors of a rank's computing in its next step, for each replica."""
        step, shares = len(self._ends[position]), self._shares[position]
        scale = self._scales[position] * (shares[step] if step < len(shares) else 1.0)
        if not self._jitter:
            return scale
        # Log-normal with mean 1: a step can be much slower, but not faster than nothing.
        sigma = math.sqrt(math.log1p(self._jitter**2))
        return scale * self._draw.lognormal(-(sigma**2) / 2, sigma, scale.shape)

    def _start(self, position: int, number: int) -> list[int]:
        """Let a rank start a call; return the positions that no longer wait for it."""
        call, state = self._run.calls[number], self._states[number]
        state.starts[position] = self._clocks[position]
        if call.op == "message":
            source, target = call.group
            if position != source:
                return []
            state.left, state.end = self._links.message(
                source, target, call.nbytes, self._clocks[source]
            )
        else:
            members = [rank for rank in call.group if rank < len(self._programs)]
            if len(state.starts) < len(members):
                return []
            last = np.maximum.reduce([state.starts[member] for member in members])
            if frozenset(call.group) in self._where.grown:
                last = last.max(axis=1, keepdims=True)
            price = self._price(call)
            busy = price.busy if self._choice in collectives.LIBRARIES else price.seconds
            state.end = self._links.collective(members, last, price.seconds, busy)
        state.starts.clear()
        woken, state.waiting = state.waiting, []
        return woken

    def _await(self, position: int, number: int) -> bool:
        """Let a rank wait for a call; return False if the call's end is not known yet."""
        call, state = self._run.calls[number], self._states[number]
        is_sender = call.op == "message" and position == call.group[0]
        end = state.left if is_sender else state.end
        if end is None:
            state.waiting.append(position)
            return False
        self._clocks[position] = np.maximum(self._clocks[position], end)
        return True

    def _price(self, call: Call) -> Price:
        if call not in self._prices:
            groups = self._where.groups(call)
            nbytes = call.nbytes
            if call.op == "all_gather" and nbytes not in self._run.sharded:
                # Each rank contributes as much as before, so the result grows with the ranks.
                nbytes = nbytes * groups.shape[1] // len(call.group)
            self._prices[call] = collectives.price(
                self._machine, call.op, groups, nbytes, self._choice
            )
        return self._prices[call]

    def _played(self) -> Played:
        ends = np.stack([np.maximum.reduce(at).max(axis=1) for at in zip(*self._ends, strict=True)])
        # A step ends on the last rank; the first step begins at 0.
        seconds = np.diff(ends, axis=0, prepend=0.0)
        steps = self._run.steps
        computing = [
            np.dot(self._run.computing(position), self._shares[position]) * scale.mean() / steps
            for position, scale in enumerate(self._scales)
        ]
        first = [int(value) for kind, value in self._programs[0] if kind == START]
        counts = {
            call: sum(self._run.calls[number] == call for number in first) / steps
            for call in self._prices
        }
        prices = ((call, price, counts[call]) for call, price in self._prices.items())
        return Played(seconds.ravel(), float(np.mean(computing)), tuple(prices))


def _shares(seconds: list[float], even: bool) -> list[float]:
    """Return for each step of a rank the factor that makes it as long as the median step."""
    if not even or len(seconds) < 4:
        return [1.0] * len(seconds)
    middle = statistics.median(seconds)
    return [middle / one if one else 1.0 for one in seconds]
