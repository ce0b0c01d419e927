"""Checks of what hides an update in lab 12: noise, and masks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import Mistake, same, table
from utils.checks.draws import seeded
from utils.checks.raw_tensors import tensor_of
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

from .clients import facts_about, has_nan
from .privacy_probes import (
    FIRST,
    LENGTH,
    MANY,
    NOISE,
    QUIET,
    SHORTER,
    TAKING_PART,
    drawn_deltas,
    plain_updates,
    probe_masked,
    probe_private,
    round_of,
    sparse_updates,
)

NOISE_TOLERANCE = 0.05


@task("12.8", "clip and add noise", points=3)
def private_mean(ranks: Ranks, report: Report) -> None:
    """Judge lengths up to the bound, their mean, and noise of the right scale, added once."""
    for answer in report.answers(ranks, probe_private, seed=report.seed):
        report.follow(answer.rank, _private(answer.value, report.seed))


def _private(result: dict[str, Any], seed: int) -> Iterator[Step]:
    deltas = drawn_deltas(seed)
    clips = [_shortened(delta, 1.0) for delta in deltas]
    for reply, delta, clip in zip(result["clips"], deltas, clips, strict=True):
        about = f"clipped, length {delta.norm().item():.2g}, bound 1"
        mistakes = _wrong_clips(delta)
        yield value(reply, clip.tolist(), mistakes, what=about, form="the clipped update")
    about = f"clipped, bound {SHORTER}"
    shorter = _shortened(deltas[1], SHORTER).tolist()
    yield value(result["shorter"], shorter, what=about, form="the clipped update")
    total = sum(_shortened(delta, QUIET) for delta in deltas)
    m = len(deltas)
    plain = sum(deltas) / m
    wrong = {
        "You didn't clip the updates. Clip each first": plain,
        "You clipped after averaging. Clip each update first": _shortened(plain, QUIET),
        "You returned the sum. Divide by the number of updates": total,
        "You clipped to 1. Use the argument bound": sum(clips) / m,
    }
    about = f"private_mean with z = 0, bound {QUIET}"
    yield value(result["quiet"], (total / m).tolist(), table(wrong), what=about, form="the mean")
    yield from _noise(result)
    yield from _added(result, sparse_updates(seed))


def _added(result: dict[str, Any], updates: list[Tensor]) -> Iterator[Step]:
    """Judge that the noise is added to the mean of the clipped updates, whatever their numbers."""
    m, bound, _ = NOISE
    mean = sum(_shortened(update, bound) for update in updates)[:FIRST] / m
    noise = tensor_of(result["noise"])[:FIRST]
    got = tensor_of(result["on updates"])
    yield facts({
        "With the same seed, your mean of other updates isn't their mean after clipping, plus the "
        "same noise. Clip each update, average, and then add the noise": got.shape != mean.shape
        or not torch.allclose(got, mean + noise, atol=1e-5)
    })


def _shortened(delta: Tensor, bound: float) -> Tensor:
    """Return an update that is at most as long as the bound."""
    return delta * min(1.0, bound / max(delta.norm().item(), 1e-12))


def _wrong_clips(delta: Tensor) -> Iterator[Mistake]:
    length, largest = (max(x.item(), 1e-30) for x in (delta.norm(), delta.abs().max()))
    yield from table({
        "You left an update longer than the bound. Shorten it": delta,
        "You clipped each entry separately. Scale the whole update by one factor, so that it "
        "keeps its direction": delta.clamp(-1, 1),
        "You scaled a shorter update up to the bound. Leave it as it is": delta / length,
        "You divided by the squared length. Divide by the length": delta / length**2,
        "You scaled by the largest entry. Use the length, the root of the sum of all squares, "
        "delta.norm()": delta * min(1.0, 1 / largest),
    })
    yield Mistake(has_nan, "You divided an update of length 0 by 0. Leave it as it is")


def _noise(result: dict[str, Any]) -> Iterator[Step]:
    m, bound, z = NOISE
    about = f"{m} updates, S = {bound:g}, z = {z:g}"
    yield facts({
        f"You gave an update of 7 weights a mean of {result['few']}": result["few"] != 7,
        f"private_mean returned {result['noise']}. Return a tensor": isinstance(
            result["noise"], str
        ),
    })
    noise = tensor_of(result["noise"])
    yield facts({
        f"{about}: You returned the shape {[*noise.shape]}, expected [{MANY}]": (
            noise.shape != (MANY,)
        )
    })
    yield facts_about(about, _wrong_noise(noise.double()))
    first = noise[:FIRST]
    again, other, alone, following = (
        tensor_of(result[name]) for name in ("again", "other", "alone", "next")
    )
    yield facts({
        "You got other noise for the same seed. Pass generator=draw": not torch.equal(first, again),
        "You got the same noise for another seed. Use draw as it comes": torch.equal(first, other),
        "You got the same noise in the next call with draw. Use draw itself, and make no new "
        "generator": torch.equal(alone, following),
        f"{about}: You drew more numbers than there are weights. Draw once for the mean, whatever "
        "the number of updates": alone.shape != first.shape
        or not torch.allclose(m * first, alone, rtol=1e-4),
    })


def _wrong_noise(noise: Tensor) -> dict[str, bool]:
    """Return what can be wrong with the distribution of noise, and whether it is.

    The conditions are written as `not … <=`, so that nan is wrong. 55 of 40,000 numbers are beyond
    3.2 deviations. 20,000 pairs of independent numbers have a correlation below 0.03.
    """
    m, bound, z = NOISE
    expected = z * bound / m
    std, mean = noise.std().item(), noise.mean().item()
    fourth = ((noise - mean) / max(std, 1e-30)).pow(4).mean().item()
    different = len(noise.unique())
    return {
        f"Your noise has a standard deviation of {std:.3g}, and {expected:.3g} is "
        f"expected{_why_so_much(std, mean)}": not abs(std - expected) <= NOISE_TOLERANCE * expected,
        f"Your noise has a mean of {mean:.3g}, expected 0": not abs(mean) <= expected / 20,
        "Your noise is not Gaussian. Use torch.randn": not abs(fourth - 3) <= 0.4,
        "Your noise lacks large numbers. Use torch.randn without a limit": (
            not noise.abs().max().item() >= 3.2 * expected
        ),
        f"Your noise has {different} different numbers in {MANY} entries. Draw one for "
        "each weight": different < 0.9 * MANY,
        "You derive noise from noise. Draw each number anew": not _likeness(noise) <= 0.05,
    }


def _likeness(noise: Tensor) -> float:
    """Return the strongest correlation of the halves of noise, in three orders."""
    half = len(noise) // 2
    first, second = noise[:half], noise[half:]
    pairs = ((first, second), (first, second.flip(0)), (noise[::2], noise[1::2]))
    return max(abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) for pair in pairs)


def _why_so_much(std: float, mean: float) -> str:
    """Return, after a period, which mistake leads to this noise; empty if none is known."""
    m, bound, z = NOISE
    expected = z * bound / m
    if std < 1e-6 and abs(mean) > 1e-6:
        return ". You gave every weight the same noise: draw a number for each weight"
    deviations = {
        "You added no noise": 0.0,
        "You added the noise of the sum, z S: divide by the number of updates": z * bound,
        "You added noise to each update: add z S / m once, to the mean": z * bound / math.sqrt(m),
        "You left out S": z / m,
        "You left out z": bound / m,
        "You used the variance: multiply randn by the standard deviation": expected**2,
        "You took a root: z S / m is already the standard deviation": math.sqrt(expected),
        "You divided twice: z S / m²": expected / m,
        "You clipped the noise with the update: add it after clipping": bound / math.sqrt(MANY),
    }
    for text, known in deviations.items():
        if abs(std - known) <= NOISE_TOLERANCE * known + 1e-9:
            return f". {text}"
    return ""


SCALE = 2**20
#: Bits of a masked entry that are counted, and how far the counts may be from equal: with 15
#: degrees of freedom, chi² stays below this in all but one of a million cases.
TOP_BITS = 4
CHI2 = 60.0


@task("12.9", "secure aggregation", points=3)
def masked_sum(ranks: Ranks, report: Report) -> None:
    """Judge whether a single message is uniform, and the sum of all is right."""
    for answer in report.answers(ranks, probe_masked, seed=report.seed):
        report.follow(answer.rank, _masks(answer.value, report.seed))


def _masks(result: dict[str, Any], seed: int) -> Iterator[Step]:
    for kind in result["kinds"]:
        yield facts({
            f"masked returned {kind}. Return an int32 tensor, because int32 wraps around modulo "
            "2**32 as the masks do, and longer numbers and floats don't": kind != "int32"
        })
    yield from _unmasked(result["back"])
    updates = plain_updates(seed)
    messages = dict(zip(updates, map(tensor_of, result["messages"]), strict=True))
    for message in messages.values():
        yield facts({
            f"You gave the message of {LENGTH} numbers the shape {[*message.shape]}": (
                message.shape != (LENGTH,)
            )
        })
    yield from _messages(messages, updates, round_of(seed), result)


def _messages(
    messages: dict[int, Tensor], updates: dict[int, Tensor], t: int, result: dict[str, Any]
) -> Iterator[Step]:
    """Judge the messages of a round, by client, and what else was masked."""
    bare = {client: (SCALE * one).round().to(torch.int32) for client, one in updates.items()}
    for client, message in messages.items():
        yield facts({
            f"You sent the update of client {client} without any mask. Add a mask for each other "
            "client": torch.equal(message, bare[client])
        })
    me = TAKING_PART[0]
    yield facts({
        f"You gave the message of 50 numbers the shape {result['few']}": result["few"] != [50],
        "You masked a client without partners. Leave `me` out of the loop, and read `me` and "
        "`clients` as client numbers, not as positions in a list": not _is_near(
            result["alone"], bare[me]
        ),
    })
    yield from _sum(result["sum"], sum(updates.values()))
    both = [pair for a, b in combinations(messages.values(), 2) for pair in (a - b, a + b)]
    yield facts({
        "You used a mask twice, so two messages together are not uniform. Give each pair of "
        "clients a different mask, pair_mask(i, j, t, size)": max(map(_chi2, both)) > CHI2,
        "Your masked update is not uniform, so frequent values reveal something. Add all 32 bits "
        "of the masks as they are": max(map(_chi2, messages.values())) > CHI2,
        f"unmasked returned {result['sum']['dtype']}. Return float32, the dtype of the updates": (
            result["sum"]["dtype"] != "float32"
        ),
        "You reuse the masks of another round. Pass t to pair_mask": torch.equal(
            tensor_of(result["again"]), messages[me][:FIRST]
        ),
        "You left out the masks of some pairs, so a few clients together could find out an "
        "update. Add pair_mask(i, j, t, size) for each client with a larger number, and subtract "
        "it for each with a smaller one": any(
            not torch.equal(message, bare[client] + _masks_of(client, t))
            for client, message in messages.items()
        ),
    })


def _is_near(told: Any, bare: Tensor) -> bool:
    """Is this an update without masks, whatever way it was rounded?"""
    if isinstance(told, str):
        return False
    message = tensor_of(told)
    return message.shape == bare.shape and bool((message.double() - bare).abs().max() <= 1)


def _masks_of(me: int, t: int) -> Tensor:
    """Return the sum of the masks of all pairs that this client is in."""
    total = torch.zeros(LENGTH, dtype=torch.int32)
    for other in TAKING_PART:
        if other != me:
            mask = _pair_mask(min(me, other), max(me, other), t)
            total = total + mask if me < other else total - mask
    return total


def _pair_mask(low: int, high: int, t: int) -> Tensor:
    """Return what the notebook's `pair_mask` gives for a pair of clients."""
    draw = seeded((t * 1000 + low) * 1000 + high)
    mask = torch.randint(-(2**31), 2**31, (LENGTH,), generator=draw, dtype=torch.int64)
    return mask.to(torch.int32)


