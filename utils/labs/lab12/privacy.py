"""Checks of what gradients tell in lab 12, and of what hides it: noise, and masks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.mistakes import NO_NUMBER, Mistake, one_of, same, table
from utils.checks.probe import number, reading_answer, told
from utils.checks.steps import Step, facts, value
from utils.checks.task import Report, task
from utils.cluster.contracts import Ranks
from utils.cluster.reply import Reply

from .clients import facts_about, has_other_length, seeded

# -- 12.6 -------------------------------------------------------------------------------------

#: The second hidden layer of the second one has tanh, and negative outputs: only the gradient of
#: the last bias tells the label then, not that of the last weights.
MLPS = ((12, 7, 4), (20, 9, 5, 6), (8, 16, 3), (9, 12, 2))
#: What is added to the seed, and the layers, of each sample that is read.
VICTIMS = tuple(itertools.product(range(4), MLPS))


def _victim(seed: int, sizes: tuple) -> tuple[list[Tensor], Tensor, int]:
    """Return gradients of one sample at an MLP with many dead neurons, the sample and its label."""
    draw, deep = seeded(seed), len(sizes) > 3
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
    image *= sizes != MLPS[0]  # a black one
    label = torch.randint(sizes[-1], (1,), generator=draw)
    gradients = _gradient(net, image[None], label)
    # A little noise: every neuron tells another image.
    noise = torch.randn(gradients[0].shape, generator=draw, dtype=torch.float64)
    gradients[0] += 1e-3 * gradients[1].abs().max() * noise
    best = gradients[1].abs().argmax()
    return gradients, gradients[0][best] / gradients[1][best], int(label)


def _mlp(sizes: tuple, draw: torch.Generator) -> nn.Sequential:
    """Return an MLP with ReLU in double precision; after the second of three layers it has tanh."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.Tanh() if len(layers) == 2 else nn.ReLU()]
    net = nn.Sequential(*layers[:-1]).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
    return net


def _gradient(net: nn.Module, x: Tensor, label: Tensor, graph: bool = False) -> list[Tensor]:
    """Return the gradients of all parameters; graph: they can be differentiated again."""
    loss = functional.cross_entropy(net(x), label)
    return list(torch.autograd.grad(loss, list(net.parameters()), create_graph=graph))


