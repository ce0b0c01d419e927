"""What each axis of a mix adds to a training step's time and memory, on the busiest rank.

Sources:

- compute, tensor and pipeline axes: D. Narayanan et al., "Efficient Large-Scale Language Model
  Training on GPU Clusters Using Megatron-LM", SC'21
- activations, sequence parallelism: V. Korthikanti et al., "Reducing Activation Recomputation in
  Large Transformer Models", 2022 (arXiv:2205.05198)
- data axis, and bytes of weights, gradients, and optimizer: S. Rajbhandari et al., "ZeRO", SC'20
- context axis: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention", 2023 (arXiv:2310.01889)

Left out: the optimizer's own time, unequal loads of experts, stragglers, failures, and input data.
"""

from __future__ import annotations

import numpy as np

from utils.forecast.collectives import Price, price
from utils.forecast.errors import MixError
from utils.forecast.machines import Machine
from .transformer import Mix, Transformer
from utils.forecast.tree import Devices, of_messages

#: The axes from neighboring devices to the most distant ones, as in Megatron.
ORDER = ("tensor", "context", "data", "pipeline")
#: The axes whose ranks have copies of a weight, and those for the weights of split experts.
COPIES = ("context", "expert", "replica")
COPIES_OF_EXPERTS = ("context", "replica")
#: Of each axis, the distance between neighbors and the number of ranks.
Axes = tuple[tuple[int, int], ...]


