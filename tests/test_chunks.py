"""An all-reduce by hand, step by step: what the picture says has to be what the ranks did."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from local_ranks import LocalRanks
from torch.distributed import distributed_c10d

from utils.timeline import chunks

START = """
import torch, torch.distributed as dist
from utils.timeline import chunks
dist.init_process_group("mpi")
rank, p = dist.get_rank(), dist.get_world_size()


def isend(tensor, place, group):
    return dist.isend(tensor, group=group, group_dst=place)


def irecv(tensor, place, group):
    return dist.irecv(tensor, group=group, group_src=place)


def who(group):
    return dist.get_rank(group), dist.get_world_size(group)


def exchange(out, to, into, source, group):
    requests = [isend(out, to, group), irecv(into, source, group)]
    for request in requests:
        request.wait()


def crossbar(x, group=None):
    r, p = who(group)
    others = [q for q in range(p) if q != r]
    got = {q: torch.empty_like(x) for q in others}
    requests = [irecv(got[q], q, group) for q in others] + [isend(x, q, group) for q in others]
    for request in requests:
        request.wait()
    got[r] = x.clone()
    x.copy_(sum(got[q] for q in range(p)))


def central(x, group=None):
    r, p = who(group)
    if r == 0:
        got = torch.empty_like(x)
        for q in range(1, p):
            irecv(got, q, group).wait()
            x += got
        for request in [isend(x, q, group) for q in range(1, p)]:
            request.wait()
    else:
        isend(x, 0, group).wait()
        irecv(x, 0, group).wait()


def tree(x, group=None):
    r, p = who(group)
    below = [q for q in (2 * r + 1, 2 * r + 2) if q < p]
    for q in below:
        got = torch.empty_like(x)
        irecv(got, q, group).wait()
        x += got
    if r:
        isend(x, (r - 1) // 2, group).wait()
        irecv(x, (r - 1) // 2, group).wait()
    for request in [isend(x, q, group) for q in below]:
        request.wait()


def ring(x, group=None):
    r, p = who(group)
    part = torch.tensor_split(x, p)
    for k in range(p - 1):
        got = torch.empty_like(part[(r - k - 1) % p])
        exchange(part[(r - k) % p], (r + 1) % p, got, (r - 1) % p, group)
        part[(r - k - 1) % p].add_(got)
    for k in range(p - 1):
        exchange(part[(r + 1 - k) % p], (r + 1) % p, part[(r - k) % p], (r - 1) % p, group)


def halving(x, group=None):  # p is a power of two
    r, p = who(group)
    low, high, halves = 0, len(x), []
    gap = p // 2
    while gap:
        middle = (low + high) // 2
        mine, theirs = (low, middle), (middle, high)
        if r & gap:
            mine, theirs = theirs, mine
        got = torch.empty_like(x[slice(*mine)])
        exchange(x[slice(*theirs)], r ^ gap, got, r ^ gap, group)
        x[slice(*mine)] += got
        halves.append((mine, theirs, gap))
        (low, high), gap = mine, gap // 2
    for mine, theirs, gap in reversed(halves):
        exchange(x[slice(*mine)], r ^ gap, x[slice(*theirs)], r ^ gap, group)


def doubling(x, group=None):  # p is a power of two
    r, p = who(group)
    gap = 1
    while gap < p:
        got = torch.empty_like(x)
        exchange(x, r ^ gap, got, r ^ gap, group)
        x += got
        gap *= 2


def server(x, group=None, reducers=1):  # the last ranks reduce, and have no data of their own
    r, p = who(group)
    workers = p - reducers
    part = torch.tensor_split(x, reducers)
    if r < workers:
        for k in range(reducers):
            k = (k + r) % reducers
            isend(part[k], workers + k, group).wait()
        for k in range(reducers):
            irecv(part[k], workers + k, group).wait()
    else:
        total = torch.zeros_like(part[r - workers])
        got = torch.empty_like(total)
        for q in range(workers):
            irecv(got, q, group).wait()
            total += got
        for request in [isend(total, q, group) for q in range(workers)]:
            request.wait()
"""


def probe(user_ns: dict, *, rank: int) -> object:
    """The story of this rank."""
    return user_ns.get("story")


def told(p: int, call: str, more: str = "") -> chunks.Steps:
    """What p ranks did, through the JSON that would travel to the kernel."""
    with LocalRanks(p) as up:
        up.run(START + more)
        up.run(f"story = chunks.watch({call})")
        stories = [reply.value for reply in up.ask(f"{__name__}:probe")]
    return chunks.steps(json.loads(json.dumps(stories)))
