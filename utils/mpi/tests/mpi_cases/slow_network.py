"""The cases of collectives.py on a slow network: every collective as messages of our own."""

import torch
import torch.distributed as dist
from collectives import *  # noqa: F403
from helpers import rank, same, size

from torch_mpi.network import Network, link


def begin():
    """From here on."""
    link.set(Network(latency=20e-6, bandwidth=1e9))


def end():
    """The network of this machine again."""
    link.set(None)


def case_what_takes_longer_than_the_timeout_as_it_is_large_is_waited_for():
    from datetime import timedelta

    if size() < 2:
        return "needs two ranks"
    group = dist.new_group(list(range(size())))
    group.set_timeout(timedelta(seconds=1))
    before = link.network
    dist.barrier()
    link.set(Network(latency=0.0, bandwidth=1e6))
    try:
        tensor = torch.full((500_000,), float(rank()))  # 2 MB, 2 s
        if rank() == 0:
            dist.send(tensor, 1, group=group)
        elif rank() == 1:
            dist.recv(tensor, 0, group=group)
            same(tensor, torch.zeros(500_000))
    finally:
        link.set(before)
    return None
