"""The labs' models: their sizes, and weights that follow from the seed alone."""

import pytest
import torch

from utils.models import MLP, Attention, attend, gpt, mlp, vit


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


def test_the_vision_transformer_has_the_parameters_that_the_labs_quote():
    counts = [sum(p.numel() for p in vit(depth=depth).parameters()) for depth in (1, 2, 3)]
    assert counts == [54_986, 104_970, 154_954]
    assert len(list(vit().parameters())) == 39


def test_a_seed_gives_one_vision_transformer_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = vit(seed=3)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(parameters(one), parameters(vit(seed=3)))
    assert not torch.equal(parameters(one), parameters(vit(seed=4)))


def test_tokens_are_the_patches_of_an_image():
    model = vit(depth=0, width=49)
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(49))
        model.embed.bias.zero_()
        model.position.zero_()
    image = torch.arange(784.0).view(1, 1, 28, 28)
    tokens = model.tokens(image)
    assert tokens.shape == (1, 16, 49)
    assert torch.allclose(tokens[0, 6].view(7, 7), image[0, 0, 7:14, 14:21])


def test_attention_is_that_of_pytorch():
    q, k, v = torch.randn(3, 2, 5, 12)
    heads = [t.view(2, 5, 3, 4).transpose(1, 2) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads)
    expected = expected.transpose(1, 2).reshape(2, 5, 12)
    assert torch.allclose(attend(q, k, v, 4), expected, atol=1e-6)
    # A head on its own gives its columns of the whole: what lets ranks share the heads.
    part = [t[..., 4:8] for t in (q, k, v)]
    assert torch.allclose(attend(*part, 4), expected[..., 4:8], atol=1e-6)


def test_heads_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="64 features can't be divided evenly among 3 heads"):
        Attention(64, 3)
    with pytest.raises(ValueError, match="10 columns can't be divided into heads of 4"):
        attend(*torch.randn(3, 1, 2, 10), 4)


def test_depth_is_the_dial_of_the_language_model_and_its_docstring_says_how_large_it_is():
    counts = [sum(p.numel() for p in gpt(depth=depth).parameters()) for depth in (0, 1, 4)]
    assert counts == [82_176, 280_448, 875_264]


def test_a_byte_of_the_language_model_sees_no_later_byte():
    model = gpt(seed=1, depth=2, width=16, heads=2, hidden=32, tokens=12)
    text = torch.randint(256, (2, 12))
    changed = text.clone()
    changed[:, 7:] = (text[:, 7:] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_last_queries_attend_as_they_do_among_all_tokens():
    q, k, v = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    of_all = attend(q, k, v, 4, causal=True)
    torch.testing.assert_close(attend(q[:, 5:], k, v, 4, causal=True), of_all[:, 5:])


def test_the_language_model_depends_only_on_its_seed():
    torch.manual_seed(4)
    one = gpt(seed=3, depth=1)
    torch.rand(2)
    assert torch.equal(parameters(one), parameters(gpt(seed=3, depth=1)))
    assert not torch.equal(parameters(one), parameters(gpt(seed=4, depth=1)))
