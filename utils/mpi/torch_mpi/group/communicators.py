"""New communicators of some ranks, all of which call this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..mpi import MPI
from ..protocol import failures

if TYPE_CHECKING:
    from ..protocol.world import World


def two(world: World, members: tuple[int, ...]) -> list[MPI.Intracomm]:
    """Two of them. Where a rank dies meanwhile, every rank has an error, or none.

    Raises:
        MPI.Exception: a rank has died.
    """
    if not failures.are_survived() or not _are_all(world, members):
        return [one(world, members) for _ in range(2)]
    made = []
    try:
        made = [world.base.Dup() for _ in range(2)]
    except MPI.Exception:
        world.base.Revoke()  # no other rank must wait for this one
    if not failures.agree(world.base, len(made) == 2):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)
    return made


def one(world: World, members: tuple[int, ...]) -> MPI.Intracomm:
    """One of them."""
    if _are_all(world, members):
        # Unlike the other call it ends with an error when a rank dies meanwhile.
        return world.base.Dup()
    group = world.base.group.Incl(members)
    made = world.base.Create_group(group)
    group.Free()
    return made


def _are_all(world: World, members: tuple[int, ...]) -> bool:
    return members == tuple(range(world.size))
