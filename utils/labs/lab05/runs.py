"""Runs a training script on separate ranks, as a batch job would, and returns its measurements.

    one = run("train.py", "--batch", "256", job=Job(ranks=2))
    one.result["step"], one.bindings

The ranks use the mpiexec, the environment and the options of `cluster.start`, and they end as
`utils.jobs.mpi_job` promises. If `cluster.start` starts threads, they are threads of one new
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from utils.jobs import mpi_job, program_here, start_plan, thread_plan
from utils.jobs.mpi_job import Python
from utils.jobs.start_plan import Plan, refuse_on_a_rank

DEADLINE = 120.0
# Seconds until a waiting rank reports which ranks are missing. This is less than the deadline.
PATIENCE = 20.0

# The most ranks of a job of this lab.
MOST_RANKS = 4

# These variables set the number of threads of a rank.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Open MPI: "[vm:04635] Rank 0 bound to package[0][core:L0]", "Rank 0 is not bound (…)";
# Open MPI 4: "[vm:04635] MCW rank 0 bound to socket 0[core 0[hwt 0]]: [B/.]".
_BINDING = re.compile(r"[Rr]ank (\d+) (?:is )?((?:not )?bound.*)")

# A script begins lines about its progress with this, on its standard error.
PROGRESS = "> "

# "Data for proc: [prterun-vm-10555@1,0]" … "Binding: package[0][core:L0-3]".
_PLANNED = re.compile(r"Data for proc: \[.*?,(\d+)\].*?Binding: (\S+)", re.DOTALL)

# What Open MPI 5.0.11 answers for two ranks on the lab's server.
_SERVER = "pack:2 numa:1 l3:1 core:4 pu:2"
_ANSWERS = {
    (_SERVER, 2, "--bind-to core"): ("package[0][core:L0]", "package[0][core:L1]"),
    (_SERVER, 2, "--map-by ppr:1:numa --bind-to core"): (
        *("package[0][core:L0]", "package[1][core:L4]"),
    ),
    (_SERVER, 2, "--map-by ppr:1:numa:PE=4 --bind-to core"): (
        *("package[0][core:L0-3]", "package[1][core:L4-7]"),
    ),
}


class RunFailed(RuntimeError):
    """The job failed, was late, or printed no result; the message has its last output."""


@dataclass(frozen=True)
class Job:
    """How to start a script.

    Attributes:
        threads: threads of each rank; None leaves OMP_NUM_THREADS unset, as if forgotten.
        bind: whether each rank gets its own cores; None binds if there are enough cores.
    """

    ranks: int
    threads: int | None = 1
    bind: bool | None = None

    @property
    def label(self) -> str:
        """Return words such as "2 × 1, bound", with "?" for an unknown number of threads."""
        words = {True: ", bound", False: ", not bound", None: ""}[self.bind]
        return f"{self.ranks} × {self.threads or '?'}{words}"


@dataclass(frozen=True)
class Run:
    """A job that ran.

    Attributes:
        job: how it was started.
        result: the JSON object that it printed.
        seconds: from the start of mpiexec to its end.
        command: the command without folders, for the reader.
        bindings: what mpiexec reported for each rank; empty if it reports nothing.
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
        say: a function that gets the command, and then each line of progress as it comes: lines
            that begin with ">" on the script's standard error.

    Raises:
        TypeError, ValueError: this machine can't start the job.
        FileNotFoundError: the script doesn't exist.
        RanksError: there is no usable mpiexec, or this process is a rank itself.
        RunFailed: the job ended with an error, was not done after `deadline` seconds, or printed
            no JSON object.
    """
    refuse_on_a_rank()
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}")
    words = [str(script), *map(str, arguments)]
    if thread_plan.is_chosen(None):
        return _run_here(words, job, deadline, say)
    timeout = min(PATIENCE, deadline)
    plan = Plan(job.ranks, job.threads or 1, job.bind, timeout, launcher="mpiexec")
    options = ["-n", str(job.ranks), *plan.mpi_args]
    if plan.launcher.is_open_mpi:
        options.append("--report-bindings")
    environment = os.environ | plan.environment
    if job.threads is None:
        environment = {k: v for k, v in environment.items() if k not in THREAD_VARIABLES}
    # The reader can type this command. We may fork the ranks instead, with the same result.
    shown = " ".join(["mpiexec", *options, "python", *words])
    if say:
        say(shown)
    with contextlib.closing(Python(plan)) as python:
        command = [plan.launcher.path, *options, *python.command, *words]
        ended = mpi_job.run(command, environment, deadline, watch=say and _Progress(say))
    if ended.status:
        raise RunFailed(_failure(shown, ended, deadline))
    return Run(job, _last_object(ended.out, shown), ended.seconds, shown, _bindings(ended.err))


def _run_here(
    words: list[str], job: Job, deadline: float, say: Callable[[str], object] | None
) -> Run:
    """Run the job on ranks that are threads of one new process."""
    shown = " ".join([f"{job.ranks} rank(s) in one process: python", *words])
    if say:
        say(shown)
    threads = job.threads or 1
    watch = _Progress(say) if say else None
    ended = program_here.run(job.ranks, words, deadline, threads=threads, watch=watch)
    if ended.status:
        raise RunFailed(_failure(shown, ended, deadline))
    unbound = replace(job, bind=False)
    return Run(unbound, _last_object(ended.out, shown), ended.seconds, shown)


def usable_cores() -> int:
    """Return how many ranks of a job can compute at the same time, each on its own core.

    If ranks are threads, this is :data:`MOST_RANKS`, because each rank's clock runs as if the rank
    had its own core.
    """
    return MOST_RANKS if thread_plan.is_chosen(None) else start_plan.usable_cores()


@dataclass
class _Progress:
    """Passes each line of progress to `say` once."""

    say: Callable[[str], object]
    count: int = 0

    def __call__(self, err: str) -> None:
        lines = [line for line in err.splitlines(keepends=True) if line.startswith(PROGRESS)]
        for line in lines[self.count :]:
            if line.endswith("\n"):  # otherwise the rest of the line is still missing
                self.say(f"  {line.removeprefix(PROGRESS).rstrip()}")
                self.count += 1


def save(runs: Iterable[Run], path: str | Path) -> None:
    """Write runs to a JSON file."""
    Path(path).write_text(
        json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8"
    )


def load(path: str | Path) -> list[Run]:
    """Return the runs that :func:`save` wrote, on this or another machine."""
    runs = []
    for fields in json.loads(Path(path).read_text(encoding="utf-8")):
        job = Job(**fields.pop("job"))
        bindings = {int(rank): text for rank, text in fields.pop("bindings").items()}
        runs.append(Run(job, **fields, bindings=bindings))
    return runs


def series(folder: str | Path) -> dict[int, dict]:
    """Return the results of the newest job by rank count, as `train.py --out` writes them.

    Args:
        folder: contains a folder of JSON files for each job.

    Raises:
        FileNotFoundError: no job has written results.
    """
    written: dict[Path, list[Path]] = {}
    for file in Path(folder).glob("*/*.json"):
        written.setdefault(file.parent, []).append(file)
    if not written:
        raise FileNotFoundError(f"no job has written results below {folder}")
    newest = max(written.values(), key=lambda files: max(file.stat().st_mtime for file in files))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in newest]
    return dict(sorted((len(result["ranks"]), result) for result in results))


def rounds_of(
    result: dict, strategy: str, minibatch: int, scaling: str = "strong", what: str = "step"
) -> list[float]:
    """Return the seconds of each round of one case of a result.

    Args:
        minibatch: the size for all ranks together in strong scaling, per rank in weak scaling.
        what: "step", or "compute" for a step without communication.

    Raises:
        LookupError: the result doesn't contain this case.
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
    """Return the median over the rounds of compute time divided by step time.

    Without communication, the ranks are independent processes, which no strategy can beat.
    """
    step = rounds_of(result, strategy, minibatch)
    alone = rounds_of(result, strategy, minibatch, what="compute")
    return float(np.median(np.divide(alone, step)))


