"""Going on without the ranks that have died."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist
from mpi4py import MPI

from . import failures, library, world
from .errors import CommunicationError
from .interrupts import guard
from .record import Call
from .recovery import Assembly
from .waiting import wait_for


def shrink(timeout: float | None = None) -> dist.ProcessGroup:
    """Make a new default group of the ranks that live, which get new numbers from 0 on.

    All of them call this, after the error that told of the death, and keep their order: of ranks 0
    to 3 without rank 1, ranks 0, 2, 3 become 0, 1, 2. All other groups are destroyed, so that
    groups, device meshes and DDP models have to be made again; tensors and models are as they were
    on each rank. ``dist.shrink_group``, PyTorch's function of this kind, needs a store and a
    backend in C++, which the mpi backend does not have.

    Args:
        timeout: seconds to wait for the other ranks; without it, that of the default group.

    Returns:
        The new default group, ``dist.group.WORLD``, with the same timeout as the old one.

    Raises:
        CommunicationTimeout: one of the ranks that live did not come.
        CommunicationError: no rank has died, or the job was not started with
            ``mpiexec --with-ft ulfm`` (in a notebook: ``cluster.start(n, fault_tolerant=True)``).
    """
    here = _checked()
    limit = dist.group.WORLD.timeout
    _assemble(here, limit if timeout is None else timeout)
    with guard:
        dist.destroy_process_group()
        # MPI_Finalize waits for all ranks, the dead among them.
        library.finalizes = False
        world.begin_anew(_new_base(here.base))
    dist.init_process_group("mpi", timeout=timedelta(seconds=limit))
    return dist.group.WORLD


def _checked() -> world.World:
    """The world; raises CommunicationError where it cannot shrink."""
    here = world.current()
    if here is None or not dist.is_initialized():
        raise CommunicationError('shrink() before init_process_group("mpi"): there is no group')
    if not failures.are_survived():
        raise CommunicationError(
            "shrink() in a job that ends with its first dead rank: start it with "
            "mpiexec --with-ft ulfm, in a notebook with cluster.start(n, fault_tolerant=True)"
        )
    if not here.dead():
        raise CommunicationError("shrink(): all ranks live, there is none to go on without")
    return here


def _assemble(here: world.World, timeout: float) -> None:
    """Wait for all ranks that live: in MPI's call a rank would be stuck until they come."""
    here.give_up_all()
    meeting = Assembly(
        Call("shrink", tuple(here.alive())), here.board, world.SHRINK_HERE, world.SHRINK_BEGUN,
        here.alive, number=1,
    )  # fmt: skip
    try:
        wait_for(meeting, timeout)
    except BaseException:
        if meeting.leave():
            raise


def _new_base(base: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of the ranks that live."""
    with contextlib.suppress(MPI.Exception):
        base.Revoke()
    return base.Shrink()
