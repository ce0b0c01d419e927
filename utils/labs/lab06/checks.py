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

import torch
import torch.distributed as dist

from utils.checks import functions
from utils.checks.calls import Calls, Rule, broken, inside, only, some, waited
from utils.checks.groups import Group, group_of, in_group, keywords, on, partitions, tried
from utils.checks.mistakes import Mistake, is_number
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, recorded, told
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks

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
    """The tensor of the rank at this place of the group: of a sum, digit q counts place q."""
    return torch.full((length,), float(BASE**place))


def stretches(x: torch.Tensor) -> list[list]:
    """First element, the one after the last, and value, of each stretch of equal elements."""
    values, lengths = torch.unique_consecutive(x, return_counts=True)
    found, start = [], 0
    for value, length in zip(values[:STRETCHES].tolist(), lengths.tolist(), strict=False):
        found.append([start, start + length, value])
        start += length
    return found


def counts_of(value: float, size: int) -> list[int] | None:
    """How often the element holds the part of each place; `None`: it is no sum of them."""
    if not is_number(value) or not 0 <= value < BASE**size or value != int(value):
        return None
    return [int(value) // BASE**place % BASE for place in range(size)]


def wrong_part(value: float, size: int) -> str | None:
    """What is wrong with an element; `None` if it holds each part once. Places are in braces."""
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
    said = []
    if missing:
        said.append(f"lack the part of {_ranks(missing)}")
    if often:
        times = ", ".join(f"{{{place}}} ({counts[place]} times)" for place in often)
        said.append(f"hold a part more than once: that of rank {times}")
    return " and ".join(said)


def _numbers(length: int) -> str:
    return f"{length} number{'s' * (length != 1)}"


def _ranks(places: Sequence[int]) -> str:
    named = ", ".join(f"{{{place}}}" for place in places)
    return f"rank{'s' * (len(places) > 1)} {named}"


def _elements(start: int, stop: int, length: int) -> str:
    if (start, stop) == (0, length):
        return f"all {length} elements" if length > 1 else "the element"
    return f"elements {start}–{stop - 1}" if stop - start > 1 else f"element {start}"


def why_sum(found: list[list], place: int, members: Sequence[int], length: int) -> str | None:
    """What is wrong with a result, told by :func:`stretches`."""
    size = len(members)
    _refuse_gaps(found, length)
    if size > 1 and [stretch[2] for stretch in found] == [BASE**place]:
        return (
            "x is this rank's own tensor, unchanged. The result has to come to every rank, and "
            "into x itself: x.copy_(…) or x += …, not x = …"
        )
    for start, stop, value in found:
        said = wrong_part(value, size)
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
    """Whole numbers that follow from a rank's own seed; as floats they lose their last digits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**57, 2**58, (length,), generator=generator)


def noise(seed: int, length: int) -> torch.Tensor:
    """Random numbers of double precision, which follow from a rank's own seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, dtype=torch.float64, generator=generator)


def is_near(value: dict, seeds: Sequence[int], part: slice = slice(None)) -> bool:
    """Whether this part of what a rank told of its ``noise`` is the sum of all ranks' noise."""
    true = sum(noise(seed, value["length"]) for seed in seeds)[part]
    got = torch.tensor(value["noise"][part], dtype=torch.float64)
    return got.shape == true.shape and torch.allclose(got, true, rtol=0, atol=1e-9)


def seeds_of(case: dict, members: Sequence[int]) -> list[int]:
    """The seeds that ranks were told in a case."""
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


def _runs(values: Sequence[dict], length: int) -> Iterator[list[dict]]:
    """Yield what the ranks told, once with the calls of each run and the bytes of its tensor."""
    for calls, size in (("calls", FLOAT), ("calls again", DOUBLE)):
        yield [value | {"calls": value[calls], "nbytes": size * length} for value in values]


def _of_lengths(case: dict, values: Sequence[list]) -> Iterator[tuple[int, tuple[dict, ...]]]:
    """Yield each length that was asked for, and what the ranks of a group told of it."""
    for length, *of_ranks in zip(case["lengths"], *values, strict=True):
        yield length, tuple(value | {"length": length} for value in of_ranks)


def _cases(report: Report, among: Iterable = (), **given) -> Iterator[dict]:
    """Short tensors on all ranks, in groups of all sizes, then a long one."""
    given["each"] = to_each(seed=report.seeds(WORLD))
    for partition in among or (None, MIXED, IN_FOURS):
        yield {"partition": partition, "lengths": SHORT} | given
    yield {"partition": IN_FOURS, "lengths": [LONG]} | given


def _hint(case: dict) -> str:
    """What to say of a case in which an error came."""
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
    ranks: Ranks, report: Report, name: str, judge_traffic: Callable, among=()
) -> None:
    """Values, then what was sent; the smallest case that is wrong is told."""
    cases = _cases(report, among, name=name)
    answers = tried(ranks, report, probe_all_reduce, cases, _hint, world=WORLD)
    for case, members, values in answers:
        seeds = seeds_of(case, members)
        for length, of_a_length in _of_lengths(case, values):
            where = f"{on(members)}, {_numbers(length)}"
            if not _judge_conduct(report, members, of_a_length):
                break
            if not _judge_sums(report, members, of_a_length, seeds, where):
                break
            _judge_both(report, judge_traffic, members, of_a_length, where)
            if report.found:
                break
    if not report.found:
        _judge_whole(ranks, report, name)