def probe_read(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return what is read from the gradients of several samples."""
    function, readings = reading_answer(user_ns, "read_image"), []
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
    """Judge what was read from the gradients of each sample."""
    for (k, sizes), reading in zip(VICTIMS, results, strict=True):
        gradients, image, label = _victim(seed + k, sizes)
        about = f"an MLP {'-'.join(map(str, sizes))}"
        is_pair = isinstance(reading, list) and len(reading) == 2
        yield facts_about(about, {"return a pair (label, image)": not is_pair})
        yield value(reading[0], label, _wrong_labels(gradients), what=about)
        mistakes = _wrong_images(gradients, image)
        yield value(reading[1], image.tolist(), mistakes, what=about, form="the image")


def _wrong_labels(gradients: list[Tensor]) -> Iterator[Mistake]:
    """Yield which labels mistakes read from the gradients."""
    last = gradients[-1]
    wrong = {
        "label: this is told by the gradient of the last weights, whose sign depends on the "
        "outputs of the layer before, negative ones with tanh. Take the gradient of the last bias, "
        "gradients[-1]": gradients[-2].sum(1).argmin(),
        "label: argmin, not argmax: the entry of the true class is p - 1, the only negative "
        "one": last.argmax(),
        "label: the last layer's gradients are at the end of the list": gradients[1].argmin(),
        "label: the entry of largest size may be another class's": last.abs().argmax(),
    }
    yield from table(wrong)
    yield NO_NUMBER


def _wrong_images(gradients: list[Tensor], image: Tensor) -> Iterator[Mistake]:
    """Yield which images mistakes read from the gradients."""
    weight, bias = gradients[:2]
    best = bias.abs().argmax()
    row = weight[best]
    wrong = {
        "image: upside down: weight gradient divided by bias gradient": bias[best] / row,
        "image: this is the gradient of a row of weights: divide it by the neuron's bias "
        "gradient": row,
        "image: the sign": -image,
        "image: divided by all the bias gradients together": row / bias.sum(),
        "image: its values were cut to 0 … 1. The pixels are normalized, so negative ones are "
        "right: leave them as they are": image.clamp(0, 1),
    }
    yield from table(wrong)
    neurons = [row / slope for row, slope in zip(weight, bias, strict=True) if slope]
    neurons.append(torch.stack(neurons).mean(0))
    yield Mistake(
        one_of(*(neuron.tolist() for neuron in neurons)),
        "image: this is what another neuron tells, or several: take the one whose bias gradient "
        "has the largest size",
    )
    yield Mistake(
        _has_nan,
        "image: divided by 0: a neuron behind a ReLU may have no gradient at all. Take that with "
        "the largest bias gradient",
    )
    said = f"image: expected {len(image)} pixels, one row of the weights"
    yield Mistake(has_other_length(len(image)), said)


def _has_nan(reply: Any) -> bool:
    """Return whether this is a list with a number that is not finite."""
    entries = reply if isinstance(reply, list) else []
    return any(isinstance(entry, float) and not math.isfinite(entry) for entry in entries)


# -- 12.7 -------------------------------------------------------------------------------------


def _attack(seed: int, wide: int) -> tuple[nn.Module, Tensor, Tensor, list[Tensor]]:
    """Return a small network, a guess, a label, and gradients of another image, wide × wide.

    The larger network gets a minibatch of three images.
    """
    draw, layers = seeded(seed), [nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten()]
    layers.append(nn.Linear(2 * (wide - 2) ** 2, 4))
    n = 1 if wide == 5 else 3
    if n > 1:
        layers += [nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)]
    net = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    image, guess = torch.randn(2, n, 1, wide, wide, generator=draw, dtype=torch.float64)
    label = torch.randint(4, (n,), generator=draw)
    return net, guess.requires_grad_(), label, _gradient(net, image, label)


def probe_mismatch(user_ns: dict, *, rank: int, seed: int, wide: int) -> dict:
    """Return the distance, its derivative by the guess, and what is left in the parameters."""
    net, guess, label, seen = _attack(seed, wide)
    function = reading_answer(user_ns, "mismatch")
    function(net, guess, label, [torch.zeros_like(gradient) for gradient in seen])  # other victim
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    distance = function(net, guess, label, seen)
    left = any(p.grad is not None and not bool((p.grad == 1).all()) for p in net.parameters())
    modes = all(module.training for module in net.modules())
    result = {"value": told(distance), "slope": None, "left": left, "tensor": False, "modes": modes}
    if not isinstance(distance, Tensor) or distance.numel() != 1:
        return result
    if distance.requires_grad:
        (slope,) = torch.autograd.grad(distance.sum(), guess, allow_unused=True)
        result["slope"] = None if slope is None else told(slope.flatten())
    return result | {"value": distance.item(), "tensor": True}


@task("12.7", "gradient inversion", points=2)
def mismatch(ranks: Ranks, report: Report) -> None:
    """Judge the sum of squares, and a derivative that leads to the image."""
    # Another image, and a network of more layers.
    cases = [{"seed": report.seed, "wide": wide} for wide in (5, 6)]
    report.judge_cases(ranks, probe_mismatch, cases, _mismatch)
    # The words of PyTorch's errors, of tensors of two types: several classes of errors have them.
    if any("should be the same" in text or "same dtype" in text for text, *_ in report.found):
        report.problem(
            "the check hands in net, guess and seen in float64: use these arguments, not what "
            "has the same name in the lab, and keep their type"
        )


def _mismatch(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Judge a distance and its derivative, and whether the network is as it was."""
    result = answer.value
    distance, slope, mistakes = _distance(**case)
    yield value(result["value"], distance, mistakes, form="the sum, a tensor with one number")
    wrong = {
        "return a tensor, not a number: item() cuts the graph off": not result["tensor"],
        "something was added to .grad of the parameters: use torch.autograd.grad, which "
        "returns gradients, and not backward": result["left"],
        "the net was in training mode before, and is not now: leave its mode as it is": not result[
            "modes"
        ],
        "the result can't be differentiated with respect to guess: create_graph=True, and no "
        "detach": result["slope"] is None,
    }
    yield facts(wrong)
    said = "the derivative with respect to guess is another one: is a part of it detached?"
    yield value(result["slope"], slope, [Mistake(lambda _: True, said)], tolerance=1e-8)


@functools.lru_cache(maxsize=2)
def _distance(seed: int, wide: int) -> tuple[float, list[float], list[Mistake]]:
    """Return the sum of squares, its derivative by the guess, and what mistakes make of the sum."""
    net, guess, label, seen = _attack(seed, wide)
    gradients = _gradient(net, guess, label, graph=True)
    gaps = [a - b for a, b in zip(gradients, seen, strict=True)]
    squares = [gap.square().sum() for gap in gaps]
    distance = sum(squares)
    (slope,) = torch.autograd.grad(distance, guess)
    wrong = {
        "this is the mean over each tensor: take the sum over all its entries": sum(
            gap.square().mean() for gap in gaps
        ),
        "this is the mean over all entries: take the sum": distance
        / sum(gap.numel() for gap in gaps),
        "these are absolute values: take squares": sum(gap.abs().sum() for gap in gaps),
        "this is the length: without the square root": distance.sqrt(),
        "these are the lengths of the tensors' differences: take squares, no root": sum(
            gap.norm() for gap in gaps
        ),
        "only the first parameter was compared: sum over all of them": squares[0],
        "only the last parameter was compared: sum over all of them": squares[-1],
        "the gradient of the guess is not compared with anything": sum(
            gradient.square().sum() for gradient in gradients
        ),
    }
    return distance.item(), slope.flatten().tolist(), table(wrong)


# -- 12.8 -------------------------------------------------------------------------------------

MANY = 40_000
#: Clients, bound, noise multiplier: all wrong formulas differ with these.
NOISE = (5, 0.5, 3.0)
NOISE_TOLERANCE = 0.05
#: The bound of a mean without noise.
QUIET = 0.75


def _deltas(seed: int) -> list[Tensor]:
    """Return updates longer and shorter than 1; one is zero."""
    draw = seeded(seed)
    lengths = (0.5, 40.0, 0.0, 1.5)
    drawn = [torch.randn(6, generator=draw, dtype=torch.float64) for _ in lengths]
    return [length * delta / delta.norm() for length, delta in zip(lengths, drawn, strict=True)]


def probe_private(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Return clipped updates, a mean without noise, and noise on nothing."""
    clip, mean = (reading_answer(user_ns, name) for name in ("clipped", "private_mean"))
    clips = [told(clip(delta, 1.0)) for delta in _deltas(seed)]
    quiet = told(mean(_deltas(seed), QUIET, 0.0, seeded(seed)))
    few = mean([torch.zeros(7)], 1.0, 1.0, seeded(seed))
    m, bound, z = NOISE
    noises = []
    for draw_seed in (seed, seed, seed + 1):
        torch.manual_seed(len(noises))
        noises.append(mean([torch.zeros(MANY) for _ in range(m)], bound, z, seeded(draw_seed)))
    draw = seeded(seed)
    alone, following = (mean([torch.zeros(MANY)], bound, z, draw) for _ in range(2))
    return {
        "clips": clips,
        "quiet": quiet,
        "few": len(few),
        "noise": _summary(noises[0].double()),
        "again": torch.equal(noises[0], noises[1]),
        "other": torch.equal(noises[0], noises[2]),
        "next": torch.equal(alone, following),
        "one draw": torch.allclose(m * noises[0], alone, rtol=1e-4),
    }


def _summary(noise: Tensor) -> dict[str, float]:
    """Return statistics of noise, with the correlation of its halves in the order that is worst."""
    half, spread = len(noise) // 2, noise.std().item()
    first, second = noise[:half], noise[half : 2 * half]
    pairs = ((first, second), (first, second.flip(0)), (noise[: 2 * half : 2], noise[1::2][:half]))
    alike = [abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) for pair in pairs]
    return {
        "std": spread,
        "mean": noise.mean().item(),
        "size": len(noise),
        "alike": max(alike),
        "different": len(noise.unique()),
        "largest": noise.abs().max().item(),
        "fourth": ((noise - noise.mean()) / max(spread, 1e-30)).pow(4).mean().item(),
    }


@task("12.8", "clip and add noise", points=3)
def private_mean(ranks: Ranks, report: Report) -> None:
    """Judge lengths, which are the bound at most; their mean; noise of the right scale, once."""
    for answer in report.answers(ranks, probe_private, seed=report.seed):
        report.follow(answer.rank, _private(answer.value, _deltas(report.seed)))


def _private(result: dict[str, Any], deltas: list[Tensor]) -> Iterator[Step]:
    """Judge clipped updates, their mean without noise, and the noise."""
    clips = [_shortened(delta, 1.0) for delta in deltas]
    for reply, delta, clip in zip(result["clips"], deltas, clips, strict=True):
        about = f"clipped, length {delta.norm().item():.2g}, bound 1"
        mistakes = _wrong_clips(delta)
        yield value(reply, clip.tolist(), mistakes, what=about, form="the clipped update")
    total, m = sum(_shortened(delta, QUIET) for delta in deltas), len(deltas)
    plain = sum(deltas) / m
    wrong = {
        "the updates are not clipped": plain,
        "this is clipped after averaging: clip each update first": _shortened(plain, QUIET),
        "this is the sum: divide by the number of updates": total,
        "the bound is the argument bound, not 1": sum(clips) / m,
    }
    about = f"private_mean with z = 0, bound {QUIET}"
    yield value(result["quiet"], (total / m).tolist(), table(wrong), what=about, form="the mean")
    yield from _noise(result)


def _shortened(delta: Tensor, bound: float) -> Tensor:
    """Return an update whose length is the bound at most."""
    return delta * min(1.0, bound / max(delta.norm().item(), 1e-12))


def _wrong_clips(delta: Tensor) -> Iterator[Mistake]:
    """Yield what mistakes make of an update that is clipped to length 1."""
    length, largest = (max(x.item(), 1e-30) for x in (delta.norm(), delta.abs().max()))
    wrong = {
        "it is longer than the bound and unchanged": delta,
        "each entry was cut for itself: scale the whole update by one factor, so that it keeps "
        "its direction": delta.clamp(-1, 1),
        "scaled up to the bound: shorter ones stay as they are": delta / length,
        "divided by the square of its length": delta / length**2,
        "scaled by the largest entry: its length is the root of the sum of all squares, "
        "delta.norm()": delta * min(1.0, 1 / largest),
    }
    yield from table(wrong)
    yield Mistake(_has_nan, "an update of length 0 is divided by 0: it stays as it is")


def _noise(result: dict[str, Any]) -> Iterator[Step]:
    """Judge the scale of the noise, its distribution, and what it follows from."""
    m, bound, z = NOISE
    noise, expected = result["noise"], z * bound / m
    std, mean = noise["std"], noise["mean"]
    about = f"{m} updates, S = {bound:g}, z = {z:g}"
    wrong = {
        f"an update of 7 weights gave a mean of {result['few']}": result["few"] != 7,
        f"{about}: expected {MANY} entries, got {noise['size']}": noise["size"] != MANY,
    }
    yield facts(wrong)
    # All is written as `not … <=`, so nan is wrong. 55 of 40,000 numbers are beyond 3.2 deviations;
    # 20,000 pairs of independent numbers have a correlation below 0.03.
    wrong = {
        f"the noise has a standard deviation of {std:.3g}, expected {expected:.3g}"
        f"{_why_so_much(noise)}": not abs(std - expected) <= NOISE_TOLERANCE * expected,
        f"the noise has a mean of {mean:.3g}, expected 0": not abs(mean) <= expected / 20,
        "the noise is not Gaussian: torch.randn": not abs(noise["fourth"] - 3) <= 0.4,
        "large numbers are missing in the noise: torch.randn as it is": (
            not noise["largest"] >= 3.2 * expected
        ),
        f"the noise has {noise['different']} different numbers in {MANY} entries: draw one for "
        "each weight": noise["different"] < 0.9 * MANY,
        "numbers of the noise follow from each other: draw each anew": not noise["alike"] <= 0.05,
    }
    yield facts_about(about, wrong)
    wrong = {
        "the same seed gave other noise: draw is the generator, generator=draw": (
            not result["again"]
        ),
        "another seed gave the same noise: use draw as it comes": result["other"],
        "the next call with the same draw gave the same noise: make no generator of your "
        "own": result["next"],
        f"{about}: more numbers were drawn than there are weights: one draw for the mean, whatever "
        "the number of updates": not result["one draw"],
    }
    yield facts(wrong)


def _why_so_much(noise: dict[str, float]) -> str:
    """Return, after a colon, which mistake leads to this noise; empty if none is known."""
    m, bound, z = NOISE
    expected = z * bound / m
    if noise["std"] < 1e-6 and abs(noise["mean"]) > 1e-6:
        return ": every weight has got the same noise: draw a number for each weight"
    deviations = {
        "there is no noise": 0.0,
        "that is the noise of the sum, z S: divide by the number of updates": z * bound,
        "that is what remains if each of the updates gets noise of z S: add it once, to the mean, "
        "with z S / m": z * bound / math.sqrt(m),
        "S is missing": z / m,
        "z is missing": bound / m,
        "that is the variance: randn takes the standard deviation as a factor": expected**2,
        "that is the square root: z S / m is the standard deviation already": math.sqrt(expected),
        "z S / m² : divided twice": expected / m,
        "the noise was clipped with the update: add it afterwards": bound / math.sqrt(MANY),
    }
    for text, std in deviations.items():
        if abs(noise["std"] - std) <= NOISE_TOLERANCE * std + 1e-9:
            return f": {text}"
    return ""


# -- 12.9 -------------------------------------------------------------------------------------

LENGTH = 20_000
TAKING_PART = [5, 2, 11, 9]
#: Bits of a masked entry that are counted, and how far the counts may be from equal ones: chi²
#: with 15 degrees of freedom stays below in all but one of a million.
TOP_BITS, CHI2 = 4, 60.0


def _plain(seed: int) -> list[Tensor]:
    """Return the updates of all clients that take part."""
    draw = seeded(seed)
    return [0.02 * torch.randn(LENGTH, generator=draw) for _ in TAKING_PART]


def probe_masked(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Return what masked updates of four clients are like, and what their sum is."""
    mask, back = (reading_answer(user_ns, name) for name in ("masked", "unmasked"))
    me, scale, pair_mask = TAKING_PART[0], user_ns["SCALE"], user_ns["pair_mask"]
    t, updates = seed % 1000, _plain(seed)
    by_client = list(zip(TAKING_PART, updates, strict=True))
    hidden = [mask(update.clone(), client, list(TAKING_PART), t) for client, update in by_client]
    kinds = [_kind(message) for message in hidden]
    if set(kinds) != {"int32"}:
        return {"kinds": kinds}
    bare = [(update * scale).round().to(torch.int32) for update in updates]
    few = mask(updates[0][:50].clone(), me, list(TAKING_PART), t)
    alone = mask(updates[0].clone(), me, [me], t)
    again = mask(updates[0].clone(), me, list(TAKING_PART), t + 1)
    result = back(hidden[0] + hidden[1] + hidden[2] + hidden[3])
    worst = (result - sum(updates)).abs().max().item() if isinstance(result, Tensor) else None
    expected = [
        _masked(client, update, t, pair_mask)
        for client, update in zip(TAKING_PART, bare, strict=True)
    ]
    return {
        "kinds": kinds,
        "back": told(back(torch.tensor([scale, -3 * scale // 2, 0], dtype=torch.int32))),
        "float": None if worst is None else str(result.dtype),
        "worst": worst,
        "chi2": [_chi2(message) for message in hidden],
        "pairs": _chi2_of_pairs(hidden),
        "bare": [k for k, update in enumerate(bare) if torch.equal(hidden[k], update)],
        "alone": (alone - bare[0]).abs().max().item() if alone.dtype == torch.int32 else None,
        "few": list(few.shape),
        "renewed": not torch.equal(again, hidden[0]),
        "as told": [torch.equal(*pair) for pair in zip(hidden, expected, strict=True)],
    }


def _kind(message: Any) -> str:
    """Return the dtype of a tensor, or the type of anything else."""
    if isinstance(message, Tensor):
        return str(message.dtype).removeprefix("torch.")
    return type(message).__name__


def _masked(me: int, update: Tensor, t: int, pair_mask: Callable) -> Tensor:
    """Return an update with the masks of all pairs that this client is in."""
    for other in TAKING_PART:
        if other != me:
            mask = pair_mask(min(me, other), max(me, other), t, update.numel())
            update = update + mask if me < other else update - mask
    return update


def _chi2(hidden: Tensor) -> float:
    """Return how far the highest bits are from equally frequent."""
    bins = 2**TOP_BITS
    top = (hidden.to(torch.int64) + 2**31) >> (32 - TOP_BITS)
    counts = torch.bincount(top, minlength=bins).double()
    expected = hidden.numel() / bins
    return ((counts - expected).square() / expected).sum().item()


def _chi2_of_pairs(messages: list[Tensor]) -> list[float]:
    """Return how far the differences and the sums of any two messages are from uniform."""
    pairs = itertools.combinations(messages, 2)
    return [_chi2(both) for a, b in pairs for both in (a - b, a + b)]


@task("12.9", "secure aggregation", points=3)
def masked_sum(ranks: Ranks, report: Report) -> None:
    """Judge whether a single message is uniform, and the sum is that of the updates."""
    for answer in report.answers(ranks, probe_masked, seed=report.seed):
        report.follow(answer.rank, _masks(answer.value))


def _masks(result: dict[str, Any]) -> Iterator[Step]:
    """Judge the messages of all clients, and what their sum is."""
    for kind in result["kinds"]:
        said = (
            f"masked returned {kind}, expected an int32 tensor: int32 wraps around modulo 2**32, "
            "as the masks do; longer numbers and floats do not"
        )
        yield facts({said: kind != "int32"})
    yield from _unmasked(result["back"])
    if not len(result["kinds"]) == len(result["chi2"]) == len(TAKING_PART):
        raise ValueError(f"{len(result['chi2'])} masked updates of {len(TAKING_PART)} clients")
    for k in result["bare"]:
        said = f"the message of client {TAKING_PART[k]} is its update without any mask: one for "
        yield facts({f"{said}each other": True})
    alone = result["alone"]
    wrong = {
        f"the message of an update of 50 numbers has the shape {result['few']}": (
            result["few"] != [50]
        ),
        "a client that takes part alone has no partner, and so no mask: leave `me` out of the "
        "loop. `me` and `clients` are numbers of clients, not places in a list": (
            alone is None or alone > 1
        ),
    }
    yield facts(wrong)
    yield from _sum(result["worst"])
    wrong = {
        "two messages together are not uniform: they share a mask. Each pair of clients has a "
        "mask of its own, pair_mask(i, j, t, size)": (
            max(result["pairs"], default=math.inf) > CHI2
        ),
        "a masked update is not uniform: some values are more frequent than others, and tell "
        "something. Add the masks as they are, all 32 bits of them": max(result["chi2"]) > CHI2,
        f"unmasked returned {result['float']}, expected a float32 tensor, as the updates are": (
            result["float"] != "torch.float32"
        ),
        "the masks are those of another round as well: pass t to pair_mask": not result["renewed"],
        "a client does not have a mask with each of the others, so a few of them could find "
        "out its update together: it adds pair_mask(i, j, t, size) for each other client with "
        "a larger number, and subtracts it for each with a smaller one": (
            result["as told"] != [True] * len(TAKING_PART)
        ),
    }
    yield facts(wrong)


def _unmasked(numbers: Any) -> Iterator[Step]:
    """Judge what is made of the numbers of a sum; they are not rounded to anything."""
    wrong = {
        "unmasked did not divide by SCALE": [2.0**20, -1.5 * 2**20, 0.0],
        "unmasked multiplied by SCALE: divide": [2.0**40, -1.5 * 2**40, 0.0],
        "unmasked cut off what is behind the point: use float, and /": [1.0, -2.0, 0.0],
    }
    known = next((said for said, result in wrong.items() if same(numbers, result)), numbers)
    said = f"unmasked of [SCALE, -1.5 SCALE, 0]: {known}, expected [1, -1.5, 0]"
    yield facts({said: not same(numbers, [1.0, -1.5, 0.0])})


def _sum(worst: Any) -> Iterator[Step]:
    """Judge how far the sum of the messages is from that of the updates; `None`: no sum came."""
    quantum = 2.0**-20
    half = len(TAKING_PART) * quantum / 2
    far = (
        f"the sum is off by {worst or 0:.3g}: the masks do not vanish in it. Of each pair the one "
        "with the smaller number adds the mask, the other subtracts it; `me` has no mask with "
        "itself; and masks are whole numbers, as floats lose the low digits"
    )
    yield facts({far: worst is None or not worst <= 1000 * half})  # so nan is wrong
    cut = (
        f"the sum is off by {worst / quantum:.1f} / SCALE, and with rounding by at most "
        f"{half / quantum:g}: .to(torch.int32) cuts digits off, round() first"
    )
    yield facts({cut: worst > 1.02 * half})
