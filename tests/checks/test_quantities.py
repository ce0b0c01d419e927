"""A wrong number whose mistake nobody knows: the message names a product of the task's numbers."""

from __future__ import annotations

import pytest

from utils.checks.quantities import off_by, product

pytestmark = pytest.mark.quick

SIZES = {"depth": 3, "width": 24, "tokens": 10}


@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        (25_944, 26_016, "The difference is 72 = depth × width"),
        (26_016 + 576, 26_016, "The difference is 576 = width²"),
        (26_016 - 480, 26_016, "The difference is 480 = 2 × width × tokens"),
        ([5, 100 * 24], [5, 100], "It is 24 = width times the expected number"),
        (13, 26_000, ""),  # nothing fits
        (10.5, 21.0, "The expected number is 2 times yours"),
        (float("nan"), 1.0, ""),
        ([1, 2], [1, 2, 3], ""),
        ("12", 24, ""),
    ],
)
def test_a_student_reads_what_a_wrong_number_is_off_by(got, expected, said):
    assert off_by(got, expected, SIZES) == said


def test_no_message_guesses_between_two_products():
    assert product(6, {"depth": 2, "heads": 3, "p": 6}) == ""
    sizes = {"samples": 3, "tokens": 10, "width": 24, "itemsize": 8}
    assert product(5760, sizes) == "", "tokens × width², or all four"
    assert product(5760, sizes | {"samples": 5, "width": 36}) == ""
    assert product(5 * 10 * 36 * 8, sizes | {"samples": 5, "width": 36}) == (
        "samples × tokens × width × itemsize"
    )
    assert product(6, {"depth": 2, "width": 3}) == "depth × width"
    assert product(12, {"a": 3, "b": 4, "c": 2, "d": 6}) == ""
