"""What starts ranks at this site: mpiexec or Slurm (`decide`), and which mpiexec (`find_launcher`).

On a laptop mpiexec starts the ranks. In a Slurm job with room for them mpiexec spreads them over
its nodes. From a login node, or a small job that only holds JupyterLab, they get a Slurm job of
their own.
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
from utils.jobs import RanksError
from utils.jobs.slurm import Allocation, has_slurm

CONFIG_FILE = "ipcluster_config.py"
LAUNCHERS = ("auto", "mpiexec", "srun", "slurm")


class DDLLabs(Configurable):
    """An administrator's settings for all users, ``c.DDLLabs.…`` in ipcluster_config.py.

    The file lies in /etc/ipython, or in etc/ipython of the Python environment, which wins.
    """

    launcher = Enum(LAUNCHERS, "auto", help="as of cluster.start")
    fork_server = Bool(True, help="may ranks be forked from a process of the user?")
    partition = Unicode(help="of the ranks' own jobs; empty: Slurm's default")
    time = Unicode("60", help="limit of the ranks' own jobs, as sbatch takes it")
    account = Unicode(help="that the ranks' own jobs are charged to")
    ranks_per_node = Int(0, help="of the ranks' own jobs; 0: as Slurm likes")
    options = List(Unicode(), help="further options of srun for those jobs")
    srun_mpi = Unicode(help="for srun's --mpi; empty: pmix where there is one")
    shared_folder = Unicode(
        help="seen by all nodes, for connection files; empty: the user's cache folder"
    )
    controller_ip = Unicode(
        help="address of this node that ranks on other nodes reach; empty: the host name's"
    )


for _trait in DDLLabs.class_own_traits().values():
    _trait.tag(config=True)


@functools.cache
def settings() -> DDLLabs:
    """Return the site's settings.

    Raises:
        RanksError: a file can't be read; names it.
    """
    config = Config()
    for folder in dict.fromkeys([*reversed(SYSTEM_CONFIG_DIRS), *reversed(ENV_CONFIG_DIRS)]):
        if (Path(folder) / CONFIG_FILE).is_file():
            try:
                config.merge(PyFileConfigLoader(CONFIG_FILE, path=folder).load_config())
            except Exception as error:  # any code may stand there
                raise RanksError(
                    f"{Path(folder) / CONFIG_FILE}: {type(error).__name__}: {error}"
                ) from error
    return DDLLabs(config=Config({"DDLLabs": config.DDLLabs}))


# --- mpiexec or Slurm -------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to start ranks.

    Attributes:
        launcher: "mpiexec"; "srun", within the present job; "slurm", as a job of their own.
        reason: a sentence for the user.
        allocation: the present job, if there is one.
    """

    launcher: str
    reason: str
    allocation: Allocation | None = None

    @property
    def own_job(self) -> bool:
        """Return whether the ranks get a Slurm job of their own."""
        return self.launcher == "slurm"

    @property
    def many_hosts(self) -> bool:
        """Return whether ranks may be on other hosts than this process."""
        return self.own_job or (self.allocation is not None and self.allocation.hosts > 1)


def decide(cpus: int, asked: str | None, site: DDLLabs) -> Way:
    """Return how to start ranks that need so many CPUs in all.

    Args:
        asked: a launcher by the user; None or "auto": by the site, DDL_LABS_LAUNCHER, or the place.
        site: its settings.

    Raises:
        ValueError: there is no such launcher.
        RanksError: the launcher can't work here.
    """
    allocation = Allocation.of(os.environ)
    for source, name in (
        (f'launcher="{asked}"', asked),
        ("DDL_LABS_LAUNCHER", os.environ.get("DDL_LABS_LAUNCHER")),
        ("the site's settings", site.launcher),
    ):
        if name and name != "auto":
            return Way(_possible(name, source, allocation), f"by {source}", allocation)
    if allocation is None:
        if has_slurm():
            return Way("slurm", "a job of their own, as this host is not part of one")
        return Way("mpiexec", "on this machine, as there is no Slurm")
    where = f"Slurm job {allocation.job} on {allocation.nodes}"
    if allocation.cpus >= cpus:
        return Way("mpiexec", f"{where} has {allocation.cpus} CPUs, which is enough", allocation)
    if has_slurm():
        reason = f"a job of their own, as {where} has {allocation.cpus} CPUs of the {cpus} needed"
        return Way("slurm", reason, allocation)
    return Way("mpiexec", f"{where} is small, but no other can be had", allocation)


def _possible(name: str, source: str, allocation: Allocation | None) -> str:
    if name not in LAUNCHERS:
        raise ValueError(f"{source}: expected one of {', '.join(LAUNCHERS)}, not {name!r}")
    if name == "srun" and allocation is None:
        raise RanksError(
            f'{source}: srun works within a Slurm job, and this is none. "slurm" gives the ranks a '
            "job of their own."
        )
    if name == "slurm" and not has_slurm():
        raise RanksError(
            f"{source}: Slurm does not answer here (`sinfo` names no partition), so no job can be "
            'submitted. launcher="mpiexec" starts the ranks on this machine.'
        )
    return name


