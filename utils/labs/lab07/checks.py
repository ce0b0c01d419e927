"""Checks of lab 07: a parameter server, and what becomes of gradients that come late."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from utils.checks.comparison import Mistake, same, table
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.checks.verdict import named
from utils.cluster.questions import Ranks

from .servers import Replay, jobs_of, judge_server, protocol, rate_of, stepwise, toy_gradient
from .shared_memory import count_lost as count_lost
from .shared_memory import hogwild as hogwild
from .workers import Worked, judge_worker
from .workers import work_sharded as work_sharded


@task("7.1", "the synchronous server", points=3)
def serve_in_rounds(ranks: Ranks, report: Report) -> None:
    """Check a worker that follows the protocol, and a server that takes one step a round."""
    for like in (3, 1):  # with one worker the weights are others in length and type
        if not judge_worker(ranks, report, "work", _work, like):
            return
    for workers, steps in (([1, 2, 3], 3), ([1, 2, 3, 4, 5], 4), ([2, 5], 12), ([4], 3)):
        jobs = jobs_of(report.seed, workers, steps, slow=workers[-1])
        if not judge_server(ranks, report, "serve_in_rounds", jobs, _rounds):
            return


def _work(worked: Worked) -> Iterator[Step]:
    """Yield the steps that a worker handed in a gradient for all weights that came."""
    steps = worked.steps
    count = len(worked.handed)
    miscounted = f"{count} gradients came, {steps} were expected, as more() said True so often"
    yield facts({f"work: {miscounted}": count != steps})
    yield worked.computed(steps)
    came = worked.came[:steps]
    sent = [weights.tolist() for weights in came]

    def gradients(of: list[torch.Tensor]) -> list[list[float]]:
        return [toy_gradient(weights, worked.seed, k).tolist() for k, weights in enumerate(of)]

    saw_others = not same(worked.value["seen"], sent)
    wrong = {
        "every gradient was computed with the first weights that came": gradients(came[:1] * steps),
        "these are the weights: hand in compute(weights)": sent,
        "compute got other weights than those that the server had sent": lambda _: saw_others,
    }
    handed = "work: the gradients that it handed in"
    yield value(worked.handed, gradients(came), table(wrong), what=handed)


def _rounds(server: dict[str, Any], replay: Replay) -> Iterator[Step]:
    """Yield the steps for a server that takes one step a round."""
    yield protocol(_why_no_rounds(replay))
    many = len(replay.workers)
    rate = replay.rate
    after = functools.partial(_after_rounds, replay)

    def mean(total: torch.Tensor, count: int) -> torch.Tensor:
        return rate * total / count

    wrong = {
        "the weights are unchanged: update the argument in place": replay.start,
        "this is the sum of the round's gradients: take the mean": after(lambda s, _: rate * s),
        f"it always divides by {many}: of a round that a worker has left in, the mean is over the "
        "gradients that came": after(lambda s, _: rate * s / many),
        "uphill: subtract lr · mean": after(lambda s, count: -rate * s / count),
        "the learning rate is missing": after(lambda s, count: s / count),
        "divided twice: sum / number is the mean": after(lambda s, count: rate * s / count**2),
        "this is the last worker's gradient, once for each worker: receive fills the same tensor "
        "each time, so add it up at once, or keep a copy": after(mean, last=True),
    }
    what = f"{many} workers: the weights in the end"
    yield value(server["weights"], after(mean), table(wrong), what=what)
    rounds = replay.rounds()
    taken = sum(bool(gradients) for gradients in rounds)
    mistakes = [
        Mistake(taken + 1, "a round in which all leave and nobody hands in is none"),
        Mistake(sum(map(len, rounds)), "this counts gradients; count rounds"),
    ]
    form = "the number of rounds"
    yield value(server["result"], taken, mistakes, what=f"{many} workers: {form}", form=form)


def _why_no_rounds(replay: Replay) -> str | None:
    """Return how a server does not keep the rounds."""
    outstanding: set[int] = set()
    answered: set[int] = set()
    here = set(replay.workers)
    for kind, worker in replay.events:
        if kind == "send":
            if outstanding and answered:
                return (
                    f"rank {worker} got new weights while {named(outstanding)} had not answered: "
                    "the round is over when everybody has handed in, then there is one step, and "
                    "then all get the new weights"
                )
            if not outstanding:
                answered = set()
            outstanding.add(worker)
            continue
        if outstanding | answered != here and not answered:
            return (
                f"{named(here - outstanding)} had no weights of this round when the first "
                "gradient was received: send to all, then collect, so that all gradients of a "
                "round belong to the same weights"
            )
        outstanding.discard(worker)
        answered.add(worker)
        if kind == "leave":
            here.discard(worker)
            answered.discard(worker)
    return None


def _after_rounds(
    replay: Replay, step: Callable[[torch.Tensor, int], torch.Tensor], last: bool = False
) -> list[float]:
    """Return the weights after one step for each round, from the sum of so many gradients.

    With `last` each gradient of a round is taken for the last one.
    """
    weights = replay.start.clone()
    for gradients in filter(None, replay.rounds()):
        each = list(gradients.values())
        weights -= step(len(each) * each[-1] if last else sum(each), len(each))
    return weights.tolist()


@task("7.2", "the asynchronous server, and staleness", points=3)
def serve_anyone(ranks: Ranks, report: Report) -> None:
    """Check that whoever comes first is served first, alone, and at once."""
    hint = (
        "At the start each worker gets weights once. After that the server answers each gradient "
        "by one send, to the worker that has handed it in, and to nobody else. "
    )
    judge = functools.partial(_first_come, _why_late)
    for workers in ([1, 2, 3], [1, 2, 4, 5], [3]):
        jobs = jobs_of(report.seed, workers, 4, slow=workers[report.seed % len(workers)])
        if not judge_server(ranks, report, "serve_anyone", jobs, judge, hint=hint):
            return


def _first_come(
    why: Callable[[Replay], str | None], server: dict[str, Any], replay: Replay
) -> Iterator[Step]:
    """Yield the steps for a server that receives from anyone; `why` says what breaks its rule."""
    yield communication(server["calls"], _from_anyone)
    yield protocol(why(replay))
    yield from stepwise(server, replay)


def _from_anyone(calls: list[dict]) -> str | None:
    """Say which worker is waited for by name, while others may have come: a rule."""
    headers = [call for call in calls if call["op"] == "recv" and call["nbytes"] == 4]
    named = [call["peer"] for call in headers if not call["any_source"]]
    workers = {call["peer"] for call in headers}
    if not named or len(workers) == 1:
        return None
    return (
        f"waits for rank {named[0]} by name, while others may have come: receive(gradient) "
        "without a source takes whoever comes first"
    )


def _why_late(replay: Replay) -> str | None:
    """Return which gradient is not answered before the next message is received."""
    owed: int | None = None
    for kind, worker in replay.events:
        if owed is not None and (kind, worker) != ("send", owed):
            return (
                f"rank {owed} handed in a gradient, and got no weights before the server turned "
                "to somebody else: answer at once, or it is no asynchronous server"
            )
        owed = worker if kind == "gradient" else None
    return None


@task("7.3", "one server, three consistency models", points=4)
def serve(ranks: Ranks, report: Report) -> None:
    """Check that nobody gets more than `bound` ahead, and nobody waits who is not."""
    wide = 3 + report.seed % 4
    few = ([1, 2, 3], 2), ([1, 2, 4, 5], 0), ([2, 3], 1)
    for workers, bound in (*few, ([1, 3, 4], wide), ([1, 2, 3], None)):
        steps = 7 + (bound or 0) * 2
        jobs = jobs_of(report.seed, workers, steps, slow=workers[report.seed % len(workers)])
        hint = (
            f"bound = {'inf' if bound is None else bound}: it is for the lead, in clocks. Who "
            "had to wait must be thought of again when the slowest has moved on. "
        )
        why = functools.partial(_why_out_of_bound, math.inf if bound is None else bound)
        judge = functools.partial(_first_come, why)
        if not judge_server(ranks, report, "serve", jobs, judge, [bound], hint):
            return


def _why_out_of_bound(bound: float, replay: Replay) -> str | None:
    """Return who got weights and may not go on, or got none and may."""
    clock = dict.fromkeys(replay.workers, 0)
    idle = set(replay.workers)
    last_sent = 0  # rank that got weights last, since the last receive
    for kind, worker in replay.events:
        slowest = min(clock.values(), default=0)
        if kind == "send":
            lead = clock[worker] - slowest
            if worker < last_sent:
                return (
                    f"bound {bound}: rank {worker} got weights after rank {last_sent}, without a "
                    "receive in between: send to those who may go on in the order of their ranks"
                )
            if lead > bound:
                return (
                    f"bound {bound}: rank {worker} got weights when its clock was {lead} ahead of "
                    "the slowest: it may go on if clock[w] - min(clock.values()) <= bound"
                )
            last_sent = worker
            idle.discard(worker)
            continue
        last_sent = 0
        held = [waiting for waiting in sorted(idle) if clock[waiting] - slowest <= bound]
        if held:
            lead = clock[held[0]] - slowest
            return (
                f"bound {bound}: the clock of rank {held[0]} is {lead} ahead of the slowest, which "
                "is allowed, and the server received again before it sent weights: before each "
                "receive look at all who wait"
            )
        if kind == "gradient":
            clock[worker] += 1
            idle.add(worker)
        else:
            del clock[worker]
    return None


@task("7.4", "weak consistency: several steps alone", points=2)
def work_locally(ranks: Ranks, report: Report) -> None:
    """Check `every` steps on one's own weights, then the sum of their gradients."""
    rate = rate_of(report.seed)
    for every in (3, 1, 7 + report.seed % 6):
        # more() is asked once an exchange, so compute is allowed `every` times then.
        judge = functools.partial(_exchanges, rate, every)
        if not judge_worker(ranks, report, "work_locally", judge, every, [rate, every]):
            return


