"""The check of the notebook to start with."""

from __future__ import annotations

from collections.abc import Iterator

from utils.checks.comparison import Mistake
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, task, value
from utils.cluster.questions import Ranks

from .probes import CASES, probe_neighbors


@task("0.1", "the neighbor on a ring", points=0)
def right_neighbor(ranks: Ranks, report: Report) -> None:
    """Check the right neighbor of ranks on rings of several sizes."""
    answers = report.answers(ranks, probe_neighbors)
    if not all([report.follow(one.rank, _all_neighbors(one.value)) for one in answers]):
        report.problem("Open hint 1 above this cell, and change your function.")


def _all_neighbors(neighbors: list) -> Iterator[Step]:
    for (rank, size), neighbor in zip(CASES, neighbors, strict=True):
        mistakes = [
            Mistake(size, f"There is no rank {size}. Close the ring after rank {size - 1}"),
            Mistake(rank, "You returned the rank itself. Return its neighbor"),
            Mistake((rank - 1) % size, "You returned the left neighbor. Return the right one"),
        ]
        call = f"right_neighbor({rank}, {size})"
        yield value(neighbor, (rank + 1) % size, mistakes, what=call, form="a rank")
