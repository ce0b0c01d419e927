"""Plans a start of ranks: checks the arguments, and chooses cores, environment and command."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from utils.jobs import RanksError, launch_variables, other_backend, slurm, watchdog
from utils.jobs.site import Launcher, Way, decide, find_launcher, settings

# More ranks don't fit on one machine, because each needs 100 MB before it imports torch.
MOST_RANKS = 64


class Plan:
    """A plan to start ranks, with the launcher, the command and the environment.

    `cluster.start` documents the arguments and the exceptions.

    Attributes:
        n, threads, bind, fault_tolerant: the arguments, or the values chosen for them.
        way: whether mpiexec or Slurm starts the ranks, and why.
        launcher: the mpiexec that was found.
        environment: variables for the ranks, in addition to the variables of this process.
        mpi_args: options of the launcher.
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
        check_count("n", n, "the number of ranks", "start(2)")
        check_count("threads", threads, "the threads of each rank", "start(2, threads=1)")
        if nodes is not None:
            check_count("nodes", nodes, "the number of nodes", "start(4, nodes=2)")
        check_timeout(timeout)
        check_env(env)
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
        """Return the command that starts the ranks, without its options."""
        program = self.launcher.path if self.way.launcher == "mpiexec" else "srun"
        gone = [name for name in os.environ if self._must_go(name)]
        # A launcher of ipyparallel can add variables, but it can't remove any.
        return ["env", *(f"--unset={name}" for name in gone), program] if gone else [program]

    def greeting(self, fresh: bool = False) -> str:
        """Return what a notebook says when the ranks have started."""
        lacking = f" {other_backend.LACKING}" if other_backend.is_gloo() else ""
        if self.n > 1:
            return f"{self.n} {'fresh ' * fresh}MPI ranks have started.{lacking}"
        return f"{'A fresh' if fresh else '1'} MPI rank has started.{lacking}"

    def _must_go(self, name: str) -> bool:
        # `sbatch --export=LIST` sets it, and srun and mpiexec in the job would then drop PATH.
        if name == "SLURM_EXPORT_ENV":
            return True
        # If the ranks get a separate job, srun must not see the job of this process.
        inside = name.startswith(("SLURM_", "SBATCH_", "SLURMD_")) and name != "SLURM_CONF"
        return self.way.own_job and inside

    def _check_size(self, cores: int | None, bind: bool | None) -> None:
        needed = self.n * self.threads
        if self.n > MOST_RANKS and not self.way.many_hosts:
            raise ValueError(
                f"n={self.n}: at most {MOST_RANKS} ranks can run on this machine, which has "
                f"{usable_cores()} cores. Use a batch job on a cluster for more."
            )
        if bind and cores is not None and needed > cores:
            raise ValueError(
                f"bind=True: {self.n} ranks of {self.threads} threads need {needed} cores, but "
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
                f"fault_tolerant=True needs mpiexec of Open MPI 5 on one host, but {lacks}. Leave "
                "the option out: then the first dead rank ends all ranks, and ranks.restart() "
                "starts fresh ones."
            )

    def _mpiexec_options(self) -> list[str]:
        """Return options of mpiexec; the environment allows more ranks than cores."""
        if not self.bind:
            return ["--bind-to", "none"]
        threads = self.threads
        if self.launcher.is_open_mpi:
            return ["--map-by", f"slot:PE={threads}:OVERSUBSCRIBE", "--bind-to", "core"]
        return ["--bind-to", "core" if threads == 1 else f"core:{threads}"]

    def _srun_options(self) -> list[str]:
        """Return options of srun, within a job or for a separate job."""
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
        # Further jobs inherit what the user chose for the server's job on the hub's page.
        chosen = os.environ.get
        values = {
            "partition": self._job["partition"] or chosen("SBATCH_PARTITION") or site.partition,
            "time": self._job["time"] or site.time,
            "account": chosen("SBATCH_ACCOUNT") or site.account,
            "nodes": nodes,
            "ntasks-per-node": min(per_node, self.n),
        }
        options = [f"--{name}={value}" for name, value in values.items() if value] + site.options
        # The site's `options` may have a reservation, too, and srun uses the last one.
        reservation = chosen("SBATCH_RESERVATION")
        return [*options, f"--reservation={reservation}"] if reservation else options

    def _environment(self, timeout: float) -> dict[str, str]:
        """Return variables for the ranks; MPI variables that the user has set stay unchanged."""
        folder = Path(self.launcher.path).parent
        fixed = {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "OPENBLAS_NUM_THREADS": str(self.threads),
            "MPI_BACKEND_TIMEOUT": f"{timeout:g}",
            # Scripts that ranks start need mpiexec on PATH, but JupyterLab's kernels don't have it.
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        unless_set = {
            # Open MPI's OFI transport costs 1 s in every MPI_Init, and these ranks use memory.
            "OMPI_MCA_btl": "^ofi",
            # Between machines, a message above this size first asks its receiver, and the answer
            # queues behind data in the other direction. So use 4 MiB instead of 64 KiB.
            "OMPI_MCA_btl_tcp_eager_limit": str(4 * 1024**2),
            # Allow more ranks than cores, in Open MPI 5 and in 4. `slot` keeps the ranks of a batch
            # job on several machines from all starting on the first one.
            "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            # Otherwise PyTorch's profiler prints two lines per rank at every use.
            "KINETO_LOG_LEVEL": "6",
        }
        if not self.way.many_hosts:
            # Without a fabric, Open MPI's windows print a warning about UCX on each rank.
            unless_set["OMPI_MCA_osc"] = "^ucx"
        elif self.way.launcher == "mpiexec":
            # mpiexec reaches other nodes by a step of the Slurm job. Without overlap, a second
            # mpiexec for a program would wait until the notebook's ranks are gone.
            unless_set["SLURM_OVERLAP"] = "1"
        if self.way.launcher != "mpiexec":
            # Slurm's PMIx offers munge, which the wheel's PMIx lacks, with a warning on each rank.
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
                f"{self.n} ranks of {self.threads} thread(s) share {cores} cores, which is fine "
                "for learning, but not for measuring."
            )
        if is_root() and self.launcher.is_open_mpi:
            notes.append("You are root, so the ranks allow Open MPI to run as root.")
        if other := self.launcher.passed_over:
            notes.append(
                f"The ranks use this environment's MPI instead of {other.path}, because "
                f"{other.reason}. {other.remedy}"
            )
        return notes


