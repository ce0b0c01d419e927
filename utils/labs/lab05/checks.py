"""Checks of lab 05: stopwatches, laws, predictions and a job script.

No verdict depends on how busy the machine is, because the check sets all clocks that an answer
reads, and makes up all times that an answer fits.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.checks.comparison import Mistake, is_number, same, table, waited
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, each_of, facts, task, to_each, value
from utils.checks.trials import Case, judge_calls
from utils.cluster.questions import Ranks, Reply

from .law_fits import fit_amdahl as fit_amdahl
from .law_fits import fit_gustafson as fit_gustafson
from .probes import MEETINGS, probe_bands, probe_stopwatch
from .slurm_jobs import job_script as job_script

# The additional seconds of the very first step.
WARM = 5000.0
_DIFFERENT = "The ranks return different lists. Reduce with dist.ReduceOp.MAX"


@dataclass(frozen=True)
class Trial:
    """The times that a check gives a stopwatch, in seconds by rank.

    Attributes:
        about: the approximate time of a step.
        late: the time of `prepare`.
        takes: the time of each step, including the warm-up round.
        warm: the additional time of the very first step.
    """

    rounds: int
    steps: int
    about: list[float]
    late: list[float]
    takes: list[list[float]]
    warm: float

    @property
    def slowest(self) -> np.ndarray:
        """Return the seconds of the slowest rank, by round and step."""
        return np.reshape(np.maximum(*self.takes), (self.rounds + 1, self.steps))[1:]


@task("5.1", "a stopwatch for many ranks", points=3)
def time_rounds(ranks: Ranks, report: Report) -> None:
    """Check the slowest rank's seconds per step, after a warm-up and from a common start."""
    for trial in _trials(report.seed):
        asked = {"steps": trial.steps, "rounds": trial.rounds, "warm": trial.warm}
        each = to_each(late=trial.late, takes=trial.takes)
        answers = report.answers(ranks, probe_stopwatch, each=each, **asked)
        results = [answer.value["result"] for answer in answers]
        for answer in answers:
            report.follow(answer.rank, _stopwatch(trial, results, answer))
        if report.found:
            return


def _trials(seed: int) -> Iterator[Trial]:
    """Yield two trials, in which each rank is slow once and late once."""
    first_is_slow = bool(seed % 2)  # whether rank 1 is slow in the first trial
    for number, (rounds, steps) in enumerate(((3, 2), (4, 3))):
        chance = random.Random(seed + number)
        # These aren't whole seconds, so an answer that truncates them is clearly wrong.
        about = [chance.randrange(10, 15) + 0.8, chance.randrange(50, 60) + 0.8]
        late = [chance.uniform(500, 900), chance.uniform(10, 40)]
        if first_is_slow == (number == 1):
            about.reverse()
        shares = _shares_of_steps(chance, rounds + 1, steps)
        takes = [[share * seconds for share in shares] for seconds in about]
        warm = WARM
        if number == 1:
            warm = 0.0  # the warm-up round need not be the longest
            late.reverse()
            # In one round, the other rank is slow.
            changed = slice(2 * steps, 3 * steps)
            takes[0][changed], takes[1][changed] = takes[1][changed], takes[0][changed]
        yield Trial(rounds, steps, about, late, takes, warm)


def _stopwatch(trial: Trial, results: Sequence[Any], answer: Reply) -> Iterator[Step]:
    """Yield the steps for the answer of one rank; `results` has the answers of all ranks."""
    reply = answer.value
    times = reply["result"]
    alike = all(result == times for result in results)
    first, second = trial.about
    yield value(
        times,
        trial.slowest.mean(1).tolist(),
        _wrong_stopwatches(reply["events"], alike, trial.slowest, trial.late),
        what=f"with steps of {first:.1f} s on rank 0 and {second:.1f} s on rank 1",
        form="the times",
        tolerance=0.01,
    )
    kind = reply["kind"]
    no_list = f"You returned a {kind}. Return a list of numbers: .tolist() makes one"
    again = "Your second call returns different times. Don't keep anything from the first call"
    conduct = [
        communication(reply["open"], waited),
        facts(_miscounted(reply["events"], trial.rounds, trial.steps)),
        facts({_DIFFERENT: not alike}),
        facts({no_list: kind != "list"}),
    ]
    yield each_of(conduct, [facts({again: not same(reply["first"], times, 0.01)})])


