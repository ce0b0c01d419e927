"""Answers are tried: functions of numbers in several calls, answers with a `group` in groups.

Every rank is in some group of 1, 2, 3 or 4 ranks at any time, so that an answer that forgets
`group` gives a wrong result instead of a deadlock. Groups are new for each question and have a
short timeout.

A partition is a list of groups, each a list of global ranks; `None` stands for no group at all: the
answer gets `group=None`, which is all ranks.
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

# Seconds that a rank waits for the others of a group.
TIMEOUT = 20
SIZES = (4, 2, 3, 1)
# Ranks that labs 03 and 04 need.
WORLD = 4

Partition = Sequence[Sequence[int]] | None
#: The argument `group` of an answer; `None` is all ranks.
Group = dist.ProcessGroup | None


def partitions(world: int) -> list[Partition]:
    """Return all ranks in one group, and in groups of 4, 2, 3, 1 (a last one may be smaller).

    Ranks of a group are no neighbours: their places in it follow from the group alone.
    """
    sizes = [world, *(size for size in SIZES if size < world)]
    order = range(world)
    mixed = [*order[1::2], *order[::2]]
    return [[sorted(mixed[k : k + size]) for k in range(0, world, size)] for size in sizes]


# What most answers are tried in; None is no group.
PARTITIONS = partitions(WORLD)
EVERYWHERE = (*PARTITIONS, None)


@contextlib.contextmanager
def group_of(partition: Partition, rank: int) -> Iterator[Group]:
    """Make this rank's group for a block; all ranks do so. Without a partition there is none."""
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
    """Make of a probe one that is asked with a `partition`.

    It gets those of these keywords that it has: `group`, `partition`, and `named`, which is the
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
    """Say in PyTorch's error for `src=0` in a group without rank 0 what to write."""
    try:
        yield
    except ValueError as error:
        if found := re.match(r"Global rank (\d+) is not part of group", str(error)):
            error.args = (
                f"src={found[1]} (or dst=…) is a rank of the world, and is not in this group: "
                "group_src=0 (or group_dst) is the group's first",
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
    """Return where something happened, for a message."""
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
        hint: of a case, what to say of it where the answer raised an error or did not come.
        world: how many ranks the lab has.

    Yields:
        The case, the ranks of a group, and what the probe told on each of them.
    """
    if not enough(ranks, report, world):
        return
    for case in cases:
        answers = report.answers(ranks, probe, **case)
        for members in (case["partition"] or [range(world)]) if answers else ():
            yield case, list(members), [answers[rank].value for rank in members]
        if report.found:
            if not answers and hint and (words := hint(case)):
                # The hint first, then what concerns all ranks: a long report is cut at its end.
                report.found.sort(key=lambda found: found[2] is not None)
                report.begin_with(f"({words})")
            return


@dataclass(frozen=True)
class GroupAnswer:
    """What a probe told on one rank of a group.

    Attributes:
        case: the arguments that the probe was asked with.
        members: the global ranks of the group.
        place: the group rank.
        values: what the probe told on each member.
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
        """Return what the probe told on this rank."""
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
        judge: the steps for the answer of one rank.

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
        report.problem(f"the check needs {n} ranks: ranks = cluster.start({n})")
    return ranks.n == n


# -- functions of numbers --------------------------------------------------------------------------


class Case(NamedTuple):
    """One call of a student's function.

    Attributes:
        name: of the function.
        arguments: values of JSON.
        right: what it has to return.
        mistakes: what it may return instead, and what to say then.
        form: what it returns, in words.
    """

    name: str
    arguments: list[Any]
    right: Any
    mistakes: Sequence[Mistake] = ()
    form: str = ""


def probe_calls(user_ns: dict[str, Any], *, rank: int, calls: list[Any]) -> list[Any]:
    """Return the results of functions, one call (name, arguments) after the other.

    Raises:
        ValueError: a function returned the very list or dict of another call.
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
    """What functions have returned, so that nothing is returned a second time."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # alive, so ids differ

    def add(self, name: str, result: Any) -> list[list[Any] | dict[Any, Any]]:
        """Return what can be changed of a result: itself, or what is in it.

        Raises:
            ValueError: an earlier call has returned one of them.
        """
        parts = result if isinstance(result, list | tuple) else ()
        parts_made = [part for part in (result, *parts) if isinstance(part, list | dict)]
        shared = next((part for part in parts_made if id(part) in self._seen), None)
        if shared is not None:
            kind = type(shared).__name__
            raise ValueError(
                f"{name} returned the same {kind} in two calls: who changes one changes the other, "
                f"so make a new {kind} in each call"
            )
        self._seen |= {id(part): part for part in parts_made}
        return parts_made


def judge_calls(ranks: Ranks, report: Report, cases: Iterable[Case]) -> bool:
    """Compare the results of calls on every rank; the first wrong one of a rank is a problem.

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
