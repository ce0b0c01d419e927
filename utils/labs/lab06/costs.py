"""Checks of lab 06, tasks 6.6 and 6.7: what an all-reduce costs, in messages and in seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from utils.checks.comparison import Mistake, is_number
from utils.checks.probe import answer_named, told
from utils.checks.task import Report, Step, each_of, facts, task, value
from utils.checks.trials import probe_calls
from utils.cluster.questions import Ranks

ALGORITHMS = ("crossbar", "central", "tree", "ring", "direct")
COUNTS = ("messages", "bytes", "busiest", "steps")


def judge_each(report: Report, rank: int, cases: list, results: list, judge: Callable) -> None:
    """Judge the results of all cases; of each algorithm the first that is wrong is told."""
    failed = set()
    for case, result in zip(cases, results, strict=True):
        algorithm = case[0]
        if algorithm not in failed and not report.follow(rank, judge(*case, result)):
            failed.add(algorithm)


def true_cost(algorithm: str, p: int, n: int) -> tuple[int, int, int, int]:
    """Return messages and bytes of all ranks, bytes of the busiest sender, steps in a row."""
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
    # Two ranks last: there many mistakes give the same.
    sizes = [5, 4, 3, 8, draw.choice((12, 20, 33, 64)), draw.randrange(600, 1500), 2]
    cases = [[name, p, 4 * p * draw.randint(10, 999)] for name in ALGORITHMS for p in sizes]
    calls = [["cost", case] for case in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        judge_each(report, answer.rank, cases, answer.value, _cost)


def _cost(algorithm: str, p: int, n: int, counts: Any) -> Iterator[Step]:
    """Yield the steps that these are the four numbers of an algorithm."""
    call = f"cost({algorithm!r}, {p}, {n})"
    true = true_cost(algorithm, p, n)
    form = "return four numbers, messages, bytes, bytes of the busiest rank, steps"
    four = isinstance(counts, list) and len(counts) == len(COUNTS)
    yield facts({f"{call} returned {counts}: {form}": not four})
    mixed_up = counts != list(true) and sorted(map(str, counts)) == sorted(map(str, true))
    order = f"{call}: the four numbers are right, and their order is not: {COUNTS}"
    yield facts({order.replace("'", ""): mixed_up})
    mistakes = _wrong_counts(algorithm, p, n)
    yield each_of(
        *(
            [value(count, right, of_count, what=f"{call}, {name}")]
            for name, count, right, of_count in zip(COUNTS, counts, true, mistakes, strict=True)
        )
    )


def _wrong_counts(name: str, p: int, n: int) -> list[list[Mistake]]:
    """Return wrong counts of an algorithm, for each of the four numbers."""
    true = true_cost(name, p, n)
    messages, nbytes, busiest, steps = true
    depth = p.bit_length() - 1

    def only_of(algorithms: str, count: int) -> int | None:
        return count if name in algorithms.split() else None

    tables = {
        "messages": {
            "each rank sends to all others, not to itself": p * p,
            "these are pairs: a message in each direction": only_of("crossbar", messages // 2),
            "those are the messages there: they come back, too": messages // 2,
            "count the messages of all ranks, not of one": messages // p,
            "these are steps: in each of them several messages travel": steps,
        },
        "bytes": {
            "only one way: the result comes back": only_of("central tree ring direct", nbytes // 2),
            "that is one rank: count the bytes of all": busiest,
            "these are numbers of 4 bytes: n is in bytes already": nbytes * 4,
            "these are messages of a p-th of the tensor, not of n bytes each": messages * n,
            "these are messages: count the bytes": messages,
        },
        "busiest": {
            "that is the mean over the ranks: take the busiest one": nbytes // p,
            "that is what rank 0 sends and receives: count what it sends": only_of(
                "central", nbytes
            ),
            "the bytes of all ranks: take the busiest one": nbytes,
            "count what a rank sends, not what it receives as well": 2 * busiest,
            "two children and a parent, where the group is large enough: three messages": only_of(
                "tree", 2 * n
            ),
            "with so few ranks nobody has two children and a parent": only_of("tree", 3 * n),
            "each step carries a chunk, not the whole tensor": 2 * (p - 1) * n,
            "only one of the two phases": busiest // 2,
        },
        "steps": {
            "messages that travel at the same time are one step": messages,
            "there and back: twice as many": steps // 2,
            "all of them can start at once: nobody waits for another message": only_of(
                "crossbar", p - 1
            ),
            "the messages of one rank to several start at once: one step there, one back": only_of(
                "central direct", 2 * (p - 1)
            ),
            "the deepest rank is ⌊log₂ p⌋ below the root": 2 * math.ceil(math.log2(p + 1)),
            "p − 1 steps in each phase": 2 * p if name == "ring" else 2 * (depth + 1),
        },
    }
    return [
        [Mistake(gives, text) for text, gives in table.items() if gives not in (None, right)]
        for table, right in zip(tables.values(), true, strict=True)
    ]


def true_duration(algorithm: str, p: int, n: int, alpha: float, beta: float) -> float:
    """Return seconds by α–β, where each rank sends, and receives, one message at a time."""
    rounds, tensors = rounds_and_tensors(algorithm, p)
    return rounds * alpha + tensors * n * beta


def rounds_and_tensors(algorithm: str, p: int) -> tuple[int, float]:
    """Return the rounds, and how many tensors the busiest link carries in all of them."""
    *_, rounds = true_cost(algorithm, p, p)
    return rounds, rounds * _at_a_time(algorithm, p)


def _at_a_time(algorithm: str, p: int) -> float:
    """Return how many tensors the busiest link carries in a step."""
    shares = {"crossbar": p - 1, "central": p - 1, "tree": 1, "ring": 1 / p, "direct": (p - 1) / p}
    return shares[algorithm]


def true_crossover(p: int, alpha: float, beta: float) -> float:
    """Return the bytes from which on the direct all-reduce is faster than the crossbar."""
    if p == 2:
        return math.inf
    return alpha / ((p - 1) * (1 - 2 / p) * beta)


def probe_durations(user_ns: dict, *, rank: int, cases: list, networks: list) -> dict:
    """Return what `duration` and `crossover` return."""
    duration, crossover = (answer_named(user_ns, name) for name in ("duration", "crossover"))
    return {
        "duration": [told(duration(*case)) for case in cases],
        "crossover": [_finite(crossover(*network)) for network in networks],
    }


def _finite(value: object) -> object:
    """Return a number as JSON has it: there is no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) and value > 0 else told(value)


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
    """Return the step that a number is right to a share of it: it may be a few milliseconds."""
    if not is_number(result):
        return facts({f"{call} returned {result}: return seconds, a number": True})
    share = result / expected
    fits = (
        f"{text}. "
        for text, gives in wrong.items()
        if math.isclose(share, gives / expected, rel_tol=1e-6)
    )
    text = f"{call}: {next(fits, '')}Expected {expected:.6g}, got {result:.6g}"
    return facts({text: not abs(share - 1) < 1e-6})


