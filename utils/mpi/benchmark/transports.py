"""The same operations on three transports, called as users call them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from .measure import Candidate
from .options import TRANSPORTS

#: An all_gather takes n times its size; sizes that would take more than this are left out.
MOST_GATHERED = 512 * 2**20


@dataclass
class Transports:
    """All ranks, once per transport."""

    comm: MPI.Comm
    mpi: dist.ProcessGroup
    gloo: dist.ProcessGroup

    @classmethod
    def connect(cls, comm: MPI.Comm, timeout: float) -> Transports:
        """Make the process groups of all ranks; every rank calls it."""
        if not dist.is_mpi_available():
            raise RuntimeError(
                "this PyTorch has no backend mpi: install the project (pip install -e .), and "
                "leave TORCH_DEVICE_BACKEND_AUTOLOAD unset"
            )
        limit = timedelta(seconds=timeout)
        # gloo is the default group: under an mpi one, new_group("gloo") finds no store.
        dist.init_process_group(
            "gloo", store=_store(comm, limit), rank=comm.rank, world_size=comm.size, timeout=limit
        )
        return cls(comm, dist.new_group(backend="mpi", timeout=limit), dist.group.WORLD)


def _store(comm: MPI.Comm, timeout: timedelta) -> dist.TCPStore:
    """A store on rank 0, at a free port that MPI tells the others."""
    names = comm.allgather(socket.gethostname())
    several = len(set(names)) > 1
    host = os.environ.get("MASTER_ADDR", names[0]) if several else "localhost"
    if comm.rank:
        return dist.TCPStore(host, comm.bcast(None), comm.size, False, timeout)
    store = dist.TCPStore(host, 0, comm.size, True, timeout, wait_for_workers=False)
    comm.bcast(store.port)
    return store


def _zeros(count: int) -> Tensor:
    # Unlike torch.zeros, this has written every page.
    return torch.empty(count).fill_(0.0)


def _on_each(
    world: Transports, on_torch: Callable, on_mpi4py: Callable, results
) -> dict[str, Candidate]:
    """The calls by transport; on_torch(group) makes one."""
    return {
        "mpi": Candidate(on_torch(world.mpi), results),
        "mpi4py": Candidate(on_mpi4py, results),
        "gloo": Candidate(on_torch(world.gloo), results),
    }


def all_reduce(world: Transports, count: int) -> tuple[dict[str, Candidate], Tensor]:
    """The sum over the ranks, in place."""
    comm, data = world.comm, _zeros(count)
    array = data.numpy()

    def on_torch(group: dist.ProcessGroup) -> Callable:
        return lambda i: dist.all_reduce(data, group=group)

    def on_mpi4py(i):
        comm.Allreduce(MPI.IN_PLACE, array)

    results = [(data, comm.size * (comm.size + 1) / 2)]
    return _on_each(world, on_torch, on_mpi4py, results), data


def broadcast(world: Transports, count: int) -> tuple[dict[str, Candidate], Tensor]:
    """Each rank is the root in turn: a root that never changes would run ahead of the others."""
    comm, data, n = world.comm, _zeros(count), world.comm.size
    array = data.numpy()

    def on_torch(group: dist.ProcessGroup) -> Callable:
        return lambda i: dist.broadcast(data, i % n, group=group)

    def on_mpi4py(i):
        comm.Bcast(array, i % n)

    return _on_each(world, on_torch, on_mpi4py, [(data, 1)]), data


def all_gather(world: Transports, count: int) -> tuple[dict[str, Candidate], Tensor]:
    """Into a list of tensors on torch.distributed, into one array on mpi4py."""
    comm, data, n = world.comm, _zeros(count), world.comm.size
    parts, table = [_zeros(count) for _ in range(n)], _zeros(n * count).view(n, count)
    array, gathered = data.numpy(), table.numpy()

    def on_torch(group: dist.ProcessGroup) -> Callable:
        return lambda i: dist.all_gather(parts, data, group=group)

    def on_mpi4py(i):
        comm.Allgather(array, gathered)

    calls = _on_each(world, on_torch, on_mpi4py, list(zip(parts, range(1, n + 1), strict=True)))
    calls["mpi4py"].results = list(zip(table, range(1, n + 1), strict=True))
    return calls, data


def ping_pong(world: Transports, count: int) -> tuple[dict[str, Candidate], Tensor]:
    """A round trip between the first rank and the last, which are on two hosts if any are."""
    comm, data, incoming = world.comm, _zeros(count), _zeros(count)
    array, received = data.numpy(), incoming.numpy()
    first, last = 0, comm.size - 1
    if comm.rank not in (first, last):
        idle = Candidate(lambda i: None)
        return dict.fromkeys(TRANSPORTS, idle), data
    begins, peer = comm.rank == first, last if comm.rank == first else first

    def on_torch(group: dist.ProcessGroup) -> Callable:
        def call(i):
            if begins:
                dist.send(data, peer, group=group)
            dist.recv(incoming, peer, group=group)
            if not begins:
                dist.send(data, peer, group=group)

        return call

    def on_mpi4py(i):
        if begins:
            comm.Send(array, peer)
        comm.Recv(received, peer)
        if not begins:
            comm.Send(array, peer)

    return _on_each(world, on_torch, on_mpi4py, [(incoming, peer + 1)]), data
