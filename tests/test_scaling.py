"""The α–β model: what is measured is found again, in noise and with disturbed samples."""

import math

import numpy as np
import pytest

from utils.scaling import fit_alpha_beta

SIZES = 4.0 ** np.arange(1, 14)  # 4 B … 64 MiB
ALPHA, BETA = 2e-6, 1 / 5e9


def times():
    return ALPHA + SIZES * BETA


def test_latency_and_bandwidth_of_exact_times_are_found():
    fit = fit_alpha_beta(SIZES, times())
    assert fit.alpha == pytest.approx(ALPHA)
    assert fit.bandwidth == pytest.approx(5e9)
    assert fit.max_error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_five_percent_of_noise_moves_latency_and_bandwidth_little(seed):
    noise = np.random.default_rng(seed).lognormal(0, 0.05, len(SIZES))
    fit = fit_alpha_beta(SIZES, times() * noise)
    assert fit.alpha == pytest.approx(ALPHA, rel=0.1)
    assert fit.beta == pytest.approx(BETA, rel=0.1)
    assert 0.005 < fit.error < 0.1


@pytest.mark.parametrize("where", [(0,), (12,), (3, 9)])
def test_samples_that_took_ten_times_as_long_do_not_spoil_the_fit(where):
    disturbed = times()
    disturbed[list(where)] *= 10
    fit = fit_alpha_beta(SIZES, disturbed)
    assert fit.alpha == pytest.approx(ALPHA, rel=0.05)
    assert fit.beta == pytest.approx(BETA, rel=0.05)
    assert fit.max_error == pytest.approx(0.9, abs=0.05)  # and they are not hidden


def test_the_smallest_message_counts_as_much_as_the_largest():
    """Without relative errors, 64 MiB would decide alone and α could be anything."""
    slower = times()
    slower[-1] *= 1.05
    assert fit_alpha_beta(SIZES, slower).alpha == pytest.approx(ALPHA, rel=0.05)


def test_times_that_fall_with_the_size_give_no_negative_bandwidth():
    fit = fit_alpha_beta([4, 1024], [3e-6, 2e-6])
    assert fit.beta == 0
    assert fit.bandwidth == math.inf
    assert 2e-6 < fit.alpha < 3e-6


def test_a_bandwidth_without_latency_gives_no_negative_latency():
    fit = fit_alpha_beta([1e6, 2e6, 4e6], [1e-3, 2.2e-3, 5e-3])
    assert fit.alpha == 0
    assert fit.bandwidth == pytest.approx(1e9, rel=0.25)


def test_a_prediction_is_alpha_and_beta_per_byte_for_one_size_and_for_many():
    fit = fit_alpha_beta([0, 1000], [1e-6, 2e-6])
    assert fit.predict(2000) == pytest.approx(3e-6)
    assert fit.predict([0, 2000]) == pytest.approx([1e-6, 3e-6])


@pytest.mark.parametrize(
    ("nbytes", "seconds", "said"),
    [
        ([4], [1e-6], "at least 2 different sizes"),
        ([], [], "at least 2 different sizes"),
        ([4, 4], [1e-6, 2e-6], "at least 2 different sizes"),
        ([4, 8], [1e-6], "2 sizes and 1 times"),
        ([-4, 8], [1e-6, 1e-6], "negative"),
        ([4, 8], [1e-6, -1e-6], "positive"),
        ([4, 8], [1e-6, 0.0], "positive"),
        ([4, 8], [1e-6, math.nan], "NaN"),
        ([4, math.inf], [1e-6, 1e-6], "finite"),
    ],
)
def test_measurements_that_cannot_be_fitted_are_refused_with_the_reason(nbytes, seconds, said):
    with pytest.raises(ValueError, match=said):
        fit_alpha_beta(nbytes, seconds)
