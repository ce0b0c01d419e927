"""Runs a job of ranks to its end, with a deadline and without leaving any process behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from utils.jobs import RanksError, sandbox_command, watchdog
from utils.jobs.forkserver import client
from utils.jobs.sandbox_command import confined
from utils.jobs.session import Session
from utils.jobs.site import settings
from utils.jobs.start_plan import Plan

# On a very busy machine, Open MPI may give up before it has started a rank.
ATTEMPTS = 3
NOT_STARTED = "listener thread failed to start"

# Exit status of a job that missed its deadline, the same as in coreutils' `timeout`.
LATE = 124
# Seconds between two looks at the output of a job.
LOOK = 0.3

Watch = Callable[[str], object]
Stream = IO[str] | None


class Python:
    """The `python` that the ranks of a plan run: the fork server's stub, or Python itself.

    It holds a lease on the fork server until it is closed.

    Attributes:
        reason: why the ranks are not forked; "" if they are.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._lease: client.Lease | None = None
        environment = os.environ | plan.environment
        self.reason = self._why_not(environment)
        if not self.reason:
            try:
                self._lease = client.lease(environment, plan.launcher.path)
            except (OSError, RanksError) as error:
                self.reason = str(error)

    @property
    def command(self) -> list[str]:
        """Return the command to use instead of `python`, as in `[*command, "train.py"]`."""
        return self._lease.python if self._lease else [sys.executable]

    def job(self, *words: str) -> list[str]:
        """Return the command that runs a program on all ranks, as `job("train.py", "-v")`."""
        plan = self._plan
        return [plan.launcher.path, "-n", str(plan.n), *plan.mpi_args, *self.command, *words]

    def _why_not(self, environment: Mapping[str, str]) -> str:
        way = self._plan.way
        if way.launcher != "mpiexec":
            return f"the fork server works with mpiexec only, and {way.launcher} starts the ranks"
        if way.many_hosts:
            return "the fork server works on one host only, and the ranks may be on several"
        if not settings().fork_server:
            return "the site's settings turn the fork server off"
        return client.why_not(environment)

    def outside_mpiexec(self) -> dict[str, str]:
        """Return variables for a process that isn't a rank but is started with `command`."""
        if self._lease is None:
            return {}
        return self._lease.settings | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def describe(self, reasons: Iterable[str] = ()) -> str:
        """Return a sentence for the user. reasons: why ranks were not forked, from these ranks."""
        if reason := self.reason or "; ".join(sorted(reasons)):
            return f"Each rank is a separate Python process: {reason}."
        return "The ranks were forked from a process that had imported PyTorch (the fork server)."

    def close(self) -> None:
        """Give the lease back."""
        if self._lease is not None:
            self._lease.close()


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    status: int  # exit status of mpiexec, `LATE` after the deadline
    out: str  # its standard output; "" if it was not captured
    err: str  # its standard error; "" if it was not captured
    seconds: float  # from its start to its end


def run(
    command: list[str],
    environment: Mapping[str, str],
    deadline: float,
    *,
    capture: bool = True,
    watch: Watch | None = None,
) -> Ended:
    """Run a command that starts ranks, at most for `deadline` seconds.

    No process of the command survives its end, even if this process is killed (see
    `utils.jobs.watchdog`). If mpiexec gives up on a busy machine, the command runs again.

    Args:
        environment: all variables of the command.
        capture: keep its output; otherwise it prints to the same terminal as this process.
        watch: called now and then, and at the end, with the whole standard error so far; it needs
            `capture`.
    """
    for _ in range(ATTEMPTS):
        with _streams(capture) as (out, err):
            start = time.monotonic()
            status = _status(command, environment, deadline, (out, err), watch)
            ended = Ended(status, _text(out), _text(err), time.monotonic() - start)
        if not ended.status or NOT_STARTED not in ended.err:
            break
    return ended


def run_on(
    plan: Plan,
    words: Sequence[str],
    deadline: float,
    environment: Mapping[str, str] | None = None,
    *,
    capture: bool = True,
    writable: Sequence[Path] = (),
) -> Ended:
    """Run a program on the ranks of a plan, as `run` does.

    Grading runs it in a sandbox, where it can write to the `writable` folders only.

    Args:
        words: the words after `python` on a command line, such as `["train.py", "-v"]`.
        environment: variables to add to the plan's variables.
    """
    variables = os.environ | plan.environment | dict(environment or {})
    if sandbox_command.is_set():  # the fork server is out of reach there
        command = [plan.launcher.path, "-n", str(plan.n), *plan.mpi_args, sys.executable, *words]
        return run(confined(command, *writable), variables, deadline, capture=capture)
    with contextlib.closing(Python(plan)) as python:
        return run(python.job(*words), variables, deadline, capture=capture)


@contextlib.contextmanager
def _streams(capture: bool) -> Iterator[tuple[Stream, Stream]]:
    """Yield files for the output; with pipes, a process that keeps one open could block us."""
    if not capture:
        yield None, None
        return
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        yield out, err


def _status(
    command: list[str],
    environment: Mapping[str, str],
    deadline: float,
    streams: tuple[Stream, Stream],
    watch: Watch | None,
) -> int:
    """Run a command in a new session, and return its exit status."""
    with contextlib.closing(Session()) as session:
        process = subprocess.Popen(
            command,
            env={**environment, **session.environment},
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,
        )
        late = time.monotonic() + deadline
        try:
            session.watch([process.pid])
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(LOOK, max(0.0, late - time.monotonic())))
                if watch:
                    watch(_text(streams[1]))
                if process.returncode is not None:
                    return process.returncode
                if time.monotonic() >= late:
                    return LATE
        finally:
            if process.poll() is None:
                watchdog.end_all(session.mark)
                process.wait(5)


def _text(stream: Stream) -> str:
    """Return the whole content of a file without moving the position at which others write."""
    if stream is None:
        return ""
    size = os.fstat(stream.fileno()).st_size
    return os.pread(stream.fileno(), size, 0).decode(errors="replace")
