"""The drawings of tensor parallelism show what the tensors are, not what they should be."""

import matplotlib.pyplot as plt
import pytest
import torch

from utils.labs.lab09 import pictures as partitions


@pytest.fixture
def whole():
    return torch.arange(24.0).view(4, 6)


def said_of(whole, parts):
    _, axes = plt.subplots()
    return partitions.draw_matrix(axes, (0, 0), whole, parts, "A")


def test_who_has_an_element_is_found_by_its_value(whole):
    columns = partitions.holders(whole, whole.chunk(3, 1))
    assert columns.shape == (3, 4, 6)
    assert columns[1].nonzero()[:, 1].unique().tolist() == [2, 3]
    swapped = partitions.holders(whole, whole.chunk(3, 1)[::-1])
    assert torch.equal(swapped, columns.flip(0))


def test_a_shard_a_replica_and_a_partial_sum_have_different_words(whole):
    assert (
        said_of(whole, whole.chunk(2, 0)) == "A: rank 0 has 12 of 24, rank 1 has 12 of 24 elements"
    )
    assert said_of(whole, [whole, whole]).count("24 of 24") == 2
    assert said_of(whole, [whole / 4, 3 * whole / 4]) == (
        "A: each rank has a partial sum of the whole matrix"
    )


def test_what_no_rank_has_is_told(whole):
    first, _ = whole.chunk(2, 1)
    assert (
        said_of(whole, [first, first[:2]]) == "A: rank 0 has 12 of 24, rank 1 has 6 of 24 elements"
    )


def test_the_figures_are_drawn_and_told(whole):
    row = [("x", whole, [whole] * 2), ("A", whole.T, whole.T.chunk(2, 1))]
    row.append(("y", whole @ whole.T, [whole @ part for part in whole.T.chunk(2, 1)]))
    drawn = [
        partitions.products({"by columns": row, "and again": row[:2]}),
        partitions.two_ways(),
        partitions.megatron(1),
        partitions.megatron(4),
        partitions.expert_load({"one": [[3, 1], [2, 2]], "two": [[0, 4], [4, 0]]}, room=4),
    ]
    for figure in drawn:
        figure.canvas.draw()
        assert figure.alt_text.endswith(".")
    assert "one: [5, 3] tokens for the experts, room for 4" in drawn[-1].alt_text
