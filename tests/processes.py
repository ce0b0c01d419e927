"""The processes that a test session starts: which of them are the course's, and which are left."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from utils.jobs.forkserver import client

# Names that a course process carries in its command line: kernels, engines, MPI launchers.
COURSE_PROCESSES = (
    *("ipykernel_launcher", "ipengine", "ipcontroller", "ipcluster", "ipyparallel"),
    *("prterun", "prted", "mpiexec", "mpirun", "orted"),
)
# And the fork server, which outlives what it was started for.
FORK_SERVER = client.SERVER[-1]
# MPI launchers give their ranks these.
RANK_VARIABLES = {"PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}

# Marks every process that this session starts, so that others on the machine are left alone.
SESSION_VARIABLE = "DDL_LABS_TEST_SESSION"
SESSION = f"{os.getpid()}-{time.time_ns()}"
# The same in all processes of pytest-xdist, which share a fork server.
RUN_VARIABLE = "DDL_LABS_TEST_RUN"


def is_course_process(process: psutil.Process) -> bool:
    """Is this a kernel, an engine, a controller, an MPI launcher or a rank of one?"""
    words = [process.name(), *process.cmdline()[:4]]
    if any(name in word for word in words for name in COURSE_PROCESSES):
        return True
    return bool(RANK_VARIABLES & environment_of(process).keys())


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The environment that the process began with; empty where it may not be read."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def is_ours(process: psutil.Process, descendants: set[int]) -> bool:
    """Did this session start it? The variable in its environment tells, else its parent chain.

    The fork server that this session has started forks the ranks of other sessions as well.
    """
    if process.pid == os.getpid():
        return False
    session = environment_of(process).get(SESSION_VARIABLE)
    return session == SESSION if session else process.pid in descendants


def left_over() -> list[psutil.Process]:
    """Course processes of this session that still run."""
    descendants = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and is_ours(process, descendants)
                and is_course_process(process)
            ):
                found.append(process)
    return found
