"""Transformers, and mixes of parallelisms that train them.

Sources: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC'21, for parameters and operations; V. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, for selective recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from utils.forecast.errors import MixError

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Transformer:
    """A decoder such as GPT or Llama.

    Attributes:
        layers, width, heads: of the decoder; each head has width / heads channels.
        vocabulary: rows of the embedding, which is also the output's matrix.
        sequence: tokens of a sample.
        experts, top_k: MLPs of each layer, and how many of them a token visits.
        kv_heads: heads of keys and values; 0 means as many as `heads`.
        mlp: weights of one MLP, in units of width². GPT's two matrices have 8.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 51200
    sequence: int = 2048
    experts: int = 1
    top_k: int = 1
    kv_heads: int = 0
    mlp: float = 8.0

    def __post_init__(self) -> None:
        least = min(self.layers, self.width, self.heads, self.vocabulary, self.sequence)
        if least < 1 or not 1 <= self.top_k <= self.experts:
            raise MixError(f"{self} is impossible: use sizes of at least 1, and top_k ≤ experts.")

    @property
    def keys(self) -> int:
        """Return the channels of a token's keys, which are also those of its values."""
        return self.width * (self.kv_heads or self.heads) // self.heads

    @property
    def shared(self) -> float:
        """Return a layer's parameters outside its MLPs: attention, layer norms, router."""
        router = self.experts if self.experts > 1 else 0
        return self.width * (2 * self.width + 2 * self.keys + 8 + router)

    @property
    def expert(self) -> float:
        """Return the parameters of one MLP."""
        return self.width * (self.mlp * self.width + 5)

    @property
    def embedding(self) -> float:
        """Return the parameters of the embedding."""
        return float(self.vocabulary * self.width)

    @property
    def parameters(self) -> float:
        """Return the parameters of the model (SC'21, equation 2, without position embeddings)."""
        return self.layers * (self.shared + self.experts * self.expert) + self.embedding

    @property
    def core(self) -> float:
        """Return a token's forward operations with the whole attention matrix."""
        return 4.0 * self.sequence * self.width

    @property
    def products(self) -> float:
        """Return a token's forward operations with a layer's weights."""
        attention = 2 * self.width + 2 * self.keys
        return 2 * self.width * (attention + self.top_k * self.mlp * self.width)

    def flops(self, batch: int, recompute: Recompute = "none") -> float:
        """Return the operations of a step (SC'21, equation 3, for full recomputation).

        Without recomputation the result is the *model FLOPs*, which MFU counts.
        """
        layer = (4 if recompute == "full" else 3) * (self.products + self.core)
        again = self.core if recompute == "selective" else 0.0
        output = 6 * self.width * self.vocabulary
        return batch * self.sequence * (self.layers * (layer + again) + output)


@dataclass(frozen=True)
class Mix:
    """A mix of parallelisms, and of ways to save memory.

    Attributes:
        data, tensor, pipeline, context: ranks of each axis.
        expert: how many ranks of the data axis share the experts.
        zero: stage of ZeRO over the data and context axes: 1 shards the optimizer, 2 gradients
            too, 3 weights too.
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
    if mix.interleave > 1 and mix.pipeline == 1:
        raise MixError("A pipeline of one stage can't interleave. Use interleave=1.")
    divisions = [
        ("tensor axis", mix.tensor, "heads", model.heads),
        ("context axis", mix.context, "sequence", model.sequence),
        ("pipeline × interleave", mix.pipeline * mix.interleave, "layers", model.layers),
        ("expert axis", mix.expert, "experts", model.experts),
        ("expert axis", mix.expert, "data axis", mix.data),
        ("data axis × microbatch", mix.data * mix.microbatch, "batch", batch),
    ]
    if mix.interleave > 1:
        count = mix.microbatches(batch)
        divisions.append(("interleaved pipeline", mix.pipeline, "microbatches", count))
    for name, divisor, whole, number in divisions:
        if number % divisor:
            raise MixError(
                f"The {name} ({divisor:,}) does not divide the {whole} ({number:,}). "
                f"Choose a divisor of {number:,}."
            )
