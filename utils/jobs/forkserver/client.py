"""Finds the fork server that fits, or starts one, and holds a lease on it.

A rank that is forked has the server's program, libraries and place in the system. Where one of
them would be another for a process of its own, there has to be another server: `key` names it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch_mpi
import utils
from utils.jobs.forkserver import stub
from utils.jobs.session import base_folder, locked, not_in_forked_children

# "off" starts ranks as processes of their own.
VARIABLE = "DDL_LABS_FORK_SERVER"

# The server's program, for Python.
SERVER = ("-m", "utils.jobs.forkserver.server")

# In the server's folder: the variables that its libraries have read.
SETTINGS = "settings.json"

# Seconds for mpiexec to start one process.
PATIENCE = 30.0

# Longest name that a UNIX socket may have, in bytes, with the final 0.
LONGEST = 107

# A forked rank's environment and command line are written over the server's: room for them.
PADDING_VARIABLE = "DDL_LABS_FORK_SERVER_PADDING"
ROOM_FOR_ENVIRONMENT = 65_536
ROOM_FOR_COMMAND = 4_096

# Variables that are read when Python starts or a library is loaded: too late in a forked rank.
LOAD_TIME = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LANG", "LC_ALL", "HOME"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "VECLIB_"),
    *("TORCH", "PYTORCH_", "ATEN_", "DNNL_", "ONEDNN_", "KINETO_", "NUMPY_", "NPY_", "JAX_"),
)
# A forked rank can make up for these: see `child.set_threads`.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# When a fork server imports what only training and profiling need: "first", before it serves;
# "never"; else when it has nothing else to do.
LATER_VARIABLE = "DDL_LABS_PRELOAD_LATER"
# Read whenever they are needed, not at the import.
_READ_LATE = {
    *THREADS,
    # PyTorch's compiler sets it itself, when it is first used.
    "TORCHINDUCTOR_CACHE_DIR",
    *("TORCH_HOME", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_FR_BUFFER_SIZE", "TORCH_CPP_LOG_LEVEL"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
}
# Namespaces of Linux: a process that is forked is in the server's.
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@dataclass
class Lease:
    """A fork server in use; it is told when the holder ends, however that happens."""

    path: Path  # of its socket
    connection: socket.socket
    settings: dict[str, str]  # what libraries have read of the environment, in its ranks as well

    @property
    def python(self) -> list[str]:
        """Return what stands for `python` in the command of a rank."""
        return [sys.executable, "-I", "-S", stub.__file__, str(self.path)]

    def close(self) -> None:
        """Give the lease back; the server stays for some minutes. A second call changes nothing."""
        try:
            self.connection.sendall(stub.BYE)
        except OSError:  # it was killed, or this is the second time
            with contextlib.suppress(OSError), locked(base_folder() / "lock"):
                _remove_if_dead(self.path.parent)
        self.connection.close()


def why_not(environment: Mapping[str, str]) -> str:
    """Return why ranks of this environment can't be forked here; "" if they can."""
    if environment.get(VARIABLE, "").lower() in ("off", "0", "no"):
        return f"{VARIABLE} is {environment[VARIABLE]}"
    return unsupported()


def lease(environment: Mapping[str, str], mpiexec: str) -> Lease:
    """Lease the server for ranks that this mpiexec starts; start the server if there is none.

    Nobody waits for it here: stubs wait until it has imported what it needs.

    Raises:
        OSError: no server can be had; says why.
    """
    folder = base_folder() / f"fork-{key(environment, mpiexec)}"
    path = folder / "socket"
    if len(os.fsencode(path)) > LONGEST:
        raise OSError(f"the name of its socket would be too long: {path}")
    with locked(base_folder() / "lock"):
        for other in base_folder().glob("fork-*"):
            _remove_if_dead(other)
        connection = _connect(path)
        if connection is None:
            _start(folder, path, environment, mpiexec)
            connection = _connect(path)
    if connection is None:
        raise OSError(f"the fork server did not start; see {folder / 'log'}")
    stub.send(connection, {"lease": os.getpid()})
    not_in_forked_children(connection)
    return Lease(path, connection, json.loads((folder / SETTINGS).read_text()))


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def _remove_if_dead(folder: Path) -> None:
    """Remove what a server has left that was killed; under the lock."""
    connection = _connect(folder / "socket")
    if connection is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        connection.close()


def _start(folder: Path, path: Path, environment: Mapping[str, str], mpiexec: str) -> None:
    """Start a server; its socket is made here, so that clients can already line up."""
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = _below(mpiexec, environment)
    (folder / SETTINGS).write_text(json.dumps(settings))
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1024)
        command = [sys.executable, *SERVER]
        command += [str(listener.fileno()), str(folder), " " * ROOM_FOR_COMMAND]
        with (folder / "log").open("w") as log:
            subprocess.Popen(
                command,
                env=_environment(environment, settings),
                cwd=Path(utils.__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )


def _below(mpiexec: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that libraries read, as a rank sees them: mpiexec may have set some."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        [mpiexec, "-n", "1", sys.executable, "-I", "-S", "-c", show],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    try:
        return load_time(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        raise OSError(f"{mpiexec} could not start a process: {done.stderr[-500:]}") from None


def _environment(environment: Mapping[str, str], settings: dict[str, str]) -> dict[str, str]:
    """Return the server's variables: what libraries read, one thread, nothing of a job."""
    # Nor of a run: who ends what a run has started would end it for others, too.
    gone = ("DDL_LABS_RANKS", "DDL_LABS_RUN", "SLURM_", "OMPI_", "PMIX_", "PRTE_", "MPI4PY_")
    own = {name: value for name, value in environment.items() if not name.startswith(gone)}
    own |= settings | dict.fromkeys(THREADS, "1")
    return own | {PADDING_VARIABLE: "x" * ROOM_FOR_ENVIRONMENT}


# --- what a server and those that it serves must have in common ---------------------------------


def load_time(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a forked rank could not make up for."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(LOAD_TIME) and name not in _READ_LATE
    }


def key(environment: Mapping[str, str], mpiexec: str) -> str:
    """Return the name of the server for this mpiexec's ranks, in this environment and place."""
    parts = [
        mpiexec,
        *(sys.executable, sys.prefix, sys.version, *map(str, (*os.getresuid(), *os.getresgid()))),
        *map(str, sorted(os.getgroups())),
        *(f"{name}={value}" for name, value in sorted(load_time(environment).items())),
        *_place(),
        os.environ.get("SLURM_JOB_ID", ""),
        _code(),
    ]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _place() -> list[str]:
    """Return where in the system this process is: root folder, namespaces, and control group."""
    root = os.stat("/")
    found = [f"{root.st_dev}:{root.st_ino}", Path("/proc/self/cgroup").read_text()]
    return found + [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]


def _code() -> str:
    """Return a text that changes with every file of the course, and with what is installed."""
    packages = (Path(utils.__file__).parent, Path(torch_mpi.__file__).parent)
    files = [path for package in packages for path in sorted(package.rglob("*.py"))]
    libraries = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    digest = hashlib.sha256()
    for path in (*files, *filter(Path.exists, libraries)):
        status = path.stat()
        digest.update(
            f"{path} {status.st_size} {status.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


@functools.cache
def unsupported() -> str:
    """Return why this system can have no fork server; "" if it can."""
    if sys.platform != "linux":
        # Apple's libraries (Accelerate, Objective-C) may not be used in a forked child.
        return f"the fork server has been tried on Linux only, and this is {sys.platform}"
    if not os.path.exists("/proc/self/ns/mnt"):
        return "/proc is not there"
    return ""