def _shares_of_steps(chance: random.Random, rounds: int, steps: int) -> list[float]:
    """Return the share of each step in all rounds, so that no step equals another or a mean.

    So an answer that times only the last or the middle step of a round is wrong.
    """
    of_rounds = np.linspace(0.8, 1.2, rounds).tolist()
    chance.shuffle(of_rounds)
    if of_rounds[1:] == sorted(of_rounds[1:]):
        of_rounds.reverse()  # otherwise an answer that sorts the rounds would pass
    shares = []
    for of_round in of_rounds:
        of_steps = [0.85, 0.95, 1.2] if steps == 3 else [0.88, 1.12]
        chance.shuffle(of_steps)
        shares += [of_round * share for share in of_steps]
    return shares


def _miscounted(events: list[str], rounds: int, steps: int) -> dict[str, bool]:
    """Return the messages about too few or too many calls, and whether each applies."""
    made = events.count("step")
    prepared = events.count("prepare")
    expected = (rounds + 1) * steps
    return {
        (
            f"You called step() {made} times. Call it {expected} times, in {rounds} rounds of "
            f"{steps} and a warm-up round before them"
        ): made != expected,
        (
            f"You called prepare() {prepared} times. Call it in every round, {rounds + 1} times"
        ): prepared != rounds + 1,
    }


def _wrong_stopwatches(
    events: list[str], alike: bool, seconds: np.ndarray, late: list[float]
) -> list[Mistake]:
    """Return wrong times of a stopwatch; `seconds` has the slowest rank's, by round and step."""
    rounds, steps = seconds.shape
    right = seconds.mean(1)
    made = events.count("step")
    start = (*events, "step").index("step")
    late_by = 0.4 * (max(late) - min(late)) / steps
    inside = (
        "Your time contains prepare(), or the wait at the barrier. Start the clock after the "
        "barrier"
    )
    if "prepare" in events[:start] and events[start - 1] not in MEETINGS:
        inside = (
            "Your time contains one rank's wait for the other rank's prepare(). Put a barrier "
            "between prepare() and the start of the clock"
        )
    too_few_calls = next(iter(_miscounted(events, rounds, steps)))

    def is_one_step(times: list) -> bool:
        return all(0.98 * seconds.min(1) <= times) and all(times <= 1.01 * seconds.max(1))

    return table({
        f"Return a list of {rounds} numbers": lambda times: not _numbers(times),
        f"{too_few_calls}.": lambda _: made <= rounds * steps,
        "The first round warms up. Leave it out of the list": lambda times: (
            len(times) == rounds + 1
        ),
        f"Return one number for each of {rounds} rounds": lambda times: len(times) != rounds,
        "Your time contains the first step, which warms up": lambda times: times[0] > WARM / steps,
        "You returned the time of a whole round. Divide it by the number of steps": right * steps,
        "The times grow. Restart the clock in every round": lambda times: (
            min(np.diff(times)) > right.min() / 2
        ),
        too_few_calls: lambda _: made != (rounds + 1) * steps,
        "All numbers are the same. Return one number for each round": lambda times: (
            len({*times}) == 1
        ),
        (
            "The list has the rounds in another order. Keep the order in which they ran, and "
            "leave out only the first one"
        ): lambda times: np.allclose(sorted(times), sorted(right), rtol=0.01),
        "You timed one step of each round. Time all its steps together, and divide": is_one_step,
        inside: lambda times: np.median(times) > right.max() + late_by,
        f"{_DIFFERENT}, so that all ranks have the slowest rank's times": lambda _: not alike,
        (
            "Use the slowest rank, not the mean, the sum or the fastest of the ranks: "
            "dist.ReduceOp.MAX"
        ): lambda _: True,
    })


def _numbers(result: Any, count: int | None = None) -> bool:
    """Return whether a result is a list of numbers, with `count` numbers if it is given."""
    if not isinstance(result, list) or not all(map(is_number, result)):
        return False
    return count is None or len(result) == count


@task("5.2", "speedup with its uncertainty", points=2)
def speedup_band(ranks: Ranks, report: Report) -> None:
    """Check the ratio of medians, the ends from opposite quartiles, and the efficiency."""
    cases = [case for trial in range(len(SIZES)) for case in _speedup_cases(report.seed, trial)]
    few = (_quartiles(FEW[0]) / _quartiles(FEW[1])[::-1]).tolist()
    cases.append(Case("speedup_band", FEW, few, (), "three numbers: (low, middle, high)"))
    if not judge_calls(ranks, report, cases):
        return
    bands = [case for case in cases if case.name == "speedup_band"]
    expected = [case.right for case in bands]
    kept = (
        "speedup_band doesn't notice that a list has new times. Compute the quartiles in each "
        "call, and don't keep them for a list"
    )
    for answer in report.answers(ranks, probe_bands, trials=[case.arguments for case in bands]):
        report.follow(answer.rank, [facts({kept: not same(answer.value, expected)})])


