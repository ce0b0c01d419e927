"""Calls of a process group on record, and MPI's errors in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import CommunicationError, CommunicationMismatch, users_line, users_place
from ..mpi import MPI
from ..protocol.contracts import Group, Waitable
from ..protocol.failures import is_death
from ..record import Call, recorder
from . import buffers
from .dtypes import dtype_name

if TYPE_CHECKING:
    from .process_group import ProcessGroupMPI

_MAIN_THREAD = threading.main_thread().ident


def record(
    group: ProcessGroupMPI,
    op: str,
    tensors: Sequence[torch.Tensor],
    opts: object = None,
    *,
    peer: int | None = None,
    tag: int | None = None,
    blocking: bool | None = None,
    reduce_op: str = "",
    sent: int | None = None,
) -> Call:
    """Check the group, and put the call on record.

    Args:
        tensors: checked before, see :func:`torch_mpi.group.buffers.check`.
        opts: PyTorch's; whether the call blocks, where ``blocking`` does not say so.
        sent: bytes; all of the tensors, if not given.

    Raises:
        CommunicationError: the group is of no use any more, or an incident is on.
    """
    group.check_alive(op)
    first = tensors[0] if tensors else None
    call = Call(
        op,
        group.members,
        buffers.nbytes(*tensors),
        () if first is None else tuple(first.shape),
        "" if first is None else dtype_name(first.dtype),
        peer,
        tag,
        reduce_op,
        # A caller without options, as PyTorch's C++ is, waits for the work.
        not getattr(opts, "asyncOp", True) if blocking is None else blocking,
        place=users_place(),
    )
    if threading.get_ident() != _MAIN_THREAD:
        call.thread = threading.current_thread().name
    call.sent = call.nbytes if sent is None else sent
    recorder.add(call)
    return call


def in_words(
    error: MPI.Exception, call: Call, group: Group, waitable: Waitable | None = None
) -> CommunicationError:
    """What a user is told of an error of MPI; after a death the group is of no use any more."""
    if is_death(error):
        group.revoke()
        return group.world.stopped_by_another(call, waitable, time.perf_counter() - call.start)
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return CommunicationMismatch(
            f"{call.describe()} at {users_line()}: the message that arrived is larger than the "
            f"tensor to receive it. Sender and receiver must agree on shape and dtype.",
            call,
        )
    return CommunicationError(f"{call.describe()} at {users_line()} failed: {error}", call)
