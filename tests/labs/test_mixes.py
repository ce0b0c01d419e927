"""Formulas that choose a mix of parallelisms, and the drawings of lab 11."""

import textwrap

import pytest

from utils.labs.lab11 import mixes
from utils.labs.lab11 import pictures as hybrid

ONE = mixes.Machine()


def test_memory_is_that_of_the_zero_paper():
    # "ZeRO" (2020), figure 1: 7.5 billion parameters, 64 devices: 120, 16.6 and 1.9 GB, to which
    # we add the layers that are whole for a moment.
    found = mixes.estimates(7.5e9, 64, ONE)
    layer = 4 * 7.5e9 / (7.5e9 / (12 * 128**2)) ** (1 / 3)
    assert found["replicas"][0] == 120e9
    assert found["ZeRO-2"][0] - layer == pytest.approx(16.6e9, rel=0.01)
    assert found["ZeRO-3"][0] - 2 * layer == pytest.approx(1.9e9, rel=0.02)


@pytest.mark.parametrize(
    ("parameters", "devices", "name"),
    [(1e9, 8, "replicas"), (7e9, 8, "ZeRO-2"), (70e9, 64, "ZeRO-3"), (8e9, 1, "offload"),
     (1e12, 1024, "pipeline × tensor × data"), (1e12, 8, mixes.DOES_NOT_FIT)],
)  # fmt: skip
def test_larger_models_need_more(parameters, devices, name):
    assert mixes.fastest(parameters, devices, ONE) == name


def test_what_fits_in_less_memory_fits_in_more():
    for parameters in (1e9, 1e10, 1e11):
        small = mixes.fastest(parameters, 16, mixes.Machine(memory=40e9))
        assert small == mixes.DOES_NOT_FIT or mixes.fastest(parameters, 16, ONE) in mixes.NAMES


def test_no_model_is_refused():
    with pytest.raises(ValueError, match="expected a model and a device, got 0 and 4"):
        mixes.estimates(0, 4, ONE)


def test_a_drawing_without_measurements_says_so():
    with pytest.raises(ValueError, match="There is nothing to draw"):
        hybrid.memory({}, {}, 1)
    with pytest.raises(ValueError, match="plain: There is nothing to draw"):
        hybrid.work({"plain": {"device": []}})


def test_drawings_say_in_words_what_they_show():
    report = {"parameters": 2e6, "gradients": 2e6, "optimizer state": 4e6, "peak": 9e6, "sent": 3e6}
    said = hybrid.memory({"replicas": report}, {"replicas": 8e6}, 2e6).alt_text
    assert "peak 9.0 MB; sends 1.50 times the model" in said
    assert "Row 1: ranks 3, 4, 5" in hybrid.mesh((2, 3), ("data", "pipeline")).alt_text
    said = hybrid.work({"plain": {"device": [(1.0, 1.5)], "host": [(2.0, 2.25)]}}).alt_text
    assert "plain: 1250 ms" in said
    assert "1 devices: replicas" in hybrid.mixes(ONE).alt_text


ONE_STAGE = """
    import torch, torch.distributed as dist
    from torch.nn import functional
    from utils.labs.lab11.pipeline import run_schedule
    from utils.labs.shared.schedules import one_f_one_b
    dist.init_process_group("mpi")
    torch.manual_seed(0)
    stage, x, y = torch.nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3
    loss = run_schedule(stage, one_f_one_b(1, 2), list(x.chunk(2)), list(y.chunk(2)))
    expected = functional.cross_entropy(stage(x), y)
    (gradient,) = torch.autograd.grad(expected, stage.weight)
    assert abs(loss - expected.item()) < 1e-6
    assert torch.allclose(stage.weight.grad, gradient, atol=1e-6)
"""


def test_a_pipeline_of_one_stage_is_plain_training(mpiexec):
    mpiexec(1, textwrap.dedent(ONE_STAGE))
