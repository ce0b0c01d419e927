"""Checks of what gradients reveal in lab 12: by one division, and by optimization."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.comparison import NO_NUMBER, Mistake, one_of, table
from utils.checks.probe import number, reading_answer, told
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks, Reply

from .clients import facts_about, has_nan, has_other_length, seeded

#: The second network's second hidden layer has tanh, and its outputs are negative. There, only the
#: last bias's gradient reveals the label, and the last weights' gradient does not.
MLPS = ((12, 7, 4), (20, 9, 5, 6), (8, 16, 3), (9, 12, 2))
#: What is added to the seed, and the layers, of each sample that is read.
VICTIMS = tuple(itertools.product(range(4), MLPS))


def _victim(seed: int, sizes: tuple) -> tuple[list[Tensor], Tensor, int]:
    """Return one sample's gradients for an MLP with many dead neurons, the sample and its label."""
    draw = seeded(seed)
    deep = len(sizes) > 3
    net = _mlp(sizes, draw)
    with torch.no_grad():
        for layer in net[:-1:2]:  # so that most neurons are alive
            layer.bias.fill_(3.0)
        if deep:
            net[2].bias.fill_(-3.0)
        alive = torch.randperm(sizes[1], generator=draw)[: sizes[1] // 3]
        dead = [k for k in range(sizes[1]) if k not in alive]
        net[0].weight[dead] = 0
        net[0].bias[dead] = -1
    image = torch.randn(sizes[0], generator=draw, dtype=torch.float64)
    image *= sizes != MLPS[0]  # the first one is black
    label = torch.randint(sizes[-1], (1,), generator=draw)
    gradients = _gradient(net, image[None], label)
    # A little noise makes every neuron reveal another image.
    noise = torch.randn(gradients[0].shape, generator=draw, dtype=torch.float64)
    gradients[0] += 1e-3 * gradients[1].abs().max() * noise
    best = gradients[1].abs().argmax()
    return gradients, gradients[0][best] / gradients[1][best], int(label)


def _mlp(sizes: tuple, draw: torch.Generator) -> nn.Sequential:
    """Return an MLP with ReLU in double precision, and tanh after the second of three layers."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.Tanh() if len(layers) == 2 else nn.ReLU()]
    return _drawn(layers[:-1], draw, 0.25)


def _drawn(layers: list[nn.Module], draw: torch.Generator, size: float = 1.0) -> nn.Sequential:
    """Return a network in double precision, with normal weights of this size."""
    net = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=draw))
    return net


def _gradient(net: nn.Module, x: Tensor, label: Tensor, graph: bool = False) -> list[Tensor]:
    """Return the gradients of all parameters; with `graph`, they can be differentiated again."""
    loss = functional.cross_entropy(net(x), label)
    return list(torch.autograd.grad(loss, list(net.parameters()), create_graph=graph))


def probe_read(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return what an answer reads from the gradients of several samples."""
    function = reading_answer(user_ns, "read_image")
    readings = []
    for k, sizes in VICTIMS:
        read = function(_victim(seed + k, sizes)[0])
        pair = isinstance(read, tuple | list) and len(read) == 2
        readings.append([told(number(read[0])), told(read[1])] if pair else told(read))
    return readings


@task("12.6", "read one gradient", points=2)
def read_image(ranks: Ranks, report: Report) -> None:
    """Judge the label and the pixels."""
    for answer in report.answers(ranks, probe_read, seed=report.seed):
        report.follow(answer.rank, _all_readings(answer.value, report.seed))


def _all_readings(results: list, seed: int) -> Iterator[Step]:
    for (k, sizes), reading in zip(VICTIMS, results, strict=True):
        gradients, image, label = _victim(seed + k, sizes)
        about = f"an MLP {'-'.join(map(str, sizes))}"
        is_pair = isinstance(reading, list) and len(reading) == 2
        yield facts_about(about, {"Return a pair (label, image)": not is_pair})
        yield value(reading[0], label, _wrong_labels(gradients), what=about)
        mistakes = _wrong_images(gradients, image)
        yield value(reading[1], image.tolist(), mistakes, what=about, form="the image")


def _wrong_labels(gradients: list[Tensor]) -> Iterator[Mistake]:
    last = gradients[-1]
    yield from table({
        "label: You used the gradient of the last weights, whose sign depends on the previous "
        "layer's outputs. Use the gradient of the last bias, "
        "gradients[-1]": gradients[-2].sum(1).argmin(),
        "label: You used argmax. Use argmin, because the true class has p - 1, the only negative "
        "entry": last.argmax(),
        "label: You used an early layer. Use the last one": gradients[1].argmin(),
        "label: You took the largest size. Use argmin": last.abs().argmax(),
    })
    yield NO_NUMBER


def _wrong_images(gradients: list[Tensor], image: Tensor) -> Iterator[Mistake]:
    weight, bias = gradients[:2]
    best = bias.abs().argmax()
    row = weight[best]
    yield from table({
        "image: You divided upside down. Divide weight by bias gradient": bias[best] / row,
        "image: You returned the gradient of a row of weights. Divide it by the neuron's bias "
        "gradient": row,
        "image: Your sign is wrong": -image,
        "image: You divided by the sum of the bias gradients. Use one": row / bias.sum(),
        "image: You clamped its values to 0 … 1. Leave them as they are, because normalized "
        "pixels can be negative": image.clamp(0, 1),
    })
    neurons = [row / slope for row, slope in zip(weight, bias, strict=True) if slope]
    neurons.append(torch.stack(neurons).mean(0))
    yield Mistake(
        one_of(*(neuron.tolist() for neuron in neurons)),
        "image: You read another neuron, or several. Take the one whose bias gradient has the "
        "largest size",
    )
    yield Mistake(
        has_nan,
        "image: You divided by 0, because a neuron behind a ReLU can have no gradient. Take the "
        "neuron with the largest bias gradient",
    )
    said = f"image: Return {len(image)} pixels, one row of the weights"
    yield Mistake(has_other_length(len(image)), said)


def _attack(seed: int, wide: int) -> tuple[nn.Module, Tensor, Tensor, list[Tensor]]:
    """Return a small network, a guess, a label, and gradients of another image, wide × wide.

    The larger network gets a minibatch of three images.
    """
    draw = seeded(seed)
    layers = [nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten()]
    layers.append(nn.Linear(2 * (wide - 2) ** 2, 4))
    n = 1 if wide == 5 else 3
    if n > 1:
        layers += [nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)]
    net = _drawn(layers, draw)
    image, guess = torch.randn(2, n, 1, wide, wide, generator=draw, dtype=torch.float64)
    label = torch.randint(4, (n,), generator=draw)
    return net, guess.requires_grad_(), label, _gradient(net, image, label)


