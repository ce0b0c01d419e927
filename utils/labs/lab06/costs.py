"""Checks of lab 06, tasks 6.6 and 6.7: what an all-reduce costs, in messages and in seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from utils.checks.comparison import Mistake, is_number
from utils.checks.probe import probe_calls
from utils.checks.task import Report, Step, each_of, facts, task, value
from utils.cluster.questions import Ranks

from .probes import probe_durations

ALGORITHMS = ("crossbar", "central", "tree", "ring", "direct")
COUNTS = ("messages", "bytes", "busiest", "steps")


def judge_each(report: Report, rank: int, cases: list, results: list, judge: Callable) -> None:
    """Judge the results of all cases, and report the first mistake in each algorithm."""
    failed = set()
    for case, result in zip(cases, results, strict=True):
        algorithm = case[0]
        if algorithm not in failed and not report.follow(rank, judge(*case, result)):
            failed.add(algorithm)


def true_cost(algorithm: str, p: int, n: int) -> tuple[int, int, int, int]:
    """Return messages and bytes of all ranks, bytes of the busiest sender, and steps."""
    depth = p.bit_length() - 1
    return {
        "crossbar": (p * (p - 1), p * (p - 1) * n, (p - 1) * n, 1),
        "central": (2 * (p - 1), 2 * (p - 1) * n, (p - 1) * n, 2),
        "tree": (2 * (p - 1), 2 * (p - 1) * n, min(3, (p + 1) // 2) * n, 2 * depth),
        "ring": (2 * p * (p - 1), 2 * (p - 1) * n, 2 * (p - 1) * n // p, 2 * (p - 1)),
        "direct": (2 * p * (p - 1), 2 * (p - 1) * n, 2 * (p - 1) * n // p, 2),
    }[algorithm]


@task("6.6", "messages, bytes, steps", points=2)
def cost(ranks: Ranks, report: Report) -> None:
    """Check the counts of five algorithms for several p and n."""
    draw = random.Random(report.seed)
    # Two ranks come last, because many mistakes lead to the same numbers there.
    sizes = [5, 4, 3, 8, draw.choice((12, 20, 33, 64)), draw.randrange(600, 1500), 2]
    # The first number of ranks comes again, with another number of bytes.
    sizes.append(sizes[0])
    cases = [[name, p, 4 * p * draw.randint(10, 999)] for name in ALGORITHMS for p in sizes]
    calls = [["cost", case] for case in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        judge_each(report, answer.rank, cases, answer.value, _cost)


def _cost(algorithm: str, p: int, n: int, counts: Any) -> Iterator[Step]:
    """Yield the steps that these are the four right numbers of an algorithm."""
    call = f"cost({algorithm!r}, {p}, {n})"
    true = true_cost(algorithm, p, n)
    form = "Return four numbers: messages, bytes, bytes of the busiest rank, steps"
    four = isinstance(counts, list) and len(counts) == len(COUNTS)
    yield facts({f"{call} returned {counts}. {form}": not four})
    mixed_up = counts != list(true) and sorted(map(str, counts)) == sorted(map(str, true))
    order = f"{call}: The four numbers are right, but in the wrong order. Return {COUNTS}"
    yield facts({order.replace("'", ""): mixed_up})
    mistakes = _wrong_counts(algorithm, p, n)
    yield each_of(
        *(
            [value(count, right, of_count, what=f"{call}, {name}")]
            for name, count, right, of_count in zip(COUNTS, counts, true, mistakes, strict=True)
        )
    )


def _wrong_counts(name: str, p: int, n: int) -> list[list[Mistake]]:
    """Return the mistakes that lead to wrong counts, for each of the four numbers."""
    true = true_cost(name, p, n)
    messages, nbytes, busiest, steps = true
    depth = p.bit_length() - 1

    def only_of(algorithms: str, count: int) -> int | None:
        return count if name in algorithms.split() else None

    tables = {
        "messages": {
            "You counted messages from a rank to itself. Count p − 1 for each rank": p * p,
            "You counted pairs. Count both directions": only_of("crossbar", messages // 2),
            "You counted one direction. Count the messages that come back, too": messages // 2,
            "You counted the messages of one rank. Count all ranks": messages // p,
            "You counted steps. Count all messages that travel in each step": steps,
        },
        "bytes": {
            "Count the way back, too": only_of("central tree ring direct", nbytes // 2),
            "You counted the bytes of one rank. Count all ranks": busiest,
            "You multiplied by 4, but n is in bytes already": nbytes * 4,
            "Each message carries n/p bytes, not n": messages * n,
            "You counted messages. Count their bytes": messages,
        },
        "busiest": {
            "You returned the mean over the ranks. Use the busiest rank": nbytes // p,
            "You counted what rank 0 sends and receives. Count what it sends": only_of(
                "central", nbytes
            ),
            "You counted the bytes of all ranks. Use the busiest rank": nbytes,
            "You counted what a rank sends and receives. Count what it sends": 2 * busiest,
            "A large tree has a rank with a parent and two children": only_of("tree", 2 * n),
            "With so few ranks, no rank has two children and a parent": only_of("tree", 3 * n),
            "Each step carries a chunk, not the whole tensor": 2 * (p - 1) * n,
            "You counted one of the two phases. Count both": busiest // 2,
        },
        "steps": {
            "You counted messages. Messages that travel at the same time are one step": messages,
            "You counted one direction. Count the way back, too": steps // 2,
            "All messages start at once, because none of them waits for another": only_of(
                "crossbar", p - 1
            ),
            "All messages of a round start at once, so each of the two rounds is one step": only_of(
                "central direct", 2 * (p - 1)
            ),
            "The deepest rank is ⌊log₂ p⌋ edges below the root": 2 * math.ceil(math.log2(p + 1)),
            "Each phase has p − 1 steps": 2 * p if name == "ring" else 2 * (depth + 1),
        },
    }
    return [
        [Mistake(gives, text) for text, gives in table.items() if gives not in (None, right)]
        for table, right in zip(tables.values(), true, strict=True)
    ]


def true_duration(algorithm: str, p: int, n: int, alpha: float, beta: float) -> float:
    """Return seconds by α–β, if each rank sends and receives one message at a time."""
    rounds, tensors = rounds_and_tensors(algorithm, p)
    return rounds * alpha + tensors * n * beta


def rounds_and_tensors(algorithm: str, p: int) -> tuple[int, float]:
    """Return the rounds, and how many tensors the busiest link carries in all rounds together."""
    *_, rounds = true_cost(algorithm, p, p)
    return rounds, rounds * _at_a_time(algorithm, p)


def _at_a_time(algorithm: str, p: int) -> float:
    """Return how many tensors the busiest link carries in a step."""
    shares = {"crossbar": p - 1, "central": p - 1, "tree": 1, "ring": 1 / p, "direct": (p - 1) / p}
    return shares[algorithm]


def true_crossover(p: int, alpha: float, beta: float) -> float:
    """Return the bytes above which the direct all-reduce is faster than the crossbar."""
    if p == 2:
        return math.inf
    return alpha / ((p - 1) * (1 - 2 / p) * beta)


@task("6.7", "seconds by α–β, and the crossover", points=2)
def duration(ranks: Ranks, report: Report) -> None:
    """Check five formulas, and the size at which two of them meet."""
    draw = random.Random(report.seed)

    def network() -> tuple[float, float]:
        return draw.uniform(1e-4, 9e-3), 1 / draw.uniform(5e6, 2e8)

    cases = [
        [name, p, p * draw.choice((10, 1000, 100_000)), *network()]
        for name in ALGORITHMS
        for p in (4, 3, 8, 16, draw.randrange(600, 10**6), 2)
    ]
    cases += [[*case[:3], *network()] for case in cases[::6]]  # on another network
    networks = [[p, *network()] for p in (6, 3, 4, 16, draw.randrange(17, 300), 2)]
    networks.append([4, 0.3, 1 / 9e8])  # slow to begin and fast: they meet above 100 MB
    answers = report.answers(ranks, probe_durations, cases=cases, networks=networks)
    for answer in answers:
        judge_each(report, answer.rank, cases, answer.value["duration"], _duration)
        crossovers = zip(networks, answer.value["crossover"], strict=True)
        report.follow(answer.rank, (_crossover(*network, size) for network, size in crossovers))


def _duration(
    algorithm: str, p: int, n: int, alpha: float, beta: float, seconds: Any
) -> Iterator[Step]:
    call = f"duration({algorithm!r}, {p}, {n}, {alpha:.3g}, {beta:.3g})"
    expected = true_duration(algorithm, p, n, alpha, beta)
    yield _to_a_share(call, seconds, expected, _wrong_durations(algorithm, p, n, alpha, beta))


def _to_a_share(call: str, result: Any, expected: float, wrong: dict[str, float]) -> Step:
    """Return the step that a number is right up to a relative error, because it may be small."""
    if not is_number(result):
        return facts({f"{call} returned {result}. Return a number": True})
    share = result / expected
    fits = (
        f"{text}. "
        for text, gives in wrong.items()
        if math.isclose(share, gives / expected, rel_tol=1e-6)
    )
    text = f"{call}: {next(fits, '')}Expected {expected:.6g}, got {result:.6g}"
    return facts({text: not abs(share - 1) < 1e-6})


def _wrong_durations(algorithm: str, p: int, n: int, alpha: float, beta: float) -> dict[str, float]:
    """Return the wrong seconds of an algorithm, by the message for each mistake."""
    messages, nbytes, _, steps = true_cost(algorithm, p, n)
    carried = _at_a_time(algorithm, p) * n
    depth = p.bit_length() - 1
    tensor = alpha + n * beta
    part = alpha + n * beta / p
    one_link = {
        "p − 1 messages share one link, so they come one after the other": steps * tensor,
        "Messages that start together share one latency. Count it once per step": steps
        * (p - 1)
        * tensor,
        "You added up all messages, but the ranks' links work at the same time": messages * tensor,
    }
    of_algorithm = {
        "crossbar": one_link,
        "central": one_link,
        "ring": {
            "A step carries a chunk of n/p bytes, not the whole tensor": steps * tensor,
            "All ranks send at once, so don't multiply by p": steps * (alpha + n * beta * p),
            "You counted one phase. Count reduce-scatter and all-gather": (p - 1) * part,
            "Each phase has p − 1 steps, not p": 2 * p * part,
        },
        "direct": {
            "In each of the two steps, p − 1 messages of n/p bytes share a link": 2 * part,
            "A message carries a part of n/p bytes, not the whole tensor": 2
            * (alpha + (p - 1) * n * beta),
            "The messages of a round start at once, so there are two steps": 2 * (p - 1) * part,
        },
        "tree": {
            "The depth is ⌊log₂ p⌋, a whole number": 2 * math.log2(p) * tensor,
            "You counted the way up. Count the way down the tree, too": depth * tensor,
            "The depth is ⌊log₂ p⌋, not one more": 2 * (depth + 1) * tensor,
            "The messages of a level travel together. Count them once": messages * tensor,
        },
    }
    return {
        "You counted one step, with its latency. Count all steps": alpha + carried * beta,
        "Each step costs a latency": alpha + steps * carried * beta,
        **of_algorithm[algorithm],
        "Return seconds, not milliseconds": 1e3 * steps * (alpha + carried * beta),
        "β is in seconds per byte. Multiply by it": steps * (alpha + carried / beta),
        "You multiplied by 4, but n is in bytes already": steps * (alpha + 4 * carried * beta),
        "You added all ranks' bytes, but their links work together": steps * alpha + nbytes * beta,
    }


def _crossover(p: int, alpha: float, beta: float, size: Any) -> Step:
    """Return the step that the direct all-reduce is faster above this size."""
    call = f"crossover({p}, {alpha:.3g}, {beta:.3g})"
    expected = true_crossover(p, alpha, beta)
    if p == 2:
        never = (
            f"{call}: With two ranks, both send n bytes and the crossbar has fewer steps, so the "
            f"direct all-reduce never wins. Expected math.inf, got {size}"
        )
        return facts({never: size != "inf"})
    if size == "inf":
        at_last = (
            f"{call}: With more than two ranks, the direct all-reduce wins for large tensors, "
            f"because it sends less. Expected {expected:.6g}, got infinity"
        )
        return facts({at_last: True})
    half = alpha / beta
    wrong = {
        "You returned the number of float32 values. Return bytes": expected / 4,
        "You multiplied by α/β twice. Use it once": expected * half,
        "You used β/α instead of α/β": beta / alpha / ((p - 1) * (1 - 2 / p)),
        "The crossbar pays a latency, too, so the difference is one, not two": 2 * expected,
        "The direct all-reduce also sends bytes, 2(p − 1)/p of the tensor. Subtract them": half
        / (p - 1),
        "You returned α/β, where the latency is half of a message's time": half,
        "You returned the crossover of four ranks. Use p": true_crossover(4, alpha, beta),
        "You returned the size at which crossbar and ring meet": expected * (2 * p - 3),
    }
    return _to_a_share(call, size, expected, wrong)
