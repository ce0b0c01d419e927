"""How ranks are started: checked arguments, cores, environment, and the right command."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from torch_mpi.launcher import LauncherError
from utils.jobs import mpiexec_choice, slurm, watchdog
from utils.jobs.errors import RanksError
from utils.jobs.mpiexec_choice import Launcher
from utils.jobs.site import Way, decide, settings

# On a machine that is very busy, Open MPI may give up before it has started a rank.
ATTEMPTS = 3
NOT_STARTED = "listener thread failed to start"

# More ranks than this don't fit on one machine: each takes 100 MB before it imports torch.
MOST_RANKS = 64


# --- what was asked for -----------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What `cluster.start` was asked for, which documents each of them."""

    n: int
    threads: int = 1
    bind: bool | None = None
    timeout: float = 20.0
    env: dict[str, str] | None = None
    launcher: str | None = None
    partition: str | None = None
    time: str | int | None = None
    nodes: int | None = None
    fault_tolerant: bool = False

    def check(self) -> None:
        """Raise TypeError or ValueError for what can't work anywhere."""
        _check_count("n", self.n, "the number of ranks", f"start({2})")
        _check_count("threads", self.threads, "the threads of each rank", "start(2, threads=1)")
        if self.nodes is not None:
            _check_count("nodes", self.nodes, "the number of nodes", "start(4, nodes=2)")
        _check_timeout(self.timeout)
        _checked_env(self.env)


@dataclass
class Plan:
    """How the ranks are to be started: the way, the command, the environment."""

    n: int
    threads: int
    bind: bool
    way: Way
    launcher: Launcher
    environment: dict[str, str]
    mpi_args: list[str]
    fault_tolerant: bool = False
    notes: list[str] = field(default_factory=list)

    @classmethod
    def checked(cls, request: Request) -> Plan:
        """Return the plan for a request; `cluster.start` says what is raised."""
        request.check()
        n, threads = request.n, request.threads
        site = settings()
        way = decide(n * threads, request.launcher, site)
        _check_options(request, way)
        cores = _cores(way)
        _check_size(request, way, cores)
        fits = cores is None or n * threads <= cores
        bind = fits and not _shares_cores(way) if request.bind is None else bool(request.bind)
        launcher = find_launcher()
        environment = _environment(threads, request.timeout, launcher, way) | _checked_env(
            request.env
        )
        mpi_args = (
            _mpiexec_options(launcher, threads, bind)
            if way.launcher == "mpiexec"
            else _srun_options(request, way, launcher, bind)
        )
        if request.fault_tolerant:
            mpi_args = [*_fault_tolerance(way, launcher), *mpi_args]
        plan = cls(n, threads, bind, way, launcher, environment, mpi_args, request.fault_tolerant)
        plan.notes = plan._notes(cores)
        return plan

    def _notes(self, cores: int | None) -> list[str]:
        command = self.launcher.path if self.way.launcher == "mpiexec" else "srun"
        notes = [f"Started with {Path(command).name}: {self.way.reason}."]
        if cores is not None and self.n * self.threads > cores:
            notes.append(
                f"{self.n} ranks of {self.threads} thread(s) share {cores} cores: "
                "fine for learning, not for measuring."
            )
        if is_root() and self.launcher.is_open_mpi:
            notes.append("Running as root: Open MPI is told to allow it.")
        if other := self.launcher.passed_over:
            notes.append(
                f"{other.path} is not used: {other.reason}. This environment's own MPI is. "
                f"{other.remedy}"
            )
        return notes

    @property
    def command(self) -> list[str]:
        """Return what starts the ranks, up to the options."""
        program = self.launcher.path if self.way.launcher == "mpiexec" else "srun"
        gone = [name for name in os.environ if self._must_go(name)]
        # A launcher of ipyparallel can add to the environment, but take nothing from it.
        return ["env", *(f"--unset={name}" for name in gone), program] if gone else [program]

    def _must_go(self, name: str) -> bool:
        # `sbatch --export=LIST` leaves it behind, and srun and mpiexec in the job would drop PATH.
        if name == "SLURM_EXPORT_ENV":
            return True
        # For a job of its own, srun must not see the job that this process is part of.
        inside = name.startswith(("SLURM_", "SBATCH_", "SLURMD_")) and name != "SLURM_CONF"
        return self.way.own_job and inside