def _judge_whole(ranks: Ranks, report: Report, name: str) -> None:
    """Sums of whole numbers that no float holds."""
    each = to_each(seed=report.seeds(WORLD))
    case = {"partition": IN_FOURS, "name": name, "each": each}
    hint = "with tensors of int64. Those of float32 and float64 passed: x may have any dtype"
    for _, members, values in tried(
        ranks, report, probe_whole, [case], lambda _: hint, world=WORLD
    ):
        true = sum(whole(each[rank]["seed"], SHORT[0]) for rank in members).tolist()
        rules = only("send", "recv"), inside(members), waited, some(members)
        for rank, value in zip(members, values, strict=True):
            kept = report.communication(rank, value["calls"], *rules)
            if kept and value["sum"] != true:
                said = (
                    f"{on(members)}: of large whole numbers (int64) x is not the sum. float64 has "
                    "53 bits for their digits, int64 has 63: add in the dtype of x"
                )
                report.problem(said, rank, "value")


def _judge_both(
    report: Report, judge: Callable, members: list[int], values: Sequence[dict], where: str, *more
) -> None:
    """Judge what was sent in the first run, and if that is right, in the second."""
    for run in _runs(values, values[0]["length"]):
        if not report.found:
            judge(report, members, run, *more, where)


def _judge_conduct(report: Report, members: list[int], values: Sequence[dict]) -> bool:
    """Messages only, in the group, and waited for, in both runs."""
    for rank, value in zip(members, values, strict=True):
        rules = only("send", "recv"), inside(members), waited
        said = broken(value["calls"], *rules) or broken(value["calls again"], *rules)
        if said:
            report.problem(said, rank, "communication")
    return not report.found


def _judge_sums(
    report: Report, members: list[int], values: Sequence[dict], seeds: list[int], where: str
) -> bool:
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        said = why_sum(value["sum"], place, members, value["length"])
        if said:
            report.problem(f"{where}: {said}", rank, "mistake")
        elif not is_near(value, seeds):
            report.problem(
                f"{where}: of random numbers x is not the sum. Each number is added up the right "
                "number of times, but something lands in a wrong place, or loses its precision",
                rank,
                "value",
            )
    if not report.found and len({value["bits"] for value in values}) > 1:
        report.problem(
            f"{where}: the results are not the same bits on all ranks. Floating-point sums depend "
            "on the order of addition: add in the same order on every rank, or let one rank add "
            "and send the result",
            kind="value",
        )
    return not report.found


def bytes_to(calls: Calls, op: str = "send") -> dict[int, int]:
    """Bytes of this operation by the other rank (global)."""
    found: dict[int, int] = {}
    for call in calls:
        if call["op"] == op:
            found[call["peer"]] = found.get(call["peer"], 0) + call["nbytes"]
    return found


def _by_plan(plan: Plan, why: str, rounds: int = 0) -> Callable:
    """Judge the traffic: exactly these bytes to these ranks.

    rounds: in how many rounds a rank sends to all others, beginning with the one behind it; 0 if
    that is not what the algorithm does.
    """

    def judge(report: Report, members: list[int], values: Sequence[dict], where: str) -> None:
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            planned = plan(place, len(members), value["nbytes"])
            wanted = {members[to]: nbytes for to, nbytes in planned.items()}
            got = bytes_to(value["calls"])
            if got != wanted:
                said = (
                    f"{where}: expected to send {_sent(wanted)}; it sent {_sent(got)}. "
                    f"{why.format(members[0])}"
                )
                report.problem(said, rank, "communication")
                continue
            count = sum(call["op"] == "send" for call in value["calls"])
            if not rounds and count > len(wanted):
                said = (
                    f"{where}: it sent {count} messages, expected {len(wanted)}: one to each of "
                    "these ranks, as every message costs a latency"
                )
                report.problem(said, rank, "communication")
        if rounds and not report.found:
            _judge_turns(report, members, values, rounds, where)

    return judge


