"""A training script on ranks of its own, as a batch job would run it, and what it measured.

    one = run("train.py", "--batch", "256", job=Job(ranks=2))
    one.result["step"], one.bindings

The ranks get the mpiexec, the environment and the options that `cluster.start` gives to a
notebook's ranks. A job has a deadline; however it ends, none of its processes is left, not even
when this process is killed (see `utils.jobs.watchdog`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from utils.jobs import watchdog
from utils.jobs.plan import ATTEMPTS, NOT_STARTED, Plan, Request, refuse_on_a_rank
from utils.jobs.session import Session, Watchdog

DEADLINE = 60.0
# Seconds that a rank waits for the others before it says who is missing; less than the deadline.
PATIENCE = 20.0

# They say how many threads a rank starts.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Open MPI: "[vm:04635] Rank 0 bound to package[0][core:L0]", "Rank 0 is not bound (…)";
# Open MPI 4: "[vm:04635] MCW rank 0 bound to socket 0[core 0[hwt 0]]: [B/.]".
_BINDING = re.compile(r"[Rr]ank (\d+) (?:is )?((?:not )?bound.*)")

# "Data for proc: [prterun-vm-10555@1,0]" … "Binding: package[0][core:L0-3]".
_PLANNED = re.compile(r"Data for proc: \[.*?,(\d+)\].*?Binding: (\S+)", re.DOTALL)


class RunFailed(RuntimeError):
    """The job failed, was late, or printed no result; the message has its last words."""


@dataclass(frozen=True)
class Job:
    """How a script is started.

    Attributes:
        ranks: how many.
        threads: of each rank; None leaves OMP_NUM_THREADS unset, as if forgotten.
        bind: each rank on cores of its own; None: if there are enough cores.
    """

    ranks: int
    threads: int | None = 1
    bind: bool | None = None

    @property
    def label(self) -> str:
        """Such as "2 × 1, bound"; the threads are "?" where nothing says how many."""
        words = {True: ", bound", False: ", not bound", None: ""}[self.bind]
        return f"{self.ranks} × {self.threads or '?'}{words}"


@dataclass(frozen=True)
class Run:
    """A job that ran.

    Attributes:
        result: the JSON object that it printed.
        seconds: from the start of mpiexec to its end.
        command: what was run, for the reader: without the folders.
        bindings: by rank, what mpiexec reported; empty where it reports nothing.
    """

    job: Job
    result: dict
    seconds: float
    command: str
    bindings: dict[int, str] = field(default_factory=dict)


def run(script: str | Path, *arguments: object, job: Job, deadline: float = DEADLINE) -> Run:
    """Run a Python script on MPI ranks; its result is the last JSON object it prints on a line.

    Raises:
        TypeError, ValueError: a job that this machine can't start.
        FileNotFoundError: there is no such script.
        RanksError: there is no usable mpiexec, or this process is a rank itself.
        RunFailed: it ended with an error, was not done after `deadline` seconds, or printed no
            JSON object.
    """
    refuse_on_a_rank()
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}")
    timeout = min(PATIENCE, deadline)
    request = Request(job.ranks, job.threads or 1, job.bind, timeout, launcher="mpiexec")
    plan = Plan.checked(request)
    command = [plan.launcher.path, "-n", str(job.ranks), *plan.mpi_args]
    if plan.launcher.is_open_mpi:
        command.append("--report-bindings")
    command += [sys.executable, str(script), *map(str, arguments)]
    environment = os.environ | plan.environment
    if job.threads is None:
        for name in THREAD_VARIABLES:
            environment.pop(name, None)
    start = time.monotonic()
    status, out, err = _run_and_end(command, environment, deadline)
    seconds = time.monotonic() - start
    shown = " ".join([Path(command[0]).name, *command[1:]]).replace(sys.executable, "python")
    if status:
        raise RunFailed(_failure(shown, status, deadline, out, err))
    return Run(job, _last_object(out, shown), seconds, shown, _bindings(err))


def run_all(
    script: str | Path, jobs: Iterable[Job], *arguments: object, deadline: float = DEADLINE
) -> list[Run]:
    """`run` for one job after the other: jobs that share cores must not run at the same time."""
    return [run(script, *arguments, job=job, deadline=deadline) for job in jobs]


def save(runs: Iterable[Run], path: str | Path) -> None:
    """Write runs to a JSON file."""
    Path(path).write_text(json.dumps([asdict(one) for one in runs], indent=1) + "\n")


def load(path: str | Path) -> list[Run]:
    """The runs that :func:`save` wrote, also on another machine."""
    found = []
    for one in json.loads(Path(path).read_text()):
        bindings = {int(rank): text for rank, text in one.pop("bindings").items()}
        found.append(Run(Job(**one.pop("job")), **one, bindings=bindings))
    return found


def rehearse(topology: str, ranks: int, *options: str) -> dict[int, str]:
    """Where Open MPI's mpiexec would put ranks on a machine that is not here; nothing is started.

    topology: as hwloc describes a synthetic machine, such as "pack:2 numa:1 l3:1 core:4 pu:2":
        two packages of one NUMA domain with four cores of two hardware threads.

    Returns the binding by rank; nothing where mpiexec isn't that of Open MPI 5 or later.

    Raises RunFailed where these options don't work on such a machine.
    """
    plan = Plan.checked(Request(1, bind=False, launcher="mpiexec"))
    if not plan.launcher.is_open_mpi or plan.launcher.release < (5,):
        return {}
    command = [plan.launcher.path, "-n", str(ranks), *options]
    command += ["--display", "map", "--rtos", "donotlaunch", "true"]
    environment = os.environ | plan.environment
    # Its oversubscription is for small machines: here the plan shall fail if it doesn't fit.
    environment.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
    # THISSYSTEM: binding counts as possible, though the machine is not this one.
    environment |= {"HWLOC_SYNTHETIC": topology, "HWLOC_THISSYSTEM": "1"}
    status, out, err = _run_and_end(command, environment, DEADLINE)
    found = _PLANNED.findall(out + err)
    if status or len(found) != ranks:
        raise RunFailed(_failure(" ".join(["mpiexec", *command[1:]]), status, DEADLINE, out, err))
    return {int(rank): binding for rank, binding in found}


# --- the job ----------------------------------------------------------------------------------


def _run_and_end(command: list[str], environment: dict, deadline: float) -> tuple[int, str, str]:
    """Exit status, output and errors; status 124 after the deadline. Nothing of it is left."""
    for _ in range(ATTEMPTS):
        ended = _try_once(command, environment, deadline)
        if not ended[0] or NOT_STARTED not in ended[2]:
            break
    return ended


def _try_once(command: list[str], environment: dict, deadline: float) -> tuple[int, str, str]:
    session = Session()
    try:
        guard = Watchdog(session)
        # Output goes to files: a process that keeps a pipe open can't stall us.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            try:
                status = _wait(command, environment, deadline, session.mark, guard, (out, err))
            finally:
                guard.close()
            return status, _text(out), _text(err)
    finally:
        session.close()


def _wait(command, environment, deadline, mark, guard, streams) -> int:
    process = subprocess.Popen(
        command,
        env=environment | {watchdog.VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        start_new_session=True,
    )
    try:
        guard.tell([(process.pid, psutil.Process(process.pid).create_time())])
        return process.wait(deadline)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            watchdog.end_all(mark)
            process.wait(5)


def _text(stream) -> str:
    stream.seek(0)
    return stream.read()


# --- what it said -----------------------------------------------------------------------------


def _last_object(out: str, shown: str) -> dict:
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    raise RunFailed(
        f"{shown}\nprinted no JSON object: print(json.dumps(…)) on rank 0, on one line.\n"
        f"Its last words:\n{_tail(out)}"
    )


def _bindings(err: str) -> dict[int, str]:
    found = (_BINDING.search(line) for line in err.splitlines())
    return dict(sorted((int(match[1]), match[2]) for match in found if match))


def _failure(shown: str, status: int, deadline: float, out: str, err: str) -> str:
    what = f"ended with status {status}"
    if status == 124:
        what = f"was not done after {deadline:g} s and was ended"
    said = "\n".join(line for line in err.splitlines() if not _BINDING.search(line))
    return f"{shown}\n{what}. Its last words:\n{_tail(said) or _tail(out)}"


def _tail(text: str, most: int = 25) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-most:])
