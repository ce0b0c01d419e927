"""Make communicators without any risk that a rank is stuck inside C: see PROTOCOL.md."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..mpi import MPI, agree, deaths_are_survived, largest_tag
from ..record import Call
from .interfaces import Waitable
from .interrupts import guard
from .wait_monitor import wait_for

if TYPE_CHECKING:
    from .world import World


class Rendezvous(Waitable):
    """An exchange of empty messages with every other rank, whose receives can be canceled.

    Args:
        communicator: the communicator in which ``ranks`` are numbered.
        tag: a number that is equal on all ranks, and different for every rendezvous.
        purpose: the operation's name in messages.
    """

    def __init__(self, communicator: MPI.Intracomm, ranks: Sequence[int], tag: int, purpose: str):
        self.call = Call(purpose, tuple(ranks), sequence=tag)
        others = [rank for rank in ranks if rank != communicator.rank]
        self._receives = {r: communicator.Irecv([None, 0, MPI.BYTE], r, tag) for r in others}
        self._sends = [communicator.Isend([None, 0, MPI.BYTE], r, tag) for r in others]

    def poll(self) -> bool:
        """Return whether all ranks are here."""
        self._receives = {r: q for r, q in self._receives.items() if not q.Test()}
        return not self._receives

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the ranks that aren't here yet. All of them must come, and no data move."""
        return list(self._receives), False, False

    def withdraw(self) -> bool:
        """Cancel the receives that are left."""
        for request in self._receives.values():
            if request != MPI.REQUEST_NULL:
                request.Cancel()
                request.Wait()
        return True


@contextlib.contextmanager
def rendezvous(
    communicator: MPI.Intracomm,
    ranks: Sequence[int],
    number: int,
    purpose: str,
    timeout: float,
    world: World | None = None,
) -> Iterator[None]:
    """Wait until all ``ranks`` of the communicator are here, and then run the block.

    A Ctrl-C takes effect at the end of the block, because another rank may wait inside C there.

    Args:
        number: distinguishes several rendezvous of the same ranks.

    Raises:
        CommunicationTimeout: a rank did not come within ``timeout`` seconds.
    """
    # There are two rounds: a rank that leaves the first one never comes to the second. If a world
    # exists, ranks can announce that they leave, so Ctrl-C is delayed during the second round.
    _wait(communicator, ranks, (number, 0, purpose), timeout, world)
    if world is None:
        _wait(communicator, ranks, (number, 1, purpose), timeout, world)
    with guard:
        if world is not None:
            _wait(communicator, ranks, (number, 1, purpose), timeout, world)
        yield


def _wait(
    communicator: MPI.Intracomm,
    ranks: Sequence[int],
    name: tuple[int, int, str],
    timeout: float,
    world: World | None,
) -> None:
    half = largest_tag(communicator) // 2  # nothing else uses the tags above it
    # The messages of a rendezvous that failed stay in the communicator. The epoch in the tag keeps
    # them out of later ones, because an error ends an epoch.
    epoch = 0 if world is None else world.epoch
    key = zlib.crc32(repr((tuple(ranks), epoch, *name)).encode())
    met = Rendezvous(communicator, ranks, half + key % half, name[-1])
    try:
        wait_for(met, timeout, world)
    except BaseException:  # even after Ctrl-C, no receive may take the next meeting's messages
        met.withdraw()
        raise


def two_communicators(world: World, members: tuple[int, ...]) -> list[MPI.Intracomm]:
    """Make two communicators; if a rank dies at that time, all ranks raise an error, or none.

    Raises:
        MPI.Exception: a rank has died.
    """
    if not deaths_are_survived() or not _are_all(world, members):
        return [one_communicator(world, members) for _ in range(2)]
    made = []
    try:
        made = [world.base.Dup() for _ in range(2)]
    except MPI.Exception:
        world.base.Revoke()  # no other rank must wait for this one
    if not agree(world.base, len(made) == 2):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)
    return made


def one_communicator(world: World, members: tuple[int, ...]) -> MPI.Intracomm:
    """Make a communicator of some ranks of the world, all of which call this."""
    if _are_all(world, members):
        # Unlike Create_group, Dup ends with an error if a rank dies at that time.
        return world.base.Dup()
    group = world.base.group.Incl(members)
    made = world.base.Create_group(group)
    group.Free()
    return made


def _are_all(world: World, members: tuple[int, ...]) -> bool:
    return members == tuple(range(world.size))
