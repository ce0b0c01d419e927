"""Errors that ranks raised, for a check that explains why: a communication, or its arguments."""

from __future__ import annotations

from typing import NamedTuple

#: What a rank waited for never comes.
STUCK = "CommunicationTimeout"
#: Two ranks made calls that don't match.
MISMATCH = "CommunicationMismatch"
#: The tensors of a collective don't fit each other.
NO_FIT = "TensorSizeError"


class Failed(NamedTuple):
    """An error that a rank raised.

    Attributes:
        kind: the name of its class, see :mod:`torch_mpi.errors`.
        call: of a communication that failed, the operation, such as "send"; "" for any.
    """

    kind: str
    call: str = ""

    def is_a(self, cause: Failed) -> bool:
        """Return whether this one has the kind and the operation of `cause`."""
        return self.kind == cause.kind and cause.call in ("", self.call)
