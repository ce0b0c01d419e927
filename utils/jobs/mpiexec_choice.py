"""Which mpiexec starts the ranks: a loaded module's, else the environment's."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

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
        own = library_beside(self.path, self.is_open_mpi)
        if not named or (own and Path(own).resolve() == Path(named).resolve()):
            return ""
        other = f"but {own} is beside {self.path}" if own else f"which is not beside {self.path}"
        return (
            f"{LIBRARY_VARIABLE} names {named}, {other}: unset it, or load the module that both "
            "belong to."
        )


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version in a text."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def find_launcher() -> Launcher:
    """Return the mpiexec to start ranks with: a site's, or the one of this Python environment.

    A site's wins, since its MPI knows the network, unless the environment's own comes before it on
    PATH and no module has brought the site's. It doesn't win if the site's library isn't found
    (mpi4py would load the environment's, and each rank would be alone), or if MPI4PY_LIBMPI names
    the environment's.

    Raises:
        LauncherError: there is no mpiexec, or it does not run.
    """
    own = Path(sys.prefix) / "bin" / "mpiexec"
    named = os.environ.get(LIBRARY_VARIABLE)
    if own.exists() and named and Path(named).is_relative_to(sys.prefix):
        return Launcher(str(own), libraries.version(str(own)))
    site = mpiexec_of_the_site(own)
    if site is not None:
        launcher = Launcher(site, libraries.version(site))
        library = library_beside(site, launcher.is_open_mpi)
        # Who names a library in MPI4PY_LIBMPI has found it; it stays in the ranks' environment.
        if library or named:
            return replace(launcher, library=library)
        without = _without_library(launcher)
        if own.exists():
            return Launcher(str(own), libraries.version(str(own)), passed_over=without)
        if _is_debians_mpich(launcher):
            raise LauncherError(
                f"{site} can't be used: {without.reason}. {without.remedy}\n"
                f"Or take an MPI from pip: {INSTALL_MPI}"
            )
        return launcher  # mpi4py may find its library elsewhere, by LD_LIBRARY_PATH
    if own.exists():
        return Launcher(str(own), libraries.version(str(own)))
    raise LauncherError(
        f"there is no mpiexec, neither on PATH nor in {own.parent}. Install an MPI library: "
        f"{INSTALL_MPI}. On a cluster, load the site's MPI (such as `module load openmpi`) "
        "before the notebook starts."
    )


def _is_debians_mpich(launcher: Launcher) -> bool:
    return not launcher.is_open_mpi and libmpich(launcher.path) is not None


def _without_library(launcher: Launcher) -> PassedOver:
    if _is_debians_mpich(launcher):
        return PassedOver(
            launcher.path,
            "the library of Debian's MPICH is called libmpich.so.12, and this mpi4py, a wheel, "
            "asks for libmpi.so.12",
            "To use it, build mpi4py for it: apt-get install libmpich-dev python3-dev, then "
            "MPICC=mpicc.mpich pip install --force-reinstall --no-binary mpi4py mpi4py",
        )
    if standard := libmpi_abi(launcher.path):
        return PassedOver(
            launcher.path,
            f"its library, {Path(standard).name}, has the binary interface of MPI 5, for which "
            "this mpi4py, a wheel, was not built",
            "To use it, build mpi4py for it: "
            "MPICC=mpicc_abi pip install --force-reinstall --no-binary mpi4py mpi4py",
        )
    return PassedOver(
        launcher.path,
        "no library that mpi4py can load lies beside it",
        f"To use it, name its library: export {LIBRARY_VARIABLE}=/path/of/its/libmpi.so",
    )
