"""Checks of lab 06: all-reduce from messages.

Each all-reduce is tried in groups of 1, 2, 3, 4 and 6 ranks, on short tensors and on one that is
too long to be sent before anybody receives it. It runs twice, see :mod:`.group_sums`. A short
tensor comes a third time, with whole numbers that no float holds.

The check reads from the records of both runs what was sent to whom. No verdict depends on how long
something took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.calls import Calls, Rule, broken, inside, only, some, waited
from utils.checks.groups import (
    Group,
    GroupAnswer,
    group_of,
    in_group,
    judge_groups,
    keywords,
    on,
)
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, recorded, told
from utils.checks.steps import Step, Wrong, communication, facts, none_of
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks

from .costs import cost as cost
from .costs import duration as duration
from .group_sums import (
    ALL,
    BASE,
    IN_FOURS,
    IN_THREES,
    LONG,
    MISPLACED,
    SHORT,
    WORLD,
    Answers,
    Sent,
    Traffic,
    all_right_so_far,
    bytes_to,
    is_near,
    judge_sums,
    parts,
    refuse_gaps,
    replies,
    sends,
    short_and_long,
    stretches,
    sums,
    total,
    wrong_part,
)

# -- an all-reduce: 6.1, 6.2, 6.5, 6.9 --------------------------------------------------------


@in_group
def probe_all_reduce(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, name: str, lengths: list[int]
) -> list[dict]:
    """Call the function of this name on tensors of several lengths."""
    tensors = parts(dist.get_rank(group), seed)
    return replies(answer_named(user_ns, name), partition, group, lengths, tensors)


def _judge_all_reduce(
    ranks: Ranks, report: Report, name: str, sent: Sent, cases: Iterable[dict[str, Any]]
) -> None:
    """Judge values, then what was sent; in the end sums of whole numbers that no float holds."""
    named = (case | {"name": name} for case in cases)
    judge_sums(ranks, report, probe_all_reduce, named, sent)
    if all_right_so_far(report):
        case = {"partition": IN_FOURS, "name": name, "each": to_each(seed=report.seeds(WORLD))}
        hint = "with tensors of int64. Those of float32 and float64 passed: x may have any dtype"
        judge_groups(ranks, report, probe_whole, [case], _whole_sum, lambda _: hint, world=WORLD)


@in_group
def probe_whole(user_ns: dict, *, rank: int, group: Group, partition, seed: int, name: str) -> dict:
    """Call the function of this name on large whole numbers."""
    x = _whole(seed)
    _, calls = recorded(answer_named(user_ns, name), x[:], **keywords(partition, group))
    return {"sum": x.tolist(), "calls": calls}


def _whole(seed: int) -> torch.Tensor:
    """Return whole numbers that follow from a rank's seed; floats lose their last digits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**57, 2**58, SHORT[:1], generator=generator)


def _whole_sum(answer: GroupAnswer) -> Iterator[Step]:
    """Yield the steps that large whole numbers are added up in their own type."""
    members = answer.members
    rules = only("send", "recv"), inside(members), waited, some(members)
    yield communication(answer.value["calls"], *rules)
    seeds = [answer.case["each"][rank]["seed"] for rank in members]
    true = sum(_whole(seed) for seed in seeds).tolist()
    words = (
        f"{on(members)}: of large whole numbers (int64) x is not the sum. float64 has 53 bits for "
        "their digits, int64 has 63: add in the dtype of x"
    )
    yield none_of([Wrong(words, answer.rank, "value")] if answer.value["sum"] != true else [])


# Of a run and a group rank: bytes to each group rank that gets something.
Plan = Callable[[Traffic, int], dict[int, int]]


def _by_plan(plan: Plan, why: str, rounds: int = 0) -> Sent:
    """Return the judge that ranks send exactly these bytes to these ranks.

    Args:
        plan: what each rank has to send.
        why: what the algorithm does, in words; in braces the first rank.
        rounds: in how many rounds a rank sends to all others, beginning with the one behind it; 0
            if that is not what the algorithm does. Then one message to each rank is enough.
    """

    def judge(run: Traffic) -> Iterator[Step]:
        yield run.each(lambda place, calls: _off_plan(run, plan(run, place), calls, why, rounds))
        yield run.each(lambda place, calls: _out_of_turn(run, place, calls, rounds))

    return judge


