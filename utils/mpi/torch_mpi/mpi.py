"""``MPI``, the module of mpi4py that :mod:`torch_mpi.library` starts, and MPI's view of dead ranks.

Other modules import ``MPI`` from here, because mpi4py alone would choose its library and end MPI
without regard to this backend.

Under ``mpiexec --with-ft ulfm``, Open MPI 5 keeps the other ranks alive, and communication with a
dead rank is an error: User Level Failure Mitigation (Bland and others, "Post-failure recovery of
MPI communication capability", IJHPCA 27(3), 2013).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import settings

if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:
    from .library import start_mpi

    MPI = start_mpi()

# `mpiexec --with-ft ulfm` sets this variable for each rank.
_ENABLED = "OMPI_MCA_mpi_ft_enable"
_CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
_DEATHS = {getattr(MPI, name) for name in _CLASSES if hasattr(MPI, name)}


def largest_tag(communicator: MPI.Comm) -> int:
    """Return ``MPI_TAG_UB``, which every communicator has."""
    return communicator.Get_attr(MPI.TAG_UB) or 0


def deaths_are_survived() -> bool:
    """Return whether the other ranks of this job survive the death of a rank."""
    return os.environ.get(_ENABLED, "0").lower() in ("1", "true", "yes")


def is_death(error: MPI.Exception) -> bool:
    """Return whether a communication failed because a rank has died."""
    return error.Get_error_class() in _DEATHS


def agree(base: MPI.Intracomm, well: bool) -> bool:
    """Return whether ``well`` is true on all ranks; all survivors get the same answer."""
    try:
        return bool(base.Agree(int(well)))
    except MPI.Exception:  # a rank has died
        return False


def advice_after_death() -> str:
    """Return a sentence that says what a user can do after the death of a rank."""
    if deaths_are_survived():
        return (
            f"Call torch_mpi.survivors.shrink() on all surviving ranks, or {settings.fresh_ranks}."
        )
    return f"{settings.fresh_ranks[0].upper()}{settings.fresh_ranks[1:]}."


def why_not_survived() -> str:
    """Return why the other ranks of this job would not survive a death; empty if they would."""
    try:
        MPI.COMM_WORLD.Get_failed().Free()
    except (MPI.Exception, NotImplementedError, AttributeError) as error:
        return f"the MPI library has no ULFM ({type(error).__name__}: {error})"
    return "" if deaths_are_survived() else "mpiexec was not started with --with-ft ulfm"
