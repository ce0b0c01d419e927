"""Sums in groups: the cases of an all-reduce, and the judge of what the ranks of a group reply.

An answer runs twice. In the first run, the digits of each element count how often it holds the part
of each rank (:func:`.probes.counting`), so a message can name the mistake. In the second run, the
numbers are random and have double precision, so the order of addition and the place matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from utils.checks.comparison import Calls, Rule, broken, inside, is_number, only, waited
from utils.checks.groups import Partition
from utils.checks.task import Report, Step, Wrong, none_of, to_each
from utils.checks.trials import judge_each_group, on, partitions
from utils.cluster.questions import Ranks

from .probes import BASE, ELEMENTS, SHORT, STRETCHES, noise

# The world size of the lab.
WORLD = 6
ALL, IN_FOURS, _, IN_THREES, _ = partitions(WORLD)
USUAL = (None, [[0], [1, 2], [3, 4, 5]], IN_FOURS)
# Even a sixth of this tensor is too long for MPI to send before anybody receives it.
LONG = 10_007

MISPLACED = (
    "is not the sum. Each number is added the right number of times, so some numbers must be in a "
    "wrong place, or lose their precision"
)


# -- numbers that show which ranks were added -------------------------------------------------


def is_near(
    numbers: list[float], seeds: Sequence[int], length: int, part: slice = slice(None)
) -> bool:
    """Return whether this part of a rank's reply is the sum of the `noise` of all seeds."""
    true = sum(noise(seed, length) for seed in seeds)[part]
    tensor = torch.tensor(numbers[part], dtype=torch.float64)
    return tensor.shape == true.shape and torch.allclose(tensor, true, rtol=0, atol=1e-9)


def refuse_gaps(spans: list[list], length: int) -> None:
    """Raise ValueError if the stretches leave out some elements."""
    ends = [0, *(stop for _, stop, _ in spans)]
    whole = len(spans) == STRETCHES or ends[-1] == length
    if not whole or [start for start, *_ in spans] != ends[:-1]:
        raise ValueError(f"stretches of {length} elements: {spans}")


def total(size: int) -> int:
    """Return the number that contains the part of each place once."""
    return sum(BASE**place for place in range(size))


