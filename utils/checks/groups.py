"""Answers that take a `group`, tried in groups of 1, 2, 3 and 4 ranks.

Every rank is in some group at any time, so that an answer that forgets `group` gives a wrong result
instead of a deadlock. Groups are new for each question and have a short timeout.

A partition is a list of groups, each a list of global ranks; `None` stands for no group at all: the
answer gets `group=None`, which is all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .calls import inside
from .task import Report

# Seconds that a rank waits for the others of a group.
TIMEOUT = 20
SIZES = (4, 2, 3, 1)

Partition = Sequence[Sequence[int]] | None


def partitions(world: int) -> list[Partition]:
    """Ranks 0 … world - 1 all together, and in groups of 4, 2, 3, 1 (a last one may be smaller)."""
    sizes = [world, *(size for size in SIZES if size < world)]
    return [[list(range(k, min(k + size, world))) for k in range(0, world, size)] for size in sizes]


@contextlib.contextmanager
def group_of(partition: Partition, rank: int) -> Iterator[dist.ProcessGroup | None]:
    """This rank's new group, destroyed at the end; all ranks do this. `None`: no partition."""
    groups = {
        tuple(members): dist.new_group(list(members), timeout=timedelta(seconds=TIMEOUT))
        for members in partition or ()
    }
    mine = next((group for members, group in groups.items() if rank in members), None)
    try:
        yield mine
    finally:
        if mine is not None:
            dist.destroy_process_group(mine)


def in_group(probe: Callable) -> Callable:
    """Make of a function with a keyword `group` one that is asked with a `partition`."""

    @functools.wraps(probe)
    def in_group_of(user_ns: dict, *, rank: int, partition: Partition, **kwargs: Any) -> Any:
        with group_of(partition, rank) as group:
            return probe(user_ns, rank=rank, partition=partition, group=group, **kwargs)

    return in_group_of


def members_of(partition: Partition, rank: int, world: int) -> list[int]:
    """The ranks that share a group with this one."""
    groups = [range(world)] if partition is None else partition
    return next(list(members) for members in groups if rank in members)


def on(members: Sequence[int]) -> str:
    """Where something happened, for a message."""
    if len(members) == 1:
        return f"in a group of rank {members[0]} alone"
    return f"in the group of ranks {', '.join(map(str, members))}"


def right_group(report: Report, rank: int, members: Sequence[int], calls: list[dict]) -> bool:
    """Whether all was communicated inside of the group; else a problem."""
    return report.communication(rank, calls, inside(members))


def enough(ranks, report: Report, n: int) -> bool:
    """Whether there are exactly `n` ranks; else a problem."""
    if ranks.n != n:
        report.problem(f"the check needs {n} ranks: ranks = cluster.start({n})")
    return ranks.n == n
