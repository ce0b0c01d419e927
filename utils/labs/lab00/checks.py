"""The check of the notebook to start with."""

from __future__ import annotations

from collections.abc import Iterator

from utils.checks.comparison import Mistake
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named
from utils.checks.task import Report, Step, task, value
from utils.cluster.questions import Ranks

# Rank and world size; the second one is larger than any world of this notebook.
CASES = ((0, 3), (1, 3), (2, 3), (6, 7), (0, 1))


def probe_neighbours(user_ns: dict, *, rank: int) -> list:
    """Return the student's `right_neighbour` for each case."""
    neighbour = answer_named(user_ns, "right_neighbour")
    return [neighbour(*case) for case in CASES]


@task("0.1", "the neighbour on a ring", points=0)
def right_neighbour(ranks: Ranks, report: Report) -> None:
    """Check that the right neighbor is (rank + 1) modulo the world size."""
    for answer in report.answers(ranks, probe_neighbours):
        report.follow(answer.rank, _all_neighbours(answer.value))


def _all_neighbours(neighbours: list) -> Iterator[Step]:
    for (rank, size), neighbour in zip(CASES, neighbours, strict=True):
        mistakes = [
            Mistake(rank + 1, "The last rank's right neighbor is rank 0"),
            Mistake((rank - 1) % size, "You returned the neighbor to the left"),
        ]
        call = f"right_neighbour({rank}, {size})"
        yield value(neighbour, (rank + 1) % size, mistakes, what=call, form="a rank")
