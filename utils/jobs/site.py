"""Decides how this site starts ranks: by mpiexec or Slurm (`decide`), and with which mpiexec.

On a laptop mpiexec starts the ranks. In a Slurm job that is large enough, mpiexec spreads them over
the job's nodes. From a login node, or from a small job that only runs JupyterLab, the ranks get a
separate Slurm job.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from IPython.core.application import ENV_CONFIG_DIRS, SYSTEM_CONFIG_DIRS
from traitlets import Bool, Enum, Int, List, Unicode
from traitlets.config import Config, Configurable
from traitlets.config.loader import PyFileConfigLoader

from torch_mpi import library as libraries
from torch_mpi.launcher import LauncherError
from torch_mpi.library import (
    INSTALL_MPI,
    LIBRARY_VARIABLE,
    libmpi_abi,
    libmpich,
    library_beside,
    mpiexec_of_the_site,
)
from utils.jobs import NO_PROCESSES, POSIX, RanksError
from utils.jobs.slurm import Allocation, has_slurm

CONFIG_FILE = "ipcluster_config.py"
LAUNCHERS = ("auto", "mpiexec", "srun", "slurm")


class DDLLabs(Configurable):
    """An administrator's settings for all users, ``c.DDLLabs.…`` in ipcluster_config.py.

    The file is in /etc/ipython, or in etc/ipython of the Python environment, which has priority.
    """

    launcher = Enum(LAUNCHERS, "auto", help="default of cluster.start's launcher")
    fork_server = Bool(True, help="whether ranks may be forked from a process of the user")
    partition = Unicode(help="partition of the ranks' jobs; empty: Slurm's default")
    time = Unicode("60", help="time limit of the ranks' jobs, in a format of sbatch")
    account = Unicode(help="account that the ranks' jobs are charged to")
    ranks_per_node = Int(0, help="ranks per node in the ranks' jobs; 0: Slurm decides")
    options = List(Unicode(), help="further options of srun for the ranks' jobs")
    srun_mpi = Unicode(help="value of srun's --mpi; empty: pmix if it is available")
    shared_folder = Unicode(
        help="folder for connection files that all nodes see; empty: the user's cache folder"
    )
    controller_ip = Unicode(
        help="address of this node for ranks on other nodes; empty: the host name's address"
    )


for _trait in DDLLabs.class_own_traits().values():
    _trait.tag(config=True)


@functools.cache
def settings() -> DDLLabs:
    """Return the site's settings.

    Raises:
        RanksError: a file can't be read; the message names it.
    """
    config = Config()
    for folder in dict.fromkeys([*reversed(SYSTEM_CONFIG_DIRS), *reversed(ENV_CONFIG_DIRS)]):
        if (Path(folder) / CONFIG_FILE).is_file():
            try:
                config.merge(PyFileConfigLoader(CONFIG_FILE, path=folder).load_config())
            except Exception as error:  # the file may contain any code
                raise RanksError(
                    f"{Path(folder) / CONFIG_FILE}: {type(error).__name__}: {error}"
                ) from error
    return DDLLabs(config=Config({"DDLLabs": config.DDLLabs}))


# --- mpiexec or Slurm -------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to start ranks.

    Attributes:
        launcher: "mpiexec"; "srun", within the current job; "slurm", in a separate job.
        reason: why, for the user.
        allocation: the current job, if there is one.
    """

    launcher: str
    reason: str
    allocation: Allocation | None = None

    @property
    def own_job(self) -> bool:
        """Return whether the ranks get a separate Slurm job."""
        return self.launcher == "slurm"

    @property
    def many_hosts(self) -> bool:
        """Return whether ranks may run on other hosts than this process."""
        return self.own_job or (self.allocation is not None and self.allocation.hosts > 1)


def decide(cpus: int, asked: str | None, site: DDLLabs) -> Way:
    """Return how to start ranks that need this number of CPUs in total.

    Args:
        asked: the user's launcher; if it is None or "auto", DDL_LABS_LAUNCHER, the site's settings
            or the kind of host decides.
        site: the site's settings.

    Raises:
        ValueError: the name of the launcher is unknown.
        RanksError: the launcher can't work here.
    """
    allocation = Allocation.of(os.environ)
    for source, name in (
        (f'launcher="{asked}"', asked),
        ("DDL_LABS_LAUNCHER", os.environ.get("DDL_LABS_LAUNCHER")),
        ("the site's settings", site.launcher),
    ):
        if name and name != "auto":
            return Way(_possible(name, source, allocation), f"chosen by {source}", allocation)
    if allocation is None:
        if has_slurm():
            return Way("slurm", "the ranks get a separate job, because this host isn't part of one")
        return Way("mpiexec", "this machine has no Slurm")
    where = f"Slurm job {allocation.job} on {allocation.nodes}"
    if allocation.cpus >= cpus:
        return Way("mpiexec", f"{where} has {allocation.cpus} CPUs, which is enough", allocation)
    if has_slurm():
        has = f"{where} has only {allocation.cpus} of the {cpus} CPUs needed"
        return Way("slurm", f"the ranks get a separate job, because {has}", allocation)
    return Way("mpiexec", f"{where} is small, but no other job can be submitted", allocation)


def _possible(name: str, source: str, allocation: Allocation | None) -> str:
    if name not in LAUNCHERS:
        raise ValueError(f"{source}: expected one of {', '.join(LAUNCHERS)}, not {name!r}")
    if name == "srun" and allocation is None:
        raise RanksError(
            f"{source}: srun works only within a Slurm job, and this process isn't part of one. "
            'Use "slurm" to give the ranks a separate job.'
        )
    if name == "slurm" and not has_slurm():
        raise RanksError(
            f"{source}: Slurm does not answer here (`sinfo` names no partition), so no job can be "
            'submitted. Use launcher="mpiexec" to start the ranks on this machine.'
        )
    return name


