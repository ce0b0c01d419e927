"""Slurm's queue, asked once for all students: a class that starts at once is no load for Slurm."""

from __future__ import annotations

import asyncio
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

COMMAND = ("squeue", "--noheader", "--format=%i|%T|%r|%S|%B")
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
    """Slurm does not answer; the text is what squeue said."""


@dataclass(frozen=True)
class Job:
    """A line of squeue. begin: when Slurm expects it to start; node: the first one."""

    state: str
    reason: str
    begin: str
    node: str


class Queue:
    """All jobs of the cluster, as of at most `period` seconds ago."""

    def __init__(
        self,
        period: float = PERIOD,
        command: tuple[str, ...] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._period, self._command, self._clock = period, command, clock
        self._lock = asyncio.Lock()
        self._jobs: dict[str, Job] = {}
        self._asked, self._pause = -math.inf, 0.0
        self._failed = ""

    async def job(self, number: str, since: float = -math.inf) -> Job | None:
        """The job, None when it is over. since: when it was submitted, by the clock.

        Raises NoAnswer.
        """
        # One caller asks; the others wait for the answer, and share it.
        async with self._lock:
            wait = self._asked + self._pause - self._clock()
            if wait > 0 and self._asked < since and not self._failed:
                # That answer is older than the job, and would call it gone.
                await asyncio.sleep(wait)
                wait = 0
            if wait <= 0:
                await self._ask()
        if self._failed:
            raise NoAnswer(self._failed)
        return self._jobs.get(number)

    async def _ask(self) -> None:
        """One call of squeue; after a failure the next one comes later, and later."""
        began = self._clock()
        try:
            self._jobs, self._failed = _parsed(await _output(self._command)), ""
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


def _parsed(text: str) -> dict[str, Job]:
    lines = (line.split("|") for line in text.splitlines())
    return {fields[0]: Job(*fields[1:]) for fields in lines if len(fields) == 5}
