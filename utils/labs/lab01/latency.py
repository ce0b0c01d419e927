"""Task 1.7: the time of a message on an emulated wire, and the fit of a line to noisy times."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from utils.checks.comparison import Mistake, in_words, is_number, only, table
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.cluster.questions import Ranks, Reply

from .probes import disturbance, probe_fit, probe_ping_pong

# Rounds of a check. FACTORS says how much longer each of five rounds in a row takes, in random
# order. One of them is the median, and no two are equal. The very first round warms up.
REPEATS = 5
# Bytes and rounds, with more rounds, the same bytes again, and bytes that no float32 tensor has.
PLAYS = (
    *((8, REPEATS), (200_001, REPEATS), (8, 2 * REPEATS), (800_003, REPEATS)),
    *((4096, REPEATS + 2), (1000, 5 * REPEATS)),
)
# The play with as many bytes as the first.
AGAIN = 2
REMEMBERED = (
    "You returned the median over this call and an earlier call. Begin each call with an empty "
    "list of times"
)
# A mean of some of these is far from 1, too.
FACTORS = (0.7, 0.9, 1.0, 3.0, 6.0)


def _disturbances(seed: int) -> list[float]:
    """Return the factors of rounds 0, 5, 10, … to 4, 9, 14, …; the first is above the median."""
    dice = random.Random(seed)
    order = dice.sample(FACTORS, len(FACTORS))
    above = next(k for k, factor in enumerate(order) if factor > 1)
    return order[above:] + order[:above]


@task("1.7", "ping-pong: latency and bandwidth", points=4, after="1.1")
def ping_pong(ranks: Ranks, report: Report) -> None:
    """Check the median time of a message, then the fit of latency and bandwidth."""
    if report.judge_cases(ranks, probe_ping_pong, _plays(ranks, report), _ping_pong_steps):
        _judge_fit(ranks, report)


def _plays(ranks: Ranks, report: Report) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `probe_ping_pong`, each on another wire."""
    # The wire is much slower than the machine, so the machine's time doesn't matter.
    start = 20.0 + report.seed % 1000 / 50
    bandwidth = 20e3 + report.seed // 1000 % 1000 * 30
    share = 0.1 + report.seed % 30 / 1000
    for k, (nbytes, repeats) in enumerate(PLAYS):
        latency = start * (len(PLAYS) - k)  # an earlier measurement is wrong now
        yield {
            "nbytes": nbytes,
            "repeats": repeats,
            "wire": [latency, bandwidth, share],
            "factors": _disturbances(report.seed + nbytes),
            "each": to_each(stamp=report.seeds(ranks.n)),
        }


def _ping_pong_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that judge a rank's messages, and the time that rank 0 returns."""
    yield communication(answer.value["calls"], only("send", "recv", "barrier"))
    yield facts(_wrong_plays(case, answer))
    if answer.rank == 0:
        latency, bandwidth, share = case["wire"]
        rounds = sum(call["op"] == "send" for call in answer.value["calls"])
        true = latency + case["nbytes"] / bandwidth
        counted = range(max(0, rounds - case["repeats"]), rounds)
        expected = true * statistics.median(disturbance(case["factors"], k) for k in counted)
        mistakes = _wrong_times(true, case["factors"], share, rounds, case["repeats"])
        if (case["nbytes"], case["repeats"]) == PLAYS[AGAIN]:
            remembered = _median_with_earlier_rounds(case["factors"], rounds, case["repeats"])
            mistakes.insert(0, Mistake(remembered * true, REMEMBERED))
        what = f"ping_pong({case['nbytes']}, {case['repeats']}), seconds on the emulated wire"
        seconds = answer.value["seconds"]
        yield value(seconds, expected, mistakes, what=what, form="seconds", tolerance=0.05)


def _wrong_plays(case: dict[str, Any], answer: Reply) -> dict[str, object]:
    """Return what is wrong with the messages of one call."""
    rank = answer.rank
    nbytes = case["nbytes"]
    repeats = case["repeats"]
    play = f"ping_pong({nbytes}, {repeats})"
    plays = [call for call in answer.value["calls"] if call["op"] != "barrier"]
    if rank > 1:
        messages_made = in_words((call["op"], call["peer"]) for call in plays)
        return {f"Only ranks 0 and 1 play. Do nothing here: you made {messages_made}": plays}
    sends = sum(call["op"] == "send" for call in plays)
    sizes = sorted({call["nbytes"] for call in plays} - {nbytes})
    is_short = sends < repeats or 2 * sends != len(plays)
    measures = rank == 1 and answer.value["seconds"] is not None
    is_strange = case["each"][1 - rank]["stamp"] not in answer.value["stamps"]
    return {
        f"{play}: You made {sends} sends and {len(plays) - sends} recvs. Make {repeats} of each, "
        "or a few more to warm up": is_short,
        f"{play} sent {sizes} bytes. Send {nbytes} elements of dtype torch.uint8": sizes,
        "Only rank 0 measures. Return None on the other ranks": measures,
        f"Rank {1 - rank} sent a ball, but recv filled your tensor with another one. Receive what "
        "that rank sends": is_strange,
    }


def _median_with_earlier_rounds(factors: Sequence[float], rounds: int, repeats: int) -> float:
    """Return the median over the plays 0 and AGAIN, as a multiple of the time in AGAIN."""
    warm_up = rounds - repeats
    slower = len(PLAYS) / (len(PLAYS) - AGAIN)  # see _plays
    earlier = [slower * disturbance(factors, warm_up + k) for k in range(PLAYS[0][1])]
    these = [disturbance(factors, k) for k in range(warm_up, rounds)]
    return statistics.median(earlier + these)


