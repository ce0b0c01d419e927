"""A training script on ranks of its own, as a batch job would run it, and what it measured.

    one = run("train.py", "--batch", "256", job=Job(ranks=2))
    one.result["step"], one.bindings

The ranks get the mpiexec, the environment and the options that `cluster.start` gives to a
notebook's ranks, and end as `utils.jobs.mpi_job` promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from utils.jobs import mpi_job
from utils.jobs.mpi_job import Python
from utils.jobs.start_plan import Plan, refuse_on_a_rank

DEADLINE = 120.0
# Seconds that a rank waits for the others before it says who is missing; less than the deadline.
PATIENCE = 20.0

# They say how many threads a rank starts.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Open MPI: "[vm:04635] Rank 0 bound to package[0][core:L0]", "Rank 0 is not bound (…)";
# Open MPI 4: "[vm:04635] MCW rank 0 bound to socket 0[core 0[hwt 0]]: [B/.]".
_BINDING = re.compile(r"[Rr]ank (\d+) (?:is )?((?:not )?bound.*)")

# How a script says how far it is, on its standard error.
PROGRESS = "> "

# "Data for proc: [prterun-vm-10555@1,0]" … "Binding: package[0][core:L0-3]".
_PLANNED = re.compile(r"Data for proc: \[.*?,(\d+)\].*?Binding: (\S+)", re.DOTALL)


class RunFailed(RuntimeError):
    """The job failed, was late, or printed no result; the message has its last words."""


@dataclass(frozen=True)
class Job:
    """How a script is started.

    Attributes:
        threads: of each rank; None leaves OMP_NUM_THREADS unset, as if forgotten.
        bind: each rank on cores of its own; None: if there are enough cores.
    """

    ranks: int
    threads: int | None = 1
    bind: bool | None = None

    @property
    def label(self) -> str:
        """Return words such as "2 × 1, bound"; the threads are "?" where nothing says how many."""
        words = {True: ", bound", False: ", not bound", None: ""}[self.bind]
        return f"{self.ranks} × {self.threads or '?'}{words}"


@dataclass(frozen=True)
class Run:
    """A job that ran.

    Attributes:
        job: how it was started.
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


