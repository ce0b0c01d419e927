"""Probes: processes with a deadline, and how they tell facts to the doctor."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from utils.doctor.words import gist, one_line
from utils.jobs import python_command


@dataclass(frozen=True)
class Outcome:
    """What came of a probe: what it told, how it ended. `status` is None past the deadline."""

    told: list[dict[str, Any]]
    errors: str
    status: int | None
    seconds: float


class Probe:
    """A process that tells facts by `tell`, in a session of its own, until its deadline."""

    def __init__(self, command: list[str], deadline: float, env: dict[str, str] | None = None):
        self._deadline = deadline
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    @functools.cached_property
    def outcome(self) -> Outcome:
        """Wait for its end, at most until the deadline; nothing of it runs afterwards."""
        left = self._deadline - (time.monotonic() - self._started)
        status = None
        try:
            output, errors = self._process.communicate(timeout=max(left, 0.1))
            status = self._process.returncode
        except subprocess.TimeoutExpired:
            self.end()
            output, errors = self._what_was_written()
        seconds = time.monotonic() - self._started
        return Outcome(list(_parts(output)), errors, status, seconds)

    def facts(self, part: str) -> dict[str, Any]:
        """What it told about a part; if nothing, "error" says why."""
        told: dict[str, dict[str, Any]] = {}
        for facts in self.outcome.told:
            told |= facts
        if self.outcome.status is None:
            lost = f"no answer within {self._deadline:g} s"
        else:
            lost = f"ended with status {self.outcome.status}: {gist(self.outcome.errors)}"
        return told.get(part, {"error": lost})

    def _what_was_written(self) -> tuple[str, str]:
        try:
            return self._process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            return "", ""  # a process that escaped keeps the pipes open

    def end(self) -> None:
        """End the process, its session and all that descend from it."""
        if self._process.poll() is not None:
            return
        family = _family(self._process.pid)
        # Asked politely, Open MPI removes its files from /dev/shm and the temporary folder.
        os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        for member in family:
            with contextlib.suppress(Exception):  # it has ended
                member.kill()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(5)


def _family(pid: int) -> list[Any]:
    """The process and all that descend from it; the doctor also runs where psutil is missing."""
    try:
        import psutil  # noqa: F401 - the first thing that the other module needs

        from utils.jobs.watchdog import family
    except ImportError:
        return []
    return family(pid)


# Between control characters, as ranks and MPI libraries print into the same stream.
MARK = "\x02doctor "


def tell(**facts: Any) -> None:
    """On a probe: pass facts to the doctor. One write, so that ranks don't mix their lines."""
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\x03\n")
    sys.stdout.flush()


def tell_each(**parts: Callable[[], dict[str, Any]]) -> None:
    """Tell what each function finds, or its error; one that fails leaves the others alone."""
    for name, find in parts.items():
        try:
            facts = find()
        except Exception as failure:
            facts = {"error": one_line(failure)}
        tell(**{name: facts})


def _parts(output: str) -> Iterator[dict[str, Any]]:
    for text in re.findall(f"{MARK}(.*?)\x03", output):
        with contextlib.suppress(ValueError):
            yield json.loads(text)


def python_probe(function: str, *arguments: str) -> list[str]:
    """The command that runs a function of `utils.doctor.facts` in a fresh Python."""
    code = f"from utils.doctor import facts; facts.{function}(*sys.argv[1:])"
    return python_command(code, *arguments)
