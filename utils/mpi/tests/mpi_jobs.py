"""Jobs of ranks with a deadline, for tests; imports nothing of the course.

Goes into the backend's own source distribution, beside the tests that need no more than this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

#: What stands for `python` below a launcher, where another conftest knows a faster one than a new
#: process: a function of the launcher.
PYTHON_OF_RANKS = pytest.StashKey[Callable[[str], list[str]]]()


def find_mpiexec() -> str | None:
    """This environment's mpiexec, else the first one on PATH."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    return str(own) if own.exists() else shutil.which("mpiexec")


def mpi_environment() -> dict[str, str]:
    """The environment in which several ranks run on a small machine, as root too."""
    env = dict(os.environ)
    env.update(
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        OMPI_MCA_btl="^ofi",
        OMP_NUM_THREADS="1",
        # As for the ranks of a notebook: one fork server serves both.
        KINETO_LOG_LEVEL="6",
    )
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            env[name] = env[f"{name}_CONFIRM"] = "1"
    return env


def _family(pid: int) -> list[psutil.Process]:
    """The process and all that descend from it; empty when it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def kill_tree(process: subprocess.Popen) -> None:
    """End a launcher, its ranks and everything in its process group, for good."""
    members = _family(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(members, timeout=5)
    process.wait(5)


def run_tree(
    command: list[str], *, timeout: float, env: dict[str, str], cwd: Path | str | None = None
) -> subprocess.CompletedProcess:
    """Run a command in a process group of its own; at the deadline its whole tree dies.

    Output goes to files, not pipes, so that a grandchild that keeps them open can't stall us.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            kill_tree(process)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
        if late:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, process.returncode, *texts)


def as_python_arguments(code: str | os.PathLike) -> list[str]:
    """`-c CODE` for source text, the path itself for a script that exists."""
    if isinstance(code, os.PathLike) or ("\n" not in code and Path(code).is_file()):
        return [os.fspath(code)]
    return ["-c", code]


def run_ranks(
    launcher: str,
    python: Sequence[str],
    n: int,
    code: str | os.PathLike,
    *args: object,
    timeout: float = 180,
    check: bool = True,
    env: dict[str, str | None] | None = None,
    cwd: Path | str | None = None,
) -> subprocess.CompletedProcess:
    """Run `python code` on `n` ranks; what the fixture `mpiexec` promises."""
    environment = mpi_environment() | (env or {})
    environment = {key: value for key, value in environment.items() if value is not None}
    command = [launcher, "-n", str(n), "--bind-to", "none", *python]
    command += [*as_python_arguments(code), *map(str, args)]
    try:
        done = run_tree(command, timeout=timeout, env=environment, cwd=cwd)
    except subprocess.TimeoutExpired as late:
        pytest.fail(
            f"{n} ranks were not done after {timeout} s and were killed.\n"
            f"stdout:\n{late.output}\nstderr:\n{late.stderr}"
        )
    if check and done.returncode:
        pytest.fail(
            f"{n} ranks ended with status {done.returncode}.\n"
            f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"
        )
    return done
