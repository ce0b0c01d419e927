"""How ranks are started: checked arguments, cores, environment, and the right command."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from utils.jobs import RanksError, slurm, watchdog
from utils.jobs.site import Launcher, Way, decide, find_launcher, settings

# More ranks than this don't fit on one machine: each takes 100 MB before it imports torch.
MOST_RANKS = 64


class Plan:
    """A plan to start ranks: the way, the command, the environment.

    `cluster.start` documents the arguments, and says what is raised.

    Attributes:
        n, threads, bind, fault_tolerant: as they were asked for, or chosen.
        way: whether mpiexec or Slurm starts them, and why.
        launcher: the mpiexec that was found.
        environment: variables to be added to those of this process.
        mpi_args: options of what starts the ranks.
        notes: sentences for the user.
    """

    def __init__(
        self,
        n: int,
        threads: int = 1,
        bind: bool | None = None,
        timeout: float = 20.0,
        env: dict[str, str] | None = None,
        launcher: str | None = None,
        partition: str | None = None,
        time: str | int | None = None,
        nodes: int | None = None,
        fault_tolerant: bool = False,
    ):
        _check_count("n", n, "the number of ranks", "start(2)")
        _check_count("threads", threads, "the threads of each rank", "start(2, threads=1)")
        if nodes is not None:
            _check_count("nodes", nodes, "the number of nodes", "start(4, nodes=2)")
        _check_timeout(timeout)
        _check_env(env)
        self.n = n
        self.threads = threads
        self.fault_tolerant = fault_tolerant
        self.way = decide(n * threads, launcher, settings())
        self._job: dict[str, Any] = {"partition": partition, "time": time, "nodes": nodes}
        _check_job(self._job, self.way)
        cores = _cores(self.way)
        self._check_size(cores, bind)
        fits = cores is None or n * threads <= cores
        self.bind = fits and not _shares_cores(self.way) if bind is None else bool(bind)
        self.launcher: Launcher = find_launcher()
        self.environment = self._environment(timeout) | (env or {})
        if self.way.launcher == "mpiexec":
            self.mpi_args = self._mpiexec_options()
        else:
            self.mpi_args = self._srun_options()
        if fault_tolerant:
            self._check_fault_tolerance()
            self.mpi_args = ["--with-ft", "ulfm", *self.mpi_args]
        self.notes = self._notes(cores)

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

    def _check_size(self, cores: int | None, bind: bool | None) -> None:
        needed = self.n * self.threads
        if self.n > MOST_RANKS and not self.way.many_hosts:
            raise ValueError(
                f"n={self.n}: this machine gets at most {MOST_RANKS} ranks (it has "
                f"{usable_cores()} cores). More belong in a batch job on a cluster."
            )
        if bind and cores is not None and needed > cores:
            raise ValueError(
                f"bind=True: {self.n} ranks of {self.threads} threads need {needed} cores, and "
                f"this machine has {cores}. Start fewer ranks, or leave `bind` out."
            )

    def _check_fault_tolerance(self) -> None:
        lacks = ""
        if self.way.launcher != "mpiexec":
            lacks = f"the ranks are started with {self.way.launcher} ({self.way.reason})"
        elif self.way.many_hosts:
            lacks = "the ranks are on several hosts, where Open MPI's recovery is not reliable"
        elif not self.launcher.is_open_mpi or self.launcher.release < (5,):
            lacks = f"{self.launcher.path} is {self.launcher.version}"
        if lacks:
            raise ValueError(
                f"fault_tolerant=True: that takes mpiexec of Open MPI 5 on one host, and {lacks}. "
                "Leave it out: the first dead rank then ends all, and ranks.restart() gives fresh "
                "ones."
            )

    def _mpiexec_options(self) -> list[str]:
        """Return options of mpiexec; the environment says that ranks may outnumber cores."""
        if not self.bind:
            return ["--bind-to", "none"]
        threads = self.threads
        if self.launcher.is_open_mpi:
            return ["--map-by", f"slot:PE={threads}:OVERSUBSCRIBE", "--bind-to", "core"]
        return ["--bind-to", "core" if threads == 1 else f"core:{threads}"]

    def _srun_options(self) -> list[str]:
        """Return options of srun, within a job or for a job of its own."""
        plugin = settings().srun_mpi or slurm.srun_mpi(self.launcher.is_open_mpi)
        options = [
            f"--mpi={plugin}",
            "--kill-on-bad-exit=1",
            f"--cpus-per-task={self.threads}",
            f"--cpu-bind={'cores' if self.bind else 'none'}",
        ]
        if not self.way.own_job:
            return [*options, "--overlap"]
        return options + self._job_options()

    def _job_options(self) -> list[str]:
        site = settings()
        nodes = self._job["nodes"]
        per_node = math.ceil(self.n / nodes) if nodes else site.ranks_per_node
        # What the user chose for the server's job, on the hub's page: further jobs have the same.
        chosen = os.environ.get
        values = {
            "partition": self._job["partition"] or chosen("SBATCH_PARTITION") or site.partition,
            "time": self._job["time"] or site.time,
            "account": chosen("SBATCH_ACCOUNT") or site.account,
            "nodes": nodes,
            "ntasks-per-node": min(per_node, self.n),
        }
        options = [f"--{name}={value}" for name, value in values.items() if value] + site.options
        # The site has its own among `options`, and srun takes the last one.
        reservation = chosen("SBATCH_RESERVATION")
        return [*options, f"--reservation={reservation}"] if reservation else options

    def _environment(self, timeout: float) -> dict[str, str]:
        """Return variables for the ranks; what the user has set for MPI stays."""
        folder = Path(self.launcher.path).parent
        fixed = {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "OPENBLAS_NUM_THREADS": str(self.threads),
            "MPI_BACKEND_TIMEOUT": f"{timeout:g}",
            # JupyterLab starts kernels without it on PATH; scripts that ranks start need it.
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        unless_set = {
            # Open MPI's OFI transport costs 1 s of every MPI_Init; ranks here talk by memory.
            "OMPI_MCA_btl": "^ofi",
            # Between machines, larger messages than this first ask, and wait for an answer that
            # stands behind the data of the other direction: 4 MiB instead of 64 KiB.
            "OMPI_MCA_btl_tcp_eager_limit": str(4 * 1024**2),
            # More ranks than cores are allowed: Open MPI 5, then 4. `slot`: in a batch job on
            # several machines the ranks must not all land on the first one.
            "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            # PyTorch's profiler would print two lines of its own per rank at every use.
            "KINETO_LOG_LEVEL": "6",
        }
        if not self.way.many_hosts:
            # Where there is no fabric, Open MPI's windows complain of one on each rank.
            unless_set["OMPI_MCA_osc"] = "^ucx"
        elif self.way.launcher == "mpiexec":
            # It reaches the other nodes by a step of the Slurm job. That of a second mpiexec, for a
            # program beside a notebook's ranks, would wait until the ranks are gone.
            unless_set["SLURM_OVERLAP"] = "1"
        if self.way.launcher != "mpiexec":
            # Slurm's PMIx offers munge, which the wheel's lacks and complains of on each rank.
            unless_set["PMIX_MCA_psec"] = "native"
        if self.launcher.library:
            unless_set["MPI4PY_LIBMPI"] = self.launcher.library
        if is_root():
            for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
                fixed |= {name: "1", f"{name}_CONFIRM": "1"}
        return fixed | {k: v for k, v in unless_set.items() if k not in os.environ}

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


# --- arguments that can't work anywhere -------------------------------------------------------


def _check_count(name: str, value: object, meaning: str, example: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}={value!r}: {meaning} must be a whole number, as in {example}, "
            f"not {type(value).__name__}"
        )
    if value < 1:
        raise ValueError(f"{name}={value}: {meaning} must be at least 1, as in {example}")


def _check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: must be a number of seconds, such as 20.0")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds, and finite")


def _check_env(env: dict[str, str] | None) -> None:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: names and values must be text, not {name!r}: {value!r}")


def _check_job(options: dict[str, object], way: Way) -> None:
    """Refuse options of a Slurm job where there will be none: they would be silently lost."""
    lost = [name for name, value in options.items() if value is not None]
    if lost and not way.own_job:
        raise ValueError(
            f"{', '.join(lost)}: only for ranks that get a Slurm job of their own, and these are "
            f'started with {way.launcher} ({way.reason}). Leave it out, or say launcher="slurm".'
        )


def refuse_on_a_rank() -> None:
    """Raise RanksError where this process is an MPI rank itself."""
    sizes = [os.environ.get(name, "1") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")]
    if watchdog.VARIABLE in os.environ or any(size not in ("", "0", "1") for size in sizes):
        raise RanksError(
            "this code already runs on an MPI rank, and ranks can't start ranks. Call start() "
            "in an ordinary cell, without %%px."
        )


# --- this machine -----------------------------------------------------------------------------


def is_root() -> bool:
    """Return whether this process runs as root, whom Open MPI refuses until told otherwise."""
    return os.geteuid() == 0


def _cores(way: Way) -> int | None:
    """Return how many cores the ranks have; None for a job of their own, which gets enough."""
    if way.own_job:
        return None
    job = way.allocation
    return job.cpus if job is not None and job.hosts > 1 else usable_cores()


def _shares_cores(way: Way) -> bool:
    """Return whether other jobs may run on the cores that mpiexec would bind to.

    They may without cgroups: mpiexec begins with the node's first core in each job.
    """
    job = way.allocation
    return job is not None and not way.own_job and 0 < job.cpus_here < usable_cores()


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
    """Return a container's limit in cores (cgroup 2), or very many."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return sys.maxsize
