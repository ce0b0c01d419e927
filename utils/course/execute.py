"""Execute a lab's notebook from top to bottom and count the verdicts of its checks."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets.config import Config

from utils.checks import verdict
from utils.jobs import watchdog

from . import CourseError
from .notebook import NotebookError, normalise, read, tasks_checked, write

KERNEL = "python3"
ANSI = re.compile(r"\x1b\[[0-9;]*m")

#: Every process that a notebook starts inherits this variable, so that all of them can be ended.
RUN_VARIABLE = "DDL_LABS_RUN"
#: Seconds in which processes may end by themselves after their kernel has ended.
GRACE = 10.0

#: With encryption, other users of the machine can't listen to the kernel.
CONFIG = Config()
if KernelManager.class_traits().get("transport_encryption"):
    CONFIG.KernelManager.transport_encryption = "auto"


class KernelError(CourseError, RuntimeError):
    """The kernel `python3` isn't this environment's Python."""


@dataclass(frozen=True)
class Result:
    """The result of one execution."""

    name: str
    seconds: float
    passed: int
    failed: int
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Return whether the notebook ran to its end and passed every check."""
        return self.error is None and self.failed == 0

    def __str__(self) -> str:
        checks = f"{self.passed} of {self.passed + self.failed} checks passed"
        begin = "ok    " if self.ok else "FAILED"
        lines = [f"{begin} {self.name:<32} {self.seconds:6.1f} s  {checks}"]
        return "\n       ".join(lines + (self.error or "").splitlines())


def execute(
    path: Path, *, store: bool = False, only_new: bool = False, timeout: float = 120
) -> Result:
    """Execute a notebook in a fresh kernel, in the notebook's folder.

    A check cell that showed no verdict counts as failed.

    Args:
        store: Write the normalized outputs into the file, unless something failed.
        only_new: Keep what is stored of every cell that was executed before.
        timeout: Seconds for each cell.
    """
    require_kernel()
    path = Path(path).resolve()
    try:
        nb = read(path)
    except NotebookError as error:
        return Result(path.name, 0.0, 0, 1, str(error))
    before = copy.deepcopy(nb.cells)
    start = time.monotonic()
    why = run_cells(nb, path.parent, timeout)
    seconds = time.monotonic() - start
    passed, failed, silent = verdicts(nb)
    if silent and why is None:
        why = f"the check of task {', '.join(silent)} printed no '✓ Task' line"
    result = Result(path.name, seconds, passed, failed, why)
    if store and result.ok:
        if only_new:
            nb.cells = [
                old if old.get("execution_count") else new
                for old, new in zip(before, nb.cells, strict=True)
            ]
        write(normalise(nb), path)
    return result


def verdicts(nb: NotebookNode) -> tuple[int, int, list[str]]:
    """Return the numbers of passed and failed checks, and the tasks without a verdict.

    A check without a verdict counts as failed, because only an explicit pass gives points.
    """
    results: dict[str, bool] = {}
    for cell in nb.cells:
        for line in verdict.read(cell.get("outputs", [])):
            name = line.task or str(line)
            results[name] = results.get(name, True) and line.passed
    silent = [task for task in tasks_checked(nb) if task not in results]
    passed = sum(results.values())
    return passed, len(results) - passed + len(silent), silent


def require_kernel() -> None:
    """Raise a KernelError unless the kernel uses the running Python."""
    try:
        spec = KernelSpecManager().get_kernel_spec(KERNEL)
    except NoSuchKernel:
        raise KernelError(f"there is no kernel '{KERNEL}'. Run 'make env'") from None
    command = spec.argv[0]
    if command in {"python", "python3", "python{}.{}".format(*sys.version_info)}:
        return  # jupyter_client replaces these by sys.executable
    path = shutil.which(command)
    # Not resolved, because python in an environment is a link to another Python.
    if path is None or Path(path).absolute().parent != Path(sys.executable).absolute().parent:
        raise KernelError(
            f"the kernel '{KERNEL}', found in {spec.resource_dir}, starts {command} instead of "
            f"{sys.executable}. Remove this folder, or set JUPYTER_PREFER_ENV_PATH=1"
        )


# --- one execution -----------------------------------------------------------------------------


def run_cells(
    nb: NotebookNode,
    folder: Path,
    timeout: float,
    *,
    timing: bool = False,
    variables: Mapping[str, str] | None = None,
) -> str | None:
    """Execute a notebook in place, in ``folder``; return the problem as text, or None.

    Args:
        timing: Store in each cell's metadata when it began and ended.
        variables: Environment variables for the kernel.
    """
    for cell in nb.cells:
        if cell.cell_type == "code":  # outputs of an earlier execution must not count
            cell.outputs = []
            cell.execution_count = None
    mark = uuid.uuid4().hex
    at = "before the first cell"

    def remember(cell: NotebookNode, **_: object) -> None:
        nonlocal at
        at = f"cell '{cell.id}'"

    client = NotebookClient(
        nb,
        config=CONFIG,
        timeout=timeout,
        kernel_name=KERNEL,
        record_timing=timing,
        coalesce_streams=True,
        on_cell_execute=remember,
        resources={"metadata": {"path": str(folder)}},
    )
    environment = {**os.environ, "IPP_NONINTERACTIVE": "1", RUN_VARIABLE: mark}
    environment |= variables or {}
    error = None
    try:
        client.execute(env=environment)
    except CellTimeoutError:
        error = f"{at}: still running after {timeout:g} s"
    except CellExecutionError as problem:
        error = f"{at}: {problem.ename}: {ANSI.sub('', problem.evalue).strip()}"
    except DeadKernelError:
        error = f"{at}: the kernel died"
    finally:
        left = _end_processes(mark)
    if left and error is None:
        error = "the notebook left processes behind, which were ended: " + ", ".join(left)
    return error


def _end_processes(mark: str) -> list[str]:
    """Wait for the processes of a run; end the remaining ones, and return their names."""
    deadline = time.monotonic() + GRACE
    while (left := watchdog.members(mark, variable=RUN_VARIABLE)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
    if left:
        watchdog.end_all(mark, grace=0, variable=RUN_VARIABLE)
    return names
