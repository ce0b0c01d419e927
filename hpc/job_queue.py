"""Slurm, asked once for all students: a class that starts at once is no load for it."""

from __future__ import annotations

import asyncio
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

COMMAND = ("squeue", "--noheader", "--format=%i|%T|%r|%S|%B|%e|%N")
#: Seconds between two questions, at most when Slurm does not answer, and for an answer.
PERIOD, MOST, PATIENCE = 2.0, 60.0, 20.0
#: Reasons of a job that waits for nothing that will come: `man squeue`, JOB REASON CODES. Not among
#: them is PartitionConfig: with nodes that are down it says that they are missing now.
NEVER = {
    "AccountNotAllowed": "the account may not use the partition",
    "BadConstraints": "no node is as the job wants it",
    "InvalidAccount": "Slurm does not know the account",
    "InvalidQOS": "Slurm does not know the quality of service",
    "PartitionNodeLimit": "the partition does not give so many nodes to a job",
    "PartitionTimeLimit": "the partition does not give so much time to a job",
}


class NoAnswer(Exception):
    """Slurm does not answer; the text is what its command said."""


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
            self.seen, self._failed = self._parse(await _output(self._command)), ""
            self._pause = self._period
        except (OSError, TimeoutError, NoAnswer) as error:
            self._failed = str(error) or f"no answer within {PATIENCE:g} s"
            self._pause = min(max(2 * self._pause, self._period), MOST)
        self._asked = began


async def _output(command: tuple[str, ...]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    if process.returncode:
        raise NoAnswer(err.decode(errors="replace").strip())
    return out.decode(errors="replace")


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
