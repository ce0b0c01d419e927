"""Checks of pipelines in lab 10: one minibatch through the stages, and an executor of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from utils.checks.comparison import (
    EXACT,
    Calls,
    Mistake,
    Rule,
    blocking,
    in_words,
    inside,
    messages,
    only,
    short,
    table,
    waited,
)
from utils.checks.failures import STUCK, Failed
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import WORLD, GroupAnswer, judge_groups, on, seeds_of
from utils.cluster.questions import Ranks
from utils.labs.shared.pipeline_stages import FEATURES, IMAGES
from utils.labs.shared.reference_pipeline import losses_of, reference_gradients
from utils.labs.shared.schedules import Schedule, held, written

from .probes import probe_naive, probe_run
from .schedule_rules import odd_runs, usual_runs

PARTITIONS = ([[0, 1, 2], [3]], [[0, 2], [1, 3]], None)
BYTES = 8  # of a float64


# -- 10.1: naively ----------------------------------------------------------------------------


@task("10.1", "one minibatch through the stages", points=2)
def train_naively(ranks: Ranks, report: Report) -> None:
    """Compare gradients with the reference model's, and allow at most four messages."""
    each = to_each(seed=report.seeds(WORLD))
    runs = zip(PARTITIONS, ((24, False), (17, False), (9, True)), strict=True)
    cases = [
        {"partition": partition, "each": each, "n": n, "single": single}
        for partition, (n, single) in runs
    ]
    judge_groups(ranks, report, probe_naive, cases, _minibatch)
    explained(report)


