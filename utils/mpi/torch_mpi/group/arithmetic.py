"""Reduce tensors element by element as PyTorch does, which means that integers wrap around."""

from __future__ import annotations

from collections.abc import Callable

import torch

Combine = Callable[[torch.Tensor, torch.Tensor], None]

_NUMBERS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_TRUTHS = {
    "SUM": torch.logical_or,
    "MAX": torch.logical_or,
    "BOR": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
    "BAND": torch.logical_and,
    "BXOR": torch.logical_xor,
}
# PyTorch has no arithmetic for these dtypes, but sums of signed numbers have the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def combine(dtype: torch.dtype, name: str) -> Combine:
    """Return a function that reduces a tensor of ``dtype`` into another one, in place."""
    if dtype in _SIGNED:
        if name in ("MIN", "MAX"):
            return _unsigned_extreme(dtype, _NUMBERS[name])
        return _as(_SIGNED[dtype], _NUMBERS[name])
    arithmetic = (_TRUTHS if dtype is torch.bool else _NUMBERS)[name]
    return lambda mine, other: arithmetic(mine, other, out=mine)


def _as(signed: torch.dtype, arithmetic: Callable[..., torch.Tensor]) -> Combine:
    def apply(mine: torch.Tensor, other: torch.Tensor) -> None:
        arithmetic(mine.view(signed), other.view(signed), out=mine.view(signed))

    return apply


def _unsigned_extreme(dtype: torch.dtype, arithmetic: Callable[..., torch.Tensor]) -> Combine:
    """Return a minimum or maximum that compares unsigned numbers as signed ones, a bit flipped."""
    signed = _SIGNED[dtype]
    flip = torch.iinfo(signed).min

    def apply(mine: torch.Tensor, other: torch.Tensor) -> None:
        best = arithmetic(mine.view(signed) ^ flip, other.view(signed) ^ flip)
        mine.view(signed).copy_(best ^ flip)

    return apply
