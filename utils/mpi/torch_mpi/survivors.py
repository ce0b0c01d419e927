"""Continue a job without the ranks that have died."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from . import settings
from .errors import CommunicationError
from .mpi import MPI, agree, deaths_are_survived
from .protocol import world
from .protocol.diagnosis import names
from .protocol.interrupts import guard
from .protocol.recovery import Assembly, assemble
from .protocol.status import SHRINK_ACKNOWLEDGED, SHRINK_HERE
from .record import Call

# MPI may need this long to notice a death.
NOTICE = 3.0  # seconds


def shrink(timeout: float | None = None) -> dist.ProcessGroup:
    """Make a new default group of the survivors, and number them from 0 again.

    Every survivor calls this function after the error that reported the death. The ranks keep their
    order: if rank 1 of 4 dies, ranks 0, 2, 3 become 0, 1, 2. The call destroys all other groups, so
    make your groups, device meshes and DDP models again. Tensors and models stay as they were on
    each rank. PyTorch has ``dist.shrink_group`` for this purpose, but it needs a store and a
    backend in C++, which the mpi backend doesn't have.

    Args:
        timeout: seconds to wait for the other survivors; by default, the default group's timeout.

    Returns:
        The new default group, ``dist.group.WORLD``, with the same timeout as the old one.

    Raises:
        CommunicationTimeout: a survivor did not call this function in time.
        RuntimeError: no rank has died, MPI has not noticed a death, or the job was not started with
            ``mpiexec --with-ft ulfm``.
    """
    limit = _checked().timeout
    while True:
        here = world.current()
        late = _assemble(here, limit if timeout is None else timeout)
        with guard:
            if dist.is_initialized():
                dist.destroy_process_group()
            _create_world(here.base, limit)
        if late is not None:
            raise late
        try:
            dist.init_process_group("mpi", timeout=timedelta(seconds=limit))
            return dist.group.WORLD
        except CommunicationError:
            if not world.current().dead():
                raise


def _checked() -> world.World:
    """Return the world; raise RuntimeError if it can't shrink."""
    here = world.current()
    if here is None:
        raise RuntimeError(
            'You called shrink() without a process group. Call init_process_group("mpi") first.'
        )
    if not deaths_are_survived():
        raise RuntimeError(
            "You called shrink() in a job that ends when a rank dies. Start the ranks with "
            f"{settings.fault_tolerant}."
        )
    if not here.dead() and not here.incident():
        raise RuntimeError(
            "You called shrink(), but all ranks live. Call it only after the death of a rank."
        )
    return here


def _assemble(here: world.World, timeout: float) -> KeyboardInterrupt | None:
    """Wait for all survivors here, because a rank that waited in MPI's call could not leave it."""
    here.give_up_all()
    failed = _Failed(here)
    meeting = Assembly(
        Call("shrink", tuple(filter(here.is_alive, range(here.size)))),
        here.board,
        SHRINK_HERE,
        SHRINK_ACKNOWLEDGED,
        failed.others,
        number=1,
        check=failed.check,
    )
    return assemble(meeting, timeout)


class _Failed:
    """The ranks that MPI knows to be dead; it would wait for every other rank."""

    def __init__(self, here: world.World):
        self._here = here
        self._unnoticed_since: float | None = None

    def _known(self) -> set[int]:
        base = self._here.base
        MPI.COMM_SELF.Iprobe()  # MPI learns of a death only while somebody calls it
        failed = base.Get_failed()
        ranks = MPI.Group.Translate_ranks(failed, range(failed.size), base.group)
        failed.Free()
        return set(ranks)

    def others(self) -> list[int]:
        """Return all ranks that MPI doesn't know to be dead."""
        known = self._known()
        return [rank for rank in range(self._here.size) if rank not in known]

    def check(self) -> None:
        """Raise RuntimeError if MPI doesn't notice a death for :data:`NOTICE` seconds."""
        unnoticed = set(self._here.dead()) - self._known()
        now = time.monotonic()
        self._unnoticed_since = (self._unnoticed_since or now) if unnoticed else None
        if unnoticed and now - self._unnoticed_since > NOTICE:
            raise RuntimeError(
                f"shrink() cannot continue, because Open MPI did not notice that {names(unnoticed)}"
                " died. It notices a process that is killed, crashes or exits with status 0, but "
                "not a process that ends itself with another status, for example by os._exit(1)."
            )


def _create_world(base: MPI.Intracomm, timeout: float) -> None:
    """Make a world of the survivors, and try again if another rank dies during the attempt."""
    agreed = False
    while not agreed:
        base.Revoke()  # another rank may wait for the dead rank inside an MPI call
        base = base.Shrink()
        made = True
        try:
            world.create(base, timeout)
        except MPI.Exception:
            made = False
            base.Revoke()
        agreed = agree(base, made)