def _minibatch(answer: GroupAnswer) -> Iterator[Step]:
    members = answer.members
    place = answer.place
    result = answer.value
    n = answer.case["n"]
    where = on(members)
    traffic = _traffic([("F", 0), ("B", 0)], members, place)
    sides = messages(*((op, peer) for op, peer, *_ in traffic), in_order=False)
    sizes = _bytes(traffic, {n}, BYTES // 2 if answer.case["single"] else BYTES)
    always = (only("send", "recv"), inside(members))
    for calls in (result["calls of the earlier one"], result["calls"]):
        yield communication(calls, *always, sides, sizes, waited)
    order = " ".join(result["events"]) or "nothing"
    yield facts({
        f"{where}: Your stage ran {order}, expected one forward and one backward": (
            result["events"] != ["F", "B"]
        )
    })
    seeds = tuple(seeds_of(answer.case, answer.members))
    gradients, loss = reference_gradients(seeds, n=n)
    name = f"gradients of stage {place} {where}"
    mistakes = _wrong_gradients(seeds, place, n=n)
    exact = 1e-4 if answer.case["single"] else EXACT
    yield value(result["gradient"], gradients[place], mistakes, what=name, tolerance=exact)
    if place == len(members) - 1:
        mistakes = _wrong_losses(loss, len(members), n)
        form = "the loss on the last stage"
        yield value(result["loss"], loss, mistakes, what=f"the loss {where}", form=form)
    else:
        yield facts({
            f"stage {place} {where} returned {result['loss']!r}. Return None, because only the "
            "last stage has a loss": result["loss"] is not None
        })
    yield facts(_marked([["F", 0], ["B", 0]], result))


#: Messages of a stage: operation, rank, tag, and how many numbers each sample has.
Traffic = list[tuple[str, int, int, int]]


def _traffic(actions: Sequence[tuple[str, int]], members: Sequence[int], place: int) -> Traffic:
    """Return the messages of a stage; their tags encode the microbatch and the direction."""
    p = len(members)
    ways = {
        "F": (("recv", place - 1), ("send", place + 1)),
        "B": (("recv", place + 1), ("send", place - 1)),
    }
    return [
        (op, members[other], 2 * k + (kind == "B"), FEATURES[max(place, other) * 4 // p])
        for kind, k in actions
        for op, other in ways[kind]
        if 0 <= other < p
    ]


def _bytes(traffic: Traffic, samples: set[int], of_one: int = BYTES) -> Rule:
    """Return the rule that each message has as many samples as a microbatch may have.

    Args:
        of_one: bytes of a number.
    """

    def rule(calls: Calls) -> str | None:
        for call in calls:
            pair = (call["op"], call["peer"])
            widths = {width for op, peer, _, width in traffic if (op, peer) == pair}
            allowed = {n * width * of_one for n in samples for width in widths}
            if allowed and call["nbytes"] not in allowed:
                return (
                    f"You made a {call['op']} of {call['nbytes']} bytes, expected {min(allowed)}. "
                    "Pass activations of shape [samples, features], or their gradient"
                )
        return None

    return rule


def _wrong_gradients(
    seeds: tuple[int, ...], place: int, m: int = 1, n: int = IMAGES
) -> Iterator[Mistake]:
    p = len(seeds)
    right = reference_gradients(seeds, "mean", n)[0][place]
    summed = reference_gradients(seeds, "sum", n)[0][place]
    yield Mistake(
        [0.0] * len(right),
        "Your stage has no gradient, or you set it to zero. Run backward on each stage from the "
        "gradient that arrives",
    )
    yield Mistake(summed, "Your gradient is for a sum over the samples. Take the mean")
    for text, factor in {
        f"Your gradient is {m} times too large. Use worker.loss, which already divides by the "
        "number of microbatches, and scale nothing": m,
        f"You divided by {m} microbatches once too often. worker.loss does it": 1 / m,
        f"You divided by {p} stages, but stages share the layers, not the samples": 1 / p,
        "Your gradient has the wrong sign": -1,
        "You counted everything twice": 2,
    }.items():
        if factor != 1:
            yield Mistake([factor * g for g in right], text)
    if place < p - 1:
        yield Mistake(
            lambda gradient: isinstance(gradient, list) and len(gradient) == len(right),
            "Your gradient is wrong. Receive each microbatch into a new tensor, start backward "
            "from the gradient that arrives (on the last stage, from worker.loss), and send x.grad",
        )


def _wrong_losses(loss: float, p: int, n: int) -> list[Mistake]:
    return table({
        "You summed the loss over the samples. cross_entropy returns the mean": loss * n,
        f"You divided by {p} stages. Remove the division": loss / p if p > 1 else None,
        "Return a number: loss.item()": lambda result: isinstance(result, str | list),
    })


def _marked(order: list[list], result: dict[str, Any]) -> dict[str, bool]:
    """Return what is wrong with the marks: they contain all work in order, and no message."""
    marks = [mark[:2] for mark in result["marks"]]
    spans = [mark[2:] for mark in result["marks"]]
    times = result["times"]
    if marks == order and len(times) != len(order):
        raise ValueError(f"{len(times)} events of a stage, and {len(order)} actions")
    pairs = list(zip(spans, times, strict=marks == order))
    outside = any(not start <= time <= end for (start, end), time in pairs)
    starts = [call["start"] for call in result["calls"]]
    inside_of_one = any(start < time < end for start, end in spans for time in starts)
    return {
        f"You made the marks {short(marks, 80)}, expected {short(order, 80)}. Put with mark(kind, "
        "k): around the computation": marks != order,
        'Your stage computes outside its mark. Put the whole forward into with mark("F", k): and '
        'the whole backward into with mark("B", k):': outside,
        "You made a message inside a mark. Put only computation into it, so that the picture "
        "doesn't show waiting as work": inside_of_one,
    }


#: Communications that failed, or parts of PyTorch's errors, and the message that explains each.
ERRORS = {
    "implicitly created only for scalar": "Only the last stage has a loss. On this stage, start "
    "backward from the gradient that arrives: y.backward(gradient)",
    "does not require grad": "You start backward from a tensor without a graph. Don't detach it, "
    "don't compute it under no_grad, and call requires_grad_() on a received input before forward",
    "'NoneType' object has no attribute": "You read a gradient that is None. Call "
    "x.requires_grad_() before forward, and run forward on the copy whose gradient you read",
    "modified by an inplace operation": "You changed a weight in place that a later backward "
    "still needs. Run forward on a separate copy",
    "backward through the graph a second time": "You ran backward twice for one microbatch, or "
    "two microbatches share a graph. Receive each input into a new tensor",
    "KeyError": "You look up a missing entry. Store it by its microbatch k, and take it out once",
    "unsupported operand type(s) for *": "You read a gradient that backward never wrote. Read it "
    "from the copy that forward used, self.stash[k]",
    "leaf Variable that requires grad": "You update a weight while autograd is watching. Use "
    "`with torch.no_grad():`",
    "got <class 'NoneType'>": "You sent None. Call x.requires_grad_() before forward, so that the "
    "input gets a gradient",
    "object is not callable": "You called a dict of weights. Use functional_call(module, weights, "
    "(x,)), which runs a module with other weights",
    Failed(STUCK, "send"): "A large send waits until its receiver is ready, and in 1F1B the next "
    "stage is sending, too. Keep the request of isend, and wait at the end",
    Failed(STUCK): "Nobody sends a message that a rank is waiting for. Pass group=group and the "
    "same tag to both calls of a pair, and make both before the next wait",
}


def explained(report: Report) -> None:
    """Add to an error of PyTorch what caused it."""
    if explanation := report.behind_errors(ERRORS):
        report.problem(explanation)


# -- 10.6: the executor -----------------------------------------------------------------------


@task("10.6", "an executor of schedules", points=4)
def execute(ranks: Ranks, report: Report) -> None:
    """Judge order, messages and memory of legal schedules; compare gradients with the reference."""
    usual = {p: usual_runs(p) for p in (1, 2, 3, 4)}
    odd = {WORLD: odd_runs(WORLD)}
    cases = [
        {
            "partition": partition,
            "each": to_each(seed=report.seeds(WORLD)),
            "schedules": {p: list(runs.values()) for p, runs in of_size.items()},
        }
        for partition, of_size in [*((one, usual) for one in PARTITIONS), (None, odd)]
    ]

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        of_size = odd if answer.case is cases[-1] else usual
        runs = of_size[len(answer.members)].items()
        for (name, (schedule, n)), result in zip(runs, answer.value, strict=True):
            yield from _run(answer, f"{name}, {on(answer.members)}", schedule, n, result)

    judge_groups(ranks, report, probe_run, cases, judge)
    explained(report)


def _run(
    answer: GroupAnswer, where: str, schedule: Schedule, n: int, result: dict[str, Any]
) -> Iterator[Step]:
    members = answer.members
    place = answer.place
    actions = schedule[place]
    m = len(schedule[0]) // 2
    seeds = tuple(seeds_of(answer.case, answer.members))
    traffic = _traffic(actions, members, place)
    always = (only("send", "recv"), inside(members))
    wanted = _as_wanted([message[:3] for message in traffic])
    sizes = _bytes(traffic, {len(chunk) for chunk in torch.arange(n).chunk(m)})
    yield communication(result["calls"], *always, *wanted, sizes, _sends_do_not_block, waited)
    yield facts({
        f"{where}: You wait for isend's request, so your stage computes nothing in this time. Put "
        "the request into the outbox, and wait at the end": (result["early"])
    })
    yield facts(_out_of_order(where, actions, result["asked"]))
    right = reference_gradients(seeds, n=n)[0][place]
    mistakes = _wrong_gradients(seeds, place, m, n)
    name = f"{where}: gradients of stage {place}"
    yield value(result["gradient"], right, mistakes, what=name, tolerance=EXACT)
    (enough,) = held([actions])
    yield facts({
        f"{where}: You held {result['most']} microbatches' activations at once, and {enough} are "
        "enough. Forget them after the backward (held.pop(k))": (result["most"] > enough + 1)
    })
    losses = losses_of(seeds, m, n) if place == len(members) - 1 else []
    mistakes = _wrong_lists_of_losses(losses, answer, schedule)
    form = "the losses on the last stage, [] on the others"
    yield value(result["losses"], losses, mistakes, what=f"{where}: losses", form=form)
    yield facts(_marked([list(action) for action in actions], result))


def _as_wanted(traffic: list[tuple[str, int, int]]) -> list[Rule]:
    """Return the rules that these messages are made, with the right counts and tags."""

    def peers(calls: Calls) -> str | None:
        made = [(call["op"], call["peer"]) for call in calls]
        expected = [(op, peer) for op, peer, _ in traffic]
        for pair in sorted(set(made) | set(expected)):
            if made.count(pair) != expected.count(pair):
                return (
                    f"You made {made.count(pair)} messages of the kind {in_words([pair])}, "
                    f"expected {expected.count(pair)}"
                )
        return None

    def tags(calls: Calls) -> str | None:
        made = sorted((call["op"], call["peer"], call["tag"]) for call in calls)
        if made == sorted(traffic):
            return None
        op, peer, tag = next((message for message in made if message not in traffic), made[0])
        return (
            f"You made a {op} with tag {tag} {'to' if op == 'send' else 'from'} rank {peer}, "
            "which can meet another microbatch. Use forward_tag(k) for activations and "
            "backward_tag(k) for gradients"
        )

    return [peers, tags]


def _sends_do_not_block(calls: Calls) -> str | None:
    """Return what is wrong with a stage that calls `send`; None if it doesn't."""
    problem = blocking(False)([call for call in calls if call["op"] == "send"])
    if problem is None:
        return None
    return f"{problem}. A stage that waits for the receiver deadlocks in 1F1B"


def _out_of_order(where: str, actions: Sequence[tuple], asked: list[list]) -> dict[str, bool]:
    early = any(kind.startswith("done") for kind, _ in asked)
    only_forwards = all(kind == "F" for kind, _ in asked)
    return {
        f"{where}: You called worker.done(k) before microbatch k's backward. Call it after": early,
        f"{where}: You never called worker.done. Call worker.done(k) after each "
        "backward": only_forwards,
        f"{where}: You worked in the order {written([asked])}, but this stage's list is "
        f"{written([actions])}. Call worker.done(k) right after each backward, because that call "
        "marks it": asked != [list(action) for action in actions],
    }


def _wrong_lists_of_losses(
    losses: list[float], answer: GroupAnswer, schedule: Schedule
) -> list[Mistake]:
    m = len(schedule[0]) // 2
    place = answer.place
    in_order_of_work = [losses[k] for kind, k in schedule[place] if kind == "F"] if losses else []
    return table({
        "You multiplied the losses back. Return them as they are: worker.loss divides by the "
        "number of microbatches": [m * loss for loss in losses],
        "You returned their sum. Return a list with one loss per microbatch": sum(losses),
        "You returned losses on a stage that has none. Return []": [0.0] * m,
        "You returned them in the order of work. Return them in the order of k": in_order_of_work,
        "Return numbers: loss.item()": lambda result: any(
            isinstance(loss, str | list) for loss in result
        ),
        f"Stage {place} of {len(answer.members)} must return {len(losses)} losses": lambda result: (
            isinstance(result, list) and len(result) != len(losses)
        ),
    })
