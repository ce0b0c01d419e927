"""A job of ranks from its start to its end: a deadline, and none of its processes is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import psutil

from utils.jobs import watchdog
from utils.jobs.session import Session, Watchdog
from utils.jobs.start_plan import ATTEMPTS, NOT_STARTED

# Exit status of a job that was not done in time, as of coreutils' `timeout`.
LATE = 124
# Seconds between two looks at what a job has printed.
LOOK = 0.3

Watch = Callable[[str], object]
Streams = tuple[IO[str] | None, IO[str] | None]


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        status: exit status of mpiexec, `LATE` after the deadline.
        out: what it printed; "" if that was not captured.
        err: the same of its standard error.
        seconds: from its start to its end.
    """

    status: int
    out: str
    err: str
    seconds: float


def run(
    command: list[str],
    environment: Mapping[str, str],
    deadline: float,
    *,
    capture: bool = True,
    watch: Watch | None = None,
) -> Ended:
    """Run a command that starts ranks, at most for `deadline` seconds.

    However it ends, none of its processes is left, not even if this process is killed (see
    `utils.jobs.watchdog`). An mpiexec that gave up on a busy machine is tried again.

    Args:
        command: its words.
        environment: all its variables.
        deadline: seconds.
        capture: keep what it prints; otherwise it prints where this process does.
        watch: called now and then, and at the end, with all of the standard error so far; it needs
            `capture`.
    """
    for _ in range(ATTEMPTS):
        ended = _try_once(command, environment, deadline, capture, watch)
        if not ended.status or NOT_STARTED not in ended.err:
            break
    return ended


def _try_once(
    command: list[str],
    environment: Mapping[str, str],
    deadline: float,
    capture: bool,
    watch: Watch | None,
) -> Ended:
    session = Session()
    try:
        with _streams(capture) as streams:
            guard = Watchdog(session)
            start = time.monotonic()
            try:
                status = _wait(command, environment, deadline, session, guard, streams, watch)
            finally:
                guard.close()
            out, err = map(_text, streams)
            return Ended(status, out, err, time.monotonic() - start)
    finally:
        session.close()


@contextlib.contextmanager
def _streams(capture: bool) -> Iterator[Streams]:
    """Files, not pipes: a process that keeps a pipe open can't stall us."""
    if not capture:
        yield None, None
        return
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        yield out, err


def _wait(
    command: list[str],
    environment: Mapping[str, str],
    deadline: float,
    session: Session,
    guard: Watchdog,
    streams: Streams,
    watch: Watch | None,
) -> int:
    process = subprocess.Popen(
        command,
        env={**environment, **session.environment},
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        start_new_session=True,
    )
    try:
        with contextlib.suppress(psutil.Error):  # it may have ended already
            guard.tell([(process.pid, psutil.Process(process.pid).create_time())])
        return _watched(process, deadline, streams[1], watch) if watch else process.wait(deadline)
    except subprocess.TimeoutExpired:
        return LATE
    finally:
        if process.poll() is None:
            watchdog.end_all(session.mark)
            process.wait(5)


def _watched(
    process: subprocess.Popen[bytes], deadline: float, err: IO[str] | None, watch: Watch
) -> int:
    """The status of a process; raises TimeoutExpired at the deadline."""
    late = time.monotonic() + deadline
    while True:
        try:
            return process.wait(min(LOOK, max(0.0, late - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= late:
                raise
        finally:
            watch(_text(err))


def _text(stream: IO[str] | None) -> str:
    """All of a file that others write to, whose place in it must stay."""
    if stream is None:
        return ""
    size = os.fstat(stream.fileno()).st_size
    return os.pread(stream.fileno(), size, 0).decode(errors="replace")
