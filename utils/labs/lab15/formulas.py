"""Formulas of lab 15: parameters, FLOPs, and bytes that are kept for backward."""

from __future__ import annotations

from utils.models import GPT


def parameters_of(depth: int, width: int, hidden: int, tokens: int) -> int:
    """Return the number of parameters of a `utils.models.GPT` of these sizes."""
    block = 4 * width * (width + 1) + 2 * width * hidden + hidden + width + 4 * width
    return 2 * GPT.VOCABULARY * width + tokens * width + depth * block + 2 * width


def forward_flops(depth: int, width: int, hidden: int, tokens: int, samples: int) -> int:
    """Return the FLOPs of the matrix products of a forward of a `utils.models.GPT`."""
    block = 8 * width**2 + 4 * tokens * width + 4 * width * hidden
    return samples * tokens * (depth * block + 2 * width * GPT.VOCABULARY)


def kept_parts(samples: int, tokens: int, width: int, heads: int, hidden: int) -> dict[str, int]:
    """Return the numbers that a transformer block keeps for backward, by the operation."""
    rows = samples * tokens
    return {
        "norm1: its input": rows * width,
        "norm1: mean and 1/σ": 2 * rows,
        "q, k, v: their one input": rows * width,
        "scores: q": rows * width,
        "scores: k": rows * width,
        "softmax: its result": samples * heads * tokens**2,
        "weighted sum: v": rows * width,
        "out: its input": rows * width,
        "norm2: its input": rows * width,
        "norm2: mean and 1/σ": 2 * rows,
        "up: its input": rows * width,
        "GELU: its input": rows * hidden,
        "down: its input": rows * hidden,
    }


def segments(layers: int, every: int) -> list[int]:
    """Return the number of layers of each segment, if each begins `every` layers after another."""
    return [min(every, layers - first) for first in range(0, layers, every)]


def peak_bytes(layers: int, every: int, kept: float, given: float) -> float:
    """Return the most bytes that backward holds if it recomputes one segment after another.

    Args:
        kept: bytes that a layer keeps for its backward, its input included.
        given: bytes of a layer's input.
    """
    return max(i * given + size * kept for i, size in enumerate(segments(layers, every)))
