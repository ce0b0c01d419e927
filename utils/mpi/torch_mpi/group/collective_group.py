"""The collectives as methods, under the names that PyTorch calls on a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..record import Call
from . import collectives, reductions
from .collective_work import CollectiveWork, JoinedWork
from .named_group import NamedGroup
from .operation import Operation
from .tensors import Tensors


class CollectiveGroup(NamedGroup):
    """A process group with all collectives; a subclass says how an operation is carried out.

    :mod:`torch.distributed` and PyTorch's C++ call these methods. Each has a function of nearly its
    name in ``collectives`` or ``reductions``, which checks the tensors. Where ``opts`` is one of
    PyTorch's objects of options, its ``asyncOp`` says whether the caller waits for the work.
    """

    def run(self, operation: Operation) -> CollectiveWork:
        """Call a collective; it begins when all ranks have announced it."""
        raise NotImplementedError

    def record(
        self, op: str, tensors: Sequence[torch.Tensor], opts: object = None, **more: Any
    ) -> Call:
        """Check the group, and put a call on record; see :func:`torch_mpi.group.calls.record`."""
        raise NotImplementedError

    # -- reductions -----------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: object = None) -> Any:
        """The reduction of the tensors of all ranks, on every rank, in place.

        ``opts`` may be a ``ReduceOp``; without one it is SUM.
        """
        return self.run(reductions.all_reduce(self, tensors, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: object = None) -> CollectiveWork:
        """:meth:`allreduce` of several tensors in one call."""
        return self.run(reductions.all_reduce_coalesced(self, tensors, opts))

    def reduce(self, tensors: Tensors, opts: object = None) -> CollectiveWork:
        """The reduction of all tensors, on the root; the others keep theirs."""
        return self.run(reductions.reduce(self, tensors, opts))

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: object = None
    ) -> CollectiveWork:
        """Rank r gets the reduction of everybody's r-th tensor. Sizes may differ between r."""
        return self.run(reductions.reduce_scatter(self, outputs, inputs, opts))

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: object = None
    ) -> CollectiveWork:
        """Rank r gets the reduction of everybody's r-th equal part of one tensor."""
        return self.run(reductions.reduce_scatter_single(self, output, tensor, opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> JoinedWork:
        """:meth:`reduce_scatter_single` of several tensors."""
        return _joined(self.reduce_scatter_single, outputs, inputs, opts)

    # -- data -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: object = None) -> CollectiveWork:
        """The tensor of the root, on every rank."""
        return self.run(collectives.broadcast(self, tensors, opts))

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
    ) -> CollectiveWork:
        """The tensors of all ranks, in a list on the root."""
        return self.run(collectives.gather(self, outputs, inputs, opts))

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: object = None
    ) -> CollectiveWork:
        """One tensor for each rank, from a list on the root."""
        return self.run(collectives.scatter(self, outputs, inputs, opts))

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
    ) -> CollectiveWork:
        """The tensors of all ranks, in a list on every rank. Shapes may differ between ranks."""
        return self.run(collectives.all_gather(self, outputs, inputs, opts))

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
    ) -> CollectiveWork:
        """:meth:`allgather` of several tensors: ``outputs[rank][i]`` is rank's i-th."""
        return self.run(collectives.all_gather_coalesced(self, outputs, inputs, opts))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: object = None
    ) -> CollectiveWork:
        """The tensors of all ranks, one after the other in one tensor."""
        return self.run(collectives.all_gather_single(self, output, tensor, opts))

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> JoinedWork:
        """:meth:`all_gather_single` of several tensors."""
        return _joined(self.all_gather_single, outputs, inputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> CollectiveWork:
        """Input r goes to rank r, output r comes from rank r."""
        return self.run(collectives.all_to_all(self, outputs, inputs, opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: object = None,
    ) -> CollectiveWork:
        """Rows of one tensor, split between the ranks; splits are numbers of rows."""
        return self.run(
            collectives.all_to_all_single(self, output, tensor, output_splits, input_splits, opts)
        )

    def barrier(self, opts: object = None) -> CollectiveWork:
        """Over when every rank of the group has called it."""
        return self.run(collectives.barrier(self, opts))

    # The names that PyTorch used before, and that its C++ still asks for.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _joined(
    method: Callable[..., CollectiveWork], outputs: Tensors, inputs: Tensors, opts: object
) -> JoinedWork:
    pairs = zip(outputs, inputs, strict=True)
    return JoinedWork([method(*pair, opts) for pair in pairs], list(outputs))