# --- which mpiexec: from a loaded module, or from the environment -----------------------------


@dataclass(frozen=True)
class PassedOver:
    """A site's mpiexec without a library for mpi4py, with the reason and a remedy."""

    path: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Launcher:
    """An mpiexec and its library.

    Attributes:
        path: path of the program.
        version: the version that it prints.
        library: library of the site's MPI, because mpi4py would load the environment's by default.
        passed_over: the site's mpiexec, if it comes first but this one is used instead.
    """

    path: str
    version: str
    library: str | None = None
    passed_over: PassedOver | None = None

    @property
    def is_open_mpi(self) -> bool:
        """Return whether this is Open MPI, with Open MPI's options."""
        return libraries.is_open_mpi(self.version)

    @property
    def release(self) -> tuple[int, ...]:
        """Return the release, such as (4, 1) for 4.1.4; () if it is unknown."""
        return _release(self.version)

    def belongs_to(self, library: str) -> bool:
        """Return whether a library, such as "MPICH 4.0.2", belongs to the same MPI and release."""
        if self.is_open_mpi != library.startswith("Open MPI"):
            return False
        same_family = self.is_open_mpi or (
            self.version.startswith("HYDRA") and library.startswith("MPICH")
        )
        return not same_family or self.release == _release(library)

    def doubt(self) -> str:
        """Return why the library in MPI4PY_LIBMPI may be wrong; "" if there is no doubt."""
        named = os.environ.get(LIBRARY_VARIABLE)
        beside = library_beside(self.path, self.is_open_mpi)
        if not named or (beside and Path(beside).resolve() == Path(named).resolve()):
            return ""
        other = f"which doesn't belong to {self.path}"
        if beside:
            other = f"but {beside} belongs to {self.path}"
        return (
            f"{LIBRARY_VARIABLE} names {named}, {other}. Unset the variable, or load the module of "
            "this library."
        )


def _release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version in a text."""
    numbers = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, numbers.groups())) if numbers else ()


def find_launcher() -> Launcher:
    """Return the mpiexec to start ranks with, from the site or from this Python environment.

    The site's mpiexec has priority because its MPI knows the network, unless the environment's
    comes first on PATH and no module was loaded. The environment's is used, too, if the site's
    library isn't found (mpi4py would load the environment's library, and each rank would be alone),
    or if MPI4PY_LIBMPI names the environment's.

    Raises:
        RanksError: there is no mpiexec, or it does not run.
    """
    try:
        return _launcher()
    except LauncherError as error:
        raise RanksError(str(error)) from None


def _launcher() -> Launcher:
    if not POSIX:
        raise LauncherError(NO_PROCESSES)
    environments = Path(sys.prefix) / "bin" / "mpiexec"
    named = os.environ.get(LIBRARY_VARIABLE)
    named_here = bool(named) and Path(str(named)).is_relative_to(sys.prefix)
    site = None if environments.exists() and named_here else mpiexec_of_the_site(environments)
    passed_over = None
    if site is not None:
        launcher = Launcher(site, libraries.version(site))
        library = library_beside(site, launcher.is_open_mpi)
        # A library in MPI4PY_LIBMPI is the user's choice, and stays in the ranks' environment.
        if library or named:
            return replace(launcher, library=library)
        passed_over = _without_library(launcher)
        if not environments.exists():
            if _is_debians_mpich(launcher):
                raise LauncherError(
                    f"{site} can't be used: {passed_over.reason}. {passed_over.remedy}\n"
                    f"Or install an MPI with pip: {INSTALL_MPI}"
                )
            return launcher  # mpi4py may find the library by LD_LIBRARY_PATH
    if not environments.exists():
        raise LauncherError(
            f"There is no mpiexec, neither on PATH nor in {environments.parent}. Install an MPI "
            f"library: {INSTALL_MPI}. On a cluster, load the site's MPI (for example with `module "
            "load openmpi`) before the notebook starts."
        )
    path = str(environments)
    return Launcher(path, libraries.version(path), passed_over=passed_over)


def _is_debians_mpich(launcher: Launcher) -> bool:
    return not launcher.is_open_mpi and libmpich(launcher.path) is not None


def _without_library(launcher: Launcher) -> PassedOver:
    reinstall = "pip install --force-reinstall --no-binary mpi4py mpi4py"
    if _is_debians_mpich(launcher):
        reason = (
            "Debian calls the library of MPICH libmpich.so.12, but the mpi4py wheel loads "
            "libmpi.so.12"
        )
        remedy = (
            "To use MPICH, build mpi4py for it: apt-get install libmpich-dev python3-dev, then "
            f"MPICC=mpicc.mpich {reinstall}"
        )
    elif standard := libmpi_abi(launcher.path):
        reason = (
            f"its library, {Path(standard).name}, has the binary interface of MPI 5, for which the "
            "mpi4py wheel was not built"
        )
        remedy = f"To use this MPI, build mpi4py for it: MPICC=mpicc_abi {reinstall}"
    else:
        reason = "no library that mpi4py can load belongs to it"
        remedy = f"To use it, name its library: export {LIBRARY_VARIABLE}=/path/of/its/libmpi.so"
    return PassedOver(launcher.path, reason, remedy)
