"""Find the fastest mix of parallelisms that fits, and say why the others lose.

    search(Transformer(layers=96, width=12288, heads=96), machine("selene"), 512, devices=512)

The search estimates each mix, because an estimate takes about 50 µs and prices are used again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tabulate import tabulate

from utils.forecast.errors import MixError
from utils.forecast.machines import Machine
from .mixes import ORDER, Estimate, Prices, estimate
from .transformer import Mix, Recompute, Transformer

#: Fewer tokens of a sample on each rank of the context axis aren't tried.
LEAST_TOKENS = 2048
MICROBATCHES = (1, 2, 4, 8, 16)
INTERLEAVES = (1, 2, 3, 4, 8)
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")


@dataclass(frozen=True)
class Rival:
    """The best mix of a kind that does not win.

    Attributes:
        kind: what sets the mix apart, such as "no pipeline"; several if one mix is best.
        estimate: the fastest mix of this kind that fits; if none fits, the one that needs least.
        reason: why the mix loses.
    """

    kind: str
    estimate: Estimate
    reason: str


@dataclass(frozen=True)
class Search:
    """The fastest mix that fits, and the best of each other kind.

    Attributes:
        winner: the fastest mix that fits.
        rivals: the others, the fastest first, and those that don't fit at the end.
        tried: how many mixes were compared.
    """

    winner: Estimate
    rivals: tuple[Rival, ...]
    tried: int

    def __repr__(self) -> str:
        lines = [
            ("fastest", self.winner, ""),
            *((r.kind, r.estimate, r.reason) for r in self.rivals),
        ]
        rows = [
            [kind, str(one.mix), f"{one.seconds:.2f}", f"{one.mfu:.0%}", _gb(one.memory), reason]
            for kind, one, reason in lines
        ]
        headers = ["kind", "mix", "s per step", "MFU", "GB", "why it loses"]
        widths = [22, 42, None, None, None, 34]
        return str(tabulate(rows, headers, disable_numparse=True, maxcolwidths=widths))


def search(
    model: Transformer,
    machine: Machine,
    batch: int,
    devices: int | None = None,
    *,
    order: tuple[str, ...] = ORDER,
    gradient: int = 4,
    overlap: float = 0.8,
) -> Search:
    """Return the fastest mix that uses all devices and fits into their memory.

    Args:
        model, machine, batch: as for `estimate`.
        devices: how many of the machine's devices to use; by default, all.
        order, gradient, overlap: as for `estimate`.

    Raises:
        MixError: no mix is possible, or none fits.
        MachineError: the machine has fewer devices.
    """
    devices = machine.devices if devices is None else devices
    machine.holds(devices)
    prices = Prices(machine, order)
    estimates = [
        estimate(model, mix, machine, batch, gradient=gradient, overlap=overlap, prices=prices)
        for mix in mixes(model, devices, batch)
    ]
    if not estimates:
        raise MixError(
            f"No mix gives each of the {devices:,} devices work in a batch of {batch:,} samples. "
            "Choose a batch or a number of devices with more divisors."
        )
    winner = _best(estimates)
    if not winner.fits:
        raise MixError(
            f"No mix fits on {devices:,} devices: the smallest one ({winner.mix}) "
            f"{_needs(winner)}. Choose more devices, or devices with more memory."
        )
    return Search(winner, tuple(_rivals(winner, estimates, prices)), len(estimates))


def mixes(model: Transformer, devices: int, batch: int) -> Iterator[Mix]:
    """Yield the possible mixes that use all devices."""
    for tensor in _divisors(devices, model.heads):
        for context in _divisors(devices // tensor, model.sequence):
            if context > 1 and model.sequence // context < LEAST_TOKENS:
                continue
            for pipeline in _divisors(devices // tensor // context, model.layers):
                data = devices // (tensor * context * pipeline)
                if batch % data == 0:
                    axes = Mix(data, tensor, pipeline, context)
                    yield from _variants(model, axes, batch)


def _variants(model: Transformer, axes: Mix, batch: int) -> Iterator[Mix]:
    """Yield all ways to run these axes.

    ZeRO-2 and ZeRO-3 aren't combined with a pipeline, because each microbatch would repeat their
    messages.
    """
    zeros = (0,) if axes.data * axes.context == 1 else (0, 1) if axes.pipeline > 1 else (0, 1, 2, 3)
    for microbatch in MICROBATCHES:
        count, rest = divmod(batch // axes.data, microbatch)
        if rest:
            continue
        interleaves = _interleaves(model, axes.pipeline, count)
        experts = _divisors(axes.data, model.experts)
        for ways in itertools.product(experts, zeros, interleaves, RECOMPUTES):
            expert, zero, interleave, recompute = ways
            yield replace(
                axes,
                expert=expert,
                zero=zero,
                microbatch=microbatch,
                interleave=interleave,
                recompute=recompute,
            )


def _interleaves(model: Transformer, pipeline: int, count: int) -> list[int]:
    if pipeline == 1 or count % pipeline:
        return [1]
    return [v for v in INTERLEAVES if model.layers // pipeline % v == 0]


def _divisors(number: int, other: int) -> list[int]:
    """Return the common divisors of two numbers."""
    return [k for k in range(1, min(number, other) + 1) if number % k == other % k == 0]


# --- winners and losers --------------------------------------------------------------------------


def _best(estimates: list[Estimate]) -> Estimate:
    """Return the fastest estimate that fits, or the one that needs the least memory."""
    fitting = [one for one in estimates if one.fits]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    return min(estimates, key=lambda one: one.memory)


def _kinds(winner: Estimate, prices: Prices) -> Iterator[tuple[str, Callable[[Mix], bool]]]:
    """Yield the kinds of mixes that the winner is compared with, by name."""
    best, node = winner.mix, winner.machine.levels[0].name
    yield "data axis only", lambda mix: mix.data == mix.ranks and mix.zero == 0
    yield "ZeRO-3 only", lambda mix: mix.data == mix.ranks and mix.zero == 3
    yield "no tensor axis", lambda mix: mix.tensor == 1
    yield "no pipeline", lambda mix: mix.pipeline == 1
    yield f"tensor axis beyond the {node}", lambda mix: prices.crossed(mix, "tensor") > 0
    yield f"tensor axis in the {node}", lambda mix: prices.crossed(mix, "tensor") == 0
    for stages in sorted({best.pipeline // 2, best.pipeline * 2} - {0, 1}):
        yield f"{stages} stages", _with_stages(stages)
    yield "no ZeRO", lambda mix: mix.zero == 0
    yield "no recomputation", lambda mix: mix.recompute == "none"
    yield "full recomputation", lambda mix: mix.recompute == "full"
    yield "no interleaving", lambda mix: mix.interleave == 1
    yield "no context axis", lambda mix: mix.context == 1
    yield "no expert axis", lambda mix: mix.expert == 1


def _with_stages(stages: int) -> Callable[[Mix], bool]:
    return lambda mix: mix.pipeline == stages


def _rivals(winner: Estimate, estimates: list[Estimate], prices: Prices) -> list[Rival]:
    """Return the best mix of each kind that the winner doesn't belong to."""
    found: dict[Mix, Rival] = {}
    for kind, belongs in _kinds(winner, prices):
        several = [one for one in estimates if belongs(one.mix)]
        if belongs(winner.mix) or not several:
            continue
        best = _best(several)
        kinds = [found[best.mix].kind, kind] if best.mix in found else [kind]
        found[best.mix] = Rival(", ".join(kinds), best, _reason(best, winner, prices))
    return sorted(found.values(), key=lambda one: (not one.estimate.fits, one.estimate.seconds))


def _reason(one: Estimate, winner: Estimate, prices: Prices) -> str:
    """Return why an estimate loses against the winner, in a phrase."""
    if not one.fits:
        return _needs(one)
    if one.seconds < 1.005 * winner.seconds:
        return "less than 0.5% slower"
    part = max(one.times, key=lambda name: one.times[name] - winner.times[name])
    if part == "bubble":
        return f"bubble: {one.times[part] / one.seconds:.0%} of the step"
    if part == "compute":
        more = one.times[part] / winner.times[part] - 1
        full = one.mix.recompute == "full" != winner.mix.recompute
        return f"{'recomputation' if full else 'compute'}: {more:.0%} more time"
    crossed = prices.crossed(one.mix, part)
    where = f"{'crosses' if crossed else 'in'} the {one.machine.levels[crossed].name}"
    return f"{part} axis {where}: {one.communication:.0%} of the step is communication"


def _needs(one: Estimate) -> str:
    largest = max(one.held, key=lambda part: one.held[part])
    return f"needs {_gb(one.memory)} GB of {_gb(one.machine.device.memory)} GB: {largest}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.0f}"
