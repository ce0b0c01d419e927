"""How long a training step takes with a mix of parallelisms, and whether it fits into memory.

    model = Transformer(layers=96, width=12288, heads=96)
    plan(model, Mix(data=8, tensor=8, pipeline=8, zero=1), machine("selene"), batch=512)

The formulas and their sources are in `steps.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from utils.forecast.errors import MixError
from utils.forecast.machines import Machine
from .step_costs import ORDER, Prices, Step
from .transformer import Mix, Transformer, check

__all__ = ["ORDER", "Estimate", "Mix", "Prices", "Transformer", "check", "estimate", "plan"]

#: The stage of ZeRO that shards a part of the memory.
STAGES = {"optimizer": 1, "gradients": 2, "weights": 3}


@dataclass(frozen=True)
class Estimate:
    """A step's time and memory on the busiest rank.

    Attributes:
        model, mix, machine, batch: what was asked.
        times: seconds of each part: compute, bubble, and what each axis adds.
        held: bytes of each part: weights, gradients, optimizer, activations.
        levels: for each axis with several ranks, the name of the level whose links limit it.
        sent: for each axis with several ranks, bytes that a rank sends in a step.
    """

    model: Transformer
    mix: Mix
    machine: Machine
    batch: int
    times: Mapping[str, float]
    held: Mapping[str, float]
    levels: Mapping[str, str]
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
    def mfu(self) -> float:
        """Return the model FLOPs utilization: useful operations as a share of the peak."""
        return self.model.flops(self.batch) / (
            self.seconds * self.mix.ranks * self.machine.device.flops
        )

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all devices together."""
        return self.batch * self.model.sequence / self.seconds

    @property
    def communication(self) -> float:
        """Return the share of the step in which a rank only communicates."""
        return 1 - (self.times["compute"] + self.times["bubble"]) / self.seconds

    def __str__(self) -> str:
        memory = f"{self.memory / 1e9:,.0f} of {self.machine.device.memory / 1e9:,.0f} GB"
        return f"{self.mix}: {self.seconds:.3g} s per step, MFU {self.mfu:.0%}, {memory}"


def estimate(
    model: Transformer,
    mix: Mix,
    machine: Machine,
    batch: int,
    *,
    order: tuple[str, ...] = ORDER,
    gradient: int = 4,
    overlap: float = 0.8,
    prices: Prices | None = None,
) -> Estimate:
    """Return the time and the memory of a training step.

    Args:
        model, mix, machine: what is trained, how, and where.
        batch: samples of a step (the global batch).
        order: the axes, from neighboring devices to the most distant ones.
        gradient: bytes of each gradient, in memory and in messages: 4 as in Megatron, 2 as in ZeRO.
        overlap: share of the computation that can hide the data axis's messages. ZeRO-3 has the
            whole step, and other stages have the backward pass of a step's last microbatch.
        prices: of messages to use again, for the same machine and order.

    Raises:
        MixError: the mix is impossible.
        MachineError: the machine has fewer devices than the mix has ranks.
    """
    check(model, mix, batch)
    machine.holds(mix.ranks)
    step = Step(model, mix, prices or Prices(machine, order), batch, gradient, overlap)
    return Estimate(model, mix, machine, batch, step.times(), step.held(), step.levels, step.sent)


def plan(
    model: Transformer,
    mix: Mix,
    machine: Machine,
    batch: int,
    *,
    order: tuple[str, ...] = ORDER,
    gradient: int = 4,
    overlap: float = 0.8,
) -> Estimate:
    """Return an estimate for a mix that fits into the devices' memory.

    Raises:
        MixError: the mix is impossible, or it doesn't fit.
        MachineError: the machine has fewer devices than the mix has ranks.
    """
    one = estimate(model, mix, machine, batch, order=order, gradient=gradient, overlap=overlap)
    if not one.fits:
        largest = max(one.held, key=lambda part: one.held[part])
        raise MixError(
            f"The mix needs {one.memory / 1e9:,.0f} GB on each device, which has "
            f"{machine.device.memory / 1e9:,.0f} GB, and the largest part is the {largest} "
            f"({one.held[largest] / 1e9:,.0f} GB). Try {_remedies(mix, largest)}."
        )
    return one


def _remedies(mix: Mix, part: str) -> str:
    """Return what makes a part of the memory smaller and isn't in the mix yet."""
    if part in STAGES:
        tips = [f"ZeRO-{STAGES[part]}"] * (mix.zero < STAGES[part] and mix.data * mix.context > 1)
        return " or ".join([*tips, "a larger tensor or pipeline axis"])
    tips = ["full recomputation"] * (mix.recompute != "full")
    tips += ["a smaller microbatch"] * (mix.microbatch > 1)
    return " or ".join([*tips, "a larger tensor or context axis"])
