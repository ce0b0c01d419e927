"""Going on without the ranks that have died."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from . import settings
from .errors import CommunicationError
from .mpi import MPI, agree, deaths_are_survived
from .protocol import world
from .protocol.diagnosis import names
from .protocol.progress import guard
from .protocol.recovery import Assembly, assemble
from .protocol.status import SHRINK_ACKNOWLEDGED, SHRINK_HERE
from .record import Call

# How long MPI may take to notice a death.
NOTICE = 3.0  # seconds


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
    """Return the world; raise RuntimeError where it cannot shrink."""
    here = world.current()
    if here is None:
        raise RuntimeError('shrink() before init_process_group("mpi"): there is no group')
    if not deaths_are_survived():
        raise RuntimeError(
            "shrink() in a job that ends with its first dead rank: start it with "
            f"{settings.fault_tolerant}"
        )
    if not here.dead() and not here.incident():
        raise RuntimeError("shrink(): all ranks live, there is none to go on without")
    return here


def _assemble(here: world.World, timeout: float) -> KeyboardInterrupt | None:
    """Wait for all ranks that live: in MPI's call a rank would be stuck until they come."""
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
    """The ranks that MPI knows to be dead: for any other one it would wait."""

    def __init__(self, here: world.World):
        self._here = here
        self._unnoticed_since: float | None = None

    def _known(self) -> set[int]:
        base = self._here.base
        MPI.COMM_SELF.Iprobe()  # MPI takes in news while it is called
        failed = base.Get_failed()
        ranks = MPI.Group.Translate_ranks(failed, range(failed.size), base.group)
        failed.Free()
        return set(ranks)

    def others(self) -> list[int]:
        """Return all ranks but those."""
        known = self._known()
        return [rank for rank in range(self._here.size) if rank not in known]

    def check(self) -> None:
        """Raise RuntimeError where MPI takes no notice of a death."""
        unnoticed = set(self._here.dead()) - self._known()
        now = time.monotonic()
        self._unnoticed_since = (self._unnoticed_since or now) if unnoticed else None
        if unnoticed and now - self._unnoticed_since > NOTICE:
            raise RuntimeError(
                f"shrink(): Open MPI does not know that {names(unnoticed)} died. It takes notice of"
                " a process that is killed, crashes, or exits with status 0; not of one that ends "
                "itself with another status, as by os._exit(1)"
            )


def _create_world(base: MPI.Intracomm, timeout: float) -> None:
    """Make a world of the ranks that live, until no rank dies meanwhile."""
    agreed = False
    while not agreed:
        base.Revoke()  # another rank may be inside of a call, waiting for the dead one
        base = base.Shrink()
        made = True
        try:
            world.create(base, timeout)
        except MPI.Exception:
            made = False
            base.Revoke()
        agreed = agree(base, made)
