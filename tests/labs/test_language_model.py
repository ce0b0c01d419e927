"""The formulas of lab 15 agree with the model, and the model learns."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from utils import models
from utils.labs.lab15.formulas import (
    forward_flops,
    kept_parts,
    parameters_of,
    peak_bytes,
    segments,
)
from utils.labs.shared.memory import Meter

SIZES = [(4, 128, 4, 512, 128, 16), (1, 24, 3, 40, 10, 3), (3, 30, 5, 77, 17, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_student_who_counts_as_the_check_does_gets_the_models_own_counts(sizes):
    depth, width, heads, hidden, tokens, samples = sizes
    model = models.gpt(depth=depth, width=width, heads=heads, hidden=hidden, tokens=tokens)
    assert parameters_of(depth, width, hidden, tokens) == sum(q.numel() for q in model.parameters())
    text = torch.randint(256, (samples, tokens))
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()
    assert 3 * forward_flops(depth, width, hidden, tokens, samples) == counter.get_total_flops()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_student_who_counts_kept_bytes_as_the_check_does_gets_what_the_meter_says(sizes, dtype):
    _, width, heads, hidden, tokens, samples = sizes
    block = models.Block(width, heads, hidden, causal=True).to(dtype)
    given = torch.randn(samples, tokens, width, dtype=dtype, requires_grad=True)
    with Meter(block, given) as meter:
        before = meter.now - given.nbytes
        result = block(given)
        kept = meter.now - before - result.nbytes
    numbers = sum(kept_parts(samples, tokens, width, heads, hidden).values())
    assert kept == numbers * result.itemsize


def test_the_best_spacings_of_a_chain_are_around_the_square_root_of_its_length():
    peaks = {every: peak_bytes(100, every, 1, 1) for every in range(1, 101)}
    assert segments(10, 4) == [4, 4, 2]
    best = [every for every, peak in peaks.items() if peak == min(peaks.values())]
    assert best == [8, 9, 10, 11, 12, 13]
    assert min(range(1, 9), key=lambda every: peak_bytes(8, every, 20, 1)) == 1
