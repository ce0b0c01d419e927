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
        steps: how many equal steps the run has.
    """

    calls: tuple[Call, ...]
    events: tuple[tuple[Event, ...], ...]
    shares: tuple[float, ...] = ()
    cores: int = 0
    title: str = ""
    steps: int = 1
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
        ) and all(self.started(rank) == self.started(0) for rank in world)

    def started(self, rank: int) -> list[Call]:
        """Return the calls of a rank in the order in which it started them."""
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

    def program(self, rank: int) -> Iterator[Event]:
        """Yield the events of a rank, with ("step", 0) at the end of each step.

        A step begins with the computing before its first call. Calls after the last step, such as
        the wait for a pending call, belong to the last step.
        """
        events = self.events[rank]
        starts = [k for k, (kind, _) in enumerate(events) if kind == START]
        each, rest = divmod(len(starts), self.steps)
        ends = set()
        if each and not rest:
            firsts = (starts[k * each] for k in range(1, self.steps))
            ends = {first - (events[first - 1][0] == COMPUTE) for first in firsts}
        for k, event in enumerate(events):
            if k in ends:
                yield (STEP, 0)
            yield event
        yield from [(STEP, 0)] * (self.steps - len(ends))

    def computing(self, rank: int) -> list[float]:
        """Return the seconds that a rank computed in each step."""
        seconds = [0.0]
        for kind, value in self.program(rank):
            if kind == COMPUTE:
                seconds[-1] += value
            elif kind == STEP:
                seconds.append(0.0)
        return seconds[: self.steps]

    @functools.cached_property
    def jitter(self) -> float | None:
        """Return how much equal steps differ in computing, as a share of a step's computing.

        It is the standard deviation of a normal distribution with the same median deviation, which
        one disturbed step hardly changes. The first and the last step are left out: one warms
        caches up, and the other has what comes after the last call. None means fewer than four
        steps.
        """
        if self.steps < 4:
            return None
        off = []
        for rank in range(self.ranks):
            later = self.computing(rank)[1:-1]
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
        return cls(
            calls,
            events,
            tuple(data["shares"]),
            int(data["cores"]),
            str(data["title"]),
            int(data["steps"]),
        )
