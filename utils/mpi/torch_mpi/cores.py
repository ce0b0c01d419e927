"""Is there a processor that no rank computes on?

Within a machine the data of a collective are moved by the rank's own processor. Begun early, by the
progress thread, that is hidden behind computing only where a processor is idle. Where the ranks use
all of them it takes its time from computing, and some more for two threads that share one.
"""

from __future__ import annotations

import os

import torch

from .mpi import MPI


def of_all(base: MPI.Intracomm) -> int:
    """How many processors the ranks of one machine may use together; all of them call this."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(set().union(*base.allgather(os.sched_getaffinity(0))))


def one_is_idle(cores: int, ranks: int) -> bool:
    """Whether each rank has one beside those of its threads (``torch.get_num_threads()``)."""
    return cores >= ranks * (torch.get_num_threads() + 1)
