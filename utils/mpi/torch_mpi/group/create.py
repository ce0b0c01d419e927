"""What ``init_process_group("mpi")`` and ``new_group`` call."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch.distributed import is_initialized
from torch.distributed.constants import default_pg_timeout

from .. import compat
from ..network import link
from ..protocol import world
from . import messages, strict
from .process_group import ProcessGroupMPI

TIMEOUT_VARIABLE = "MPI_BACKEND_TIMEOUT"


def create(ranks: Sequence[int]) -> ProcessGroupMPI | None:
    """The process group of ``ranks`` (global ranks; empty: all), ``None`` on other ranks.

    Raises:
        ValueError: a rank that does not exist.
        CommunicationTimeout: a rank of the group did not come.
    """
    compat.leave_out_flight_recorder()
    timeout = compat.timeout_of_the_caller()
    if timeout is None:
        timeout = float(os.environ.get(TIMEOUT_VARIABLE, default_pg_timeout.total_seconds()))
    here = world.enter(timeout)
    link.shared_clock = here.one_machine
    members = tuple(ranks) if ranks else tuple(range(here.size))
    bad = [r for r in members if not 0 <= r < here.size]
    if bad:
        raise ValueError(f"ranks {bad} do not exist: the world has ranks 0 to {here.size - 1}")
    if not is_initialized():
        # PyTorch has no group: what is left here was taken from it by a Ctrl-C.
        for group in here.groups:
            group.shutdown()
    here.recover_or_raise("new_group")
    messages.every_send_waits = strict.is_on()
    return ProcessGroupMPI(members, timeout) if here.rank in members else None