def _exchanges(rate: float, every: int, worked: Worked) -> Iterator[Step]:
    """Yield the steps that a worker handed in the sum of its gradients in each exchange."""
    right, mistakes = _sums(rate, every, worked)
    handed = f"every={every}: what was handed in"
    # A difference of weights that is divided by lr has lost digits of float32.
    yield value(worked.handed, right, mistakes, what=handed, tolerance=1e-3)
    yield worked.computed(worked.steps * every)


def _sums(rate: float, every: int, worked: Worked) -> tuple[list, list[Mistake]]:
    """Return what is to be handed in, and mistakes."""
    right: list[list[float]] = []
    wrong: dict[str, list[list[float]]] = {}
    life: Any = 0
    for exchange, first in enumerate(worked.came[:-1]):
        begin = exchange * every
        gradients, weights = _taken(first, every, begin, rate, worked.seed)
        total = sum(gradients)
        still = [toy_gradient(first, worked.seed, begin + step) for step in range(every)]
        fewer, further = (
            sum(_taken(first, count, exchange * count, rate, worked.seed)[0], 0 * total)
            for count in (every - 1, every + 1)
        )
        life = life + total
        mean = total / every
        right.append(total.tolist())
        results = {
            f"only the last of the {every} gradients: hand in their sum": gradients[-1],
            f"only the first of the {every} gradients: hand in their sum": gradients[0],
            f"the mean of the {every} gradients: hand in their sum, it is {every} steps": mean,
            "all gradients were computed with the weights that came: take a step, weights -= lr · "
            "gradient, after each": sum(still),
            "the sign: what came minus what is there now, divided by lr": -total,
            "this is by how much the weights have changed: divide by lr, the server multiplies by "
            "it": rate * total,
            "this is by how much the weights have changed: what came minus what is there now, "
            "divided by lr": -rate * total,
            "these are the weights: hand in the sum of the gradients": weights,
            "the gradients of the exchanges before are still in it: the sum begins at zero in each "
            "exchange": life,
            f"this is the sum of {every - 1} gradients, one step too few: take {every} steps "
            "between two exchanges": fewer,
            f"this is the sum of {every + 1} gradients, one step too many: take {every} steps "
            "between two exchanges": further,
            "only zeros: did you keep a copy of the weights that came? start = weights is no copy, "
            "start = weights.clone() is": 0 * total,
        }
        for text, result in results.items():
            wrong.setdefault(text, []).append(result.tolist())
    came = len(worked.handed)
    counted = Mistake(
        lambda _: came != worked.steps,
        f"{came} times something came, {worked.steps} were expected: more() is asked once an "
        "exchange, and said True so many times",
    )
    return right, [counted, *table(wrong)]


def _taken(
    weights: torch.Tensor, count: int, begin: int, rate: float, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the gradients of so many steps from some weights on, and the weights after them."""
    gradients = []
    for step in range(begin, begin + count):
        gradients.append(toy_gradient(weights, seed, step))
        weights = weights - rate * gradients[-1]
    return gradients, weights
