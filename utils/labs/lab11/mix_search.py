"""Find the fastest mix of parallelisms that fits, and say why the others lose.

search(Transformer(layers=96, width=12288, heads=96), machine("selene"), 512, devices=512)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tabulate import tabulate

from utils.forecast.machines import Machine

from .mixes import Estimate, begin, estimate
from .transformer import Mix, MixError, Recompute, Transformer

#: Fewer tokens of a sample on each rank of the context axis aren't tried.
LEAST_TOKENS = 2048
MICROBATCHES = (1, 2, 4, 8, 16)
INTERLEAVES = (1, 2, 3, 4, 8)
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
#: What `kind` may return.
KINDS = ("replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor × data", "pipeline × data")
KINDS += ("pipeline × tensor × data", "context axis")
DOES_NOT_FIT = "does not fit"


class Rival(NamedTuple):
    """The fastest mix of a kind such as "no pipeline", or the smallest if none fits."""

    kind: str
    estimate: Estimate
    reason: str


@dataclass(frozen=True)
class Search:
    """The fastest mix that fits, the best rival of each kind, and how many mixes were compared."""

    winner: Estimate
    rivals: tuple[Rival, ...]
    tried: int

    def __repr__(self) -> str:
        rows = [
            [kind, one.mix, one.seconds, one.memory / 1e9, reason]
            for kind, one, reason in [("fastest", self.winner, ""), *self.rivals]
        ]
        headers, widths = ["kind", "mix", "s", "GB", "why it loses"], [19, 28, None, None, 23]
        formats = ("g", "g", ".1f", ".0f", "g")
        return str(tabulate(rows, headers, floatfmt=formats, maxcolwidths=widths))


def search(model: Transformer, machine: Machine, batch: int, devices: int | None = None) -> Search:
    """Return the fastest mix that uses all devices and fits into their memory, and its rivals.

    Raises:
        MixError: no mix is possible, or none fits.
    """
    devices = machine.devices if devices is None else devices
    machine.holds(devices)
    estimates = [estimate(model, mix, machine, batch) for mix in mixes(model, devices, batch)]
    if not estimates:
        raise MixError(f"No mix divides a batch of {batch:,} samples among {devices:,} devices.")
    winner = _best(estimates)
    if not winner.fits:
        raise MixError(f"No mix fits. The smallest one ({winner.mix}) {_needs(winner)}.")
    return Search(winner, tuple(_rivals(winner, estimates)), len(estimates))


def fastest(
    model: Transformer, machine: Machine, batch: int, devices: int, within: float = 1.0
) -> Estimate | None:
    """Return the simplest kind's mix within a factor of the shortest time; None if none fits."""
    found, least = [], float("inf")
    for mix in mixes(model, devices, batch):
        step = begin(model, mix, machine, batch)
        # Most mixes need too much memory, or compute too long even without communication.
        fits = sum(step.held().values()) <= machine.device.memory
        if fits and step.compute() <= within * least:
            found.append(estimate(model, mix, machine, batch))
            least = min(least, found[-1].seconds)
    fast = (one for one in found if one.seconds <= within * least)
    return min(fast, key=lambda one: (KINDS.index(kind(one.mix)), one.seconds), default=None)


def kind(mix: Mix) -> str:
    """Return what a mix is called, one of `KINDS`; an axis of its name may have one rank."""
    if mix.context > 1:
        return "context axis"
    if axes := [axis for axis in ("pipeline", "tensor") if getattr(mix, axis) > 1]:
        return " × ".join([*axes, "data"])
    return f"ZeRO-{mix.zero}" if mix.zero else "replicas"


def mixes(model: Transformer, devices: int, batch: int) -> Iterator[Mix]:
    """Yield the possible mixes that use all devices, without ZeRO-2 and ZeRO-3 in a pipeline."""
    for tensor, context, pipeline, microbatch in itertools.product(
        _divisors(devices, model.heads),
        _divisors(devices, model.sequence),
        _divisors(devices, model.layers),
        MICROBATCHES,
    ):
        data, rest = divmod(devices, tensor * context * pipeline)
        short = context > 1 and model.sequence // context < LEAST_TOKENS
        if rest or short or batch % (data * microbatch):
            continue
        count = batch // (data * microbatch)
        zeros = (0,) if data * context == 1 else (0, 1) if pipeline > 1 else (0, 1, 2, 3)
        parts = INTERLEAVES if pipeline > 1 and count % pipeline == 0 else (1,)
        experts = _divisors(data, model.experts)
        for expert, zero, part, recompute in itertools.product(experts, zeros, parts, RECOMPUTES):
            if model.layers // pipeline % part == 0:
                axes = data, tensor, pipeline, context, expert
                yield Mix(*axes, zero, microbatch, part, recompute)