def probe_mismatch(user_ns: dict, *, rank: int, seed: int, wide: int) -> dict:
    """Return the distance, its derivative by the guess, and what is left in the parameters."""
    net, guess, label, seen = _attack(seed, wide)
    function = reading_answer(user_ns, "mismatch")
    function(net, guess, label, [torch.zeros_like(gradient) for gradient in seen])  # another victim
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    distance = function(net, guess, label, seen)
    left = any(p.grad is not None and not bool((p.grad == 1).all()) for p in net.parameters())
    modes = all(module.training for module in net.modules())
    is_number = isinstance(distance, Tensor) and distance.numel() == 1
    return {
        "value": distance.item() if is_number else told(distance),
        "slope": _slope(distance, guess) if is_number else None,
        "left": left,
        "tensor": is_number,
        "modes": modes,
    }


def _slope(distance: Tensor, guess: Tensor) -> Any:
    """Return the derivative of a distance; None if the guess is not in its graph."""
    if not distance.requires_grad:
        return None
    (slope,) = torch.autograd.grad(distance.sum(), guess, allow_unused=True)
    return None if slope is None else told(slope.flatten())


@task("12.7", "gradient inversion", points=2)
def mismatch(ranks: Ranks, report: Report) -> None:
    """Judge the sum of squares, and a derivative that leads to the image."""
    # The second case has other images, and a network of more layers.
    cases = [{"seed": report.seed, "wide": wide} for wide in (5, 6)]
    report.judge_cases(ranks, probe_mismatch, cases, _mismatch)
    # Several error classes have these words of PyTorch about tensors of two types.
    if any("should be the same" in text or "same dtype" in text for text, *_ in report.found):
        report.problem(
            "The check passes net, guess and seen in float64. Use these arguments instead of the "
            "lab's variables with the same names, and keep their type"
        )


def _mismatch(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    result = answer.value
    distance, slope, mistakes = _distance(**case)
    yield value(result["value"], distance, mistakes, form="the sum, a tensor with one number")
    yield facts({
        "You returned a number. Return a tensor, because item() cuts the graph": not result[
            "tensor"
        ],
        "You added to .grad of the parameters. Call torch.autograd.grad, which returns gradients, "
        "and not backward": result["left"],
        "You left the net in another mode. Leave its training mode as it is": not result["modes"],
        "Your result can't be differentiated with respect to guess. Use create_graph=True, and no "
        "detach": result["slope"] is None,
    })
    said = "Your derivative with respect to guess is wrong. Don't detach any part"
    yield value(result["slope"], slope, [Mistake(lambda _: True, said)], tolerance=1e-8)


@functools.lru_cache(maxsize=2)
def _distance(seed: int, wide: int) -> tuple[float, list[float], list[Mistake]]:
    """Return the sum of squares, its derivative by the guess, and wrong sums of likely mistakes."""
    net, guess, label, seen = _attack(seed, wide)
    gradients = _gradient(net, guess, label, graph=True)
    gaps = [a - b for a, b in zip(gradients, seen, strict=True)]
    squares = [gap.square().sum() for gap in gaps]
    distance = sum(squares)
    (slope,) = torch.autograd.grad(distance, guess)
    wrong = {
        "You took the mean over each tensor. Take the sum over all entries": sum(
            gap.square().mean() for gap in gaps
        ),
        "You took the mean over all entries. Take the sum": distance
        / sum(gap.numel() for gap in gaps),
        "You summed absolute values. Take squares": sum(gap.abs().sum() for gap in gaps),
        "You took the square root. Return the sum of squares": distance.sqrt(),
        "You summed the lengths of the differences. Take squares, and no root": sum(
            gap.norm() for gap in gaps
        ),
        "You compared only the first parameter. Sum over all of them": squares[0],
        "You compared only the last parameter. Sum over all of them": squares[-1],
        "You compared the guess's gradient with nothing. Subtract seen": sum(
            gradient.square().sum() for gradient in gradients
        ),
    }
    return distance.item(), slope.flatten().tolist(), table(wrong)
