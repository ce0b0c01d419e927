"""Communicators are made, without any risk that a rank is stuck inside C: see PROTOCOL.md."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..mpi import MPI, agree, deaths_are_survived, largest_tag
from ..record import Call
from .interfaces import Waitable
from .progress import guard
from .wait_monitor import wait_for

if TYPE_CHECKING:
    from .world import World


class Rendezvous(Waitable):
    """Empty messages from and to every other rank, whose receives can be cancelled.

    Args:
        communicator: in which ``ranks`` count.
        tag: the same on all, different for every rendezvous.
        purpose: the operation's name for messages.
    """

    def __init__(self, communicator: MPI.Intracomm, ranks: Sequence[int], tag: int, purpose: str):
        self.call = Call(purpose, tuple(ranks), sequence=tag)
        others = [rank for rank in ranks if rank != communicator.rank]
        self._receives = {r: communicator.Irecv([None, 0, MPI.BYTE], r, tag) for r in others}
        self._sends = [communicator.Isend([None, 0, MPI.BYTE], r, tag) for r in others]

    def poll(self) -> bool:
        """Return whether everybody is here."""
        self._receives = {r: q for r, q in self._receives.items() if not q.Test()}
        return not self._receives

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return who is not here yet; one of them is not enough; nothing is on its way."""
        return list(self._receives), False, False

    def withdraw(self) -> bool:
        """Do not wait any more."""
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
    """Wait until all ``ranks`` of the communicator have come here; the block is what they do then.

    Ctrl-C waits for the end of the block: another rank may be in it, stuck inside C.

    Args:
        number: tells rendezvous of the same ranks apart.

    Raises:
        CommunicationTimeout: one did not come within ``timeout`` seconds.
    """
    # Twice: who came, but left before all were here, does not come to the second round. Where a
    # rank that leaves can tell so, nobody leaves the second round because of Ctrl-C.
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
    half = largest_tag(communicator) // 2  # above it: tags that nobody else uses
    # Who left the last rendezvous has sent messages that stay: an error ends an epoch, and with it
    # their meaning.
    epoch = 0 if world is None else world.epoch
    key = zlib.crc32(repr((tuple(ranks), epoch, *name)).encode())
    met = Rendezvous(communicator, ranks, half + key % half, name[-1])
    try:
        wait_for(met, timeout, world)
    except BaseException:  # Ctrl-C: its receives must not take the next meeting's messages
        met.withdraw()
        raise


def two_communicators(world: World, members: tuple[int, ...]) -> list[MPI.Intracomm]:
    """Make two. Where a rank dies meanwhile, every rank has an error, or none.

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
        # Unlike the other call it ends with an error when a rank dies meanwhile.
        return world.base.Dup()
    group = world.base.group.Incl(members)
    made = world.base.Create_group(group)
    group.Free()
    return made


def _are_all(world: World, members: tuple[int, ...]) -> bool:
    return members == tuple(range(world.size))
