"""Tensors as a whole in a reply: the kernel computes from their numbers what it judges.

A statistic that a rank computes is only the rank's word. Lists of numbers would be five times as
long as the bytes.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
}


def raw(value: Any) -> dict[str, Any] | str:
    """Return a tensor's dtype, shape and bytes, for JSON; `<TypeName>` for another value."""
    if not isinstance(value, Tensor):
        return f"<{type(value).__name__}>"
    # Methods of the class, because an answer may have given this tensor other methods.
    row = Tensor.detach(value).cpu().reshape(-1).contiguous()
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "bytes": base64.b64encode(row.view(torch.uint8).numpy().tobytes()).decode(),
    }


def tensor_of(told: dict[str, Any]) -> Tensor:
    """Return the tensor of which a rank has told by :func:`raw`.

    Raises:
        ValueError: the bytes don't fit the shape, or the dtype is none of numbers.
    """
    dtype, shape = _DTYPES.get(str(told["dtype"])), [int(n) for n in told["shape"]]
    content = base64.b64decode(told["bytes"], validate=True)
    fits = dtype is not None and len(content) == math.prod(shape) * dtype.itemsize
    if dtype is None or not fits or any(n < 0 for n in shape):
        raise ValueError(f"{len(content)} bytes are no {told['dtype']} tensor of shape {shape}")
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
