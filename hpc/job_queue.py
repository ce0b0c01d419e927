"""Slurm, asked once for all students: a class that starts at once is no load for it."""

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
#: Seconds between two questions, and at most when Slurm does not answer.
PERIOD, MOST = 2.0, 60.0


class Poll:
    """A command's answer, as of at most `period` seconds ago, for all who ask.

    parse: makes the answer of the command's output.
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
        #: The last answer that there was, None before the first one.
        self.seen: Any = None

    async def answer(self, since: float = -math.inf) -> Any:
        """What the command says. since: the clock's time; an answer may not be older.

        Raises NoAnswer.
        """
        # One caller asks; the others wait for the answer, and share it.
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
        """One call of the command; after a failure the next one comes later, and later."""
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
    """A line of squeue. begin: when Slurm expects it to start; node: the first one; end: when its
    time is over; nodes: all of them, as Slurm writes them, such as node[1-2].
    """

    state: str
    reason: str
    begin: str
    node: str
    end: str = ""
    nodes: str = ""

    def seconds_left(self, now: datetime) -> int | None:
        """Until Slurm ends it; None for a job without an end. now: in local time, as squeue's."""
        try:
            return max(0, round((datetime.fromisoformat(self.end) - now).total_seconds()))
        except ValueError:  # "N/A", or nothing
            return None


class Queue(Poll):
    """All jobs of the cluster."""

    def __init__(
        self,
        period: float = PERIOD,
        command: tuple[str, ...] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(command, _jobs, period, clock)

    async def job(self, number: str, since: float = -math.inf) -> Job | None:
        """The job, None when it is over. since: when it was submitted, by the clock; an older
        answer would call it gone. Raises NoAnswer.
        """
        return (await self.answer(since)).get(number)


def _jobs(text: str) -> dict[str, Job]:
    lines = (line.split("|") for line in text.splitlines())
    return {fields[0]: Job(*fields[1:]) for fields in lines if len(fields) >= 5}
