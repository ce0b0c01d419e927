"""The trials of answers: functions of numbers in several calls, answers with a `group` in groups.

The judges here run in the kernel. The ranks make the groups, see :mod:`.groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from utils.cluster.questions import Ranks

from .comparison import Mistake, is_number, short
from .groups import WORLD as WORLD
from .groups import Partition
from .probe import probe_calls
from .task import Report, Step, value

SIZES = (4, 2, 3, 1)


def partitions(world: int) -> list[Partition]:
    """Return all ranks in one group, and in groups of 4, 2, 3, 1 (the last may be smaller).

    The ranks of a group aren't neighbors, so that only the group itself gives their group ranks.
    """
    sizes = [world, *(size for size in SIZES if size < world)]
    order = range(world)
    mixed = [*order[1::2], *order[::2]]
    return [[sorted(mixed[k : k + size]) for k in range(0, world, size)] for size in sizes]


# The partitions in which most answers are tried; None is no group.
PARTITIONS = partitions(WORLD)
EVERYWHERE = (*PARTITIONS, None)


def members_of(partition: Partition, rank: int, world: int) -> list[int]:
    """Return the global ranks that share a group with this rank."""
    groups = [range(world)] if partition is None else partition
    return next(list(members) for members in groups if rank in members)


def places(partition: Partition, world: int = WORLD) -> list[tuple[int, int]]:
    """Return for each rank its group rank and the size of its group."""
    groups = [members_of(partition, rank, world) for rank in range(world)]
    return [(members.index(rank), len(members)) for rank, members in enumerate(groups)]


def on(members: Sequence[int]) -> str:
    """Return the place of a problem, for a message."""
    if len(members) == 1:
        return f"in a group of rank {members[0]} alone"
    return f"in the group of ranks {', '.join(map(str, members))}"


#: Judges a group: gets the case, the ranks of the group, and the probe's result on each of them.
Judge = Callable[[dict[str, Any], list[int], list[Any]], object]


def judge_each_group(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Iterable[dict[str, Any]],
    judge: Judge,
    hint: Callable[[dict[str, Any]], str] | None = None,
    world: int = WORLD,
) -> bool:
    """Ask a probe made by `in_group` in one case after the other, until one has a problem.

    Args:
        cases: arguments of the probe; ``partition`` is among them.
        judge: adds the problems of one group to the report.
        hint: returns a text about a case, for an answer that raised an error or didn't return.
        world: number of ranks that the lab needs.

    Returns:
        Whether all cases are right.
    """
    if not enough(ranks, report, world):
        return False
    for case in cases:
        answers = report.answers(ranks, probe, **case)
        for members in (case["partition"] or [range(world)]) if answers else ():
            judge(case, list(members), [answers[rank].value for rank in members])
        if report.found:
            if not answers and hint and (words := hint(case)):
                # A long report is cut at its end, so the hint and problems of all ranks come first.
                report.found.sort(key=lambda found: found[2] is not None)
                report.begin_with(f"({words})")
            return False
    return True


@dataclass(frozen=True)
class GroupAnswer:
    """The result of a probe on one rank of a group.

    Attributes:
        case: the arguments of the probe.
        members: the global ranks of the group.
        place: the group rank.
        values: the probe's result on each member.
    """

    case: dict[str, Any]
    members: list[int]
    place: int
    values: list[Any]

    @property
    def rank(self) -> int:
        """Return the global rank."""
        return self.members[self.place]

    @property
    def value(self) -> Any:
        """Return the probe's result on this rank."""
        return self.values[self.place]


def seeds_of(case: dict[str, Any], members: Sequence[int]) -> list[int]:
    """Return the seeds of these ranks, of which each rank knows only its own."""
    return [case["each"][rank]["seed"] for rank in members]


def judge_groups(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Iterable[dict[str, Any]],
    judge: Callable[[GroupAnswer], Iterable[Step]],
    hint: Callable[[dict[str, Any]], str] | None = None,
    world: int = WORLD,
) -> bool:
    """Ask a probe made by `in_group` in one case after the other, until one has a problem.

    Args:
        cases, hint, world: see :func:`judge_each_group`.
        judge: returns the steps for the answer of one rank.

    Returns:
        Whether all cases are right.
    """

    def judge_group(case: dict[str, Any], members: list[int], values: list[Any]) -> None:
        for place, rank in enumerate(members):
            report.follow(rank, judge(GroupAnswer(case, members, place, values)))

    return judge_each_group(ranks, report, probe, cases, judge_group, hint, world)


def enough(ranks: Ranks, report: Report, n: int) -> bool:
    """Return whether there are exactly `n` ranks; if not, the report gets a problem."""
    if ranks.n != n:
        report.problem(f"This check needs {n} ranks. Run ranks = cluster.start({n})")
    return ranks.n == n


# -- functions of numbers --------------------------------------------------------------------------


class Case(NamedTuple):
    """One call of a student's function.

    Attributes:
        name: name of the function.
        arguments: values of JSON.
        right: the right result.
        mistakes: known wrong results, with their texts.
        form: the result in words.
        names: names of the arguments in the task's text, with spaces between them.
    """

    name: str
    arguments: list[Any]
    right: Any
    mistakes: Sequence[Mistake] = ()
    form: str = ""
    names: str = ""

    @property
    def quantities(self) -> dict[str, float]:
        """Return the numbers among the arguments, by name."""
        pairs = zip(self.names.split(), self.arguments, strict=False)
        return {name: given for name, given in pairs if is_number(given)}


def judge_calls(ranks: Ranks, report: Report, cases: Iterable[Case]) -> bool:
    """Compare the results of calls on every rank; a rank's first wrong result is a problem.

    Returns:
        Whether all results are right.
    """
    before = len(report.found)
    cases = [Case(*case) for case in cases]
    calls = [[case.name, case.arguments] for case in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        for case, result in zip(cases, answer.value, strict=True):
            what = f"{case.name}({', '.join(short(a, 60) for a in case.arguments)})"
            is_right = value(
                result,
                case.right,
                case.mistakes,
                what=what,
                form=case.form,
                quantities=case.quantities,
            )
            if not report.follow(answer.rank, [is_right]):
                break
    return len(report.found) == before
