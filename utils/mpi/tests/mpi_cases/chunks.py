"""The cases of collectives.py with MPI's largest count set to 2: what tensors over 2 GiB use."""

import collectives
from collectives import *  # noqa: F403  (the cases)

from torch_mpi.group import tensors

_kept = collectives.LENGTHS, collectives.LONG, tensors.MAX_COUNT


def _set(lengths, long, count):
    collectives.LENGTHS, collectives.LONG, tensors.MAX_COUNT = lengths, long, count


def begin():
    """Two elements a message, and tensors that are not too many messages."""
    _set((0, 1, 2, 3, 7, 1000), 701, 2)


def end():
    """As before."""
    _set(*_kept)
