"""Training with weights in host memory: the numbers of the reference model, and a real limit."""

import sys

import pytest
import torch
from torch.nn import functional

from utils import models
from utils.labs.lab11 import memory_limit as limited
from utils.labs.lab11.layers import Layers, rows_of, step_on
from utils.labs.shared.memory import Meter, nbytes

SIZES = (20, 16, 12, 10)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device"))]  # fmt: skip


def drawn(sizes=SIZES, n=8):
    draw = torch.Generator().manual_seed(3)
    return torch.randn(n, sizes[0], generator=draw), torch.randint(0, 10, (n,), generator=draw)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


def trained_twin(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    model, (x, labels) = models.mlp(sizes=SIZES), drawn()
    optimizer, losses = adam(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, rows_of(model)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_in_host_memory_trains_as_the_reference_model_does(device):
    rows = [row.requires_grad_() for row in rows_of(models.mlp(sizes=SIZES))]
    optimizers, losses = [adam([row]) for row in rows], []
    x, labels = (t.to(device) for t in drawn())
    for _ in range(3):
        losses.append(step_on(device, rows, optimizers, Layers(SIZES, x, labels)))
    expected, weights = trained_twin(3)
    exact = 0 if device == "cpu" else 1e-5
    assert losses == pytest.approx(expected, abs=exact)
    for row, weight in zip(rows, weights, strict=True):
        torch.testing.assert_close(row.detach(), weight, rtol=0, atol=exact)


def test_pieces_keep_nothing_of_the_weights():
    sizes = (64,) * 9 + (10,)
    x, labels = drawn(sizes, n=2)
    rows = rows_of(models.mlp(sizes=sizes))
    layers = Layers(sizes, x, labels)
    assert layers.order == [0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    with Meter(x) as meter:
        for n, i in enumerate(layers.order):
            layers.work(n, rows[i].clone())
    assert meter.peak < 3 * nbytes(rows[0])
    assert layers.length(0) == len(rows[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_under_a_limit_of_memory_files_train_what_ram_cannot():
    found = limited.compare()
    assert found["allowed"] < found["needed"]
    assert "can't allocate memory" in found["in RAM"]
    assert found["in files"] == found["without the limit"]
