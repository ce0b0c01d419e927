"""Tasks 6.3 and 6.4: the two halves of the ring all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.comparison import Calls
from utils.checks.probe import answer_named, told
from utils.checks.task import Report, Step, facts, none_of, task
from utils.checks.trials import Group, in_group
from utils.cluster.questions import Ranks

from .group_sums import (
    BASE,
    MISPLACED,
    Answers,
    Traffic,
    bytes_to,
    is_near,
    judge_sums,
    parts,
    refuse_gaps,
    replies,
    sends,
    short_and_long,
    stretches,
    total,
    wrong_part,
)


def _ring(run: Traffic) -> Iterator[Step]:
    """Yield the steps that a rank sends p − 1 chunks to one neighbor, in any direction."""
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
    sent, came = (bytes_to(calls, op) for op in ("send", "recv"))
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
    return [len(part) for part in torch.empty(length).tensor_split(size)]


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
    """Return what chunk k must contain after the all-gather, by its first rank's seed."""
    part = chunk(k, length, size)  # all numbers are exact in float32
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
