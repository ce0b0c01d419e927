"""Checks of lab 07: a parameter server, and what becomes of gradients that come late."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from utils.checks.calls import TOGETHER, blocking, broken, only, some, waited
from utils.checks.mistakes import NO_NUMBER, Mistake, same, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, as_dict, number, numbers, reading_answer, recorded
from utils.checks.steps import Step, all_came, communication, each_of, facts, value
from utils.checks.task import Report, task, to_each
from utils.checks.verdict import named
from utils.cluster.questions import Ranks, Reply

from .servers import (
    SERVER,
    WORLD,
    Replay,
    enough,
    hint_if_stuck,
    jobs_of,
    judge_server,
    protocol,
    rate_of,
    stepwise,
    toy_gradient,
)
from .workers import Counted, Worked, judge_worker, serve_toys

# -- 7.1 --------------------------------------------------------------------------------------


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


# -- 7.2 --------------------------------------------------------------------------------------


@task("7.2", "the asynchronous server, and staleness", points=3)
def serve_anyone(ranks: Ranks, report: Report) -> None:
    """Check that whoever comes first is served first, alone, and at once."""
    hint = (
        "At the start each worker gets weights once. After that the server answers each gradient "
        "by one send, to the worker that has handed it in, and to nobody else. "
    )
    for workers in ([1, 2, 3], [1, 2, 4, 5], [3]):
        jobs = jobs_of(report.seed, workers, 4, slow=workers[report.seed % len(workers)])
        if not judge_server(ranks, report, "serve_anyone", jobs, _first_come, hint=hint):
            return


def _first_come(server: dict[str, Any], replay: Replay) -> Iterator[Step]:
    """Yield the steps for a server that answers each gradient at once."""
    yield communication(server["calls"], _from_anyone)
    yield protocol(_why_late(replay))
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


# -- 7.3 --------------------------------------------------------------------------------------


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
        judge = functools.partial(_consistent, math.inf if bound is None else bound)
        if not judge_server(ranks, report, "serve", jobs, judge, [bound], hint):
            return


def _consistent(bound: float, server: dict[str, Any], replay: Replay) -> Iterator[Step]:
    """Yield the steps for a server that lets nobody get further ahead than the bound."""
    yield communication(server["calls"], _from_anyone)
    yield protocol(_why_out_of_bound(bound, replay))
    yield from stepwise(server, replay)


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


# -- 7.4 --------------------------------------------------------------------------------------


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
    """Return what is to be handed in, and mistakes; one that gives the right sum is none."""
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
    others = (Mistake(gives, text) for text, gives in wrong.items() if not same(gives, right))
    return right, [counted, *others]


def _taken(
    weights: torch.Tensor, count: int, begin: int, rate: float, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the gradients of so many steps from some weights on, and the weights after them."""
    gradients = []
    for step in range(begin, begin + count):
        gradients.append(toy_gradient(weights, seed, step))
        weights = weights - rate * gradients[-1]
    return gradients, weights


# -- 7.5 --------------------------------------------------------------------------------------