# --- arguments that can't work anywhere -------------------------------------------------------


def check_count(name: str, value: object, meaning: str, example: str) -> None:
    """Raise TypeError or ValueError if the value is not a number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}={value!r}: {meaning} must be a whole number, as in {example}, "
            f"not {type(value).__name__}"
        )
    if value < 1:
        raise ValueError(f"{name}={value}: {meaning} must be at least 1, as in {example}")


def check_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError if the value is not a finite number of seconds above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: timeout must be a number of seconds, such as 20.0")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout}: timeout must be more than 0 seconds, and finite")


def check_env(env: dict[str, str] | None) -> None:
    """Raise TypeError if names or values of environment variables are no texts."""
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: names and values must be text, not {name!r} and {value!r}")


def _check_job(options: dict[str, object], way: Way) -> None:
    """Raise ValueError for options of a Slurm job if the ranks get no separate job."""
    lost = [name for name, value in options.items() if value is not None]
    if lost and not way.own_job:
        raise ValueError(
            f"{', '.join(lost)} needs ranks in a separate Slurm job, but {way.launcher} starts the "
            f'ranks ({way.reason}). Leave the option out, or use launcher="slurm".'
        )


ON_A_RANK = (
    "This code already runs on {}, and a rank can't start ranks. Call start() in an ordinary "
    "cell, without %%px."
)


def refuse_on_a_rank() -> None:
    """Raise RanksError if this process is an MPI rank itself.

    Otherwise, variables that say so are left over from an earlier launch, and this process drops
    them.
    """
    sizes = [os.environ.get(name, "1") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")]
    says_so = any(size not in ("", "0", "1") for size in sizes)
    variables = launch_variables.present()
    below = bool(variables) and launch_variables.is_below_a_launcher()
    if watchdog.VARIABLE in os.environ or (says_so and below):
        raise RanksError(ON_A_RANK.format("an MPI rank"))
    for name in () if below else variables:
        del os.environ[name]  # the ranks would read it, and refuse to begin


# --- this machine -----------------------------------------------------------------------------


def is_root() -> bool:
    """Return whether this process runs as root, which Open MPI refuses by default."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _cores(way: Way) -> int | None:
    """Return how many cores the ranks have; None for a separate job, which gets enough."""
    if way.own_job:
        return None
    job = way.allocation
    return job.cpus if job is not None and job.hosts > 1 else usable_cores()


def _shares_cores(way: Way) -> bool:
    """Return whether other jobs may run on the cores that mpiexec would bind to.

    This happens without cgroups, because in each job mpiexec begins with the node's first core.
    """
    job = way.allocation
    return job is not None and not way.own_job and 0 < job.cpus_here < usable_cores()


def usable_cores() -> int:
    """Return how many cores this process may use, by affinity (without hyper-threads) and quota."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text(encoding="utf-8"))
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    """Return a container's limit in cores (cgroup 2), or a very large number without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return sys.maxsize
