"""How a program of the set joins its process group: on the backend under trial."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

#: Set by `trial`: the backend, the seconds that a wait may last, and a file for gloo's store.
BACKEND, TIMEOUT, STORE = "LABELLED_BACKEND", "LABELLED_TIMEOUT", "LABELLED_STORE"


def join() -> tuple[int, int]:
    """Make the default group; rank and world size."""
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT, "20")))
    backend = os.environ.get(BACKEND, "mpi")
    if backend == "mpi":
        dist.init_process_group("mpi", timeout=timeout)
    else:
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        store = dist.FileStore(os.environ[STORE], size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return dist.get_rank(), dist.get_world_size()
