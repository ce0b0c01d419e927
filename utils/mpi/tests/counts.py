"""What one rank holds: called on the ranks by `ranks.ask`."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
from collections import Counter
from pathlib import Path

from mpi4py import MPI

# Open MPI numbers what it has made, for Fortran. Beyond that many nobody would look for a leak.
MOST_HANDLES = 4096
SHARED = "/dev/shm/"


def count(user_ns: dict, rank: int) -> dict:
    """Communicators, windows, descriptors, threads, MB of memory, files in /dev/shm."""
    gc.collect()
    own = Path("/proc/self")
    open_files = _descriptors()
    pages = int((own / "statm").read_text().split()[1])
    return {
        "communicators": _alive("MPI_Comm_f2c"),
        "windows": _alive("MPI_Win_f2c"),
        "descriptors": sum(open_files.values()),
        "threads": len(list((own / "task").iterdir())),
        "memory": round(pages * resource.getpagesize() / 2**20),
        "open files": dict(open_files),
        "shared": _shared(),
    }


def _descriptors() -> Counter:
    """How many there are of each kind: the target, with # for a number."""
    kinds: Counter = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            kinds[re.sub(r"\d+", "#", os.readlink(f"/proc/self/fd/{entry}"))] += 1
        except OSError:  # the one that listed them
            continue
    return kinds


def _shared() -> list[str]:
    """Files in /dev/shm that this process has mapped or open."""
    names = {os.readlink(f"/proc/self/fd/{fd}") for fd in _numbers()}
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names |= {line.split(maxsplit=5)[5].strip() for line in maps if SHARED in line}
    return sorted(name for name in names if name.startswith(SHARED))


def _numbers() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def _alive(convert: str) -> int | None:
    """How many handles of a kind exist; None where the library does not keep a table of them.

    In Open MPI every communicator, also one that the library has made for itself, has a number
    from its birth to its end (`ompi_comm_f_to_c_table`), and `MPI_Comm_f2c` of any other number
    is NULL. In MPICH the function converts whatever it is given.
    """
    if MPI.get_vendor()[0] != "Open MPI":
        return None
    with open("/proc/self/maps", encoding="utf-8") as maps:
        path = next(line.split()[-1] for line in maps if "libmpi.so" in line)
    function = getattr(ctypes.CDLL(path), convert)
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return sum(bool(function(number)) for number in range(MOST_HANDLES))
