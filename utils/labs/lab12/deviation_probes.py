"""The probes of a server that deviates: gradients of a ladder, and weights that clients compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from utils.checks.draws import across, drawn
from utils.checks.groups import in_group
from utils.checks.probe import reading_answer, recorded, values_of


class Ladder(NamedTuple):
    """Gradients of a first layer whose neurons answer to brighter and brighter images.

    Attributes:
        neurons: how many there are.
        reached: for each image, how many neurons it reaches.
        slopes: for each image, the derivative of the loss by a neuron that it reaches.
        pixels: how many an image has.
        dtype: of the gradients.
        noise: rounding errors of the bias gradient.
    """

    neurons: int
    reached: tuple[int, ...]
    slopes: tuple[float, ...]
    pixels: int = 5
    dtype: torch.dtype = torch.float64
    noise: float = 0.0

    def gradients(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the gradients of the layer's weight and bias; the first image is black."""
        images = drawn(seed, len(self.reached), self.pixels)
        images[:1] = 0
        above = torch.arange(self.neurons)[:, None] < torch.tensor(self.reached)
        slopes = above * torch.tensor(self.slopes, dtype=torch.float64)
        rounding = self.noise * drawn(seed + 1, self.neurons)
        weight, bias = slopes @ images, slopes.sum(1) + rounding
        return weight.to(self.dtype), bias.to(self.dtype)


#: The second has one neuron, the third has no image on it, and in the fourth one image has a
#: slope of 1 in 10,000 of the others'. In the fifth, all slopes are negative and small. Two images
#: may be on one step, and one below the first.
LADDERS = (
    Ladder(6, (2, 4, 4, 6, 0), (0.5, -1.0, 0.25, 2.0, 1.0)),
    Ladder(1, (1, 1), (-0.5, -0.25)),
    Ladder(4, (0, 0), (1.0, 1.0), pixels=3),
    Ladder(9, (3, 1, 8, 6, 9), (1.0, -2.0, 0.5, 2e-4, -1.0), noise=1e-9),
    Ladder(9, (3, 1, 8, 6), (-1e-6, -2e-6, -5e-7, -1.5e-6), noise=1e-15),
    Ladder(12, (5, 2, 11, 7), (0.5, -1.0, 0.25, 2.0), pixels=7, dtype=torch.float32),
)


def probe_ladder(user_ns: dict, *, rank: int, seed: int) -> list[Any]:
    """Return what an answer reads from the gradients of each ladder."""
    function = reading_answer(user_ns, "read_ladder")
    readings: list[Any] = []
    for k, ladder in enumerate(LADDERS):
        weight, bias = ladder.gradients(seed + k)
        images = function(across(weight) if k == 0 else weight, bias)
        if isinstance(images, Tensor):
            shape = list(torch.Tensor.size(images))
            readings.append({"shape": shape, "images": values_of(images)})
        else:
            readings.append(type(images).__name__)
    return readings


def _unchanged(weights: Tensor) -> Tensor:
    return weights


def _with(place: int, change: Callable[[Tensor], Tensor | float]) -> Callable[[Tensor], Tensor]:
    """Return a function that changes one entry of a row of weights."""

    def changed(weights: Tensor) -> Tensor:
        weights[place] = change(weights[place])
        return weights

    return changed


class Weights(NamedTuple):
    """What the clients of a group have got.

    Attributes:
        what: in words.
        same: whether all clients have the same bits.
        other: what is different on the last rank of the group.
        everywhere: what is done to the weights of all ranks afterwards.
    """

    what: str
    same: bool
    other: Callable[[Tensor], Tensor] = _unchanged
    everywhere: Callable[[Tensor], Tensor] = _unchanged

    def of_rank(self, seed: int, is_other: bool) -> Tensor:
        """Return the weights of one rank."""
        weights = drawn(seed, 3000, dtype=torch.float32)
        weights[5] = 0.0
        return self.everywhere(self.other(weights) if is_other else weights)


WEIGHTS = (
    Weights("equal weights", True),
    Weights("equal weights within a longer tensor", True, lambda w: torch.cat([w, w])[:3000]),
    Weights(
        "one entry larger by one bit",
        False,
        _with(11, lambda entry: torch.nextafter(entry, torch.tensor(9.0))),
    ),
    Weights("the same weights in another order", False, lambda w: w.flip(0)),
    Weights("weights with -0 for 0", False, _with(5, lambda _: -0.0)),
    Weights("equal weights with nan", True, everywhere=_with(7, lambda _: torch.nan)),
    Weights("a last entry that differs", False, _with(-1, lambda entry: entry + 1)),
    Weights(
        "matrices that aren't contiguous and differ",
        False,
        _with(2000, lambda entry: entry + 1),
        everywhere=lambda w: across(w.view(50, 60)),
    ),
)


@in_group
def probe_same(user_ns: dict, *, rank: int, named: dict, group: Any, seed: int) -> list[dict]:
    """Return what a client says about the weights that it and the others have got."""
    import torch.distributed as dist

    function = reading_answer(user_ns, "same_weights")
    is_other = dist.get_rank(group) == dist.get_world_size(group) - 1
    outcomes = []
    for k, given in enumerate(WEIGHTS):
        result, calls = recorded(function, given.of_rank(seed + k, is_other), **named)
        result = result if type(result) is bool else type(result).__name__
        outcomes.append({"result": result, "calls": calls})
    return outcomes