def _wrong_durations(algorithm: str, p: int, n: int, alpha: float, beta: float) -> dict[str, float]:
    """Return wrong seconds of an algorithm by what to say of them."""
    messages, nbytes, _, steps = true_cost(algorithm, p, n)
    carried = _at_a_time(algorithm, p) * n
    depth = p.bit_length() - 1
    tensor = alpha + n * beta
    part = alpha + n * beta / p
    one_link = {
        "p − 1 messages share one link, and come one after the other": steps * tensor,
        "messages that start together share one latency: it is paid once a step": steps
        * (p - 1)
        * tensor,
        "the links of the ranks work at the same time": messages * tensor,
    }
    of_algorithm = {
        "crossbar": one_link,
        "central": one_link,
        "ring": {
            "a step carries a chunk of n/p bytes, not the whole tensor": steps * tensor,
            "all ranks send at the same time": steps * (alpha + n * beta * p),
            "reduce-scatter and all-gather: two phases": (p - 1) * part,
            "p − 1 steps in each phase, not p": 2 * p * part,
        },
        "direct": {
            "in each of the two steps p − 1 messages share a link, with n/p bytes each": 2 * part,
            "a message carries a part of n/p bytes, not the whole tensor": 2
            * (alpha + (p - 1) * n * beta),
            "the messages of a round start at once: two steps": 2 * (p - 1) * part,
        },
        "tree": {
            "the depth is ⌊log₂ p⌋, a whole number": 2 * math.log2(p) * tensor,
            "up and down again: twice the depth": depth * tensor,
            "the depth is ⌊log₂ p⌋": 2 * (depth + 1) * tensor,
            "the messages of a level travel at the same time": messages * tensor,
        },
    }
    return {
        "that is one step, with its latency: count all of them": alpha + carried * beta,
        "each step costs a latency": alpha + steps * carried * beta,
        **of_algorithm[algorithm],
        "give seconds, not milliseconds": 1e3 * steps * (alpha + carried * beta),
        "β is seconds per byte: multiply by it": steps * (alpha + carried / beta),
        "n is in bytes already": steps * (alpha + 4 * carried * beta),
        "these are bytes in all: links work at the same time": steps * alpha + nbytes * beta,
    }


def _crossover(p: int, alpha: float, beta: float, size: Any) -> Step:
    """Return the step that this is the size from which on the direct all-reduce is faster."""
    call = f"crossover({p}, {alpha:.3g}, {beta:.3g})"
    expected = true_crossover(p, alpha, beta)
    if p == 2:
        never = (
            f"{call}: with two ranks both ways send n bytes, and the crossbar has one step less: "
            f"the direct way never wins. Expected math.inf, got {size}"
        )
        return facts({never: size != "inf"})
    if size == "inf":
        at_last = (
            f"{call}: with more than two ranks the direct way wins at last: it sends less. "
            f"Expected {expected:.6g}, got infinity"
        )
        return facts({at_last: True})
    half = alpha / beta
    wrong = {
        "that is the number of float32 values: give bytes": expected / 4,
        "that is alpha/beta times too much: α enters once": expected * half,
        "α/β is turned over": beta / alpha / ((p - 1) * (1 - 2 / p)),
        "the crossbar costs one latency itself: the direct way has one more": 2 * expected,
        "the direct way sends 2(p − 1)/p of the tensor: the difference to (p − 1) counts": half
        / (p - 1),
        "that is where the latency is half of a message's time": half,
        "that is the crossover of four ranks: use p": true_crossover(4, alpha, beta),
        "that is where crossbar and ring meet": expected * (2 * p - 3),
    }
    return _to_a_share(call, size, expected, wrong)
