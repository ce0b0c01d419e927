"""The tensors of a program: values that make every sum exact, and layouts in memory."""

from __future__ import annotations

import math

import numpy as np
import torch

FLOATS = ("float32", "float64", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
#: What can be moved; what can be added up is in `collectives`.
MOVED = (*FLOATS, *COMPLEX, *INTEGERS, "bool", "float8_e4m3fn", "float8_e5m2")
WRITABLE = ("plain", "transposed", "offset", "sliced")


def tensor(
    seed: int, rank: int, shape: list[int], dtype: str, layout: str = "plain", kind: str = "small"
) -> torch.Tensor:
    """A rank's tensor of a step; another seed or rank gives other values.

    Args:
        kind: ``small`` is 1 to 5, ``tiny`` 1 or 2, ``twelves`` have whole means over up to 4 ranks,
            ``huge`` integers leave their range when two are added.
        layout: ``plain``; or a view of a larger memory, the rest of which is 0: ``transposed``,
            ``offset``, ``sliced``; ``expanded`` repeats its first row, and can only be read.
    """
    return _laid_out(_values(seed, rank, shape, dtype, kind), layout)


def _values(seed: int, rank: int, shape: list[int], dtype: str, kind: str) -> torch.Tensor:
    places = np.arange(math.prod(shape))
    small = (places * 7 + places // 5 + 3 * rank + seed) % 5 + 1
    if kind == "tiny":
        small = small % 2 + 1
    elif kind == "twelves":
        small = small * 12
    elif kind == "huge":
        huge = np.iinfo(dtype).max - small.astype(dtype)
        return torch.from_numpy(huge.reshape(shape))
    values = torch.from_numpy(small.reshape(shape))
    wanted = getattr(torch, dtype)
    if wanted is torch.bool:
        return values % 2 == 1
    if wanted.is_complex:
        return torch.complex(values.double(), 2 * values.double()).to(wanted)
    return values.to(torch.float32).to(wanted)


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    shape, dtype = values.shape, values.dtype
    if layout == "expanded" and values.dim() and len(values):
        return values[:1].clone().expand(shape)
    if layout == "transposed":
        view = torch.zeros(shape[::-1], dtype=dtype).permute(tuple(reversed(range(values.dim()))))
    elif layout == "offset":
        view = torch.zeros(values.numel() + 3, dtype=dtype)[2 : 2 + values.numel()].view(shape)
    elif layout == "sliced" and values.dim():
        view = torch.zeros((*shape[:-1], 2 * shape[-1] + 1), dtype=dtype)[..., 1::2]
    elif layout == "sliced":
        view = torch.zeros(3, dtype=dtype)[1]
    else:
        return values.clone()
    return view.copy_(values)


def memory(of: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(of.untyped_storage())


# -- as data --------------------------------------------------------------------------------------


def spec(seed: int, shape, dtype: str, layout: str = "plain", kind: str = "small") -> dict:
    """A tensor as data, see :func:`tensor`."""
    return {"seed": seed, "shape": list(shape), "dtype": dtype, "layout": layout, "kind": kind}


def same(index: int) -> dict:
    """The tensor at a place before in the list of the step."""
    return {"same": index}


def part(index: int, start: int, shape) -> dict:
    """Consecutive elements of a tensor before in the list of the step, in a shape."""
    return {"part": index, "start": start, "shape": list(shape)}


def of_step(step: int) -> dict:
    """The first tensor of a step before: what came of it is gone on with."""
    return {"step": step}


def expression(of: dict, place: str) -> str:
    """The tensor in Python; `place` is the list that it is put into."""
    if "same" in of:
        return f"{place}[{of['same']}]"
    if "part" in of:
        end = of["start"] + math.prod(of["shape"])
        return f"{place}[{of['part']}].view(-1)[{of['start']}:{end}].view({of['shape']})"
    if "step" in of:
        return f"t[{of['step']}][0]"
    words = [of["seed"], "rank", of["shape"], repr(of["dtype"]).replace("'", '"')]
    if of["kind"] != "small" or of["layout"] != "plain":
        words.append(f'"{of["layout"]}"')
    if of["kind"] != "small":
        words.append(f'"{of["kind"]}"')
    return f"tensor({', '.join(map(str, words))})"


def statements(specs: list[dict], step: int) -> list[str]:
    """Python that makes the tensors of a step on ``rank``, and puts them into ``t[step]``."""
    place = f"t[{step}]"
    whole = ", ".join(expression(s, place) for s in specs if not {"same", "part"} & s.keys())
    lines = [f"{place} = [{whole}]"]
    for index, one in enumerate(specs):
        if {"same", "part"} & one.keys():
            lines.append(f"{place}.insert({index}, {expression(one, place)})")
    return lines
