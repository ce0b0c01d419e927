"""One run of an assembled notebook under nbval, in the sandbox and with a deadline.

``ddl-labs rerun`` is here, too. The notebook of a result holds a student's code, which under
JupyterLab or nbval has the instructor's permissions. Here it has no more than while it was graded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import nbformat
import psutil
from nbformat import NotebookNode

from utils.course.execute import RUN_VARIABLE
from utils.course.notebook import NotebookError, dumps
from utils.jobs import sandbox_command, watchdog
from utils.jobs.box_plan import GIVEN
from utils.jobs.thread_plan import VARIABLE as WHERE

from .grading_options import SandboxOptions
from .results import End, Record
from .sandbox import SHARED_FILES, WORK, Box, font_lists, make_box, prepare, require
from .submissions import MB

#: Lines of a cell's output that a rerun prints.
MOST_LINES = 40
KERNEL_NAME = "graded"
#: With fewer free bytes a run's reports fail, and without a sandbox its answers may fail, too.
LEAST_FREE = 32 * MB
#: Seconds between two looks at the memory of a run.
LOOK = 0.4
#: Open files of a run that count as no memory, and the bytes that Linux may hold for each further
#: one, in a socket's buffers.
FREE_FILES = 600
BEHIND_A_FILE = 8 * MB
START_KERNEL = "from ipykernel.kernelapp import launch_new_instance as start; start()"


@dataclass
class Run:
    """The records of one run, and how it ended.

    Attributes:
        end: Why it ended early; None if it did not.
        fault: How this machine made the run fail; then the run says nothing about the answers.
        out_of_memory: Whether the system killed a process during the run because memory ran out.
    """

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    end: str | None = None
    log: str = ""
    fault: str = ""
    out_of_memory: bool = False


def run(nb: NotebookNode, box: Box, job: Path, *, slot: int = 0, stop: Event | None = None) -> Run:
    """Run a notebook, and return when every process that it started has ended.

    The folder `job` is empty at first, and `report.xml` (JUnit) and `notebook.ipynb` stay there. If
    `stop` is set, the run ends at once.
    """
    job.mkdir(parents=True, exist_ok=True)
    prepare(job)
    (job / "notebook.ipynb").write_text(dumps(nb), encoding="utf-8")
    _write_kernelspec(job, box, box.inner(job, slot))
    mark = uuid.uuid4().hex
    start = time.monotonic()
    killed_before = oom_kills()
    with (job / "log").open("wb") as log:
        process = subprocess.Popen(
            box.outer(job, _pytest(job, box)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=job,
            env=_environment(job, box, mark),
            start_new_session=True,
        )
        try:
            end = _watch(process, box, mark, start, stop)
        finally:
            _end(process, mark)
    result = Run(_records(job / "cells.jsonl"), time.monotonic() - start, end)
    result.log = (job / "log").read_text(encoding="utf-8", errors="replace")[-4000:]
    if result.end is None:
        result.end = result.records[-1]["end"] if result.records else None
        cells = [cell.id for cell in nb.cells if cell.cell_type == "code"]
        free = shutil.disk_usage(job).free
        killed = oom_kills() - killed_before
        result.fault = fault(result, cells, process.returncode, killed, free)
        result.out_of_memory = killed > 0
    for name in ("etc", "jupyter", "runtime", "tmp", WORK, SHARED_FILES):
        shutil.rmtree(job / name, ignore_errors=True)
    for name in ("log", "cells.jsonl"):
        (job / name).unlink(missing_ok=True)
    if box.by_user:
        shutil.rmtree(box.folder_of_ranks(slot), ignore_errors=True)
    return result


def _pytest(job: Path, box: Box) -> list[str]:
    """Return the command that runs nbval with no plugin except ours."""
    return [
        *(sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={job}"),
        *("-p", "utils.grading.plugin", "-p", "nbval.plugin"),
        *("-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:warnings"),
        *("--color=no", "-q"),
        *("--nbval", f"--nbval-kernel-name={KERNEL_NAME}"),
        *(f"--nbval-cell-timeout={box.limits.cell}", f"--junitxml={job / 'report.xml'}"),
        *(f"--grading-log={job / 'cells.jsonl'}", str(job / "notebook.ipynb")),
    ]


def _write_kernelspec(job: Path, box: Box, sandbox: list[str]) -> None:
    """Describe the kernel for Jupyter: an ordinary one, whose ranks run in boxes.

    Args:
        sandbox: The command that runs a program in the box of a rank.
    """
    folder = job / "jupyter" / "kernels" / KERNEL_NAME
    folder.mkdir(parents=True)
    fonts = job / "tmp" / "matplotlib"  # making these lists anew would take seconds
    fonts.mkdir(parents=True)
    for path in font_lists():
        shutil.copy(path, fonts)
    variables = box.variables() | {
        "HOME": str(job / "tmp"),
        "TMPDIR": str(job / "tmp"),
        "MPLCONFIGDIR": str(fonts),
        WHERE: "boxes",
        sandbox_command.VARIABLE: json.dumps(sandbox),
        GIVEN: json.dumps(box.given),
    }
    program = f"import os; os.chdir({str(job / WORK)!r}); {START_KERNEL}"
    spec = {
        "argv": [sys.executable, "-P", "-c", program, "-f", "{connection_file}"],
        "display_name": "graded",
        "language": "python",
        "env": variables,
    }
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def _environment(job: Path, box: Box, mark: str) -> dict[str, str]:
    (job / "tmp").mkdir(exist_ok=True)
    base = {"PATH": os.environ["PATH"], "HOME": str(job), "LANG": "C.UTF-8"}
    if not box.walls:
        base = box.environment()
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {
        **base,
        **kept,
        "TMPDIR": str(job / "tmp"),
        "JUPYTER_PATH": str(job / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(job / "runtime"),
        "JUPYTER_NO_CONFIG": "1",
        "IPYTHONDIR": str(job / "tmp"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        RUN_VARIABLE: mark,
    }


def fault(result: Run, cells: list[str], status: int, killed: int, free: int) -> str:
    """Return how this machine made a run fail that ended by itself; "" if the run counts.

    Args:
        result: The run.
        cells: Ids of the code cells.
        status: Pytest's exit status, which bubblewrap passes on. It is 0 or 1 if pytest ran all
            cells; another status is ours if the last record says why the session ended.
        killed: Number of processes that the system killed during the run to free memory.
        free: Bytes left on the disk.
    """
    if free < LEAST_FREE:
        return f"The disk with the results is full ({free // MB} MB left)."
    if result.end:
        died = killed > 0 and result.end in {End.KERNEL, End.RANKS}
        return "The system killed a process to free memory. Use a smaller -j." if died else ""
    if status not in (0, 1):
        last = (result.log.strip().splitlines() or ["it printed nothing"])[-1]
        return f"pytest ended with {_status(status)}: {last[:200]}"
    missing = set(cells) - {record["cell"] for record in result.records}
    if missing:
        return f"pytest reported nothing about {len(missing)} of {len(cells)} cells."
    return ""


def _status(status: int) -> str:
    """Return the name of a signal or the exit status; bubblewrap's status is 128 + the signal."""
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"status {status}"


def oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory since the machine started."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(
            Path("/proc/vmstat").read_text(encoding="utf-8").partition("\noom_kill ")[2].split()[0]
        )
    return 0


def _records(path: Path) -> list[Record]:
    """Return the records that the plugin wrote; a killed run may leave half a line."""
    records = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records


# --- deadline, memory, the end --------------------------------------------------------------------


def _watch(
    process: subprocess.Popen[bytes], box: Box, mark: str, start: float, stop: Event | None
) -> str | None:
    """Wait for the end of the run; return why it was ended early, or None."""
    why = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
            return why
        if stop is not None and stop.is_set():
            return End.STOPPED
        if time.monotonic() - start > box.limits.total:
            return End.TOTAL_TIME
        if why is None and use_more(_processes(process.pid, box, mark), box.limits.memory):
            why = End.MEMORY
            _end_kernel(process.pid)


def _processes(pid: int, box: Box, mark: str) -> list[psutil.Process]:
    """Return all processes of a run; without a sandbox, forked ranks are not its descendants."""
    processes = set(watchdog.family(pid))
    if not box.walls:
        processes |= set(watchdog.members(mark, variable=RUN_VARIABLE))
    return list(processes)


def use_more(processes: list[psutil.Process], limit: int) -> bool:
    """Return whether these processes use more bytes of memory that they share with nobody else.

    Linux counts the shares of shared memory at every request, which is slow. So we ask only if the
    processes hold more than the limit, counting shared memory for each of them.
    """
    left = limit - _behind_files(processes)
    return sum(map(_held, processes)) > left and sum(map(_own_memory, processes)) > left


