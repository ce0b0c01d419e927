"""The models that the labs share."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = (784, 512, 512, 10)
Model = TypeVar("Model", bound=nn.Module)


class MLP(nn.Module):
    """A multilayer perceptron: it flattens images, then has Linear and ReLU, and ends with logits.

    Args:
        sizes: Features in, hidden features …, classes out; at least two positive integers.

    It has Σ (inᵢ + 1) · outᵢ parameters over its Linear layers, where the 1 counts the bias:
    785 · 512 + 513 · 512 + 513 · 10 = 669,706 for the default sizes, 2.7 MB in float32.

    Raises:
        TypeError, ValueError: `sizes` is not a sequence of at least two positive integers.

    Source: the network of PyTorch's "Quickstart" tutorial (2021).
    """

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__()
        self.sizes = _checked(sizes)
        layers: list[nn.Module] = [nn.Flatten()]
        for wide, narrow in itertools.pairwise(self.sizes):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])  # no ReLU after the logits

    def forward(self, images: Tensor) -> Tensor:
        """Return logits float32 [m, sizes[-1]] of images float32 [m, …], sizes[0] values each."""
        return self.layers(images)

    @torch.no_grad()
    def reset(self, seed: int) -> MLP:
        """Draw new values for all parameters from `seed`, in place, and return the model.

        The values are the same as after `torch.manual_seed(seed); MLP(sizes)`, with weights and
        biases uniform in ±1/√in. The global random state is neither read nor changed.
        """
        random = torch.Generator().manual_seed(operator.index(seed))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                bound = 1 / math.sqrt(layer.in_features)
                for parameter in (layer.weight, layer.bias):
                    # Draw on the CPU, because another device's generator gives other numbers.
                    drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=random)
                    parameter.copy_(drawn)
        return self


def mlp(seed: int = 0, sizes: Sequence[int] = SIZES) -> MLP:
    """Return an `MLP(sizes)` whose weights depend only on `seed`.

    The same seed gives the same weights on every rank, regardless of earlier random numbers, and
    the global random state doesn't change. Different seeds on different ranks give different
    replicas, which DDP's first broadcast would repair.

    Raises:
        TypeError, ValueError: `sizes` is not a sequence of at least two positive integers, or
            `seed` is not an integer.
    """
    with torch.random.fork_rng(devices=[]):  # MLP() itself draws from the global state
        model = MLP(sizes)
    return model.reset(seed)


def _checked(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes as integers. Raises TypeError or ValueError with the wrong sizes."""
    try:
        checked = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"sizes must be a sequence of integers, got {sizes!r}") from None
    if len(checked) < 2 or min(checked) < 1:
        raise ValueError(
            f"sizes must be at least two positive integers (features in, …, classes), got {sizes!r}"
        )
    return checked


# -- transformers -----------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, head_size: int, causal: bool = False) -> Tensor:
    """Return softmax(q kᵀ / √head_size) v for each head, in the shape of `q`.

    `q`, `k`, and `v` are [samples, tokens, heads · head_size], with the heads side by side. `k` and
    `v` may have more tokens than `q`, whose tokens then are the last ones.

    Args:
        causal: whether a token attends only to itself and to the tokens before it.
    """
    samples, tokens, width = q.shape
    if width % head_size:
        raise ValueError(f"{width} columns can't be divided into heads of {head_size} columns.")
    q, k, v = (t.reshape(samples, t.shape[1], -1, head_size).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_size)
    if causal:
        # Adding -inf, unlike masked_fill, keeps nothing for backward.
        scores = scores + later_tokens(tokens, k.shape[2]).to(scores)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(samples, tokens, width)


def later_tokens(queries: int, keys: int) -> Tensor:
    """Return float32 [queries, keys]: -inf where a key comes after its query, and 0 elsewhere.

    The queries are the last of the keys' tokens.
    """
    return torch.full((queries, keys), -math.inf).triu(keys - queries + 1)


class Attention(nn.Module):
    """Self-attention: `q`, `k`, `v` and `out` are Linear layers of `width` features."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{width} features can't be divided evenly among {heads} heads.")
        self.heads = heads
        self.head_size = width // heads
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape [samples, tokens, width]."""
        return self.out(attend(self.q(x), self.k(x), self.v(x), self.head_size, self.causal))


class FeedForward(nn.Module):
    """A transformer's MLP: `up` to `hidden` features, GELU, and `down` to `width` again."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape […, width]."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer block: attention, then an MLP; each follows a LayerNorm and adds its input."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape [samples, tokens, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer for 28 × 28 images, whose tokens are 16 patches of 7 × 7 pixels.

    Args:
        depth: Number of blocks.
        width: Features of a token.
        heads: Number of heads in each attention, which share the width evenly.
        hidden: Hidden features of each MLP.

    With the default sizes it has 54,986 parameters at depth 1, and 49,984 for each further block.

    Source: A. Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021). Instead of a class token,
    this model classifies the mean over the tokens.
    """

    PATCH = 7
    TOKENS = 16
    CLASSES = 10

    def __init__(self, depth: int = 2, width: int = 64, heads: int = 4, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Linear(self.PATCH**2, width)
        self.position = nn.Parameter(0.02 * torch.randn(self.TOKENS, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.CLASSES)

    def tokens(self, images: Tensor) -> Tensor:
        """Return the embedded patches [m, 16, width] of images [m, 1, 28, 28]."""
        rows = images.unfold(2, self.PATCH, self.PATCH)
        patches = rows.unfold(3, self.PATCH, self.PATCH).reshape(len(images), self.TOKENS, -1)
        return self.embed(patches) + self.position

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [m, 10] of images [m, 1, 28, 28]."""
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def vit(seed: int = 0, **sizes: int) -> ViT:
    """Return a `ViT(**sizes)` whose weights depend only on `seed`, so they agree on all ranks."""
    return _seeded(ViT, seed, sizes)


class GPT(nn.Module):
    """A language model of bytes: it predicts each byte of a text from the bytes before it.

    Args:
        depth: Number of blocks, the dial for the model's size.
        width: Features of a token.
        heads: Number of heads in each attention, which share the width evenly.
        hidden: Hidden features of each MLP.
        tokens: The most tokens of a text.

    With the default sizes it has 82,176 parameters without blocks and 198,272 for each block, so
    875,264 at depth 4. A token is a byte, so the vocabulary has 256 tokens.

    Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Unlike
    theirs, this model's head doesn't share its weights with the embedding.
    """

    VOCABULARY = 256

    def __init__(
        self,
        depth: int = 4,
        width: int = 128,
        heads: int = 4,
        hidden: int = 512,
        tokens: int = 128,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def embedded(self, text: Tensor, first: int = 0) -> Tensor:
        """Return [samples, tokens, width] of bytes int64 [samples, tokens].

        Args:
            text: bytes, whose first one is at the position `first`.
        """
        return self.embed(text) + self.position[first : first + text.shape[1]]

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [samples, tokens, 256] of what the last block returned."""
        return self.head(self.norm(x))

    def forward(self, text: Tensor) -> Tensor:
        """Return logits [samples, tokens, 256] for the byte that follows each byte of `text`."""
        x = self.embedded(text)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def gpt(seed: int = 0, **sizes: int) -> GPT:
    """Return a `GPT(**sizes)` whose weights depend only on `seed`, so they agree on all ranks."""
    return _seeded(GPT, seed, sizes)


def _seeded(kind: Callable[..., Model], seed: int, sizes: Mapping[str, int]) -> Model:
    """Return a model whose weights depend only on `seed`; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(operator.index(seed))
        return kind(**sizes)