def rehearse(topology: str, ranks: int, *options: str) -> dict[int, str]:
    """Return where Open MPI's mpiexec would put ranks on a machine that you don't have.

    This starts no ranks.

    Args:
        topology: hwloc's description of a synthetic machine. For example, "pack:2 numa:1 l3:1
            core:4 pu:2" means two packages, each with one NUMA domain of four cores, and each core
            with two hardware threads.

    Returns:
        The binding by rank; nothing unless mpiexec belongs to Open MPI 5 or later. Without MPI,
        what Open MPI 5.0.11 answers for the lab's plans.

    Raises:
        RunFailed: these options don't work on this machine.
    """
    if thread_plan.missing():
        return dict(enumerate(_ANSWERS.get((topology, ranks, " ".join(options)), ())))
    plan = Plan(1, bind=False, launcher="mpiexec")
    if not plan.launcher.is_open_mpi or plan.launcher.release < (5,):
        return {}
    command = [plan.launcher.path, "-n", str(ranks), *options]
    command += ["--display", "map", "--rtos", "donotlaunch", "true"]
    environment = os.environ | plan.environment
    # The plan allows oversubscription for small machines, but here a bad plan must fail.
    environment.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
    # HWLOC_THISSYSTEM lets binding count as possible, although the machine isn't this one.
    environment |= {"HWLOC_SYNTHETIC": topology, "HWLOC_THISSYSTEM": "1"}
    ended = mpi_job.run(command, environment, DEADLINE)
    planned = _PLANNED.findall(ended.out + ended.err)
    if ended.status or len(planned) != ranks:
        raise RunFailed(_failure(" ".join(["mpiexec", *command[1:]]), ended, DEADLINE))
    return {int(rank): binding for rank, binding in planned}


# --- the output of a job ----------------------------------------------------------------------


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


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-25:])