def _judge_turns(
    report: Report, members: list[int], values: Sequence[dict], rounds: int, where: str
) -> None:
    """In the k-th message of each round to the k-th place behind one's own."""
    size = len(members)
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        sends = [call["peer"] for call in value["calls"] if call["op"] == "send"]
        wanted = [members[(place + k) % size] for _ in range(rounds) for k in range(1, size)]
        if sends != wanted:
            said = (
                f"{where}: it sent to ranks {sends}, one after the other; expected {wanted}: in "
                "the k-th message to place (r + k) mod p, so that not all begin with the same place"
            )
            report.problem(said, rank, "communication")


def _sent(by_rank: dict[int, int]) -> str:
    """``20 bytes to rank 1, 40 bytes to rank 2``."""
    words = [f"{nbytes} bytes to rank {rank}" for rank, nbytes in sorted(by_rank.items())]
    return ", ".join(words) or "nothing"


def _crossbar_plan(place: int, size: int, nbytes: int) -> dict[int, int]:
    return {other: nbytes for other in range(size) if other != place}


@task("6.1", "crossbar", points=2)
def crossbar(ranks: Ranks, report: Report) -> None:
    """Everyone sends everyone the whole tensor, once."""
    why = "In a crossbar each rank sends its own tensor to every other rank of the group, once"
    _judge_all_reduce(ranks, report, "crossbar", _by_plan(_crossbar_plan, why, rounds=1))


def _central_plan(place: int, size: int, nbytes: int) -> dict[int, int]:
    return {0: nbytes} if place else {other: nbytes for other in range(1, size)}


@task("6.2", "a central reducer", points=2)
def central(ranks: Ranks, report: Report) -> None:
    """Everything to place 0 and back."""
    why = "Each rank sends its tensor to the group's first rank, here {}, which sends the sum back"
    _judge_all_reduce(ranks, report, "central", _by_plan(_central_plan, why))


def _direct_plan(place: int, size: int, nbytes: int, element: int) -> dict[int, int]:
    length = nbytes // element
    parts = [len(range(length)[chunk(k, length, size)]) for k in range(size)]
    there = {other: (parts[other] + parts[place]) * element for other in range(size)}
    return {other: sent for other, sent in there.items() if other != place}


def _direct_rules(report: Report, members: list[int], values: Sequence[dict], where: str) -> None:
    """Two messages to each other place: its part of this rank's tensor, and the sum of a part."""
    why = (
        "In the first round part k goes straight to place k of the group; in the second round each "
        "place sends the sum of its own part to every other place"
    )
    element = values[0]["nbytes"] // values[0]["length"]
    plan = functools.partial(_direct_plan, element=element)
    _by_plan(plan, why, rounds=2)(report, members, values, where)


@task("6.5", "the direct all-reduce", points=2)
def direct(ranks: Ranks, report: Report) -> None:
    """The ring's bytes in two steps: part k straight to place k, and its sum straight back."""
    _judge_all_reduce(ranks, report, "direct", _direct_rules)


# -- the ring: 6.3 and 6.4 --------------------------------------------------------------------


