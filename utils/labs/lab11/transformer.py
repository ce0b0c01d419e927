"""Transformers, and mixes of parallelisms that train them.

Sources: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC'21, for parameters and operations; V. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, for selective recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]


class MixError(ValueError):
    """A mix of parallelisms is impossible, or none fits into the devices' memory."""


@dataclass(frozen=True)
class Transformer:
    """A decoder such as GPT or Llama.

    The embedding, of `vocabulary` rows, is also the output's matrix. A sample has `sequence`
    tokens. `kv_heads` are the heads of keys and values (0: as many as `heads`), and `mlp` counts
    the weights of an MLP in units of width² (GPT's two matrices have 8). A layer has `experts`
    MLPs, of which a token visits `top_k`.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 51200
    sequence: int = 2048
    kv_heads: int = 0
    mlp: float = 8.0
    experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        least = min(self.layers, self.width, self.heads, self.vocabulary, self.sequence)
        if least < 1 or not 1 <= self.top_k <= self.experts:
            raise MixError(f"{self} is impossible: use sizes of at least 1, and top_k ≤ experts.")

    @property
    def keys(self) -> int:
        """Return the channels of a token's keys, which are also those of its values."""
        return self.width * (self.kv_heads or self.heads) // self.heads

    @property
    def mlps(self) -> float:
        """Return the parameters of a layer's MLPs, its experts."""
        return self.experts * self.width * (self.mlp * self.width + 5)

    @property
    def layer(self) -> float:
        """Return the parameters of a layer: attention, layer norms, MLPs, and their router."""
        router = self.experts if self.experts > 1 else 0
        return self.width * (2 * self.width + 2 * self.keys + 8 + router) + self.mlps

    @property
    def embedding(self) -> float:
        """Return the parameters of the embedding."""
        return float(self.vocabulary * self.width)

    @property
    def parameters(self) -> float:
        """Return the parameters of the model (SC'21, equation 2, without position embeddings)."""
        return self.layers * self.layer + self.embedding

    @property
    def core(self) -> float:
        """Return a token's forward operations with the whole attention matrix."""
        return 4.0 * self.sequence * self.width

    @property
    def products(self) -> float:
        """Return a token's forward operations with a layer's weights."""
        visited = self.top_k * self.mlp * self.width
        return 2 * self.width * (2 * self.width + 2 * self.keys + visited)

    def flops(self, batch: int) -> float:
        """Return a step's operations without recomputation (SC'21, equation 3, has 4 for 3)."""
        layers = 3 * self.layers * (self.products + self.core)
        return batch * self.sequence * (layers + 6 * self.width * self.vocabulary)


@dataclass(frozen=True)
class Mix:
    """A mix of parallelisms, and of ways to save memory.

    Attributes:
        data, tensor, pipeline, context: ranks of each axis.
        expert: how many neighbors on the data axis share the experts.
        zero: stage of ZeRO: 1 shards the optimizer, 2 gradients too, 3 weights too.
        microbatch: samples of a microbatch.
        interleave: parts of the model on each stage.
        recompute: what the backward pass computes again. "selective" is the attention matrix.
        sequence_parallel: whether the tensor axis also splits what is between its products.
        flash: whether one kernel does the attention, so that its matrix is never in memory.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    microbatch: int = 1
    interleave: int = 1
    recompute: Recompute = "full"
    sequence_parallel: bool = True
    flash: bool = True

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replica(self) -> int:
        """Return how many ranks of the data axis have copies of the same experts."""
        return self.data // self.expert

    def microbatches(self, batch: int) -> int:
        """Return how many microbatches a pipeline gets in a step."""
        return batch // (self.data * self.microbatch)

    def __str__(self) -> str:
        axes = ("tensor", "context", "pipeline", "data", "expert")
        sizes = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        more = [f"ZeRO-{self.zero}"] * (self.zero > 0) + [f"microbatch {self.microbatch}"]
        more += [f"interleave {self.interleave}"] * (self.interleave > 1)
        return ", ".join([" × ".join(sizes) or "one device", *more, f"recompute {self.recompute}"])


def check(model: Transformer, mix: Mix, batch: int) -> None:
    """Make sure that a mix is possible.

    Raises:
        MixError: a number is out of range, or doesn't divide what it splits.
    """
    axes = (mix.data, mix.tensor, mix.pipeline, mix.context, mix.expert)
    if min(*axes, mix.microbatch, mix.interleave, batch) < 1 or mix.zero not in range(4):
        raise MixError(f"{mix} is impossible: use sizes of at least 1, and ZeRO stages 0 to 3.")
    divisions = [
        ("tensor axis", mix.tensor, "heads", model.heads),
        ("context axis", mix.context, "sequence", model.sequence),
        ("pipeline × interleave", mix.pipeline * mix.interleave, "layers", model.layers),
        ("expert axis", mix.expert, "experts", model.experts),
        ("expert axis", mix.expert, "data axis", mix.data),
        ("data axis × microbatch", mix.data * mix.microbatch, "batch", batch),
    ]
    if mix.interleave > 1:
        divisions += [
            ("interleaved pipeline", mix.pipeline, "microbatches", mix.microbatches(batch))
        ]
    for name, divisor, whole, number in divisions:
        if number % divisor:
            raise MixError(f"The {name} ({divisor:,}) does not divide the {whole} ({number:,}).")
