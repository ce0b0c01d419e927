"""Checks of lab 16: ring attention, forward and backward.

A ring gets a function for each block from the check. The function treats every block differently,
and notes which block it got, and which messages were pending.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from utils.checks.comparison import Calls, blocking, inside, only, waited
from utils.checks.draws import drawn
from utils.checks.task import Report, Step, communication, facts, task
from utils.checks.trials import GroupAnswer, judge_groups, on, seeds_of
from utils.cluster.questions import Ranks, Reply

from .probes import (
    RING_HEADS,
    RING_SIZE,
    Part,
    attend_back,
    drawn_block,
    part_of,
    probe_block,
    probe_ring,
    scores_of,
)
from .replies import alike, all_alike, cases, lengths
from .softmax_parts import NAMES

#: The bytes of a token's keys and values, or of their gradients.
OF_TOKEN = 2 * RING_HEADS * RING_SIZE * 8
GRADIENTS = ("dq", "dk", "dv")
#: Used blocks that an answer may still keep: the variable of a loop over works keeps the last one.
MOST_KEPT = 1
TRAVELS = "Blocks travel p − 1 times and gradients p times, but not to a rank that is alone"


def _blocks_of(answer: GroupAnswer) -> list[Tensor]:
    pairs = zip(seeds_of(answer.case, answer.members), answer.case["sizes"], strict=False)
    return [drawn(seed, 3, RING_HEADS, size, RING_SIZE) for seed, size in pairs]


def _messages(answer: GroupAnswer, calls: Calls, tokens: int, where: str) -> Iterator[Step]:
    """Yield the steps that this rank sends so many tokens to the next rank, by isend."""
    members = answer.members
    rules = only("send", "recv"), inside(members), blocking(False), waited
    yield communication(calls, *rules)
    sends = [call for call in calls if call["op"] == "send"]
    wrong = {call["peer"] for call in sends} - {members[(answer.place + 1) % len(members)]}
    sent = sum(call["nbytes"] for call in sends)
    expected = (len(members) > 1) * tokens * OF_TOKEN
    yield facts({
        f"{where}: You sent to rank {min(wrong, default=0)}. Send to the next rank only": wrong,
        f"{where}: You sent {sent} bytes, expected {expected}. {TRAVELS}": sent != expected,
    })


def _noted(answer: GroupAnswer, blocks: Sequence[Tensor], where: str) -> Iterator[Step]:
    p = len(blocks)
    notes = answer.value["notes"]
    owners = {float(block[1].flatten()[0]): r for r, block in enumerate(blocks)}
    said = [note["s"] for note in notes]
    expected = [(answer.place - i) % p for i in range(p)]
    text = f"{where}: You called the function for blocks {said}, expected {expected}. Call it once "
    yield facts({f"{text}for each block": len(said) != p})
    for i, note in enumerate(notes):
        owner = owners.get(note["key"])
        yield facts({
            f"{where}: In round {i} the block wasn't there yet. Wait for the works": owner is None,
            f"{where}: In round {i} you said s = {note['s']}, but the keys are those of group rank "
            f"{owner}. In round i, group rank r has the block of (r − i) mod p": owner != note["s"],
            f"{text}for each block, in the order in which they arrive": owner != expected[i],
        })


def _pending(answer: GroupAnswer, where: str) -> Iterator[Step]:
    """Yield the steps that a block was sent before it was used, and that few are kept."""
    p = len(answer.members)
    sizes = answer.case["sizes"]
    own = [sizes[(answer.place - i) % p] for i in range(p)]
    for i, note in enumerate(answer.value["notes"]):
        idle = i < p - 1 and note["pending"] < OF_TOKEN * own[i]
        yield facts({
            f"{where}: In round {i} your block wasn't traveling while you computed. Call pass_on "
            "before you compute, and wait after it": idle,
            f"{where}: In round {i} you still kept {note['kept']} blocks that you had used before. "
            "Forget a block and its works when the next one has arrived": note["kept"] > MOST_KEPT,
        })


@task("16.4", "ring attention, forward", points=3)
def ring_forward(ranks: Ranks, report: Report) -> None:
    """Judge the combined parts, the messages, and what was pending while the rank computed."""
    judge_groups(ranks, report, probe_ring, cases(report, back=False), _forward, lengths)


def _forward(answer: GroupAnswer) -> Iterator[Step]:
    place = answer.place
    where = on(answer.members)
    blocks = _blocks_of(answer)
    p = len(blocks)
    yield from _passed_on(answer, blocks, where)
    yield from _noted(answer, blocks, where)
    sizes = answer.case["sizes"][:p]
    sent = sum(sizes) - sizes[(place + 1) % p]
    yield from _messages(answer, answer.value["calls"], sent, where)
    which = answer.case["common"], place
    pairs = [(scores_of(blocks[place][0], k, *which, s), v) for s, (_, k, v) in enumerate(blocks)]
    right = part_of(*pairs)
    others = pairs[:place] + pairs[place + 1 :] or pairs
    less = right[1].clamp(max=0).exp()
    from_zero = right[0] * less, right[1].clamp(min=0), right[2] * less
    wrong = {
        "You returned the part of round 0 alone. Combine all": part_of(pairs[place]),
        "You returned the part of the last round alone. Combine all": part_of(pairs[place - p + 1]),
        "You counted the block of round 0 twice": part_of(*pairs, pairs[place]),
        "You left out the block of round 0": part_of(*others),
        "You began with a maximum of 0. Begin with the part of round 0": from_zero,
        "You divided by the total. Return the part": (right[0] / right[2], *right[1:]),
    }
    yield from all_alike(answer.value["result"], NAMES, right, wrong, where)
    yield from _pending(answer, where)


def _passed_on(answer: GroupAnswer, blocks: Sequence[Tensor], where: str) -> Iterator[Step]:
    where = f"pass_on {where}"
    calls = answer.value["calls again"]
    own = answer.case["sizes"][answer.place]
    yield from _messages(answer, calls, own, where)
    text = "You waited for the messages. Return the works, and let ring_forward wait"
    same = f"{where}: You receive into the block that you send. Make a new tensor"
    yield facts({f"{where}: {text}": answer.value["early"], same: answer.value["same"]})
    arriving = blocks[answer.place - 1][1:]
    wrong = {"You returned the block that you send": blocks[answer.place][1:]}
    yield from alike(answer.value["arriving"], arriving, wrong, where)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    lse: Tensor,
    gradient: Tensor,
    delta: Tensor,
) -> Part:
    scale = 1 / math.sqrt(RING_SIZE)
    probabilities = (scores - lse).exp()
    ds = probabilities * (gradient @ v.transpose(-2, -1) - delta) * scale
    return ds @ k, ds.transpose(-2, -1) @ q, probabilities.transpose(-2, -1) @ gradient


@task("16.5", "ring attention, backward", points=3)
def ring_backward(ranks: Ranks, report: Report) -> None:
    """Judge the gradients of a block, and then the gradients that travel with the blocks."""
    blocks = [{"seed": report.seed, "level": level} for level in (0.0, 1000.0, -1000.0)]
    if report.judge_cases(ranks, probe_block, blocks, _block):
        judge_groups(ranks, report, probe_ring, cases(report, back=True), _backward, lengths)


def _block(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    yield communication(answer.value["calls"], only())
    *rest, lse, gradient, delta = drawn_block(case["seed"], case["level"])
    dq, dk, dv = right = _gradients(*rest, lse, gradient, delta)
    inner = rest[3].logsumexp(-1, keepdim=True)
    scale = math.sqrt(RING_SIZE)
    wrong = {
        "You applied softmax to one block. Use lse": _gradients(*rest, inner, gradient, delta),
        "You scaled the scores again": _gradients(*rest[:3], rest[3] / scale, lse, gradient, delta),
        "You left delta out": _gradients(*rest, lse, gradient, 0 * delta),
        "You added delta. Subtract it": _gradients(*rest, lse, gradient, -delta),
        "You forgot the square root of head_size in dq and dk": (scale * dq, scale * dk, dv),
        "You divided by head_size. Use its square root": (dq / scale, dk / scale, dv),
        "You swapped dk and dv": (dq, dv, dk),
        "You scaled dv, but the values aren't in the scores": (dq, dk, dv / scale),
    }
    yield from all_alike(answer.value["result"], GRADIENTS, right, wrong, "block_gradients")


def _backward(answer: GroupAnswer) -> Iterator[Step]:
    place = answer.place
    where = on(answer.members)
    blocks = _blocks_of(answer)
    p = len(blocks)
    yield from _noted(answer, blocks, where)
    sizes = answer.case["sizes"][:p]
    sent = 2 * sum(sizes) - sizes[(place + 1) % p]
    yield from _messages(answer, answer.value["calls"], sent, where)

    def term(r: int, s: int) -> Part:
        return attend_back(blocks[r][0], *blocks[s][1:], answer.case["common"], r, s)

    dq = sum(term(place, s)[0] for s in range(p))
    right = dq, *(sum(term(r, place)[i] for r in range(p)) for i in (1, 2))
    own = term(place, place)
    last = term(place, (place + 1) % p)
    wrong = {
        "You swapped dk and dv": [dq, *right[:0:-1]],
        "You took the mean over the ranks. Take the sum": [dq, right[1] / p, right[2] / p],
        "You kept only the last term. Add up": [last[0], *term((place - 1) % p, place)[1:]],
        "You returned only the term of round 0. Add the terms of all rounds": own,
        "You left out the term of round 0": [right[i] - own[i] for i in range(3)],
        "You added the term of round 0 twice": [right[i] + own[i] for i in range(3)],
    }
    yield from all_alike(answer.value["result"], GRADIENTS, right, wrong, where)
    yield from _pending(answer, where)
