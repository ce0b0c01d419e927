"""A collective as data: what one call of it needs to be carried out."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..record import Call
from .algorithms import Ranks

#: The name of a method of ``MPI.Intracomm``, and its arguments.
MPICall = tuple[str, tuple[Any, ...]]


@dataclass(slots=True)
class Operation:
    """One call of a collective on this rank.

    Attributes:
        call: its record.
        key: what has to be equal on all ranks, besides what ``call`` says.
        result: the tensors that its future yields.
        algorithm: the collective as messages between the ranks of a group.
        mpi: MPI's blocking calls for it, ``(name, arguments)``; ``None`` where there is none.
        finish: called once at the end: brings the results home.
        keep: memory that MPI uses until then.
        inputs: the tensors to show in a profile; without them, ``result``.
        messages_from: bytes from which messages are faster than MPI's non-blocking call.
    """

    call: Call
    key: tuple[object, ...]
    result: Sequence[torch.Tensor]
    algorithm: Callable[[Ranks], Generator]
    mpi: Callable[[], list[MPICall]] | None = None
    finish: Callable[[], None] | None = None
    keep: object = None
    inputs: Sequence[torch.Tensor] | None = None
    messages_from: float = math.inf
