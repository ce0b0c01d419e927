"""Checks of lab 07: a parameter server, and the effect of late gradients."""

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

from .probes import toy_gradient
from .servers import Replay, jobs_of, judge_server, protocol, rate_of, stepwise
from .shared_memory import count_lost as count_lost
from .shared_memory import hogwild as hogwild
from .workers import Worked, judge_worker
from .workers import work_sharded as work_sharded


@task("7.1", "the synchronous server", points=3)
def serve_in_rounds(ranks: Ranks, report: Report) -> None:
    """Check that a worker follows the protocol, and that a server takes one step per round."""
    for like in (3, 1):  # with one worker, the weights have another length and dtype
        if not judge_worker(ranks, report, "work", _work, like):
            return
    for workers, steps in (([1, 2, 3], 3), ([1, 2, 3, 4, 5], 4), ([2, 5], 12), ([4], 3)):
        jobs = jobs_of(report.seed, workers, steps, slow=workers[-1], pairs=len(workers) == 5)
        if not judge_server(ranks, report, "serve_in_rounds", jobs, _rounds):
            return


def _work(worked: Worked) -> Iterator[Step]:
    """Yield the steps that a worker pushed one gradient for each tensor of weights it received."""
    steps = worked.steps
    count = len(worked.handed)
    miscounted = f"You pushed {count} gradients, but more() returned True {steps} times"
    yield facts({f"work: {miscounted}. Push one gradient each time": count != steps})
    yield worked.computed(steps)
    came = worked.came[:steps]
    sent = [weights.tolist() for weights in came]

    def gradients(of: list[torch.Tensor]) -> list[list[float]]:
        return [toy_gradient(weights, worked.seed, k).tolist() for k, weights in enumerate(of)]

    saw_others = not same(worked.value["seen"], sent)
    wrong = {
        "You computed every gradient at the first weights. Use the newest": gradients(
            came[:1] * steps
        ),
        "You pushed the weights. Push compute(weights)": sent,
        "You called compute with other weights than the server had sent": lambda _: saw_others,
    }
    handed = "work, the gradients that you pushed"
    yield value(worked.handed, gradients(came), table(wrong), what=handed)


def _rounds(server: dict[str, Any], replay: Replay) -> Iterator[Step]:
    """Yield the steps for a server that takes one step per round."""
    yield protocol(_why_no_rounds(replay))
    many = len(replay.workers)
    rate = replay.rate
    after = functools.partial(_after_rounds, replay)

    def mean(total: torch.Tensor, count: int) -> torch.Tensor:
        return rate * total / count

    wrong = {
        "The weights are unchanged. Update the argument in place": replay.start,
        "You used the sum of a round's gradients. Use their mean": after(lambda s, _: rate * s),
        f"You always divide by {many}. If a worker leaves in a round, divide by the number of "
        "gradients that came": after(lambda s, _: rate * s / many),
        "You went uphill. Subtract lr · mean": after(lambda s, count: -rate * s / count),
        "The learning rate is missing": after(lambda s, count: s / count),
        "You divided the sum twice. Divide it once": after(lambda s, count: rate * s / count**2),
        "You used the last gradient for all workers, because receive fills the same tensor each "
        "time. Add each gradient at once, or keep a copy": after(mean, last=True),
    }
    what = f"{many} workers, the final weights"
    yield value(server["weights"], after(mean), table(wrong), what=what)
    rounds = replay.rounds()
    taken = sum(bool(gradients) for gradients in rounds)
    mistakes = [
        Mistake(taken + 1, "You counted a round without gradients. Count only rounds with some"),
        Mistake(sum(map(len, rounds)), "You counted gradients. Count rounds"),
    ]
    form = "the number of rounds"
    yield value(server["result"], taken, mistakes, what=f"{many} workers, {form}", form=form)