#: How many times on one rank and on several, odd and even; a baseline has as many times as another.
SIZES = ((7, 5), (8, 9), (10, 6), (7, 8))
#: Three rounds of parts of a millisecond.
FEW = [[3.1e-4, 2.9e-4, 4.4e-4], [1.5e-4, 1.1e-4, 1.2e-4]]


def _speedup_cases(seed: int, trial: int) -> Iterator[Case]:
    """Yield calls of speedup_band and efficiency with made-up times."""
    sizes = SIZES[trial]
    chance = np.random.default_rng([seed, trial])
    alone, together = (
        (least + chance.gamma(2, spread, size)).round(3)
        for least, spread, size in zip((10, 4), (1.5, 0.8), sizes, strict=True)
    )
    for times in (alone, together):
        times[:3] = times.max()  # clocks are coarse, so times may repeat
        times[3] = 5 * times.max()  # a disturbed round counts, too
        chance.shuffle(times)
    p = int((1, *chance.integers(2, 200, 3))[trial])
    speedup = round(float(chance.uniform(1, 4)), 3)
    band = (_quartiles(alone) / _quartiles(together)[::-1]).tolist()
    arguments = [alone.tolist(), together.tolist()]
    mistakes = _wrong_bands(alone, together, *band)
    yield Case("speedup_band", arguments, band, mistakes, "three numbers: (low, middle, high)")
    wrong = {
        "You returned p / speedup, which is upside down": p / speedup,
        "Divide by the number of ranks": speedup * p,
        "You returned percent. Return speedup / p": 100 * speedup / p,
        "You divide by 2, whatever p is": speedup / 2,
    }
    yield Case("efficiency", [speedup, p], speedup / p, table(wrong), "speedup / p")


# What some students use as the median of an even number of times.
_MEDIANS = (statistics.median_low, statistics.median_high)


def _quartiles(times: np.ndarray | list[float]) -> np.ndarray:
    """Return q25, the median and q75."""
    return np.percentile(times, [25, 50, 75])


def _wrong_bands(
    alone: np.ndarray, together: np.ndarray, low: float, middle: float, high: float
) -> list[Mistake]:
    """Return wrong bands of the times on one rank and on several; the last three are right."""
    q1, q2 = map(_quartiles, (alone, together))
    extremes = [min(alone) / max(together), max(alone) / min(together)]
    unequal = [np.median([*set(times.tolist())]) for times in (alone, together)]

    def has_middle(*middles: float) -> Callable:
        return lambda band: any(same(band[1], float(middle)) for middle in middles)

    return table({
        "Return three numbers: (low, middle, high)": lambda band: not _numbers(band, 3),
        "You returned T(p) / T(1), which is upside down": q2 / q1[::-1],
        "You paired quartiles of the same side. Pair slow with fast": q1 / q2,
        "You exchanged low and high": [high, middle, low],
        "Return low, middle, high, in this order": [middle, low, high],
        "You used the extreme rounds. Use the quartiles": lambda band: same(band[::2], extremes),
        "Your middle is a ratio of means. Use medians": has_middle(
            np.mean(alone) / np.mean(together)
        ),
        "Your middle is halfway between the ends. Use the medians": has_middle((low + high) / 2),
        "Your middle uses the fastest rounds. Use medians": has_middle(min(alone) / min(together)),
        "Your middle is right. Pair q25 with q75 for the ends": has_middle(middle),
        (
            "The median of an even number of times is the mean of the two in the middle. Use "
            "np.median"
        ): has_middle(*(median(alone) / median(together) for median in _MEDIANS)),
        "You counted equal times once. set() drops the others": has_middle(unequal[0] / unequal[1]),
    })


@task("5.5", "predict a step", points=3)
def predict_step(ranks: Ranks, report: Report) -> None:
    """Check messages and bytes of a ring, and the time of a step with its all_reduces."""
    chance = random.Random(report.seed)
    judge_calls(ranks, report, [*_ring_cases(chance), *_step_cases(chance)])