def run(
    script: str | Path,
    *arguments: object,
    job: Job,
    deadline: float = DEADLINE,
    say: Callable[[str], object] | None = None,
) -> Run:
    """Run a Python script on MPI ranks; its result is the last JSON object it prints on a line.

    Args:
        say: called with the command, and then with each line that begins with ">" on the standard
            error of the script, as it comes.

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
    plan = Plan(job.ranks, job.threads or 1, job.bind, timeout, launcher="mpiexec")
    options = ["-n", str(job.ranks), *plan.mpi_args]
    if plan.launcher.is_open_mpi:
        options.append("--report-bindings")
    words = [str(script), *map(str, arguments)]
    environment = os.environ | plan.environment
    if job.threads is None:
        environment = {k: v for k, v in environment.items() if k not in THREAD_VARIABLES}
    # What the reader can type; the ranks are forked where that makes no difference.
    shown = " ".join(["mpiexec", *options, "python", *words])
    if say:
        say(shown)
    with contextlib.closing(Python(plan)) as python:
        command = [plan.launcher.path, *options, *python.command, *words]
        ended = mpi_job.run(command, environment, deadline, watch=say and _Progress(say))
    if ended.status:
        raise RunFailed(_failure(shown, ended, deadline))
    return Run(job, _last_object(ended.out, shown), ended.seconds, shown, _bindings(ended.err))


@dataclass
class _Progress:
    """Hands on each line of progress, once."""

    say: Callable[[str], object]
    count: int = 0

    def __call__(self, err: str) -> None:
        lines = [line for line in err.splitlines(keepends=True) if line.startswith(PROGRESS)]
        for line in lines[self.count :]:
            if line.endswith("\n"):  # else the rest of it is still to come
                self.say(f"  {line.removeprefix(PROGRESS).rstrip()}")
                self.count += 1


def save(runs: Iterable[Run], path: str | Path) -> None:
    """Write runs to a JSON file."""
    Path(path).write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


def load(path: str | Path) -> list[Run]:
    """Return the runs that :func:`save` wrote, also on another machine."""
    runs = []
    for fields in json.loads(Path(path).read_text()):
        job = Job(**fields.pop("job"))
        bindings = {int(rank): text for rank, text in fields.pop("bindings").items()}
        runs.append(Run(job, **fields, bindings=bindings))
    return runs


def series(folder: str | Path) -> dict[int, dict]:
    """Return results by rank count of the newest job that wrote some, as `train.py --out` does.

    Args:
        folder: has a folder of JSON files for each job.

    Raises:
        FileNotFoundError: no job has written any.
    """
    written: dict[Path, list[Path]] = {}
    for file in Path(folder).glob("*/*.json"):
        written.setdefault(file.parent, []).append(file)
    if not written:
        raise FileNotFoundError(f"no job has written results below {folder}")
    newest = max(written.values(), key=lambda files: max(file.stat().st_mtime for file in files))
    results = [json.loads(file.read_text()) for file in newest]
    return dict(sorted((len(result["ranks"]), result) for result in results))


def rounds_of(
    result: dict, strategy: str, minibatch: int, scaling: str = "strong", what: str = "step"
) -> list[float]:
    """Return the seconds of each round of one case of a result.

    Args:
        minibatch: of all ranks together in strong scaling, of each rank in weak scaling.
        what: "step", or "compute" for the same without communication.

    Raises:
        LookupError: this case was not run.
    """
    ranks = len(result["ranks"])
    if ranks == 1:
        scaling = "strong"  # both are the same
    wanted = (strategy, scaling, minibatch * (ranks if scaling == "weak" else 1))
    for case in result["cases"]:
        if (case["strategy"], case["scaling"], case["minibatch"]) == wanted:
            return case[what]
    raise LookupError(f"{ranks} rank(s): no {scaling} scaling of {strategy}, {minibatch} samples")


def share_of_limit(result: dict, strategy: str, minibatch: int) -> float:
    """Return the time without communication divided by that with it, the median over the rounds.

    Without communication the ranks are independent processes, which no strategy can beat.
    """
    step = rounds_of(result, strategy, minibatch)
    alone = rounds_of(result, strategy, minibatch, what="compute")
    return float(np.median(np.divide(alone, step)))


def rehearse(topology: str, ranks: int, *options: str) -> dict[int, str]:
    """Return where Open MPI's mpiexec would put ranks on a machine that is not here.

    Nothing is started.

    Args:
        topology: as hwloc describes a synthetic machine, such as "pack:2 numa:1 l3:1 core:4 pu:2":
            two packages of one NUMA domain with four cores of two hardware threads.

    Returns:
        The binding by rank; nothing where mpiexec isn't that of Open MPI 5 or later.

    Raises:
        RunFailed: these options don't work on such a machine.
    """
    plan = Plan(1, bind=False, launcher="mpiexec")
    if not plan.launcher.is_open_mpi or plan.launcher.release < (5,):
        return {}
    command = [plan.launcher.path, "-n", str(ranks), *options]
    command += ["--display", "map", "--rtos", "donotlaunch", "true"]
    environment = os.environ | plan.environment
    # Its oversubscription is for small machines: here the plan shall fail if it doesn't fit.
    environment.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
    # THISSYSTEM: binding counts as possible, though the machine is not this one.
    environment |= {"HWLOC_SYNTHETIC": topology, "HWLOC_THISSYSTEM": "1"}
    ended = mpi_job.run(command, environment, DEADLINE)
    planned = _PLANNED.findall(ended.out + ended.err)
    if ended.status or len(planned) != ranks:
        raise RunFailed(_failure(" ".join(["mpiexec", *command[1:]]), ended, DEADLINE))
    return {int(rank): binding for rank, binding in planned}


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
    matches = (_BINDING.search(line) for line in err.splitlines())
    return dict(sorted((int(match[1]), match[2]) for match in matches if match))


def _failure(shown: str, ended: mpi_job.Ended, deadline: float) -> str:
    reason = f"ended with status {ended.status}"
    if ended.status == mpi_job.LATE:
        reason = (
            f"was not done after {deadline:g} s and was ended. Is this machine busy with something "
            f"else? Give it more time: deadline={2 * deadline:g}"
        )
    err = "\n".join(line for line in ended.err.splitlines() if not _BINDING.search(line))
    return f"{shown}\n{reason}. Its last words:\n{_tail(err) or _tail(ended.out)}"


def _tail(text: str, most: int = 25) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-most:])
