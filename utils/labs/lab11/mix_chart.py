"""The fastest mix by the number of parameters and of devices: the numbers of the chart."""

from __future__ import annotations

import functools
import math

from utils.forecast.machines import Machine

from .mix_search import DOES_NOT_FIT, fastest, kind
from .transformer import Transformer

#: Samples of a step. With 2,048 tokens each, these are 4 million tokens.
BATCH = 2048
#: If two mixes differ by less, they are equally fast, and the simpler one counts.
WITHIN = 1.01
LAYERS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WIDTHS = tuple(k << j for j in range(6, 14) for k in (8, 10, 12, 14))


def typical(parameters: float, sequence: int = 2048) -> Transformer:
    """Return a GPT of about this size, about 128 times as wide as it has layers."""

    def distance(model: Transformer) -> float:
        shape = model.width / model.layers / 128
        return abs(math.log(model.parameters / parameters)) + 0.1 * abs(math.log(shape))

    every = (
        Transformer(layers, width, max(1, width // 128), sequence=sequence)
        for layers in LAYERS
        for width in WIDTHS
    )
    return min(every, key=distance)


@functools.lru_cache(maxsize=1024)
def best_kind(
    parameters: float, devices: int, machine: Machine, batch: int = BATCH, sequence: int = 2048
) -> str:
    """Return the kind of the fastest mix that fits, one of `KINDS`, or `DOES_NOT_FIT`."""
    best = fastest(typical(parameters, sequence), machine, batch, devices, WITHIN)
    return kind(best.mix) if best else DOES_NOT_FIT
