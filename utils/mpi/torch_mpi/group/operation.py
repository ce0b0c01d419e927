"""The call of a collective as data, for ranks that are processes and for ranks inside a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..record import Call
from .arguments import Tensors

if TYPE_CHECKING:
    from .algorithms import Ranks

#: The name of a method of ``MPI.Intracomm``, and its arguments.
MPICall = tuple[str, tuple[Any, ...]]
#: From the inputs of all ranks, in group order, to the values of this rank's outputs. It is a pure
#: function: it changes no input, and the values may be views of inputs.
Definition = Callable[[Sequence[Tensors]], Sequence[torch.Tensor]]


class Caller(Protocol):
    """The process group whose collective a rank calls."""

    members: tuple[int, ...]

    def rank(self) -> int:
        """Return this rank's number in the group."""

    def size(self) -> int:
        """Return how many ranks the group has."""

    def record(
        self,
        op: str,
        inputs: Tensors,
        opts: object = None,
        *,
        peer: int | None = None,
        reduce_op: str = "",
        sent: int | None = None,
    ) -> Call:
        """Check that the group is usable, and record a call."""


@dataclass(slots=True)
class Operation:
    """A call of a collective on this rank; PROTOCOL.md has a table of the fields.

    A carrier has two ways to run it. It can take copies of the ``inputs`` of all ranks, put the
    values of ``definition`` into ``outputs``, and call ``finish``. Or it has MPI move the data: it
    makes the calls of ``mpi``, or runs ``algorithm``, and calls ``compute`` and ``finish``. The
    modules of MPI are imported only in these two.
    """

    call: Call
    key: tuple[object, ...]
    result: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    definition: Definition
    algorithm: Callable[[Ranks], Generator]
    mpi: Callable[[Sequence[int]], list[MPICall]] | None = None
    memory: Sequence[torch.Tensor] = ()
    compute: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    shown: Sequence[torch.Tensor] | None = None
    sources: Sequence[int] = ()
    messages_from: float = math.inf
    repeatable: bool = False

    def mpi_calls(self) -> list[MPICall]:
        """Return the calls of MPI for the memory of this operation."""
        assert self.mpi is not None
        return self.mpi([tensor.data_ptr() for tensor in self.memory])

    def end(self) -> None:
        """Complete the result after MPI has moved the data."""
        if self.compute is not None:
            self.compute()
        if self.finish is not None:
            self.finish()


def same(memory: Tensors, tensors: Tensors) -> bool:
    """Return whether MPI works on the memory of the user's tensors themselves."""
    pairs = zip(memory, tensors, strict=False)
    return len(memory) == len(tensors) and all(a.data_ptr() == b.data_ptr() for a, b in pairs)
