"""Checks of what hides an update in lab 12: noise, and masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import Mistake, same, table
from utils.checks.probe import reading_answer, told
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

from .clients import facts_about, has_nan, seeded

MANY = 40_000
#: Clients, bound, noise multiplier; with these, all wrong formulas give different results.
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
    """Return clipped updates, a mean without noise, and noise on zeros."""
    clip, mean = (reading_answer(user_ns, name) for name in ("clipped", "private_mean"))
    clips = [told(clip(delta, 1.0)) for delta in _deltas(seed)]
    quiet = told(mean(_deltas(seed), QUIET, 0.0, seeded(seed)))
    few = mean([torch.zeros(7)], 1.0, 1.0, seeded(seed))
    m, bound, z = NOISE
    noises = []
    for draw_seed in (seed, seed, seed + 1):
        torch.default_generator.manual_seed(len(noises))
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
    """Return statistics of noise, with the strongest correlation of its halves in three orders."""
    half = len(noise) // 2
    spread = noise.std().item()
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
    """Judge lengths up to the bound, their mean, and noise of the right scale, added once."""
    for answer in report.answers(ranks, probe_private, seed=report.seed):
        report.follow(answer.rank, _private(answer.value, _deltas(report.seed)))


def _private(result: dict[str, Any], deltas: list[Tensor]) -> Iterator[Step]:
    clips = [_shortened(delta, 1.0) for delta in deltas]
    for reply, delta, clip in zip(result["clips"], deltas, clips, strict=True):
        about = f"clipped, length {delta.norm().item():.2g}, bound 1"
        mistakes = _wrong_clips(delta)
        yield value(reply, clip.tolist(), mistakes, what=about, form="the clipped update")
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
    noise = result["noise"]
    expected = z * bound / m
    std, mean = noise["std"], noise["mean"]
    about = f"{m} updates, S = {bound:g}, z = {z:g}"
    yield facts({
        f"You gave an update of 7 weights a mean of {result['few']}": result["few"] != 7,
        f"{about}: You returned {noise['size']} entries, expected {MANY}": noise["size"] != MANY,
    })
    # The conditions are written as `not … <=`, so that nan is wrong. 55 of 40,000 numbers are
    # beyond 3.2 deviations. 20,000 pairs of independent numbers have a correlation below 0.03.
    wrong = {
        f"Your noise has a standard deviation of {std:.3g}, and {expected:.3g} is "
        f"expected{_why_so_much(noise)}": not abs(std - expected) <= NOISE_TOLERANCE * expected,
        f"Your noise has a mean of {mean:.3g}, expected 0": not abs(mean) <= expected / 20,
        "Your noise is not Gaussian. Use torch.randn": not abs(noise["fourth"] - 3) <= 0.4,
        "Your noise lacks large numbers. Use torch.randn without a limit": (
            not noise["largest"] >= 3.2 * expected
        ),
        f"Your noise has {noise['different']} different numbers in {MANY} entries. Draw one for "
        "each weight": noise["different"] < 0.9 * MANY,
        "You derive noise from noise. Draw each number anew": not noise["alike"] <= 0.05,
    }
    yield facts_about(about, wrong)
    yield facts({
        "You got other noise for the same seed. Pass generator=draw": (not result["again"]),
        "You got the same noise for another seed. Use draw as it comes": result["other"],
        "You got the same noise in the next call with draw. Use draw itself, and make no new "
        "generator": result["next"],
        f"{about}: You drew more numbers than there are weights. Draw once for the mean, whatever "
        "the number of updates": not result["one draw"],
    })


def _why_so_much(noise: dict[str, float]) -> str:
    """Return, after a period, which mistake leads to this noise; empty if none is known."""
    m, bound, z = NOISE
    expected = z * bound / m
    if noise["std"] < 1e-6 and abs(noise["mean"]) > 1e-6:
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
    for text, std in deviations.items():
        if abs(noise["std"] - std) <= NOISE_TOLERANCE * std + 1e-9:
            return f". {text}"
    return ""


LENGTH = 20_000
TAKING_PART = [5, 2, 11, 9]
#: Bits of a masked entry that are counted, and how far the counts may be from equal: with 15
#: degrees of freedom, chi² stays below this in all but one of a million cases.
TOP_BITS = 4
CHI2 = 60.0


def _plain(seed: int) -> dict[int, Tensor]:
    """Return the update of each participating client."""
    draw = seeded(seed)
    return {client: 0.02 * torch.randn(LENGTH, generator=draw) for client in TAKING_PART}


def probe_masked(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Return properties of the masked updates of four clients, and of their sum."""
    mask, back = (reading_answer(user_ns, name) for name in ("masked", "unmasked"))
    me = TAKING_PART[0]
    scale = user_ns["SCALE"]
    t = seed % 1000
    updates = _plain(seed)

    def hide(update: Tensor, client: int = me, clients: list[int] = TAKING_PART, t: int = t) -> Any:
        return mask(update.clone(), client, list(clients), t)

    hidden = [hide(update, client) for client, update in updates.items()]
    kinds = [_kind(message) for message in hidden]
    if set(kinds) != {"int32"}:
        return {"kinds": kinds}
    bare = {client: (update * scale).round().to(torch.int32) for client, update in updates.items()}
    expected = [_masked(client, bare[client], t, user_ns["pair_mask"]) for client in bare]
    few = hide(updates[me][:50])
    alone = hide(updates[me], clients=[me])
    again = hide(updates[me], t=t + 1)
    dtype, worst = _dtype_and_error(back(sum(hidden)), sum(updates.values()))
    unhidden = [torch.equal(*pair) for pair in zip(hidden, bare.values(), strict=True)]
    return {
        "kinds": kinds,
        "back": told(back(torch.tensor([scale, -3 * scale // 2, 0], dtype=torch.int32))),
        "float": dtype,
        "worst": worst,
        "chi2": [_chi2(message) for message in hidden],
        "pairs": _chi2_of_pairs(hidden),
        "bare": unhidden,
        "alone": (alone - bare[me]).abs().max().item() if alone.dtype == torch.int32 else None,
        "few": list(few.shape),
        "renewed": not torch.equal(again, hidden[0]),
        "as told": [torch.equal(*pair) for pair in zip(hidden, expected, strict=True)],
    }


def _dtype_and_error(result: Any, right: Tensor) -> tuple[str | None, float | None]:
    """Return a result's dtype and its largest error; None for what isn't a tensor."""
    if not isinstance(result, Tensor):
        return None, None
    return str(result.dtype), (result - right).abs().max().item()


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
    pairs = itertools.combinations(messages, 2)
    return [_chi2(both) for a, b in pairs for both in (a - b, a + b)]


@task("12.9", "secure aggregation", points=3)
def masked_sum(ranks: Ranks, report: Report) -> None:
    """Judge whether a single message is uniform, and the sum of all is right."""
    for answer in report.answers(ranks, probe_masked, seed=report.seed):
        report.follow(answer.rank, _masks(answer.value))


def _masks(result: dict[str, Any]) -> Iterator[Step]:
    for kind in result["kinds"]:
        yield facts({
            f"masked returned {kind}. Return an int32 tensor, because int32 wraps around modulo "
            "2**32 as the masks do, and longer numbers and floats don't": kind != "int32"
        })
    yield from _unmasked(result["back"])
    if not len(result["kinds"]) == len(result["chi2"]) == len(TAKING_PART):
        raise ValueError(f"{len(result['chi2'])} masked updates of {len(TAKING_PART)} clients")
    for client, is_bare in zip(TAKING_PART, result["bare"], strict=True):
        yield facts({
            f"You sent the update of client {client} without any mask. Add a mask for each other "
            "client": is_bare
        })
    alone = result["alone"]
    yield facts({
        f"You gave the message of 50 numbers the shape {result['few']}": (result["few"] != [50]),
        "You masked a client without partners. Leave `me` out of the loop, and read `me` and "
        "`clients` as client numbers, not as positions in a list": (alone is None or alone > 1),
    })
    yield from _sum(result["worst"])
    yield facts({
        "You used a mask twice, so two messages together are not uniform. Give each pair of "
        "clients a different mask, pair_mask(i, j, t, size)": (
            max(result["pairs"], default=math.inf) > CHI2
        ),
        "Your masked update is not uniform, so frequent values reveal something. Add all 32 bits "
        "of the masks as they are": max(result["chi2"]) > CHI2,
        f"unmasked returned {result['float']}. Return float32, the dtype of the updates": (
            result["float"] != "torch.float32"
        ),
        "You reuse the masks of another round. Pass t to pair_mask": not result["renewed"],
        "You left out the masks of some pairs, so a few clients together could find out an "
        "update. Add pair_mask(i, j, t, size) for each client with a larger number, and subtract "
        "it for each with a smaller one": (result["as told"] != [True] * len(TAKING_PART)),
    })


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


def _sum(worst: Any) -> Iterator[Step]:
    quantum = 2.0**-20
    half = len(TAKING_PART) * quantum / 2
    yield facts({
        f"Your sum is off by {worst or 0:.3g}, because masks don't cancel. In each pair, add the "
        "mask on the smaller number and subtract it on the other; use no mask with `me`, and "
        "keep masks as whole numbers, because floats lose the low digits": worst is None
        or not worst <= 1000 * half,  # so nan is wrong
    })
    yield facts({
        f"Your sum is off by {worst / quantum:.1f} / SCALE, and rounding allows "
        f"{half / quantum:g}. Call round() before .to(torch.int32)": worst > 1.02 * half
    })
