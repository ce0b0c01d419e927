"""What each axis of a mix adds to a training step's time and memory, on the busiest rank.

Sources:

- compute, tensor and pipeline axes: D. Narayanan et al., "Efficient Large-Scale Language Model
  Training on GPU Clusters Using Megatron-LM", SC'21
- activations, sequence parallelism: V. Korthikanti et al., "Reducing Activation Recomputation in
  Large Transformer Models", 2022 (arXiv:2205.05198)
- data axis, and bytes of weights, gradients, and optimizer: S. Rajbhandari et al., "ZeRO", SC'20
- context axis: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention", 2023 (arXiv:2310.01889)
- expert axis: D. Lepikhin et al., "GShard", 2020 (arXiv:2006.16668)

Left out: the optimizer's own time, unequal loads of experts, stragglers, failures, and input data.
"""

from __future__ import annotations

import functools

import numpy as np

from utils.forecast.collectives import price
from utils.forecast.machines import Machine
from utils.forecast.tree import Devices, of_messages

from .transformer import Mix, Transformer

#: The axes from neighboring devices to the most distant ones, as in Megatron. The data axis is
#: "expert" and "replica" together.
ORDER = ("tensor", "context", "expert", "replica", "pipeline")
#: The axes whose ranks have copies of a weight, and those for the weights of shared experts.
COPIES = ("context", "expert", "replica")
COPIES_OF_EXPERTS = ("context", "replica")
#: The distance between neighbors and the number of ranks, for each axis.
Axes = tuple[tuple[int, int], ...]


def axes_of(mix: Mix, names: tuple[str, ...]) -> Axes:
    """Return the stride and the size of each of these axes that has several ranks."""
    axes, stride = [], 1
    wanted = {*names, "expert", "replica"} if "data" in names else names
    for name in ORDER:
        size = getattr(mix, name)
        if name in wanted and size > 1:
            axes.append((stride, size))
        stride *= size
    return tuple(axes)


