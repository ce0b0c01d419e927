"""The memory meter: bytes alive now, at the peak, and by kind."""

import gc

import pytest
import torch
from torch import nn

from utils.labs.shared.memory import Meter, nbytes

KB = 1024


def floats(kilobytes: int) -> torch.Tensor:
    return torch.zeros(kilobytes * KB // 4)


def test_what_is_made_counts_until_it_is_gone():
    with Meter() as meter:
        one = floats(8)
        assert meter.now == 8 * KB
        two = floats(4)
        assert (meter.now, meter.peak) == (12 * KB, 12 * KB)
        del one
        assert (meter.now, meter.peak) == (4 * KB, 12 * KB)
        two.add_(1)
    assert meter.now == 4 * KB


def test_views_and_second_names_count_once_and_results_of_operations_count():
    with Meter() as meter:
        one = floats(8)
        same, view = one, one.view(2, -1)[0]
        assert meter.now == 8 * KB
        doubled = view * 2
        assert meter.now == 12 * KB
        del one, same
        assert meter.now == 12 * KB, "the view keeps all of its storage"
        del view, doubled
    assert meter.now == 0


def test_what_was_there_before_counts_only_if_it_is_watched():
    before = floats(16)
    with Meter() as meter:
        before.add_(1)
        assert meter.now == 0
    with Meter({"a": [before]}) as meter:
        assert (meter.now, meter.peak) == (16 * KB, 16 * KB)


def test_restart_begins_a_new_peak_and_history():
    with Meter() as meter:
        kept = floats(4)
        floats(100)
        assert meter.peak == 104 * KB
        assert meter.restart() == 4 * KB
        assert meter.peak == 4 * KB
        assert [size for _, size in meter.history] == [4 * KB]
        floats(1)
    assert meter.peak == 5 * KB
    assert kept is not None


def test_history_has_times_in_order_and_every_height():
    with Meter() as meter:
        one = floats(1)
        two = floats(2)
        del one
        three = floats(4)
    times, sizes = zip(*meter.history, strict=True)
    assert list(times) == sorted(times)
    assert list(sizes) == [1 * KB, 3 * KB, 6 * KB]
    assert two is not None
    assert three is not None


def test_entered_again_it_goes_on():
    meter = Meter()
    with meter:
        one = floats(4)
    unseen = floats(8)
    with meter:
        two = floats(2)
    assert meter.now == 6 * KB
    assert nbytes(one, two, unseen) == 14 * KB


def test_activations_live_from_forward_to_backward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    x = torch.randn(32, 64)
    with Meter(model) as meter:
        weights = meter.now
        loss = model(x).sum()
        # tanh keeps its result, 32 × 256; the last product and the sum are small.
        assert meter.now - weights >= 32 * 256 * 4
        loss.backward()
        del loss
        gc.collect()
        assert meter.now == 2 * weights, "weights and gradients"
    assert meter.kinds(model)["gradients"] == weights


def test_kinds_add_up_to_what_is_alive():
    model = nn.Linear(32, 16)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with Meter(model) as meter:
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
        extra = floats(3)
        kinds = meter.kinds(model, optimizer)
        assert sum(kinds.values()) == meter.now
    weights = (32 * 16 + 16) * 4
    assert kinds["parameters"] == kinds["gradients"] == weights
    assert kinds["optimizer state"] == pytest.approx(2 * weights, abs=64), "and two step counts"
    assert kinds["other"] == extra.nbytes


def test_storages_that_are_resized_as_fsdp_does_it():
    with Meter() as meter:
        one = floats(8)
        one.untyped_storage().resize_(0)
        assert meter.now == 0
        one.untyped_storage().resize_(16 * KB)
        torch.add(one, 1, out=one)
        assert meter.peak == 16 * KB
        one.untyped_storage().resize_(0)
        floats(1)
        assert meter.peak == 16 * KB


def test_nbytes_of_modules_optimizers_and_containers():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    tied = nn.Sequential(model[0], model[0])
    assert nbytes(tied) == 64
    assert nbytes(model) == 64 + 4 * 4 * 4 + 8  # weight, bias, mean, variance, and a count
    assert nbytes(torch.optim.SGD(model.parameters(), lr=1)) == 0
    assert nbytes([model[0], {"x": torch.zeros(2)}], None) == 72


def test_what_has_no_tensors_is_refused_by_name():
    with pytest.raises(TypeError, match="an object of type str"):
        Meter("model")


def test_an_error_in_the_block_ends_the_count():
    meter = Meter()

    def fails() -> None:
        with meter:
            floats(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    floats(100)
    assert meter.peak == 4 * KB


def test_the_line_that_makes_the_peak_is_named():
    with Meter() as meter:
        small = floats(4)
        large = torch.cat([small, small])  # this line makes the peak
        del small
        floats(2)
    assert meter.peak_line == "large = torch.cat([small, small])  # this line makes the peak"
    assert large is not None
