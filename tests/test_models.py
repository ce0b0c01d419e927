"""The labs' MLP: its size, and weights that follow from the seed alone."""

import pytest
import torch

from utils.models import MLP, mlp


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_gradient_bytes_quoted_in_the_labs_are_those_of_the_mlp():
    assert sum(parameter.numel() for parameter in MLP().parameters()) == 669_706


def test_replicas_with_one_seed_are_bit_identical_whatever_was_drawn_before():
    torch.manual_seed(1)
    one = parameters(mlp(seed=3))
    torch.manual_seed(2)
    torch.rand(17)
    assert torch.equal(one, parameters(mlp(seed=3)))


def test_replicas_with_different_seeds_differ():
    assert not torch.equal(parameters(mlp(seed=0)), parameters(mlp(seed=1)))


def test_making_or_resetting_a_model_does_not_shift_later_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mlp(seed=0, sizes=(4, 3, 2)).reset(9)
    assert torch.equal(torch.rand(3), expected)


def test_weights_are_those_that_a_student_gets_with_manual_seed():
    ours = parameters(mlp(seed=7, sizes=(20, 10, 5)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        theirs = parameters(MLP((20, 10, 5)))
    assert torch.equal(ours, theirs)


def test_reset_starts_a_trained_model_over():
    model = mlp(seed=1, sizes=(6, 4, 2))
    before = parameters(model)
    model(torch.rand(3, 6)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(parameters(model), before)
    assert model.reset(1) is model
    assert torch.equal(parameters(model), before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_images_and_flat_vectors_give_the_same_logits():
    model, images = mlp(), torch.rand(5, 1, 28, 28)
    logits = model(images)
    assert logits.shape == (5, 10)
    assert logits.min() < 0  # no ReLU behind the last layer
    assert torch.equal(logits, model(images.flatten(1)))


@pytest.mark.parametrize("sizes", [(784,), (), (784, 0, 10), (784, -1)])
def test_impossible_sizes_are_named(sizes):
    with pytest.raises(ValueError, match=r"at least two positive integers.*got"):
        mlp(sizes=sizes)


@pytest.mark.parametrize("sizes", [784, (784, 1.5), ("784", 10)])
def test_sizes_that_are_no_integers_are_named(sizes):
    with pytest.raises(TypeError, match=r"sequence of integers, got"):
        mlp(sizes=sizes)


def test_a_seed_that_is_no_integer_is_refused():
    with pytest.raises(TypeError):
        mlp(seed=0.5)
