"""The groups of ranks in which probes try an answer: groups of 1, 2, 3 or 4 ranks.

At any time every rank is in some group, so that an answer that forgets `group` gives a wrong result
instead of a deadlock. Each question makes new groups, with a short timeout.

A partition is a list of groups, and a group is a list of global ranks. The partition `None` means
that there is no group: the answer gets `group=None`, which is all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Seconds that a rank waits for the other ranks of a group.
TIMEOUT = 20
# Ranks that most labs need.
WORLD = 4

Partition = Sequence[Sequence[int]] | None
#: The argument `group` of an answer; `None` is all ranks.
Group = dist.ProcessGroup | None


@contextlib.contextmanager
def group_of(partition: Partition, rank: int) -> Iterator[Group]:
    """Make this rank's group for a block, which all ranks must do; None without a partition."""
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


def in_group(probe: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a probe so that it can be asked with a `partition`.

    The probe gets these keywords if it has them: `group`, `partition`, and `named`, which has the
    argument `group` of an answer, or no argument if there is no partition.
    """
    wanted = inspect.signature(probe).parameters

    @functools.wraps(probe)
    def in_group_of(
        user_ns: dict[str, Any], *, rank: int, partition: Partition, **kwargs: Any
    ) -> Any:
        with group_of(partition, rank) as group, _names_of_ranks_explained():
            known = {"group": group, "partition": partition, "named": keywords(partition, group)}
            kwargs |= {name: value for name, value in known.items() if name in wanted}
            return probe(user_ns, rank=rank, **kwargs)

    return in_group_of


def keywords(partition: Partition, group: Group) -> dict[str, Any]:
    """Return the argument `group` of an answer, or no argument if there is no partition."""
    return {} if partition is None else {"group": group}


@contextlib.contextmanager
def _names_of_ranks_explained() -> Iterator[None]:
    """Replace PyTorch's error for `src=0` in a group without rank 0 by advice."""
    try:
        yield
    except ValueError as error:
        if found := re.match(r"Global rank (\d+) is not part of group", str(error)):
            error.args = (
                f"src={found[1]} (or dst=…) is a rank of the world, and is not in this group. Pass "
                "group_src=0 (or group_dst=0) for the first rank of the group",
            )
        raise