class Others:
    """Gradients on shared weights, which other ranks change meanwhile."""

    def __init__(self, shared: torch.Tensor, seed: int, steps: int):
        self.shared = shared
        self.seed = seed
        self.left = steps
        self.computed = 0

    def more(self) -> bool:
        """Return whether there is another step to do; if so, others have added to the weights."""
        self.left -= 1
        if self.left >= 0:
            self.shared += _of_others(self.seed + 400, self.computed, len(self.shared))
        return self.left >= 0

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the gradient at the weights; before it is there, others have added to them."""
        gradient = toy_gradient(weights.clone(), self.seed, self.computed)
        self.shared += _of_others(self.seed, self.computed, len(weights))
        self.computed += 1
        return gradient


class Overwritten(TorchDispatchMode):
    """Notes whether a tensor is copied into some memory, over whatever stands there."""

    def __init__(self, pointer: int):
        super().__init__()
        self.pointer = pointer
        self.found = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            into, source = (tensor.data_ptr() for tensor in args[:2])
            self.found = self.found or (into == self.pointer != source)
        return function(*args, **kwargs or {})


def _of_others(seed: int, k: int, size: int) -> torch.Tensor:
    """Return what others have added to the weights by the end of step k."""
    return numbers(seed + 100 + k, size)


def probe_hogwild(user_ns: dict, *, rank: int, seed: int, rate: float, steps: int) -> dict:
    """Call `hogwild` on memory that others write to."""
    shared = numbers(seed, 3 + steps)
    others = Others(shared, seed, steps)
    function = answer_named(user_ns, "hogwild")
    with Overwritten(shared.data_ptr()) as overwritten:
        _, calls = recorded(function, shared, others.compute, rate, others.more)
    return {
        "overwritten": overwritten.found,
        "weights": shared,
        "computed": others.computed,
        "calls": calls,
    }


@task("7.5", "Hogwild", points=2)
def hogwild(ranks: Ranks, report: Report) -> None:
    """Check that each step is added to what stands in the memory then, and nothing is sent."""
    cases = [
        {"seed": report.seed, "rate": rate_of(report.seed), "steps": steps} for steps in (4, 6)
    ]
    report.judge_cases(ranks, probe_hogwild, cases, _alone_on_shared)


def _alone_on_shared(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield the steps for a rank that adds its steps to weights that others change, too."""
    computed = answer.value["computed"]
    steps = case["steps"]
    yield communication(answer.value["calls"], _nothing)
    miscounted = (
        f"compute was called {computed} times, more() said True {steps} times: ask more() before "
        "each step, and take as many steps"
    )
    yield facts({miscounted: computed != steps})
    seed, rate = case["seed"], case["rate"]
    after = functools.partial(_after_hogwild, numbers(seed, 3 + steps), seed, rate, steps)
    wrong = {
        "the weights were read before more() was asked, and others have changed them since: ask, "
        "then read": after("early"),
        _OVERWRITTEN: after("back"),
        "only the other ranks have changed shared: shared = shared - … makes a new tensor, in "
        "memory of its own. Change it in place: shared -= lr · gradient": after(factor=0.0),
        "all gradients were computed with the weights of the beginning: read shared anew for "
        "each": after("first"),
        "uphill: subtract lr · gradient": after(factor=-1.0),
        "the learning rate is missing": after(factor=1 / rate),
        f"divided by the {WORLD} ranks: nothing is averaged here, each gradient is a step": after(
            factor=1 / WORLD
        ),
        "only one step was taken": after("once"),
        "the gradients were added up, and applied at the end: each has to be in the memory when "
        "the next is computed": after("late"),
    }
    what = "the shared weights in the end"
    yield value(answer.value["weights"], after(), table(wrong), what=what)
    yield facts({_OVERWRITTEN: answer.value["overwritten"]})


_OVERWRITTEN = (
    "the updates of other ranks were overwritten: between reading and writing others have added to "
    "the weights. Do not write back a copy: change shared in place, shared -= lr · gradient"
)


def _nothing(calls: list[dict]) -> str | None:
    """Return what breaks the rule that nothing is communicated."""
    if not calls:
        return None
    return f"it calls {calls[0]['op']}: with Hogwild nothing is communicated, the memory is shared"


def _after_hogwild(
    start: torch.Tensor, seed: int, rate: float, steps: int, mistake: str = "", factor: float = 1.0
) -> list[float]:
    """Return what the memory holds in the end: if all is right, or after a mistake.

    Args:
        mistake: "back": a copy is written back, which others' updates are not in; "first": all
            gradients are those at the start; "early": weights are read before more() is asked;
            "once": one step is taken; "late": all steps are taken at the end.
        factor: what each step is multiplied by.
    """
    shared = start.clone()
    owed = 0
    for k in range(steps):
        before = shared.clone()
        shared += _of_others(seed + 400, k, len(start))
        read = shared.clone()
        at = {"first": start, "early": before}.get(mistake, read)
        gradient = toy_gradient(at, seed, k)
        shared += _of_others(seed, k, len(start))
        if mistake == "late":
            owed = owed + rate * gradient
        elif mistake != "once" or k == 0:
            shared = (read if mistake == "back" else shared) - factor * rate * gradient
    return (shared - owed).tolist()


# -- 7.6 --------------------------------------------------------------------------------------


def _counters(times: int) -> int:
    """Return how many there are: another number for each number of updates."""
    return 5 * (times + 1)


