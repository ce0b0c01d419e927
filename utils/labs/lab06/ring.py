"""Tasks 6.3 and 6.4: the two halves of the ring all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import Calls
from utils.checks.task import Report, Step, facts, none_of, task
from utils.cluster.questions import Ranks

from .group_sums import (
    MISPLACED,
    Answers,
    Traffic,
    bytes_to,
    is_near,
    judge_sums,
    refuse_gaps,
    sends,
    short_and_long,
    total,
    wrong_part,
)
from .probes import (
    BASE,
    OLD,
    chunk,
    chunk_lengths,
    own_chunk,
    probe_all_gather,
    probe_reduce_scatter,
)


def _ring(run: Traffic) -> Iterator[Step]:
    """Yield the steps that a rank sends p − 1 chunks to one neighbor, in either direction."""
    size = run.size
    yield run.each(lambda _, calls: _off_the_ring(run, calls))
    travels = f", because each chunk travels {size - 1} time{'s' * (size > 2)}"
    yield run.in_all_is((size - 1) * run.nbytes, travels)
    counts = [(rank, len(sends(calls))) for _, rank, calls in run.of_ranks()]
    too_many = [
        run.wrong(f"This rank sent {count} messages. Send {size - 1}, one for each chunk", rank)
        for rank, count in counts
        if count > size - 1
    ]
    yield none_of(too_many[:1])
    same_chunks = (
        "The ranks don't send different chunks in every round. Begin with neighboring chunks on "
        "neighboring ranks, so that all links work all the time"
    )
    yield run.of_all(same_chunks, not _all_chunks_travel(run))


def _off_the_ring(run: Traffic, calls: Calls) -> str | None:
    """Return a problem if a rank has several neighbors on a side, or sends over p − 1 chunks."""
    sent, came = (bytes_to(calls, op) for op in ("send", "recv"))
    if len(sent) > 1 or len(came) > 1:
        verb, others = ("sends to", sent) if len(sent) > 1 else ("receives from", came)
        return (
            f"This rank {verb} ranks {sorted(others)}. On a ring, send to one neighbor and receive "
            "from the other"
        )
    nbytes = sum(sent.values())
    most = (run.size - 1) * -(-run.length // run.size) * run.element
    if nbytes > most:
        return (
            f"This rank sent {nbytes} bytes, but at most {most} are needed. Send one chunk in each "
            f"of {run.size - 1} rounds, not the whole tensor"
        )
    return None


def _all_chunks_travel(run: Traffic) -> bool:
    """Return whether all ranks send different chunks in each round, as far as sizes show."""
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


@task("6.3", "ring: reduce-scatter", points=3)
def ring_reduce_scatter(ranks: Ranks, report: Report) -> None:
    """Check that each rank ends with a different complete chunk, and returns its number."""
    cases = short_and_long(report)
    judge_sums(ranks, report, probe_reduce_scatter, cases, _ring, results=_chunks)


def _chunks(answers: Answers) -> Iterator[Step]:
    """Yield the steps that each rank has a complete chunk, in the order of the ring."""
    size = answers.size
    yield answers.each(lambda place, reply: _why_chunk(answers, place, reply))
    mine = [reply["mine"] for reply in answers.values]
    returned = f"{answers.where}: The ranks returned chunks {mine}, in the order of the ranks. "
    each_once = f"{returned}Complete each of the chunks 0 to {size - 1} on one rank"
    neighbors = (
        f"{returned}Let neighbors on the ring end with neighboring chunks, so that the all-gather "
        "can continue from there"
    )
    yield facts({each_once: sorted(mine) != list(range(size))})
    yield facts({neighbors: any((mine[k] - mine[0] - k) % size for k in range(size))})


def _why_chunk(answers: Answers, place: int, reply: dict[str, Any]) -> str | None:
    """Return what is wrong with the chunk whose number a rank returned."""
    size = answers.size
    mine = reply["mine"]
    if mine is None:
        return "You returned None. Return the number of the chunk that is complete on this rank"
    if not isinstance(mine, int) or isinstance(mine, bool):
        return f"You returned a {reply['kind']}. Return the number of the complete chunk, an int"
    if not 0 <= mine < size:
        return f"You returned {mine}, but chunks have numbers 0 to {size - 1}. Take it modulo p"
    found = reply["chunks"][mine]
    refuse_gaps(found, chunk_lengths(answers.length, size)[mine])
    wrong = [wrong_part(number, size) for *_, number in found if number != total(size)]
    if wrong:
        words = wrong[0].format(*answers.members)
        return f"You returned chunk {mine}, whose elements {words}. {_instead(reply, place, size)}"
    again = reply["again"]
    if again is not None:
        part = chunk(again, answers.length, size)
        if is_near(reply["noise"], answers.seeds, answers.length, part):
            return None
    return f"With random numbers, chunk {mine} {MISPLACED}"


def _instead(reply: dict[str, Any], place: int, size: int) -> str:
    """Return what a rank has instead of a complete chunk with the number that it returned."""
    numbers = [{number for *_, number in chunk} for chunk in reply["chunks"]]
    if {total(size)} in numbers:
        return f"Return {numbers.index({total(size)})}, the complete chunk of this rank"
    if size > 1 and set().union(*numbers) == {BASE**place}:
        return (
            "x is still this rank's own tensor. Add into the chunks of x themselves with +=, not "
            "into copies or new tensors"
        )
    return (
        "No chunk is complete on this rank. In each of the p − 1 rounds, send the chunk that you "
        "added to in the round before, and add what arrives to the chunk of the same number"
    )


@task("6.4", "ring: all-gather", points=2)
def ring_all_gather(ranks: Ranks, report: Report) -> None:
    """Check that every rank ends with all chunks, whichever one it had at the start."""
    cases = [case | {"ahead": k} for k, case in enumerate(short_and_long(report), 1)]
    cases.insert(1, cases[0] | {"ahead": 0})
    judge_sums(ranks, report, probe_all_gather, cases, _ring, results=_gathered)


def _gathered(answers: Answers) -> Iterator[Step]:
    """Yield the step that every rank has all chunks, in both runs."""
    mine = [reply["mine"] for reply in answers.values]
    seed_of = dict(zip(mine, answers.seeds, strict=True))
    size = answers.size
    contents = [own_chunk(k, answers.length, size, seed_of[k]) for k in range(size)]
    wrong = []
    for _, rank, reply in answers.of_ranks():
        why = _why_gathered(torch.tensor(reply["x"]), reply["mine"], contents)
        if why:
            wrong.append(answers.wrong(why, rank))
        elif not reply["alike"]:
            text = "With double precision, the result is different. Keep the dtype of x"
            wrong.append(answers.wrong(text, rank, "value"))
    yield none_of(wrong)


def _why_gathered(x: torch.Tensor, mine: int, contents: list[torch.Tensor]) -> str | None:
    """Return what is wrong with a chunk; the rank's own chunk comes first."""
    chunks = x.tensor_split(len(contents))
    wrong = [k for k, right in enumerate(contents) if not torch.equal(chunks[k], right)]
    if not wrong:
        return None
    if mine in wrong:
        return (
            f"Chunk {mine}, which was complete on this rank (mine = {mine}), was overwritten. Send "
            "it in the first round, and receive into the chunk that the neighbor had"
        )
    k = wrong[0]
    if (chunks[k] == OLD).any():
        return (
            f"Chunk {k} still has its old content on this rank, which began with mine = {mine}. "
            "In each round, send what came in the round before"
        )
    for other, content in enumerate(contents):
        common = min(len(content), len(chunks[k]))
        if common and torch.equal(chunks[k][:common], content[:common]):
            return (
                f"Chunk {k} holds the numbers of chunk {other}, so sender and receiver disagree on "
                f"which chunk travels. Compute both chunks from mine, here {mine}"
            )
    return f"Chunk {k} has other numbers than on the rank that completed it. Copy, don't add"
