"""What a fork server and those that it serves must have in common.

A rank that is forked has the server's program, libraries and place in the system. Where one of
them would be another for a process of its own, there has to be another server.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch_mpi
import utils

# Variables that are read when Python starts or a library is loaded: too late in a forked rank.
LOAD_TIME = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LANG", "LC_ALL", "HOME"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "VECLIB_"),
    *("TORCH", "PYTORCH_", "ATEN_", "DNNL_", "ONEDNN_", "KINETO_", "NUMPY_", "NPY_", "JAX_"),
)
# Of these a forked rank can make up for: see `child.set_threads`.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# When a fork server imports what only training and profiling need: "first", before it serves;
# "never"; else when it has nothing else to do.
LATER_VARIABLE = "DDL_LABS_PRELOAD_LATER"
# Read whenever they are needed, not at the import.
_READ_LATE = {
    *THREADS,
    # PyTorch's compiler sets it itself, when it is first used.
    "TORCHINDUCTOR_CACHE_DIR",
    *(
        "TORCH_HOME",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_FR_BUFFER_SIZE",
    ),
    *("TORCH_CPP_LOG_LEVEL", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
}
# Namespaces of Linux: a process that is forked is in the server's.
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


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
        *place(),
        os.environ.get("SLURM_JOB_ID", ""),
        code(),
    ]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def place() -> list[str]:
    """Return where in the system this process is: root folder, namespaces, and control group."""
    root = os.stat("/")
    found = [f"{root.st_dev}:{root.st_ino}", Path("/proc/self/cgroup").read_text()]
    return found + [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]


def code() -> str:
    """Changes with every file of the course, and with what is installed."""
    found = hashlib.sha256()
    for folder in (Path(utils.__file__).parent, Path(torch_mpi.__file__).parent):
        for path, size, changed in sorted(_python_files(folder)):
            found.update(f"{path} {size} {changed}\n".encode(errors="surrogateescape"))
    for name in ("purelib", "platlib"):
        found.update(f"{_changed(sysconfig.get_path(name))}".encode())
    return found.hexdigest()


def _python_files(folder: Path | str) -> Iterator[tuple[str, int, int]]:
    for entry in os.scandir(folder):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _python_files(entry.path)
        elif entry.name.endswith(".py"):
            status = entry.stat()
            yield entry.path, status.st_size, status.st_mtime_ns


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@functools.cache
def unsupported() -> str:
    """Return why this system can have no fork server; "" if it can."""
    if sys.platform != "linux":
        # Apple's libraries (Accelerate, Objective-C) may not be used in a forked child.
        return f"the fork server has been tried on Linux only, and this is {sys.platform}"
    if not os.path.exists("/proc/self/ns/mnt"):
        return "/proc is not there"
    return ""