def _wrong_times(
    true: float, factors: Sequence[float], share: float, rounds: int, repeats: int
) -> list[Mistake]:
    """Return what likely mistakes give for so many rounds on a wire."""
    took = [disturbance(factors, k) for k in range(rounds)]
    counted = took[-repeats:]
    middle = statistics.median(counted)
    mean = statistics.mean(counted)
    fewer = statistics.mean(sorted(counted)[:-1])
    median = "Use the median, so that one disturbed round does not count"
    back = "Stop the clock when the ball is back, and return half of the time"
    measured = {
        "You returned the whole round trip. Divide it by 2": 2 * middle,
        "You halved the time once too often. A message takes half of the round trip": (
            0.5 * middle
        ),
        f"You measured the time of send alone, which ends before the message arrives. {back}": (
            2 * share * middle
        ),
        f"You returned half of the time of send alone. {back}": share * middle,
        f"You returned half of the time of recv alone. {back}": (1 - share) * middle,
        f"You measured the time of recv alone. {back}": 2 * (1 - share) * middle,
        f"You returned the mean of the rounds. {median}": mean,
        f"You returned the mean without the slowest round. {median}": fewer,
        f"You returned the harmonic mean of the rounds. {median}": statistics.harmonic_mean(
            counted
        ),
        f"You returned the mean of the round trips. Halve each of them. {median}": 2 * mean,
        f"You divided the whole time by the rounds. {median}": sum(took) / repeats,
        f"You returned the fastest round. {median}": min(counted),
        f"You returned the slowest round. {median}": max(counted),
        f"You returned the sum of the rounds. {median}": sum(counted),
    }
    wrong = {said: factor * true for said, factor in measured.items()}
    return table({"Return the seconds as one number": lambda got: not is_number(got), **wrong})


def _judge_fit(ranks: Ranks, report: Report) -> None:
    """Judge fits for short to long messages, then for messages near latency × bandwidth."""
    chance = np.random.default_rng(report.seed)
    latency, bandwidth = chance.uniform(20e-6, 60e-6), chance.uniform(1e9, 4e9)
    middle = latency * bandwidth * np.geomspace(0.2, 5, 24)
    cases = [
        # Each point is off by a fifth or a quarter, so only all points together give the line.
        _noisy_line(report.seed, latency, bandwidth, [2**k for k in range(3, 26)], (0.8, 1.25)),
        _noisy_line(report.seed, latency, bandwidth, middle.astype(int).tolist(), (0.9, 1.1)),
    ]

    judge = functools.partial(_fit_steps, latency, bandwidth)
    report.judge_cases(ranks, probe_fit, cases, judge)


def _noisy_line(
    seed: int, latency: float, bandwidth: float, sizes: list[int], off: Sequence[float]
) -> dict[str, list]:
    """Return sizes of messages, and times that are off by these factors in turn."""
    chance = np.random.default_rng(seed + len(sizes))
    signs = np.resize(chance.permutation(off), len(sizes))
    noise = signs * chance.uniform(0.98, 1.02, len(sizes))
    times = [(latency + n / bandwidth) * e for n, e in zip(sizes, noise, strict=True)]
    return {"sizes": sizes, "times": times}


def _fit_steps(
    latency: float, bandwidth: float, case: dict[str, Any], answer: Reply
) -> Iterator[Step]:
    """Yield steps that compare rank 0's `fit` with the latency and bandwidth behind the times."""
    if answer.rank > 0:
        return
    fitted = answer.value
    pair = isinstance(fitted, list) and len(fitted) == 2 and all(map(is_number, fitted))
    form = "two numbers that aren't nan" if isinstance(fitted, list) else "two numbers"
    yield facts({f"fit returned {fitted}. Return (latency, bandwidth), {form}": not pair})
    hint = _why_fit(fitted, latency, bandwidth, **case)
    far_off = (
        f"{hint}fit found {fitted[0]:.3g} s and {fitted[1]:.3g} bytes/s, but the wire had "
        f"{latency:.3g} s and {bandwidth:.3g} bytes/s"
    )
    yield facts({far_off: not (_near(fitted[0], latency) and _near(fitted[1], bandwidth))})


def _near(a: float, b: float, most: float = 0.15) -> bool:
    return math.isfinite(a) and abs(a / b - 1) <= most


def _why_fit(
    fitted: list[float], latency: float, bandwidth: float, sizes: list[int], times: list[float]
) -> str:
    """Return which mistake leads to these two numbers; "" if none is known."""
    slope, start = np.polyfit(sizes, times, 1)
    secant = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    by_ends = _near(fitted[1], 1 / secant, 1e-3)
    hints = {
        "Return (latency, bandwidth) in this order": (
            _near(fitted[0], bandwidth) and _near(fitted[1], latency)
        ),
        "Return 1 / slope as the bandwidth": (
            _near(fitted[0], latency) and _near(fitted[1], 1 / bandwidth)
        ),
        "You weighted all points equally, so the noise of long messages hides the latency. "
        "Weight each point by 1/t": (
            _near(fitted[0], start, 1e-3) and _near(fitted[1], 1 / slope, 1e-3)
        ),
        "You drew the line through the first and the last point. Use all points": by_ends,
        "You returned the shortest time, which is one measurement. Fit a line": _near(
            fitted[0], min(times), 1e-3
        ),
        "Your latency is the mean of short messages, whose bytes take time, too. Fit a line": any(
            _near(fitted[0], mean(times[:k]), 1e-3)
            for k in range(2, len(times))
            for mean in (np.mean, np.median)
        ),
    }
    return next((f"{said}: " for said, applies in hints.items() if applies), "")
