"""Slurm's queue, which one call reads for all students, so that a class doesn't overload Slurm."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from commands import PATIENCE, NoAnswer, output

COMMAND = ("squeue", "--noheader", "--format=%i|%T|%r|%S|%B|%e|%N")
#: Seconds between two calls: normally, and at most while Slurm doesn't answer.
PERIOD, MOST = 2.0, 60.0


class Poll:
    """A command's answer, at most `period` seconds old, which all callers share.

    parse: a function that turns the command's output into the answer.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        parse: Callable[[str], Any],
        period: float = PERIOD,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._period, self._command, self._clock, self._parse = period, command, clock, parse
        self._lock = asyncio.Lock()
        self._asked, self._pause = -math.inf, 0.0
        self._failed = ""
        #: The last answer, or None before the first one.
        self.seen: Any = None

    async def answer(self, since: float = -math.inf) -> Any:
        """Return the command's answer. since: the earliest time, on `clock`, of its call.

        Raises:
            NoAnswer: the last call failed.
        """
        # One caller runs the command, and the others wait for its answer.
        async with self._lock:
            wait = self._asked + self._pause - self._clock()
            if wait > 0 and self._asked < since and not self._failed:
                await asyncio.sleep(wait)
                wait = 0
            if wait <= 0:
                await self._ask()
        if self._failed:
            raise NoAnswer(self._failed)
        return self.seen

    async def _ask(self) -> None:
        """Call the command once, and wait longer before the next call after each failure."""
        began = self._clock()
        try:
            self.seen, self._failed = self._parse(await output(self._command)), ""
            self._pause = self._period
        except (OSError, TimeoutError, NoAnswer) as error:
            self._failed = str(error) or f"no answer within {PATIENCE:g} s"
            self._pause = min(max(2 * self._pause, self._period), MOST)
        self._asked = began


@dataclass(frozen=True)
class Job:
    """A line of squeue.

    begin: when Slurm expects the job to start; node: its first node; end: when its time is over;
    nodes: all its nodes in Slurm's notation, such as node[1-2].
    """

    state: str
    reason: str
    begin: str
    node: str
    end: str = ""
    nodes: str = ""

    def seconds_left(self, now: datetime) -> int | None:
        """Return the seconds until Slurm ends the job, or None. now: local time, as in squeue."""
        try:
            return max(0, round((datetime.fromisoformat(self.end) - now).total_seconds()))
        except ValueError:  # "N/A" or "", because the job has no end
            return None


class Queue(Poll):
    """The jobs of the whole cluster."""

    def __init__(
        self,
        period: float = PERIOD,
        command: tuple[str, ...] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(command, _jobs, period, clock)

    async def job(self, number: str, since: float = -math.inf) -> Job | None:
        """Return a job, or None if it is over.

        since: when the job was submitted, on `clock`, because an older answer doesn't have it.

        Raises:
            NoAnswer: squeue failed.
        """
        return (await self.answer(since)).get(number)


def _jobs(text: str) -> dict[str, Job]:
    lines = (line.split("|") for line in text.splitlines())
    return {fields[0]: Job(*fields[1:]) for fields in lines if len(fields) >= 5}
