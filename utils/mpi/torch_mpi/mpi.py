"""``MPI``: the module of mpi4py, started by :mod:`torch_mpi.library`.

Imported by itself, mpi4py would choose its library and end MPI without regard to this backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:
    from .library import start_mpi

    MPI = start_mpi()


def largest_tag(communicator: MPI.Comm) -> int:
    """Return ``MPI_TAG_UB``, which every communicator has."""
    return communicator.Get_attr(MPI.TAG_UB) or 0
