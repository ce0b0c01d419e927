"""Ends a notebook's ranks when its kernel is gone, however it went.

nbval and a full memory end a kernel with SIGKILL: no clean-up of its own runs, and engines,
controller and mpiexec would live on, deadlocked ranks at 100 % CPU. So `cluster.start` starts
this file as a process of its own. Its standard input is a pipe whose other end only the kernel
holds: end of file means that the kernel is gone (or has called `stop`), whatever the reason.

Run as a file: it must not import the course's package, nor anything that is slow or prints.
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
from collections.abc import Sequence

import psutil

# Every process that a kernel starts for its ranks, and all that those start, carry this variable
# in their environment: it survives a parent's death, a new session and a new process group.
VARIABLE = "DDL_LABS_RANKS"

# In the folder of ranks that have a Slurm job of their own, which has the mark as its name.
JOB = "slurm-job"

# Processes are named by (process id, creation time): ids are used again. The clock may be set
# while ranks run, so times are compared with this tolerance, in seconds.
CLOCK_STEP = 2.0

Root = tuple[int, float]


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not: it only waits for its parent."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def carries(process: psutil.Process, mark: str, variable: str = VARIABLE) -> bool:
    """Return whether a process was started, however indirectly, for what has this mark."""
    try:
        return bool(process.environ().get(variable) == mark)
    except (psutil.Error, OSError):  # also: another user's
        return False


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all that descend from it; an empty list when it has ended."""
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
    """Return live processes that carry the mark or descend from a root; never the caller."""
    processes = {p for p in psutil.process_iter() if carries(p, mark, variable)}
    for pid, created in roots:
        if _began(pid, created):
            processes.update(family(pid))
    return [p for p in processes if p.pid != os.getpid() and alive(p)]


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def end_all(
    mark: str,
    roots: Sequence[Root] = (),
    grace: float = 1.0,
    limit: float = 15.0,
    variable: str = VARIABLE,
) -> bool:
    """End every member: SIGTERM, after `grace` seconds SIGKILL. Return whether none is left.

    It looks again until two looks in a row find nothing, as a process may just be starting another;
    it gives up after `limit` seconds.
    """
    quiet = 0
    deadline = time.monotonic() + limit
    while quiet < 2 and time.monotonic() < deadline:
        processes = members(mark, roots, variable)
        quiet = 0 if processes else quiet + 1
        _signal(processes, signal.SIGTERM)
        patience = time.monotonic() + grace
        while any(map(alive, processes)) and time.monotonic() < patience:
            time.sleep(0.02)
        _signal(list(filter(alive, processes)), signal.SIGKILL)
        time.sleep(0.03)
    return quiet >= 2


def cancel_job(mark: str, folder: str | os.PathLike[str]) -> None:
    """Cancel the Slurm job of these ranks, if they have one."""
    if os.path.exists(os.path.join(folder, JOB)):
        cancel("--user", str(os.getuid()), "--name", mark)


def cancel(*arguments: str) -> None:
    """Run `scancel`, whatever comes of it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scancel", "--quiet", *arguments]
        subprocess.run(command, capture_output=True, timeout=20, check=False)


def shared_memory(mark: str) -> str:
    """Return the folder of these ranks' shared memory, on systems that have one."""
    return os.path.join("/dev/shm", f"ddl-labs-{mark}")


def remove(mark: str, folder: str | os.PathLike[str]) -> None:
    """Remove the files of a session: killed, neither MPI nor its launcher can."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(shared_memory(mark), ignore_errors=True)


def main(mark: str, folder: str) -> None:
    """Read the root processes from standard input until its end, then end them all."""
    # A Ctrl-C or a hang-up is for the kernel; its death is what reaches this process.
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
