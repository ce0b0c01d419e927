"""The trials of answers: functions of numbers in several calls, answers with a `group` in groups.

At any time every rank is in some group of 1, 2, 3 or 4 ranks, so that an answer that forgets
`group` gives a wrong result instead of a deadlock. Each question makes new groups, with a short
timeout.

A partition is a list of groups, and a group is a list of global ranks. The partition `None` means
that there is no group: the answer gets `group=None`, which is all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from utils.cluster.questions import Ranks

from .comparison import Mistake, short
from .probe import reading_answer, told
from .task import Report, Step

# Seconds that a rank waits for the other ranks of a group.
TIMEOUT = 20
SIZES = (4, 2, 3, 1)
# Ranks that labs 03 and 04 need.
WORLD = 4

Partition = Sequence[Sequence[int]] | None
#: The argument `group` of an answer; `None` is all ranks.
Group = dist.ProcessGroup | None


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


@contextlib.contextmanager
def group_of(partition: Partition, rank: int) -> Iterator[Group]:
    """Make this rank's group for a block, which all ranks must do; None without a partition."""
    groups = {
        tuple(members): dist.new_group(list(members), timeout=timedelta(seconds=TIMEOUT))
        for members in partition or ()
    }
    mine = next((group for members, group in groups.items() if rank in members), None)
    try:
        yield mine
    finally:
        if mine is not None:
            dist.destroy_process_group(mine)


def in_group(probe: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a probe so that it can be asked with a `partition`.

    The probe gets these keywords if it has them: `group`, `partition`, and `named`, which has the
    argument `group` of an answer, or no argument if there is no partition.
    """
    wanted = inspect.signature(probe).parameters

    @functools.wraps(probe)
    def in_group_of(
        user_ns: dict[str, Any], *, rank: int, partition: Partition, **kwargs: Any
    ) -> Any:
        with group_of(partition, rank) as group, _names_of_ranks_explained():
            known = {"group": group, "partition": partition, "named": keywords(partition, group)}
            kwargs |= {name: value for name, value in known.items() if name in wanted}
            return probe(user_ns, rank=rank, **kwargs)

    return in_group_of


def keywords(partition: Partition, group: Group) -> dict[str, Any]:
    """Return the argument `group` of an answer, or no argument if there is no partition."""
    return {} if partition is None else {"group": group}


@contextlib.contextmanager
def _names_of_ranks_explained() -> Iterator[None]:
    """Replace PyTorch's error for `src=0` in a group without rank 0 by advice."""
    try:
        yield
    except ValueError as error:
        if found := re.match(r"Global rank (\d+) is not part of group", str(error)):
            error.args = (
                f"src={found[1]} (or dst=…) is a rank of the world, and is not in this group. Pass "
                "group_src=0 (or group_dst=0) for the first rank of the group",
            )
        raise


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


def tried(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Iterable[dict[str, Any]],
    hint: Callable[[dict[str, Any]], str] | None = None,
    world: int = WORLD,
) -> Iterator[tuple[dict[str, Any], list[int], list[Any]]]:
    """Ask a probe made by :func:`in_group` in one case after the other, until there are problems.

    Args:
        cases: arguments of the probe; ``partition`` is among them.
        hint: returns a text about a case, for an answer that raised an error or didn't return.
        world: number of ranks that the lab needs.

    Yields:
        The case, the ranks of a group, and the probe's result on each of them.
    """
    if not enough(ranks, report, world):
        return
    for case in cases:
        answers = report.answers(ranks, probe, **case)
        for members in (case["partition"] or [range(world)]) if answers else ():
            yield case, list(members), [answers[rank].value for rank in members]
        if report.found:
            if not answers and hint and (words := hint(case)):
                # A long report is cut at its end, so the hint and problems of all ranks come first.
                report.found.sort(key=lambda found: found[2] is not None)
                report.begin_with(f"({words})")
            return


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


def judge_groups(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Iterable[dict[str, Any]],
    judge: Callable[[GroupAnswer], Iterable[Step]],
    hint: Callable[[dict[str, Any]], str] | None = None,
    world: int = WORLD,
) -> bool:
    """Ask a probe made by :func:`in_group` in one case after the other, until one has a problem.

    Args:
        cases, hint, world: see :func:`tried`.
        judge: returns the steps for the answer of one rank.

    Returns:
        Whether all cases are right.
    """
    before = len(report.found)
    for case, members, values in tried(ranks, report, probe, cases, hint, world):
        for place, rank in enumerate(members):
            report.follow(rank, judge(GroupAnswer(case, members, place, values)))
    return len(report.found) == before


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
    """

    name: str
    arguments: list[Any]
    right: Any
    mistakes: Sequence[Mistake] = ()
    form: str = ""


def probe_calls(user_ns: dict[str, Any], *, rank: int, calls: list[Any]) -> list[Any]:
    """Return the results of functions, one call (name, arguments) after the other.

    Raises:
        ValueError: a function returned the same list or dict object as in another call.
    """
    returned = []
    results = Results()
    for name, arguments in calls:
        function = reading_answer(user_ns, name)
        result = function(*arguments)
        returned.append(told(result))
        if results.add(name, result):
            results.add(name, function(*arguments))
    return returned


class Results:
    """The objects that functions have returned, so that none is returned a second time."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # alive, so ids differ

    def add(self, name: str, result: Any) -> list[list[Any] | dict[Any, Any]]:
        """Return the parts of a result that can be changed: the result itself, or its entries.

        Raises:
            ValueError: an earlier call has returned one of these objects.
        """
        parts = result if isinstance(result, list | tuple) else ()
        parts_made = [part for part in (result, *parts) if isinstance(part, list | dict)]
        shared = next((part for part in parts_made if id(part) in self._seen), None)
        if shared is not None:
            kind = type(shared).__name__
            raise ValueError(
                f"{name} returned the same {kind} in two calls, so changing one changes the other. "
                f"Make a new {kind} in each call"
            )
        self._seen |= {id(part): part for part in parts_made}
        return parts_made


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
            if not report.judge(
                answer.rank, result, case.right, case.mistakes, what=what, form=case.form
            ):
                break
    return len(report.found) == before