def _held(process: psutil.Process) -> int:
    """Return the bytes that a process holds, with everything that it shares."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _behind_files(processes: list[psutil.Process]) -> int:
    """Return how many bytes Linux may hold for the sockets and pipes of many open files."""
    count = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            count += process.num_fds()
    return max(0, count - FREE_FILES) * BEHIND_A_FILE


def _written(process: psutil.Process) -> int:
    """Return the bytes that a process has written, with all memory shared with its forks."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_info()
        return int(max(0, memory.rss - getattr(memory, "shared", 0)))
    return 0


def _own_memory(process: psutil.Process) -> int:
    """Return the bytes that a process has written, with its share of the memory of its forks.

    If the system doesn't report shares, shared memory counts for each process, which is too much.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
        kinds = ("Pss_Anon:", "Pss_Shmem:")  # shared memory without a file counts, too
        return sum(int(text.partition(kind)[2].split()[0]) for kind in kinds) * 1024
    return _written(process)


def _end_kernel(pid: int) -> None:
    """Kill the kernel, but not pytest: nbval then reports the cell and writes its report."""
    for process in watchdog.family(pid):
        with contextlib.suppress(psutil.Error):
            if "--nbval" in process.cmdline() and process.name() != "bwrap":
                for child in process.children():
                    child.kill()
                return


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the run and every process that it has started, even if the parent is gone."""
    family = watchdog.family(process.pid)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait(10)
    watchdog.end_all(mark, grace=0, limit=10, variable=RUN_VARIABLE)


# --- running a notebook again for a person --------------------------------------------------------


def rerun(path: Path, options: SandboxOptions) -> int:
    """Run a notebook and print its outputs; return 0 if every check has passed, 1 otherwise."""
    nb = notebook(path)
    box = make_box(options)
    with tempfile.TemporaryDirectory(prefix="grading-") as scratch:
        require(box, Path(scratch))
        done = run(nb, box, Path(scratch) / "run")
    for line in outcomes(done):
        print(harmless(line))
    failed = any(one["verdicts"] and one["outcome"] != "passed" for one in done.records)
    return 1 if failed or done.end or done.fault else 0


def notebook(path: Path) -> NotebookNode:
    """Return the notebook in a file or a folder `run-1`. Raises NotebookError if there is none."""
    path = path / "notebook.ipynb" if path.is_dir() else path
    try:
        nb: NotebookNode = nbformat.read(path, as_version=4)
    except OSError as error:
        raise NotebookError(
            f"{path} can't be read: {error.strerror}. Give a path such as "
            "RESULTS/students/NAME/LAB/run-1/notebook.ipynb."
        ) from error
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        raise NotebookError(f"{path} is not a notebook: {error}") from error
    return nb


def harmless(line: str) -> str:
    """Return the line without control characters, because a student has printed it."""
    return "".join(one if one.isprintable() or one == "\t" else "�" for one in line)


def outcomes(done: Run) -> Iterator[str]:
    """Yield a line for each cell's outcome, and its outputs if it failed or is a check."""
    for record in done.records:
        passed = record["outcome"] == "passed"
        yield f"{'✓' if passed else '✗'} cell '{record['cell']}'"
        if not passed or record["verdicts"]:
            yield from _printed(record)
    if done.end or done.fault:
        yield f"The run ended early: {done.end or done.fault}"
    yield f"{len(done.records)} cells, {done.seconds:.0f} s"


def _printed(record: Record) -> Iterator[str]:
    """Yield the first lines of a cell's outputs."""
    lines = "\n".join(output.get("text", "") for output in record["outputs"]).splitlines()
    yield from (f"    {line}" for line in lines[:MOST_LINES])
    if len(lines) > MOST_LINES:
        yield f"    … and {len(lines) - MOST_LINES} more lines"
