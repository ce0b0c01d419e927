"""Check the arguments of a communication: tensors, one for each rank, parts of one, a root.

This module needs no MPI, so ranks that are threads use it, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import TensorSizeError, users_place

#: PyTorch passes a list of tensors, even if a call has a single tensor.
Tensors = Sequence[torch.Tensor]

_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)
#: The lines at which this rank has warned of a wrong gradient.
warned: set[tuple[str, int, str] | None] = set()


def check_message(
    group: ProcessGroup, op: str, role: str, peer: int | None, tag: int, largest: int
) -> None:
    """Raise ValueError if the group has no such rank (``None``: any rank), or MPI no such tag."""
    size = group.size()
    if peer is not None and not 0 <= peer < size:
        raise ValueError(
            f"{op}({role}={peer}): the group has ranks 0 to {size - 1} (global {group.members})"
        )
    if not hasattr(tag, "__index__") or not 0 <= tag <= largest:
        raise ValueError(
            f"{op}(tag={tag!r}): choose a tag from 0 to {largest}, the largest that this MPI "
            "library allows (MPI_TAG_UB)"
        )


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's short name, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def check(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Refuse everything that MPI can't communicate.

    Returns:
        The tensor. For the result of a functional collective, the function waits until it is there.

    Raises:
        TypeError: it isn't a dense tensor, or it has no memory.
        ValueError: it isn't on the CPU.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op} expects a tensor, got {type(tensor).__name__}")
    if type(tensor) not in _WITH_MEMORY and type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.trigger_wait()
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{op}: the mpi backend moves CPU tensors, but yours is on {tensor.device} (shape "
            f"{list(tensor.shape)}). Move it with .cpu() first."
        )
    if hasattr(tensor, "fake_mode"):
        raise TypeError(f"{op}: you passed a FakeTensor, which has no elements to communicate")
    if tensor.is_nested:
        raise TypeError(
            f"{op}: a nested tensor consists of several tensors. Pass the results of .unbind() one "
            "by one."
        )
    _check_memory(tensor, op)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TypeError(
            f"{op}: the mpi backend moves dense tensors, but yours is {kind}. Use .to_dense(), or "
            "send its parts one by one."
        )
    return tensor


def _check_memory(tensor: torch.Tensor, op: str) -> None:
    """Refuse a tensor that only wraps other tensors, as a DTensor does."""
    if type(tensor) in _WITH_MEMORY:
        return
    needs_memory = tensor.layout is torch.strided and tensor.numel() > 0
    if not is_traceable_wrapper_subclass(tensor) and not (needs_memory and not tensor.data_ptr()):
        return
    advice = "Pass the plain tensors that it wraps."
    if hasattr(tensor, "to_local"):
        advice = "Pass this rank's part, .to_local(), or communicate with .redistribute()."
    raise TypeError(
        f"{op}: a {type(tensor).__name__} has no memory that MPI could read or write. {advice}"
    )


def check_writable(tensor: torch.Tensor, op: str) -> None:
    """Refuse to write into a tensor in which several elements share a place in memory.

    Raises:
        ValueError: the tensor is expanded; the message says what to do.
    """
    if not tensor.numel():
        return  # NumPy's empty arrays have strides of 0
    if any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{op} writes into its tensor, but elements of yours share their memory (shape "
            f"{list(tensor.shape)}, stride {list(tensor.stride())}, as after expand()). Pass "
            f"a .clone()."
        )
    _watch_gradient(tensor, op)


# A communication writes into a tensor in place, and autograd doesn't notice. A backward pass
# through the tensor then gives the same gradient as without the communication. PyTorch's own
# backends warn about this in the backward pass, by the autograd fallback of the dispatcher. The
# fallback doesn't see a process group in Python, so here a hook on the tensor does the same.
#
# As in PyTorch, there is no warning under ``no_grad``, or without a backward pass, as for a loss
# that is summed for a log. Unlike in PyTorch, leaves never cause a warning. A leaf's gradient
# belongs to the values that it has now, so you may average parameters in place.
def _watch_gradient(tensor: torch.Tensor, op: str) -> None:
    """Warn, once per line of code, if a backward pass reaches the tensor that ``op`` will write."""
    if tensor.grad_fn is None or not torch.is_grad_enabled():
        return
    place = users_place()
    if place not in warned:
        tensor.register_hook(_warning(op, place))


def _warning(op: str, place: tuple[str, int, str] | None) -> Callable[[torch.Tensor], None]:
    def warn(_gradient: torch.Tensor) -> None:
        if place in warned:
            return
        warned.add(place)
        text = (
            f"{op} has written into a tensor that a backward pass goes through. Autograd did not "
            f"notice, so the gradient is the same as without the communication. If no gradient "
            f"should pass, communicate tensor.detach().clone(); otherwise write a "
            f"torch.autograd.Function whose backward communicates, too."
        )
        if place is None:
            warnings.warn(text, UserWarning, stacklevel=2)
        else:
            warnings.warn_explicit(text, UserWarning, *place[:2])

    return warn


def single(tensors: Tensors | torch.Tensor, op: str) -> torch.Tensor:
    """Return the only tensor of a list; raise ValueError for more or fewer."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if len(tensors) != 1:
        raise ValueError(f"{op}: pass one tensor per rank; you passed a list of {len(tensors)}")
    return check(tensors[0], op)


