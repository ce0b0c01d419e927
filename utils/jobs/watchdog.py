"""Ends a notebook's ranks when its kernel is gone, for whatever reason.

nbval and a lack of memory end a kernel with SIGKILL, so the kernel can't clean up. Its engines,
controller and mpiexec would keep running, and deadlocked ranks use 100 % CPU. Therefore
`cluster.start` starts this file as a separate process. Its standard input is a pipe whose other end
only the kernel holds, so end of file means that the kernel is gone or has called `stop`.

This module is run as a file: it must not import the course, or anything that is slow or prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import psutil

# Every process that a kernel starts for its ranks has this variable, and so do all its descendants:
# a variable survives a parent's death, a new session and a new process group.
VARIABLE = "DDL_LABS_RANKS"

# This file marks a session folder whose ranks have a Slurm job. The job's name is the mark.
JOB = "slurm-job"

# Process ids are reused, so a process is identified by (process id, creation time). The clock may
# be set while ranks run, so creation times are compared with this tolerance, in seconds.
CLOCK_STEP = 2.0

Root = tuple[int, float]


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not run: it only waits for its parent."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def carries(process: psutil.Process, mark: str, variable: str = VARIABLE) -> bool:
    """Return whether a process was started, even indirectly, for the session with this mark."""
    try:
        return bool(process.environ().get(variable) == mark)
    except (psutil.Error, OSError):  # for example another user's process
        return False


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants; an empty list if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _began(pid: int, created: float) -> bool:
    try:
        return bool(abs(psutil.Process(pid).create_time() - created) <= CLOCK_STEP)
    except psutil.Error:
        return False


def members(
    mark: str, roots: Sequence[Root] = (), variable: str = VARIABLE
) -> list[psutil.Process]:
    """Return running processes that have the mark or descend from a root, except the caller."""
    processes = {p for p in psutil.process_iter() if carries(p, mark, variable)}
    for pid, created in roots:
        if _began(pid, created):
            processes.update(family(pid))
    return [p for p in processes if p.pid != os.getpid() and alive(p)]


def _each(processes: Iterable[psutil.Process], end: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            end(process)


def end_all(
    mark: str,
    roots: Sequence[Root] = (),
    grace: float = 1.0,
    limit: float = 15.0,
    variable: str = VARIABLE,
) -> bool:
    """End all members: SIGTERM, then SIGKILL after `grace` seconds. Return whether none is left.

    On Windows, there is only one way to end a process.

    A process may just be starting a new one, so it repeats until two searches in a row find
    nothing, or until `limit` seconds have passed.
    """
    quiet = 0
    deadline = time.monotonic() + limit
    while quiet < 2 and time.monotonic() < deadline:
        processes = members(mark, roots, variable)
        quiet = 0 if processes else quiet + 1
        _each(processes, psutil.Process.terminate)
        patience = time.monotonic() + grace
        while any(map(alive, processes)) and time.monotonic() < patience:
            time.sleep(0.02)
        _each(filter(alive, processes), psutil.Process.kill)
        time.sleep(0.03)
    return quiet >= 2


def cancel_job(mark: str, folder: str | os.PathLike[str]) -> None:
    """Cancel the Slurm job of these ranks, if they have one."""
    if os.path.exists(os.path.join(folder, JOB)):
        cancel("--user", str(os.getuid()), "--name", mark)


def cancel(*arguments: str) -> None:
    """Run `scancel`, and ignore errors."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scancel", "--quiet", *arguments]
        subprocess.run(command, capture_output=True, timeout=20, check=False)


def shared_memory(mark: str) -> str:
    """Return the folder for the shared memory of these ranks, on systems that have /dev/shm."""
    return os.path.join("/dev/shm", f"ddl-labs-{mark}")


def remove(mark: str, folder: str | os.PathLike[str]) -> None:
    """Remove the files of a session, because a killed MPI or launcher can't."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(shared_memory(mark), ignore_errors=True)


def main(mark: str, folder: str) -> None:
    """Read the root processes from standard input until its end, then end them all."""
    # Ctrl-C and hang-up are for the kernel. This process reacts only to the kernel's end.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    roots: list[Root] = []
    for line in sys.stdin:
        # A kernel that is killed while it writes leaves half a line.
        with contextlib.suppress(ValueError):
            roots = [(int(pid), float(created)) for pid, created in json.loads(line)]
    end_all(mark, roots)
    cancel_job(mark, folder)
    remove(mark, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