def _why_no_rounds(replay: Replay) -> str | None:
    """Return how a server breaks the rule of rounds."""
    outstanding: set[int] = set()
    answered: set[int] = set()
    here = set(replay.workers)
    for kind, worker in replay.events:
        if kind == "send":
            if outstanding and answered:
                return (
                    f"Rank {worker} got new weights before {named(outstanding)} had answered. "
                    "Collect all gradients of a round, take one step, and then send to all"
                )
            if not outstanding:
                answered = set()
            outstanding.add(worker)
            continue
        if outstanding | answered != here and not answered:
            return (
                f"You received a gradient before {named(here - outstanding)} had weights of this "
                "round. Send to all, then collect, so that all gradients of a round belong to the "
                "same weights"
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
    """Return the weights after one step per round; `step` gets the sum and number of gradients.

    With `last`, the last gradient of a round replaces all others.
    """
    weights = replay.start.clone()
    for gradients in filter(None, replay.rounds()):
        each = list(gradients.values())
        weights -= step(len(each) * each[-1] if last else sum(each), len(each))
    return weights.tolist()


@task("7.2", "the asynchronous server, and staleness", points=3)
def serve_anyone(ranks: Ranks, report: Report) -> None:
    """Check that the server answers the first worker that comes, and only it, at once."""
    hint = (
        "Send weights to each worker once at the start. After that, answer each gradient by one "
        "send to the worker that pushed it. "
    )
    judge = functools.partial(_first_come, _why_late)
    for workers in ([1, 2, 3], [1, 2, 4, 5], [3]):
        jobs = jobs_of(report.seed, workers, 4, slow=workers[report.seed % len(workers)])
        if not judge_server(ranks, report, "serve_anyone", jobs, judge, hint=hint):
            return


def _first_come(
    why: Callable[[Replay], str | None], server: dict[str, Any], replay: Replay
) -> Iterator[Step]:
    """Yield the steps for a server that receives from anyone; `why` finds what breaks its rule."""
    yield communication(server["calls"], _from_anyone)
    yield protocol(why(replay))
    yield from stepwise(server, replay)


def _from_anyone(calls: list[dict]) -> str | None:
    """Return a problem if the server waits for one worker while others may be ready."""
    headers = [call for call in calls if call["op"] == "recv" and call["nbytes"] == 4]
    named = [call["peer"] for call in headers if not call["any_source"]]
    workers = {call["peer"] for call in headers}
    if not named or len(workers) == 1:
        return None
    return (
        f"The server waits for rank {named[0]}, although others may be ready. Call "
        "receive(gradient) without a source, which takes the first message that comes"
    )


def _why_late(replay: Replay) -> str | None:
    """Return a problem if the server does something else before it answers a gradient."""
    owed: int | None = None
    for kind, worker in replay.events:
        if owed is not None and (kind, worker) != ("send", owed):
            return (
                f"Rank {owed} pushed a gradient, but the server turned to another rank before it "
                "sent weights. Answer each gradient at once"
            )
        owed = worker if kind == "gradient" else None
    return None


@task("7.3", "one server, three consistency models", points=4)
def serve(ranks: Ranks, report: Report) -> None:
    """Check that no worker gets more than `bound` ahead, and that no worker waits needlessly."""
    wide = 3 + report.seed % 4
    few = ([1, 2, 3], 2), ([1, 2, 4, 5], 0), ([2, 3], 1)
    for workers, bound in (*few, ([1, 3, 4], wide), ([1, 2, 3], None)):
        steps = 7 + (bound or 0) * 2
        # So far ahead that a right server lets the fast worker wait; without a bound, to its end.
        ahead = steps if bound is None else bound + 1
        slow = workers[report.seed % len(workers)]
        jobs = jobs_of(report.seed, workers, steps, slow, ahead)
        hint = (
            f"bound = {'inf' if bound is None else bound} limits the lead, in clocks. When the "
            "slowest worker has moved on, look at the waiting workers again. "
        )
        why = functools.partial(_why_out_of_bound, math.inf if bound is None else bound)
        judge = functools.partial(_first_come, why)
        if not judge_server(ranks, report, "serve", jobs, judge, [bound], hint):
            return
    # Worker 1 leaves without a gradient, and only when worker 2 waits for it.
    jobs = [(1, 0, 0, (), 2), (2, 5, 0, (1, 2), None)]
    hint = "When a worker has left, look at the waiting workers again. "
    judge = functools.partial(_first_come, functools.partial(_why_out_of_bound, 1))
    judge_server(ranks, report, "serve", jobs, judge, [1], hint)


def _why_out_of_bound(bound: float, replay: Replay) -> str | None:
    """Return which worker got weights too early, or waited although it could continue."""
    clock = dict.fromkeys(replay.workers, 0)
    idle = set(replay.workers)
    last_sent = 0  # the rank that got weights last since the last receive
    for kind, worker in replay.events:
        slowest = min(clock.values(), default=0)
        if kind == "send":
            lead = clock[worker] - slowest
            if worker < last_sent:
                return (
                    f"bound {bound}: Rank {worker} got weights after rank {last_sent}, without a "
                    "receive in between. Send to the waiting workers in the order of their ranks"
                )
            if lead > bound:
                return (
                    f"bound {bound}: Rank {worker} got weights when its clock was {lead} ahead of "
                    "the slowest. Send only if clock[w] - min(clock.values()) <= bound"
                )
            last_sent = worker
            idle.discard(worker)
            continue
        last_sent = 0
        held = [waiting for waiting in sorted(idle) if clock[waiting] - slowest <= bound]
        if held:
            lead = clock[held[0]] - slowest
            return (
                f"bound {bound}: The server made rank {held[0]} wait, although its clock is only "
                f"{lead} ahead of the slowest. Before each receive, look at all waiting workers"
            )
        if kind == "gradient":
            clock[worker] += 1
            idle.add(worker)
        else:
            del clock[worker]
    return None


@task("7.4", "weak consistency: several steps alone", points=2)
def work_locally(ranks: Ranks, report: Report) -> None:
    """Check that a worker takes `every` steps alone and then pushes the sum of the gradients."""
    rate = rate_of(report.seed)
    for every in (3, 1, 7 + report.seed % 6):
        # A worker asks more() once per exchange, so it may compute `every` times after that.
        judge = functools.partial(_exchanges, rate, every)
        if not judge_worker(ranks, report, "work_locally", judge, every, [rate, every]):
            return


def _exchanges(rate: float, every: int, worked: Worked) -> Iterator[Step]:
    """Yield the steps that a worker pushed the sum of its gradients in each exchange."""
    right, mistakes = _sums(rate, every, worked)
    handed = f"every={every}, what you pushed"
    # If a student divides a difference of weights by lr, float32 loses digits.
    yield value(worked.handed, right, mistakes, what=handed, tolerance=1e-3)
    yield worked.computed(worked.steps * every)


def _sums(rate: float, every: int, worked: Worked) -> tuple[list, list[Mistake]]:
    """Return what the worker should push, and known mistakes."""
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
            f"You pushed only the last of the {every} gradients. Push their sum": gradients[-1],
            f"You pushed only the first of the {every} gradients. Push their sum": gradients[0],
            f"You pushed the mean of the {every} gradients. Push their sum": mean,
            "You computed all gradients at the weights that came. Take a step after each, weights "
            "-= lr · gradient": sum(still),
            "The sign is wrong. Push (weights that came − weights now) / lr": -total,
            "You pushed the change of the weights. Divide it by lr, because the server multiplies "
            "by lr": rate * total,
            "You pushed weights now − weights that came. Push (weights that came − weights now) / "
            "lr": -rate * total,
            "You pushed the weights. Push the sum of the gradients": weights,
            "Your sum contains gradients of earlier exchanges. Begin with zeros in each "
            "exchange": life,
            f"You pushed the sum of {every - 1} gradients, one too few. Take {every} steps between "
            "two exchanges": fewer,
            f"You pushed the sum of {every + 1} gradients, one too many. Take {every} steps "
            "between two exchanges": further,
            "You pushed only zeros. Keep a copy of the weights that came: start = weights.clone(), "
            "not start = weights": 0 * total,
        }
        for text, result in results.items():
            wrong.setdefault(text, []).append(result.tolist())
    came = len(worked.handed)
    counted = Mistake(
        lambda _: came != worked.steps,
        f"You pushed {came} times, but more() returned True {worked.steps} times. Ask more() once "
        "per exchange, and push once each time",
    )
    return right, [counted, *table(wrong)]


def _taken(
    weights: torch.Tensor, count: int, begin: int, rate: float, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the gradients of `count` steps from these weights on, and the weights after them."""
    gradients = []
    for step in range(begin, begin + count):
        gradients.append(toy_gradient(weights, seed, step))
        weights = weights - rate * gradients[-1]
    return gradients, weights