@contextlib.contextmanager
def _shared_counters(count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Share zeros among all ranks, with a file to lock them by; all ranks do this."""
    path = [None]
    if dist.get_rank() == SERVER:
        file, path[0] = tempfile.mkstemp(prefix="lost-updates-")
        os.ftruncate(file, 4 * count)
        os.close(file)
    dist.broadcast_object_list(path, src=SERVER)
    counters = torch.from_file(path[0], shared=True, size=count)
    lock = os.open(path[0], os.O_RDWR)
    dist.barrier()
    try:
        if dist.get_rank() == SERVER:
            os.unlink(path[0])
        yield counters, lock
    finally:
        os.close(lock)


def probe_count(user_ns: dict, *, rank: int, seed: int, times: int) -> dict:
    """Call `count_lost` with updates of which a known part is lost."""
    from torch_mpi.record import log

    function = answer_named(user_ns, "count_lost")
    keep = _kept(seed, rank, times)  # what is lost of the others' is their secret
    made: list[int] = []
    together: list[bool] = []  # at each update: whether the ranks have met

    with _shared_counters(_counters(times)) as (counters, lock):

        def update(tensor: torch.Tensor) -> None:
            if len(made) == times:
                raise RuntimeError(f"update was called more than {times} times on a rank")
            if tensor.data_ptr() != counters.data_ptr():
                raise ValueError(
                    "update got another tensor than counters: its memory is not shared with the "
                    "other ranks"
                )
            if rank == WORLD - 1:
                time.sleep(0.002)
            fcntl.flock(lock, fcntl.LOCK_EX)
            counters.add_(keep[len(made)])
            fcntl.flock(lock, fcntl.LOCK_UN)
            together.append(any(c.op in TOGETHER and c.end for c in log.since(mark)))
            made.append(log.mark() - mark)

        mark = log.mark()
        result, calls = recorded(function, counters, update, times)
        dist.barrier()
    return {
        "result": number(result),
        "made": len(made),
        "before": bool(together and together[0]),
        "after": len(calls) - made[-1] if made else 0,
        "calls": calls,
    }


def _kept(seed: int, rank: int, times: int) -> torch.Tensor:
    """Return which updates of a rank arrive: 1, and 0 for lost ones. The first all do."""
    draw = torch.Generator().manual_seed(seed)
    kept = (torch.rand(times, _counters(times), generator=draw) > 0.1 + 0.1 * rank).float()
    kept[0] = 1
    kept[:, 0] = 1
    return kept


@task("7.6", "lost updates, counted", points=2)
def count_lost(ranks: Ranks, report: Report) -> None:
    """Check that all begin and end together, and the share of updates that is missing."""
    if not enough(ranks, report):
        return
    cases = (
        {"each": to_each(seed=report.seeds(WORLD)), "times": times, "patience": 20.0}
        for times in (7, 3)
    )
    report.judge_cases(ranks, probe_count, cases, _lost)


def _lost(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield the steps that ranks begin together, and find the share of lost updates."""
    times = case["times"]
    made = answer.value["made"]
    miscounted = f"update(counters) was called {made} times, expected {times}, on each rank"
    yield facts({miscounted: made != times})
    apart = {
        "begins without the others: who is first may be done before the next one starts, and "
        "nothing collides. dist.barrier() before the first update": not answer.value["before"],
        "reads the counters when its own updates are done; those of others may still come, and "
        "would be counted as lost. dist.barrier() after the last update": not answer.value["after"],
    }
    yield facts(apart, kind="communication")
    yield communication(answer.value["calls"], some(range(WORLD)))
    kept = torch.stack([_kept(each["seed"], r, times) for r, each in enumerate(case["each"])])
    share = 1 - kept.sum((0, 1)).mean().item() / (WORLD * times)
    yield value(
        answer.value["result"],
        share,
        _wrong_shares(kept, answer.rank, times, share),
        what=f"times={times}: the lost share",
        form="the share of updates that are lost",
        tolerance=1e-4,
    )


def _wrong_shares(kept: torch.Tensor, rank: int, times: int, share: float) -> list[Mistake]:
    """Return wrong shares of lost updates; kept: of each rank and update, in which counters."""
    counters = kept.sum((0, 1))
    updates = WORLD * times
    wrong = {
        "this is the share that arrived: the lost one is 1 minus it": 1 - share,
        "a share from 0 to 1, not percent": 100 * share,
        "this is how many are lost: divide by the number of all updates": share * updates,
        f"all {WORLD} ranks update: {WORLD} · times updates were made": 1
        - counters.mean().item() / times,
        "the first counter lost nothing, or the largest: take the mean of all": 0,
        "this is the counter that lost most: take the mean of all": 1
        - counters.min().item() / updates,
        "sum over the counters, but one counter's updates: take the mean of the counters": 1
        - counters.sum().item() / updates,
        "the sign: missing / made": -share,
        "these are this rank's own updates: read all of counters": 1
        - kept[rank].sum(0).mean().item() / times,
    }
    return [NO_NUMBER, *table(wrong)]


# -- 7.7 --------------------------------------------------------------------------------------

# How many weights there are for so many servers: first such that all parts are of the same size.
LENGTHS = {2: 12, 3: 10, 1: 11}


def _weights(seed: int, worker: int, k: int, servers: int) -> torch.Tensor:
    """Return the weights that a worker is sent for its k-th gradient."""
    return numbers(seed + worker + 31 * k, LENGTHS[servers])


def probe_sharded(
    user_ns: dict, *, rank: int, seed: int, servers: list[int], jobs: list
) -> dict | None:
    """Call `work_sharded` with servers of the check's, each of a part of the weights.

    Args:
        seed: of the weights, or of this worker's gradients.
    """
    from torch_mpi.record import log

    steps = {worker: count for worker, count, _ in jobs}
    if rank in servers:
        return {"handed": serve_toys(steps, functools.partial(_part, seed, servers, rank))}
    if rank not in steps:
        return None
    counted = Counted(seed, steps[rank], len(servers))

    def compute(weights: torch.Tensor) -> torch.Tensor:
        counted.compute(weights)
        return _whole(len(weights), seed, len(counted.seen) - 1)

    mark = log.mark()
    empty = torch.empty(LENGTHS[len(servers)])
    function = reading_answer(user_ns, "work_sharded", changes=(1,))
    function(compute, empty, list(servers), counted.more)
    calls = log.since(mark)
    return {
        "early": counted.early,
        "last": empty,
        "open": any(call.op == "recv" and not call.end for call in calls),
        "seen": counted.seen,
        "calls": [as_dict(call) for call in calls],
        "apart": _one_after_the_other(calls),
        "late": _received_late(calls),
    }


def _part(seed: int, servers: list[int], server: int, worker: int, k: int) -> torch.Tensor:
    """Return the part of a worker's k-th weights that a server has."""
    parts = _weights(seed, worker, k, len(servers)).tensor_split(len(servers))
    return parts[servers.index(server)].clone()


def _whole(length: int, seed: int, k: int) -> torch.Tensor:
    """Return the k-th gradient of the worker with this seed; each number tells its place."""
    return numbers(seed + k, length) + 1000 * torch.arange(float(length))


def _one_after_the_other(calls: list) -> str:
    """Return which messages, to different servers, were begun when another had been waited for."""
    farewells = {call.peer: call for call in calls if call.op == "send"}.values()
    for op in ("recv", "send"):
        if _begun_late([call for call in calls if call.op == op and call not in farewells]):
            return op
    return ""


def _begun_late(calls: list) -> bool:
    """Return whether the first message to a server waited for one to another server."""
    group: dict[tuple, float] = {}  # when each message of a round is waited for
    for call in calls:
        if (call.peer, call.nbytes) in group:
            group = {}
        first = min(group.values(), default=math.inf)
        if call.start > first and all(peer != call.peer for peer, _ in group):
            return True
        group[call.peer, call.nbytes] = _waited_for(call)
    return False


def _waited_for(call: Any) -> float:
    """Return when a rank began to wait for a message; infinity if it never did."""
    return min((begin for begin, _ in call.waits), default=math.inf)


def _received_late(calls: list) -> bool:
    """Return whether receiving the next weights begins when a send has been waited for."""
    count: dict[tuple, int] = {}
    begun: list[tuple[int, float]] = []
    first: dict[int, float] = {}
    for call in calls:
        k = count[call.op, call.peer] = count.get((call.op, call.peer), -1) + 1
        if call.op == "recv":
            begun.append((k, call.start))
        else:  # a header and a part in each round
            first[k // 2] = min(first.get(k // 2, math.inf), _waited_for(call))
    return any(k > 0 and start > first.get(k - 1, math.inf) for k, start in begun)


@task("7.7", "several servers, each with a part", points=3)
def work_sharded(ranks: Ranks, report: Report) -> None:
    """Check that all parts come and go at once, and in their places."""
    for servers, workers in (([0, 1], [2, 3, 5]), ([0, 1, 2], [4]), ([3], [1, 2])):
        if not _judge_sharded(ranks, report, servers, workers):
            return


def _judge_sharded(ranks: Ranks, report: Report, servers: list[int], workers: list[int]) -> bool:
    """Ask workers with these servers; return whether all is right."""
    if not enough(ranks, report):
        return False
    jobs = jobs_of(report.seed, workers, 2)
    # The servers alone know the weights before they send them.
    seed, *seeds = report.seeds(1 + WORLD)
    each = to_each(seed=[seed if rank in servers else seeds[rank] for rank in range(WORLD)])
    answers = report.answers(ranks, probe_sharded, each=each, servers=servers, jobs=jobs)
    hint_if_stuck(
        report,
        f"servers = {servers}: the parts are those of weights.tensor_split({len(servers)}). "
        "From each a part comes; to each goes a header and its part of the gradient; leave() "
        "says goodbye to each. What came of it:",
    )
    if not all_came(answers):
        return False
    right = []
    for rank, steps, _ in jobs:
        came = [_weights(seed, rank, k, len(servers)) for k in range(steps + 1)]
        handed = [answers[server].value["handed"][str(rank)] for server in servers]
        worked = Worked(rank, servers, steps, came, seeds[rank], answers[rank].value, handed)
        right.append(report.follow(rank, _sharded(worked)))
    return all(right)


def _sharded(worked: Worked) -> Iterator[Step]:
    """Yield the steps that all parts come and go at once, and in their places."""
    servers = worked.servers
    reply = worked.value
    apart = reply["apart"]
    rules = [some([worked.rank, *servers]), only("send", "recv"), waited]
    if len(servers) > 1:
        rules.append(_not_blocking)
    yield communication(reply["calls"], *rules)
    wrong = {
        "an irecv is still open when the worker has left: start those of the next weights after "
        "more() has said True": reply["open"],
        f"the i{apart} for one server begins only after the wait for another: start them all, then "
        "wait for all. While one server is busy, the other one's link would idle": apart,
        "the irecv of the next weights begins when the sends have been waited for: a server that "
        "sends to this worker waits meanwhile, and so may everybody in a circle. Start isends and "
        "irecvs together, then wait for all of them": reply["late"] and len(servers) > 1,
    }
    yield facts(wrong, kind="communication")
    seen = [weights.tolist() for weights in worked.came[:-1]]
    what = f"servers {servers}: the weights that compute got"
    yield value(reply["seen"], seen, _wrong_weights(worked, seen), what=what)
    yield each_of([worked.in_place()], _parts(worked))


def _wrong_weights(worked: Worked, seen: list[list[float]]) -> list[Mistake]:
    """Return wrong weights for compute; seen: the right ones."""
    count = len(worked.value["seen"])
    steps = worked.steps
    parts = [torch.tensor(weights).tensor_split(len(worked.servers)) for weights in seen]
    elsewhere = [torch.cat(of_step[::-1]).tolist() for of_step in parts]
    wrong = {
        f"compute was called {count} times, more() said True {steps} times": lambda weights: (
            len(weights) != steps
        ),
        "the parts are in wrong places: part k of weights is that of servers[k]": elsewhere,
        "the weights do not change from step to step: receive all parts anew, into "
        "weights": lambda weights: weights[0] in weights[1:],
    }
    return table(wrong)


def _parts(worked: Worked) -> Iterator[Step]:
    """Yield the step for each server that it got its part of the gradients."""
    servers = worked.servers
    gradients = [
        _whole(len(weights), worked.seed, k).tensor_split(len(servers))
        for k, weights in enumerate(worked.came[:-1])
    ]
    first = [part.tolist() for part in gradients[0]]
    elsewhere = Mistake(
        lambda got: any(same(got[0], part) for part in first),
        "this part belongs to another server: part k goes to servers[k]",
    )
    for place, server in enumerate(servers):
        expected = [parts[place].tolist() for parts in gradients]
        beginnings = [torch.cat(parts).tolist()[: len(parts[place])] for parts in gradients]
        said = "every server got the beginning of the gradient: cut it like weights"
        mistakes = [Mistake(beginnings, said)] if place else []
        what = f"the part of the gradient that server {server} got"
        yield value(worked.handed[place], expected, [*mistakes, elsewhere], what=what)


def _not_blocking(calls: list[dict]) -> str | None:
    """Say what does not go by `isend` and `irecv`, the farewell aside: a rule."""
    last: dict[tuple, int] = {
        (call["op"], call["peer"]): k for k, call in enumerate(calls) if call["op"] == "send"
    }
    kept = [call for k, call in enumerate(calls) if k not in last.values()]
    return broken(kept, blocking(False))
