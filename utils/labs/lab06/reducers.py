"""Task 6.8: dedicated reducers, whose own tensors aren't part of the sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from utils.checks.comparison import Calls, Rule, broken
from utils.checks.task import Report, Step, task, to_each
from utils.checks.trials import on
from utils.checks.verdict import named
from utils.cluster.questions import Ranks

from .group_sums import (
    ALL,
    IN_FOURS,
    IN_THREES,
    LONG,
    WORLD,
    Answers,
    Traffic,
    bytes_to,
    judge_sums,
    listed,
    sends,
    sums,
    total,
)
from .probes import REDUCERS_OWN, chunk_lengths, probe_server

# The partition, the number of workers for each size of a group, pieces, and lengths of tensors.
SERVER_CASES = (
    (IN_FOURS, {"4": 2, "2": 1}, 1, (8, 1, 203)),
    (IN_THREES, {"3": 2}, 2, (5, 203)),
    (ALL, {"6": 3}, 1, (5, 203)),
    (ALL, {"6": 3}, 4, (5, 203)),
    (ALL, {"6": 4}, 3, (7, 203)),
    (None, {"6": 2}, 1, (203,)),
    (ALL, {"6": 3}, 1, (3 * LONG,)),
)


@task("6.8", "a reduction server", points=3)
def reduction_server(ranks: Ranks, report: Report) -> None:
    """Check that each worker sends n bytes in pieces, and begins with a different reducer."""
    names = "partition", "workers", "pieces", "lengths"
    more = {"each": to_each(seed=report.seeds(WORLD)), "patient": False}
    cases = [dict(zip(names, case, strict=True)) | more for case in SERVER_CASES]
    cases.append(cases[3] | {"patient": True})
    words = {"hint": _hint_of_server, "where": _among_workers}
    judge_sums(ranks, report, probe_server, cases, _service, results=_workers_sums, **words)


def _workers_of(case: dict, members: Sequence[int]) -> int:
    """Return how many of the members are workers; they come first."""
    return case["workers"][str(len(members))]


def _among_workers(case: dict, members: Sequence[int]) -> str:
    return f"{on(members)} ({_workers_of(case, members)} of them workers)"


def _hint_of_server(case: dict) -> str:
    """Return in which case an answer raised an error, and what this suggests."""
    where = _among_workers(case, (case["partition"] or [range(WORLD)])[0])
    words = f"{where}, with pieces={case['pieces']} and lengths {case['lengths']}"
    if not case["patient"]:
        return words
    return (
        f"{words}. Only this case failed, in which workers send a piece when the result of the "
        "last one is back. A reducer must send the result of a piece as soon as all parts of this "
        "piece have arrived, without waiting for other pieces"
    )


def _workers_sums(answers: Answers) -> Iterator[Step]:
    """Yield the steps that workers have the sum of the workers' tensors and nothing else."""
    many = _workers_of(answers.case, answers.members)
    workers = replace(answers, members=answers.members[:many], values=answers.values[:many])

    def reducers_own(_: int, reply: dict[str, Any]) -> str | None:
        numbers = [number for *_, number in reply["sum"]]
        if any(v % 1 == REDUCERS_OWN and v * many != total(many) for v in numbers):
            return "A reducer has added its own x. Start the sum with the first part that arrives"
        return None

    yield workers.each(reducers_own)
    yield from sums(workers)


def _service(run: Traffic) -> Iterator[Step]:
    """Yield the steps that workers distribute their pieces, and begin with different reducers."""
    many = _workers_of(run.case, run.members)
    workers, reducers = run.members[:many], run.members[many:]
    of_worker = [_talks_to(reducers, "Workers talk only to reducers"), _shared_out(run, reducers)]
    of_reducer = [_talks_to(workers, "Reducers talk only to workers")]
    yield run.each(lambda place, calls: broken(calls, *(of_worker if place < many else of_reducer)))
    firsts: dict[int, list[int]] = {}
    for rank, calls in zip(workers, run.values[:many], strict=True):
        firsts.setdefault(sends(calls)[0]["peer"], []).append(rank)
    first, crowd = max(firsts.items(), key=lambda pair: len(pair[1]))
    incast = (
        f"The workers on {named(crowd)} begin with the same reducer on rank {first}, so its link "
        "is the bottleneck (incast) while other reducers are idle. Let worker i begin with "
        "reducer i"
    )
    yield run.of_all(incast, len(crowd) > -(-many // len(reducers)))


def _shared_out(run: Traffic, reducers: list[int]) -> Rule:
    """Return the rule that a worker cuts its tensor into equal pieces for the reducers."""
    pieces, count = run.case["pieces"], len(reducers)
    lengths = chunk_lengths(run.length, pieces * count)
    wanted = {to: sum(lengths[j::count]) * run.element for j, to in enumerate(reducers)}

    def rule(calls: Calls) -> str | None:
        sent = bytes_to(calls)
        nbytes = sum(sent.values())
        numbers = [sum(call["peer"] == reducer for call in sends(calls)) for reducer in reducers]
        if nbytes != run.nbytes:
            return (
                f"This worker sent {nbytes} bytes. Send each of its {run.nbytes} bytes once, to "
                "the reducer of its piece"
            )
        if {to: sent.get(to, 0) for to in wanted} != wanted:
            return (
                f"This worker sent {listed(sent)}, expected {listed(wanted)}. Cut x into "
                f"{pieces * count} pieces by tensor_split. Piece j goes to reducer j mod {count}"
            )
        if set(numbers) != {pieces}:
            return (
                f"This worker sent {numbers} messages to the reducers, but with pieces={pieces} "
                f"each should get {pieces}. Cut x into reducers × pieces parts"
            )
        return None

    return rule


def _talks_to(others: Sequence[int], why: str) -> Rule:
    """Return the rule that a rank has messages with these ranks only."""

    def rule(calls: Calls) -> str | None:
        strange = sorted({call["peer"] for call in calls} - set(others))
        return f"This rank talks to rank {strange[0]}. {why}" if strange else None

    return rule