def _divisors(number: int, other: int) -> list[int]:
    """Return the common divisors of two numbers."""
    return [k for k in range(1, min(number, other) + 1) if number % k == other % k == 0]


def _best(estimates: list[Estimate]) -> Estimate:
    """Return the fastest estimate that fits, or the one that needs the least memory."""
    fitting = [one for one in estimates if one.fits]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    return min(estimates, key=lambda one: one.memory)


def _kinds(winner: Estimate) -> Iterator[tuple[str, Callable[[Mix], bool]]]:
    """Yield the kinds of mixes that the winner is compared with, by name."""
    stages, node = winner.mix.pipeline, winner.machine.levels[0]
    yield "data axis only", lambda mix: mix.replica == mix.ranks and mix.zero == 0
    yield "ZeRO-3 only", lambda mix: mix.replica == mix.ranks and mix.zero == 3
    yield "no tensor axis", lambda mix: mix.tensor == 1
    yield f"tensor axis beyond the {node.name}", lambda mix: mix.tensor > node.units
    yield "no pipeline", lambda mix: mix.pipeline == 1
    yield f"{stages // 2} stages", lambda mix: mix.pipeline == stages // 2 > 1
    yield f"{stages * 2} stages", lambda mix: mix.pipeline == stages * 2
    yield "no ZeRO", lambda mix: mix.zero == 0
    yield "no recomputation", lambda mix: mix.recompute == "none"
    yield "full recomputation", lambda mix: mix.recompute == "full"
    yield "no interleaving", lambda mix: mix.interleave == 1
    yield "no context axis", lambda mix: mix.context == 1
    yield "no expert axis", lambda mix: mix.expert == 1
    yield f"expert axis beyond the {node.name}", lambda mix: _experts(mix) > node.units
    yield f"expert axis in the {node.name}", lambda mix: 0 < _experts(mix) <= node.units


def _experts(mix: Mix) -> int:
    """Return how many neighboring devices an expert axis spans; 0 if there is none."""
    return mix.tensor * mix.context * mix.expert if mix.expert > 1 else 0


def _rivals(winner: Estimate, estimates: list[Estimate]) -> list[Rival]:
    """Return the best mix of each kind that the winner doesn't belong to."""
    found: dict[Mix, Rival] = {}
    for name, belongs in _kinds(winner):
        several = [one for one in estimates if belongs(one.mix)]
        if belongs(winner.mix) or not several:
            continue
        best = _best(several)
        names = [found[best.mix].kind, name] if best.mix in found else [name]
        found[best.mix] = Rival(", ".join(names), best, reason(best, winner))
    return sorted(found.values(), key=lambda one: (not one.estimate.fits, one.estimate.seconds))


def reason(one: Estimate, winner: Estimate) -> str:
    """Return why an estimate loses against the winner, in a phrase."""
    if not one.fits:
        return _needs(one)
    if one.seconds < 1.005 * winner.seconds:
        return "less than 0.5% slower"
    part = max(one.times, key=lambda name: one.times[name] - winner.times[name])
    more = one.times[part] - winner.times[part]
    more = f"{more:.1f} s more" if more >= 0.1 else f"{1e3 * more:.1f} ms more"
    if part == "compute" and one.mix.recompute == "full" != winner.mix.recompute:
        return f"recomputation: {more}"
    if part in ("compute", "bubble"):
        return f"{part}: {more}"
    where = "in" if one.levels[part] == one.machine.levels[0].name else "crosses"
    return f"{part} axis {where} the {one.levels[part]}: {more}"


def _needs(one: Estimate) -> str:
    has = one.machine.device.memory
    return f"needs {one.memory / 1e9:,.0f} of {has / 1e9:,.0f} GB: {one.largest}"