# --- which mpiexec: a loaded module's, else the environment's ---------------------------------


@dataclass(frozen=True)
class PassedOver:
    """A site's mpiexec that has no library for mpi4py: why, and what to do to have it used."""

    path: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Launcher:
    """An mpiexec, and what follows from the choice of it.

    Attributes:
        path: of the program.
        version: as it says itself.
        library: of the site's MPI; mpi4py must be told, as it would load the environment's own.
        passed_over: the site's, which comes first, if this one is used instead.
    """

    path: str
    version: str
    library: str | None = None
    passed_over: PassedOver | None = None

    @property
    def is_open_mpi(self) -> bool:
        """Return whether it takes Open MPI's options."""
        return libraries.is_open_mpi(self.version)

    @property
    def release(self) -> tuple[int, ...]:
        """Return the release, such as (4, 1) of 4.1.4; () if it does not tell."""
        return _release(self.version)

    def belongs_to(self, library: str) -> bool:
        """Return whether a library, such as "MPICH 4.0.2", is of the same MPI and release."""
        if self.is_open_mpi != library.startswith("Open MPI"):
            return False
        same_family = self.is_open_mpi or (
            self.version.startswith("HYDRA") and library.startswith("MPICH")
        )
        return not same_family or self.release == _release(library)

    def doubt(self) -> str:
        """Return what speaks against the library that MPI4PY_LIBMPI names; "" if nothing does."""
        named = os.environ.get(LIBRARY_VARIABLE)
        beside = library_beside(self.path, self.is_open_mpi)
        if not named or (beside and Path(beside).resolve() == Path(named).resolve()):
            return ""
        other = f"which is not beside {self.path}"
        if beside:
            other = f"but {beside} is beside {self.path}"
        return (
            f"{LIBRARY_VARIABLE} names {named}, {other}: unset it, or load the module that both "
            "belong to."
        )


def _release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version in a text."""
    numbers = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, numbers.groups())) if numbers else ()


def find_launcher() -> Launcher:
    """Return the mpiexec to start ranks with: a site's, or the one of this Python environment.

    A site's wins, since its MPI knows the network, unless the environment's own comes before it on
    PATH and no module has brought the site's. It doesn't win if the site's library isn't found
    (mpi4py would load the environment's, and each rank would be alone), or if MPI4PY_LIBMPI names
    the environment's.

    Raises:
        RanksError: there is no mpiexec, or it does not run.
    """
    try:
        return _launcher()
    except LauncherError as error:
        raise RanksError(str(error)) from None


def _launcher() -> Launcher:
    environments = Path(sys.prefix) / "bin" / "mpiexec"
    named = os.environ.get(LIBRARY_VARIABLE)
    named_here = bool(named) and Path(str(named)).is_relative_to(sys.prefix)
    site = None if environments.exists() and named_here else mpiexec_of_the_site(environments)
    passed_over = None
    if site is not None:
        launcher = Launcher(site, libraries.version(site))
        library = library_beside(site, launcher.is_open_mpi)
        # Who names a library in MPI4PY_LIBMPI has found it; it stays in the ranks' environment.
        if library or named:
            return replace(launcher, library=library)
        passed_over = _without_library(launcher)
        if not environments.exists():
            if _is_debians_mpich(launcher):
                raise LauncherError(
                    f"{site} can't be used: {passed_over.reason}. {passed_over.remedy}\n"
                    f"Or take an MPI from pip: {INSTALL_MPI}"
                )
            return launcher  # mpi4py may find its library elsewhere, by LD_LIBRARY_PATH
    if not environments.exists():
        raise LauncherError(
            f"there is no mpiexec, neither on PATH nor in {environments.parent}. Install an MPI "
            f"library: {INSTALL_MPI}. On a cluster, load the site's MPI (such as `module load "
            "openmpi`) before the notebook starts."
        )
    path = str(environments)
    return Launcher(path, libraries.version(path), passed_over=passed_over)


def _is_debians_mpich(launcher: Launcher) -> bool:
    return not launcher.is_open_mpi and libmpich(launcher.path) is not None


def _without_library(launcher: Launcher) -> PassedOver:
    reinstall = "pip install --force-reinstall --no-binary mpi4py mpi4py"
    if _is_debians_mpich(launcher):
        reason = (
            "the library of Debian's MPICH is called libmpich.so.12, and this mpi4py, a wheel, "
            "asks for libmpi.so.12"
        )
        remedy = (
            "To use it, build mpi4py for it: apt-get install libmpich-dev python3-dev, then "
            f"MPICC=mpicc.mpich {reinstall}"
        )
    elif standard := libmpi_abi(launcher.path):
        reason = (
            f"its library, {Path(standard).name}, has the binary interface of MPI 5, for which "
            "this mpi4py, a wheel, was not built"
        )
        remedy = f"To use it, build mpi4py for it: MPICC=mpicc_abi {reinstall}"
    else:
        reason = "no library that mpi4py can load lies beside it"
        remedy = f"To use it, name its library: export {LIBRARY_VARIABLE}=/path/of/its/libmpi.so"
    return PassedOver(launcher.path, reason, remedy)
