"""Times of things that all ranks do together: warmed up, interleaved, in several rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI
from torch import Tensor

PAUSE = 0.001
MOST_REPETITIONS = 10_000


@dataclass
class Candidate:
    """One repetition of something: `run(i)` is the i-th.

    `results` are tensors and the value that each must have everywhere after `run(0)`.
    """

    run: Callable[[int], object]
    results: list[tuple[Tensor, float]] = field(default_factory=list)


@dataclass
class Case:
    """Variants of one thing, measured side by side.

    Attributes:
        name, nbytes: what it is.
        prepare: makes the calls of a round by variant, and the tensor that is their input.
        seconds: that a sample is to take.
        repetitions: by variant; found at the first sample where it is not given.
        unit: a time is that of a repetition, times this.
        rounds: seconds, by variant, one per round.
    """

    name: str
    prepare: Callable[[], tuple[dict[str, Candidate], Tensor | None]]
    seconds: float
    nbytes: int = 0
    unit: float = 1.0
    repetitions: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        """Seconds by variant: the medians of the rounds."""
        return {name: statistics.median(times) for name, times in self.rounds.items()}


class Clock:
    """Times what all ranks of a communicator do."""

    def __init__(self, comm: MPI.Comm):
        self.comm = comm

    def slowest(self, value: float) -> float:
        """The maximum over the ranks. A rank that waits for the others leaves its core to them."""
        mine, most = np.array([float(value)]), np.empty(1)
        request = self.comm.Iallreduce(mine, most, op=MPI.MAX)
        while not request.Test():
            time.sleep(PAUSE)
        return float(most[0])

    def seconds(self, call: Candidate, repetitions: int) -> float:
        """Seconds per repetition on the slowest rank; the same number on all ranks."""
        run = call.run
        self.comm.Barrier()
        start = time.perf_counter()
        for i in range(repetitions):
            run(i)
        return self.slowest((time.perf_counter() - start) / repetitions)

    def repetitions(self, call: Candidate, seconds: float) -> int:
        """How many take about `seconds`, found by doing more and more of them."""
        tried = 1
        while True:
            each = self.seconds(call, tried)
            if each * tried > seconds / 4 or tried >= MOST_REPETITIONS:
                return max(2, min(int(seconds / each), MOST_REPETITIONS))
            tried *= 4


def measure(cases: list[Case], rounds: int, clock: Clock) -> None:
    """Fill in the rounds of all cases.

    A round goes through all cases and variants, the variants in turn first: whatever else the
    machine does for a while harms one round of many numbers, not all rounds of one.
    """
    for turn in range(rounds):
        for case in cases:
            calls, data = case.prepare()
            names = list(calls)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                call = calls[name]
                if turn == 0:
                    _check(call, data, f"{case.name} on {name}", clock.comm.rank)
                    if name not in case.repetitions:
                        case.repetitions[name] = clock.repetitions(call, case.seconds)
                repetitions = case.repetitions[name]
                clock.seconds(call, max(1, repetitions // 10))
                seconds = clock.seconds(call, repetitions) * case.unit
                case.rounds.setdefault(name, []).append(seconds)


def _check(call: Candidate, data: Tensor | None, what: str, rank: int) -> None:
    """Raise RuntimeError where a call computes something wrong: its speed would mean nothing."""
    if data is None:
        return
    for tensor, _ in call.results:
        tensor.zero_()  # not what another transport left there
    data.fill_(rank + 1)
    call.run(0)
    for tensor, expected in call.results:
        if not (tensor == expected).all():
            raise RuntimeError(f"{what}: rank {rank} got wrong values, {expected} was expected")
    data.zero_()
