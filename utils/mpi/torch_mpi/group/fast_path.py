"""The fast path: a blocking collective on plain tensors that are like those of an earlier call.

Each microsecond counts here. All unusual calls take the long way, which checks everything. See
"The fast path" in ``PROTOCOL.md``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..errors import users_place
from ..mpi import MPI
from ..network import link
from ..protocol.handshake import Handshake, unnumbered
from ..record import Call, recorder
from . import arithmetic, datatypes, tensors
from .arguments import Tensors
from .operation import MPICall, Operation

# The number of kinds of calls that a group remembers at most.
_MOST = 4096
_SUM = ReduceOp.SUM
_SUMMED = ("SUM", None)
_PLAIN = ("", None)
_now = time.perf_counter
_Tensor = torch.Tensor
_thread = threading.get_ident
_profiling = torch.autograd._profiler_enabled
_MAIN_THREAD = threading.main_thread().ident

#: The tensors of a call in the order of ``Operation.memory``, and its reduction and root.
Parts = tuple[Sequence[torch.Tensor], object]


def _of_reduction(inputs: Tensors, opts: Any) -> Parts:
    """Return the parts of an ``all_reduce``."""
    op = opts.reduceOp
    return inputs, _SUMMED if op == _SUM else (arithmetic.op_name(op), None)


def _of_reduction_to_root(inputs: Tensors, opts: Any) -> Parts:
    """Return the parts of a ``reduce``."""
    return inputs, (arithmetic.op_name(opts), opts.rootRank)


def _of_copy_from_root(inputs: Tensors, opts: Any) -> Parts:
    """Return the parts of a ``broadcast``."""
    return inputs, ("", opts.rootRank)


def _of_gathering(outputs: Sequence[Tensors], inputs: Tensors, _opts: Any) -> Parts:
    """Return the parts of an ``all_gather`` into one list."""
    (each,) = outputs
    return [*each, *inputs], _PLAIN


def _of_pair(output: torch.Tensor, tensor: torch.Tensor, _opts: Any) -> Parts:
    """Return the parts of an ``all_gather_into_tensor``."""
    return [output, tensor], _PLAIN


def _of_reduced_pair(output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Parts:
    """Return the parts of a ``reduce_scatter_tensor``."""
    return [output, tensor], (arithmetic.op_name(opts), None)


def _of_nothing(_opts: Any) -> Parts:
    """Return the parts of a ``barrier``."""
    return [], _PLAIN


_PARTS: dict[str, Callable[..., Parts]] = {
    "all_reduce": _of_reduction,
    "reduce": _of_reduction_to_root,
    "broadcast": _of_copy_from_root,
    "all_gather": _of_gathering,
    "all_gather_into_tensor": _of_pair,
    "reduce_scatter_tensor": _of_reduced_pair,
    "barrier": _of_nothing,
}


@dataclass(slots=True)
class Known:
    """A prepared blocking collective for tensors of certain dtypes and shapes.

    Attributes:
        word: its announcement, see :func:`~torch_mpi.protocol.handshake.unnumbered`.
        call: the record of the earlier call.
        mpi: see ``Operation.mpi``.
        nbytes: bytes of each tensor.
        addresses: of the last call's tensors; ``method`` and ``arguments`` are made for them.
        method: the communicator's method that makes the call.
        arguments: the arguments of ``method``.
        has_our_op: whether MPI calls an op that we have written, which may have failed.
    """

    word: int
    call: Call
    mpi: Callable[[Sequence[int]], list[MPICall]]
    nbytes: list[int]
    addresses: list[int] = field(default_factory=list)
    method: Callable | None = None
    arguments: tuple[Any, ...] = ()
    has_our_op: bool = False


def _key_and_addresses(
    op: str, how: object, given: Sequence[torch.Tensor]
) -> tuple[tuple, list[int]] | None:
    """Return the key of a call in `FastPath.known`, and its tensors' addresses.

    Returns:
        ``None`` if a tensor isn't plain.
    """
    key: tuple = (op, how)
    addresses = []
    for tensor in given:
        # A tensor with a grad_fn may need a warning, which only the long way gives.
        if (
            type(tensor) is not _Tensor
            or tensor.grad_fn is not None
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        key = (key, tensor.dtype, tensor.shape)
        addresses.append(tensor.data_ptr())
    return key, addresses


class FastPath:
    """The memory of one group's blocking collectives, which makes the next ones fast.

    Args:
        data: the communicator of the group's collectives.

    Attributes:
        known: prepared calls by operation, reduction, root, dtypes and shapes. Without one, a call
            checks everything again.
    """

    def __init__(self, handshake: Handshake, data: MPI.Intracomm):
        self._handshake = handshake
        self._data = data
        self.known: dict[tuple, Known] = {}

    def remember(self, operation: Operation, code: int) -> None:
        """Have the next call like this blocking one take the fast path, if possible."""
        call = operation.call
        memory = operation.memory
        if not operation.repeatable or len(self.known) >= _MOST:
            return
        if any(not tensor.numel() or tensor.is_complex() for tensor in memory):
            return
        key: tuple = (call.op, (call.reduce_op, call.peer))
        for tensor in memory:
            key = (key, tensor.dtype, tensor.shape)
        nbytes = [tensors.nbytes(tensor) for tensor in memory]
        known = Known(unnumbered(code), call, operation.mpi, nbytes)
        if call.reduce_op:
            known.has_our_op = arithmetic.needs_our_op(memory[0].dtype, call.reduce_op)
        if self._prepare(known, [tensor.data_ptr() for tensor in memory]):
            self.known[key] = known

    def find(
        self,
        op: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Known | None:
        """Return the prepared call for these arguments; ``None`` if it must take the long way."""
        if options:  # PyTorch passes only the options of a barrier by name
            if options.keys() != {"opts"}:
                return None
            arguments = (*arguments, options["opts"])
        try:
            if (
                arguments[-1].asyncOp
                or link.network is not None
                or _thread() != _MAIN_THREAD
                or _profiling()
            ):
                return None
            given, how = _PARTS[op](*arguments)
            found = _key_and_addresses(op, how, given)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None  # unusual arguments or tensors, which the long way accepts or refuses
        if found is None:
            return None
        key, addresses = found
        known = self.known.get(key)
        if known is None or (addresses != known.addresses and not self._prepare(known, addresses)):
            return None
        return known

    def _prepare(self, known: Known, addresses: list[int]) -> bool:
        """Prepare MPI's call for tensors at these addresses; return False if they don't suit it."""
        if not all(addresses) or tensors.any_overlap(addresses, known.nbytes):
            return False
        calls = known.mpi(addresses)
        if len(calls) != 1:
            return False
        name, known.arguments = calls[0]
        known.method = getattr(self._data, name)
        known.addresses = addresses
        return True

    def begin(self, known: Known) -> bool:
        """Make the call; return False if it has to take the long way.

        The caller holds the handshake's lock, and delays a Ctrl-C.

        Raises:
            MPI.Exception: MPI reported an error.
        """
        start = _now()
        handshake = self._handshake
        number = handshake.meet(known.word)
        if not number:
            handshake.fast_call = replace(
                known.call, sequence=handshake.coming, place=users_place(), blocking=True
            )
            return False
        matched = _now()
        known.method(*known.arguments)
        if known.has_our_op:
            datatypes.check_ops()
        end = _now()
        # Finding the line takes about 2 µs, which is too long for a frequent all_reduce.
        place = None if known.call.op == "all_reduce" else users_place()
        recorder.add_like(known.call, start, matched, end, number, place)
        return True
