"""The check of task 10.9: operators of a graph with branches, placed on ranks.

A graph is a list of operators ``(name, seconds, nbytes, inputs)``, each behind its inputs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from utils.checks.comparison import Mistake, table
from utils.checks.probe import probe_calls
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

Operator = tuple[str, float, float, list[str]]

#: Two towers and a join, and their times in the lab's picture.
TOWERS: list[Operator] = [
    ("patches", 1, 8, []),
    ("vision 1", 4, 8, ["patches"]),
    ("vision 2", 4, 2, ["vision 1"]),
    ("tokens", 1, 4, []),
    ("text 1", 3, 4, ["tokens"]),
    ("text 2", 3, 2, ["text 1"]),
    ("join", 1, 1, ["vision 2", "text 2"]),
    ("loss", 1, 0, ["join"]),
]
#: The first input comes last, and the last operator of the list ends before another one.
AWKWARD: list[Operator] = [
    ("a", 2, 8, []),
    ("b", 1, 2, []),
    ("c", 3, 4, ["a", "b"]),
    ("d", 1, 16, ["b", "a"]),
    ("e", 0.5, 1, ["d", "c"]),
    ("long", 19, 1, ["a"]),
    ("end", 1, 0, ["e"]),
]
#: So many operators are placed as well as possible; more of them at least as well as greedily.
FEW = 8
#: How much slower than the best placement a placement may be, for rounding.
ROUNDING = 1e-9


@task("10.9", "place a graph", points=3)
def graph_placement(ranks: Ranks, report: Report) -> None:
    """Judge the times of placements, and the placements of small and large graphs."""
    cases = list(_cases(report.seed))
    calls = [["finish", [graph, places, speed]] for graph, places, speed in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        report.follow(answer.rank, _times(cases, answer.value))
    if report.found or report.open:
        return
    asked = [*_small(report.seed), *_large(report.seed)]
    calls = [["place", list(one)] for one in asked]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        report.follow(answer.rank, _placements(asked, answer.value))


def spans(
    graph: Sequence[Operator], places: Sequence[int], speed: float, *, at_once: bool = False
) -> list[list]:
    """Return name, rank, begin and end of each operator, by the rules of the task.

    Args:
        at_once: whether a rank may run several operators at once, against the rules.
    """
    ends: dict[str, float] = {}
    where = {operator[0]: place for operator, place in zip(graph, places, strict=True)}
    sizes = {operator[0]: operator[2] for operator in graph}
    free: dict[int, float] = {}
    made = []
    for (name, seconds, _, inputs), place in zip(graph, places, strict=True):
        arrivals = [ends[one] + sizes[one] / speed * (where[one] != place) for one in inputs]
        begin = max([0.0 if at_once else free.get(place, 0.0), *arrivals])
        ends[name] = free[place] = begin + seconds
        made.append([name, place, begin, ends[name]])
    return made


def finish(graph: Sequence[Operator], places: Sequence[int], speed: float) -> float:
    """Return when the last operator ends."""
    return max(span[3] for span in spans(graph, places, speed))


def best(graph: Sequence[Operator], ranks: int, speed: float) -> float:
    """Return the time of the best of all placements."""
    choices = itertools.product(range(ranks), repeat=len(graph))
    return min(finish(graph, places, speed) for places in choices)


def greedy(graph: Sequence[Operator], ranks: int, speed: float) -> list[int]:
    """Return a placement: each operator in turn is where it ends first."""
    places: list[int] = []
    for k in range(1, len(graph) + 1):
        tried = [spans(graph[:k], [*places, rank], speed)[-1][3] for rank in range(ranks)]
        places.append(tried.index(min(tried)))
    return places


def _drawn(seed: int, count: int) -> list[Operator]:
    """Return a graph of so many operators with random times, bytes and inputs."""
    draw = random.Random(seed)
    names = [f"op{draw.randrange(1000)}.{k}" for k in range(count)]
    return [
        (
            name,
            draw.randrange(8, 256) / 64,
            draw.choice((0.0, 2.0, 4.0, 16.0)),
            sorted(draw.sample(names[:k], min(k, draw.choice((0, 1, 1, 2, 3))))),
        )
        for k, name in enumerate(names)
    ]


def _cases(seed: int) -> Iterator[tuple[list[Operator], list[int], float]]:
    """Yield graphs, placements and bandwidths whose time is asked for."""
    yield TOWERS, [0] * 8, 4.0
    yield TOWERS, [0, 0, 0, 1, 1, 1, 0, 0], 4.0
    yield AWKWARD, [0, 2, 2, 0, 2, 0, 2], 4.0
    yield [*AWKWARD[:5], AWKWARD[-1]], [0, 2, 2, 0, 2, 2], 4.0
    yield TOWERS, [0, 1, 0, 1, 0, 1, 0, 1], 0.5
    draw = random.Random(seed)
    for k, count in enumerate((1, 5, 9, 12)):
        places = [draw.choice((0, 2, 3)) for _ in range(count)]
        yield _drawn(seed + k, count), places, draw.choice((0.5, 2.0, 8.0))


def _small(seed: int) -> list[tuple[list[Operator], int, float]]:
    few = [(_drawn(seed + k, 7), 2 + k % 2, (0.5, 4.0, 1e9)[k]) for k in range(3)]
    return [(TOWERS, 2, 4.0), (TOWERS, 2, 0.1), (_drawn(seed, 6), 1, 1.0), *few]


def _large(seed: int) -> list[tuple[list[Operator], int, float]]:
    return [(_drawn(seed + 50 + k, 40), 4, (1.0, 8.0)[k]) for k in range(2)]


def _times(cases: list, results: list[Any]) -> Iterator[Step]:
    for (graph, places, speed), result in zip(cases, results, strict=True):
        what = f"finish of {len(graph)} operators on ranks {sorted(set(places))}"
        yield value(
            result, finish(graph, places, speed), _wrong_times(graph, places, speed), what=what
        )


def _wrong_times(graph: list[Operator], places: list[int], speed: float) -> list[Mistake]:
    last = spans(graph, places, speed)[-1][3]
    ends_early = {
        "You returned the end of the operator that is last in the list. Another one ends "
        "later": last
    }
    return table(
        (ends_early if graph == AWKWARD else {})
        | {
            "You charged no messages. An input from another rank comes nbytes / bandwidth later": (
                finish(graph, places, 1e30)
            ),
            "You let a rank run several operators at once": max(
                span[3] for span in spans(graph, places, speed, at_once=True)
            ),
            "You added up all operators. Different ranks work at the same time": sum(
                operator[1] for operator in graph
            ),
        }
    )


def _placements(asked: list, results: list[Any]) -> Iterator[Step]:
    for (graph, ranks, speed), places in zip(asked, results, strict=True):
        call = f"place of {len(graph)} operators on {ranks} rank{'s' * (ranks > 1)}"
        is_list = isinstance(places, list) and all(type(one) is int for one in places)
        yield facts({
            f"{call}: Return a list with a rank for each operator, not {places!r:.60}": not is_list
            or len(places) != len(graph),
        })
        yield facts({
            f"{call}: Ranks go from 0 to {ranks - 1}": not set(places) <= set(range(ranks))
        })
        time = finish(graph, places, speed)
        if len(graph) <= FEW:
            least = best(graph, ranks, speed)
            words = f"The best of all {ranks ** len(graph)} placements takes {least:g}"
        else:
            least = finish(graph, greedy(graph, ranks, speed), speed)
            words = f"If each operator goes in turn where it ends first, it takes {least:g}"
        yield facts({
            f"{call}: Your placement takes {time:g}. {words}": time > least * (1 + ROUNDING)
        })
