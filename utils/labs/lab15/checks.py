"""Checks of lab 15: counts of a language model and of its memory; imports the other checks.

Functions of numbers are called with several models, in which each factor is a different number.
So each missing factor gives a different wrong result.
"""

from __future__ import annotations

import math

from utils.checks.comparison import one_of, table
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, task
from utils.checks.trials import Case, judge_calls
from utils.cluster.questions import Ranks
from utils.models import GPT

from .formulas import forward_flops, kept_parts, parameters_of, peak_bytes
from .precision import bfloat16_sum as bfloat16_sum
from .precision import compressed_mean as compressed_mean
from .precision import loss_scaler as loss_scaler
from .precision import master_weights as master_weights
from .recomputation import recompute as recompute

#: depth, width, hidden, tokens, samples: also a narrow MLP, one token, and a deep model. The last
#: model is larger than any that a rank could make.
MODELS = (
    (3, 24, 40, 10, 3),
    (4, 128, 512, 128, 16),
    (3, 30, 77, 17, 1),
    (0, 16, 64, 8, 2),
    (2, 30, 11, 7, 4),
    (2, 6, 21, 1, 5),
    (700, 6, 21, 5, 4),
    (96, 12_288, 49_152, 2048, 1),
)

# -- 15.1: parameters and FLOPs ---------------------------------------------------------------


@task("15.1", "parameters and FLOPs", points=2)
def counts(ranks: Ranks, report: Report) -> None:
    """Judge both counts for several models."""
    models = (*MODELS, (2 + report.seed % 5, 6, 21 + report.seed % 11, 5, 4))
    cases = [_parameters(*sizes[:4]) for sizes in models] + [_flops(*sizes) for sizes in models]
    judge_calls(ranks, report, cases)


def _parameters(depth: int, width: int, hidden: int, tokens: int) -> Case:
    right = parameters_of(depth, width, hidden, tokens)
    wrong = {
        "You left out the biases. Each Linear layer of a block has one per output": right
        - depth * (5 * width + hidden),
        "You left out the LayerNorms. Each has a weight and a bias for each feature": right
        - (4 * depth + 2) * width,
        "You left out the positions. The model has one row for each token": right - tokens * width,
        "You counted 256 × width once. The embedding and the head both have these weights": right
        - GPT.VOCABULARY * width,
        "You left out the embedding and the head": right - 2 * GPT.VOCABULARY * width,
    }
    return Case(
        "parameters_of",
        [depth, width, hidden, tokens],
        right,
        table(wrong),
        names="depth width hidden tokens",
    )


def _flops(depth: int, width: int, hidden: int, tokens: int, samples: int) -> Case:
    forward = forward_flops(depth, width, hidden, tokens, samples)
    right = 3 * forward
    rows = samples * tokens
    scores = 4 * tokens * width * depth * rows
    head = 2 * width * GPT.VOCABULARY * rows
    wrong = {
        "You counted forward only. Backward needs twice as many FLOPs": forward,
        "You counted a multiplication and its addition as one. They are two FLOPs": right / 2,
        "You left out q kᵀ and the weighted sum of v": right - 3 * scores,
        "You counted one of the two products of attention. There are q kᵀ and the weighted sum of "
        "v": right - 1.5 * scores,
        "You left out the head": right - 3 * head,
        "You counted the embedding as a product. It only looks up rows": right + 3 * head,
        "You counted one sample. Multiply by samples": right / samples,
        "You used 6 FLOPs per parameter and token. Count the products": 6
        * rows
        * parameters_of(depth, width, hidden, tokens),
    }
    arguments = [depth, width, hidden, tokens, samples]
    return Case(
        "flops_of",
        arguments,
        right,
        table(wrong),
        "a number of FLOPs",
        "depth width hidden tokens samples",
    )


# -- 15.2: the roofline -----------------------------------------------------------------------


@task("15.2", "the roofline", points=2)
def roofline(ranks: Ranks, report: Report) -> None:
    """Judge intensities of layers, the roof above them, and a utilization."""
    k = 1 + report.seed % 97
    layers = ((1, 128, 512, 4), (2048, 128, 512, 4), (7, 30 + k, 1100, 8), (3, 2, 1, 3))
    roofs = (
        (0.5, 4e10, 1e10),
        (2.25, 10, 4),
        (100, 4e10, 1e10),
        (4, 4e10, 1e10),
        (0.25, 10, 3),
        (k / 7, 3e12, 2e11 + k),
    )
    steps = (
        (6e9, 0.5, 4e10),
        (1e15, 2.0, 1e15),
        (123e7 * k, 0.25 * k, 5e10),
        (5, 1, 4),
        (6e6, 1.5e-4, 1e11),
        (2.5, 1e-9, 5e9),
    )
    cases = [_intensity(*layer) for layer in layers]
    cases += [Case("attainable", [*roof], min(roof[1], roof[0] * roof[2])) for roof in roofs]
    cases += [Case("mfu", [*step], step[0] / step[1] / step[2]) for step in steps]
    judge_calls(ranks, report, cases)


