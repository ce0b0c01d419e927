"""How long a training step takes with a mix of parallelisms, and whether it fits into memory.

    model = Transformer(layers=96, width=12288, heads=96)
    plan(model, Mix(data=8, tensor=8, pipeline=8, zero=1), machine("selene"), batch=512)

The formulas and their sources are in `step_costs.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from utils.forecast.machines import Machine

from .step_costs import Prices, Step, levels
from .transformer import Mix, MixError, Transformer, check

__all__ = [
    "Estimate",
    "Mix",
    "MixError",
    "Transformer",
    "begin",
    "check",
    "estimate",
    "levels",
    "plan",
    "step_cost",
]

#: The stage of ZeRO that shards a part of the memory.
STAGES = {"optimizer": 1, "gradients": 2, "weights": 3}


@dataclass(frozen=True)
class Estimate:
    """A step's time and memory on the busiest rank.

    `times` has the seconds of computing, of the bubble, and of each axis. `held` has the bytes of
    weights, gradients, optimizer, and activations. `sent` has the bytes that each axis sends.
    """

    model: Transformer
    mix: Mix
    machine: Machine
    batch: int
    times: Mapping[str, float]
    held: Mapping[str, float]
    sent: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.times.values())

    @property
    def memory(self) -> float:
        """Return the bytes on a device."""
        return sum(self.held.values())

    @property
    def fits(self) -> bool:
        """Return whether the device has enough memory."""
        return self.memory <= self.machine.device.memory

    @property
    def largest(self) -> str:
        """Return the part that needs the most memory."""
        return max(self.held, key=lambda part: self.held[part])

    @property
    def levels(self) -> Mapping[str, str]:
        """Return, for each axis with several ranks, the highest level that it crosses."""
        return levels(self.mix, self.machine)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: useful operations as a share of the peak."""
        peak = self.mix.ranks * self.machine.device.flops
        return self.model.flops(self.batch) / (self.seconds * peak)

    def __str__(self) -> str:
        memory = f"{self.memory / 1e9:,.0f} of {self.machine.device.memory / 1e9:,.0f} GB"
        return f"{self.mix}: {self.seconds:.3g} s per step, MFU {self.mfu:.0%}, {memory}"


def begin(model: Transformer, mix: Mix, machine: Machine, batch: int, **more: float) -> Step:
    """Return the costs of a step, of which nothing is computed yet; as for :func:`estimate`."""
    check(model, mix, batch)
    machine.holds(mix.ranks)
    step = Step(model, mix, _prices(machine), batch)
    vars(step).update(more)
    return step


_prices = functools.lru_cache(maxsize=32)(Prices)


def estimate(model: Transformer, mix: Mix, machine: Machine, batch: int, **more: float) -> Estimate:
    """Return the time and the memory of a training step.

    Args:
        model, mix, machine: what is trained, how, and where.
        batch: samples of a step (the global batch).
        more: another `gradient` or `overlap`, see :class:`Step`.

    Raises:
        MixError: the mix is impossible.
    """
    step = begin(model, mix, machine, batch, **more)
    return Estimate(model, mix, machine, batch, step.times(), step.held(), step.sent)


def plan(model: Transformer, mix: Mix, machine: Machine, batch: int, **more: float) -> Estimate:
    """Return the estimate of a mix that fits into the devices' memory; as for :func:`estimate`.

    Raises:
        MixError: the mix is impossible, or it doesn't fit.
    """
    one = estimate(model, mix, machine, batch, **more)
    if one.fits:
        return one
    part, has = one.largest, machine.device.memory
    stage = STAGES.get(part, 0)  # 0: activations
    tips = {
        f"ZeRO-{stage}": mix.zero < stage and mix.data * mix.context > 1,
        "a larger expert axis": stage and mix.expert < model.experts,
        "full recomputation": not stage and mix.recompute != "full",
        "a smaller microbatch": not stage and mix.microbatch > 1,
        "a larger tensor axis": True,
        "more pipeline stages" if stage else "a larger context axis": True,
    }
    raise MixError(
        f"The mix needs {one.memory / 1e9:,.1f} GB on each device, which has {has / 1e9:,.1f} GB, "
        f"and the largest part is the {part} ({one.held[part] / 1e9:,.1f} GB), so try one of "
        f"these: {', '.join(tip for tip, helps in tips.items() if helps)}."
    )


def step_cost(model: Transformer, mix: Mix, machine: Machine, batch: int) -> tuple[float, float]:
    """Return the seconds of a step, and the bytes of activations on the busiest rank."""
    one = estimate(model, mix, machine, batch)
    return one.seconds, one.held["activations"]
