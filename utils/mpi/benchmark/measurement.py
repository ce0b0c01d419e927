"""The part that each rank runs: every operation on every transport. Rank 0 reports the times."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import mpi4py
import numpy as np
import psutil
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import distributed_c10d

from . import KI, MI, OPERATIONS, TRANSPORTS, tables

#: A communication that finds no partner ends with an error after this time.
TIMEOUT = timedelta(seconds=60)
MOST_REPETITIONS = 10_000
#: An all_gather needs n times its size in memory. Sizes that would need more are left out.
MOST_GATHERED = 512 * MI
SIZES = tuple(4**power for power in range(1, 14))  # 4 B … 64 MiB
QUICK_SIZES = (4, KI, 64 * KI, MI, 4 * MI)
#: If other programs use more than this share of a host's cores, a warning comes with the numbers.
BUSY = 0.1


def main(options: argparse.Namespace) -> int:
    """Measure and report; return the exit status. An error on one rank ends all ranks."""
    # At the deadline, each rank prints where it was, and ends.
    faulthandler.dump_traceback_later(options.deadline, exit=True)
    try:
        comm = MPI.COMM_WORLD.Dup()  # the backend sends its own messages on its communicators
        if problem := _problem(comm.size, options.n):
            if comm.rank == 0:
                print(f"bench: {problem}", file=sys.stderr)
            return 2
        result = _measure_all(options, comm)
        if comm.rank == 0:
            tables.complete(result)
            print(tables.text(result), end="", flush=True)
            if options.json:
                text = json.dumps(result, indent=1, allow_nan=False)
                options.json.write_text(text + "\n", encoding="utf-8")
        slowest(comm, 0)  # the other ranks sleep while rank 0 writes
        dist.destroy_process_group()
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _problem(size: int, n: int | None) -> str | None:
    if size < 2:
        return "one rank has nobody to talk to. Start two: mpiexec -n 2, or leave out mpiexec."
    if n not in (None, size):
        return (
            f"this job has {size} ranks already, so it can't have {n}. Leave out -n under mpiexec."
        )
    return None


def _measure_all(options: argparse.Namespace, comm: MPI.Comm) -> dict:
    """Measure everything; return the numbers as the JSON file has them."""
    torch.set_num_threads(1)
    machines = hosts(comm)  # first, because the measurement keeps the cores busy
    sizes, rounds, sample = (QUICK_SIZES, 2, 0.003) if options.quick else (SIZES, 5, 0.02)
    result = {
        "ranks": comm.size,
        "threads": torch.get_num_threads(),
        "hosts": machines,
        "warnings": warnings(machines),
        "versions": versions(),
        "rounds": options.rounds or rounds,
    }
    if comm.rank == 0:
        print(tables.heading(result), flush=True)  # first, because the measurement takes minutes
    rows = [
        {"name": name, "bytes": nbytes, "repetitions": {}, "rounds": {}}
        for name in options.only or OPERATIONS
        for nbytes in options.sizes or sizes
        if name != "all_gather" or nbytes * comm.size <= MOST_GATHERED
    ]
    measure(comm, connect(comm), rows, result["rounds"], sample)
    return {**result, "operations": rows}


# --- the clock ---------------------------------------------------------------------------------


#: For each transport, a process group of all ranks. mpi4py needs none.
Groups = dict[str, dist.ProcessGroup | None]


def connect(comm: MPI.Comm) -> Groups:
    """Make the process groups of all ranks; every rank calls it."""
    if not dist.is_mpi_available():
        raise RuntimeError(
            "This PyTorch has no backend mpi. Install the project (pip install -e .), and "
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD."
        )
    # gloo is the default group, because new_group("gloo") finds no store under an mpi group.
    dist.init_process_group(
        "gloo", store=_store(comm), rank=comm.rank, world_size=comm.size, timeout=TIMEOUT
    )
    mpi = dist.new_group(backend="mpi", timeout=TIMEOUT)
    return {"mpi": mpi, "mpi4py": None, "gloo": dist.group.WORLD}


def _store(comm: MPI.Comm) -> dist.TCPStore:
    """Return a store on rank 0, at a free port that rank 0 broadcasts with MPI."""
    names = comm.allgather(socket.gethostname())
    several = len(set(names)) > 1
    host = os.environ.get("MASTER_ADDR", names[0]) if several else "localhost"
    if comm.rank:
        return dist.TCPStore(host, comm.bcast(None), comm.size, False, TIMEOUT)
    store = dist.TCPStore(host, 0, comm.size, True, TIMEOUT, wait_for_workers=False)
    comm.bcast(store.port)
    return store


def slowest(comm: MPI.Comm, value: float) -> float:
    """Return the maximum over the ranks. A waiting rank sleeps, so other ranks can use its core."""
    mine = np.array([float(value)])
    most = np.empty(1)
    request = comm.Iallreduce(mine, most, op=MPI.MAX)
    while not request.Test():
        time.sleep(0.001)
    return float(most[0])


def seconds_of(comm: MPI.Comm, call: Callable[[int], object], repetitions: int) -> float:
    """Return the seconds per repetition on the slowest rank, which are equal on all ranks."""
    comm.Barrier()
    start = time.perf_counter()
    for i in range(repetitions):
        call(i)
    return slowest(comm, (time.perf_counter() - start) / repetitions)


def _repetitions(comm: MPI.Comm, call: Callable[[int], object], sample: float) -> int:
    """Return how many repetitions need about `sample` seconds, after more and more trials."""
    tried = 1
    while True:
        each = seconds_of(comm, call, tried)
        if each * tried > sample / 4 or tried >= MOST_REPETITIONS:
            return max(2, min(int(sample / each), MOST_REPETITIONS))
        tried *= 4


def measure(comm: MPI.Comm, groups: Groups, rows: list[dict], rounds: int, sample: float) -> None:
    """Fill in the repetitions, rounds and seconds of all rows.

    A round goes through all rows and transports, and each round has another order of transports. If
    something disturbs the machine for a while, it harms one round of many numbers, not all rounds
    of one number. A transport is slower right after gloo, so none may always be the next one.

    Args:
        sample: Seconds that one sample should last.
    """
    orders = list(itertools.permutations(TRANSPORTS))
    for turn in range(rounds):
        for row in rows:
            data = _zeros(row["bytes"] // 4)
            for transport in orders[turn % len(orders)]:
                operation = FUNCTIONS[row["name"]](comm, groups[transport], data)
                if turn == 0:
                    _check(operation, data, f"{row['name']} on {transport}", comm.rank)
                    row["repetitions"][transport] = _repetitions(comm, operation.call, sample)
                repetitions = row["repetitions"][transport]
                seconds_of(comm, operation.call, max(1, repetitions // 10))
                seconds = seconds_of(comm, operation.call, repetitions) * operation.share
                row["rounds"].setdefault(transport, []).append(seconds)
    for row in rows:
        row["seconds"] = {name: statistics.median(times) for name, times in row["rounds"].items()}


def _check(operation: Operation, data: Tensor, name: str, rank: int) -> None:
    """Raise RuntimeError if a call computes wrong results, because its speed would mean nothing."""
    for tensor, _ in operation.results:
        tensor.zero_()  # removes what another transport has written
    data.fill_(rank + 1)
    operation.call(0)
    for tensor, expected in operation.results:
        if not (tensor == expected).all():
            raise RuntimeError(f"{name}: rank {rank} got wrong values instead of {expected}.")


# --- the operations, called as users call them -------------------------------------------------


@dataclass
class Operation:
    """One operation at one size, in a process group, or on mpi4py if there is no group.

    Attributes:
        call: A function of i, which makes the i-th call.
        results: Tensors, and the value that each tensor must have after call 0.
        share: The time of the operation is the time of a call, times this share.
    """

    call: Callable[[int], object]
    results: list[tuple[Tensor, float]]
    share: float = 1.0


def all_reduce(comm: MPI.Comm, group: dist.ProcessGroup | None, data: Tensor) -> Operation:
    """Return an all_reduce, which adds over the ranks in place."""
    results = [(data, comm.size * (comm.size + 1) / 2)]
    if group is not None:
        return Operation(lambda i: dist.all_reduce(data, group=group), results)
    array = data.numpy()
    return Operation(lambda i: comm.Allreduce(MPI.IN_PLACE, array), results)


def broadcast(comm: MPI.Comm, group: dist.ProcessGroup | None, data: Tensor) -> Operation:
    """Return a broadcast from each rank in turn; a constant root would run ahead of the others."""
    n = comm.size
    if group is not None:
        return Operation(lambda i: dist.broadcast(data, i % n, group=group), [(data, 1)])
    array = data.numpy()
    return Operation(lambda i: comm.Bcast(array, i % n), [(data, 1)])


def all_gather(comm: MPI.Comm, group: dist.ProcessGroup | None, data: Tensor) -> Operation:
    """Return a gather into a list of tensors (torch.distributed) or into one array (mpi4py)."""
    n = comm.size
    expected = range(1, n + 1)
    if group is not None:
        parts = [_zeros(len(data)) for _ in range(n)]
        results = list(zip(parts, expected, strict=True))
        return Operation(lambda i: dist.all_gather(parts, data, group=group), results)
    table = _zeros(n * len(data)).view(n, -1)
    array = data.numpy()
    gathered = table.numpy()
    results = list(zip(table, expected, strict=True))
    return Operation(lambda i: comm.Allgather(array, gathered), results)


def ping_pong(comm: MPI.Comm, group: dist.ProcessGroup | None, data: Tensor) -> Operation:
    """Return a message from the first rank to the last and back, across hosts if there are two."""
    last = comm.size - 1
    if 0 < comm.rank < last:  # the ranks in between do nothing
        return Operation(lambda i: None, [])
    begins = comm.rank == 0
    peer = last if begins else 0
    incoming = _zeros(len(data))
    send = functools.partial(comm.Send, data.numpy(), peer)
    receive = functools.partial(comm.Recv, incoming.numpy(), peer)
    if group is not None:
        send = functools.partial(dist.send, data, peer, group=group)
        receive = functools.partial(dist.recv, incoming, peer, group=group)

    def there_and_back(i: int) -> None:
        if begins:
            send()
        receive()
        if not begins:
            send()

    return Operation(there_and_back, [(incoming, peer + 1)], share=0.5)


def _zeros(count: int) -> Tensor:
    # Unlike torch.zeros, fill_ writes to every page, so that no measured call has to.
    return torch.empty(count).fill_(0.0)


FUNCTIONS = {
    function.__name__: function for function in (all_reduce, broadcast, all_gather, ping_pong)
}


# --- the machine -------------------------------------------------------------------------------


def hosts(comm: MPI.Comm) -> list[dict]:
    """Describe all hosts of the job, in the order of their first ranks; every rank calls it.

    Returns:
        For each host its name and number of ranks; the `cpus` that all its ranks may use, and each
        of them; whether each rank is `bound` to cores that no other rank has; how many cores are
        `busy` while the ranks are idle; the load average of the last minute.
    """
    name = socket.gethostname()
    everyone = comm.allgather((name, _cpus()))
    here = [cpus for host, cpus in everyone if host == name]
    first = [host for host, _ in everyone].index(name)
    busy = psutil.cpu_percent(0.5) / 100 * _all_cpus() if comm.rank == first else 0.0
    slowest(comm, busy)  # the other ranks sleep here
    union = set().union(*here)
    apart = sum(map(len, here)) == len(union)
    mine = {
        "name": name,
        "ranks": len(here),
        "cpus": len(union),
        "cpus_per_rank": [len(cpus) for cpus in here],
        "bound": apart and (len(here) > 1 or len(union) < _all_cpus()),
        "busy": busy,
        "load": os.getloadavg()[0],
    }
    return list(filter(None, comm.allgather(mine if comm.rank == first else None)))


def _cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(_all_cpus()))


def _all_cpus() -> int:
    return psutil.cpu_count() or 1


def warnings(machines: list[dict]) -> list[str]:
    """Return the reasons for which the numbers may mean little."""
    lines = []
    for host in machines:
        if host["ranks"] > host["cpus"]:
            lines.append(
                f"{host['ranks']} ranks share {host['cpus']} CPUs on {host['name']}, so the times "
                "include waits for a CPU"
            )
        if host["busy"] > BUSY * host["cpus"]:
            lines.append(f"other programs keep {host['busy']:.1f} CPUs of {host['name']} busy")
        elif host["load"] > host["cpus"] / 2:
            lines.append(
                f"{host['name']} was busy in the last minute (load average {host['load']:.1f})"
            )
    return lines


def versions() -> dict[str, str]:
    """Return the versions of the libraries, and the module of the backend."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": MPI.Get_library_version().partition(",")[0].strip("\0 \n"),
        "backend": distributed_c10d.ProcessGroupMPI.__module__,
    }