def _off_plan(
    run: Traffic, plan: dict[int, int], calls: Calls, why: str, rounds: int
) -> str | None:
    """Return what a rank sends besides the plan, or in more messages than needed."""
    wanted = {run.members[to]: nbytes for to, nbytes in plan.items()}
    sent = bytes_to(calls)
    count = len(sends(calls))
    if sent != wanted:
        why = why.format(run.members[0])
        return f"expected to send {_sent(wanted)}; it sent {_sent(sent)}. {why}"
    if count > len(wanted) and not rounds:
        return (
            f"it sent {count} messages, expected {len(wanted)}: one to each of these ranks, as "
            "every message costs a latency"
        )
    return None


def _out_of_turn(run: Traffic, place: int, calls: Calls, rounds: int) -> str | None:
    """Say if the k-th message of a round does not go to the k-th place behind a rank's own."""
    peers = [call["peer"] for call in sends(calls)]
    wanted = [run.members[(place + k) % run.size] for k in range(1, run.size)] * rounds
    if not rounds or peers == wanted:
        return None
    return (
        f"it sent to ranks {peers}, one after the other; expected {wanted}: in the k-th message to "
        "place (r + k) mod p, so that not all begin with the same place"
    )


def _sent(by_rank: dict[int, int]) -> str:
    """Return ``20 bytes to rank 1, 40 bytes to rank 2``."""
    words = [f"{nbytes} bytes to rank {rank}" for rank, nbytes in sorted(by_rank.items())]
    return ", ".join(words) or "nothing"


def _crossbar_plan(run: Traffic, place: int) -> dict[int, int]:
    """Return what a place sends to every other one: the whole tensor."""
    return {other: run.nbytes for other in range(run.size) if other != place}


@task("6.1", "crossbar", points=2)
def crossbar(ranks: Ranks, report: Report) -> None:
    """Check that everyone sends everyone the whole tensor, once."""
    why = "In a crossbar each rank sends its own tensor to every other rank of the group, once"
    sent = _by_plan(_crossbar_plan, why, rounds=1)
    _judge_all_reduce(ranks, report, "crossbar", sent, short_and_long(report))


def _central_plan(run: Traffic, place: int) -> dict[int, int]:
    """Return what a place sends to place 0, or place 0 to every other one."""
    return {0: run.nbytes} if place else _crossbar_plan(run, 0)


@task("6.2", "a central reducer", points=2)
def central(ranks: Ranks, report: Report) -> None:
    """Check that everything goes to place 0 and back."""
    why = "Each rank sends its tensor to the group's first rank, here {}, which sends the sum back"
    sent = _by_plan(_central_plan, why)
    _judge_all_reduce(ranks, report, "central", sent, short_and_long(report))


def _direct_plan(run: Traffic, place: int) -> dict[int, int]:
    """Return what a place sends to every other one: that one's part, and its own part."""
    nbytes = [length * run.element for length in chunk_lengths(run.length, run.size)]
    return {other: part + nbytes[place] for other, part in enumerate(nbytes) if other != place}


@task("6.5", "the direct all-reduce", points=2)
def direct(ranks: Ranks, report: Report) -> None:
    """Check for the ring's bytes in two steps: part k straight to place k, its sum back."""
    why = (
        "In the first round part k goes straight to place k of the group; in the second round each "
        "place sends the sum of its own part to every other place"
    )
    sent = _by_plan(_direct_plan, why, rounds=2)
    _judge_all_reduce(ranks, report, "direct", sent, short_and_long(report))


# -- the ring: 6.3 and 6.4 --------------------------------------------------------------------


def _ring(run: Traffic) -> Iterator[Step]:
    """Yield the steps that a rank has one neighbor on each side, and sends p − 1 chunks.

    They may travel in any direction.
    """
    size = run.size
    yield run.each(lambda _, calls: _off_the_ring(run, calls))
    travels = f": each chunk travels {size - 1} time{'s' * (size > 2)}"
    yield run.in_all_is((size - 1) * run.nbytes, travels)
    counts = [(rank, len(sends(calls))) for _, rank, calls in run.of_ranks()]
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
    yield run.of_all(same_chunks, not _all_chunks_travel(run))


