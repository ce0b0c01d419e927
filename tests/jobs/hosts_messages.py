"""How long messages take: run on ranks of several hosts, or of one with the network emulated.

    mpiexec -n 2 python hosts_messages.py [--emulate LATENCY BANDWIDTH]

Rank 0 prints one JSON object: the ranks' hosts, the bytes that the tensors of a pattern have and
those that left the host, and seconds by pattern and size, the medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import time

import psutil
import torch
import torch.distributed as dist
from mpi4py import MPI

from torch_mpi.network import Network, link

SIZES = [4, 4096, 16384, 65536, 131072]
# On a ring each rank sends and receives: 2 (p - 1) messages of n / p bytes.
RING = [65536, 131072, 262144]
# As messages on a ring, by the backend, on either network; MPI has smaller ones in its hands.
ALL_REDUCE = [524288]
# A barrier lets ranks go up to one latency apart: that counts once in so many.
IN_A_ROW = 3


def ping_pong(tensor: torch.Tensor) -> None:
    """There and back, between the first rank and the last."""
    first, last = 0, dist.get_world_size() - 1
    if dist.get_rank() == first:
        dist.send(tensor, last)
        dist.recv(tensor, last)
    elif dist.get_rank() == last:
        dist.recv(tensor, first)
        dist.send(tensor, first)


def raw_ping_pong(tensor: torch.Tensor) -> None:
    """The same by MPI alone: what the link takes, without PyTorch and the backend."""
    first, last = 0, dist.get_world_size() - 1
    world, memory = MPI.COMM_WORLD, tensor.numpy()
    if dist.get_rank() == first:
        _wait(world.Isend(memory, last))
        _wait(world.Irecv(memory, last))
    elif dist.get_rank() == last:
        _wait(world.Irecv(memory, first))
        _wait(world.Isend(memory, first))


def _wait(request: MPI.Request) -> None:
    while not request.Test():
        time.sleep(20e-6)  # MPI's own wait would keep the core from everybody else


def ring(tensor: torch.Tensor) -> None:
    """The messages of an all_reduce on a ring, one by one."""
    rank, p = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.tensor_split(p))
    for step in range(2 * (p - 1)):
        incoming = torch.empty_like(chunks[(rank - step - 1) % p])
        sent = dist.isend(chunks[(rank - step) % p], (rank + 1) % p)
        dist.recv(incoming, (rank - 1) % p)
        sent.wait()


def time_all(pattern, sizes: list[int], rounds: int) -> dict:
    """Seconds by size, and what went through the network for all of them."""
    before = sent_bytes()
    seconds = {nbytes: median_seconds(pattern, nbytes, rounds) for nbytes in sizes}
    tensors = (rounds + 1) * IN_A_ROW * sum(sizes)
    return {"seconds": seconds, "tensors": tensors, "sent": sent_bytes() - before}


def median_seconds(pattern, nbytes: int, rounds: int) -> float:
    """As rank 0 sees it, which ends no pattern before the others have done their part."""
    tensor, seconds = torch.zeros(nbytes // 4), []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            pattern(tensor)
        seconds.append((time.perf_counter() - start) / IN_A_ROW)
    return statistics.median(seconds[1:])  # the first round warms up


def sent_bytes() -> int:
    """By this host's network device; 0 where it has none of that name."""
    counters = psutil.net_io_counters(pernic=True)
    return counters["eth0"].bytes_sent if "eth0" in counters else 0


def main() -> None:
    """Time the patterns, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", type=float, nargs=2, help="seconds, bytes per second")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    # Other work on the machine is none of the network's: come before it, where that is allowed.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    dist.init_process_group("mpi")
    result = {"hosts": [None] * dist.get_world_size()}
    dist.all_gather_object(result["hosts"], socket.gethostname())
    if options.emulate:
        link.set(Network(*options.emulate))
        link.calibrate(dist.group.WORLD)
    else:
        result["raw_ping_pong"] = time_all(raw_ping_pong, SIZES, options.rounds)
    result["ping_pong"] = time_all(ping_pong, SIZES, options.rounds)
    result["ring"] = time_all(ring, RING, options.rounds)
    result["all_reduce"] = time_all(dist.all_reduce, ALL_REDUCE, options.rounds)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
