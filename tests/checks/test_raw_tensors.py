"""A tensor that a rank sends whole: the kernel gets its numbers, or an error of its form."""

from __future__ import annotations

import pytest
import torch

from utils.checks.raw_tensors import raw, tensor_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.tensor(2.5, requires_grad=True),
        torch.empty(0, 2, dtype=torch.int64),
        torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
        torch.tensor([float("nan"), float("inf")]).double(),
    ],
)
def test_the_kernel_gets_the_same_numbers_dtype_and_shape(tensor):
    got = tensor_of(raw(tensor))
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert torch.equal(got.nan_to_num(), tensor.detach().nan_to_num())


def test_another_value_is_told_by_its_type():
    assert raw([1.0]) == "<list>"


@pytest.mark.parametrize(
    "change",
    [{"shape": [5]}, {"shape": [-3, -4]}, {"dtype": "bool"}, {"dtype": None}, {"bytes": "AAA"}],
)
def test_a_forged_form_is_an_error_and_no_tensor(change):
    with pytest.raises(ValueError, match=r"bytes|padding"):
        tensor_of(raw(torch.ones(3, 4)) | change)
