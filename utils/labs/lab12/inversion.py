"""Checks of what gradients reveal in lab 12: by one division, and by optimization."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import NO_NUMBER, Mistake, one_of, table
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks, Reply

from .clients import facts_about, has_nan, has_other_length
from .privacy_probes import VICTIMS, attack, gradients_of, probe_mismatch, probe_read, victim


@task("12.6", "read one gradient", points=2)
def read_image(ranks: Ranks, report: Report) -> None:
    """Judge the label and the pixels."""
    for answer in report.answers(ranks, probe_read, seed=report.seed):
        report.follow(answer.rank, _all_readings(answer.value, report.seed))


def _all_readings(results: list, seed: int) -> Iterator[Step]:
    for (k, sizes), reading in zip(VICTIMS, results, strict=True):
        gradients, label = victim(seed + k, sizes)
        best = gradients[1].abs().argmax()
        image = gradients[0][best] / gradients[1][best]
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


#: What PyTorch says about tensors of two types, in several error classes.
OF_TWO_TYPES = ("should be the same", "same dtype")
OTHER_TYPE = (
    "The check passes net, guess and seen in float64. Use these arguments instead of the lab's "
    "variables with the same names, and keep their type"
)


@task("12.7", "gradient inversion", points=2)
def mismatch(ranks: Ranks, report: Report) -> None:
    """Judge the sum of squares, and a derivative that leads to the image."""
    # The second case has other images, and a network of more layers.
    cases = [{"seed": report.seed, "wide": wide} for wide in (5, 6)]
    report.judge_cases(ranks, probe_mismatch, cases, _mismatch)
    if explanation := report.behind_errors(dict.fromkeys(OF_TWO_TYPES, OTHER_TYPE)):
        report.problem(explanation)


def _mismatch(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    result = answer.value
    distance, slope, mistakes = _distance(**case)
    yield value(result["value"], distance, mistakes, form="the sum, a tensor with one number")
    yield facts({
        "You returned a number. Return a tensor, because item() cuts the graph": not result[
            "tensor"
        ],
        "You added to .grad of the parameters or of the guess. Call torch.autograd.grad, which "
        "returns gradients, and not backward": result["left"],
        "You left the net in another mode. Leave its training mode as it is": not result["modes"],
        "Your result can't be differentiated with respect to guess. Use create_graph=True, and no "
        "detach": result["slope"] is None,
    })
    said = "Your derivative with respect to guess is wrong. Don't detach any part"
    yield value(result["slope"], slope, [Mistake(lambda _: True, said)], tolerance=1e-8)


@functools.lru_cache(maxsize=2)
def _distance(seed: int, wide: int) -> tuple[float, list[float], list[Mistake]]:
    """Return the sum of squares, its derivative by the guess, and wrong sums of likely mistakes."""
    net, guess, label, seen = attack(seed, wide)
    gradients = gradients_of(net, guess, label, graph=True)
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