def _cores(way: Way) -> int | None:
    """Cores that there are for the ranks; None for a job of their own, which gets what it needs."""
    if way.own_job:
        return None
    job = way.allocation
    return job.cpus if job is not None and job.hosts > 1 else usable_cores()


def _shares_cores(way: Way) -> bool:
    """May other jobs run on the cores that mpiexec would bind to? So without cgroups: it begins
    with the node's first core in each job."""
    job = way.allocation
    return job is not None and not way.own_job and 0 < job.cpus_here < usable_cores()


def _check_size(request: Request, way: Way, cores: int | None) -> None:
    n, threads = request.n, request.threads
    if n > MOST_RANKS and not way.many_hosts:
        raise ValueError(
            f"n={n}: this machine gets at most {MOST_RANKS} ranks (it has {usable_cores()} "
            "cores). More belong in a batch job on a cluster."
        )
    if request.bind and cores is not None and n * threads > cores:
        raise ValueError(
            f"bind=True: {n} ranks of {threads} threads need {n * threads} cores, and this "
            f"machine has {cores}. Start fewer ranks, or leave `bind` out."
        )


def _check_options(request: Request, way: Way) -> None:
    """Refuse options of a Slurm job where there will be none: they would be silently lost."""
    given = [name for name in ("partition", "time", "nodes") if getattr(request, name) is not None]
    if given and not way.own_job:
        raise ValueError(
            f"{', '.join(given)}: only for ranks that get a Slurm job of their own, and these are "
            f'started with {way.launcher} ({way.reason}). Leave it out, or say launcher="slurm".'
        )


def _mpiexec_options(launcher: Launcher, threads: int, bind: bool) -> list[str]:
    """Options of mpiexec; that ranks may outnumber cores is said in the environment."""
    if not bind:
        return ["--bind-to", "none"]
    if launcher.is_open_mpi:
        return ["--map-by", f"slot:PE={threads}:OVERSUBSCRIBE", "--bind-to", "core"]
    return ["--bind-to", "core" if threads == 1 else f"core:{threads}"]


def _fault_tolerance(way: Way, launcher: Launcher) -> list[str]:
    """Options of mpiexec that let the others live on; raises ValueError where there are none."""
    lacks = ""
    if way.launcher != "mpiexec":
        lacks = f"the ranks are started with {way.launcher} ({way.reason})"
    elif way.many_hosts:
        lacks = "the ranks are on several hosts, where Open MPI's recovery is not reliable"
    elif not launcher.is_open_mpi or launcher.release < (5,):
        lacks = f"{launcher.path} is {launcher.version}"
    if lacks:
        raise ValueError(
            f"fault_tolerant=True: that takes mpiexec of Open MPI 5 on one host, and {lacks}. "
            "Leave it out: the first dead rank then ends all, and ranks.restart() gives fresh ones."
        )
    return ["--with-ft", "ulfm"]


def _srun_options(request: Request, way: Way, launcher: Launcher, bind: bool) -> list[str]:
    """Options of srun, within a job or for a job of its own."""
    site = settings()
    options = [
        f"--mpi={site.srun_mpi or slurm.srun_mpi(launcher.is_open_mpi)}",
        "--kill-on-bad-exit=1",
        f"--cpus-per-task={request.threads}",
        f"--cpu-bind={'cores' if bind else 'none'}",
    ]
    if not way.own_job:
        return [*options, "--overlap"]
    given = {
        "partition": request.partition or _chosen("PARTITION") or site.partition,
        "time": request.time or site.time,
        "account": _chosen("ACCOUNT") or site.account,
        "nodes": request.nodes,
    }
    per_node = math.ceil(request.n / request.nodes) if request.nodes else site.ranks_per_node
    given["ntasks-per-node"] = min(per_node, request.n)
    options += [f"--{name}={value}" for name, value in given.items() if value] + site.options
    # The site has its own among `options`, and srun takes the last one.
    reservation = _chosen("RESERVATION")
    return [*options, f"--reservation={reservation}"] if reservation else options