def wrong_part(value: float, size: int) -> str | None:
    """Return what is wrong with an element, with places in braces, or `None` for the sum."""
    if value == total(size):
        return None
    if size > 1 and math.isclose(value * size, total(size), rel_tol=1e-6):
        return "hold the mean. The task asks for the sum, so don't divide"
    if not is_number(value) or not 0 <= value < BASE**size or value != int(value):
        return (
            f"hold {value:.6g}, which isn't a sum of the ranks' tensors. Wait for each receive "
            "before you add, and don't divide"
        )
    return _wrong_counts([int(value) // BASE**place % BASE for place in range(size)])


def _wrong_counts(counts: list[int]) -> str:
    """Return which parts are missing in an element, and which it contains more than once."""
    texts = []
    if 0 in counts:
        missing = [f"{{{place}}}" for place, count in enumerate(counts) if count == 0]
        texts.append(f"lack the part of rank{'s' * (len(missing) > 1)} {', '.join(missing)}")
    often = [f"rank {{{place}}}: {count} times" for place, count in enumerate(counts) if count > 1]
    if often:
        texts.append(f"hold a part more than once ({', '.join(often)})")
    return " and ".join(texts)


def why_sum(result: list[list], place: int, members: Sequence[int], length: int) -> str | None:
    """Return what is wrong with a result, which :func:`.probes.stretches` describes."""
    size = len(members)
    refuse_gaps(result, length)
    if size > 1 and [stretch[2] for stretch in result] == [BASE**place]:
        return (
            "x is still this rank's own tensor. Write the result into x itself on every rank, "
            "with x.copy_(…) or x += …, not with x = …"
        )
    for start, stop, number in result:
        words = wrong_part(number, size)
        if words:
            words = words.format(*members)
            if stop - start == 1:
                words = words.replace("hold ", "holds ", 1).replace("lack ", "lacks ", 1)
            return f"{_elements(start, stop, length)} of x {words}"
    return None


def _elements(start: int, stop: int, length: int) -> str:
    """Return ``Elements 2–4``, ``All 8 elements`` and the like."""
    if (start, stop) == (0, length):
        return f"All {length} elements" if length > 1 else "The element"
    return f"Elements {start}–{stop - 1}" if stop - start > 1 else f"Element {start}"


# -- what a group replied ---------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What the ranks of a group replied about one length.

    Attributes:
        case: the arguments of the probe.
        members: the global ranks of the group.
        values: the replies, by group rank.
        where: group and length, for a message.
    """

    case: dict[str, Any]
    members: list[int]
    values: list[Any]
    length: int
    where: str
    usual: ClassVar = "mistake"  # the kind of its problems

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of the ranks."""
        return [self.case["each"][rank]["seed"] for rank in self.members]

    def of_ranks(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the group rank, the rank, and the reply of each rank."""
        for place, (rank, reply) in enumerate(zip(self.members, self.values, strict=True)):
            yield place, rank, reply

    def each(self, why: Callable[[int, Any], str | None]) -> Step:
        """Return the step that `why`, called with group rank and reply, finds no problem."""
        texts = ((rank, why(place, reply)) for place, rank, reply in self.of_ranks())
        return none_of(self.wrong(text, rank) for rank, text in texts if text)

    def runs(self) -> Iterator[Traffic]:
        """Yield the communication of each run."""
        for run, element in ELEMENTS.items():
            calls = [reply[run] for reply in self.values]
            yield Traffic(self.case, self.members, calls, self.length, self.where, element)

    def wrong(self, text: str, rank: int | None = None, kind: str = "") -> Wrong:
        """Return the problem of one rank, or of the whole group."""
        return Wrong(f"{self.where}: {text}", rank, kind or self.usual)


@dataclass(frozen=True)
class Traffic(Answers):
    """What the ranks of a group communicated in one run; the values are their calls."""

    element: int  # bytes of an element
    usual: ClassVar = "communication"

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.length * self.element

    @property
    def in_all(self) -> int:
        """Return the sum of the bytes that the ranks sent."""
        return sum(sum(bytes_to(calls).values()) for calls in self.values)

    def in_all_is(self, expected: int, why: str = "") -> Step:
        """Return the step that all ranks together sent this number of bytes."""
        text = f"All ranks together sent {self.in_all} bytes, but {expected} were expected{why}"
        return self.of_all(text, self.in_all != expected)

    def of_all(self, text: str, is_so: bool) -> Step:
        """Return the step that the group doesn't have this problem."""
        return none_of([self.wrong(text)] if is_so else [])


def bytes_to(calls: Calls, op: str = "send") -> dict[int, int]:
    """Return the bytes of this operation for each other rank (global)."""
    by_rank: dict[int, int] = {}
    for call in calls:
        if call["op"] == op:
            by_rank[call["peer"]] = by_rank.get(call["peer"], 0) + call["nbytes"]
    return by_rank


def listed(by_rank: dict[int, int]) -> str:
    """Return ``20 bytes to rank 1, 40 bytes to rank 2``."""
    words = [f"{nbytes} bytes to rank {rank}" for rank, nbytes in sorted(by_rank.items())]
    return ", ".join(words) or "nothing"


def sends(calls: Calls) -> list[dict[str, Any]]:
    """Return only the calls that send."""
    return [call for call in calls if call["op"] == "send"]


# -- judging a group --------------------------------------------------------------------------

Results = Callable[[Answers], Iterator[Step]]
Sent = Callable[[Traffic], Iterator[Step]]


def short_and_long(report: Report, among: Iterable[Partition] = USUAL) -> Iterator[dict[str, Any]]:
    """Yield cases with short tensors, on all ranks and in groups, and then with a long one."""
    each = to_each(seed=report.seeds(WORLD))
    for partition in among:
        yield {"partition": partition, "lengths": SHORT, "each": each}
    yield {"partition": IN_FOURS, "lengths": [LONG], "each": each}


def hint_of(case: dict[str, Any]) -> str:
    """Return in which case an answer raised an error, and what this suggests."""
    groups = case["partition"]
    sizes = sorted({len(members) for members in groups or ()})
    where = f"in groups of {', '.join(map(str, sizes))} ranks" if groups else "without a group"
    if list(case["lengths"]) == [LONG]:
        return (
            f"{where}, with {LONG} numbers. Short tensors passed, because a short message leaves "
            "before anybody receives it, but a long message waits for its receiver"
        )
    lengths = ", ".join(map(str, case["lengths"]))
    words = f"{where}, with tensors of {lengths} numbers"
    if groups is None or case.get("name") == "halving_doubling":
        return words
    return f"{words}. On all ranks it passed, so pass group on, and count places from 0 in it"


def in_the_group(answers: Answers, _: int) -> list[Rule]:
    """Return the rules that a rank uses only messages in the group, and waits for all of them."""
    return [only("send", "recv"), inside(answers.members), waited]


def all_right_so_far(report: Report, _: int | None = None) -> bool:
    """Return whether no problem was found so far; as a step, it ends the judging after a problem.

    So the report of a case describes the first group with a problem, and for the other groups only
    broken rules. If a message is left over, nothing else is judged either.
    """
    return not report.problems


def sums(answers: Answers) -> Iterator[Step]:
    """Yield the steps that x is the sum on every rank, with the same bits."""
    yield none_of(_wrong_sums(answers))
    differ = len({reply["bits"] for reply in answers.values}) > 1
    words = (
        "The results don't have the same bits on all ranks, because floating-point sums depend on "
        "the order. Add in the same order on every rank, or let one rank add and send the result"
    )
    yield none_of([answers.wrong(words, kind="value")] if differ else [])


def _wrong_sums(answers: Answers) -> Iterator[Wrong]:
    """Yield the ranks on which x is not the sum, in either run."""
    for place, rank, reply in answers.of_ranks():
        words = why_sum(reply["sum"], place, answers.members, answers.length)
        if words:
            yield answers.wrong(words, rank)
        elif not is_near(reply["noise"], answers.seeds, answers.length):
            yield answers.wrong(f"With random numbers, x {MISPLACED}", rank, "value")


def judge_sums(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Iterable[dict[str, Any]],
    sent: Sent,
    *,
    results: Results = sums,
    rules: Callable[[Answers, int], Sequence[Rule]] = in_the_group,
    hint: Callable[[dict[str, Any]], str] = hint_of,
    where: Callable[[dict[str, Any], list[int]], str] = lambda _, members: on(members),
) -> None:
    """Judge rules, results and traffic, one length after the other; report the first wrong one.

    Args:
        sent: returns the steps for the communication of one run.
        results: returns the steps for the results.
        rules: returns the rules for the calls of a rank.
        hint: describes a case in which the answer raised an error or didn't return.
        where: describes a case and the members of a group, for a message.
    """

    def steps(case: dict[str, Any], members: list[int], values: Sequence[list]) -> Iterator[Step]:
        for length, *of_ranks in zip(case["lengths"], *values, strict=True):
            numbers = f"{length} number{'s' * (length != 1)}"
            here = f"{where(case, members)}, with {numbers}"
            answers = Answers(case, members, of_ranks, length, here)
            yield none_of(_misconduct(answers, rules))
            yield all_right_so_far
            yield from results(answers)
            for run in answers.runs():
                yield from sent(run)

    def judge(*group: Any) -> None:
        report.follow(None, steps(*group))

    judge_each_group(ranks, report, probe, cases, judge, hint, world=WORLD)


def _misconduct(
    answers: Answers, rules: Callable[[Answers, int], Sequence[Rule]]
) -> Iterator[Wrong]:
    """Yield the ranks that break a rule, in either run."""
    for _, rank, reply in answers.of_ranks():
        of_rank = rules(answers, rank)
        words = broken(reply["calls"], *of_rank) or broken(reply["calls again"], *of_rank)
        if words:
            yield Wrong(words, rank, "communication")