def _off_the_ring(run: Traffic, calls: Calls) -> str | None:
    """Say if a rank talks to more than one neighbor on a side, or sends more than p − 1 chunks."""
    sent, came = bytes_to(calls), bytes_to(calls, "recv")
    if len(sent) > 1 or len(came) > 1:
        verb, others = ("sends to", sent) if len(sent) > 1 else ("receives from", came)
        return (
            f"it {verb} ranks {sorted(others)}. On a ring each rank sends to one neighbour and "
            "receives from the other"
        )
    nbytes = sum(sent.values())
    most = (run.size - 1) * -(-run.length // run.size) * run.element
    if nbytes > most:
        return (
            f"it sent {nbytes} bytes, at most {most} are needed: {run.size - 1} steps, in each of "
            "them one chunk, not the whole tensor"
        )
    return None


def _all_chunks_travel(run: Traffic) -> bool:
    """Return whether in each step each rank sends another chunk, as far as their sizes tell."""
    size = run.size
    if run.length < size:  # empty chunks need not be sent
        return True
    nbytes = [length * run.element for length in chunk_lengths(run.length, size)]
    sent = [[call["nbytes"] for call in sends(calls)] for calls in run.values]

    def by_turns(first: int, way: int) -> list[list[int]]:
        return [
            [nbytes[(place + first - way * step) % size] for step in range(size - 1)]
            for place in range(size)
        ]

    return any(sent == by_turns(first, way) for first in range(size) for way in (1, -1))


def chunk_lengths(length: int, size: int) -> list[int]:
    """Return how long the chunks ``x.tensor_split(size)`` are."""
    base, longer = divmod(length, size)
    return [base + (k < longer) for k in range(size)]


def chunk(k: int, length: int, size: int) -> slice:
    """Return where ``x.tensor_split(size)[k]`` is in x."""
    lengths = chunk_lengths(length, size)
    return slice(sum(lengths[:k]), sum(lengths[: k + 1]))


@in_group
def probe_reduce_scatter(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, lengths: list[int]
) -> list[dict]:
    """Return what it returns, and which chunks are complete then."""
    size = dist.get_world_size(group)

    def reply(x: torch.Tensor, y: torch.Tensor, mine: Any, again: Any) -> dict[str, Any]:
        return {
            "mine": told(mine),
            "kind": type(mine).__name__,
            "chunks": [stretches(x[chunk(k, len(x), size)]) for k in range(size)],
            "again": again if isinstance(again, int) and 0 <= again < size else None,
            "noise": y,
        }

    function = answer_named(user_ns, "ring_reduce_scatter")
    tensors = parts(dist.get_rank(group), seed)
    return replies(function, partition, group, lengths, tensors, reply=reply)


@task("6.3", "ring: reduce-scatter", points=3)
def ring_reduce_scatter(ranks: Ranks, report: Report) -> None:
    """Check that each rank ends with another chunk that is complete, and says which."""
    cases = short_and_long(report)
    judge_sums(ranks, report, probe_reduce_scatter, cases, _ring, results=_chunks)


def _chunks(answers: Answers) -> Iterator[Step]:
    """Yield the steps that each rank has a complete chunk, and neighbors have neighboring ones."""
    size = answers.size
    yield answers.each(lambda place, reply: _why_chunk(answers, place, reply))
    mine = [reply["mine"] for reply in answers.values]
    returned = f"{answers.where}: the chunks returned are {mine} in the order of the ranks. "
    each_once = f"{returned}Each of 0 to {size - 1} must be complete on one rank"
    neighbours = (
        f"{returned}Neighbours on the ring must end with neighbouring chunks, or the all-gather "
        "cannot go on from there"
    )
    yield facts({each_once: sorted(mine) != list(range(size))})
    yield facts({neighbours: any((mine[k] - mine[0] - k) % size for k in range(size))})


def _why_chunk(answers: Answers, place: int, reply: dict[str, Any]) -> str | None:
    """Return what is wrong with the chunk that a rank said to be complete."""
    size = answers.size
    mine = reply["mine"]
    if mine is None:
        return "returned None: return the number of the chunk that is complete on this rank"
    if not isinstance(mine, int) or isinstance(mine, bool):
        return f"returned a {reply['kind']}: return the number of the complete chunk, an int"
    if not 0 <= mine < size:
        return f"returned chunk {mine}; chunks are numbered 0 to {size - 1}: take it modulo p"
    found = reply["chunks"][mine]
    refuse_gaps(found, chunk_lengths(answers.length, size)[mine])
    wrong = [wrong_part(number, size) for *_, number in found if number != total(size)]
    if wrong:
        words = wrong[0].format(*answers.members)
        return f"returned chunk {mine}, whose elements {words}. {_instead(reply, place, size)}"
    again = reply["again"]
    if again is not None:
        part = chunk(again, answers.length, size)
        if is_near(reply["noise"], answers.seeds, answers.length, part):
            return None
    return f"of random numbers chunk {mine} {MISPLACED}"


def _instead(reply: dict[str, Any], place: int, size: int) -> str:
    """Return what a rank has instead of the chunk that it said to be complete."""
    numbers = [{number for *_, number in chunk} for chunk in reply["chunks"]]
    if {total(size)} in numbers:
        return f"Complete on this rank is chunk {numbers.index({total(size)})}"
    if size > 1 and set().union(*numbers) == {BASE**place}:
        return (
            "x is this rank's own tensor, unchanged: add into the chunks of x themselves, with +=, "
            "and not into copies or new tensors"
        )
    return (
        "No chunk is complete on this rank. In each of the p − 1 steps a rank sends the chunk that "
        "it has added to in the step before, and adds what comes to the chunk of the same number"
    )


def _own_chunk(k: int, length: int, size: int, seed: int) -> torch.Tensor:
    """Return what chunk k must contain after the all-gather: it tells chunk and element.

    Args:
        seed: of the rank that has it at the start. All numbers are exact in float32.
    """
    part = chunk(k, length, size)
    return 1.0 + torch.arange(part.start, part.stop) + 20_000 * (k + 1 + 8 * (seed % 100))


OLD = -1.0


@in_group
def probe_all_gather(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, lengths: list[int], ahead: int
) -> list[dict]:
    """Return all chunks afterwards; before, this rank has one only."""
    size = dist.get_world_size(group)
    mine = (dist.get_rank(group) + ahead) % size

    def tensors(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((length,), OLD)
        x[chunk(mine, length, size)] = _own_chunk(mine, length, size, seed)
        return x, x.double() / 3  # float32 does not hold it

    def reply(x: torch.Tensor, double: torch.Tensor, *_: Any) -> dict[str, Any]:
        return {"mine": mine, "x": x, "alike": torch.equal(double, x.double() / 3)}

    function = answer_named(user_ns, "ring_all_gather")
    return replies(function, partition, group, lengths, tensors, mine, reply=reply)


@task("6.4", "ring: all-gather", points=2)
def ring_all_gather(ranks: Ranks, report: Report) -> None:
    """Check that every rank ends with all chunks, whichever was its own at the start."""
    cases = [case | {"ahead": k} for k, case in enumerate(short_and_long(report), 1)]
    cases.insert(1, cases[0] | {"ahead": 0})
    judge_sums(ranks, report, probe_all_gather, cases, _ring, results=_gathered)


def _gathered(answers: Answers) -> Iterator[Step]:
    """Yield the step that every rank has all chunks, in both runs."""
    mine = [reply["mine"] for reply in answers.values]
    seed_of = dict(zip(mine, answers.seeds, strict=True))
    size = answers.size
    contents = [_own_chunk(k, answers.length, size, seed_of[k]) for k in range(size)]
    wrong = []
    for _, rank, reply in answers.of_ranks():
        why = _why_gathered(torch.tensor(reply["x"]), reply["mine"], contents)
        if why:
            wrong.append(answers.wrong(why, rank))
        elif not reply["alike"]:
            text = "in double precision the result is another one"
            wrong.append(answers.wrong(text, rank, "value"))
    yield none_of(wrong)


def _why_gathered(x: torch.Tensor, mine: int, contents: list[torch.Tensor]) -> str | None:
    """Return what is wrong with one of the chunks; with the rank's own one first."""
    chunks = x.tensor_split(len(contents))
    wrong = [k for k, right in enumerate(contents) if not torch.equal(chunks[k], right)]
    if not wrong:
        return None
    if mine in wrong:
        return (
            f"chunk {mine}, which was complete on this rank (mine = {mine}), was overwritten. Send "
            "it in the first step, and receive into the one that the neighbour had"
        )
    k = wrong[0]
    if (chunks[k] == OLD).any():
        return (
            f"chunk {k} still has its old content on this rank, which began with mine = {mine}. "
            "Send in each step what came in the step before"
        )
    for other, content in enumerate(contents):
        common = min(len(content), len(chunks[k]))
        if common and torch.equal(chunks[k][:common], content[:common]):
            return (
                f"chunk {k} holds the numbers of chunk {other}: sender and receiver disagree on "
                f"which chunk travels. This rank began with mine = {mine}"
            )
    return f"chunk {k} holds other numbers than the rank that had it complete: copy, not add"


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
    """Return the workers' results, and what everybody sent; `patient`: by the check's workers."""
    function = answer_named(user_ns, "reduction_server")
    place = dist.get_rank(group)
    many = workers[str(dist.get_world_size(group))]
    tensors = parts(place, seed) if place < many else _reducers_own
    if patient and place < many:
        function = patient_worker
    return replies(function, partition, group, lengths, tensors, many, pieces)


def _reducers_own(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a reducer has in its two tensors."""
    return torch.full((length,), REDUCERS_OWN), torch.full((length,), math.nan).double()


def patient_worker(x: torch.Tensor, workers: int, pieces: int, group: Group = None) -> None:
    """Send the next pieces only when the results of the last ones are back: a worker of 6.8.

    A reducer that keeps all results until the last piece has come never gets that piece.
    """
    place = dist.get_rank(group)
    reducers = dist.get_world_size(group) - workers
    parts_of_x = x.tensor_split(reducers * pieces)
    for piece in range(pieces):
        requests = []
        for j in range(reducers):
            turn = (j + place) % reducers
            part = parts_of_x[piece * reducers + turn]
            at = {"group": group, "group_peer": workers + turn}
            requests.append(dist.P2POp(dist.isend, part.clone(), **at))
            requests.append(dist.P2POp(dist.irecv, part, **at))
        for request in dist.batch_isend_irecv(requests):
            request.wait()


@task("6.8", "a reduction server", points=3)
def reduction_server(ranks: Ranks, report: Report) -> None:
    """Check that workers send n bytes, in pieces, and do not all begin with one reducer."""
    names = "partition", "workers", "pieces", "lengths"
    more = {"each": to_each(seed=report.seeds(WORLD)), "patient": False}
    cases = [dict(zip(names, case, strict=True)) | more for case in SERVER_CASES]
    cases.append(cases[3] | {"patient": True})
    words = {"hint": _hint_of_server, "where": _among_workers}
    judge_sums(ranks, report, probe_server, cases, _service, results=_workers_sums, **words)


def _workers_of(case: dict, members: Sequence[int]) -> int:
    """Return how many of the members are workers: the first ones."""
    return case["workers"][str(len(members))]


def _among_workers(case: dict, members: Sequence[int]) -> str:
    """Return where something happened, for a message."""
    return f"{on(members)}, {_workers_of(case, members)} of them workers"


def _hint_of_server(case: dict) -> str:
    """Return what to say of a case in which an error came."""
    where = _among_workers(case, (case["partition"] or [range(WORLD)])[0])
    words = f"{where}, pieces={case['pieces']}, lengths {case['lengths']}"
    if not case["patient"]:
        return words
    return (
        f"{words}. All other cases passed. In this one the workers send their next piece when the "
        "result of the one before is back. A reducer sends the result of a piece as soon as all "
        "parts of that piece have come; it does not wait for the other pieces"
    )


def _workers_sums(answers: Answers) -> Iterator[Step]:
    """Yield the steps that workers have the sum of the workers' tensors, and of nothing else."""
    many = _workers_of(answers.case, answers.members)
    workers = replace(answers, members=answers.members[:many], values=answers.values[:many])

    def reducers_own(_: int, reply: dict[str, Any]) -> str | None:
        numbers = [number for *_, number in reply["sum"]]
        if any(v % 1 == REDUCERS_OWN and v * many != total(many) for v in numbers):
            return "a reducer has added its own x: it has no part, and starts from what comes first"
        return None

    yield workers.each(reducers_own)
    yield from sums(workers)


def _service(run: Traffic) -> Iterator[Step]:
    """Yield the steps that workers share out their pieces, and don't crowd at one reducer."""
    many = _workers_of(run.case, run.members)
    workers, reducers = run.members[:many], run.members[many:]
    of_worker = [_talks_to(reducers, "a worker talks to reducers only"), _shared_out(run, reducers)]
    of_reducer = [_talks_to(workers, "a reducer talks to workers only")]
    yield run.each(lambda place, calls: broken(calls, *(of_worker if place < many else of_reducer)))
    firsts: dict[int, list[int]] = {}
    for rank, calls in zip(workers, run.values[:many], strict=True):
        firsts.setdefault(sends(calls)[0]["peer"], []).append(rank)
    first, crowd = max(firsts.items(), key=lambda pair: len(pair[1]))
    incast = (
        f"the workers {', '.join(map(str, crowd))} all begin with the reducer on rank {first}, "
        "whose link is then the bottleneck (incast), while the other reducers have nothing to do: "
        "let worker i begin with reducer i"
    )
    yield run.of_all(incast, len(crowd) > -(-many // len(reducers)))


def _shared_out(run: Traffic, reducers: list[int]) -> Rule:
    """Return the rule that a worker cuts its tensor into equal pieces for the reducers."""
    pieces = run.case["pieces"]
    most = pieces * -(-run.length // (pieces * len(reducers))) * run.element

    def rule(calls: Calls) -> str | None:
        sent = bytes_to(calls)
        nbytes = sum(sent.values())
        numbers = [sum(call["peer"] == reducer for call in sends(calls)) for reducer in reducers]
        if nbytes != run.nbytes:
            return (
                f"it sent {nbytes} bytes: a worker sends each of its {run.nbytes} bytes once, to "
                "the reducer of the piece that it belongs to"
            )
        if max(sent.values()) > most:
            return (
                f"it sent {_sent(sent)}: the pieces must be shared out evenly, at most {most} "
                f"bytes to each of the {len(reducers)} reducers"
            )
        if set(numbers) != {pieces}:
            return (
                f"with pieces={pieces} expected {pieces} message(s) to each reducer; it sent "
                f"{numbers}: cut x into reducers × pieces parts"
            )
        return None

    return rule


def _talks_to(others: Sequence[int], why: str) -> Rule:
    """Return the rule that a rank has messages with these ranks only."""

    def rule(calls: Calls) -> str | None:
        strange = sorted({call["peer"] for call in calls} - set(others))
        return f"it has a message to or from rank {strange[0]}: {why}" if strange else None

    return rule


# -- 6.9: halving and doubling ----------------------------------------------------------------


@task("6.9", "extra mile: halving and doubling", points=2)
def halving_doubling(ranks: Ranks, report: Report) -> None:
    """Check for the ring's bytes in 2·log₂ p steps, in groups of a power of two."""
    cases = short_and_long(report, ([[0], [1, 2], [3], [4, 5]], IN_FOURS))
    _judge_all_reduce(ranks, report, "halving_doubling", _halving, cases)


def _halving(run: Traffic) -> Iterator[Step]:
    """Yield the steps that all ranks follow the algorithm, and send 2(p − 1)/p of x each."""
    yield run.each(lambda place, calls: _why_not_halving(run, place, calls))
    yield run.in_all_is(2 * (run.size - 1) * run.nbytes)


def _why_not_halving(run: Traffic, place: int, calls: Calls) -> str | None:
    """Return what differs from 2·log₂ p messages to partners at distances 1, 2, 4 …"""
    depth = run.size.bit_length() - 1
    sent = bytes_to(calls)
    nbytes = sum(sent.values())
    peers = [call["peer"] for call in sends(calls)]
    partners = [run.members[place ^ (1 << k)] for k in range(depth)]
    if set(sent) != set(partners):
        return f"it sent to ranks {sorted(sent)}; its partners are {sorted(partners)}"
    if len(peers) != 2 * depth:
        return (
            f"it sent {len(peers)} messages, expected {2 * depth}: one to each partner while the "
            "parts get smaller, and one to each partner on the way back"
        )
    if partners and peers[0] != partners[-1]:
        return (
            f"its first message goes to rank {peers[0]}; begin with the partner at distance p/2, "
            f"here rank {partners[-1]}"
        )
    if nbytes > 2 * run.element * sum(-(-run.length // 2**k) for k in range(1, depth + 1)):
        return (
            f"it sent {nbytes} bytes: halve what travels in each step, and send only the half that "
            "the partner goes on with"
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
    user_ns: dict, *, rank: int, seed: int, lengths: list[int], machines: list, **_: Any
) -> list[dict]:
    """Return the results for several lengths, with groups for the machines that are named."""
    function = answer_named(user_ns, "hierarchical")
    with group_of(machines, rank) as node, group_of(_across(machines), rank) as peers:
        return replies(function, None, None, lengths, parts(rank, seed), node, peers)


@task("6.10", "extra mile: two levels", points=2)
def hierarchical(ranks: Ranks, report: Report) -> None:
    """Check that ranks add up within machines first, and send others their share only."""
    each = to_each(seed=report.seeds(WORLD))
    cases = [
        {"partition": None, "machines": machines, "lengths": lengths, "each": each}
        for machines, lengths in (*((m, SHORT) for m in MACHINES), (MACHINES[0], [LONG]))
    ]
    more = {"rules": _on_levels, "hint": _on_machines, "where": _on_machines}
    judge_sums(ranks, report, probe_hierarchical, cases, _between_machines, **more)


def _on_machines(case: dict, _: Sequence[int] = ()) -> str:
    """Return the machines of a case, for a message."""
    return f"on the machines {' and '.join(map(str, case['machines']))}"


def _on_levels(answers: Answers, rank: int) -> list[Rule]:
    """Return the rules that a rank keeps to messages, waited for, in one of its two groups."""
    machines = answers.case["machines"]
    groups = [*machines, *_across(machines)]
    node, across = (members for members in groups if rank in members)

    def on_levels(calls: Calls) -> str | None:
        strange = [call["group"] for call in calls if call["group"] not in (node, across)]
        if not strange:
            return None
        return (
            f"it has a message in the group of ranks {strange[0]}: node has the ranks {node} and "
            f"across the ranks {across}"
        )

    return [only("send", "recv"), waited, on_levels]


def _between_machines(run: Traffic) -> Iterator[Step]:
    """Yield the steps that a rank sends 2(m − 1)/m of its part to other machines.

    All of them together send 2(m − 1)n.
    """
    machines = run.case["machines"]
    many, size = len(machines), len(machines[0])
    part = -(-run.length // size)
    most = 2 * (many - 1) * -(-part // many) * run.element
    home = {rank: machine for machine in machines for rank in machine}
    away = [
        sum(nbytes for to, nbytes in bytes_to(calls).items() if home[to] != home[rank])
        for _, rank, calls in run.of_ranks()
    ]

    def too_far(place: int, _: Calls) -> str | None:
        if away[place] <= most:
            return None
        return (
            f"it sent {away[place]} bytes to other machines, at most {most} are needed: after the "
            f"reduce-scatter within the machine a rank adds up one of {size} parts with its places "
            "on the other machines"
        )

    yield run.each(too_far)
    between = sum(away)
    expected = 2 * (many - 1) * run.nbytes
    too_many_between = (
        f"{between} bytes went from machine to machine, expected {expected}: between the machines, "
        "too, the ring or the direct way sends fewer bytes than a crossbar"
    )
    yield run.of_all(too_many_between, between != expected)
    within = run.in_all - between
    needed = 2 * many * (size - 1) * run.nbytes
    too_many_within = (
        f"{within} bytes travelled within machines, and {needed} are enough: a reduce-scatter "
        "before the way to the other machines, an all-gather after it"
    )
    yield run.of_all(too_many_within, within > needed)
