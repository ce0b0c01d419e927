"""Checks of lab 06: all-reduce from messages.

Each all-reduce is tried in groups of 1, 2, 3, 4 and 6 ranks, on short tensors and on one that is
too long to be sent before anybody receives it. It runs twice. The first time each element tells
how often it holds the part of which rank (:func:`counting`), so that a wrong one can be named. The
second time the numbers are random ones of double precision, so that order of addition and place
matter. A short tensor comes a third time, with whole numbers that no float holds.

The check reads from the records of both runs what was sent to whom. No verdict depends on how long
something took.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from utils.checks import functions
from utils.checks.calls import Calls, Rule, broken, inside, only, some, waited
from utils.checks.groups import (
    Group,
    GroupAnswer,
    Partition,
    group_of,
    in_group,
    judge_groups,
    keywords,
    on,
    partitions,
    tried,
)
from utils.checks.mistakes import Mistake, is_number
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, recorded, told
from utils.checks.steps import Step, Wrong, communication, each_of, facts, none_of, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks

# Ranks that the lab has.
WORLD = 6
ALL, IN_FOURS, _, IN_THREES, _ = partitions(WORLD)
MIXED = [[0], [1, 2], [3, 4, 5]]
# Divisible, not divisible, shorter than the group, many. The long one: a sixth of it is too long
# for MPI to send it before somebody receives.
SHORT, LONG = (8, 5, 1, 203), 10_007
# Bytes of an element in the first run and in the second.
FLOAT, DOUBLE = 4, 8

# Base of the numbers that tell whose parts are in an element: odd, so that a half of one is none;
# its sixth power is exact in single precision.
BASE = 13
# Stretches of equal elements that a rank tells of its result.
STRETCHES = 6


# -- numbers that tell who was added up -------------------------------------------------------


def counting(place: int, length: int) -> torch.Tensor:
    """Return the tensor of this place of the group: of a sum, digit q counts place q."""
    return torch.full((length,), float(BASE**place))


def stretches(x: torch.Tensor) -> list[list]:
    """Return first element, the one after the last, and value, of each stretch of equals."""
    values, lengths = torch.unique_consecutive(x, return_counts=True)
    found, start = [], 0
    for number, length in zip(values[:STRETCHES].tolist(), lengths.tolist(), strict=False):
        found.append([start, start + length, number])
        start += length
    return found


def counts_of(value: float, size: int) -> list[int] | None:
    """Return how often the element holds each place's part; `None`: it is no sum of them."""
    if not is_number(value) or not 0 <= value < BASE**size or value != int(value):
        return None
    return [int(value) // BASE**place % BASE for place in range(size)]


def wrong_part(value: float, size: int) -> str | None:
    """Return what is wrong with an element; `None` if it holds each part once.

    Places are in braces."""
    total = sum(BASE**place for place in range(size))
    counts = counts_of(value, size)
    if value == total:
        return None
    if size > 1 and math.isclose(value * size, total, rel_tol=1e-6):
        return "hold the mean; the task asks for the sum: do not divide"
    if counts is None:
        return (
            f"hold {value:.6g}, which is no sum of the ranks' tensors: were they received before "
            "they were added, is the request waited for, and is nothing divided?"
        )
    missing = [place for place, count in enumerate(counts) if count == 0]
    often = [place for place, count in enumerate(counts) if count > 1]
    times = ", ".join(f"{{{place}}} ({counts[place]} times)" for place in often)
    texts = [f"lack the part of {_ranks(missing)}"] if missing else []
    texts += [f"hold a part more than once: that of rank {times}"] if often else []
    return " and ".join(texts)


def _numbers(length: int) -> str:
    """Return ``1 number`` or ``8 numbers``."""
    return f"{length} number{'s' * (length != 1)}"


def _ranks(places: Sequence[int]) -> str:
    """Return ``ranks {0}, {2}``: places in braces, for the ranks' numbers."""
    named = ", ".join(f"{{{place}}}" for place in places)
    return f"rank{'s' * (len(places) > 1)} {named}"


def _elements(start: int, stop: int, length: int) -> str:
    """Return ``elements 2–4``, ``all 8 elements`` and the like."""
    if (start, stop) == (0, length):
        return f"all {length} elements" if length > 1 else "the element"
    return f"elements {start}–{stop - 1}" if stop - start > 1 else f"element {start}"


def why_sum(found: list[list], place: int, members: Sequence[int], length: int) -> str | None:
    """Return what is wrong with a result, told by :func:`stretches`."""
    size = len(members)
    _refuse_gaps(found, length)
    if size > 1 and [stretch[2] for stretch in found] == [BASE**place]:
        return (
            "x is this rank's own tensor, unchanged. The result has to come to every rank, and "
            "into x itself: x.copy_(…) or x += …, not x = …"
        )
    for start, stop, number in found:
        said = wrong_part(number, size)
        if said:
            words = said.format(*members)
            if stop - start == 1:
                words = words.replace("hold ", "holds ", 1).replace("lack ", "lacks ", 1)
            return f"{_elements(start, stop, length)} of x {words}"
    return None


def _refuse_gaps(found: list[list], length: int) -> None:
    """Raise ValueError if stretches leave out some of the elements."""
    ends = [0, *(stop for _, stop, _ in found)]
    whole = len(found) == STRETCHES or ends[-1] == length
    if not whole or [start for start, *_ in found] != ends[:-1]:
        raise ValueError(f"stretches of {length} elements: {found}")


def whole(seed: int, length: int) -> torch.Tensor:
    """Return whole numbers that follow from a rank's seed; floats lose their last digits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**57, 2**58, (length,), generator=generator)


def noise(seed: int, length: int) -> torch.Tensor:
    """Return random numbers of double precision, which follow from a rank's own seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, dtype=torch.float64, generator=generator)


def is_near(got: list[float], seeds: Sequence[int], length: int, part: slice = slice(None)) -> bool:
    """Return whether this part of what a rank told of its ``noise`` is the sum of all noise."""
    true = sum(noise(seed, length) for seed in seeds)[part]
    tensor = torch.tensor(got[part], dtype=torch.float64)
    return tensor.shape == true.shape and torch.allclose(tensor, true, rtol=0, atol=1e-9)


def seeds_of(case: dict, members: Sequence[int]) -> list[int]:
    """Return the seeds that ranks were told in a case."""
    return [case["each"][rank]["seed"] for rank in members]


# -- an all-reduce: 6.1, 6.2, 6.5, 6.9 --------------------------------------------------------


@in_group
def probe_all_reduce(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, name: str, lengths: list[int]
) -> list[dict]:
    """The function of this name on tensors of several lengths."""
    function, named = answer_named(user_ns, name), keywords(partition, group)
    place, answers = dist.get_rank(group), []
    for length in lengths:
        x, y = counting(place, length), noise(seed, length)
        records, _ = _twice(function, group, (x, y), **named)
        answers.append({"length": length, **_contents(x, y), **records})
    return answers


@in_group
def probe_whole(user_ns: dict, *, rank: int, group: Group, partition, seed: int, name: str) -> dict:
    """The function of this name on large whole numbers."""
    x = whole(seed, SHORT[0])
    _, calls = recorded(answer_named(user_ns, name), x[:], **keywords(partition, group))
    return {"sum": x.tolist(), "calls": calls}


def _twice(function: Callable, among, tensors: Iterable, *more, **named) -> tuple[dict, list]:
    """Call a function with each of two tensors; return the records of both runs, and results.

    It gets another tensor of the same memory: what it does not write there is not in place.

    among: the group whose ranks begin each run together.
    """
    runs = []
    for tensor in tensors:
        dist.barrier(group=among)
        runs.append(recorded(function, tensor[:], *more, **named))
    (first, calls), (second, again) = runs
    return {"calls": calls, "calls again": again}, [first, second]


def _contents(x: torch.Tensor, y: torch.Tensor) -> dict:
    """Return what a rank replies about its two results."""
    # Copies: an answer may have given the tensors themselves other methods.
    x, y = (torch.Tensor.clone(tensor) for tensor in (x, y))
    bits = hashlib.sha256(y.numpy().tobytes()).hexdigest()
    return {"sum": stretches(x), "noise": y, "bits": bits}


@dataclass(frozen=True)
class Traffic:
    """What the ranks of a group have communicated in one run.

    Attributes:
        members: the global ranks of the group.
        calls: of each rank, by group rank.
        element: bytes of an element.
        length: of the tensor.
        where: group and length, for a message.
    """

    members: list[int]
    calls: list[Calls]
    element: int
    length: int
    where: str

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.length * self.element

    def of_ranks(self) -> Iterator[tuple[int, int, Calls]]:
        """Yield group rank, rank and calls."""
        for place, (rank, calls) in enumerate(zip(self.members, self.calls, strict=True)):
            yield place, rank, calls

    def wrong(self, text: str, rank: int | None = None) -> Wrong:
        """Return the problem of a rank, or of all together."""
        return Wrong(f"{self.where}: {text}", rank, "communication")

    def of_all(self, wrong: dict[str, object]) -> Step:
        """Return the step that none of these is so, of all ranks together; by its text."""
        return none_of(self.wrong(text) for text, is_so in wrong.items() if is_so)


@dataclass(frozen=True)
class Answers:
    """What the ranks of a group told of one length.

    Attributes:
        members, length, where: as in `Traffic`.
        values: what the ranks told, by group rank.
        seeds: that the ranks were told.
    """

    members: list[int]
    values: list[dict[str, Any]]
    seeds: list[int]
    length: int
    where: str

    def of_ranks(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield group rank, rank, and what the rank told."""
        for place, (rank, answer) in enumerate(zip(self.members, self.values, strict=True)):
            yield place, rank, answer

    def runs(self) -> Iterator[Traffic]:
        """Yield what was communicated in each run."""
        for name, element in (("calls", FLOAT), ("calls again", DOUBLE)):
            calls = [answer[name] for answer in self.values]
            yield Traffic(self.members, calls, element, self.length, self.where)

    def wrong(self, text: str, rank: int | None = None, kind: str = "mistake") -> Wrong:
        """Return the problem of a rank, or of all together."""
        return Wrong(f"{self.where}: {text}", rank, kind)


def _by_length(
    case: dict[str, Any], members: list[int], values: Sequence[list], where: str = ""
) -> Iterator[Answers]:
    """Yield what the ranks of a group told of each length that was asked for."""
    seeds, where = seeds_of(case, members), where or on(members)
    for length, *of_ranks in zip(case["lengths"], *values, strict=True):
        yield Answers(members, of_ranks, seeds, length, f"{where}, {_numbers(length)}")


# What judges the results of a group, and what judges its traffic.
Results = Callable[[Answers], Iterator[Step]]
Sent = Callable[[Traffic], Iterator[Step]]


def _conduct(answers: Answers) -> Iterator[Wrong]:
    """Yield who does not keep to messages, in the group, and waited for, in both runs."""
    rules = only("send", "recv"), inside(answers.members), waited
    for _, rank, answer in answers.of_ranks():
        said = broken(answer["calls"], *rules) or broken(answer["calls again"], *rules)
        if said:
            yield Wrong(said, rank, "communication")


def _group(
    of_lengths: Iterable[Answers],
    results: Results,
    sent: Sent,
    conduct: Callable[[Answers], Iterator[Wrong]] = _conduct,
) -> Iterator[Step]:
    """Yield the steps for a group: conduct, results and traffic, length by length."""
    for answers in of_lengths:
        yield none_of(conduct(answers))
        yield all_right_so_far
        yield from results(answers)
        for run in answers.runs():
            yield from sent(run)


def all_right_so_far(report: Report, _: int | None = None) -> bool:
    """Return whether nothing is wrong yet; as a step, it ends what comes behind a problem.

    Of a case the first group that has a problem is told, and of the other groups only bad conduct.
    If a message is left over, nothing else is judged either.
    """
    return not report.problems


def _cases(report: Report, among: Iterable = (), **given) -> Iterator[dict]:
    """Yield short tensors on all ranks, in groups of all sizes, then a long one."""
    given["each"] = to_each(seed=report.seeds(WORLD))
    for partition in among or (None, MIXED, IN_FOURS):
        yield {"partition": partition, "lengths": SHORT} | given
    yield {"partition": IN_FOURS, "lengths": [LONG]} | given


def _hint(case: dict) -> str:
    """Return what to say of a case in which an error came."""
    groups = case["partition"]
    sizes = sorted({len(members) for members in groups or ()})
    where = f"in groups of {', '.join(map(str, sizes))} ranks" if groups else "without a group"
    if list(case["lengths"]) == [LONG]:
        return (
            f"{where}, with {LONG} numbers. The short tensors passed: a short message is sent "
            "before anybody receives it, a long one waits until somebody does"
        )
    lengths = ", ".join(map(str, case["lengths"]))
    said = f"{where}, with tensors of {lengths} numbers"
    if groups is None or case.get("name") == "halving_doubling":
        return said
    return f"{said}. On all ranks it passed: hand group on; places begin at 0 in each group"


# Of place, size of the group and bytes of x: bytes to each place that gets something.
Plan = Callable[[int, int, int], dict[int, int]]


def _judge_all_reduce(
    ranks: Ranks, report: Report, name: str, sent: Sent, among: Iterable[Partition] = ()
) -> None:
    """Judge values, then what was sent; the smallest case that is wrong is told."""
    cases = _cases(report, among, name=name)
    for group in tried(ranks, report, probe_all_reduce, cases, _hint, world=WORLD):
        report.follow(None, _group(_by_length(*group), _sums, sent))
    if all_right_so_far(report):
        _judge_whole(ranks, report, name)


def _judge_whole(ranks: Ranks, report: Report, name: str) -> None:
    """Judge sums of whole numbers that no float holds."""
    case = {"partition": IN_FOURS, "name": name, "each": to_each(seed=report.seeds(WORLD))}
    hint = "with tensors of int64. Those of float32 and float64 passed: x may have any dtype"
    judge_groups(ranks, report, probe_whole, [case], _whole_sum, lambda _: hint, world=WORLD)


def _whole_sum(answer: GroupAnswer) -> Iterator[Step]:
    """Yield the steps that large whole numbers are added up in their own type."""
    members, seeds = answer.members, seeds_of(answer.case, answer.members)
    rules = only("send", "recv"), inside(members), waited, some(members)
    yield communication(answer.value["calls"], *rules)
    true = sum(whole(seed, SHORT[0]) for seed in seeds).tolist()
    said = (
        f"{on(members)}: of large whole numbers (int64) x is not the sum. float64 has 53 bits for "
        "their digits, int64 has 63: add in the dtype of x"
    )
    yield none_of([Wrong(said, answer.rank, "value")] if answer.value["sum"] != true else [])


def _sums(answers: Answers) -> Iterator[Step]:
    """Yield the steps that x is the sum on every rank, with the same bits."""
    yield none_of(_wrong_sums(answers))
    said = (
        "the results are not the same bits on all ranks. Floating-point sums depend on the order "
        "of addition: add in the same order on every rank, or let one rank add and send the result"
    )
    differ = len({answer["bits"] for answer in answers.values}) > 1
    yield none_of([answers.wrong(said, kind="value")] if differ else [])


def _wrong_sums(answers: Answers) -> Iterator[Wrong]:
    """Yield on which ranks x is not the sum, in either run."""
    for place, rank, answer in answers.of_ranks():
        said = why_sum(answer["sum"], place, answers.members, answers.length)
        if said:
            yield answers.wrong(said, rank)
        elif not is_near(answer["noise"], answers.seeds, answers.length):
            said = (
                "of random numbers x is not the sum. Each number is added up the right number of "
                "times, but something lands in a wrong place, or loses its precision"
            )
            yield answers.wrong(said, rank, "value")


def bytes_to(calls: Calls, op: str = "send") -> dict[int, int]:
    """Return the bytes of this operation by the other rank (global)."""
    found: dict[int, int] = {}
    for call in calls:
        if call["op"] == op:
            found[call["peer"]] = found.get(call["peer"], 0) + call["nbytes"]
    return found


def _sends(calls: Calls) -> list[dict[str, Any]]:
    """Return the calls that send."""
    return [call for call in calls if call["op"] == "send"]


def _by_plan(plan: Plan, why: str, rounds: int = 0) -> Sent:
    """Return the judge that ranks send exactly these bytes to these ranks.

    rounds: in how many rounds a rank sends to all others, beginning with the one behind it; 0 if
    that is not what the algorithm does.
    """

    def judge(run: Traffic) -> Iterator[Step]:
        yield none_of(_off_plan(run, plan, why.format(run.members[0]), one_each=not rounds))
        if rounds:
            yield none_of(_out_of_turn(run, rounds))

    return judge


def _off_plan(run: Traffic, plan: Plan, why: str, one_each: bool) -> Iterator[Wrong]:
    """Yield who sends other bytes; with `one_each`, also who sends more messages than needed."""
    for place, rank, calls in run.of_ranks():
        planned = plan(place, run.size, run.nbytes)
        wanted = {run.members[to]: nbytes for to, nbytes in planned.items()}
        sent, count = bytes_to(calls), len(_sends(calls))
        if sent != wanted:
            said = f"expected to send {_sent(wanted)}; it sent {_sent(sent)}. {why}"
            yield run.wrong(said, rank)
        elif one_each and count > len(wanted):
            yield run.wrong(
                f"it sent {count} messages, expected {len(wanted)}: one to each of these ranks, as "
                "every message costs a latency",
                rank,
            )


def _out_of_turn(run: Traffic, rounds: int) -> Iterator[Wrong]:
    """Yield whose k-th message of a round does not go to the k-th place behind its own."""
    for place, rank, calls in run.of_ranks():
        peers = [call["peer"] for call in _sends(calls)]
        wanted = [run.members[(place + k) % run.size] for k in range(1, run.size)] * rounds
        if peers != wanted:
            yield run.wrong(
                f"it sent to ranks {peers}, one after the other; expected {wanted}: in the k-th "
                "message to place (r + k) mod p, so that not all begin with the same place",
                rank,
            )


def _sent(by_rank: dict[int, int]) -> str:
    """Return ``20 bytes to rank 1, 40 bytes to rank 2``."""
    words = [f"{nbytes} bytes to rank {rank}" for rank, nbytes in sorted(by_rank.items())]
    return ", ".join(words) or "nothing"


def _crossbar_plan(place: int, size: int, nbytes: int) -> dict[int, int]:
    """Return what a place sends to every other one: the whole tensor."""
    return {other: nbytes for other in range(size) if other != place}


@task("6.1", "crossbar", points=2)
def crossbar(ranks: Ranks, report: Report) -> None:
    """Everyone sends everyone the whole tensor, once."""
    why = "In a crossbar each rank sends its own tensor to every other rank of the group, once"
    _judge_all_reduce(ranks, report, "crossbar", _by_plan(_crossbar_plan, why, rounds=1))


def _central_plan(place: int, size: int, nbytes: int) -> dict[int, int]:
    """Return what a place sends to place 0, or place 0 to every other one."""
    return {0: nbytes} if place else {other: nbytes for other in range(1, size)}


@task("6.2", "a central reducer", points=2)
def central(ranks: Ranks, report: Report) -> None:
    """Everything to place 0 and back."""
    why = "Each rank sends its tensor to the group's first rank, here {}, which sends the sum back"
    _judge_all_reduce(ranks, report, "central", _by_plan(_central_plan, why))


def _direct_plan(place: int, size: int, nbytes: int, element: int) -> dict[int, int]:
    """Return what a place sends to every other one: that one's part, and its own part."""
    length = nbytes // element
    parts = [len(range(length)[chunk(k, length, size)]) for k in range(size)]
    there = {other: (parts[other] + parts[place]) * element for other in range(size)}
    return {other: sent for other, sent in there.items() if other != place}


def _direct_way(run: Traffic) -> Iterator[Step]:
    """Yield the steps that each place gets its part of a rank's tensor, and the sum of a part."""
    why = (
        "In the first round part k goes straight to place k of the group; in the second round each "
        "place sends the sum of its own part to every other place"
    )
    plan = functools.partial(_direct_plan, element=run.element)
    yield from _by_plan(plan, why, rounds=2)(run)


@task("6.5", "the direct all-reduce", points=2)
def direct(ranks: Ranks, report: Report) -> None:
    """The ring's bytes in two steps: part k straight to place k, and its sum straight back."""
    _judge_all_reduce(ranks, report, "direct", _direct_way)


# -- the ring: 6.3 and 6.4 --------------------------------------------------------------------


def _ring(run: Traffic) -> Iterator[Step]:
    """Yield the steps that a rank has one neighbor on each side, and sends p − 1 chunks.

    They may travel in any direction.
    """
    size, expected = run.size, (run.size - 1) * run.nbytes
    yield none_of(_off_the_ring(run))
    in_all = sum(sum(bytes_to(calls).values()) for calls in run.calls)
    wrong_volume = (
        f"all ranks together sent {in_all} bytes, expected {expected}: each chunk travels "
        f"{size - 1} time{'s' * (size > 2)}"
    )
    yield run.of_all({wrong_volume: in_all != expected})
    counts = [(rank, len(_sends(calls))) for _, rank, calls in run.of_ranks()]
    too_many = [
        run.wrong(f"it sent {count} messages, expected {size - 1}: a chunk is one", rank)
        for rank, count in counts
        if count > size - 1
    ]
    yield none_of(too_many[:1])
    same_chunks = (
        "the ranks do not send different chunks in each step: begin with neighbouring chunks on "
        "neighbouring ranks, so that all links work all the time"
    )
    yield run.of_all({same_chunks: not _all_chunks_travel(run)})


def _off_the_ring(run: Traffic) -> Iterator[Wrong]:
    """Yield who talks to more than one neighbor on a side, or sends more than p − 1 chunks."""
    most = (run.size - 1) * -(-run.length // run.size) * run.element
    for _, rank, calls in run.of_ranks():
        sent, came = (bytes_to(calls, op) for op in ("send", "recv"))
        if max(len(sent), len(came)) > 1:
            verb, others = ("sends to", sent) if len(sent) > 1 else ("receives from", came)
            yield run.wrong(
                f"it {verb} ranks {sorted(others)}. On a ring each rank sends to one neighbour and "
                "receives from the other",
                rank,
            )
        elif sum(sent.values()) > most:
            yield run.wrong(
                f"it sent {sum(sent.values())} bytes, at most {most} are needed: {run.size - 1} "
                "steps, in each of them one chunk, not the whole tensor",
                rank,
            )


def _all_chunks_travel(run: Traffic) -> bool:
    """Return whether in each step each rank sends another chunk, as far as their sizes tell."""
    length, size = run.length, run.size
    if length < size:  # empty chunks need not be sent
        return True
    parts = [len(range(length)[chunk(k, length, size)]) * run.element for k in range(size)]
    sent = [[call["nbytes"] for call in _sends(calls)] for calls in run.calls]
    return any(
        sent
        == [[parts[(r + first - way * t) % size] for t in range(size - 1)] for r in range(size)]
        for first in range(size)
        for way in (1, -1)
    )


def chunk(k: int, length: int, size: int) -> slice:
    """Return where ``x.tensor_split(size)[k]`` is in x."""
    base, longer = divmod(length, size)
    start = k * base + min(k, longer)
    return slice(start, start + base + (k < longer))


@in_group
def probe_reduce_scatter(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, lengths: list[int]
) -> list[dict]:
    """What it returns, and which chunks are complete then."""
    function, named = answer_named(user_ns, "ring_reduce_scatter"), keywords(partition, group)
    place, size = dist.get_rank(group), dist.get_world_size(group)
    answers = []
    for length in lengths:
        x, y = counting(place, length), noise(seed, length)
        records, (mine, again) = _twice(function, group, (x, y), **named)
        number = isinstance(again, int) and 0 <= again < size
        answers.append({
            "length": length,
            "mine": told(mine),
            "kind": type(mine).__name__,
            "chunks": [stretches(x[chunk(k, length, size)]) for k in range(size)],
            "again": again if number else None,
            "noise": y,
            **records,
        })  # fmt: skip
    return answers


@task("6.3", "ring: reduce-scatter", points=3)
def ring_reduce_scatter(ranks: Ranks, report: Report) -> None:
    """Each rank ends with another chunk that is complete, and says which."""
    _judge_half(ranks, report, probe_reduce_scatter, _cases(report), _chunks)


def _judge_half(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Iterable[dict[str, Any]],
    results: Results,
) -> None:
    """Judge one half of the ring: conduct, then the chunks, then what was sent to whom."""
    for group in tried(ranks, report, probe, cases, _hint, world=WORLD):
        report.follow(None, _group(_by_length(*group), results, _ring))


def _chunks(answers: Answers) -> Iterator[Step]:
    """Yield the steps that each rank has a complete chunk, and neighbors have neighboring ones."""
    size = len(answers.members)
    yield none_of(
        answers.wrong(said, rank)
        for place, rank, answer in answers.of_ranks()
        if (said := _why_chunk(answer, place, answers))
    )
    mine = [answer["mine"] for answer in answers.values]
    returned = f"{answers.where}: the chunks returned are {mine} in the order of the ranks. "
    yield facts({
        f"{returned}Each of 0 to {size - 1} must be complete on one rank":
            sorted(mine) != list(range(size)),
        f"{returned}Neighbours on the ring must end with neighbouring chunks, or the all-gather "
        "cannot go on from there": any((mine[k] - mine[0] - k) % size for k in range(size)),
    })  # fmt: skip


def _why_chunk(answer: dict[str, Any], place: int, answers: Answers) -> str | None:
    """Return what is wrong with the chunk that is said to be complete."""
    size, length, mine = len(answers.members), answers.length, answer["mine"]
    if mine is None:
        return "returned None: return the number of the chunk that is complete on this rank"
    if not isinstance(mine, int) or isinstance(mine, bool):
        return f"returned a {answer['kind']}: return the number of the complete chunk, an int"
    if not 0 <= mine < size:
        return f"returned chunk {mine}; chunks are numbered 0 to {size - 1}: take it modulo p"
    _refuse_gaps(answer["chunks"][mine], len(range(length)[chunk(mine, length, size)]))
    wrong = [words for *_, v in answer["chunks"][mine] if (words := wrong_part(v, size))]
    if wrong:
        words = wrong[0].format(*answers.members)
        return f"returned chunk {mine}, whose elements {words}. {_instead(answer, place, size)}"
    again = answer["again"]
    if again is not None and is_near(
        answer["noise"], answers.seeds, length, chunk(again, length, size)
    ):
        return None
    return (
        f"of random numbers chunk {mine} is not the sum. Each number is added up the right "
        "number of times, but something lands in a wrong place, or loses its precision"
    )


def _instead(answer: dict[str, Any], place: int, size: int) -> str:
    """Return what a rank has instead of the chunk that it said to be complete."""
    filled = [k for k, found in enumerate(answer["chunks"]) if found and _is_complete(found, size)]
    if filled:
        return f"Complete on this rank is chunk {filled[0]}"
    if size > 1 and {v for found in answer["chunks"] for *_, v in found} == {BASE**place}:
        return (
            "x is this rank's own tensor, unchanged: add into the chunks of x themselves, with +=, "
            "and not into copies or new tensors"
        )
    return (
        "No chunk is complete on this rank. In each of the p − 1 steps a rank sends the chunk that "
        "it has added to in the step before, and adds what comes to the chunk of the same number"
    )


def _is_complete(found: list[list], size: int) -> bool:
    """Return whether a chunk, told by :func:`stretches`, is the sum."""
    return all(wrong_part(number, size) is None for *_, number in found)


def _own_chunk(k: int, length: int, size: int, seed: int) -> torch.Tensor:
    """Return what chunk k must contain after the all-gather: it tells chunk and element.

    seed: of the rank that has it at the start. All numbers are exact in float32.
    """
    part = chunk(k, length, size)
    return 1.0 + torch.arange(part.start, part.stop) + 20_000 * (k + 1 + 8 * (seed % 100))


OLD = -1.0


@in_group
def probe_all_gather(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, lengths: list[int], ahead: int
) -> list[dict]:
    """All chunks afterwards; before, this rank has one only."""
    function, named = answer_named(user_ns, "ring_all_gather"), keywords(partition, group)
    place, size = dist.get_rank(group), dist.get_world_size(group)
    mine, answers = (place + ahead) % size, []
    for length in lengths:
        x = torch.full((length,), OLD)
        x[chunk(mine, length, size)] = _own_chunk(mine, length, size, seed)
        double = x.double() / 3  # float32 does not hold it
        records, _ = _twice(function, group, (x, double), mine, **named)
        answers.append({
            "length": length,
            "mine": mine,
            "x": x,
            "alike": torch.equal(double, x.double() / 3),
            **records,
        })  # fmt: skip
    return answers


def _what_is_in(x: torch.Tensor, k: int, contents: list[torch.Tensor]) -> str | int:
    """Return ``"right"``, ``"old"``, ``"other"``, or the number of another chunk."""
    got = x[chunk(k, len(x), len(contents))]
    if torch.equal(got, contents[k]):
        return "right"
    if (got == OLD).any():
        return "old"
    for other, content in enumerate(contents):
        common = min(len(content), len(got))
        if common and torch.equal(got[:common], content[:common]):
            return other
    return "other"


@task("6.4", "ring: all-gather", points=2)
def ring_all_gather(ranks: Ranks, report: Report) -> None:
    """Every rank ends with all chunks, whichever was its own at the start."""
    cases = [case | {"ahead": k} for k, case in enumerate(_cases(report), 1)]
    cases.insert(1, cases[0] | {"ahead": 0})
    _judge_half(ranks, report, probe_all_gather, cases, _gathered)


def _gathered(answers: Answers) -> Iterator[Step]:
    """Yield the step that every rank has all chunks, in both runs."""
    size, length = len(answers.members), answers.length
    mine = [answer["mine"] for answer in answers.values]
    seed_of = dict(zip(mine, answers.seeds, strict=True))
    contents = [_own_chunk(k, length, size, seed_of[k]) for k in range(size)]
    yield none_of(_wrong_chunks(answers, contents))


def _wrong_chunks(answers: Answers, contents: list[torch.Tensor]) -> Iterator[Wrong]:
    """Yield which ranks lack the contents of some chunk."""
    for _, rank, answer in answers.of_ranks():
        said = _why_gathered(torch.tensor(answer["x"]), answer["mine"], contents)
        if said:
            yield answers.wrong(said, rank)
        elif not answer["alike"]:
            yield answers.wrong("in double precision the result is another one", rank, "value")


def _why_gathered(x: torch.Tensor, mine: int, contents: list[torch.Tensor]) -> str | None:
    """Return what is wrong with one of the chunks; with the rank's own one first."""
    found = [_what_is_in(x, k, contents) for k in range(len(contents))]
    wrong = [k for k, content in enumerate(found) if content != "right"]
    if not wrong:
        return None
    if mine in wrong:
        return (
            f"chunk {mine}, which was complete on this rank (mine = {mine}), was overwritten. Send "
            "it in the first step, and receive into the one that the neighbour had"
        )
    k, content = wrong[0], found[wrong[0]]
    if content == "old":
        return (
            f"chunk {k} still has its old content on this rank, which began with mine = {mine}. "
            "Send in each step what came in the step before"
        )
    if isinstance(content, int):
        return (
            f"chunk {k} holds the numbers of chunk {content}: sender and receiver disagree on "
            f"which chunk travels. This rank began with mine = {mine}"
        )
    return f"chunk {k} holds other numbers than the rank that had it complete: copy, not add"


# -- 6.6: messages, bytes, steps --------------------------------------------------------------

ALGORITHMS = ("crossbar", "central", "tree", "ring", "direct")
COUNTS = ("messages", "bytes", "busiest", "steps")


def true_cost(algorithm: str, p: int, n: int) -> dict[str, int]:
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
    """The counts of five algorithms for several p and n."""
    draw = random.Random(report.seed)
    # Two ranks last: there many mistakes give the same.
    sizes = [5, 4, 3, 8, draw.choice((12, 20, 33, 64)), draw.randrange(600, 1500), 2]
    cases = [[name, p, 4 * p * draw.randint(10, 999)] for name in ALGORITHMS for p in sizes]
    calls = [["cost", case] for case in cases]
    for answer in report.answers(ranks, functions.probe_calls, calls=calls):
        costs = zip(cases, answer.value, strict=True)
        steps = ((case[0], _cost(*case, got)) for case, got in costs)
        _first_of_each(report, answer.rank, steps)


def _first_of_each(report: Report, rank: int, steps: Iterable[tuple[str, Iterable[Step]]]) -> None:
    """Take the steps of all cases, but after a case that fails no more of the same algorithm."""
    failed = set()
    for algorithm, of_case in steps:
        if algorithm not in failed and not report.follow(rank, of_case):
            failed.add(algorithm)


def _cost(algorithm: str, p: int, n: int, got: Any) -> Iterator[Step]:
    """Yield the steps that these are the four numbers of an algorithm."""
    what, true = f"cost({algorithm!r}, {p}, {n})", true_cost(algorithm, p, n)
    yield facts({
        f"{what} returned {got}: return four numbers, messages, bytes, bytes of the busiest rank, "
        "steps": not isinstance(got, list) or len(got) != len(COUNTS),
    })  # fmt: skip
    mixed_up = got != list(true) and sorted(map(str, got)) == sorted(map(str, true))
    said = f"{what}: the four numbers are right, and their order is not: {COUNTS}"
    yield facts({said.replace("'", ""): mixed_up})
    yield each_of(*(
        [value(count, expected, _wrong_counts(algorithm, key, p, n, true), what=f"{what}, {key}")]
        for key, count, expected in zip(COUNTS, got, true, strict=True)
    ))  # fmt: skip


def _wrong_counts(name: str, key: str, p: int, n: int, true: Sequence[int]) -> Iterator[Mistake]:
    """Yield wrong counts of an algorithm; key: which of the four numbers."""
    messages, nbytes, busiest, steps = true
    depth = p.bit_length() - 1
    values = {
        "messages": {
            "each rank sends to all others, not to itself": p * p,
            "these are pairs: a message in each direction":
                messages // 2 if name == "crossbar" else None,
            "those are the messages there: they come back, too": messages // 2,
            "count the messages of all ranks, not of one": messages // p,
            "these are steps: in each of them several messages travel": steps,
        },
        "bytes": {
            "only one way: the result comes back": None if name == "crossbar" else nbytes // 2,
            "that is one rank: count the bytes of all": busiest,
            "these are numbers of 4 bytes: n is in bytes already": nbytes * 4,
            "these are messages of a p-th of the tensor, not of n bytes each": messages * n,
            "these are messages: count the bytes": messages,
        },
        "busiest": {
            "that is the mean over the ranks: take the busiest one": nbytes // p,
            "that is what rank 0 sends and receives: count what it sends":
                nbytes if name == "central" else None,
            "the bytes of all ranks: take the busiest one": nbytes,
            "count what a rank sends, not what it receives as well": 2 * busiest,
            "two children and a parent, where the group is large enough: three messages":
                2 * n if name == "tree" else None,
            "with so few ranks nobody has two children and a parent":
                3 * n if name == "tree" else None,
            "each step carries a chunk, not the whole tensor": 2 * (p - 1) * n,
            "only one of the two phases": busiest // 2,
        },
        "steps": {
            "messages that travel at the same time are one step": messages,
            "there and back: twice as many": steps // 2,
            "all of them can start at once: nobody waits for another message":
                p - 1 if name == "crossbar" else None,
            "the messages of one rank to several start at once: one step there, one back":
                2 * (p - 1) if name in ("central", "direct") else None,
            "the deepest rank is ⌊log₂ p⌋ below the root": 2 * math.ceil(math.log2(p + 1)),
            "p − 1 steps in each phase": 2 * p if name == "ring" else 2 * (depth + 1),
        },
    }[key]  # fmt: skip
    expected = true[COUNTS.index(key)]
    for text, gives in values.items():
        if gives is not None and gives != expected:
            yield Mistake(gives, text)


# -- 6.7: seconds -----------------------------------------------------------------------------


def true_duration(algorithm: str, p: int, n: int, alpha: float, beta: float) -> float:
    """Return seconds by α–β, where each rank sends, and receives, one message at a time."""
    *_, steps = true_cost(algorithm, p, n)
    return steps * (alpha + _at_a_time(algorithm, p) * n * beta)


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
    """`duration` and `crossover`."""
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
    """Five formulas, and the size at which two of them meet."""
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
        durations = zip(cases, answer.value["duration"], strict=True)
        steps = ((case[0], _duration(*case, got)) for case, got in durations)
        _first_of_each(report, answer.rank, steps)
        crossovers = zip(networks, answer.value["crossover"], strict=True)
        report.follow(answer.rank, (_crossover(*network, got) for network, got in crossovers))


def _duration(
    algorithm: str, p: int, n: int, alpha: float, beta: float, got: Any
) -> Iterator[Step]:
    """Yield the step that these are the seconds of an algorithm."""
    what = f"duration({algorithm!r}, {p}, {n}, {alpha:.3g}, {beta:.3g})"
    expected = true_duration(algorithm, p, n, alpha, beta)
    yield _to_a_share(got, expected, _wrong_durations(algorithm, p, n, alpha, beta), what)


def _to_a_share(got: Any, expected: float, wrong: dict[str, float], what: str) -> Step:
    """Return the step that a number is right to a share of it: it may be a few milliseconds."""
    if not is_number(got):
        return facts({f"{what} returned {got}: return seconds, a number": True})
    share = got / expected
    fits = (
        f"{text}. "
        for text, gives in wrong.items()
        if math.isclose(share, gives / expected, rel_tol=1e-6)
    )
    said = f"{what}: {next(fits, '')}Expected {expected:.6g}, got {got:.6g}"
    return facts({said: not abs(share - 1) < 1e-6})


def _wrong_durations(algorithm: str, p: int, n: int, alpha: float, beta: float) -> dict[str, float]:
    """Return wrong seconds of an algorithm by what to say of them."""
    messages, nbytes, _, steps = true_cost(algorithm, p, n)
    at_a_time, depth = _at_a_time(algorithm, p), p.bit_length() - 1
    tensor, part = alpha + n * beta, alpha + n * beta / p
    one_link = {
        "p − 1 messages share one link, and come one after the other": steps * tensor,
        "messages that start together share one latency: it is paid once a step":
            steps * (p - 1) * tensor,
        "the links of the ranks work at the same time": messages * tensor,
    }  # fmt: skip
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
            "a message carries a part of n/p bytes, not the whole tensor":
                2 * (alpha + (p - 1) * n * beta),
            "the messages of a round start at once: two steps": 2 * (p - 1) * part,
        },
        "tree": {
            "the depth is ⌊log₂ p⌋, a whole number": 2 * math.log2(p) * tensor,
            "up and down again: twice the depth": depth * tensor,
            "the depth is ⌊log₂ p⌋": 2 * (depth + 1) * tensor,
            "the messages of a level travel at the same time": messages * tensor,
        },
    }  # fmt: skip
    return {
        "that is one step, with its latency: count all of them": alpha + at_a_time * n * beta,
        "each step costs a latency": alpha + steps * at_a_time * n * beta,
        **of_algorithm[algorithm],
        "give seconds, not milliseconds": 1e3 * steps * (alpha + at_a_time * n * beta),
        "β is seconds per byte: multiply by it": steps * (alpha + at_a_time * n / beta),
        "n is in bytes already": steps * (alpha + at_a_time * 4 * n * beta),
        "these are bytes in all: links work at the same time": steps * alpha + nbytes * beta,
    }


def _crossover(p: int, alpha: float, beta: float, got: Any) -> Step:
    """Return the step that this is the size from which on the direct all-reduce is faster."""
    what = f"crossover({p}, {alpha:.3g}, {beta:.3g})"
    if p == 2:
        said = (
            f"{what}: with two ranks both ways send n bytes, and the crossbar has one step less: "
            f"the direct way never wins. Expected math.inf, got {got}"
        )
        return facts({said: got != "inf"})
    expected, share = true_crossover(p, alpha, beta), (p - 1) * (1 - 2 / p)
    if got == "inf":
        said = (
            f"{what}: with more than two ranks the direct way wins at last: it sends less. "
            f"Expected {expected:.6g}, got infinity"
        )
        return facts({said: True})
    wrong = {
        "that is the number of float32 values: give bytes": expected / 4,
        "that is alpha/beta times too much: α enters once": expected * alpha / beta,
        "α/β is turned over": beta / alpha / share,
        "the crossbar costs one latency itself: the direct way has one more": 2 * expected,
        "the direct way sends 2(p − 1)/p of the tensor: the difference to (p − 1) counts":
            alpha / beta / (p - 1),
        "that is where the latency is half of a message's time": alpha / beta,
        "that is the crossover of four ranks: use p": true_crossover(4, alpha, beta),
        "that is where crossbar and ring meet": expected * (2 * p - 3),
    }  # fmt: skip
    return _to_a_share(got, expected, wrong, what)


# -- 6.8: dedicated reducers ------------------------------------------------------------------

# Workers by the size of the group, pieces, and the tensors' lengths.
SERVER_CASES = (
    (IN_FOURS, {"4": 2, "2": 1}, 1, (8, 1, 203)),
    (IN_THREES, {"3": 2}, 2, (5, 203)),
    (ALL, {"6": 3}, 1, (5, 203)),
    (ALL, {"6": 3}, 4, (5, 203)),
    (ALL, {"6": 4}, 3, (7, 203)),
    (None, {"6": 2}, 1, (203,)),
    (ALL, {"6": 3}, 1, (3 * LONG,)),
)
# What stands in the x of a reducer, which has nothing to add.
REDUCERS_OWN = 0.5


@in_group
def probe_server(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition,
    seed: int,
    lengths: list[int],
    pieces: int,
    workers: dict[str, int],
    patient: bool,
) -> list[dict]:
    """The workers' results, and what everybody sent. patient: the check's own workers are used."""
    function, named = answer_named(user_ns, "reduction_server"), keywords(partition, group)
    place, size = dist.get_rank(group), dist.get_world_size(group)
    many, answers = workers[str(size)], []
    if patient and place < many:
        function = patient_worker
    for length in lengths:
        is_worker = place < many
        x = counting(place, length) if is_worker else torch.full((length,), REDUCERS_OWN)
        y = noise(seed, length) if is_worker else torch.full((length,), math.nan).double()
        records, _ = _twice(function, group, (x, y), many, pieces, **named)
        answers.append({"length": length, **_contents(x, y), **records})
    return answers


def patient_worker(x: torch.Tensor, workers: int, pieces: int, group: Group = None) -> None:
    """A worker of 6.8 that sends its next pieces only when the results of the last ones are back.

    A reducer that keeps all results until the last piece has come never gets that piece.
    """
    place, reducers = dist.get_rank(group), dist.get_world_size(group) - workers
    parts = x.tensor_split(reducers * pieces)
    for piece in range(pieces):
        requests = []
        for j in range(reducers):
            turn = (j + place) % reducers
            part = parts[piece * reducers + turn]
            at = {"group": group, "group_peer": workers + turn}
            requests.append(dist.P2POp(dist.isend, part.clone(), **at))
            requests.append(dist.P2POp(dist.irecv, part, **at))
        for request in dist.batch_isend_irecv(requests):
            request.wait()


@task("6.8", "a reduction server", points=3)
def reduction_server(ranks: Ranks, report: Report) -> None:
    """Workers send and receive n bytes each, in pieces, and do not all begin with one reducer."""
    each = to_each(seed=report.seeds(WORLD))
    cases = [
        {"partition": p, "workers": w, "pieces": k, "lengths": n, "each": each, "patient": False}
        for p, w, k, n in SERVER_CASES
    ]
    cases.append(cases[3] | {"patient": True})
    for case, members, values in tried(
        ranks, report, probe_server, cases, _hint_of_server, world=WORLD
    ):
        many = case["workers"][str(len(members))]
        of_lengths = _by_length(case, members, values, f"{on(members)}, {many} of them workers")
        results = functools.partial(_workers_sums, many)
        sent = functools.partial(_service, many, case["pieces"])
        report.follow(None, _group(of_lengths, results, sent))


def _hint_of_server(case: dict) -> str:
    """Return what to say of a case in which an error came."""
    members = (case["partition"] or [range(WORLD)])[0]
    many, pieces = case["workers"][str(len(members))], case["pieces"]
    said = f"{on(members)}, {many} of them workers, pieces={pieces}, lengths {case['lengths']}"
    if not case["patient"]:
        return said
    return (
        f"{said}. All other cases passed. In this one the workers send their next piece when the "
        "result of the one before is back. A reducer sends the result of a piece as soon as all "
        "parts of that piece have come; it does not wait for the other pieces"
    )


def _workers_sums(many: int, answers: Answers) -> Iterator[Step]:
    """Yield the steps that workers have the sum of the workers' tensors, and of nothing else."""
    workers, values = answers.members[:many], answers.values[:many]
    total = sum(BASE**place for place in range(many))
    said = "a reducer has added its own x: it has no part, and starts from what comes first"
    yield none_of(
        answers.wrong(said, rank)
        for rank, answer in zip(workers, values, strict=True)
        if any(v % 1 == REDUCERS_OWN and v * many != total for *_, v in answer["sum"])
    )
    yield from _sums(replace(answers, members=workers, values=values, seeds=answers.seeds[:many]))


def _service(many: int, pieces: int, run: Traffic) -> Iterator[Step]:
    """Yield the steps that workers share out their pieces, and don't crowd at one reducer."""
    yield none_of(_no_service(many, pieces, run))
    firsts: dict[int, list[int]] = {}
    for _, rank, calls in list(run.of_ranks())[:many]:
        firsts.setdefault(_sends(calls)[0]["peer"], []).append(rank)
    first, crowd = max(firsts.items(), key=lambda pair: len(pair[1]))
    incast = (
        f"the workers {', '.join(map(str, crowd))} all begin with the reducer on rank {first}, "
        "whose link is then the bottleneck (incast), while the other reducers have nothing to do: "
        "let worker i begin with reducer i"
    )
    too_many = len(crowd) > -(-many // (run.size - many))
    yield run.of_all({incast: too_many})


def _no_service(many: int, pieces: int, run: Traffic) -> Iterator[Wrong]:
    """Yield who talks to the wrong ranks, and which workers don't share out their pieces."""
    workers, reducers = run.members[:many], run.members[many:]
    for place, rank, calls in run.of_ranks():
        is_worker = place < many
        said = broken(calls, _talks_to(reducers if is_worker else workers, is_worker))
        if is_worker:
            said = said or _not_shared_out(run, calls, reducers, pieces)
        if said:
            yield run.wrong(said, rank)


def _not_shared_out(run: Traffic, calls: Calls, reducers: list[int], pieces: int) -> str | None:
    """Return what is wrong with how a worker cuts its tensor into pieces for the reducers."""
    per_reducer = pieces * -(-run.length // (pieces * len(reducers))) * run.element
    sent = bytes_to(calls)
    total = sum(sent.values())
    if total != run.nbytes:
        return (
            f"it sent {total} bytes: a worker sends each of its {run.nbytes} bytes once, to the "
            "reducer of the piece that it belongs to"
        )
    if max(sent.values()) > per_reducer:
        return (
            f"it sent {_sent(sent)}: the pieces must be shared out evenly, at most {per_reducer} "
            f"bytes to each of the {len(reducers)} reducers"
        )
    numbers = [sum(call["peer"] == reducer for call in _sends(calls)) for reducer in reducers]
    if set(numbers) != {pieces}:
        return (
            f"with pieces={pieces} expected {pieces} message(s) to each reducer; it sent "
            f"{numbers}: cut x into reducers × pieces parts"
        )
    return None


def _talks_to(others: Sequence[int], is_worker: bool) -> Rule:
    """Return the rule that workers talk with reducers, and reducers with workers."""
    who, whom = ("a worker", "reducers") if is_worker else ("a reducer", "workers")

    def rule(calls: Calls) -> str | None:
        strange = sorted({call["peer"] for call in calls} - set(others))
        if not strange:
            return None
        return f"it has a message to or from rank {strange[0]}: {who} talks to {whom} only"

    return rule


# -- 6.9: halving and doubling ----------------------------------------------------------------


@task("6.9", "extra mile: halving and doubling", points=2)
def halving_doubling(ranks: Ranks, report: Report) -> None:
    """In groups of a power of two: the ring's bytes in 2·log₂ p steps."""
    among = ([[0], [1, 2], [3], [4, 5]], IN_FOURS)
    _judge_all_reduce(ranks, report, "halving_doubling", _halving, among)


def _halving(run: Traffic) -> Iterator[Step]:
    """Yield the steps that all ranks follow the algorithm, and send 2(p − 1)/p of x each."""
    yield none_of(
        run.wrong(said, rank)
        for place, rank, calls in run.of_ranks()
        if (said := _why_not_halving(run, place, calls))
    )
    in_all = sum(sum(bytes_to(calls).values()) for calls in run.calls)
    expected = 2 * (run.size - 1) * run.nbytes
    said = f"all ranks together sent {in_all} bytes, expected {expected}"
    yield run.of_all({said: in_all != expected})


def _why_not_halving(run: Traffic, place: int, calls: Calls) -> str | None:
    """Return what differs from 2·log₂ p messages to partners at distances 1, 2, 4 …"""
    depth = run.size.bit_length() - 1
    sent, peers = bytes_to(calls), [call["peer"] for call in _sends(calls)]
    partners = {run.members[place ^ (1 << k)] for k in range(depth)}
    farthest = run.members[place ^ (run.size // 2)] if depth else None
    most = 2 * run.element * sum(-(-run.length // 2**k) for k in range(1, depth + 1))
    if set(sent) != partners:
        return f"it sent to ranks {sorted(sent)}; its partners are {sorted(partners)}"
    if len(peers) != 2 * depth:
        return (
            f"it sent {len(peers)} messages, expected {2 * depth}: one to each partner while the "
            "parts get smaller, and one to each partner on the way back"
        )
    if depth and peers[0] != farthest:
        return (
            f"its first message goes to rank {peers[0]}; begin with the partner at distance p/2, "
            f"here rank {farthest}"
        )
    if sum(sent.values()) > most:
        return (
            f"it sent {sum(sent.values())} bytes: halve what travels in each step, and send only "
            "the half that the partner goes on with"
        )
    return None


# -- 6.10: two levels -------------------------------------------------------------------------

# The ranks of each machine.
MACHINES = ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 2, 4], [1, 3, 5]])


def _across(machines: list[list[int]]) -> list[list[int]]:
    """Return the ranks that have the same place in their machines."""
    return [list(members) for members in zip(*machines, strict=True)]


@in_group
def probe_hierarchical(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition,
    seed: int,
    lengths: list[int],
    machines: list,
) -> list[dict]:
    """The result on tensors of several lengths, with groups for the machines that are named."""
    function, answers = answer_named(user_ns, "hierarchical"), []
    with group_of(machines, rank) as node, group_of(_across(machines), rank) as peers:
        for length in lengths:
            x, y = counting(rank, length), noise(seed, length)
            records, _ = _twice(function, None, (x, y), node, peers)
            answers.append({"length": length, **_contents(x, y), **records})
    return answers


@task("6.10", "extra mile: two levels", points=2)
def hierarchical(ranks: Ranks, report: Report) -> None:
    """First within the machines, then between them, where each rank sends its share only."""
    each = to_each(seed=report.seeds(WORLD))
    cases = [
        {"partition": None, "machines": machines, "lengths": lengths, "each": each}
        for machines, lengths in (*((m, SHORT) for m in MACHINES), (MACHINES[0], [LONG]))
    ]
    for case, members, values in tried(
        ranks, report, probe_hierarchical, cases, _hint_of_levels, world=WORLD
    ):
        of_lengths = _by_length(case, members, values, _hint_of_levels(case))
        sent = functools.partial(_between_machines, case["machines"])
        conduct = functools.partial(_conduct_of_levels, case["machines"])
        report.follow(None, _group(of_lengths, _sums, sent, conduct))


def _hint_of_levels(case: dict) -> str:
    """Return the machines of a case, for a message."""
    return f"on the machines {' and '.join(map(str, case['machines']))}"


def _conduct_of_levels(machines: list[list[int]], answers: Answers) -> Iterator[Wrong]:
    """Yield who does not keep to messages, in the groups node and across, and waited for."""
    groups = [*machines, *_across(machines)]
    for _, rank, answer in answers.of_ranks():
        node, across = (members for members in groups if rank in members)
        rules = only("send", "recv"), waited, _on_levels(node, across)
        said = broken(answer["calls"], *rules) or broken(answer["calls again"], *rules)
        if said:
            yield Wrong(said, rank, "communication")


def _on_levels(node: list[int], across: list[int]) -> Rule:
    """Return the rule that all messages are in one of a rank's two groups."""

    def rule(calls: Calls) -> str | None:
        groups = [call["group"] for call in calls]
        strange = [group for group in groups if group not in (node, across)]
        if not strange:
            return None
        return (
            f"it has a message in the group of ranks {strange[0]}: node has the ranks {node} and "
            f"across the ranks {across}"
        )

    return rule


def _between_machines(machines: list[list[int]], run: Traffic) -> Iterator[Step]:
    """Yield the steps that a rank sends 2(m − 1)/m of its part to other machines.

    All of them together send 2(m − 1)n.
    """
    many, size = len(machines), len(machines[0])
    part = -(-run.length // size)
    most = 2 * (many - 1) * -(-part // many) * run.element
    away = [_bytes_away(machines, rank, calls) for _, rank, calls in run.of_ranks()]
    yield none_of(
        run.wrong(
            f"it sent {nbytes} bytes to other machines, at most {most} are needed: after the "
            f"reduce-scatter within the machine a rank adds up one of {size} parts with its places "
            "on the other machines",
            rank,
        )
        for rank, nbytes in zip(run.members, away, strict=True)
        if nbytes > most
    )
    between, expected = sum(away), 2 * (many - 1) * run.nbytes
    too_many_between = (
        f"{between} bytes went from machine to machine, expected {expected}: between the machines, "
        "too, the ring or the direct way sends fewer bytes than a crossbar"
    )
    yield run.of_all({too_many_between: between != expected})
    within = sum(sum(bytes_to(calls).values()) for calls in run.calls) - between
    needed = 2 * many * (size - 1) * run.nbytes
    too_many_within = (
        f"{within} bytes travelled within machines, and {needed} are enough: a reduce-scatter "
        "before the way to the other machines, an all-gather after it"
    )
    yield run.of_all({too_many_within: within > needed})


def _bytes_away(machines: list[list[int]], rank: int, calls: Calls) -> int:
    """Return how many bytes a rank sends to other machines."""
    home = next(machine for machine in machines if rank in machine)
    return sum(nbytes for to, nbytes in bytes_to(calls).items() if to not in home)