def ring_rules(report: Report, members: list[int], values: Sequence[dict], where: str) -> None:
    """One neighbour on each side, p − 1 chunks of each rank, in any direction."""
    size, length = len(members), values[0]["length"]
    nbytes = values[0]["nbytes"]
    most = (size - 1) * -(-length // size) * (nbytes // length)
    in_all = 0
    for rank, value in zip(members, values, strict=True):
        sent, came = (bytes_to(value["calls"], op) for op in ("send", "recv"))
        in_all += sum(sent.values())
        if max(len(sent), len(came)) > 1:
            verb, others = ("sends to", sent) if len(sent) > 1 else ("receives from", came)
            report.problem(
                f"{where}: it {verb} ranks {sorted(others)}. On a ring each rank sends to one "
                "neighbour and receives from the other",
                rank,
                "communication",
            )
        elif sum(sent.values()) > most:
            report.problem(
                f"{where}: it sent {sum(sent.values())} bytes, at most {most} are needed: "
                f"{size - 1} steps, in each of them one chunk, not the whole tensor",
                rank,
                "communication",
            )
    expected = (size - 1) * nbytes
    if not report.found and in_all != expected:
        report.problem(
            f"{where}: all ranks together sent {in_all} bytes, expected {expected}: each chunk "
            f"travels {size - 1} time{'s' * (size > 2)}",
            kind="communication",
        )
    for rank, value in zip(members, values, strict=True):
        count = sum(call["op"] == "send" for call in value["calls"])
        if not report.found and count > size - 1:
            said = f"it sent {count} messages, expected {size - 1}: a chunk is one"
            report.problem(f"{where}: {said}", rank, "communication")
    if not report.found and not _all_chunks_travel(values, size):
        report.problem(
            f"{where}: the ranks do not send different chunks in each step: begin with "
            "neighbouring chunks on neighbouring ranks, so that all links work all the time",
            kind="communication",
        )


def _all_chunks_travel(values: Sequence[dict], size: int) -> bool:
    """Whether in each step each rank sends another chunk, as far as their sizes tell."""
    length, nbytes = values[0]["length"], values[0]["nbytes"]
    if length < size:  # empty chunks need not be sent
        return True
    parts = [len(range(length)[chunk(k, length, size)]) * nbytes // length for k in range(size)]
    sent = [[c["nbytes"] for c in value["calls"] if c["op"] == "send"] for value in values]
    return any(
        sent
        == [[parts[(r + first - way * t) % size] for t in range(size - 1)] for r in range(size)]
        for first in range(size)
        for way in (1, -1)
    )


def chunk(k: int, length: int, size: int) -> slice:
    """Where ``x.tensor_split(size)[k]`` is in x."""
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
    _judge_half(ranks, report, probe_reduce_scatter, _cases(report), _judge_chunks)


def _judge_half(
    ranks: Ranks, report: Report, probe: Callable, cases: list[dict], judge: Callable
) -> None:
    """One half of the ring: conduct, then the chunks, then what was sent to whom."""
    answers = tried(ranks, report, probe, cases, _hint, world=WORLD)
    for case, members, values in answers:
        seeds = seeds_of(case, members)
        for length, of_a_length in _of_lengths(case, values):
            where = f"{on(members)}, {_numbers(length)}"
            if _judge_conduct(report, members, of_a_length):
                judge(report, members, of_a_length, seeds, where)
            _judge_both(report, ring_rules, members, of_a_length, where)
            if report.found:
                break


def _judge_chunks(
    report: Report, members: list[int], values: Sequence[dict], seeds: list[int], where: str
) -> None:
    size = len(members)
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        said = _why_chunk(value, place, members, seeds)
        if said:
            report.problem(f"{where}: {said}", rank, "mistake")
    mine = [value["mine"] for value in values]
    if report.found:
        return
    if sorted(mine) != list(range(size)):
        report.problem(
            f"{where}: the chunks returned are {mine} in the order of the ranks. Each of 0 to "
            f"{size - 1} must be complete on one rank",
            kind="mistake",
        )
    elif any((mine[k] - mine[0] - k) % size for k in range(size)):
        report.problem(
            f"{where}: the chunks returned are {mine} in the order of the ranks. Neighbours on "
            "the ring must end with neighbouring chunks, or the all-gather cannot go on from there",
            kind="mistake",
        )


def _why_chunk(value: dict, place: int, members: list[int], seeds: list[int]) -> str | None:
    """What is wrong with the chunk that is said to be complete."""
    size, mine, kind = len(members), value["mine"], value["kind"]
    if mine is None:
        return "returned None: return the number of the chunk that is complete on this rank"
    if not isinstance(mine, int) or isinstance(mine, bool):
        return f"returned a {kind}: return the number of the complete chunk, an int"
    if not 0 <= mine < size:
        return f"returned chunk {mine}; chunks are numbered 0 to {size - 1}: take it modulo p"
    complete = [k for k in range(size) if _is_complete(value["chunks"][k], size)]
    own = range(value["length"])[chunk(mine, value["length"], size)]
    _refuse_gaps(value["chunks"][mine], len(own))
    wrong = [stretch for stretch in value["chunks"][mine] if wrong_part(stretch[2], size)]
    if not wrong:
        again, length = value["again"], value["length"]
        if again is not None and is_near(value, seeds, chunk(again, length, size)):
            return None
        return (
            f"of random numbers chunk {mine} is not the sum. Each number is added up the right "
            "number of times, but something lands in a wrong place, or loses its precision"
        )
    words = wrong_part(wrong[0][2], size).format(*members)
    said = f"returned chunk {mine}, whose elements {words}"
    filled = [k for k in complete if value["chunks"][k]]
    if filled:
        return f"{said}. Complete on this rank is chunk {filled[0]}"
    if size > 1 and {v for found in value["chunks"] for *_, v in found} == {BASE**place}:
        return (
            f"{said}. x is this rank's own tensor, unchanged: add into the chunks of x themselves, "
            "with +=, and not into copies or new tensors"
        )
    return (
        f"{said}. No chunk is complete on this rank. In each of the p − 1 steps a rank sends the "
        "chunk that it has added to in the step before, and adds what comes to the chunk of the "
        "same number"
    )


def _is_complete(found: list[list], size: int) -> bool:
    return all(wrong_part(value, size) is None for *_, value in found)


def _own_chunk(k: int, length: int, size: int, seed: int) -> torch.Tensor:
    """What chunk k must contain after the all-gather: numbers that tell chunk and element.

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
    """``"right"``, ``"old"``, ``"other"``, or the number of another chunk."""
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
    _judge_half(ranks, report, probe_all_gather, cases, _judge_gathered)


def _judge_gathered(
    report: Report, members: list[int], values: Sequence[dict], seeds: list[int], where: str
) -> None:
    size, of_chunk = len(members), {value["mine"]: k for k, value in enumerate(values)}
    contents = [_own_chunk(k, values[0]["length"], size, seeds[of_chunk[k]]) for k in range(size)]
    for rank, value in zip(members, values, strict=True):
        mine, x = value["mine"], torch.tensor(value["x"])
        found = [_what_is_in(x, k, contents) for k in range(size)]
        wrong = [(k, what) for k, what in enumerate(found) if what != "right"]
        if not wrong:
            if not value["alike"]:
                said = "in double precision the result is another one"
                report.problem(f"{where}: {said}", rank, "value")
            continue
        k, what = next((pair for pair in wrong if pair[0] == mine), wrong[0])
        if k == mine:
            said = (
                f"chunk {k}, which was complete on this rank (mine = {k}), was overwritten. Send "
                "it in the first step, and receive into the one that the neighbour had"
            )
        elif what == "old":
            said = (
                f"chunk {k} still has its old content on this rank, which began with mine = "
                f"{mine}. Send in each step what came in the step before"
            )
        elif isinstance(what, int):
            said = (
                f"chunk {k} holds the numbers of chunk {what}: sender and receiver disagree on "
                f"which chunk travels. This rank began with mine = {mine}"
            )
        else:
            said = (
                f"chunk {k} holds other numbers than the rank that had it complete: copy, not add"
            )
        report.problem(f"{where}: {said}", rank, "mistake")


# -- 6.6: messages, bytes, steps --------------------------------------------------------------

ALGORITHMS = ("crossbar", "central", "tree", "ring", "direct")
COUNTS = ("messages", "bytes", "busiest", "steps")


def true_cost(algorithm: str, p: int, n: int) -> dict[str, int]:
    """Messages and bytes of all ranks, bytes of the busiest sender, steps in a row."""
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
        told_of = set()
        for (name, p, n), got in zip(cases, answer.value, strict=True):
            if name in told_of:
                continue
            what, true = f"cost({name!r}, {p}, {n})", true_cost(name, p, n)
            if not isinstance(got, list) or len(got) != len(COUNTS):
                report.problem(
                    f"{what} returned {got}: return four numbers, messages, bytes, bytes of the "
                    "busiest rank, steps",
                    answer.rank,
                )
                told_of.add(name)
                continue
            if got != list(true) and sorted(map(str, got)) == sorted(map(str, true)):
                said = f"{what}: the four numbers are right, and their order is not: {COUNTS}"
                report.problem(said.replace("'", ""), answer.rank, "mistake")
                told_of.add(name)
                continue
            for key, one, expected in zip(COUNTS, got, true, strict=True):
                wrong = list(_wrong_counts(name, key, p, n, true))
                if not report.judge(answer.rank, one, expected, wrong, what=f"{what}, {key}"):
                    told_of.add(name)


def _wrong_counts(name: str, key: str, p: int, n: int, true: Sequence[int]) -> Iterator[Mistake]:
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
    for said, gives in values.items():
        if gives is not None and gives != dict(zip(COUNTS, true, strict=True))[key]:
            yield Mistake(gives, said)


# -- 6.7: seconds -----------------------------------------------------------------------------


def true_duration(algorithm: str, p: int, n: int, alpha: float, beta: float) -> float:
    """α–β: seconds, where each rank sends, and receives, one message at a time."""
    *_, steps = true_cost(algorithm, p, n)
    return steps * (alpha + _at_a_time(algorithm, p) * n * beta)


def _at_a_time(algorithm: str, p: int) -> float:
    """How many tensors the busiest link carries in a step."""
    shares = {"crossbar": p - 1, "central": p - 1, "tree": 1, "ring": 1 / p, "direct": (p - 1) / p}
    return shares[algorithm]


def true_crossover(p: int, alpha: float, beta: float) -> float:
    """Bytes from which on the direct all-reduce is faster than the crossbar."""
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
    """JSON has no infinity."""
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
        told_of = set()
        for (name, p, n, alpha, beta), got in zip(cases, answer.value["duration"], strict=True):
            what = f"duration({name!r}, {p}, {n}, {alpha:.3g}, {beta:.3g})"
            expected = true_duration(name, p, n, alpha, beta)
            wrong = _wrong_durations(name, p, n, alpha, beta)
            if name not in told_of and not _judge_scaled(
                report, answer.rank, got, expected, wrong, what
            ):
                told_of.add(name)
        for (p, alpha, beta), got in zip(networks, answer.value["crossover"], strict=True):
            what = f"crossover({p}, {alpha:.3g}, {beta:.3g})"
            if not _judge_crossover(report, answer.rank, got, p, alpha, beta, what):
                break


def _judge_scaled(report: Report, rank: int, got, expected: float, wrong, what: str) -> bool:
    """In units of what is expected: a few milliseconds must be right to a share of them."""
    if not is_number(got):
        report.problem(f"{what} returned {got}: return seconds, a number", rank)
        return False
    mistakes = [Mistake(value / expected, said) for said, value in wrong]
    if abs(got / expected - 1) < 1e-6:
        return True
    said = next(
        (m.said for m in mistakes if math.isclose(got / expected, m.gives, rel_tol=1e-6)), ""
    )
    said = said and f"{said}. "
    report.problem(f"{what}: {said}Expected {expected:.6g}, got {got:.6g}", rank, "mistake")
    return False


def _wrong_durations(
    name: str, p: int, n: int, alpha: float, beta: float
) -> Iterator[tuple[str, float]]:
    messages, nbytes, _, steps = true_cost(name, p, n)
    at_a_time = _at_a_time(name, p)
    yield "that is one step, with its latency: count all of them", alpha + at_a_time * n * beta
    yield "each step costs a latency", alpha + steps * at_a_time * n * beta
    if name in ("crossbar", "central"):
        said = "p − 1 messages share one link, and come one after the other"
        yield said, steps * (alpha + n * beta)
        said = "messages that start together share one latency: it is paid once a step"
        yield said, steps * (p - 1) * (alpha + n * beta)
        yield "the links of the ranks work at the same time", messages * (alpha + n * beta)
    if name == "ring":
        said = "a step carries a chunk of n/p bytes, not the whole tensor"
        yield said, steps * (alpha + n * beta)
        yield "all ranks send at the same time", steps * (alpha + n * beta * p)
        yield "reduce-scatter and all-gather: two phases", (p - 1) * (alpha + n * beta / p)
        yield "p − 1 steps in each phase, not p", 2 * p * (alpha + n * beta / p)
    if name == "direct":
        said = "in each of the two steps p − 1 messages share a link, with n/p bytes each"
        yield said, 2 * (alpha + n * beta / p)
        yield (
            "a message carries a part of n/p bytes, not the whole tensor",
            2 * (alpha + (p - 1) * n * beta),
        )
        yield (
            "the messages of a round start at once: two steps",
            2 * (p - 1) * (alpha + n * beta / p),
        )
    if name == "tree":
        depth = p.bit_length() - 1
        yield "the depth is ⌊log₂ p⌋, a whole number", 2 * math.log2(p) * (alpha + n * beta)
        yield "up and down again: twice the depth", depth * (alpha + n * beta)
        yield "the depth is ⌊log₂ p⌋", 2 * (depth + 1) * (alpha + n * beta)
        yield "the messages of a level travel at the same time", messages * (alpha + n * beta)
    yield "give seconds, not milliseconds", 1e3 * steps * (alpha + at_a_time * n * beta)
    yield "β is seconds per byte: multiply by it", steps * (alpha + at_a_time * n / beta)
    yield "n is in bytes already", steps * (alpha + at_a_time * 4 * n * beta)
    yield "these are bytes in all: links work at the same time", steps * alpha + nbytes * beta


def _judge_crossover(
    report: Report, rank: int, got, p: int, alpha: float, beta: float, what
) -> bool:
    if p == 2:
        if got == "inf":
            return True
        report.problem(
            f"{what}: with two ranks both ways send n bytes, and the crossbar has one step less: "
            f"the direct way never wins. Expected math.inf, got {got}",
            rank,
            "mistake",
        )
        return False
    expected, share = true_crossover(p, alpha, beta), (p - 1) * (1 - 2 / p)
    wrong = [
        ("that is the number of float32 values: give bytes", expected / 4),
        ("that is alpha/beta times too much: α enters once", expected * alpha / beta),
        ("α/β is turned over", beta / alpha / share),
        ("the crossbar costs one latency itself: the direct way has one more", 2 * expected),
        (
            "the direct way sends 2(p − 1)/p of the tensor: the difference to (p − 1) counts",
            alpha / beta / (p - 1),
        ),
        ("that is where the latency is half of a message's time", alpha / beta),
        ("that is the crossover of four ranks: use p", true_crossover(4, alpha, beta)),
        ("that is where crossbar and ring meet", expected * (2 * p - 3)),
    ]
    if got == "inf":
        report.problem(
            f"{what}: with more than two ranks the direct way wins at last: it sends less. "
            f"Expected {expected:.6g}, got infinity",
            rank,
            "mistake",
        )
        return False
    return _judge_scaled(report, rank, got, expected, wrong, what)


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
    hint = _hint_of_server
    for case, members, values in tried(ranks, report, probe_server, cases, hint, world=WORLD):
        many, pieces = case["workers"][str(len(members))], case["pieces"]
        for length, of_a_length in _of_lengths(case, values):
            where = f"{on(members)}, {many} of them workers, {_numbers(length)}"
            if _judge_conduct(report, members, of_a_length):
                seeds = seeds_of(case, members[:many])
                _judge_workers(report, members[:many], of_a_length[:many], seeds, where)
            _judge_both(report, _judge_service, members, of_a_length, where, many, pieces)
            if report.found:
                break


def _hint_of_server(case: dict) -> str:
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


def _judge_workers(
    report: Report, workers: list[int], values: Sequence[dict], seeds: list[int], where: str
) -> None:
    """The sum of the workers' tensors, and of nothing else."""
    total = sum(BASE**place for place in range(len(workers)))
    for rank, value in zip(workers, values, strict=True):
        found = [v for *_, v in value["sum"] if v % 1 == REDUCERS_OWN and v * len(workers) != total]
        if found:
            said = "a reducer has added its own x: it has no part, and starts from what comes first"
            report.problem(f"{where}: {said}", rank, "mistake")
    if not report.found:
        _judge_sums(report, workers, values, seeds, where)


def _judge_service(
    report: Report, members: list[int], values: Sequence[dict], many: int, pieces: int, where: str
) -> None:
    workers, reducers, length = members[:many], members[many:], values[0]["length"]
    nbytes = values[0]["nbytes"]
    per_reducer = pieces * -(-length // (pieces * len(reducers))) * (nbytes // length)
    firsts: dict[int, list[int]] = {}
    for rank, value in zip(members, values, strict=True):
        others = reducers if rank in workers else workers
        said = broken(value["calls"], _talks_to(others, rank in workers))
        sent, sends = bytes_to(value["calls"]), [c for c in value["calls"] if c["op"] == "send"]
        if not said and rank in workers:
            total = sum(sent.values())
            numbers = {other: sum(c["peer"] == other for c in sends) for other in reducers}
            if total != nbytes:
                said = (
                    f"it sent {total} bytes: a worker sends each of its {nbytes} bytes "
                    "once, to the reducer of the piece that it belongs to"
                )
            elif max(sent.values()) > per_reducer:
                said = (
                    f"it sent {_sent(sent)}: the pieces must be shared out evenly, at most "
                    f"{per_reducer} bytes to each of the {len(reducers)} reducers"
                )
            elif set(numbers.values()) != {pieces}:
                said = (
                    f"with pieces={pieces} expected {pieces} message(s) to each reducer; it sent "
                    f"{list(numbers.values())}: cut x into reducers × pieces parts"
                )
            else:
                firsts.setdefault(sends[0]["peer"], []).append(rank)
        if said:
            report.problem(f"{where}: {said}", rank, "communication")
    first, crowd = max(firsts.items(), key=lambda pair: len(pair[1]), default=(0, []))
    if not report.found and len(crowd) > -(-many // len(reducers)):
        report.problem(
            f"{where}: the workers {', '.join(map(str, crowd))} all begin with the reducer on rank "
            f"{first}, whose link is then the bottleneck (incast), while the other reducers have "
            "nothing to do: let worker i begin with reducer i",
            kind="communication",
        )


def _talks_to(others: Sequence[int], is_worker: bool) -> Rule:
    """Workers with reducers, reducers with workers."""
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
    _judge_all_reduce(
        ranks,
        report,
        "halving_doubling",
        _halving_rules,
        among=([[0], [1, 2], [3], [4, 5]], IN_FOURS),
    )


def _first_to(calls: Calls) -> int | None:
    return next((call["peer"] for call in calls if call["op"] == "send"), None)


def _halving_rules(report: Report, members: list[int], values: Sequence[dict], where: str) -> None:
    """2·log₂ p messages of each rank, to partners at distances 1, 2, 4 …; 2(p − 1)/p of x."""
    size, length, nbytes = len(members), values[0]["length"], values[0]["nbytes"]
    depth, in_all, element = size.bit_length() - 1, 0, nbytes // length
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        sent = bytes_to(value["calls"])
        partners = {members[place ^ (1 << k)] for k in range(depth)}
        count = sum(call["op"] == "send" for call in value["calls"])
        in_all += sum(sent.values())
        said = ""
        if set(sent) != partners:
            said = f"it sent to ranks {sorted(sent)}; its partners are {sorted(partners)}"
        elif count != 2 * depth:
            said = (
                f"it sent {count} messages, expected {2 * depth}: one to each partner while the "
                "parts get smaller, and one to each partner on the way back"
            )
        elif depth and _first_to(value["calls"]) != members[place ^ (size // 2)]:
            said = (
                f"its first message goes to rank {_first_to(value['calls'])}; begin with the "
                f"partner at distance p/2, here rank {members[place ^ (size // 2)]}"
            )
        elif sum(sent.values()) > 2 * element * sum(
            -(-length // 2**k) for k in range(1, depth + 1)
        ):
            said = (
                f"it sent {sum(sent.values())} bytes: halve what travels in each step, and send "
                "only the half that the partner goes on with"
            )
        if said:
            report.problem(f"{where}: {said}", rank, "communication")
    expected = 2 * (size - 1) * nbytes
    if not report.found and in_all != expected:
        said = f"all ranks together sent {in_all} bytes, expected {expected}"
        report.problem(f"{where}: {said}", kind="communication")


# -- 6.10: two levels -------------------------------------------------------------------------

# The ranks of each machine.
MACHINES = ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 2, 4], [1, 3, 5]])


def _across(machines: list[list[int]]) -> list[list[int]]:
    """The ranks that have the same place in their machines."""
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
    each, everyone = to_each(seed=report.seeds(WORLD)), list(range(WORLD))
    cases = [
        {"partition": None, "machines": machines, "lengths": lengths, "each": each}
        for machines, lengths in (*((m, SHORT) for m in MACHINES), (MACHINES[0], [LONG]))
    ]
    for case, _, values in tried(
        ranks, report, probe_hierarchical, cases, _hint_of_levels, world=WORLD
    ):
        machines, seeds = case["machines"], seeds_of(case, everyone)
        for length, of_a_length in _of_lengths(case, values):
            where = f"{_hint_of_levels(case)}, {_numbers(length)}"
            if not _judge_levels(report, machines, of_a_length):
                break
            if not _judge_sums(report, everyone, of_a_length, seeds, where):
                break
            _judge_both(report, _judge_cables, everyone, of_a_length, where, machines)
            if report.found:
                break


def _hint_of_levels(case: dict) -> str:
    return f"on the machines {' and '.join(map(str, case['machines']))}"


def _judge_levels(report: Report, machines: list[list[int]], values: Sequence[dict]) -> bool:
    """Messages only, in the groups node and across, and waited for, in both runs."""
    groups = [*machines, *_across(machines)]
    for rank, value in enumerate(values):
        mine = [members for members in groups if rank in members]
        for calls in (value["calls"], value["calls again"]):
            said = broken(calls, only("send", "recv"), waited)
            strange = next((c["group"] for c in calls if c["group"] not in mine), None)
            if strange and not said:
                said = (
                    f"it has a message in the group of ranks {strange}: node has the ranks "
                    f"{mine[0]} and across the ranks {mine[1]}"
                )
            if said:
                report.problem(said, rank, "communication")
                break
    return not report.found


def _judge_cables(
    report: Report, members: list[int], values: Sequence[dict], machines: list, where: str
) -> None:
    """Each rank sends 2(m − 1)/m of its part to other machines, and all of them 2(m − 1)n."""
    many, size = len(machines), len(machines[0])
    nbytes, length = values[0]["nbytes"], values[0]["length"]
    part = -(-length // size)
    most, in_all, inside_all = 2 * (many - 1) * -(-part // many) * (nbytes // length), 0, 0
    for rank, value in enumerate(values):
        home = next(machine for machine in machines if rank in machine)
        sent = bytes_to(value["calls"])
        away = sum(n for to, n in sent.items() if to not in home)
        in_all, inside_all = in_all + away, inside_all + sum(sent.values()) - away
        if away > most:
            said = (
                f"{where}: it sent {away} bytes to other machines, at most {most} are needed: "
                f"after the reduce-scatter within the machine a rank adds up one of {size} parts "
                "with its places on the other machines"
            )
            report.problem(said, rank, "communication")
    expected = 2 * (many - 1) * nbytes
    if not report.found and in_all != expected:
        said = (
            f"{where}: {in_all} bytes went from machine to machine, expected {expected}: between "
            "the machines, too, the ring or the direct way sends fewer bytes than a crossbar"
        )
        report.problem(said, kind="communication")
    needed = 2 * many * (size - 1) * nbytes
    if not report.found and inside_all > needed:
        said = (
            f"{where}: {inside_all} bytes travelled within machines, and {needed} are enough: a "
            "reduce-scatter before the way to the other machines, an all-gather after it"
        )
        report.problem(said, kind="communication")
