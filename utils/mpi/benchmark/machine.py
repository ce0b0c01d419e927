"""What the numbers were measured on: hosts, cores, binding, load, versions."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass

import mpi4py
import psutil
import torch
from mpi4py import MPI
from torch.distributed import distributed_c10d

from .measure import Clock

# Share of a host's cores that others may use before the numbers come with a warning.
BUSY = 0.1
_WATCH = 0.5


@dataclass
class Host:
    """One machine of the job.

    Attributes:
        cpus: that the ranks may use, all together.
        bound: each rank has cores that no other rank has.
        busy: cores that are busy while the ranks are idle.
        load: load average of the last minute.
    """

    name: str
    ranks: int
    cpus: int
    cpus_per_rank: list[int]
    bound: bool
    busy: float
    load: float

    @property
    def oversubscribed(self) -> bool:
        """More ranks than cores?"""
        return self.ranks > self.cpus


def hosts(clock: Clock) -> list[Host]:
    """All hosts of the job, in the order of their first ranks; every rank calls it."""
    name = socket.gethostname()
    everyone = clock.comm.allgather((name, _cpus()))
    here = [theirs for host, theirs in everyone if host == name]
    first = next(rank for rank, (host, _) in enumerate(everyone) if host == name)
    busy = _busy_cpus() if clock.comm.rank == first else 0.0
    clock.slowest(busy)  # the others sleep here
    union = set().union(*here)
    mine = Host(
        name,
        ranks=len(here),
        cpus=len(union),
        cpus_per_rank=[len(one) for one in here],
        bound=sum(map(len, here)) == len(union) and (len(here) > 1 or len(union) < _all_cpus()),
        busy=busy,
        load=os.getloadavg()[0],
    )
    found = clock.comm.allgather(mine if clock.comm.rank == first else None)
    return [host for host in found if host]


def _cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(_all_cpus()))


def _all_cpus() -> int:
    return psutil.cpu_count() or 1


def _busy_cpus() -> float:
    """How many CPUs work, over half a second."""
    return psutil.cpu_percent(_WATCH) / 100 * _all_cpus()


def warnings(found: list[Host]) -> list[str]:
    """Why the numbers may say little."""
    lines = []
    for host in found:
        if host.oversubscribed:
            lines.append(
                f"{host.ranks} ranks share {host.cpus} CPUs on {host.name}: times are those of "
                "waiting for a CPU"
            )
        if host.busy > BUSY * host.cpus:
            lines.append(f"others keep {host.busy:.1f} CPUs of {host.name} busy")
        elif host.load > host.cpus / 2:
            lines.append(f"{host.name} was busy just now: load average {host.load:.1f}")
    return lines


def versions() -> dict[str, str]:
    """The libraries, and where the backend comes from."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": MPI.Get_library_version().partition(",")[0].strip("\0 \n"),
        "backend": distributed_c10d.ProcessGroupMPI.__module__,
    }
