"""A recorded run as data: what each rank computed, called and waited for, in order.

    run = ranks.timeline().run()                 # the last cell
    run.save("run.json")
    run = Run.load("run.json")

A run has no times of day, no data and no code. So you can send it to somebody else.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import RunError

COMPUTE, START, WAIT = "compute", "start", "wait"
#: The mark at the end of a step, in a rank's program.
STEP = "step"
#: What a rank did next: it computed for so many seconds, or it started or awaited a call.
Event = tuple[str, float]
_FORMAT = 1


@dataclass(frozen=True)
class Call:
    """A collective of a group, or one message.

    Attributes:
        op: a key of `collectives.ALGORITHMS`, or "message".
        group: the recorded ranks that take part; of a message, sender and receiver.
        nbytes: of the tensor, as in `collectives.price`.
    """

    op: str
    group: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Run:
    """A recorded run of some ranks.

    Attributes:
        calls: all calls of the run. An event names a call by its index.
        events: for each rank, its events in order.
        shares: for each rank, the CPU time of its computing thread per second of computing. It is
            below 1 if the rank shared its core with another program.
        cores: cores of the machine that recorded the run.
        title: what the run is, in a few words.
    """

    calls: tuple[Call, ...]
    events: tuple[tuple[Event, ...], ...]
    shares: tuple[float, ...] = ()
    cores: int = 0
    title: str = ""
    format: int = field(default=_FORMAT, repr=False)

    @property
    def ranks(self) -> int:
        """Return the number of recorded ranks."""
        return len(self.events)

    @property
    def alike(self) -> bool:
        """Return whether all ranks made the same calls, all of them with all ranks."""
        world = set(range(self.ranks))
        return all(
            set(call.group) == world and call.op != "message" for call in self.calls
        ) and all(self._calls(rank) == self._calls(0) for rank in world)

    def _calls(self, rank: int) -> list[Call]:
        """Return the calls of a rank in the order in which it started them."""
        if not self.ranks:
            return []
        return [self.calls[int(number)] for kind, number in self.events[rank] if kind == START]

    @property
    def sharded(self) -> frozenset[float]:
        """Return the bytes of gathered tensors whose size doesn't depend on the number of ranks.

        The same tensor is reduced as well. Gathered weights may have another precision than the
        gradients that are reduced to shards.
        """
        parts = {call.nbytes for call in self.calls if call.op == "reduce_scatter"}
        whole = {float(call.nbytes) for call in self.calls if call.op == "all_reduce"}
        factors = (0.25, 0.5, 1, 2, 4)
        return frozenset(whole | {nbytes * factor for nbytes in parts for factor in factors})

    @functools.cached_property
    def steps(self) -> int:
        """Return how many equal steps the run has: rank 0 starts and awaits the same calls in each.

        If its waits differ from step to step, because a call sometimes ends early, only the calls
        that it starts are compared. A step of several equal calls looks like several steps. Then
        the computing between the calls tells how many of them belong together.
        """
        events = self.events[0] if self.ranks else ()
        names = [(kind, self.calls[int(value)]) for kind, value in events if kind != COMPUTE]
        parts = _repeats(names) if _repeats(names) > 1 else _repeats(self._calls(0))
        computed = np.array([self._computing(rank, parts) for rank in range(self.ranks)])
        return parts // _period(computed) if parts > 1 else 1

    def program(self, rank: int) -> Iterator[Event]:
        """Yield the events of a rank, with ("step", 0) at the end of each step.

        A step begins with the computing before its first call. Calls after the last step, such as
        the wait for a pending call, belong to the last step.
        """
        return self._program(rank, self.steps)

    def _program(self, rank: int, steps: int) -> Iterator[Event]:
        events = self.events[rank]
        starts = [k for k, (kind, _) in enumerate(events) if kind == START]
        each, rest = divmod(len(starts), steps)
        ends = set()
        if each and not rest:
            ends = {self._before(rank, starts[k * each]) for k in range(1, steps)}
        for k, event in enumerate(events):
            if k in ends:
                yield (STEP, 0)
            yield event
        yield from [(STEP, 0)] * (steps - len(ends))

    def _before(self, rank: int, first: int) -> int:
        """Return where the computing before a call begins, or else the call."""
        return first - 1 if self.events[rank][first - 1][0] == COMPUTE else first

    def computing(self, rank: int) -> list[float]:
        """Return the seconds that a rank computed in each step."""
        return self._computing(rank, self.steps)

    def _computing(self, rank: int, steps: int) -> list[float]:
        seconds = [0.0]
        for kind, value in self._program(rank, steps):
            if kind == COMPUTE:
                seconds[-1] += value
            elif kind == STEP:
                seconds.append(0.0)
        return seconds[:steps]

    @functools.cached_property
    def jitter(self) -> float | None:
        """Return how much equal steps differ in computing, as a share of a step's computing.

        It is the standard deviation of a normal distribution with the same median deviation.
        Unlike the standard deviation of the steps, one disturbed step hardly changes it. The first
        step is left out, because it warms caches up. None means fewer than three steps.
        """
        if self.steps < 3:
            return None
        off = []
        for rank in range(self.ranks):
            later = self.computing(rank)[1:]
            middle = statistics.median(later)
            off += [abs(seconds / middle - 1) for seconds in later if middle]
        return 1.4826 * statistics.median(off) if off else None

    @property
    def crowded(self) -> bool:
        """Return whether the ranks shared cores while they were recorded."""
        return bool(self.shares) and 0 < self.cores < self.ranks

    def save(self, path: str | Path) -> None:
        """Write the run as JSON."""
        Path(path).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Return the run in a file that `save` has written.

        Raises:
            RunError: the file holds no run, or a run in another format.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise RunError(f"{path} has format {data['format']}; this version reads {_FORMAT}.")
            return cls._of(data)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"{path} holds no recorded run ({error}). Save one with "
                "ranks.timeline().run().save(path)."
            ) from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Run:
        calls = tuple(
            Call(call["op"], tuple(map(int, call["group"])), int(call["nbytes"]))
            for call in data["calls"]
        )
        events = tuple(
            tuple((str(kind), float(value)) for kind, value in rank) for rank in data["events"]
        )
        for kind, value in (event for rank in events for event in rank):
            if kind not in {COMPUTE, START, WAIT} or not 0 <= value < float("inf"):
                raise ValueError(f"unknown event {kind} {value}")
            if kind != COMPUTE:
                calls[int(value)]
        return cls(calls, events, tuple(data["shares"]), int(data["cores"]), str(data["title"]))


def _repeats(names: list[Any]) -> int:
    """Return how often the shortest beginning of a list repeats, if it fills the list."""
    for length in range(1, len(names) // 2 + 1):
        if len(names) % length == 0 and names == names[:length] * (len(names) // length):
            return len(names) // length
    return 1


def _period(computed: NDArray[np.float64]) -> int:
    """Return after how many parts of a run its computing repeats; 1 if all parts compute alike.

    The parts of a period compute differently, and each part computes alike in all periods. A tenth
    of the parts doesn't count, because other programs disturb some of them.

    Args:
        computed: seconds, of shape [ranks, parts].
    """
    ranks, parts = computed.shape
    for length in range(2, parts // 3 + 1):
        if parts % length:
            continue
        by_place = computed.reshape(ranks, -1, length)
        usual = np.median(by_place, axis=1, keepdims=True)
        differ = np.abs(usual - np.median(usual, axis=2, keepdims=True)).mean()
        off = np.sort(np.abs(by_place - usual).ravel())
        if differ > 0.05 * usual.mean() and off[: int(0.9 * off.size)].mean() < 0.35 * differ:
            return length
    return 1