def _chosen(what: str) -> str:
    """What the user chose for the server's job, on the hub's page: further jobs have the same."""
    return os.environ.get(f"SBATCH_{what}", "")


def _check_count(name: str, value: object, what: str, example: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}={value!r}: {what} must be a whole number, as in {example}, "
            f"not {type(value).__name__}"
        )
    if value < 1:
        raise ValueError(f"{name}={value}: {what} must be at least 1, as in {example}")


def _check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: must be a number of seconds, such as 20.0")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds, and finite")


def _checked_env(env: dict[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: names and values must be text, not {name!r}: {value!r}")
    return dict(env or {})


def _environment(threads: int, timeout: float, launcher: Launcher, way: Way) -> dict[str, str]:
    """Variables for the ranks; what the user has set for MPI in the own environment stays."""
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "MPI_BACKEND_TIMEOUT": f"{timeout:g}",
        # JupyterLab starts kernels without it on PATH; scripts that ranks start need it.
        "PATH": f"{Path(launcher.path).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    unless_set = {
        # Open MPI's OFI transport costs 1 s of every MPI_Init; ranks here talk by memory.
        "OMPI_MCA_btl": "^ofi",
        # Between machines, larger messages than this first ask, and wait for an answer that stands
        # behind the data of the other direction: 4 MiB instead of 64 KiB.
        "OMPI_MCA_btl_tcp_eager_limit": str(4 * 1024**2),
        # More ranks than cores are allowed: Open MPI 5, then 4. `slot`: in a batch job on several
        # machines the ranks must not all land on the first one.
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        # PyTorch's profiler would print two lines of its own per rank at every use.
        "KINETO_LOG_LEVEL": "6",
    }
    if not way.many_hosts:
        # Where there is no fabric, Open MPI's windows complain of one on each rank.
        unless_set["OMPI_MCA_osc"] = "^ucx"
    elif way.launcher == "mpiexec":
        # It reaches the other nodes by a step of the Slurm job. That of a second mpiexec, for a
        # program beside a notebook's ranks, would wait until the ranks are gone.
        unless_set["SLURM_OVERLAP"] = "1"
    if way.launcher != "mpiexec":
        # Slurm's PMIx offers munge, which the wheel's lacks and complains of on each rank.
        unless_set["PMIX_MCA_psec"] = "native"
    if launcher.library:
        unless_set["MPI4PY_LIBMPI"] = launcher.library
    if is_root():
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            fixed[name] = fixed[f"{name}_CONFIRM"] = "1"
    return fixed | {k: v for k, v in unless_set.items() if k not in os.environ}


def is_root() -> bool:
    """Return whether this process runs as root, whom Open MPI refuses until told otherwise."""
    return os.geteuid() == 0


def refuse_on_a_rank() -> None:
    """Raise RanksError where this process is an MPI rank itself."""
    on_rank = watchdog.VARIABLE in os.environ or any(
        os.environ.get(name, "1") not in ("", "0", "1")
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    )
    if on_rank:
        raise RanksError(
            "this code already runs on an MPI rank, and ranks can't start ranks. Call start() "
            "in an ordinary cell, without %%px."
        )


def usable_cores() -> int:
    """Return how many cores this process may use: affinity, without hyper-threads, and quota."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    """A container's limit in cores (cgroup 2), or very many."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return sys.maxsize


# --- mpiexec ----------------------------------------------------------------------------------


def find_launcher() -> Launcher:
    """Return what `mpiexec_choice` finds.

    Raises:
        RanksError: there is no usable mpiexec.
    """
    try:
        return mpiexec_choice.find_launcher()
    except LauncherError as error:
        raise RanksError(str(error)) from None