class Prices:
    """The prices of what each axis sends, remembered for the next estimate.

    Args:
        machine: the tree of links.
        order: the axes, from neighboring devices to the most distant ones.

    Raises:
        MixError: the order doesn't name each axis once.
    """

    def __init__(self, machine: Machine, order: tuple[str, ...] = ORDER) -> None:
        if sorted(order) != sorted(ORDER):
            raise MixError(f"The order {order} is impossible: name each of {ORDER} once.")
        self.machine, self.order = machine, order
        self._prices: dict[tuple[str, int, Axes, float], Price] = {}
        self._groups: dict[tuple[int, Axes], Devices] = {}

    def groups(self, mix: Mix, *names: str) -> Devices:
        """Return the groups of one or several axes, of shape [groups, ranks of a group].

        The names are those of `order`, but the data axis is "expert" (inner) and "replica".
        """
        return self._members(mix.ranks, self._axes(mix, names))

    def price(self, op: str, mix: Mix, names: tuple[str, ...], nbytes: float) -> Price:
        """Return the time of a collective, or of a message to each rank's next rank.

        Use half the price of an all_reduce for a reduce_scatter or an all_gather: both halves of
        an all_reduce send equally many bytes.
        """
        key = (op, mix.ranks, self._axes(mix, names), nbytes)
        if key not in self._prices:
            groups = self._members(*key[1:3])
            if op == "message":
                cost = of_messages(self.machine, groups.ravel(), np.roll(groups, -1, 1).ravel())
                self._prices[key] = Price(cost.seconds(nbytes), op, cost.level)
            else:
                self._prices[key] = price(self.machine, op, groups, nbytes)
        return self._prices[key]

    def crossed(self, mix: Mix, axis: str) -> int:
        """Return the number of the highest level that the messages of an axis cross."""
        names = COPIES if axis == "data" else (axis,)
        span = max((stride * size for stride, size in self._axes(mix, names)), default=1)
        inside = [size % span == 0 or mix.ranks <= size for size in self.machine.sizes]
        return inside.index(True)

    def _axes(self, mix: Mix, names: tuple[str, ...]) -> Axes:
        axes, stride = [], 1
        for name in self.order:
            for part in ("expert", "replica") if name == "data" else (name,):
                size = mix.data // mix.expert if part == "replica" else getattr(mix, part)
                if part in names and size > 1:
                    axes.append((stride, size))
                stride *= size
        return tuple(axes)

    def _members(self, ranks: int, axes: Axes) -> Devices:
        if (ranks, axes) not in self._groups:
            first, members = np.arange(ranks), np.zeros(1, dtype=np.int64)
            for stride, size in axes:
                first = first[first // stride % size == 0]
                members = (stride * np.arange(size)[:, None] + members).ravel()
            self._groups[ranks, axes] = first[:, None] + members
        return self._groups[ranks, axes]


class Step:
    """The parts of one rank's step, for the busiest rank."""

    def __init__(
        self,
        model: Transformer,
        mix: Mix,
        prices: Prices,
        batch: int,
        gradient: int,
        overlap: float,
    ) -> None:
        self.model, self.mix, self.prices = model, mix, prices
        self.gradient, self.overlap = gradient, overlap
        self.device = prices.machine.device
        self.levels: dict[str, str] = {}
        self.sent: dict[str, float] = {}
        self.count = mix.microbatches(batch)
        self.layers = model.layers // mix.pipeline
        self.tokens = mix.microbatch * model.sequence / mix.context
        # A layer's forward pass runs again in a full recomputation; backward takes twice as long.
        self.forwards = 2 if mix.recompute == "full" else 1
        self.passes = self.forwards + 2

    # --- what a microbatch costs -----------------------------------------------------------------

    def _matrix(self) -> float:
        """Return the bytes of a layer's attention matrices, which flash attention doesn't store."""
        if self.mix.flash or self.mix.context > 1:
            return 0.0
        return 5 * self.model.heads * self.model.sequence * self.tokens / self.mix.tensor

    def _activations(self) -> float:
        """Return the other bytes that a layer's forward pass makes (Korthikanti, section 4)."""
        t, model = self.mix.tensor, self.model
        split = (8 + 2 * model.mlp * model.top_k) / t
        return self.tokens * model.width * (split + 10 / (t if self.mix.sequence_parallel else 1))

    def _core(self) -> float:
        """Return the seconds of a layer's attention matrix in a forward pass."""
        flops = self.tokens * self.model.core / self.mix.tensor
        return flops / self.device.speed + 2 * self._matrix() / self.device.bandwidth

    def _layer(self) -> float:
        """Return the seconds that a layer computes for a microbatch.

        Products run at the device's speed. Between them, memory writes and reads the activations.
        """
        flops = self.tokens * self.model.products / self.mix.tensor
        memory = 2 * self._activations() / self.device.bandwidth
        again = self._core() if self.mix.recompute == "selective" else 0.0
        return self.passes * (flops / self.device.speed + memory + self._core()) + again

    def _output(self) -> float:
        """Return the seconds of the output's matrix, which only the last stage has."""
        flops = 6 * self.tokens * self.model.width * self.model.vocabulary / self.mix.tensor
        return flops / self.device.speed

    # --- what an axis costs ----------------------------------------------------------------------

    def _collective(self, axis: str, op: str, nbytes: float, names: tuple[str, ...] = ()) -> float:
        """Return the seconds of a collective, and note the level that limits it."""
        one = self.prices.price(op, self.mix, names or (axis,), nbytes)
        self.levels[axis] = self.prices.machine.levels[one.level].name
        return one.seconds

    def _tensor(self) -> float:
        """Return the seconds of a layer's all-reduces: two in each forward and backward pass."""
        t, nbytes = self.mix.tensor, 2 * self.tokens * self.model.width
        if t == 1:
            return 0.0
        number = 2 * (self.forwards + 1)
        self.sent["tensor"] = number * 2 * nbytes * (t - 1) / t * self.layers * self.count
        return number * self._collective("tensor", "all_reduce", nbytes)

    def _context(self) -> float:
        """Return what computation can't hide of a layer's ring attention.

        Keys and values go around in c − 1 rounds, each during a block of the attention matrix.
        In the backward pass, their gradients go too.
        """
        c = self.mix.context
        if c == 1:
            return 0.0
        nbytes = 4 * self.tokens * self.model.keys / self.mix.tensor
        rounds = (self.forwards + 2) * (c - 1)
        self.sent["context"] = rounds * nbytes * self.layers * self.count
        return rounds * max(0.0, self._collective("context", "message", nbytes) - self._core() / c)

    def _expert(self) -> float:
        """Return the seconds of a layer's all-to-alls: two in each forward and backward pass."""
        e = self.mix.expert
        if e == 1:
            return 0.0
        nbytes = 2 * self.tokens * self.model.width * self.model.top_k / self.mix.tensor
        number = 2 * (self.forwards + 1)
        self.sent["expert"] = number * nbytes * (e - 1) / e * self.layers * self.count
        return number * self._collective("expert", "all_to_all", nbytes)

    def _pipeline(self) -> float:
        """Return the seconds of a microbatch's messages: one forward and one back for each part.

        The ranks of the tensor axis send a part each (scatter/gather optimization).
        """
        if self.mix.pipeline == 1:
            return 0.0
        nbytes = 2 * self.tokens * self.model.width / self.mix.tensor
        number = 2 * self.mix.interleave
        self.sent["pipeline"] = number * nbytes * self.count
        return number * self._collective("pipeline", "message", nbytes)

    def _parameters(self) -> list[tuple[float, tuple[str, ...]]]:
        """Return how many parameters the rank has, and the axes that have copies of them.

        If the experts are split, they have fewer copies than other weights.
        """
        model, mix = self.model, self.mix
        shared = (self.layers * model.shared + model.embedding) / mix.tensor
        experts = self.layers * model.experts * model.expert / mix.expert / mix.tensor
        if mix.expert == 1:
            return [(shared + experts, COPIES)]
        return [(shared, COPIES), (experts, COPIES_OF_EXPERTS)]

    def _copies(self, names: tuple[str, ...]) -> int:
        return self.mix.context * self.mix.data // (1 if "expert" in names else self.mix.expert)

    def _data(self, compute: float) -> float:
        """Return what computation can't hide of the messages that average gradients.

        ZeRO-1 needs a reduce-scatter of gradients and an all-gather of weights in a step. ZeRO-2
        needs the reduce-scatter for each microbatch, and ZeRO-3 also two all-gathers.
        """
        zero, often = self.mix.zero, self.count if self.mix.zero > 1 else 1
        gathers = [0, 1, 1, 2 * often][zero]
        seconds = 0.0
        for parameters, names in self._parameters():
            p = self._copies(names)
            if p == 1:
                continue
            for number, nbytes in ((often * (1 + (zero == 0)), self.gradient), (gathers, 2)):
                whole = nbytes * parameters
                seconds += number * self._collective("data", "all_reduce", whole, names) / 2
                sent = number * whole * (p - 1) / p
                self.sent["data"] = self.sent.get("data", 0.0) + sent
        hides = 1.0 if zero == 3 else often / self.count * 2 / self.passes
        return max(0.0, seconds - self.overlap * hides * compute)

    # --- the step --------------------------------------------------------------------------------

    def times(self) -> dict[str, float]:
        """Return the seconds of each part of the step."""
        mix, layers = self.mix, self.layers
        stage = layers * self._layer()
        axes = {
            "tensor": layers * self._tensor(),
            "context": layers * self._context(),
            "expert": layers * self._expert(),
            "pipeline": self._pipeline(),
        }
        compute = self.count * (stage + self._output())
        # Filling and draining take p − 1 times as long as one of a stage's parts.
        bubble = (mix.pipeline - 1) / mix.interleave * (stage + sum(axes.values()))
        times = {"compute": compute, "bubble": bubble}
        times |= {axis: self.count * seconds for axis, seconds in axes.items()}
        return times | {"data": self._data(compute)}

    def held(self) -> dict[str, float]:
        """Return the bytes of each part of the memory: Adam with weights in 16 and 32 bit."""
        zero, model = self.mix.zero, self.model
        weights = gradients = optimizer = 0.0
        for parameters, names in self._parameters():
            p = self._copies(names)
            weights += 2 * parameters / (p if zero == 3 else 1)
            gradients += self.gradient * parameters / (p if zero > 1 else 1)
            optimizer += 12 * parameters / (p if zero > 0 else 1)
        if zero == 3:  # the whole weights of a layer and of the next one
            weights += 4 * (model.shared + model.experts * model.expert) / self.mix.tensor
        held = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        return held | {"activations": self._kept()}

    def _kept(self) -> float:
        """Return the bytes of activations on the first or the last stage, whichever has more.

        The first stage has the most microbatches in flight, and the last one has the logits.
        """
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