@functools.lru_cache(maxsize=4096)
def groups(ranks: int, axes: Axes) -> Devices:
    """Return the groups of these axes together, of shape [groups, ranks of a group]."""
    first, members = np.arange(ranks), np.zeros(1, dtype=np.int64)
    for stride, size in axes:
        first = first[first // stride % size == 0]
        members = (stride * np.arange(size)[:, None] + members).ravel()
    return first[:, None] + members


def levels(mix: Mix, machine: Machine) -> dict[str, str]:
    """Return, for each axis with several ranks, the highest level that one of its groups crosses.

    The data axis counts with the context axis, because gradients are averaged over both.
    """
    found = {}
    axes = ("tensor", "context", "expert", "data", "pipeline")
    for axis in (name for name in axes if getattr(mix, name) > 1):
        stride, size = axes_of(mix, COPIES if axis == "data" else (axis,))[-1]
        inside = [below % (stride * size) == 0 or mix.ranks <= below for below in machine.sizes]
        found[axis] = machine.levels[inside.index(True)].name
    return found


class Prices:
    """The prices of what each axis sends on a machine, remembered for the next estimate."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._prices: dict[tuple[str, int, Axes, float], float] = {}

    def seconds(self, op: str, mix: Mix, names: tuple[str, ...], nbytes: float) -> float:
        """Return the time of a collective, or of a message to each rank's next rank."""
        key = op, mix.ranks, axes_of(mix, names), nbytes
        if key not in self._prices:
            group = groups(*key[1:3])
            if op == "message":
                cost = of_messages(self.machine, group.ravel(), np.roll(group, -1, 1).ravel())
                self._prices[key] = cost.seconds(nbytes)
            else:
                self._prices[key] = price(self.machine, op, group, nbytes).seconds
        return self._prices[key]


class Step:
    """The parts of one rank's step, for the busiest rank.

    A gradient has 4 bytes in memory and in messages, as in Megatron, or 2 as in ZeRO. A share of
    the computation, `overlap`, can hide the data axis's messages: of the whole step with ZeRO-3,
    otherwise of the backward pass of the last microbatch.
    """

    gradient, overlap = 4, 0.8

    def __init__(self, model: Transformer, mix: Mix, prices: Prices, batch: int) -> None:
        self.model, self.mix, self.prices = model, mix, prices
        self.device = prices.machine.device
        self.sent: dict[str, float] = {}
        self.count = mix.microbatches(batch)
        self.layers = model.layers // mix.pipeline
        self.tokens = mix.microbatch * model.sequence / mix.context
        #: The parameters of a rank if none is sharded, how many ranks have copies of them, and the
        #: axes of these ranks. Experts have fewer copies if an expert axis splits them.
        split = model.mlps if mix.expert > 1 else 0.0
        shared = (self.layers * (model.layer - split) + model.embedding) / mix.tensor
        self.parts = [(shared, mix.context * mix.data, COPIES)]
        if split:
            experts = self.layers * split / mix.expert / mix.tensor
            self.parts += [(experts, mix.context * mix.replica, COPIES_OF_EXPERTS)]
        #: The parameters of a layer on the rank.
        self.layer = (model.layer - split + split / mix.expert) / mix.tensor
        # A layer's forward pass runs again in a full recomputation; backward takes twice as long.
        self.forwards = 2 if mix.recompute == "full" else 1
        self.passes = self.forwards + 2

    def _matrix(self) -> float:
        """Return the bytes of a layer's attention matrices, which flash attention doesn't store."""
        if self.mix.flash or self.mix.context > 1:
            return 0.0
        return 5 * self.model.heads * self.model.sequence * self.tokens / self.mix.tensor

    def _activations(self) -> float:
        """Return the other bytes that a layer's forward pass makes (Korthikanti, section 4)."""
        t = self.mix.tensor
        whole = 10 / (t if self.mix.sequence_parallel else 1)
        mlps = 2 * self.model.mlp * self.model.top_k
        return self.tokens * self.model.width * ((8 + mlps) / t + whole)

    def _core(self) -> float:
        """Return the seconds of a layer's attention matrix in a forward pass."""
        flops = self.tokens * self.model.core / self.mix.tensor
        return flops / self.device.speed + 2 * self._matrix() / self.device.bandwidth

    def _layer(self) -> float:
        """Return the seconds of a layer's products, and of the activations between them."""
        flops = self.tokens * self.model.products / self.mix.tensor
        memory = 2 * self._activations() / self.device.bandwidth
        again = self._core() if self.mix.recompute == "selective" else 0.0
        return self.passes * (flops / self.device.speed + memory + self._core()) + again

    def compute(self) -> float:
        """Return the seconds that the last stage computes: it alone has the output's matrix."""
        output = 6 * self.tokens * self.model.width * self.model.vocabulary / self.mix.tensor
        return self.count * (self.layers * self._layer() + output / self.device.speed)

    def _tensor(self) -> float:
        """Return the seconds of a layer's all-reduces: two in each forward and backward pass."""
        t, nbytes = self.mix.tensor, 2 * self.tokens * self.model.width
        if t == 1:
            return 0.0
        number = 2 * (self.forwards + 1)
        self.sent["tensor"] = number * 2 * nbytes * (t - 1) / t * self.layers * self.count
        return number * self.prices.seconds("all_reduce", self.mix, ("tensor",), nbytes)

    def _context(self) -> float:
        """Return what computation can't hide of a layer's ring attention.

        Keys and values go around in c − 1 rounds, and in the backward pass, their gradients too.
        """
        c = self.mix.context
        if c == 1:
            return 0.0
        nbytes = 4 * self.tokens * self.model.keys / self.mix.tensor
        rounds = self.passes * (c - 1)
        self.sent["context"] = rounds * nbytes * self.layers * self.count
        one = self.prices.seconds("message", self.mix, ("context",), nbytes)
        return rounds * max(0.0, one - self._core() / c)

    def _expert(self) -> float:
        """Return the seconds of a layer's all-to-alls: two in each forward and backward pass."""
        e = self.mix.expert
        if e == 1:
            return 0.0
        nbytes = 2 * self.tokens * self.model.width * self.model.top_k / self.mix.tensor
        number = 2 * (self.forwards + 1)
        self.sent["expert"] = number * nbytes * (e - 1) / e * self.layers * self.count
        return number * self.prices.seconds("all_to_all", self.mix, ("expert",), nbytes)

    def _pipeline(self) -> float:
        """Return the seconds of a microbatch's messages, to which each tensor rank adds a part."""
        if self.mix.pipeline == 1:
            return 0.0
        nbytes = 2 * self.tokens * self.model.width / self.mix.tensor
        number = 2 * self.mix.interleave
        self.sent["pipeline"] = number * nbytes * self.count
        return number * self.prices.seconds("message", self.mix, ("pipeline",), nbytes)

    def _data(self, compute: float) -> float:
        """Return what computation can't hide of the messages that average gradients.

        ZeRO-1 needs a reduce-scatter of gradients and an all-gather of weights in a step. ZeRO-2
        needs the reduce-scatter for each microbatch, and ZeRO-3 also two all-gathers.
        """
        zero, often = self.mix.zero, self.count if self.mix.zero > 1 else 1
        gradients = "reduce_scatter" if zero else "all_reduce"
        gathers = [0, 1, 1, 2 * often][zero]
        messages = ((gradients, often, self.gradient), ("all_gather", gathers, 2))
        seconds = 0.0
        for parameters, copies, axes in (part for part in self.parts if part[1] > 1):
            sent = 0.0
            for op, number, each in messages:
                nbytes = each * parameters
                seconds += number * self.prices.seconds(op, self.mix, axes, nbytes)
                sent += number * nbytes * (2 if op == "all_reduce" else 1)
            self.sent["data"] = self.sent.get("data", 0.0) + sent * (copies - 1) / copies
        hides = 1.0 if zero == 3 else often / self.count * 2 / self.passes
        return max(0.0, seconds - self.overlap * hides * compute)

    def times(self) -> dict[str, float]:
        """Return the seconds of each part of the step."""
        compute, layers = self.compute(), self.layers
        axes = {
            "tensor": layers * self._tensor(),
            "context": layers * self._context(),
            "expert": layers * self._expert(),
            "pipeline": self._pipeline(),
        }
        # Filling and draining take p − 1 times as long as one of a stage's parts.
        part = (layers * self._layer() + sum(axes.values())) / self.mix.interleave
        times = {"compute": compute, "bubble": (self.mix.pipeline - 1) * part}
        times |= {axis: self.count * seconds for axis, seconds in axes.items()}
        return times | {"data": self._data(compute)}

    def held(self) -> dict[str, float]:
        """Return the bytes of each part of the memory: Adam with weights in 16 and 32 bit."""
        zero, bytes_of = self.mix.zero, {"optimizer": 12, "gradients": self.gradient, "weights": 2}
        held = {
            part: sum(
                nbytes * own / (copies if zero >= stage else 1) for own, copies, _ in self.parts
            )
            for stage, (part, nbytes) in enumerate(bytes_of.items(), 1)
        }
        if zero == 3:  # the whole weights of a layer and of the next one
            held["weights"] += 4 * self.layer
        return held | {"activations": self.kept()}

    def kept(self) -> float:
        """Return the bytes of activations on the first stage, or on the last, which has logits."""
        mix, tokens = self.mix, self.tokens
        whole = self._activations() + (self._matrix() if mix.recompute == "none" else 0.0)
        split = mix.tensor if mix.sequence_parallel else 1
        full = mix.recompute == "full"
        layer = 2 * tokens * self.model.width / split if full else whole
        working = whole + self._matrix() if full else self._matrix()
        flight = min(self.count, mix.pipeline) * self.layers * layer
        if mix.interleave > 1:
            flight *= 1 + (mix.pipeline - 1) / (mix.pipeline * mix.interleave)
        logits = 4 * tokens * self.model.vocabulary / mix.tensor
        return working + max(flight, self.layers * layer + logits)
