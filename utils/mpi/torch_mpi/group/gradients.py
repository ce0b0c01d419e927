"""A warning where a gradient would silently be wrong.

What is received is written into a tensor in place, and autograd does not learn of it: a backward
pass through the tensor gives the gradient that there would be without the communication. PyTorch's
own backends warn of that in the backward pass, by the autograd fallback of the dispatcher. It
does not see a process group in Python, so here is the same by a hook on the tensor.

As there, nothing is said under ``no_grad``, or when no backward pass comes, as for a loss that is
summed up for a log. A leaf is not looked at either, unlike there: its own gradient is the one with
the values that it has now, so parameters may be averaged in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..errors import users_place

_warned: set[tuple[str, int] | None] = set()


def watch(tensor: torch.Tensor, what: str) -> None:
    """Warn when a backward pass comes through this tensor, into which ``what`` is about to write.

    Once for each line of the user's.
    """
    if tensor.grad_fn is None or not torch.is_grad_enabled():
        return
    place = users_place()
    if place not in _warned:
        tensor.register_hook(_hook(what, place))


def _hook(what: str, place: tuple[str, int, str] | None) -> Callable[[torch.Tensor], None]:
    def warn(_gradient: torch.Tensor) -> None:
        if place in _warned:
            return
        _warned.add(place)
        text = (
            f"{what} has written into a tensor that a backward pass goes through. Autograd does "
            f"not know of that: the gradient is as if nothing had been communicated. Communicate "
            f"tensor.detach().clone() if no gradient is to pass; else write a "
            f"torch.autograd.Function whose backward communicates, too."
        )
        if place is None:
            warnings.warn(text, UserWarning, stacklevel=2)
        else:
            warnings.warn_explicit(text, UserWarning, *place[:2])

    return warn