def _ring_cases(chance: random.Random) -> Iterator[Case]:
    sizes = [chance.randrange(4, 10**7, 4) for _ in range(4)]
    ranks = 4, chance.randrange(5, 40), 2, 1, chance.randrange(100, 500)
    for p, n in zip(ranks, (*sizes, sizes[0]), strict=True):
        right = [2 * (p - 1), 2 * (p - 1) / p * n]
        yield Case("ring", [p, n], right, _wrong_rings(p, n, *right), "(messages, sent)", "p n")


def _step_cases(chance: random.Random) -> Iterator[Case]:
    # Ranks, number of gradients, bytes of the largest gradient, and bytes per second.
    for p, count, most, slow in (
        (2, chance.randrange(3, 5), 10**7, 5e6),
        (chance.randrange(3, 20), chance.randrange(10, 30), 10**4, 5e3),
        (chance.randrange(100, 500), 3, 10**2, 5.0),
        (1, 2, 10**7, 5e6),
    ):
        sizes = [chance.randrange(4, most, 4) for _ in range(count)]
        sizes += 2 * sizes[:1]  # layers of the same size still have separate gradients
        compute = chance.uniform(0.5, 2)
        latency = chance.uniform(0.05, 0.2)
        arguments: list[Any] = [compute, sizes, p, latency, slow * chance.uniform(1, 4)]
        yield Case("predict_step", arguments, *_steps(*arguments), "the seconds of a step")
    # A step of less than a millisecond.
    quick = [2e-4, [4000, 80, 4000], 3, 1.5e-5, 1e9]
    yield Case("predict_step", quick, *_steps(*quick), "the seconds of a step")


def _wrong_rings(p: int, n: int, messages: int, sent: float) -> list[Mistake]:

    def counts(value: float) -> Callable:
        return lambda pair: same(pair[0], value)

    return table({
        "Return a pair of numbers: (messages, sent)": lambda pair: not _numbers(pair, 2),
        "A single rank sends nothing": lambda _: p == 1,
        "You exchanged the two. Return (messages, sent)": [sent, messages],
        "You counted one half of the ring. The ranks still have to pass the sums around": counts(
            p - 1
        ),
        "There are p − 1 rounds, and p − 1 more: no rank sends to itself": counts(2 * p),
        "You returned the messages of all ranks together. Return the messages of one rank": counts(
            messages * p
        ),
        "Each message has n/p bytes, not n": [messages, messages * n],
        "You counted the bytes of one half of the ring. There are two halves": [messages, sent / 2],
        "You returned the bytes of one message. Return the bytes of all messages": [
            messages,
            n / p,
        ],
        "You returned the bytes of all ranks together. Return the bytes that one rank sends": [
            messages,
            sent * p,
        ],
    })


def _steps(
    compute: float, sizes: list[int], p: int, latency: float, bandwidth: float
) -> tuple[float, list[Mistake]]:
    """Return the seconds of a step, and mistakes with wrong seconds."""
    count = len(sizes)
    moved = 2 * (p - 1) / p * sum(sizes)
    sent = moved / bandwidth
    once = 2 * (p - 1) * latency
    waits = count * once

    def only_of(some: Iterable[int]) -> float:
        return compute + sum(once + n / sum(sizes) * sent for n in some)

    wrong = {
        "Each gradient has a separate all_reduce, and each of them pays the latency": compute
        + once
        + sent,
        "The computation is missing. Add it, because communication follows it": waits + sent,
        "compute is what one rank computes. Don't divide it by p": compute / p + waits + sent,
        "The latency is missing. Add it for each message": compute + sent,
        "The bytes are missing. Add sent / bandwidth": compute + waits,
        "bandwidth is in bytes per second. Divide by it": compute + waits + moved * bandwidth,
        "Every message pays the latency, and there are 2(p − 1) messages": compute
        + count * latency
        + sent,
        "Count the computation once, not for each gradient": count * compute + waits + sent,
        "You left out short gradients. Each gradient has an all_reduce": only_of(
            n for n in sizes if n >= 1000
        ),
        "You used only the first 6 gradients. Each gradient has an all_reduce": only_of(sizes[:6]),
        "A longer message doesn't hide the rest. Add both": max(compute, waits + sent),
        "You counted gradients of the same size once. Each of them has an all_reduce": only_of(
            set(sizes)
        ),
    }
    return compute + waits + sent, table(wrong)
