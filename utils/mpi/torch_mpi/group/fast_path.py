"""The fast path of ``all_reduce``: a blocking sum of a plain tensor like one before.

It does what :meth:`ProcessGroupMPI.run` does, without all that such a call does not need. Each
microsecond counts here, so the handshake's usual case is written out; whatever is unusual is the
handshake's. :data:`DONE` is the work of every call that was over at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp, Work

from ..errors import users_place
from ..mpi import MPI
from ..network import link
from ..protocol.announcements import ACKNOWLEDGED, DEPTH, alike, fingerprint, numbered
from ..protocol.ctrl_c import guard
from ..protocol.handshake import Handshake
from ..record import Call, recorder
from . import tensors
from .dtypes import reduction

if TYPE_CHECKING:
    from .collectives import Operation

# Of so many kinds of tensors a group remembers what it knows.
_MOST = 4096
_SUM = ReduceOp.SUM
_now = time.perf_counter
_thread = threading.get_ident
_profiling = torch.autograd._profiler_enabled
_address = MPI.buffer.fromaddress
_MAIN_THREAD = threading.main_thread().ident


class DoneWork(Work):
    """A communication that was complete when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once: it is over."""
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return that it is over."""
        return True

    is_success = is_completed


#: The one work of all calls that were over at once.
DONE = DoneWork()


@dataclass(slots=True)
class Known:
    """What is known beforehand of a blocking all_reduce of tensors of one dtype and shape.

    Attributes:
        unnumbered: its fingerprint as collective 0.
        call: the record of the call that it was learned from.
        count, nbytes, datatype: of the tensor.
        size, words, acknowledged: of the board: ranks, words, place of this rank's acknowledgement.
        all_reduce: MPI's call.
    """

    unnumbered: int
    call: Call
    count: int
    nbytes: int
    datatype: MPI.Datatype
    size: int
    words: memoryview
    acknowledged: int
    all_reduce: Callable


class FastPath:
    """What one group remembers of its calls of ``all_reduce``.

    Args:
        handshake: of the group.
        data: the communicator of its collectives.
    """

    def __init__(self, handshake: Handshake, data: MPI.Intracomm):
        self._handshake = handshake
        self._data = data
        self._known: dict[tuple, Known] = {}

    def forget(self) -> None:
        """Have the next call look whether all is well."""
        self._known.clear()

    def find(self, inputs: object) -> Known | None:
        """Return what is known of such a call; ``None`` where the fast path cannot be taken."""
        if type(inputs) is not list or len(inputs) != 1 or type(inputs[0]) is not torch.Tensor:
            return None
        tensor = inputs[0]
        try:
            known = self._known.get((tensor.dtype, tensor.shape))
        except RuntimeError:  # a nested tensor has no shape: refused later
            return None
        # With a grad_fn, a backward pass will have to warn.
        return known if tensor.grad_fn is None and self._handshake.idle else None

    def remember(self, operation: Operation, code: int) -> None:
        """Have a call like this blocking one take the fast path, where possible."""
        call = operation.call
        if (call.op, call.reduce_op) != ("all_reduce", "SUM") or len(self._known) >= _MOST:
            return
        tensor = operation.result[0]
        if type(tensor) is not torch.Tensor or tensor.is_complex():
            return
        if tensor.layout is not torch.strided or not 0 < tensor.numel() <= tensors.MAX_COUNT:
            return
        datatype, op = reduction(tensor.dtype, "SUM")
        if op != MPI.SUM:
            return
        board = self._handshake.announcements.board
        self._known[tensor.dtype, tensor.shape] = Known(
            fingerprint(0, code, blocking=True),
            call,
            tensor.numel(),
            call.nbytes,
            datatype,
            board.size,
            board.words,
            board.place(ACKNOWLEDGED),
            self._data.Allreduce,
        )

    def all_reduce(self, tensor: torch.Tensor, opts: Any, known: Known) -> bool:
        """Do it, holding the handshake's lock; return False when it has to go the long way.

        Raises:
            MPI.Exception: MPI reported an error.
        """
        start = _now()
        if not (
            link.network is None
            and not getattr(opts, "asyncOp", True)
            and opts.reduceOp == _SUM
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not _profiling()
            and _thread() == _MAIN_THREAD
        ):
            return False
        handshake = self._handshake
        announcements = handshake.announcements
        number = announcements.number + 1
        if number > announcements.limit and not announcements.may_announce(number):
            return False
        block = [_address(tensor.data_ptr(), known.nbytes), known.count, known.datatype]
        mine = numbered(known.unnumbered, number)
        first = number % DEPTH * known.size
        end = first + known.size
        words = known.words
        everybody = alike(mine, known.size)
        matched = 0.0
        guard.on += 1
        try:
            words[first + announcements.board.rank] = mine
            if words[first:end].tolist() == everybody or handshake.find_all(number, mine):
                # Announcements.acknowledge, in short.
                words[known.acknowledged] = number
                if words[first:end].tolist() == everybody or handshake.find_all_again(number, mine):
                    announcements.number = number
                    matched = _now()
                    known.all_reduce(MPI.IN_PLACE, block)
                    recorder.add_like(known.call, start, matched, _now(), number)
        finally:
            guard.on -= 1
        if not matched:
            place = users_place()
            call = replace(known.call, sequence=number, place=place, blocking=True)
            handshake.leave_to_next_call(call)
        if guard.late:
            guard.release()
        return matched > 0
