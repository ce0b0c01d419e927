"""What a recorded run would do on another machine, and how far to trust the answer.

told = forecast(run, machine("cluster"), ranks=1024)
told.seconds, told.band                      # of a step, and the expected range
told.bottleneck                              # the link that takes most of the communication
told.cost(steps=10_000)                      # hours, kWh, dollars, failures, checkpoints
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .collectives import Price
from .errors import RunError, ScaleError
from .machines import Machine
from .replay import Replay, layout
from .run import Call, Run

#: Expected relative errors, see docs/forecast.md: of the replay itself, of each doubling of the
#: ranks, and of a library whose algorithms are not known exactly.
REPLAY_ERROR, DOUBLING_ERROR, LIBRARY_ERROR = 0.10, 0.03, 0.20
#: Expected relative errors of computing: on a device that nobody measured, from two numbers; and
#: on a core per rank, recorded on shared cores.
ROOFLINE_ERROR, CROWDED_ERROR = 0.25, 0.30
# A rank with a smaller share of CPU time did not compute all the time.
_ASLEEP = 0.3


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step.

    Attributes:
        flops: floating-point operations.
        nbytes: bytes that the operations read and write in the device's memory.
    """

    flops: float
    nbytes: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What a training of many steps needs.

    Attributes:
        hours: with checkpoints, failures, and the work that is done again.
        device_hours: the hours of all devices together.
        kwh: energy.
        dollars: at the machine's price.
        failures: how many to expect.
        interval: seconds of work between two checkpoints, by Young's formula.
        share: the share of the hours in which the training gets ahead.
    """

    hours: float
    device_hours: float
    kwh: float
    dollars: float
    failures: float
    interval: float
    share: float

    def __str__(self) -> str:
        return (
            f"{self.hours:,.1f} hours with {self.failures:,.1f} expected failures, "
            f"{self.kwh:,.0f} kWh and ${self.dollars:,.0f}. Save a checkpoint every "
            f"{self.interval / 60:,.0f} minutes."
        )


@dataclass(frozen=True)
class Forecast:
    """A run on another machine.

    Attributes:
        machine, ranks: the machine, and how many of its devices are used.
        steps: seconds of each played step.
        computing: mean seconds that a rank computes in a step.
        stragglers: seconds by which a step is longer than it would be if all steps were equal.
        error: expected relative error of the seconds.
        calls: for each different collective its call, its price, and how often a step has it.
        work: what a rank computes in a step, if it was given.
        remarks: what the forecast assumes, one sentence each.
    """

    machine: Machine
    ranks: int
    steps: np.ndarray = field(repr=False)
    computing: float
    stragglers: float
    error: float
    calls: tuple[tuple[Call, Price, float], ...] = field(repr=False)
    work: Work | None = None
    remarks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the median seconds of a step."""
        return float(np.median(self.steps))

    @property
    def band(self) -> tuple[float, float]:
        """Return the range in which the seconds of a step are expected."""
        return self.seconds / (1 + self.error), self.seconds * (1 + self.error)

    @property
    def slow_step(self) -> float:
        """Return the seconds that 95 % of the steps don't exceed, because of stragglers."""
        return float(np.percentile(self.steps, 95))

    @property
    def waiting(self) -> float:
        """Return the share of a step in which a rank does not compute."""
        return max(0.0, 1 - self.computing / self.seconds) if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization: operations per second by the device's peak."""
        if self.work is None:
            return None
        return self.work.flops / (self.seconds * self.machine.device.flops)

    @property
    def bottleneck(self) -> str:
        """Return what ranks wait for the longest: "stragglers", or the name of a link's level."""
        if not self.calls or self.stragglers > self.waiting * self.seconds / 2:
            return "stragglers" if self.stragglers else ""
        _, price, _ = max(self.calls, key=lambda row: row[1].seconds * row[2])
        return self.machine.levels[price.level].name

    def cost(self, steps: int, checkpoint: float = 60.0, restart: float = 600.0) -> Cost:
        """Return what a training needs, with failures and checkpoints.

        The interval between checkpoints is Young's (J. W. Young, "A first order approximation to
        the optimum checkpoint interval", CACM 17(9), 1974), as in lab 13.

        Args:
            steps: of the training.
            checkpoint: seconds that a checkpoint takes.
            restart: seconds from a failure until the training goes on.
        """
        device = self.machine.device
        between = device.mtbf * 3600 / self.ranks
        interval = math.sqrt(2 * checkpoint * between)
        # A failure costs the restart and, on average, half of an interval's work.
        lost = checkpoint / interval + (restart + interval / 2) / between
        share = max(0.0, 1 - lost)
        useful = steps * self.seconds / 3600
        hours = useful / share if share else math.inf
        all_hours = hours * self.ranks
        return Cost(
            hours,
            all_hours,
            all_hours * device.watts / 1e3,
            all_hours * device.price,
            hours * 3600 / between,
            interval,
            share,
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the forecast as rows of a table: what, and how much."""
        low, high = (_seconds(value) for value in self.band)
        rows = [
            ("machine", str(self.machine)),
            ("ranks", f"{self.ranks:,}"),
            ("step", f"{_seconds(self.seconds)} (expected: {low} to {high})"),
            ("computing", f"{_seconds(self.computing)}, so a rank waits {self.waiting:.0%}"),
        ]
        if self.stragglers:
            slow = f"{_seconds(self.stragglers)} of a step; 95 % of the steps are shorter than "
            rows.append(("stragglers", slow + _seconds(self.slow_step)))
        if self.mfu is not None:
            rows.append(("MFU", f"{self.mfu:.1%}"))
        for call, price, times in sorted(self.calls, key=lambda row: -row[1].seconds * row[2])[:4]:
            level = self.machine.levels[price.level].name
            what = f"{price.algorithm}, {_seconds(price.seconds)}, most of it at the {level}"
            rows.append((f"{times:.3g} × {call.op} of {call.nbytes / 1e6:,.3g} MB", what))
        return rows

    def __repr__(self) -> str:
        from tabulate import tabulate  # here, because ranks import this package without tables

        return "\n".join([tabulate(self.rows(), tablefmt="plain"), *self.remarks])


def forecast(
    run: Run,
    machine: Machine,
    ranks: int | None = None,
    *,
    grow: tuple[int, ...] | None = None,
    strong: bool = False,
    work: Work | None = None,
    computing: str = "",
    jitter: float | None = None,
    slow: dict[int, float] | None = None,
    algorithm: str = "",
) -> Forecast:
    """Return what a recorded run would do on another machine.

    Args:
        run: the recorded run.
        machine: the other machine.
        ranks: by default, as many as were recorded.
        grow: the recorded ranks of a group that grows with the number of ranks. You need it only
            if the run has several groups, or messages.
        strong: whether the ranks share the recorded work (strong scaling). By default each rank
            computes as much as it did (weak scaling).
        work: what a rank computes in a step. Then the machine's device sets the time of computing;
            by default, computing takes as long as it was recorded.
        computing: "wall" counts the recorded seconds, "cpu" the CPU time in them. By default CPU
            time counts if the recorded ranks shared cores.
        jitter: standard deviation of a step's computing, as a share of it. By default it is what
            the recorded steps show, or 0 if the recorded ranks shared cores. As many ranks as
            recorded play the recorded steps instead.
        slow: factors of single ranks' computing, such as {17: 2.0} for a straggler.
        algorithm: of every collective that has it, such as "ring". By default, the machine's
            library chooses, or else the fastest one is taken for each size.

    Raises:
        ForecastError: there is no answer; the kind of error and its message say why.
    """
    ranks = run.ranks if ranks is None else ranks
    _check(run, machine, ranks, slow or {})
    where = layout(run, ranks, grow)
    scale, told = _scale(run, machine, work, computing)
    if strong:
        scale = tuple(factor * run.ranks / ranks for factor in scale)
    noise, as_recorded = _noise(run, ranks, jitter)
    played = Replay(run, machine, where, scale, noise, not as_recorded, slow, algorithm).play()
    calm = played
    if noise or as_recorded:
        calm = Replay(run, machine, where, scale, 0.0, True, slow, algorithm).play()
    stragglers = max(0.0, float(np.median(played.seconds) - np.median(calm.seconds)))
    known = "emulated" in {algorithm, machine.library} or not run.calls
    error = _error(run, ranks, work is not None, known)
    if run.jitter is None and jitter is None:
        told.append("The run has fewer than four equal steps, so stragglers are left out.")
    remarks = (*told, *_remarks(run, ranks, strong))
    found = (played.seconds, played.computing, stragglers, error, played.prices)
    return Forecast(machine, ranks, *found, work, remarks)


def _check(run: Run, machine: Machine, ranks: int, slow: dict[int, float]) -> None:
    """Raise ForecastError if the run is empty, or the machine or a straggler doesn't fit."""
    if not run.ranks or not any(run.events):
        raise RunError("The run is empty. Record a cell in which the ranks compute and call.")
    machine.holds(ranks)
    if wrong := [rank for rank in slow if not 0 <= rank < ranks]:
        raise ScaleError(f"There is no rank {wrong[0]} to slow down among {ranks:,} ranks.")


def _noise(run: Run, ranks: int, jitter: float | None) -> tuple[float, bool]:
    """Return the jitter, and whether the recorded differences between steps are played instead."""
    if jitter is not None:
        return jitter, jitter == 0
    if run.crowded:
        return 0.0, False
    return (0.0, True) if ranks == run.ranks else (run.jitter or 0.0, not run.jitter)


def _scale(
    run: Run, machine: Machine, work: Work | None, computing: str
) -> tuple[tuple[float, ...], list[str]]:
    """Return for each recorded rank the factor of its computing, and a remark on it."""
    if computing not in {"", "cpu", "wall"}:
        raise ValueError(f'computing={computing!r}: choose "cpu" or "wall".')
    if work is not None:
        seconds = machine.device.seconds(work.flops, work.nbytes)
        measured = [sum(run.computing(rank)) / run.steps for rank in range(run.ranks)]
        if not all(measured):
            raise RunError("A rank of this run computes nothing, so its work can't be scaled.")
        device = machine.device.name
        told = f"A step's computing takes {_seconds(seconds)} on {device}, by the roofline."
        return tuple(seconds / recorded for recorded in measured), [told]
    by_cpu = computing == "cpu" or (not computing and run.crowded)
    if by_cpu and run.shares:
        told = "The recorded ranks shared cores, so CPU time counts, equal in all steps."
        if min(run.shares) < _ASLEEP:
            told += " A rank used little of it: if it slept or read files, choose computing='wall'."
        return run.shares, [told]
    return (1.0,) * run.ranks, ["Computing takes as long as it was recorded."]


def _error(run: Run, ranks: int, rescaled: bool, library_is_known: bool) -> float:
    """Return the expected relative error: independent errors add up by their squares."""
    return math.hypot(
        REPLAY_ERROR,
        DOUBLING_ERROR * abs(math.log2(ranks / run.ranks)),
        0.0 if library_is_known else LIBRARY_ERROR,
        ROOFLINE_ERROR if rescaled else CROWDED_ERROR if run.crowded else 0.0,
        0.0 if run.crowded else (run.jitter or 0.0) / math.sqrt(run.steps),
    )


def _remarks(run: Run, ranks: int, strong: bool) -> list[str]:
    if ranks == run.ranks:
        return []
    kept = "share the recorded work" if strong else "each compute as much as was recorded"
    remarks = [f"The {ranks:,} ranks {kept}; {run.ranks} ranks were recorded."]
    if any(call.op == "message" for call in run.calls):
        remarks.append("Messages stay within each replica of the recorded ranks.")
    return remarks


def _seconds(value: float) -> str:
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:,.3g} ms"
