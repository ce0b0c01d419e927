"""How ranks are started: checked arguments, cores, environment, and the right mpiexec."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from utils.cluster import watchdog

# More ranks than this don't fit on one machine: each takes 100 MB before it imports torch.
MOST_RANKS = 64


class RanksError(RuntimeError):
    """The ranks can't be started or used; the message says why and what to do."""


# --- what was asked for -----------------------------------------------------------------------


@dataclass
class Plan:
    """How the ranks are to be started: checked arguments, launcher, environment."""

    n: int
    threads: int
    bind: bool
    launcher: Launcher
    environment: dict[str, str]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def checked(cls, n, threads, bind, timeout, env) -> Plan:
        """The plan for the arguments of `cluster.start`, which says what is raised."""
        _check_count("n", n, "the number of ranks", f"start({2})")
        _check_count("threads", threads, "the threads of each rank", "start(2, threads=1)")
        if n > MOST_RANKS:
            raise ValueError(
                f"n={n}: this machine gets at most {MOST_RANKS} ranks (it has {usable_cores()} "
                "cores). More belong in a batch job on a cluster."
            )
        _check_timeout(timeout)
        cores = usable_cores()
        if bind and n * threads > cores:
            raise ValueError(
                f"bind=True: {n} ranks of {threads} threads need {n * threads} cores, and this "
                f"machine has {cores}. Start fewer ranks, or leave `bind` out."
            )
        fits = n * threads <= cores
        launcher = find_launcher()
        environment = _environment(threads, timeout, launcher) | _checked_env(env)
        plan = cls(n, threads, fits if bind is None else bool(bind), launcher, environment)
        plan.notes = plan._notes(cores)
        return plan

    def _notes(self, cores: int) -> list[str]:
        notes = []
        if self.n * self.threads > cores:
            notes.append(
                f"{self.n} ranks of {self.threads} thread(s) share {cores} cores: "
                "fine for learning, not for measuring."
            )
        if is_root():
            notes.append("Running as root: Open MPI is told to allow it.")
        if self.launcher.passed_over:
            notes.append(
                f"{self.launcher.passed_over} is not used, as no library that mpi4py can load lies "
                "beside it (MPI4PY_LIBMPI can name one): this environment's own MPI is."
            )
        return notes

    @property
    def mpi_args(self) -> list[str]:
        """Options of mpiexec; that ranks may outnumber cores is said in the environment."""
        if not self.bind:
            return ["--bind-to", "none"]
        if self.launcher.is_open_mpi:
            return ["--map-by", f"slot:PE={self.threads}:OVERSUBSCRIBE", "--bind-to", "core"]
        return ["--bind-to", "core" if self.threads == 1 else f"core:{self.threads}"]


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


def _environment(threads: int, timeout: float, launcher: Launcher) -> dict[str, str]:
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
        # More ranks than cores are allowed: Open MPI 5, then 4. `slot`: in a batch job on several
        # machines the ranks must not all land on the first one.
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        # PyTorch's profiler would print two lines of its own per rank at every use.
        "KINETO_LOG_LEVEL": "6",
    }
    if launcher.library:
        unless_set["MPI4PY_LIBMPI"] = launcher.library
    if is_root():
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            fixed[name] = fixed[f"{name}_CONFIRM"] = "1"
    return fixed | {k: v for k, v in unless_set.items() if k not in os.environ}


def is_root() -> bool:
    """Does this process run as root, whom Open MPI refuses until told otherwise?"""
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
    """How many cores this process may use: its affinity, without hyper-threads, and its quota."""
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


@dataclass(frozen=True)
class Launcher:
    """An mpiexec, and what follows from the choice of it.

    library: of the site's MPI; mpi4py must be told, as it would load the environment's own.
    passed_over: a site's mpiexec that is first on PATH, but has no library for mpi4py.
    """

    path: str
    version: str
    library: str | None = None
    passed_over: str | None = None

    @property
    def is_open_mpi(self) -> bool:
        """Does it take Open MPI's options?"""
        return "open mpi" in self.version.lower() or "openrte" in self.version.lower()


def find_launcher() -> Launcher:
    """The mpiexec to start ranks with: a site's, or the one of this Python environment.

    A site's wins, since its MPI knows the network, unless the environment's own comes first on
    PATH, where someone has put it, or the site's library isn't found: mpi4py would load the
    environment's, and each rank would be alone. Raises RanksError where there is none.
    """
    own = Path(sys.prefix) / "bin" / "mpiexec"
    first = shutil.which("mpiexec")
    site = None if first and own.exists() and os.path.samefile(first, own) else first
    if site is not None:
        launcher = Launcher(site, _version(site))
        library = _library_beside(launcher)
        # Who names a library in MPI4PY_LIBMPI has found it; it stays in the ranks' environment.
        if library or "MPI4PY_LIBMPI" in os.environ or not own.exists():
            return replace(launcher, library=library)
    if own.exists():
        return Launcher(str(own), _version(str(own)), passed_over=site)
    raise RanksError(
        f"there is no mpiexec, neither on PATH nor in {own.parent}. Install an MPI library "
        "beside the course: pip install 'ddl-labs[mpi]'. On a cluster, load the site's MPI "
        "(such as `module load openmpi`) before the notebook starts."
    )


def _library_beside(launcher: Launcher) -> str | None:
    """The library that lies beside this mpiexec, of the same MPI and of use to mpi4py.

    A folder can hold several: on Debian /usr/lib/x86_64-linux-gnu has those of Open MPI and
    MPICH, and /etc/alternatives says which of them libmpi.so is.
    """
    # 40 and 12 are the binary interfaces for which there are wheels of mpi4py.
    names = ("libmpi.so.40",) if launcher.is_open_mpi else ("libmpi.so.12",)
    if not launcher.is_open_mpi and not _mpi4py_is_a_wheel():
        # Debian's name of MPICH. A wheel asks for libmpi.so.12 and can't be imported with it.
        names += ("libmpich.so.12",)
    # Without a multiarch, "lib/" is looked at twice.
    multiarch = f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}"
    for bin_folder in (Path(launcher.path).parent, Path(launcher.path).resolve().parent):
        for folder in ("lib", "lib64", multiarch, f"{multiarch}/openmpi/lib"):
            for library in sorted((bin_folder.parent / folder).glob("libmpi*.so*")):
                # A link may lead to a folder that isn't looked at. A bare libmpi.so that is no
                # link can be a text for the linker, which mpi4py can't load.
                named = library.name.startswith(names) or library.resolve().name.startswith(names)
                if named and library.exists():
                    return str(library)
    return None


def _mpi4py_is_a_wheel() -> bool:
    """Does mpi4py choose its MPI when it is imported, or was it built for one?"""
    spec = importlib.util.find_spec("mpi4py")
    return spec is not None and any(Path(spec.origin).parent.glob("MPI.mpich.*"))


@functools.cache
def _version(mpiexec: str) -> str:
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
        text = (done.stdout or done.stderr).strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise RanksError(
            f"{mpiexec} does not run: {error}. Install an MPI library with "
            "pip install 'ddl-labs[mpi]', or take this one off PATH."
        ) from None
    return text.splitlines()[0] if text else "unknown version"