def _intensity(rows: int, inputs: int, outputs: int, itemsize: int) -> Case:
    flops = 2 * rows * inputs * outputs
    parts = x, weight, y = rows * inputs, inputs * outputs, rows * outputs
    right = flops / (itemsize * sum(parts))
    wrong = {
        "You counted a multiplication and its addition as one. They are two FLOPs": right / 2,
        "You divided by numbers. Multiply them by itemsize to get bytes": right * itemsize,
        "You took 4 bytes for each number. Use itemsize": right * itemsize / 4,
        "You left out the result y, which is written": flops / (itemsize * (x + weight)),
        "You left out the weight, which is read": flops / (itemsize * (x + y)),
    }
    return Case(
        "intensity",
        [rows, inputs, outputs, itemsize],
        right,
        table(wrong),
        names="rows inputs outputs itemsize",
    )


# -- 15.3: what a block keeps -----------------------------------------------------------------


@task("15.3", "what a block keeps for backward", points=2)
def kept_bytes(ranks: Ranks, report: Report) -> None:
    """Judge the bytes of blocks of several sizes."""
    k = report.seed % 13
    blocks = ((3, 10, 28, 7, 44, 8), (16, 128, 128, 4, 512, 4), (1, 7 + k, 30, 5, 77, 2))
    # One token, an MLP as wide as the block, and a narrow one.
    blocks = (*blocks, (2, 1, 12, 3, 45, 4), (2, 5, 12, 3, 12, 4), (2, 5, 30, 3, 11, 4))
    cases = [_kept(*sizes) for sizes in (*blocks, (3, 10, 28, 14, 41, 4))]
    cases[-1].arguments.pop()  # itemsize has a default
    judge_calls(ranks, report, cases)


def _kept(samples: int, tokens: int, width: int, heads: int, hidden: int, itemsize: int) -> Case:
    right = itemsize * sum(kept_parts(samples, tokens, width, heads, hidden).values())
    row = itemsize * samples * tokens
    scores = row * heads * tokens
    wrong = {
        "You counted numbers. Multiply by itemsize": right / itemsize,
        "You left out mean and 1/σ of the LayerNorms": right - 4 * row,
        "You counted two tensors of rows × width too many. The input of q, k and v is one tensor, "
        "and the sums of the residual connections keep nothing": right + 2 * row * width,
        "You left out the softmax's result": right - scores,
        "You counted the scores before and after the softmax. Softmax keeps its result": right
        + scores,
        "You left out one of the two tensors of rows × hidden. GELU keeps its input, and `down` "
        "keeps the GELU's result": right - row * hidden,
        "You left out q, k and v themselves. The products of attention keep them": right
        - 3 * row * width,
        "You counted one sample. Multiply by samples": right / samples,
    }
    arguments = [samples, tokens, width, heads, hidden, itemsize]
    return Case(
        "kept_bytes",
        arguments,
        right,
        table(wrong),
        "a number of bytes",
        "samples tokens width heads hidden itemsize",
    )


# -- 15.5: where to put checkpoints -----------------------------------------------------------

#: layers, bytes that a layer keeps, bytes of its input; the last ones in units of many bytes.
CHAINS = (
    *((10, 3, 2), (36, 1, 1), (8, 25, 1), (36, 4, 1), (1, 5, 5), (17, 2, 1), (24, 4, 4)),
    *((100, 3, 3), (3, 2, 2), (700, 3, 1), (12, 17.0625, 1), (9, 0.5, 0.25)),
    (6, 5_000_000_000, 2_000_000_000),
)


@task("15.5", "where to put checkpoints", points=2)
def spacing(ranks: Ranks, report: Report) -> None:
    """Judge the peak for every spacing, and the best spacing."""
    chains = (*CHAINS, (11 + report.seed % 29, 4 + report.seed % 3, 3))
    cases = [
        _peak(layers, every, *sizes)
        for layers, *sizes in chains
        for every in sorted({1, 2, 3, 5, layers} & set(range(1, layers + 1)))
    ]
    cases += [_best(*chain) for chain in chains]
    judge_calls(ranks, report, cases)


def _peak(layers: int, every: int, kept: float, given: float) -> Case:
    right = peak_bytes(layers, every, kept, given)
    count = math.ceil(layers / every)
    last = layers - (count - 1) * every
    wrong = {
        "You counted the input of the recomputed segment twice. The first layer's kept bytes "
        "include it": count * given + every * kept,
        "You left out the segment that is being recomputed. Add its layers' kept bytes": count
        * given,
        "You recomputed the last segment only. If it is shorter, an earlier segment may need "
        "more": (count - 1) * given + last * kept,
        "You added up the kept bytes of all segments. Only one segment is recomputed at a time": (
            count - 1
        )
        * given
        + layers * kept,
        "You took every as the number of segments. It is the number of layers in one": peak_bytes(
            layers, count, kept, given
        ),
    }
    arguments = [layers, every, kept, given]
    return Case(
        "peak_bytes", arguments, right, table(wrong), "a number of bytes", "layers every kept given"
    )


def _best(layers: int, kept: float, given: float) -> Case:
    peaks = [peak_bytes(layers, every, kept, given) for every in range(1, layers + 1)]
    right = 1 + peaks.index(min(peaks))
    ties = [every for every, peak in enumerate(peaks, 1) if peak == min(peaks)]
    wrong = {
        "You returned the peak. Return the spacing that has it": min(peaks),
        "Several spacings have the smallest peak. Return the smallest of them": one_of(*ties[1:]),
        "You returned √layers. It is the best only if a layer keeps nothing but its input": round(
            math.sqrt(layers)
        ),
    }
    return Case("best_spacing", [layers, kept, given], right, table(wrong), "a spacing")