def root(group: ProcessGroup, op: str, opts: object) -> int:
    """Return the root (in the group); raise ValueError for a rank that the group does not have."""
    rank = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
    if not 0 <= rank < group.size():
        raise ValueError(f"{op}(root {rank}): the group has ranks 0 to {group.size() - 1}")
    return rank


def check_alike(tensors: Tensors, op: str) -> None:
    """Raise TypeError if the tensors have different dtypes."""
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise TypeError(f"{op}: all tensors must have the same dtype, got {' and '.join(dtypes)}")


def check_count(group: ProcessGroup, tensors: Tensors, op: str) -> list[torch.Tensor]:
    """Return a tensor for each rank; raise ValueError if their number is different."""
    if len(tensors) != group.size():
        raise ValueError(
            f"{op}: {len(tensors)} tensors in the list, expected one per rank: {group.size()}"
        )
    return [check(tensor, op) for tensor in tensors]


def check_own(group: ProcessGroup, outputs: Tensors, tensor: torch.Tensor, op: str) -> None:
    """Raise ValueError if the part that this rank gives itself has two sizes.

    Args:
        outputs: one tensor for each rank.
        tensor: what this rank gives itself.
    """
    place = outputs[group.rank()]
    if place.numel() != tensor.numel():
        part = f" {group.rank()} (this rank's)" if op.startswith("all_to_all") else ""
        raise ValueError(
            f"{op}: your input{part} has shape {list(tensor.shape)}, but element {group.rank()} "
            f"(this rank's) of the output list has shape {list(place.shape)}"
        )


def check_each(outputs: Tensors, inputs: Tensors, op: str) -> None:
    """Raise ValueError if an output has another size or dtype than the input at its place."""
    for k, (output, tensor) in enumerate(zip(outputs, inputs, strict=True)):
        if (output.numel(), output.dtype) != (tensor.numel(), tensor.dtype):
            raise ValueError(
                f"{op}: output {k} of each rank must be like input {k}, but they are "
                f"{output.dtype}{list(output.shape)} and {tensor.dtype}{list(tensor.shape)}"
            )


def per_rank(
    group: ProcessGroup, tensors: Tensors, like: torch.Tensor, op: str
) -> list[tuple[int, torch.Tensor]]:
    """Return ``(rank, tensor)`` pairs; raise ValueError if a tensor isn't as large as ``like``."""
    checked = list(enumerate(check_count(group, tensors, op)))
    for rank, tensor in checked:
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise TensorSizeError(
                f"{op}: all tensors must be alike, but element {rank} of the list is "
                f"{tensor.dtype}{list(tensor.shape)}, and the single tensor is "
                f"{like.dtype}{list(like.shape)}"
            )
    return checked


def equal_parts(
    group: ProcessGroup, whole: torch.Tensor, part: torch.Tensor, op: str
) -> list[torch.Tensor]:
    """Return views of ``whole``, one per rank, each with as many elements as ``part``."""
    size = group.size()
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise TensorSizeError(
            f"{op}: the large tensor must be {size} times the small one (world size {size}) "
            f"and have its dtype, but they are {whole.dtype}{list(whole.shape)} and "
            f"{part.dtype}{list(part.shape)}"
        )
    whole = whole.detach()
    if not whole.numel():
        return [whole] * size
    if whole.dim() and whole.shape[0] % size == 0:
        return list(whole.chunk(size))
    return list(whole.reshape(-1).split(part.numel()))


def split(group: ProcessGroup, tensor: torch.Tensor, splits: Sequence[int], role: str) -> list[int]:
    """Return each rank's number of elements, from its number of rows; raise ValueError."""
    size = group.size()
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: the {role} has {rows} rows, which {size} ranks cannot "
                f"share equally. Pass {role}_split_sizes."
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"all_to_all_single: {role}_split_sizes {list(splits)} must be {size} numbers "
            f"that add up to the {rows} rows of the {role}"
        )
    per_row = tensor.numel() // rows if rows else 0
    return [rows_of_rank * per_row for rows_of_rank in splits]
