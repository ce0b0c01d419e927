"""Communications that failed on the ranks, for a check that explains why."""

from __future__ import annotations

from typing import NamedTuple

#: What a rank waited for never comes.
STUCK = "CommunicationTimeout"
#: Two ranks made calls that don't match.
MISMATCH = "CommunicationMismatch"


class Failed(NamedTuple):
    """A communication that failed on a rank.

    Attributes:
        kind: the name of its error's class, see :mod:`torch_mpi.errors`.
        call: the operation, such as "send"; "" for any.
    """

    kind: str
    call: str = ""

    def is_a(self, cause: Failed) -> bool:
        """Return whether this one has the kind and the operation of `cause`."""
        return self.kind == cause.kind and cause.call in ("", self.call)