def _chi2(message: Tensor) -> float:
    """Return how far the highest bits are from equally frequent."""
    bins = 2**TOP_BITS
    top = (message.to(torch.int64) + 2**31) >> (32 - TOP_BITS)
    counts = torch.bincount(top, minlength=bins).double()
    expected = message.numel() / bins
    return ((counts - expected).square() / expected).sum().item()


def _unmasked(numbers: Any) -> Iterator[Step]:
    """Judge what becomes of the numbers of a sum; they are not rounded to anything."""
    wrong = {
        "You didn't divide by SCALE": [2.0**20, -1.5 * 2**20, 0.0],
        "You multiplied by SCALE. Divide": [2.0**40, -1.5 * 2**40, 0.0],
        "You cut off the decimals. Use float, and /": [1.0, -2.0, 0.0],
    }
    known = next(
        (said for said, result in wrong.items() if same(numbers, result)), f"You returned {numbers}"
    )
    said = f"unmasked([SCALE, -1.5 SCALE, 0]) must be [1, -1.5, 0]. {known}"
    yield facts({said: not same(numbers, [1.0, -1.5, 0.0])})


def _sum(told: Any, right: Tensor) -> Iterator[Step]:
    yield facts({f"unmasked returned {told}. Return a tensor": isinstance(told, str)})
    total = tensor_of(told)
    yield facts({
        f"unmasked returned the shape {[*total.shape]} for {LENGTH} numbers": (
            total.shape != right.shape
        )
    })
    worst = (total - right).abs().max().item()
    quantum = 1 / SCALE
    half = len(TAKING_PART) * quantum / 2
    yield facts({
        f"Your sum is off by {worst:.3g}, because masks don't cancel. In each pair, add the "
        "mask on the smaller number and subtract it on the other; use no mask with `me`, and "
        "keep masks as whole numbers, because floats lose the low digits": (
            not worst <= 1000 * half  # so nan is wrong
        )
    })
    yield facts({
        f"Your sum is off by {worst / quantum:.1f} / SCALE, and rounding allows "
        f"{half / quantum:g}. Call round() before .to(torch.int32)": worst > 1.02 * half
    })
