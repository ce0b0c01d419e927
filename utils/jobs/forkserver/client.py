"""Finds the right fork server or starts it, and holds a lease on it.

A forked rank has the same Python, libraries and place in the system (such as namespaces) as its
server. If an ordinary process would have different ones, it needs a different server. `key` names
the server for a rank.
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

# "off" starts ranks as ordinary processes.
VARIABLE = "DDL_LABS_FORK_SERVER"

# Python's arguments that run the server.
SERVER = ("-m", "utils.jobs.forkserver.server")

# The file in the server's folder with the variables that its libraries have read.
SETTINGS = "settings.json"

# Seconds that mpiexec has to start one process.
PATIENCE = 30.0

# Longest name of a UNIX socket in bytes, with the final 0.
LONGEST = 107

# A forked rank's environment and command line overwrite the server's, which need this much room.
PADDING_VARIABLE = "DDL_LABS_FORK_SERVER_PADDING"
ROOM_FOR_ENVIRONMENT = 65_536
ROOM_FOR_COMMAND = 4_096

# Variables that are read when Python starts or a library is loaded, which is too late in a fork.
LOAD_TIME = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LANG", "LC_ALL", "HOME"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "VECLIB_"),
    *("TORCH", "PYTORCH_", "ATEN_", "DNNL_", "ONEDNN_", "KINETO_", "NUMPY_", "NPY_", "JAX_"),
)
# A forked rank can apply these later, see `child.set_threads`.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# When a fork server imports the modules that only training and profiling need: "first" (before it
# serves), "never", or by default as soon as it is idle.
LATER_VARIABLE = "DDL_LABS_PRELOAD_LATER"
# Variables that are read whenever they are needed, not at the import.
_READ_LATE = {
    *THREADS,
    # PyTorch's compiler sets this variable itself at its first use.
    "TORCHINDUCTOR_CACHE_DIR",
    *("TORCH_HOME", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_FR_BUFFER_SIZE", "TORCH_CPP_LOG_LEVEL"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
}
# Linux namespaces, which a forked process shares with the server.
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@dataclass
class Lease:
    """A lease on a fork server, which notices when the holder ends, even if it is killed."""

    path: Path  # of the server's socket
    connection: socket.socket
    settings: dict[str, str]  # environment variables that libraries have read, in its ranks, too

    @property
    def python(self) -> list[str]:
        """Return the command to use instead of `python` in the command of a rank."""
        return [sys.executable, "-I", "-S", stub.__file__, str(self.path)]

    def close(self) -> None:
        """Give the lease back; the server stays for some minutes. A second call changes nothing."""
        try:
            self.connection.sendall(stub.BYE)
        except OSError:  # the server was killed, or this is the second call
            with contextlib.suppress(OSError), locked(base_folder() / "lock"):
                _remove_if_dead(self.path.parent)
        self.connection.close()


def why_not(environment: Mapping[str, str]) -> str:
    """Return why ranks with this environment can't be forked here; "" if they can."""
    if environment.get(VARIABLE, "").lower() in ("off", "0", "no"):
        return f"{VARIABLE} is {environment[VARIABLE]}"
    return unsupported()


def lease(environment: Mapping[str, str], mpiexec: str) -> Lease:
    """Return a lease on the server for ranks of this mpiexec; start the server if there is none.

    This function doesn't wait for the server; the stubs wait until the server's imports are done.

    Raises:
        OSError: the server can't be started; the message says why.
    """
    folder = base_folder() / f"fork-{key(environment, mpiexec)}"
    path = folder / "socket"
    if len(os.fsencode(path)) > LONGEST:
        raise OSError(f"the name of the fork server's socket would be too long: {path}")
    with locked(base_folder() / "lock"):
        for other in base_folder().glob("fork-*"):
            _remove_if_dead(other)
        connection = _connect(path) or _start(folder, path, environment, mpiexec)
    if connection is None:
        raise OSError(f"the fork server did not start (see {folder / 'log'})")
    stub.send(connection, {"lease": os.getpid()})
    not_in_forked_children(connection)
    return Lease(path, connection, json.loads((folder / SETTINGS).read_text(encoding="utf-8")))


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def _remove_if_dead(folder: Path) -> None:
    """Remove the folder of a server that was killed. The caller holds the lock."""
    connection = _connect(folder / "socket")
    if connection is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        connection.close()


def _start(
    folder: Path, path: Path, environment: Mapping[str, str], mpiexec: str
) -> socket.socket | None:
    """Start a server, and connect to it. Its socket is made here, so that clients can wait."""
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = _below(mpiexec, environment)
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1024)
        command = [sys.executable, *SERVER]
        command += [str(listener.fileno()), str(folder), " " * ROOM_FOR_COMMAND]
        with (folder / "log").open("w", encoding="utf-8") as log:
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
        return _connect(path)  # while the socket is open here, in case the server dies at once


def _below(mpiexec: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read in a rank, because mpiexec may set some of them."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        [mpiexec, "-n", "1", sys.executable, "-I", "-S", "-c", show],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        encoding="utf-8",
    )
    try:
        return load_time(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        raise OSError(f"{mpiexec} could not start a process: {done.stderr[-500:]}") from None


def _environment(environment: Mapping[str, str], settings: dict[str, str]) -> dict[str, str]:
    """Return the server's environment, with `settings` and one thread but no variables of a job."""
    # A grading run's variables are left out, because ending the run would end the server, too.
    gone = ("DDL_LABS_RANKS", "DDL_LABS_RUN", "SLURM_", "OMPI_", "PMIX_", "PRTE_", "MPI4PY_")
    own = {name: value for name, value in environment.items() if not name.startswith(gone)}
    own |= settings | dict.fromkeys(THREADS, "1")
    return own | {PADDING_VARIABLE: "x" * ROOM_FOR_ENVIRONMENT}


# --- what a server and its ranks must have in common ---------------------------------------------


def load_time(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a forked rank could not apply later."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(LOAD_TIME) and name not in _READ_LATE
    }


def key(environment: Mapping[str, str], mpiexec: str) -> str:
    """Return the name of the server for ranks of this mpiexec in this environment and place."""
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
    """Return this process's place in the system: root folder, control group, and namespaces."""
    root = os.stat("/")
    found = [f"{root.st_dev}:{root.st_ino}", Path("/proc/self/cgroup").read_text(encoding="utf-8")]
    return found + [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]


def _code() -> str:
    """Return a hash that changes with every file of the course and every installed package."""
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
    """Return why this system can't have a fork server; "" if it can."""
    if sys.platform != "linux":
        # Apple's libraries (Accelerate, Objective-C) may not be used in a forked child.
        return f"the fork server works on Linux only, and this is {sys.platform}"
    if not os.path.exists("/proc/self/ns/mnt"):
        return "the fork server needs /proc, and this system has none"
    return ""
